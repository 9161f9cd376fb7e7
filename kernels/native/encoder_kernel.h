// The encoder's loops, compiled once for each instruction set. See encoder.h.
#pragma once

#include "encoder.h"
#include "vector.h"

#if defined(__SSE2__) && !defined(__AVX2__)
#include <emmintrin.h>
#endif

namespace pe {
namespace {

constexpr int VECTORS = static_cast<int>(WIDE_PANEL) / LANES;  // of a panel
constexpr int TILE_ROWS = LANES == 16 ? 12 : LANES == 8 ? 6 : 2;
constexpr float LOG2E = 1.44269504f;
constexpr float HIDDEN_SCORE = -1e30f;

// Adds w[2i] * a[2i] + w[2i + 1] * a[2i + 1] to each 32-bit lane i.
PE_ALWAYS_INLINE i32v add_pairs(i32v sum, i32v a, i32v w) {
#if defined(__AVX512F__)
    return bit_cast<i32v>(_mm512_dpwssd_epi32(bit_cast<__m512i>(sum), bit_cast<__m512i>(a), bit_cast<__m512i>(w)));
#elif defined(__AVX2__)
    return sum + bit_cast<i32v>(_mm256_madd_epi16(bit_cast<__m256i>(a), bit_cast<__m256i>(w)));
#elif defined(__SSE2__)
    return sum + bit_cast<i32v>(_mm_madd_epi16(bit_cast<__m128i>(a), bit_cast<__m128i>(w)));
#else
    return sum + (a << 16 >> 16) * (w << 16 >> 16) + (a >> 16) * (w >> 16);
#endif
}

PE_ALWAYS_INLINE i32v load_ints(const void* from) {
    i32v v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

PE_ALWAYS_INLINE i32v splat_pair(const int16_t* from) {
    int32_t pair;
    std::memcpy(&pair, from, sizeof pair);
#if defined(__AVX512F__)
    return bit_cast<i32v>(_mm512_set1_epi32(pair));
#elif defined(__AVX2__)
    return bit_cast<i32v>(_mm256_set1_epi32(pair));
#else
    return splat_int(pair);
#endif
}

PE_ALWAYS_INLINE f32v to_floats(i32v v) { return __builtin_convertvector(v, f32v); }

// ROWS rows from `row` times panel `index`.
template <int ROWS>
void wide_tile(const WideMatrix& w, const WideRows& x, int64_t row, int64_t index, const WideEpilogue& e) {
    const int64_t padded = w.padded(), groups = w.groups();
    const int16_t* const panel = w.values + index * padded * WIDE_PANEL;
    const float* const scales = w.scales + index * groups * WIDE_PANEL;
    const int16_t* const a = x.values + row * padded;
    f32v y[ROWS][VECTORS] = {};
    for (int64_t group = 0; group < groups; ++group) {
        i32v sum[ROWS][VECTORS] = {};
        const int64_t end = (group + 1) * WIDE_GROUP < padded ? (group + 1) * WIDE_GROUP : padded;
        for (int64_t k = group * WIDE_GROUP; k < end; k += 2) {
            i32v b[VECTORS];
            for (int v = 0; v < VECTORS; ++v) b[v] = load_ints(panel + k * WIDE_PANEL + v * LANES * 2);
            for (int r = 0; r < ROWS; ++r) {
                const i32v pair = splat_pair(a + r * padded + k);
                for (int v = 0; v < VECTORS; ++v) sum[r][v] = add_pairs(sum[r][v], pair, b[v]);
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            const f32v scale = splat(x.scales[(row + r) * groups + group]);
            for (int v = 0; v < VECTORS; ++v)
                y[r][v] = fma(to_floats(sum[r][v]) * load(scales + group * WIDE_PANEL + v * LANES), scale, y[r][v]);
        }
    }
    const int64_t first = index * WIDE_PANEL;
    for (int r = 0; r < ROWS; ++r) {
        const int64_t at = (row + r) * e.stride;
        for (int v = 0; v < VECTORS; ++v) {
            const int64_t output = first + v * LANES, left = w.outputs - output;
            if (left <= 0) break;
            f32v value = y[r][v];
            if (e.bias != nullptr) value = value + load_upto(e.bias + output, left);
            if (e.residual != nullptr) value = value + load_upto(e.residual + at + output, left);
            store_upto(e.out + at + output, value, left);
        }
    }
}

void multiply_here(const WideMatrix& w, const WideRows& x, Range rows, Range panels, const WideEpilogue& e) {
    for (int64_t index = panels.begin; index < panels.end; ++index) {
        int64_t row = rows.begin;
        for (; row + TILE_ROWS <= rows.end; row += TILE_ROWS) wide_tile<TILE_ROWS>(w, x, row, index, e);
        for (; row < rows.end; ++row) wide_tile<1>(w, x, row, index, e);
    }
}

PE_ALWAYS_INLINE float scalar_sqrt(float x) { return __builtin_sqrtf(x); }

// (x - mean) / sqrt(variance + eps) * weight + bias
void norm_here(const NormRows& args, Range rows) {
    const int64_t size = args.size;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        const float* const x = args.x + row * size;
        float* const out = args.out + row * size;
        f32v sum = {};
        each_vector(size, [&](int64_t i, auto left) { sum = sum + load_upto(x + i, left); });
        const float mean = reduce_add(sum) / static_cast<float>(size);
        f32v squares = {};
        each_vector(size, [&](int64_t i, auto left) {
            f32v v = load_upto(x + i, left) - splat(mean);
            if (left < LANES)
                for (int64_t lane = left; lane < LANES; ++lane) v[lane] = 0;
            squares = fma(v, v, squares);
        });
        const f32v factor = splat(1.0f / scalar_sqrt(reduce_add(squares) / static_cast<float>(size) + args.eps));
        each_vector(size, [&](int64_t i, auto left) {
            f32v v = (load_upto(x + i, left) - splat(mean)) * factor * load_upto(args.weight + i, left);
            if (args.bias != nullptr) v = v + load_upto(args.bias + i, left);
            store_upto(out + i, v, left);
        });
    }
}

PE_ALWAYS_INLINE f32v absolute(f32v v) { return bit_cast<f32v>(bit_cast<i32v>(v) & 0x7fffffff); }

void quantize_row(const float* x, const WideRows& to, int64_t row) {
    int16_t* const values = to.values + row * to.padded();
    for (int64_t group = 0; group < to.groups(); ++group) {
        const int64_t begin = group * WIDE_GROUP;
        const int64_t size = to.inputs - begin < WIDE_GROUP ? to.inputs - begin : WIDE_GROUP;
        f32v most = {};
        each_vector(size, [&](int64_t i, auto left) { most = max(absolute(load_upto(x + begin + i, left)), most); });
        const float peak = reduce_max(most);
        // NaN and infinity go on through the scale; next to nothing becomes zeros.
        const bool is_small = peak < 1e-30f;
        to.scales[row * to.groups() + group] = is_small ? 0.0f : peak / WIDE_PEAK;
        const f32v factor = splat(is_small ? 0.0f : WIDE_PEAK / peak);
        each_vector(size, [&](int64_t i, auto left) {
            // Adding 1.5 * 2^23 leaves an integer in the low bits.
            const i32v bits = bit_cast<i32v>(fma(load_upto(x + begin + i, left), factor, splat(12582912.0f)));
            int32_t whole[LANES];
            std::memcpy(whole, &bits, sizeof whole);
            for (int64_t lane = 0; lane < left; ++lane) values[begin + i + lane] = static_cast<int16_t>(whole[lane]);
        });
    }
    for (int64_t i = to.inputs; i < to.padded(); ++i) values[i] = 0;
}

void quantize_here(const float* x, int64_t stride, Range rows, const WideRows& to) {
    for (int64_t row = rows.begin; row < rows.end; ++row) quantize_row(x + row * stride, to, row);
}

PE_ALWAYS_INLINE f32v exp_of(f32v x) { return exp2_clamped(x * LOG2E); }

// Abramowitz and Stegun, 7.1.26: within 1.5e-7.
PE_ALWAYS_INLINE f32v erf(f32v x) {
    const f32v size = absolute(x);
    const f32v t = 1.0f / fma(size, splat(0.3275911f), splat(1.0f));
    f32v p = splat(1.061405429f);
    p = fma(p, t, splat(-1.453152027f));
    p = fma(p, t, splat(1.421413741f));
    p = fma(p, t, splat(-0.284496736f));
    p = fma(p, t, splat(0.254829592f));
    const f32v positive = 1.0f - p * t * exp_of(-(size * size));
    return bit_cast<f32v>(bit_cast<i32v>(positive) | (bit_cast<i32v>(x) & static_cast<int32_t>(0x80000000u)));
}

PE_ALWAYS_INLINE f32v sigmoid(f32v x) {
    const f32v power = exp_of(-absolute(x));  // at most 1
    const f32v low = power / (1.0f + power);
    return x < splat(0.0f) ? low : 1.0f - low;
}

template <int KIND>
PE_ALWAYS_INLINE f32v activation(f32v x) {
    if (KIND == ACT_GELU) return x * 0.5f * (1.0f + erf(x * 0.70710678f));
    if (KIND == ACT_GELU_TANH) return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
    if (KIND == ACT_SILU) return x * sigmoid(x);
    return max(x, splat(0.0f));
}

template <int KIND>
void activate_rows(bool gated, float* x, int64_t inner, Range rows) {
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        float* const at = x + row * inner * (gated ? 2 : 1);
        each_vector(inner, [&](int64_t i, auto left) {
            f32v v = activation<KIND>(load_upto(at + i, left));
            if (gated) v = v * load_upto(at + inner + i, left);
            store_upto(at + i, v, left);
        });
    }
}

void activate_here(int32_t kind, bool gated, float* x, int64_t inner, Range rows) {
    switch (kind) {
        case ACT_GELU: return activate_rows<ACT_GELU>(gated, x, inner, rows);
        case ACT_GELU_TANH: return activate_rows<ACT_GELU_TANH>(gated, x, inner, rows);
        case ACT_SILU: return activate_rows<ACT_SILU>(gated, x, inner, rows);
        default: return activate_rows<ACT_RELU>(gated, x, inner, rows);
    }
}

// --- attention: one sequence and head, keys transposed, so that a vector holds scores of neighbouring keys

constexpr int64_t SPAN = 2 * LANES;
constexpr int QUERIES = LANES == 16 ? 8 : LANES == 8 ? 6 : 2;

PE_ALWAYS_INLINE int64_t up_to_span(int64_t size) { return (size + SPAN - 1) / SPAN * SPAN; }

struct Head {
    int64_t length;
    int64_t padded;      // keys, in whole spans
    int64_t dims;        // of a head
    int64_t wide_dims;   // in whole spans
    float* keys;         // [dims, padded]
    float* values;       // [length, wide_dims]
    float* scores;       // [QUERIES, padded]
    float* queries;      // [QUERIES, dims]
};

PE_ALWAYS_INLINE void turn(const EncoderAttention& args, const float* from, int64_t position, float factor, float* to) {
    const int64_t dims = args.head_dim, half = dims / 2;
    if (args.cos == nullptr) {
        for (int64_t d = 0; d < dims; ++d) to[d] = from[d] * factor;
        return;
    }
    const float* const c = args.cos + position * half;
    const float* const s = args.sin + position * half;
    for (int64_t d = 0; d < half; ++d) {
        to[d] = (from[d] * c[d] - from[d + half] * s[d]) * factor;
        to[d + half] = (from[d + half] * c[d] + from[d] * s[d]) * factor;
    }
}

template <int ROWS>
PE_ALWAYS_INLINE void score(const Head& head, int64_t low, int64_t high) {
    for (int64_t key = low; key < high; key += SPAN) {
        f32v sum[ROWS][2] = {};
        for (int64_t d = 0; d < head.dims; ++d) {
            const f32v first = load(head.keys + d * head.padded + key);
            const f32v second = load(head.keys + d * head.padded + key + LANES);
            for (int r = 0; r < ROWS; ++r) {
                const f32v q = splat(head.queries[r * head.dims + d]);
                sum[r][0] = fma(first, q, sum[r][0]);
                sum[r][1] = fma(second, q, sum[r][1]);
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            store(head.scores + r * head.padded + key, sum[r][0]);
            store(head.scores + r * head.padded + key + LANES, sum[r][1]);
        }
    }
}

// Scores low .. high of a row become weights: 2^(score - largest) of keys begin .. end, 0 of others. Returns their sum.
PE_ALWAYS_INLINE float weigh(float* scores, int64_t low, int64_t high, int64_t begin, int64_t end) {
    for (int64_t key = low; key < begin; ++key) scores[key] = HIDDEN_SCORE;
    for (int64_t key = end; key < high; ++key) scores[key] = HIDDEN_SCORE;
    f32v most = splat(HIDDEN_SCORE);
    for (int64_t key = low; key < high; key += LANES) most = max(load(scores + key), most);
    const f32v largest = splat(reduce_max(most));
    f32v sum = {};
    for (int64_t key = low; key < high; key += LANES) {
        const f32v weight = exp2_clamped(load(scores + key) - largest);
        store(scores + key, weight);
        sum = sum + weight;
    }
    return reduce_add(sum);
}

template <int ROWS>
PE_ALWAYS_INLINE void mix(const Head& head, int64_t begin, int64_t end, const float* factors, float* out,
                          int64_t out_stride) {
    for (int64_t d = 0; d < head.dims; d += SPAN) {
        f32v sum[ROWS][2] = {};
        for (int64_t key = begin; key < end; ++key) {
            const f32v first = load(head.values + key * head.wide_dims + d);
            const f32v second = load(head.values + key * head.wide_dims + d + LANES);
            for (int r = 0; r < ROWS; ++r) {
                const f32v weight = splat(head.scores[r * head.padded + key]);
                sum[r][0] = fma(first, weight, sum[r][0]);
                sum[r][1] = fma(second, weight, sum[r][1]);
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            for (int half = 0; half < 2; ++half) {
                const int64_t at = d + half * LANES;
                if (at < head.dims) store_upto(out + r * out_stride + at, sum[r][half] * factors[r], head.dims - at);
            }
        }
    }
}

template <int ROWS>
void attend_queries(const EncoderAttention& args, const Head& head, const float* q, int64_t first, float* out) {
    const float scale = LOG2E / scalar_sqrt(static_cast<float>(args.head_dim));
    for (int r = 0; r < ROWS; ++r)
        turn(args, q + (first + r) * 3 * args.hidden, first + r, scale, head.queries + r * head.dims);
    const bool is_local = args.window >= 0;
    const int64_t begin = is_local && first > args.window ? first - args.window : 0;
    const int64_t past = first + ROWS + args.window;
    const int64_t end = is_local && past < head.length ? past : head.length;
    const int64_t low = begin / SPAN * SPAN, high = up_to_span(end);
    score<ROWS>(head, low, high);
    float factors[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        const int64_t at = first + r;
        const int64_t own_begin = is_local && at > args.window ? at - args.window : 0;
        const int64_t own_end = is_local && at + args.window + 1 < head.length ? at + args.window + 1 : head.length;
        factors[r] = 1.0f / weigh(head.scores + r * head.padded, low, high, own_begin, own_end);
    }
    mix<ROWS>(head, begin, end, factors, out + first * args.hidden, args.hidden);
}

Head lay_out(int64_t length, int64_t dims, float* memory) {
    Head head{length, up_to_span(length), dims, up_to_span(dims), memory, nullptr, nullptr, nullptr};
    head.values = head.keys + dims * head.padded;
    head.scores = head.values + length * head.wide_dims;
    head.queries = head.scores + QUERIES * head.padded;
    return head;
}

void attend_here(const EncoderAttention& args, int64_t row, int64_t head_index, void* scratch) {
    const int64_t begin = args.query_start_loc[row], length = args.query_start_loc[row + 1] - begin;
    const int64_t dims = args.head_dim, stride = 3 * args.hidden;
    const Head head = lay_out(length, dims, static_cast<float*>(scratch));
    const float* const q = args.qkv + begin * stride + head_index * dims;
    for (int64_t i = 0; i < length; ++i) {
        float* const turned = head.queries;
        turn(args, q + i * stride + args.hidden, i, 1.0f, turned);
        for (int64_t d = 0; d < dims; ++d) head.keys[d * head.padded + i] = turned[d];
        const float* const value = q + i * stride + 2 * args.hidden;
        float* const to = head.values + i * head.wide_dims;
        for (int64_t d = 0; d < dims; ++d) to[d] = value[d];
        for (int64_t d = dims; d < head.wide_dims; ++d) to[d] = 0;
    }
    for (int64_t d = 0; d < dims; ++d)
        for (int64_t i = length; i < head.padded; ++i) head.keys[d * head.padded + i] = 0;
    float* const out = args.out + begin * args.hidden + head_index * dims;
    int64_t first = 0;
    for (; first + QUERIES <= length; first += QUERIES) attend_queries<QUERIES>(args, head, q, first, out);
    for (; first < length; ++first) attend_queries<1>(args, head, q, first, out);
}

constexpr EncoderKernels encoder_kernels_here{multiply_here, norm_here, quantize_here, activate_here, attend_here};

}  // namespace
}  // namespace pe
