// What `sampling.cpp` takes from the unit of each instruction set: passes over a whole row.
#pragma once

#include <cstdint>

namespace pe {

constexpr int64_t SAMPLING_BLOCK = 64;

struct SamplingKernels {
    // The first of the largest, or the first NaN.
    int64_t (*argmax)(const float* values, int64_t count);

    // scaled = logits / temperature, and the largest of each SAMPLING_BLOCK of them. Returns the largest; NaN if any is.
    float (*scale)(const float* logits, float temperature, int64_t count, float* scaled, float* block_tops);

    // The sum of exp(value - offset) over values that are at least `floor` and at most `offset`.
    double (*sum_exp)(const float* values, int64_t count, float offset, float floor);

    // Calls consider(context, token) for every token that is at least `floor` and may reach a score of `goal`, its noise
    // (of `key`) included; what that returns is the goal from then on.
    void (*search)(const float* scaled, int64_t count, uint64_t key, float floor, float goal, void* context,
                   float (*consider)(void* context, int64_t token));
};

SamplingKernels sampling_kernels();  // of the instruction set in use
SamplingKernels sampling_kernels_portable();
SamplingKernels sampling_kernels_avx2();
SamplingKernels sampling_kernels_avx512();

}  // namespace pe
