#include "quantize_avx2.h"

#include "gemm_kernels.h"
#include "vector.h"

namespace pe {
namespace {

template <typename T>
float peak_of(const T* x, int64_t count) {
    f32v largest = {};
    for (int64_t k = 0; k < count; k += LANES) {
        const f32v size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), load(x + k));
        largest = max(size, largest);  // second, so that a NaN does not count
    }
    return reduce_max(largest);
}

PE_ALWAYS_INLINE __m256i to_steps(f32v scaled) { return _mm256_cvtps_epi32(scaled); }

// 16 integers as bytes. A NaN was the least of all, and becomes -127.
PE_ALWAYS_INLINE void store_steps(int8_t* to, __m256i low, __m256i high) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_max_epi8(bytes, _mm_set1_epi8(-127)));
}

PE_ALWAYS_INLINE int32_t sum_of(const int8_t* bytes, int64_t count) {
    // As unsigned, each 128 more.
    __m128i sum = _mm_setzero_si128();
    for (int64_t k = 0; k < count; k += 16) {
        const __m128i more = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + k)), _mm_set1_epi8(-128));
        sum = _mm_add_epi64(sum, _mm_sad_epu8(more, _mm_setzero_si128()));
    }
    return static_cast<int32_t>(_mm_cvtsi128_si64(sum) + _mm_extract_epi64(sum, 1) - 128 * count);
}

template <typename T>
void quantize_group(const T* x, int64_t size, float inverse, bool has_rest, int8_t* values, int8_t* rests) {
    const f32v factor = splat(inverse), rest_steps = splat(REST_STEPS);
    for (int64_t k = 0; k < size; k += 2 * LANES) {
        const f32v low = load(x + k) * factor, high = load(x + k + LANES) * factor;
        const __m256i low_steps = to_steps(low), high_steps = to_steps(high);
        store_steps(values + k, low_steps, high_steps);
        if (!has_rest) {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(rests + k), _mm_setzero_si128());
            continue;
        }
        store_steps(rests + k, to_steps((low - _mm256_cvtepi32_ps(low_steps)) * rest_steps),
                    to_steps((high - _mm256_cvtepi32_ps(high_steps)) * rest_steps));
    }
}

template <typename T>
void quantize_row(const T* x, int64_t row, const QuantizedRows& to) {
    const int64_t group = to.inputs / to.groups;
    int8_t *values = to.values + row * to.inputs, *rests = values + to.rest_of_values();
    float *scales = to.scales + row * to.groups, *rest_scales = scales + to.rest_of_groups();
    int32_t *minus_sums = to.minus_sums + row * to.groups, *minus_rests = minus_sums + to.rest_of_groups();
    uint64_t* masks = to.rest_masks + row * to.mask_words();
    for (int64_t word = 0; word < to.mask_words(); ++word) masks[word] = 0;
    for (int64_t g = 0; g < to.groups; ++g) scales[g] = peak_of(x + g * group, group);
    const int64_t limit = outlier_bits(scales, to.groups);
    for (int64_t g = 0; g < to.groups; ++g) {
        const float peak = scales[g], inverse = peak > SMALLEST_PEAK ? 127.0f / peak : 0.0f;
        const bool has_rest = bits_of(peak) > limit && inverse > 0.0f;
        quantize_group(x + g * group, group, inverse, has_rest, values + g * group, rests + g * group);
        scales[g] = peak / 127.0f;
        minus_sums[g] = -sum_of(values + g * group, group);
        rest_scales[g] = has_rest ? scales[g] / REST_STEPS : 0.0f;
        minus_rests[g] = has_rest ? -sum_of(rests + g * group, group) : 0;
        masks[g / 64] |= uint64_t{has_rest} << (g % 64);
    }
}

}  // namespace

void quantize_rows_avx2(const void* x, DType type, int64_t stride, Range rows, const QuantizedRows& to) {
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        if (type == F32)
            quantize_row(static_cast<const float*>(x) + row * stride, row, to);
        else
            quantize_row(static_cast<const bf16*>(x) + row * stride, row, to);
    }
}

}  // namespace pe
