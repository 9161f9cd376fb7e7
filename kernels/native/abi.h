// What every translation unit of the library shares: how functions are exported, and the element types they take.
//
// Rules for this folder
//  * The library is plain C++17 behind a plain C ABI: no Python, no torch, no OpenMP. Exported names start with `pe_`.
//  * Hot loops live in one translation unit per instruction set, told apart by the end of the file name: `*_amx.cpp`,
//    `*_avx512.cpp`, `*_avx2.cpp`, and everything else, which runs on any CPU. `build.py` turns the name into compiler flags.
//  * A unit for an instruction set defines no `inline` function or template of external linkage and uses none of the
//    standard library: the linker keeps one copy of such a function for the whole library, possibly the one that only a
//    newer CPU can run. Functions in headers that such units include are therefore `static inline`.
//  * Functions take checked arguments (the Python wrappers check); they do not allocate per call or report errors.
#pragma once

#include <cstdint>
#include <cstring>

#define PE_EXPORT extern "C" __attribute__((visibility("default")))

namespace pe {

// Numbers are part of the ABI: `library.py` mirrors them.
enum DType : int32_t { F32 = 0, BF16 = 1, F16 = 2, INT8 = 3 };  // INT8: of a KV cache alone

struct bf16 {
    uint16_t bits;
};

static inline float to_float(bf16 value) {
    const uint32_t wide = static_cast<uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &wide, sizeof result);
    return result;
}

static inline float to_float(float value) { return value; }

// Round to nearest, ties to even; NaN stays NaN.
static inline bf16 to_bf16(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    if ((wide & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((wide >> 16) | 0x0040u)};
    return {static_cast<uint16_t>((wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16)};
}

}  // namespace pe
