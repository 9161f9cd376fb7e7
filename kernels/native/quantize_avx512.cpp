#include "quantize_avx512.h"

#include <immintrin.h>

#include "gemm_kernels.h"

#define PE_INLINE static inline __attribute__((always_inline))
#define PE_INLINE_METHOD inline __attribute__((always_inline))

namespace pe {
namespace {

PE_INLINE __m512 load(const float* from) { return _mm512_loadu_ps(from); }
PE_INLINE __m512 load(const bf16* from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

template <typename T>
PE_INLINE __m512 largest_of(const T* x, int64_t count) {
    __m512 largest = _mm512_setzero_ps();
    for (int64_t k = 0; k < count; k += 16) largest = _mm512_max_ps(largest, _mm512_abs_ps(load(x + k)));
    return largest;
}

PE_INLINE __m512i to_steps(__m512 scaled) { return _mm512_cvtps_epi32(scaled); }

// What rounding left over, in finer steps.
PE_INLINE __m512i rest_of(__m512 scaled, __m512i steps) {
    const __m512 left = _mm512_sub_ps(scaled, _mm512_cvtepi32_ps(steps));
    return to_steps(_mm512_mul_ps(left, _mm512_set1_ps(REST_STEPS)));
}

PE_INLINE void store_steps(int8_t* to, __m512i q) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(q));
}

// 64 integers as bytes, in order.
PE_INLINE void store_steps(int8_t* to, const __m512i (&q)[4]) {
    const __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(q[0], q[1]), _mm512_packs_epi32(q[2], q[3]));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, bytes));
}

