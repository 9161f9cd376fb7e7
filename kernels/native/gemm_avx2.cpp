#include <immintrin.h>

#include "gemm_kernels.h"
#include "gemm_scalar.h"

#define PE_INLINE static inline __attribute__((always_inline))

namespace pe {
namespace {

constexpr int INT_ROWS = 3;   // per half panel: 2 x 3 accumulators, and what the product of bytes takes
constexpr int BF16_ROWS = 4;  // per half panel: 2 x 4 accumulators

PE_INLINE __m256 load_half(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

PE_INLINE __m256i broadcast4(const void* from) {
    int32_t value;
    std::memcpy(&value, from, 4);
    return _mm256_set1_epi32(value);
}

PE_INLINE __m256 load_ps(const float* from) { return _mm256_loadu_ps(from); }

// Sums of four neighbouring products of signed bytes. `maddubs` wants one side unsigned: |w| and a with w's sign. No
// pair saturates: 2 * 128 * 127 < 2^15.
PE_INLINE __m256i dot4(__m256i size, __m256i w, __m256i a) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(size, _mm256_sign_epi8(a, w)), _mm256_set1_epi16(1));
}

// Adds one group's products for outputs `first` .. + 16 of the panel to y [ROWS][32]: of the values (`rest` 0), or of
// what is left of them (1).
template <int ROWS>
PE_INLINE void add_group(const IntPanel& w, const QuantizedRows& x, int64_t row, int64_t group, int rest, int64_t first,
                         float* y) {
    const __m256i zero_point = _mm256_set1_epi8(-128);
    const int8_t* a = x.values + row * x.inputs + rest * x.rest_of_values();
    __m256i sum[ROWS][2];
    for (int r = 0; r < ROWS; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
    for (int64_t k = group * w.group; k < (group + 1) * w.group; k += 4) {
        const __m256i* b = reinterpret_cast<const __m256i*>(w.values + k * PANEL + 4 * first);
        const __m256i low = _mm256_sub_epi8(_mm256_loadu_si256(b), zero_point);
        const __m256i high = _mm256_sub_epi8(_mm256_loadu_si256(b + 1), zero_point);
        const __m256i low_size = _mm256_abs_epi8(low), high_size = _mm256_abs_epi8(high);
        for (int r = 0; r < ROWS; ++r) {
            const __m256i four = broadcast4(a + r * x.inputs + k);
            sum[r][0] = _mm256_add_epi32(sum[r][0], dot4(low_size, low, four));
            sum[r][1] = _mm256_add_epi32(sum[r][1], dot4(high_size, high, four));
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        const int64_t at = (row + r) * x.groups + group + rest * x.rest_of_groups();
        for (int half = 0; half < 2; ++half) {
            const int64_t column = group * PANEL + first + 8 * half;
            float* out = y + r * PANEL + first + 8 * half;
            __m256 part = _mm256_cvtepi32_ps(sum[r][half]);
            if (!w.channel_scales) part = _mm256_mul_ps(part, load_half(w.scales + column));
            if (w.mins) {
                const __m256 minus_sum = _mm256_set1_ps(static_cast<float>(x.minus_sums[at]));
                part = _mm256_fnmadd_ps(load_half(w.mins + column), minus_sum, part);
            }
            _mm256_storeu_ps(out, _mm256_fmadd_ps(part, _mm256_set1_ps(x.scales[at]), load_ps(out)));
        }
    }
}

template <int ROWS>
void int_half_tile(const IntPanel& w, const QuantizedRows& x, int64_t row, int64_t first, float* y) {
    for (int64_t group = 0; group < x.groups; ++group) {
        uint64_t any_rest = 0;
        for (int r = 0; r < ROWS; ++r) any_rest |= x.rest_masks[(row + r) * x.mask_words() + group / 64];
        for (int rest = 0; rest <= static_cast<int>(any_rest >> (group % 64) & 1); ++rest)
            add_group<ROWS>(w, x, row, group, rest, first, y);
    }
}

template <int ROWS>
void int_tile(const IntPanel& w, const QuantizedRows& x, int64_t row, int64_t output, int64_t outputs,
              const Epilogue& e) {
    float y[ROWS * PANEL] = {};
    int_half_tile<ROWS>(w, x, row, 0, y);
    int_half_tile<ROWS>(w, x, row, PANEL / 2, y);
    for (int r = 0; r < ROWS; ++r) {
        if (w.channel_scales) {
            for (int64_t i = 0; i < PANEL; i += 8) {
                float* at = y + r * PANEL + i;
                _mm256_storeu_ps(at, _mm256_mul_ps(load_ps(at), load_half(w.scales + i)));
            }
        }
        finish_row(e, row + r, output, outputs, y + r * PANEL);
    }
}

template <int ROWS>
void bf16_half_tile(const uint8_t* panel, int64_t inputs, const bf16* x, int64_t x_stride, int64_t row, int64_t first,
                    float* y) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u));
    __m256 sum[ROWS][2];
    for (int r = 0; r < ROWS; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    for (int64_t k = 0; k < inputs; k += 2) {
        const __m256i* b = reinterpret_cast<const __m256i*>(panel + 2 * (k * PANEL + 2 * first));
        for (int half = 0; half < 2; ++half) {
            const __m256i pair = _mm256_loadu_si256(b + half);
            const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16));
            const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(pair, upper));
            for (int r = 0; r < ROWS; ++r) {
                const bf16* a = x + (row + r) * x_stride + k;
                sum[r][half] = _mm256_fmadd_ps(even, _mm256_set1_ps(to_float(a[0])), sum[r][half]);
                sum[r][half] = _mm256_fmadd_ps(odd, _mm256_set1_ps(to_float(a[1])), sum[r][half]);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        _mm256_storeu_ps(y + r * PANEL + first, sum[r][0]);
        _mm256_storeu_ps(y + r * PANEL + first + 8, sum[r][1]);
    }
}

template <int ROWS>
void bf16_tile(const uint8_t* panel, int64_t inputs, const bf16* x, int64_t x_stride, int64_t row, int64_t output,
               int64_t outputs, const Epilogue& e) {
    float y[ROWS * PANEL];
    bf16_half_tile<ROWS>(panel, inputs, x, x_stride, row, 0, y);
    bf16_half_tile<ROWS>(panel, inputs, x, x_stride, row, PANEL / 2, y);
    for (int r = 0; r < ROWS; ++r) finish_row(e, row + r, output, outputs, y + r * PANEL);
}

void int_block(const IntPanel& w, const QuantizedRows& x, Range rows, int64_t output, int64_t outputs,
               const Epilogue& e, NextPanel) {
    int64_t row = rows.begin;
    for (; row + INT_ROWS <= rows.end; row += INT_ROWS) int_tile<INT_ROWS>(w, x, row, output, outputs, e);
    for (; row < rows.end; ++row) int_tile<1>(w, x, row, output, outputs, e);
}

void bf16_block(const uint8_t* panel, int64_t inputs, const bf16* x, int64_t x_stride, Range rows, int64_t output,
                int64_t outputs, const Epilogue& e, NextPanel) {
    int64_t row = rows.begin;
    for (; row + BF16_ROWS <= rows.end; row += BF16_ROWS)
        bf16_tile<BF16_ROWS>(panel, inputs, x, x_stride, row, output, outputs, e);
    for (; row < rows.end; ++row) bf16_tile<1>(panel, inputs, x, x_stride, row, output, outputs, e);
}

}  // namespace

const KernelSet kernels_avx2{int_block, bf16_block, unpack4_scalar, 0, 0, narrow_scalar, quantize_rows_scalar};

}  // namespace pe
