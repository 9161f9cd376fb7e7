// Operations that take one row of activations at a time.
#pragma once

#include <cstdint>

#include "abi.h"
#include "thread_pool.h"

namespace pe {

// out = x / sqrt(mean(x^2) + eps) * weight, with x + residual in the place of x where there is a residual.
struct RmsNormArgs {
    const void* x;         // [rows, N], of `dtype`
    const void* residual;  // the same, or null
    void* total;           // [rows, N], of `dtype`: x + residual; may be either of them; not written without a residual
    const void* weight;    // [N], of `weight_dtype`
    void* out;             // [rows, N], of `out_dtype`; may be x if the types agree
    int64_t x_stride;      // elements between rows
    int64_t residual_stride;
    int64_t total_stride;
    int64_t out_stride;
    int64_t num_rows;
    int64_t size;          // N
    int32_t dtype;
    int32_t weight_dtype;
    int32_t out_dtype;
    float eps;
};

// Some of the rows. Computed in float32; the sum and the quotient are rounded to `dtype`, as models were trained.
void rms_norm(const RmsNormArgs& args, Range rows);

// out = silu(gate) * up, where a row of x is gate | up.
struct SiluAndMulArgs {
    const void* x;  // [rows, 2 N], of `dtype`
    void* out;      // [rows, N], of `dtype`
    int64_t x_stride;
    int64_t out_stride;
    int64_t num_rows;
    int64_t size;  // N
    int32_t dtype;
};

void silu_and_mul(const SiluAndMulArgs& args, Range rows);

}  // namespace pe
