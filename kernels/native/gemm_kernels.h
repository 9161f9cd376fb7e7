// The innermost loops of `gemm.cpp`, one set an instruction set: a block of rows times one panel.
#pragma once

#include <cstdint>

#include "gemm.h"

namespace pe {

// One panel of integer weights, as the loops see it.
struct IntPanel {
    const uint8_t* values;
    const uint16_t* scales;  // [groups][32] fp16, or [32] with `channel_scales`
    const uint16_t* mins;    // [groups][32] fp16, or null
    int64_t inputs;
    int32_t group;
    bool channel_scales;
    bool packed4;  // as in INT4, not yet spread to bytes
};

// The panel that a thread will read after the one it is at, to be brought nearer meanwhile. Null where it does not know.
struct NextPanel {
    const uint8_t* at;
    int64_t bytes;
};

struct KernelSet {
    // Rows `rows` of y = x W^T for outputs `first_output` .. + 32, through the epilogue.
    void (*int_block)(const IntPanel& w, const QuantizedRows& x, Range rows, int64_t first_output, int64_t outputs,
                      const Epilogue& epilogue, NextPanel next);
    void (*bf16_block)(const uint8_t* panel, int64_t inputs, const bf16* x, int64_t x_stride, Range rows,
                       int64_t first_output, int64_t outputs, const Epilogue& epilogue, NextPanel next);
    // Spreads a panel of INT4 to the layout of INT8, adding `offset`: what is 128 less the value that stands for 0.
    void (*unpack4)(const uint8_t* panel, int64_t inputs, uint8_t offset, uint8_t* bytes);
    // `int_block` takes `packed4` for groups of this size alone, and for fewer rows than where spreading pays.
    int32_t packed4_group;
    int64_t unpack4_from_rows;
    // Rounds `count` floats, a multiple of 32.
    void (*narrow)(const float* from, int64_t count, bf16* to);
    void (*quantize_rows)(const void* x, DType type, int64_t stride, Range rows, const QuantizedRows& to);
};

// A group has a rest if its peak is above 2^1.75 = 3.4 times the geometric mean of the row's. As integers, floats are
// their logarithms (with straight lines between powers of two), so that every instruction set finds the same groups.
constexpr int64_t OUTLIER_BITS = 7 << 21;
constexpr float REST_STEPS = 254.0f;  // rest_scale = scale / 254: rounding leaves at most half a step, 127 of these

static inline int64_t bits_of(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// The bits above which a peak is an outlier among `peaks`, of which those of zero do not count.
static inline int64_t outlier_bits(const float* peaks, int64_t count) {
    int64_t sum = 0, counted = 0;
    for (int64_t i = 0; i < count; ++i) {
        sum += bits_of(peaks[i]);
        counted += peaks[i] > 0;
    }
    return (counted ? sum / counted : 0) + OUTLIER_BITS;
}

extern const KernelSet kernels_portable;
extern const KernelSet kernels_avx2;
extern const KernelSet kernels_avx512;

}  // namespace pe
