// Attention over the paged KV cache: decode rows, prefill chunks and anything between, in one call.
//
// Query tokens are packed row after row; those of a row are the last positions of its context. Keys and values are read
// where they lie, through the row's block table, in the layout of kv_cache.h. Scores, softmax and sums are float32; on AVX-512 a bfloat16 cache is
// multiplied in bfloat16 (queries and probabilities are rounded to it), everything else in float32. For an INT8 cache
// queries are rounded to int8 too, with a scale for each head, and scores are products of integers; values are widened
// (to bfloat16 on AVX-512, else to float32).
//
// On AMX a bfloat16 cache is multiplied in tiles where head_dim is a multiple of 32 and block_size one of 16, whatever the
// number of rows.
//
// A query's result depends on its context alone, bit by bit: not on the rows it is batched with, on how its prompt was
// cut into chunks, or on the number of threads. Contexts are therefore cut at fixed positions (ATTENTION_PARTITION),
// whoever works on the parts, and parts are merged in order.
#pragma once

#include <cstdint>

#include "abi.h"
#include "thread_pool.h"

namespace pe {

// Positions of a context that are summed up before they are merged into the total; the unit of work that threads share.
constexpr int64_t ATTENTION_PARTITION = 256;

struct AttentionArgs {
    const void* q;         // [T, H, D], tokens `q_stride` elements apart
    void* out;             // [T, H, D], tokens `out_stride` elements apart; must not overlap q
    const void* keys;      // of kv_dtype, in the layout of kv_cache.h
    const void* values;
    const int32_t* query_start_loc;  // [R + 1]
    const int32_t* seq_lens;         // [R], this step's tokens included
    const int32_t* block_tables;     // [R, table_stride]
    void* workspace;                 // attention_workspace() bytes, aligned to 64; may be null where that is 0
    int64_t q_stride;
    int64_t out_stride;
    int64_t table_stride;
    int32_t num_rows;
    int32_t num_heads;     // a multiple of num_kv_heads
    int32_t num_kv_heads;
    int32_t head_dim;      // even, at most ATTENTION_MAX_HEAD_DIM
    int32_t block_size;    // even
    int32_t sliding_window;  // a query at p sees p - sliding_window + 1 .. p; 0: everything up to p
    int32_t is_causal;       // 0: a query sees its whole context
    int32_t q_dtype;         // of q and out: F32 or BF16
    int32_t kv_dtype;        // F32, BF16 or INT8
    int32_t num_threads;     // that the work is cut for
    float scale;             // above 0
};

constexpr int32_t ATTENTION_MAX_HEAD_DIM = 512;
constexpr int32_t ATTENTION_MAX_GROUP = 64;  // query heads to a kv head

// Bytes of workspace for `args` (its pointers are not read) with contexts of up to `max_seq_len` positions.
int64_t attention_workspace(const AttentionArgs& args, int64_t max_seq_len);

// All of it: one phase, or two where contexts are divided among threads. `args.num_threads` is `phases.num_threads()`.
void attention(Phases& phases, const AttentionArgs& args);

}  // namespace pe
