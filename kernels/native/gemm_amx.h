// Products by tiles. All weights are bf16 there: integers become that on their way, a panel at a time.
#pragma once

#include "gemm.h"

namespace pe {

// `linear_part`, of any matrix.
void linear_part_amx(const PackedMatrix& w, const Activations& x, int64_t num_rows, const Epilogue& epilogue, Range units);

// Rows of x (as for `prepare_rows`) as products with integer weights take them: to [*, inputs], of each four neighbours the
// second and third changed over, and all times 2^100.
void tile_rows(const void* x, DType type, int64_t stride, Range rows, int64_t inputs, bf16* to);

}  // namespace pe