// Lane i of the result is what all lanes of vectors[i] are together.
template <typename Combine>
PE_INLINE __m512i reduce_each(const __m512i (&vectors)[16], const Combine& combine) {
    __m512i fours[4];  // a lane of 128 bits has a part of each of four vectors
    for (int i = 0; i < 4; ++i) {
        const __m512i* const v = vectors + 4 * i;
        const __m512i a = combine(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
        const __m512i b = combine(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
        fours[i] = combine(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    }
    __m512i halves[2];
    for (int i = 0; i < 2; ++i)
        halves[i] = combine(_mm512_shuffle_i64x2(fours[2 * i], fours[2 * i + 1], 0x44),
                            _mm512_shuffle_i64x2(fours[2 * i], fours[2 * i + 1], 0xee));
    return combine(_mm512_shuffle_i64x2(halves[0], halves[1], 0x88), _mm512_shuffle_i64x2(halves[0], halves[1], 0xdd));
}

constexpr int64_t USUAL_GROUP = 32;
constexpr int64_t TOGETHER = 16;  // groups: one for each lane

// One row's values, and where they go.
template <typename T>
class RowQuantizer {
  public:
    RowQuantizer(const T* x, int64_t row, const QuantizedRows& to)
        : x_(x), groups_(to.groups), group_(to.inputs / to.groups), values_(to.values + row * to.inputs),
          rests_(values_ + to.rest_of_values()), scales_(to.scales + row * to.groups),
          rest_scales_(scales_ + to.rest_of_groups()), minus_sums_(to.minus_sums + row * to.groups),
          minus_rests_(minus_sums_ + to.rest_of_groups()), masks_(to.rest_masks + row * to.mask_words()),
          together_(group_ == USUAL_GROUP ? groups_ / TOGETHER * TOGETHER : 0) {
        for (int64_t word = 0; word < to.mask_words(); ++word) masks_[word] = 0;
    }

    void run() {
        for (int64_t g = 0; g < together_; g += TOGETHER) find_peaks(g);
        for (int64_t g = together_; g < groups_; ++g)
            scales_[g] = _mm512_reduce_max_ps(largest_of(x_ + g * group_, group_));
        const int64_t limit = outlier_bits(scales_, groups_);
        for (int64_t g = 0; g < together_; g += TOGETHER) quantize_together(g, limit);
        for (int64_t g = together_; g < groups_; ++g) quantize(g, limit);
    }

  private:
    // Of TOGETHER groups, where their scales will be.
    PE_INLINE_METHOD void find_peaks(int64_t first) {
        __m512i largest[TOGETHER];
        for (int64_t i = 0; i < TOGETHER; ++i)
            largest[i] = _mm512_castps_si512(largest_of(x_ + (first + i) * USUAL_GROUP, USUAL_GROUP));
        const auto larger = [](__m512i a, __m512i b) {
            return _mm512_castps_si512(_mm512_max_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b)));
        };
        _mm512_storeu_si512(scales_ + first, reduce_each(largest, larger));
    }

    PE_INLINE_METHOD void quantize_together(int64_t first, int64_t limit) {
        const __m512 peaks = _mm512_loadu_ps(scales_ + first);
        const __mmask16 counts = _mm512_cmp_ps_mask(peaks, _mm512_set1_ps(SMALLEST_PEAK), _CMP_GT_OQ);
        const __m512 steps = _mm512_set1_ps(127.0f), scales = _mm512_div_ps(peaks, steps);
        const int32_t most_usual = static_cast<int32_t>(limit < INT32_MAX ? limit : INT32_MAX);
        const __m512 factors = _mm512_maskz_div_ps(counts, steps, peaks);  // 0 where there is nothing, or infinity
        alignas(64) float inverses[TOGETHER];
        _mm512_store_ps(inverses, factors);
        const __mmask16 are_numbers = _mm512_cmp_ps_mask(factors, _mm512_setzero_ps(), _CMP_GT_OQ);
        const __mmask16 have_rest =
            _mm512_mask_cmpgt_epi32_mask(are_numbers, _mm512_castps_si512(peaks), _mm512_set1_epi32(most_usual));
        alignas(64) int32_t minus_rests[TOGETHER] = {};
        __m512i sums[TOGETHER];
        for (int64_t i = 0; i < TOGETHER; i += 2) {
            const int64_t at = (first + i) * USUAL_GROUP;
            __m512i q[4];
            for (int64_t k = 0; k < 4; ++k)
                q[k] = to_steps(_mm512_mul_ps(load(x_ + at + 16 * k), _mm512_set1_ps(inverses[i + k / 2])));
            store_steps(values_ + at, q);
            for (int64_t k = 0; k < 2; ++k) sums[i + k] = _mm512_add_epi32(q[2 * k], q[2 * k + 1]);
            _mm512_storeu_si512(rests_ + at, _mm512_setzero_si512());
            for (int64_t k = 0; k < 2; ++k)
                if (have_rest >> (i + k) & 1) minus_rests[i + k] = store_rest(first + i + k, inverses[i + k]);
        }
        const auto sum = [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); };
        _mm512_storeu_ps(scales_ + first, scales);
        _mm512_storeu_si512(minus_sums_ + first, _mm512_sub_epi32(_mm512_setzero_si512(), reduce_each(sums, sum)));
        _mm512_storeu_ps(rest_scales_ + first, _mm512_maskz_div_ps(have_rest, scales, _mm512_set1_ps(REST_STEPS)));
        _mm512_storeu_si512(minus_rests_ + first, _mm512_load_si512(minus_rests));
        masks_[first / 64] |= uint64_t{have_rest} << (first % 64);
    }

    // Returns minus the sum of the group's rests.
    int32_t store_rest(int64_t g, float inverse) {
        __m512i sum = _mm512_setzero_si512();
        for (int64_t k = g * group_; k < (g + 1) * group_; k += 16) {
            const __m512 scaled = _mm512_mul_ps(load(x_ + k), _mm512_set1_ps(inverse));
            const __m512i rest = rest_of(scaled, to_steps(scaled));
            sum = _mm512_add_epi32(sum, rest);
            store_steps(rests_ + k, rest);
        }
        return -_mm512_reduce_add_epi32(sum);
    }

    void quantize(int64_t g, int64_t limit) {
        const float peak = scales_[g], inverse = peak > SMALLEST_PEAK ? 127.0f / peak : 0.0f;
        const bool has_rest = bits_of(peak) > limit && inverse > 0.0f;
        __m512i sum = _mm512_setzero_si512();
        for (int64_t k = g * group_; k < (g + 1) * group_; k += 16) {
            const __m512i q = to_steps(_mm512_mul_ps(load(x_ + k), _mm512_set1_ps(inverse)));
            sum = _mm512_add_epi32(sum, q);
            store_steps(values_ + k, q);
            store_steps(rests_ + k, _mm512_setzero_si512());
        }
        scales_[g] = peak / 127.0f;
        minus_sums_[g] = -_mm512_reduce_add_epi32(sum);
        rest_scales_[g] = has_rest ? scales_[g] / REST_STEPS : 0.0f;
        minus_rests_[g] = has_rest ? store_rest(g, inverse) : 0;
        masks_[g / 64] |= uint64_t{has_rest} << (g % 64);
    }

    const T* const x_;
    const int64_t groups_;
    const int64_t group_;
    int8_t* const values_;
    int8_t* const rests_;
    float* const scales_;
    float* const rest_scales_;
    int32_t* const minus_sums_;
    int32_t* const minus_rests_;
    uint64_t* const masks_;
    const int64_t together_;  // the first so many groups
};

template <typename T>
void quantize_rows_of(const T* x, int64_t stride, Range rows, const QuantizedRows& to) {
    for (int64_t row = rows.begin; row < rows.end; ++row) RowQuantizer<T>(x + row * stride, row, to).run();
}

}  // namespace

void narrow_avx512(const float* from, int64_t count, bf16* to) {
    for (int64_t i = 0; i < count; i += 16)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
}

void quantize_rows_avx512(const void* x, DType type, int64_t stride, Range rows, const QuantizedRows& to) {
    if (type == F32)
        quantize_rows_of(static_cast<const float*>(x), stride, rows, to);
    else
        quantize_rows_of(static_cast<const bf16*>(x), stride, rows, to);
}

}  // namespace pe
