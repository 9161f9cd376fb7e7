// Rows of weights, as checkpoints hold them, written into a packed matrix.
//
// A row becomes small integers with fp32 scales and mins first, by its own format's rules or by rounding; then they are
// put in their places. Formats whose scales are fp16 arrive without loss; K-quants' are products (scale x sub-scale), and
// are rounded to fp16, at most 1 part in 2048.
#include <cmath>
#include <cstdint>

#include "half.h"
#include "quant.h"
#include "scratch.h"

namespace pe {
namespace {

// ggml's numbers.
enum GgmlType : int32_t { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };

// w[k] = scales[k / group] * q[k] + mins[k / group]
struct IntegerRow {
    int8_t* q;
    float* scales;
    float* mins;

    static int64_t bytes(int64_t inputs) { return inputs + 2 * (inputs / 16) * 4 + 64; }
    static IntegerRow in(uint8_t* memory, int64_t inputs) {
        float* scales = reinterpret_cast<float*>(memory);
        float* mins = scales + inputs / 16;
        return {reinterpret_cast<int8_t*>(mins + inputs / 16), scales, mins};
    }
};

float read_half(const uint8_t* from) { return half_to_float(static_cast<uint16_t>(from[0] | from[1] << 8)); }

uint32_t read_u32(const uint8_t* from) {
    return from[0] | from[1] << 8 | from[2] << 16 | static_cast<uint32_t>(from[3]) << 24;
}

// 32 weights in four or five bits each: the first 16 in the low halves of the bytes, the others in the high ones.
void decode_32(const uint8_t* nibbles, uint32_t fifth_bits, int offset, int8_t* q) {
    for (int i = 0; i < 16; ++i) {
        q[i] = static_cast<int8_t>(((nibbles[i] & 15) | (fifth_bits >> i & 1) << 4) - offset);
        q[i + 16] = static_cast<int8_t>(((nibbles[i] >> 4) | (fifth_bits >> (i + 16) & 1) << 4) - offset);
    }
}

void decode_simple(int32_t type, const uint8_t* from, int64_t block, const IntegerRow& to) {
    int8_t* q = to.q + 32 * block;
    to.scales[block] = read_half(from);
    to.mins[block] = type == Q4_1 || type == Q5_1 ? read_half(from + 2) : 0.0f;
    switch (type) {
        case Q4_0: decode_32(from + 2, 0, 8, q); break;
        case Q4_1: decode_32(from + 4, 0, 0, q); break;
        case Q5_0: decode_32(from + 6, read_u32(from + 2), 16, q); break;
        case Q5_1: decode_32(from + 8, read_u32(from + 4), 0, q); break;
        default: std::memcpy(q, from + 2, 32);
    }
}

// Scale and min of sub-block j of a K-quant, six bits each, from the twelve bytes that hold eight of both.
void k_scale_min(int j, const uint8_t* packed, int* scale, int* min) {
    if (j < 4) {
        *scale = packed[j] & 63;
        *min = packed[j + 4] & 63;
    } else {
        *scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4;
        *min = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4;
    }
}

// Q4_K: d, dmin, 12 bytes of scales, 128 of nibbles. Q5_K: 32 bytes of fifth bits before the nibbles.
void decode_q45_k(int32_t type, const uint8_t* from, int64_t block, const IntegerRow& to) {
    const float d = read_half(from), dmin = read_half(from + 2);
    const uint8_t* fifths = type == Q5_K ? from + 16 : nullptr;
    const uint8_t* nibbles = from + (type == Q5_K ? 48 : 16);
    for (int j = 0; j < 8; ++j) {
        int scale, min;
        k_scale_min(j, from + 4, &scale, &min);
        to.scales[8 * block + j] = d * static_cast<float>(scale);
        to.mins[8 * block + j] = -dmin * static_cast<float>(min);
        int8_t* q = to.q + 256 * block + 32 * j;
        for (int i = 0; i < 32; ++i) {
            const uint8_t byte = nibbles[32 * (j / 2) + i];
            const int fifth = fifths ? (fifths[i] >> j & 1) << 4 : 0;
            q[i] = static_cast<int8_t>((j % 2 ? byte >> 4 : byte & 15) | fifth);
        }
    }
}

// Q6_K: 128 bytes of low halves, 64 of upper two bits, 16 signed scales, d. Groups of 16.
void decode_q6_k(const uint8_t* from, int64_t block, const IntegerRow& to) {
    const float d = read_half(from + 208);
    for (int i = 0; i < 16; ++i) {
        to.scales[16 * block + i] = d * static_cast<float>(static_cast<int8_t>(from[192 + i]));
        to.mins[16 * block + i] = 0.0f;
    }
    for (int i = 0; i < 256; ++i) {
        const int half = i / 128, quarter = i % 128 / 32, at = i % 32;
        const uint8_t low = from[64 * half + 32 * (quarter % 2) + at];
        const uint8_t upper = from[128 + 32 * half + at] >> (2 * quarter) & 3;
        to.q[256 * block + i] = static_cast<int8_t>(((quarter < 2 ? low & 15 : low >> 4) | upper << 4) - 32);
    }
}

int64_t block_bytes(int32_t type) {
    switch (type) {
        case Q4_0: return 18;
        case Q4_1: return 20;
        case Q5_0: return 22;
        case Q5_1: return 24;
        case Q8_0: return 34;
        case Q4_K: return 144;
        case Q5_K: return 176;
        case Q6_K: return 210;
        default: return 0;
    }
}

int64_t block_size(int32_t type) { return type >= Q4_K ? 256 : 32; }

int32_t native_group(int32_t type) { return type == Q6_K ? 16 : 32; }

void decode_row(int32_t type, const uint8_t* from, int64_t inputs, const IntegerRow& to) {
    for (int64_t block = 0; block < inputs / block_size(type); ++block, from += block_bytes(type)) {
        if (type == Q6_K) {
            decode_q6_k(from, block, to);
        } else if (type == Q4_K || type == Q5_K) {
            decode_q45_k(type, from, block, to);
        } else {
            decode_simple(type, from, block, to);
        }
    }
}

// To the nearest integer, ties to even, for |value| < 2^22: a function that SSE2 has no instruction for.
float nearest(float value) { return (value + 12582912.0f) - 12582912.0f; }

float clamp(float value, float low, float high) { return value < low ? low : value > high ? high : value; }

// Rounds a value to the fp16 grid, away from zero where it is between: the largest weight still fits.
float round_scale(float value) {
    uint16_t half = float_to_half(value);
    if (std::fabs(half_to_float(half)) < std::fabs(value)) ++half;
    return half_to_float(half);
}

// Symmetric: q in -limit .. limit, the group's largest weight at its end.
void quantize_symmetric(const float* w, int64_t size, int limit, int8_t* q, float* scale) {
    float peak = 0;
    for (int64_t k = 0; k < size; ++k) peak = std::fabs(w[k]) > peak ? std::fabs(w[k]) : peak;
    *scale = round_scale(peak / static_cast<float>(limit));
    const float inverse = *scale > 0 ? 1.0f / *scale : 0.0f;
    const float most = static_cast<float>(limit);
    for (int64_t k = 0; k < size; ++k) q[k] = static_cast<int8_t>(nearest(clamp(w[k] * inverse, -most, most)));
}

// With a min: q in 0 .. 15 between the group's smallest and largest weight.
void quantize_with_min(const float* w, int64_t size, int8_t* q, float* scale, float* min) {
    float least = w[0], most = w[0];
    for (int64_t k = 1; k < size; ++k) {
        least = w[k] < least ? w[k] : least;
        most = w[k] > most ? w[k] : most;
    }
    *min = half_to_float(float_to_half(least));
    *scale = round_scale((most - *min) / 15.0f);
    const float inverse = *scale > 0 ? 1.0f / *scale : 0.0f;
    for (int64_t k = 0; k < size; ++k)
        q[k] = static_cast<int8_t>(nearest(clamp((w[k] - *min) * inverse, 0.0f, 15.0f)));
}

void quantize_row(const PackedMatrix& matrix, const float* w, const IntegerRow& to) {
    const int64_t size = matrix.channel_scales ? matrix.inputs : matrix.group;
    for (int64_t group = 0; group < matrix.inputs / size; ++group) {
        const float* from = w + group * size;
        int8_t* q = to.q + group * size;
        to.mins[group] = 0.0f;
        if (matrix.mins && matrix.format == WEIGHT_INT4) {
            quantize_with_min(from, size, q, to.scales + group, to.mins + group);
        } else {
            quantize_symmetric(from, size, matrix.format == WEIGHT_INT4 ? 7 : 127, q, to.scales + group);
        }
    }
}

// Puts a row in its place. `native` is how many k share one of the row's scales.
void place_row(const PackedMatrix& to, int64_t output, const IntegerRow& row, int64_t native) {
    const int64_t panel = output / PANEL, lane = output % PANEL;
    uint8_t* values = to.values + panel * to.panel_bytes();
    const int offset = to.format == WEIGHT_INT8 ? 128 : to.mins ? 0 : 8;
    // Symmetric four-bit values in a matrix with mins: q in -8 .. 7 becomes q + 8 with -8 * scale.
    int lowest = 0;
    if (to.format == WEIGHT_INT4 && to.mins) {
        for (int64_t k = 0; k < to.inputs; ++k) lowest = row.q[k] < lowest ? row.q[k] : lowest;
    }
    const int shift = lowest < 0 ? 8 : 0;
    const int add = offset + shift;
    uint8_t* at = values + 4 * lane;
    if (to.format == WEIGHT_INT8) {
        for (int64_t k = 0; k < to.inputs; k += 4, at += 4 * PANEL)
            for (int i = 0; i < 4; ++i) at[i] = static_cast<uint8_t>(row.q[k + i] + add);
    } else {
        for (int64_t k = 0; k < to.inputs; k += 8, at += 4 * PANEL)
            for (int i = 0; i < 4; ++i)
                at[i] = static_cast<uint8_t>(((row.q[k + i] + add) & 15) | (row.q[k + 4 + i] + add) << 4);
    }
    const int64_t size = to.channel_scales ? to.inputs : to.group;
    for (int64_t group = 0; group < to.scale_rows(); ++group) {
        const int64_t at = (panel * to.scale_rows() + group) * PANEL + lane, source = group * size / native;
        to.scales[at] = float_to_half(row.scales[source]);
        if (to.mins) to.mins[at] = float_to_half(row.mins[source] - static_cast<float>(shift) * row.scales[source]);
    }
}

void read_floats(const void* from, int32_t type, int64_t start, int64_t count, float* to) {
    switch (type) {  // a loop each, so that each is vectorised
        case F32: std::memcpy(to, static_cast<const float*>(from) + start, static_cast<size_t>(count) * sizeof *to); break;
        case BF16:
            for (int64_t k = 0; k < count; ++k) to[k] = to_float(static_cast<const bf16*>(from)[start + k]);
            break;
        default:
            for (int64_t k = 0; k < count; ++k) to[k] = half_to_float(static_cast<const uint16_t*>(from)[start + k]);
    }
}

void place_bf16_row(const PackedMatrix& to, int64_t output, const float* row) {
    bf16* values = reinterpret_cast<bf16*>(to.values + output / PANEL * to.panel_bytes());
    const int64_t lane = output % PANEL;
    for (int64_t k = 0; k < to.inputs; k += 2) {
        values[(k / 2 * PANEL + lane) * 2] = to_bf16(row[k]);
        values[(k / 2 * PANEL + lane) * 2 + 1] = to_bf16(row[k + 1]);
    }
}

}  // namespace
}  // namespace pe

