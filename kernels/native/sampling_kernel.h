// Passes over a row of logits, compiled once for each instruction set. See sampling_kernels.h.
#pragma once

#include "sampling_kernels.h"
#include "vector.h"

namespace pe {
namespace {

constexpr float LOG2_E = 1.44269504f;
constexpr float LOWEST = -__builtin_inff();
constexpr float NOT_A_NUMBER = __builtin_nanf("");

PE_ALWAYS_INLINE bool any(i32v mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
    return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

// The rest of a row in a vector, with LOWEST beyond its end.
PE_ALWAYS_INLINE f32v load_or_lowest(const float* from, int64_t left) {
    if (left >= LANES) return load(from);
    return lane_index() < static_cast<int32_t>(left) ? load(from, static_cast<int>(left)) : splat(LOWEST);
}

int64_t argmax_of(const float* values, int64_t count) {
    constexpr int64_t PART = 1024;
    float top = LOWEST;
    int64_t top_part = 0;
    for (int64_t begin = 0; begin < count; begin += PART) {
        const int64_t end = begin + PART < count ? begin + PART : count;
        f32v tops = splat(LOWEST);
        i32v is_nan = {};
        for (int64_t i = begin; i < end; i += LANES) {
            const f32v v = load_or_lowest(values + i, end - i);
            is_nan |= v != v;
            tops = max(tops, v);
        }
        if (any(is_nan)) {
            while (values[begin] == values[begin]) ++begin;
            return begin;
        }
        const float part_top = reduce_max(tops);
        if (part_top > top) {
            top = part_top;
            top_part = begin;
        }
    }
    while (values[top_part] != top) ++top_part;
    return top_part;
}

float scale_row(const float* logits, float temperature, int64_t count, float* scaled, float* block_tops) {
    float top = LOWEST;
    i32v is_nan = {};
    for (int64_t begin = 0; begin < count; begin += SAMPLING_BLOCK) {
        const int64_t end = begin + SAMPLING_BLOCK < count ? begin + SAMPLING_BLOCK : count;
        f32v tops = splat(LOWEST);
        for (int64_t i = begin; i < end; i += LANES) {
            const f32v v = load_or_lowest(logits + i, end - i) / temperature;
            is_nan |= v != v;
            tops = max(tops, v);
            store_upto(scaled + i, v, end - i);
        }
        const float block_top = reduce_max(tops);
        block_tops[begin / SAMPLING_BLOCK] = block_top;
        top = block_top > top ? block_top : top;
    }
    return any(is_nan) ? NOT_A_NUMBER : top;
}

double sum_exp_of(const float* values, int64_t count, float offset, float floor) {
    constexpr int64_t PART = 2048;  // added up in float32
    double total = 0;
    for (int64_t begin = 0; begin < count; begin += PART) {
        const int64_t end = begin + PART < count ? begin + PART : count;
        f32v sums = {};
        for (int64_t i = begin; i < end; i += LANES) {
            const f32v v = load_or_lowest(values + i, end - i);
            const f32v p = exp2_clamped((v - offset) * LOG2_E);
            sums += v >= floor ? p : f32v{};
        }
        total += reduce_add(sums);
    }
    return total;
}

// lowbias32; as kernels/sampling/randomness.py.
PE_ALWAYS_INLINE u32v mix32(u32v z) {
    z ^= z >> 16;
    z *= 0x7feb352du;
    z ^= z >> 15;
    z *= 0x846ca68bu;
    return z ^ (z >> 16);
}

// A score v + noise reaches the goal only if log(w) <= v - goal, w being the token's random number: the noise is
// -log(-log(1 - w)) <= -log(w). And the bits of w, read as an integer, are a lower bound of its logarithm.
void search_row(const float* scaled, int64_t count, uint64_t key, float floor, float goal, void* context,
                float (*consider)(void* context, int64_t token)) {
    const uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
    constexpr float SLACK = 1e-3f;  // of all roundings below, amply
    u32v tokens = bit_cast<u32v>(lane_index());
    for (int64_t i = 0; i < count; i += LANES, tokens += LANES) {
        const f32v v = load_or_lowest(scaled + i, count - i);
        const u32v z = mix32(mix32(tokens * 0x9e3779b9u ^ low) ^ high) & 0x7fffffffu;
        const f32v w = (__builtin_convertvector(bit_cast<i32v>(z), f32v) + 0.5f) * 0x1p-31f;
        const f32v log2_w = __builtin_convertvector(bit_cast<i32v>(w), f32v) * 0x1p-23f - 127.0f;
        const i32v may_win = (log2_w <= (v - goal) * LOG2_E + SLACK) & (v >= floor);
        if (!any(may_win)) continue;
        for (int lane = 0; lane < LANES && i + lane < count; ++lane)
            if (may_win[lane]) goal = consider(context, i + lane);
    }
}

const SamplingKernels kernels_here = {argmax_of, scale_row, sum_exp_of, search_row};

}  // namespace
}  // namespace pe
