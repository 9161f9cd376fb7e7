// A forward pass of the Llama family in one call: embedding, all layers, final norm.
//
// The residual stream is float32 from end to end, as are the sums of all products; the format of the weights says how
// activations are rounded where they meet them. All rows of a step write their keys and values before any row reads.
#pragma once

#include <cstdint>

#include "abi.h"
#include "quant.h"

namespace pe {

// One block. What a model does not have is null. Part of the ABI, as are the structs below: `llama.py` mirrors them.
struct LlamaLayer {
    const float* input_norm;           // [hidden]
    const float* q_norm;               // [D]
    const float* k_norm;               // [D]
    const float* post_attention_norm;  // [hidden]
    const float* qkv_bias;             // [(H + 2 Hkv) D]
    const float* output_bias;          // [hidden]
    const float* gate_up_bias;         // [2 I], in the order of gate_up's rows
    const float* down_bias;            // [hidden]
    const PackedMatrix* qkv[3];        // q | k | v, in as many parts as they have formats; the others null
    const PackedMatrix* output;        // [hidden, H D]
    const PackedMatrix* gate_up;       // [2 I, hidden], in the order that `Epilogue::silu_mul` takes
    const PackedMatrix* down;          // [hidden, I]
};

struct LlamaModel {
    const LlamaLayer* layers;
    const PackedMatrix* embedding;  // [V, hidden]
    const float* final_norm;        // [hidden]; null: what the last layer gives is wanted as it is
    const float* cos;               // [positions, D / 2]
    const float* sin;
    int64_t hidden;
    int64_t inner;                  // I
    int32_t num_layers;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t sliding_window;         // 0: none
    float eps;
    float scale;                    // of attention's scores

    int64_t q_size() const { return int64_t{num_heads} * head_dim; }
    int64_t kv_size() const { return int64_t{num_kv_heads} * head_dim; }
    int64_t qkv_size() const { return q_size() + 2 * kv_size(); }
};

// R rows of sequences with T query tokens in all; a row's are the last of its context.
struct LlamaStep {
    const int32_t* input_ids;        // [T]
    const int32_t* query_start_loc;  // [R + 1]
    const int32_t* seq_lens;         // [R], this step's tokens included
    const int64_t* table_rows;       // [R], which row of block_tables is whose
    const int32_t* block_tables;
    void* const* keys;               // of each layer, in the layout of kv_cache.h
    void* const* values;
    const int64_t* wanted;           // [num_wanted], ascending: tokens whose hidden states are asked for; null: all
    float* hidden;                   // [num_wanted, hidden], after the final norm if the model has one
    void* arena;                     // pe_llama_arena() bytes, aligned to 64
    int64_t table_stride;
    int32_t num_rows;
    int32_t num_tokens;
    int32_t num_wanted;
    int32_t max_seq_len;
    int32_t block_size;
    int32_t kv_dtype;                // F32, BF16 or INT8
};

}  // namespace pe
