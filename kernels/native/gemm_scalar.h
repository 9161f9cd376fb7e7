// What the units for older CPUs share: the epilogue of one row of a panel, and the loops that are not worth vectors.
#pragma once

#include <cmath>
#include <cstdint>

#include "gemm_kernels.h"
#include "half.h"

namespace pe {

static inline float element(const void* from, int32_t type, int64_t at) {
    return type == F32 ? static_cast<const float*>(from)[at] : to_float(static_cast<const bf16*>(from)[at]);
}

static inline void store_element(const Epilogue& e, int64_t at, float y) {
    if (e.residual) y += element(e.residual, e.out_type, at);
    if (e.out_type == F32) {
        static_cast<float*>(e.out)[at] = y;
    } else {
        static_cast<bf16*>(e.out)[at] = to_bf16(y);
    }
}

// Takes the 32 values of a panel's outputs for one row to their destination. Changes them.
static inline void finish_row(const Epilogue& e, int64_t row, int64_t output, int64_t outputs, float* y) {
    const int64_t count = outputs - output < PANEL ? outputs - output : PANEL;
    if (e.bias) {
        for (int64_t i = 0; i < count; ++i) y[i] += e.bias[output + i];
    }
    if (e.silu_mul) {
        for (int64_t i = 0; i < PANEL / 2 && output + i < outputs; ++i)
            store_element(e, row * e.out_stride + output / 2 + i, y[i] / (1.0f + std::exp(-y[i])) * y[i + PANEL / 2]);
    } else {
        for (int64_t i = 0; i < count; ++i) store_element(e, row * e.out_stride + output + i, y[i]);
    }
}

static inline void narrow_scalar(const float* from, int64_t count, bf16* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = to_bf16(from[i]);
}

static inline void unpack4_scalar(const uint8_t* panel, int64_t inputs, uint8_t offset, uint8_t* bytes) {
    for (int64_t k = 0; k < inputs; k += 8, panel += 128, bytes += 256) {
        for (int64_t i = 0; i < 128; ++i) bytes[i] = static_cast<uint8_t>((panel[i] & 15) + offset);
        for (int64_t i = 0; i < 128; ++i) bytes[128 + i] = static_cast<uint8_t>((panel[i] >> 4) + offset);
    }
}

static inline float to_step(float value) {
    const float q = std::nearbyint(value);
    return q > -127.0f ? (q < 127.0f ? q : 127.0f) : -127.0f;  // a NaN: -127
}

static inline void quantize_rows_scalar(const void* x, DType type, int64_t stride, Range rows,
                                        const QuantizedRows& to) {
    const int64_t group = to.inputs / to.groups;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        int8_t *values = to.values + row * to.inputs, *rests = values + to.rest_of_values();
        float *scales = to.scales + row * to.groups, *rest_scales = scales + to.rest_of_groups();
        int32_t *minus_sums = to.minus_sums + row * to.groups, *minus_rests = minus_sums + to.rest_of_groups();
        uint64_t* masks = to.rest_masks + row * to.mask_words();
        for (int64_t word = 0; word < to.mask_words(); ++word) masks[word] = 0;
        for (int64_t g = 0; g < to.groups; ++g) {
            float peak = 0;
            for (int64_t k = g * group; k < (g + 1) * group; ++k) {
                const float size = std::fabs(element(x, type, row * stride + k));
                peak = size > peak ? size : peak;
            }
            scales[g] = peak;
        }
        const int64_t limit = outlier_bits(scales, to.groups);
        for (int64_t g = 0; g < to.groups; ++g) {
            const float peak = scales[g], inverse = peak > SMALLEST_PEAK ? 127.0f / peak : 0.0f;
            const bool has_rest = bits_of(peak) > limit && inverse > 0.0f;
            int32_t sum = 0, rest_sum = 0;
            for (int64_t k = g * group; k < (g + 1) * group; ++k) {
                const float scaled = element(x, type, row * stride + k) * inverse, q = to_step(scaled);
                values[k] = static_cast<int8_t>(q);
                rests[k] = has_rest ? static_cast<int8_t>(to_step((scaled - q) * REST_STEPS)) : int8_t{0};
                sum += values[k];
                rest_sum += rests[k];
            }
            scales[g] = peak / 127.0f;
            minus_sums[g] = -sum;
            rest_scales[g] = has_rest ? scales[g] / REST_STEPS : 0.0f;
            minus_rests[g] = -rest_sum;
            masks[g / 64] |= uint64_t{has_rest} << (g % 64);
        }
    }
}

}  // namespace pe
