// What becomes of a product's sums, 32 outputs of a row at a time, in AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define PE_INLINE static inline __attribute__((always_inline))

namespace pe {
namespace {

PE_INLINE __m512 load_half(const uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

PE_INLINE __m512 widen(const void* from) {
    const __m256i bits = _mm256_loadu_si256(static_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// exp(x) for x <= 0 .. 88, to 1 part in 10^7: 2^n * p(f), as in Cephes.
PE_INLINE __m512 exp_ps(__m512 x) {
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.3f)), _mm512_set1_ps(88.3f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 f = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    f = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), f);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(f, f), _mm512_add_ps(f, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

PE_INLINE __m512 silu(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f), below = _mm512_add_ps(one, exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), x)));
    const __m512 near = _mm512_rcp14_ps(below);  // and one step of Newton's: a division keeps its port for 16 cycles
    return _mm512_mul_ps(x, _mm512_mul_ps(near, _mm512_fnmadd_ps(below, near, _mm512_set1_ps(2.0f))));
}

PE_INLINE __mmask16 mask_below(int64_t count) {
    return count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}

}  // namespace
}  // namespace pe
