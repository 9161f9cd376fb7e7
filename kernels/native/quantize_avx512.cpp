#include "quantize_avx512.h"

#include <immintrin.h>

#include "gemm_kernels.h"

#define PE_INLINE static inline __attribute__((always_inline))

namespace pe {
namespace {

PE_INLINE __m512 load_bf16(const void* from) {
    const __m256i bits = _mm256_loadu_si256(static_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

PE_INLINE __m512 load_as_float(const void* x, DType type, int64_t at) {
    return type == F32 ? _mm512_loadu_ps(static_cast<const float*>(x) + at)
                       : load_bf16(static_cast<const uint16_t*>(x) + at);
}

float peak_of(const void* x, DType type, int64_t at, int64_t count) {
    __m512 largest = _mm512_setzero_ps();
    for (int64_t k = 0; k < count; k += 16)
        largest = _mm512_max_ps(largest, _mm512_abs_ps(load_as_float(x, type, at + k)));
    return _mm512_reduce_max_ps(largest);
}

PE_INLINE void store_steps(int8_t* to, __m512i q) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(q));
}

}  // namespace

void narrow_avx512(const float* from, int64_t count, bf16* to) {
    for (int64_t i = 0; i < count; i += 16)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
}

void quantize_rows_avx512(const void* x, DType type, int64_t stride, Range rows, const QuantizedRows& to) {
    const int64_t group = to.inputs / to.groups;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        int8_t *values = to.values + row * to.inputs, *rests = values + to.rest_of_values();
        float *scales = to.scales + row * to.groups, *rest_scales = scales + to.rest_of_groups();
        int32_t *minus_sums = to.minus_sums + row * to.groups, *minus_rests = minus_sums + to.rest_of_groups();
        uint64_t* masks = to.rest_masks + row * to.mask_words();
        for (int64_t word = 0; word < to.mask_words(); ++word) masks[word] = 0;
        for (int64_t g = 0; g < to.groups; ++g) scales[g] = peak_of(x, type, row * stride + g * group, group);
        const int64_t limit = outlier_bits(scales, to.groups);
        for (int64_t g = 0; g < to.groups; ++g) {
            const float peak = scales[g], inverse = peak > SMALLEST_PEAK ? 127.0f / peak : 0.0f;
            const bool has_rest = bits_of(peak) > limit && inverse > 0.0f;
            __m512i sum = _mm512_setzero_si512(), rest_sum = _mm512_setzero_si512();
            for (int64_t k = g * group; k < (g + 1) * group; k += 16) {
                const __m512 scaled = _mm512_mul_ps(load_as_float(x, type, row * stride + k), _mm512_set1_ps(inverse));
                const __m512i q = _mm512_cvtps_epi32(scaled);
                sum = _mm512_add_epi32(sum, q);
                store_steps(values + k, q);
                __m512i rest = _mm512_setzero_si512();
                if (has_rest) {
                    const __m512 left = _mm512_sub_ps(scaled, _mm512_cvtepi32_ps(q));
                    rest = _mm512_cvtps_epi32(_mm512_mul_ps(left, _mm512_set1_ps(REST_STEPS)));
                    rest_sum = _mm512_add_epi32(rest_sum, rest);
                }
                store_steps(rests + k, rest);
            }
            scales[g] = peak / 127.0f;
            minus_sums[g] = -_mm512_reduce_add_epi32(sum);
            rest_scales[g] = has_rest ? scales[g] / REST_STEPS : 0.0f;
            minus_rests[g] = has_rest ? -_mm512_reduce_add_epi32(rest_sum) : 0;
            masks[g / 64] |= uint64_t{has_rest} << (g % 64);
        }
    }
}

}  // namespace pe
