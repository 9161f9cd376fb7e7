// The parts of a forward pass that go token by token, between the products. Compiled once for each instruction set.
#pragma once

#include "abi.h"

namespace pe {

// Where and how a token's heads are turned and kept.
struct HeadsOfToken {
    float* qkv;           // [(H + 2 Hkv) D]; q is turned in place
    void* key;            // [Hkv, D] in the cache, heads `head_stride` elements apart
    void* value;
    const float* cos;     // [D / 2] of the token's position
    const float* sin;
    const float* q_norm;  // [D], or null
    const float* k_norm;
    int64_t head_stride;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t kv_dtype;     // F32 or BF16
    float eps;
};

struct RowKernels {
    // out = x / sqrt(mean(x^2) + eps) * weight, [n], as F32 or BF16. May be in place.
    void (*rms_norm)(const float* x, const float* weight, int64_t n, float eps, void* out, DType out_type);
    // Norms heads (if the model does), turns q and k by the position, and writes k and v to the cache.
    void (*turn_and_keep)(const HeadsOfToken& heads);
    // to = from, rounded.
    void (*narrow)(const float* from, int64_t n, bf16* to);
    // The first largest of x [n], and where it is, if it is larger than `most`.
    void (*largest)(const float* x, int64_t n, int32_t first_index, float* most, int32_t* at);
};

extern const RowKernels rows_portable;
extern const RowKernels rows_avx2;
extern const RowKernels rows_avx512;

}  // namespace pe
