// y = x W^T for packed W, with what usually follows it done on the way out.
//
// A product is two phases of a region: `prepare` brings the rows of x into the form that W's kernels take, `linear` does
// the rest. Either is cut into units that any thread may take: `linear_units` of them, `num_rows` of the first.
#pragma once

#include <cstdint>

#include "abi.h"
#include "quant.h"
#include "thread_pool.h"

namespace pe {

// What becomes of y [rows, N]. Part of the ABI: `packed.py` mirrors it.
struct Epilogue {
    void* out;             // [rows, N], or [rows, N / 2] with `silu_mul`
    int64_t out_stride;    // elements between rows
    int32_t out_type;      // DType: F32 or BF16
    int32_t silu_mul;      // 1: each panel of W holds 16 gate and the 16 up outputs to them; out = silu(gate) * up
    const float* bias;     // [N], or null. In W's row order.
    const void* residual;  // added last; of out's type, shape and stride, and may be `out` itself; or null
};

// Activations as a matrix of some format takes them: BF16 weights read bf16 rows, integer weights quantised ones. By tiles
// all weights read bf16 rows; for integers these are `tile_rows` (gemm_amx.h).
struct Activations {
    const bf16* rows;  // [rows, K], or null where `quantized` is in use
    int64_t stride;
    QuantizedRows quantized;
};

// The type that activations have best on their way to such a matrix.
DType activation_type(const PackedMatrix& w);

// What `prepare` makes for rows of x (elements of `type`, F32 or BF16; `stride` between rows), before it has: where it is
// inside `memory`, which has `activation_bytes`, 64-byte aligned. bf16 rows for BF16 weights stay where they are.
Activations activations_for(const PackedMatrix& w, const void* x, DType type, int64_t stride, int64_t num_rows,
                            void* memory);
int64_t activation_bytes(const PackedMatrix& w, int64_t num_rows);

// Whether `prepare_rows` has anything to do for x of such a type.
bool needs_preparing(const PackedMatrix& w, DType type);

// Fills `to` for the rows `rows` of x.
void prepare_rows(const PackedMatrix& w, const void* x, DType type, int64_t stride, Range rows, const Activations& to);

// The pieces that the product of `num_rows` rows falls into, and some of them. First the panels of the first rows, then
// those of the next: so few rows are divided by panels, each of which is read by one thread, and many by rows too.
int64_t linear_units(const PackedMatrix& w, int64_t num_rows);
Range rows_of_block(int64_t num_rows, int64_t block, int64_t blocks);
void linear_part(const PackedMatrix& w, const Activations& x, int64_t num_rows, const Epilogue& epilogue, Range units);

// Both phases. Returns the activations, for other matrices of the same group that take the same x.
Activations linear(Phases& phases, const PackedMatrix& w, const void* x, DType type, int64_t stride, int64_t num_rows,
                   void* memory, const Epilogue& epilogue);

}  // namespace pe
