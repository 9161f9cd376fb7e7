// Activations in the form that products take, for `gemm_avx512.cpp`. See `KernelSet`.
#pragma once

#include <cstdint>

#include "quant.h"

namespace pe {

void narrow_avx512(const float* from, int64_t count, bf16* to);
void quantize_rows_avx512(const void* x, DType type, int64_t stride, Range rows, const QuantizedRows& to);

}  // namespace pe
