// The unit for AVX2's part in preparing activations, apart from its products.
#pragma once

#include "gemm.h"

namespace pe {

void quantize_rows_avx2(const void* x, DType type, int64_t stride, Range rows, const QuantizedRows& to);

}  // namespace pe
