// A vector of floats as wide as the unit's instruction set, and the few operations on it that the kernels share.
//
// Written with the compiler's vector types, so that one source serves AVX-512, AVX2 and, in a portable unit, whatever
// the platform has (SSE2, NEON). Intrinsics stand only where the compiler would not find the instruction.
// All of it has internal linkage: see abi.h for why.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 says so of its own _mm512_undefined_ps()
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#include "abi.h"

#define PE_ALWAYS_INLINE inline __attribute__((always_inline))

// Makes the compiler hold on to what it has loaded.
#if defined(__x86_64__)
#define PE_KEEP_IN_REGISTER(vector) asm("" : "+v"(vector))
#else
#define PE_KEEP_IN_REGISTER(vector) asm("" : "+w"(vector))
#endif

namespace pe {
namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float f32v __attribute__((vector_size(LANES * 4)));
typedef int32_t i32v __attribute__((vector_size(LANES * 4)));
typedef uint32_t u32v __attribute__((vector_size(LANES * 4)));
typedef uint16_t u16v __attribute__((vector_size(LANES * 2)));

template <typename To, typename From>
PE_ALWAYS_INLINE To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "of one size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// The same address, of which the compiler knows nothing: it keeps this one in a register, and no pointer for each access.
template <typename T>
PE_ALWAYS_INLINE T* hide(T* at) {
    asm("" : "+r"(at));
    return at;
}

PE_ALWAYS_INLINE f32v splat(float value) { return value - f32v{}; }
PE_ALWAYS_INLINE i32v splat_int(int32_t value) { return value - i32v{}; }

PE_ALWAYS_INLINE i32v lane_index() {
    i32v index;
    for (int i = 0; i < LANES; ++i) index[i] = i;
    return index;
}

PE_ALWAYS_INLINE f32v fma(f32v a, f32v b, f32v c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

// b where either is NaN.
PE_ALWAYS_INLINE f32v max(f32v a, f32v b) {
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

PE_ALWAYS_INLINE float reduce_max(f32v v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(v);
#else
    float most = v[0];
    for (int i = 1; i < LANES; ++i) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

PE_ALWAYS_INLINE float reduce_add(f32v v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(v);
#else
    float sum[LANES];
    std::memcpy(sum, &v, sizeof sum);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) sum[i] += sum[i + width];
    return sum[0];
#endif
}

// Loads and stores, whole or of the first `count` lanes (the others read as 0). Loads widen to float, stores round.

PE_ALWAYS_INLINE f32v load(const float* from) {
    f32v v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

PE_ALWAYS_INLINE f32v widen(u16v bits) {
#if defined(__AVX512F__)  // GCC 12 makes six instructions of the conversion below
    return bit_cast<f32v>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bit_cast<__m256i>(bits)), 16));
#elif defined(__AVX2__)
    return bit_cast<f32v>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bit_cast<__m128i>(bits)), 16));
#else
    return bit_cast<f32v>(__builtin_convertvector(bits, u32v) << 16);
#endif
}

PE_ALWAYS_INLINE f32v load(const bf16* from) {
    u16v bits;
    std::memcpy(&bits, from, sizeof bits);
    return widen(bits);
}

PE_ALWAYS_INLINE f32v load(const float* from, int count) {
#if defined(__AVX512F__)
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
#else
    f32v v = {};
    std::memcpy(&v, from, count * sizeof *from);
    return v;
#endif
}

PE_ALWAYS_INLINE f32v load(const bf16* from, int count) {
    u16v bits = {};
    std::memcpy(&bits, from, count * sizeof *from);
    return widen(bits);
}

PE_ALWAYS_INLINE void store(float* to, f32v v) { std::memcpy(to, &v, sizeof v); }

PE_ALWAYS_INLINE u16v round_to_bf16(f32v v) {
#if defined(__AVX512BF16__)
    return bit_cast<u16v>(_mm512_cvtneps_pbh(v));
#else
    const u32v wide = bit_cast<u32v>(v);
    const u32v rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
    const u32v quiet = (wide >> 16) | 0x0040u;
    return __builtin_convertvector((wide & 0x7fffffffu) > 0x7f800000u ? quiet : rounded, u16v);
#endif
}

PE_ALWAYS_INLINE void store(bf16* to, f32v v) {
    const u16v bits = round_to_bf16(v);
    std::memcpy(to, &bits, sizeof bits);
}

template <typename T>
PE_ALWAYS_INLINE void store(T* to, f32v v, int count) {
    T whole[LANES];
    store(whole, v);
    std::memcpy(to, whole, count * sizeof *to);
}

// The first `left` lanes where fewer than LANES are left.
template <typename T>
PE_ALWAYS_INLINE f32v load_upto(const T* from, int64_t left) {
    return left >= LANES ? load(from) : load(from, static_cast<int>(left));
}

template <typename T>
PE_ALWAYS_INLINE void store_upto(T* to, f32v v, int64_t left) {
    if (left >= LANES)
        store(to, v);
    else
        store(to, v, static_cast<int>(left));
}

// Calls body(i, left) for vectors at i = 0, LANES, .. of a row. `left` is LANES, as a constant, but for a last part.
template <int64_t N>
struct Constant {
    constexpr operator int64_t() const { return N; }
};

template <typename Body>
PE_ALWAYS_INLINE void each_vector(int64_t size, const Body& body) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) body(i, Constant<LANES>{});
    if (i < size) body(i, size - i);
}

// 2^x for x in [-126, 127.5], to 2e-7 of its value; exactly 1 at 0. NaN stays NaN.
PE_ALWAYS_INLINE f32v exp2_in_range(f32v x) {
    // Adding 1.5 * 2^23 leaves x rounded to an integer in the low bits.
    const f32v shifted = x + 12582912.0f;
    const f32v fraction = x - (shifted - 12582912.0f);
    f32v p = splat(1.33336498e-3f);
    p = fma(p, fraction, splat(9.61817801e-3f));
    p = fma(p, fraction, splat(5.55041087e-2f));
    p = fma(p, fraction, splat(2.40226507e-1f));
    p = fma(p, fraction, splat(6.93147182e-1f));
    p = fma(p, fraction, splat(1.0f));
    return bit_cast<f32v>(bit_cast<i32v>(p) + (bit_cast<i32v>(shifted) << 23));
}

// 2^x for x <= 127; what is below 2^-126 becomes 2^-126.
PE_ALWAYS_INLINE f32v exp2_clamped(f32v x) { return exp2_in_range(max(splat(-126.0f), x)); }

// To the nearest integer, ties to even, for |value| < 2^22.
PE_ALWAYS_INLINE float nearest(float value) { return (value + 12582912.0f) - 12582912.0f; }

// A head as integers in -127 .. 127: calls put(i, integer) for each, and returns their scale. A NaN among
// them stays visible: it is the scale.
template <typename T, typename Put>
PE_ALWAYS_INLINE float quantize_head(const T* from, int64_t size, const Put& put) {
    float peak = 0;
    for (int64_t i = 0; i < size; ++i) {
        const float value = to_float(from[i]), abs = value < 0 ? -value : value;
        peak = abs > peak || abs != abs ? abs : peak;
    }
    const float inverse = peak > 1e-30f ? 127.0f / peak : 0.0f;
    for (int64_t i = 0; i < size; ++i) {
        const float scaled = to_float(from[i]) * inverse;
        put(i, static_cast<int32_t>(scaled > -127.5f && scaled < 127.5f ? nearest(scaled) : 0.0f));
    }
    return peak / 127.0f;
}

}  // namespace
}  // namespace pe