// Packs rows of floats (`type`: F32, BF16 or F16, contiguous, K long), quantising them where the matrix is of integers:
// source row i becomes output outputs[i]. May be called for different outputs from several threads, a panel in each.
PE_EXPORT void pe_pack_floats(const pe::PackedMatrix* to, const void* from, int32_t type, int64_t num_rows,
                              const int64_t* outputs) {
    using namespace pe;
    const int64_t inputs = to->inputs, native = to->channel_scales ? inputs : to->group;
    uint8_t* memory = thread_scratch(IntegerRow::bytes(inputs) + 4 * inputs);
    float* wide = reinterpret_cast<float*>(memory);
    const IntegerRow row = IntegerRow::in(memory + 4 * inputs, inputs);
    for (int64_t i = 0; i < num_rows; ++i) {
        read_floats(from, type, i * inputs, inputs, wide);
        if (to->format == WEIGHT_BF16) {
            place_bf16_row(*to, outputs[i], wide);
            continue;
        }
        quantize_row(*to, wide, row);
        place_row(*to, outputs[i], row, native);
    }
}

// Packs rows of ggml blocks into a matrix of integers whose group divides the blocks', and which has mins if they do.
PE_EXPORT void pe_pack_blocks(const pe::PackedMatrix* to, const uint8_t* from, int32_t ggml_type, int64_t num_rows,
                              const int64_t* outputs) {
    using namespace pe;
    const IntegerRow row = IntegerRow::in(thread_scratch(IntegerRow::bytes(to->inputs)), to->inputs);
    const int64_t row_bytes = to->inputs / block_size(ggml_type) * block_bytes(ggml_type);
    for (int64_t i = 0; i < num_rows; ++i) {
        decode_row(ggml_type, from + i * row_bytes, to->inputs, row);
        place_row(*to, outputs[i], row, native_group(ggml_type));
    }
}

