// Which instruction set the kernels use: the best this CPU has, unless a test asks for a lesser one.
#pragma once

#include <cstdint>

namespace pe {

// Numbers are part of the ABI: `library.py` mirrors them. Each level can run what the ones before it can.
enum Isa : int32_t {
    PORTABLE = 0,
    AVX2 = 1,    // AVX2, FMA, F16C
    AVX512 = 2,  // AVX-512 F, BW, DQ, VL, VNNI, BF16
    AMX = 3,     // AMX TILE and BF16, where the system lets this process use them, and AVX-512 FP16
};

// The level in use. Dispatch on it once per call, not per row.
Isa isa();

}  // namespace pe
