// y = x W^T for packed W, with what usually follows it done on the way out.
//
// `linear_share` is one thread's part of it, to be called by every thread of a team inside a region; where one's output
// is the next one's input, a barrier goes between. `linear` is the whole of it in a region of its own.
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

// Activations as a matrix of some format takes them: BF16 weights read bf16 rows, integer weights quantised ones.
struct Activations {
    const bf16* rows;  // [rows, K], or null where `quantized` is in use
    int64_t stride;
    QuantizedRows quantized;
};

// This thread's part of all outputs for `num_rows` rows. All threads of the team call it with the same arguments.
void linear_share(const PackedMatrix& w, const Activations& x, int64_t num_rows, const Epilogue& epilogue,
                  const Team& team);

// This thread's part of bringing x [num_rows, K] into the form that `w` takes; a barrier belongs behind it. `memory`
// has `activation_bytes`, 64-byte aligned, and holds the result (bf16 rows for BF16 weights stay where they are).
Activations prepare_share(const PackedMatrix& w, const void* x, DType type, int64_t stride, int64_t num_rows,
                          void* memory, const Team& team);
int64_t activation_bytes(const PackedMatrix& w, int64_t num_rows);

}  // namespace pe