// The weights that a packed matrix stands for, fp32 [N, K]: what tests and the embedding of a tied head read.
PE_EXPORT void pe_unpack(const pe::PackedMatrix* from, int64_t num_rows, const int64_t* outputs, float* to) {
    using namespace pe;
    const PackedMatrix& m = *from;
    for (int64_t i = 0; i < num_rows; ++i) {
        const int64_t panel = outputs[i] / PANEL, lane = outputs[i] % PANEL;
        const uint8_t* values = m.panel(panel);
        for (int64_t k = 0; k < m.inputs; ++k) {
            float* w = to + i * m.inputs + k;
            if (m.format == WEIGHT_BF16) {
                *w = to_float(reinterpret_cast<const bf16*>(values)[(k / 2 * PANEL + lane) * 2 + k % 2]);
                continue;
            }
            int q;
            if (m.format == WEIGHT_INT8) {
                q = values[(k / 4 * PANEL + lane) * 4 + k % 4] - 128;
            } else {
                const uint8_t pair = values[(k / 8 * PANEL + lane) * 4 + k % 4];
                q = (k / 4 % 2 ? pair >> 4 : pair & 15) - (m.mins ? 0 : 8);
            }
            const int64_t group = m.channel_scales ? 0 : k / m.group, at = group * PANEL + lane;
            *w = half_to_float(m.panel_scales(panel)[at]) * static_cast<float>(q);
            if (m.mins) *w += half_to_float(m.panel_mins(panel)[at]);
        }
    }
}
