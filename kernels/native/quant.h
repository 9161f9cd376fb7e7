// Weights packed for the kernels, and activations quantised to meet them.
//
// A packed matrix holds W [N, K] in panels of 32 outputs, the last one padded with zeros. Within a panel a "step" is the
// few consecutive k that one dot-product instruction takes: the 32 outputs' values of step 0, then those of step 1, ...
//
//   INT8   [N/32][K/4][32][4]     byte = q + 128
//   INT4   [N/32][K/8][32][4]     low four bits: step 2i, high four bits: step 2i + 1. Value q + 8; with mins, q
//   BF16   [N/32][K/2][32][2]
//
// Integers stand for w = scale * q (+ min). Scales (and mins) are fp16: one for each output and `group` consecutive k, as
// [N/32][K/group][32], or with `channel_scales` one for each output, [N/32][32]. Bytes are unsigned so that VNNI
// multiplies them with signed activations; what the offset adds, 128 times the sum of a group's activations, is known
// when these are quantised, and is where accumulators start.
//
// Activations have a scale for each row and group: a few channels of a language model's hidden state are many times
// larger than all others, and with one scale a row these leave the others few bits (perplexity +3.7 %). Even so most of
// the error comes from the groups with such a channel, one in ten or twenty: what rounding left of these, the "rest", is
// quantised once more, with a scale 254 times smaller, and multiplied too.
#pragma once

#include <cstdint>

#include "abi.h"
#include "thread_pool.h"

namespace pe {

constexpr int64_t PANEL = 32;

// A group of activations none of which is larger is taken as zeros: 127 / peak would overflow.
constexpr float SMALLEST_PEAK = 1e-30f;

enum WeightFormat : int32_t { WEIGHT_INT8 = 0, WEIGHT_INT4 = 1, WEIGHT_BF16 = 2 };

// Part of the ABI: `packed.py` mirrors it.
struct PackedMatrix {
    int32_t format;       // WeightFormat
    int32_t group;        // consecutive k that share a scale, a multiple of 16 that divides K; not used by BF16
    int64_t outputs;      // N
    int64_t inputs;       // K, a multiple of 32
    uint8_t* values;      // 64-byte aligned
    uint16_t* scales;     // fp16; null for BF16
    uint16_t* mins;       // fp16, or null where all are zero; not with `channel_scales`
    int32_t channel_scales;

    int64_t panels() const { return (outputs + PANEL - 1) / PANEL; }
    int64_t groups() const { return inputs / group; }
    int64_t panel_bytes() const {
        const int64_t bits = format == WEIGHT_BF16 ? 16 : format == WEIGHT_INT8 ? 8 : 4;
        return PANEL * inputs * bits / 8;
    }
    const uint8_t* panel(int64_t index) const { return values + index * panel_bytes(); }
    int64_t scale_rows() const { return channel_scales ? 1 : groups(); }
    const uint16_t* panel_scales(int64_t index) const { return scales + index * scale_rows() * PANEL; }
    const uint16_t* panel_mins(int64_t index) const { return mins ? mins + index * groups() * PANEL : nullptr; }
};

// Activations [rows, K] as x = scale * q (+ rest_scale * rest), with integers in -127 .. 127. The group is that of the
// weights they will meet. Arrays of the rest follow those of the whole, and have the same shape.
struct QuantizedRows {
    int8_t* values;        // [rows, K]
    float* scales;         // [rows, K / group]
    int32_t* minus_sums;   // [rows, K / group]: minus the sum of a group's values
    uint64_t* rest_masks;  // [rows, words]: bit g of a row is set where group g has a rest. Others' are zeros.
    int64_t inputs;
    int64_t groups;
    int64_t rows;

    int64_t rest_of_values() const { return padded(rows * inputs); }  // from values[i] to its rest
    int64_t rest_of_groups() const { return padded(rows * groups * 4) / 4; }  // from scales[i] or minus_sums[i]
    int64_t mask_words() const { return (groups + 63) / 64; }

    static int64_t bytes(int64_t rows, int64_t inputs, int64_t groups) {
        return 2 * padded(rows * inputs) + 4 * padded(rows * groups * 4) + padded(rows * ((groups + 63) / 64) * 8);
    }

    // Arrays for `rows` rows inside `memory`, which has at least `bytes` of them, 64-byte aligned.
    static QuantizedRows in(void* memory, int64_t rows, int64_t inputs, int64_t groups) {
        char* values = static_cast<char*>(memory);
        char* scales = values + 2 * padded(rows * inputs);
        char* sums = scales + 2 * padded(rows * groups * 4);
        char* masks = sums + 2 * padded(rows * groups * 4);
        return {reinterpret_cast<int8_t*>(values),
                reinterpret_cast<float*>(scales),
                reinterpret_cast<int32_t*>(sums),
                reinterpret_cast<uint64_t*>(masks),
                inputs,
                groups,
                rows};
    }

  private:
    static int64_t padded(int64_t size) { return (size + 63) / 64 * 64; }
};

// Quantises rows.begin .. rows.end of x [*, K] (elements of `type`, rows `stride` elements apart).
void quantize_rows(const void* x, DType type, int64_t stride, Range rows, const QuantizedRows& to);

}  // namespace pe
