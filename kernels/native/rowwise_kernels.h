// What `rowwise.cpp` takes from the unit of each instruction set. Rows, or tokens, begin .. end.
#pragma once

#include "kv_cache.h"
#include "rowwise.h"

namespace pe {

struct RowwiseKernels {
    void (*rms_norm)(const RmsNormArgs& args, int64_t begin, int64_t end);
    void (*silu_and_mul)(const SiluAndMulArgs& args, int64_t begin, int64_t end);
    void (*write_kv)(const KVWriteArgs& args, int64_t begin, int64_t end);
};

RowwiseKernels rowwise_kernels_portable();
RowwiseKernels rowwise_kernels_avx2();
RowwiseKernels rowwise_kernels_avx512();

}  // namespace pe
