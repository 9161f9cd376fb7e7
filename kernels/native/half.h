// fp16 in plain C++, for CPUs and compilers without it.
#pragma once

#include <cstdint>
#include <cstring>

namespace pe {

static inline float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t exponent = (half >> 10) & 31u, fraction = half & 1023u;
    float result;
    if (exponent == 0) {  // zero or subnormal: fraction * 2^-24
        result = static_cast<float>(fraction) * 5.9604644775390625e-8f;
        return sign ? -result : result;
    }
    const uint32_t bits = exponent == 31 ? sign | 0x7f800000u | fraction << 13
                                         : sign | (exponent + 112) << 23 | fraction << 13;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

// Round to nearest, ties to even. What is too large becomes infinity.
static inline uint16_t float_to_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return sign | 0x7e00u;
    if (bits >= 0x47800000u) return sign | 0x7c00u;
    if (bits < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the rounded fraction in the lowest bits
        float shifted;
        std::memcpy(&shifted, &bits, sizeof shifted);
        shifted += 0.5f;
        std::memcpy(&bits, &shifted, sizeof bits);
        return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
    }
    bits += 0xfffu + (bits >> 13 & 1u);
    return static_cast<uint16_t>(sign | ((bits - 0x38000000u) >> 13));
}

}  // namespace pe
