// The KV cache's layout, and what fills it.
//
// The cache is opaque to all but these kernels: [num_blocks, block_size, Hkv, D] tells its size, not its order. A block
// holds its kv heads one after the other, each in units of 32 bits (one float32, or STEP = 2 bfloat16) that stand as
// attention multiplies them:
//   keys   [D / STEP][block_size][STEP]: a vector takes the same dimensions of neighbouring positions
//   values [block_size / STEP][D][STEP]: a vector takes neighbouring dimensions of STEP positions
// So no key is transposed and no value interleaved when it is read, which happens far more often than that it is written.
//
// An INT8 cache is [num_blocks, block_size, Hkv, D + 4] bytes: each key and value is D integers in -127 .. 127 and their
// scale, a float32 of its own for each token and head. A head of a block holds
//   keys   [D / 4][block_size][4] bytes, each an integer + 128, then scales [block_size]
//   values [block_size][D] bytes, signed, then scales [block_size]
#pragma once

#include <cstdint>

#include "abi.h"
#include "thread_pool.h"

namespace pe {

struct KVWriteArgs {
    void* q;              // [T, H, D], changed in place; null: there are no queries to rotate
    const void* k;        // [T, Hkv, D]
    const void* v;        // [T, Hkv, D]
    void* keys;           // of the cache
    void* values;
    const void* q_norm;   // [D], of `dtype`: weights of an RMS norm over each head; null: none
    const void* k_norm;
    const float* cos;     // [max_positions, D / 2]; null: nothing is rotated
    const float* sin;
    const int64_t* positions;     // [T]
    const int64_t* slot_mapping;  // [T], block * block_size + offset
    int64_t q_stride;     // elements between tokens
    int64_t k_stride;
    int64_t v_stride;
    int64_t num_tokens;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;     // even, at most MAX_HEAD_DIM; with INT8 a multiple of 4
    int32_t block_size;   // even
    int32_t dtype;        // of q, k, v and the norms: F32 or BF16
    int32_t kv_dtype;     // of the cache: F32, BF16 or INT8
    float eps;
};

constexpr int32_t MAX_HEAD_DIM = 512;

// Bytes of a head of a block of an INT8 cache.
static inline int64_t int8_head_bytes(int64_t block_size, int64_t head_dim) { return block_size * (head_dim + 4); }

// For some of the tokens: normalises and rotates queries in place, and writes normalised and rotated keys, and values, to
// their slots. Dimension i turns with i + D / 2. Norms and rotations are float32; each is rounded to `dtype`.
void write_kv(const KVWriteArgs& args, Range tokens);

}  // namespace pe
