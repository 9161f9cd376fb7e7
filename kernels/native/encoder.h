// A forward pass of a bidirectional encoder (BERT, RoBERTa, ModernBERT) in one call: embedding, all layers, final norm.
//
// There is no cache: every sequence is whole, and sequences stand one behind the other without padding. The residual
// stream, attention and all norms are float32. Weights and the activations that meet them are 14-bit integers (and a
// sign) with a float32 scale for each 16 of a row: their products add up exactly in 32 bits, two of them an instruction.
#pragma once

#include <cstdint>

#include "abi.h"
#include "thread_pool.h"

namespace pe {

constexpr int64_t WIDE_PANEL = 16;   // outputs of a panel
constexpr int64_t WIDE_GROUP = 16;   // consecutive inputs that share a scale; a row's last group may be smaller
constexpr int64_t WIDE_STEP = 32;    // inputs are padded to a multiple of it, with zeros
constexpr float WIDE_PEAK = 11585.0f; // 11585^2 * 16 < 2^31: the sum of a group never overflows

static inline int64_t wide_inputs(int64_t inputs) { return (inputs + WIDE_STEP - 1) / WIDE_STEP * WIDE_STEP; }
static inline int64_t wide_groups(int64_t inputs) { return (inputs + WIDE_GROUP - 1) / WIDE_GROUP; }

// W [N, K] as w = scale * q. Part of the ABI, as are the structs below: `kernels/encoder/native.py` mirrors them.
struct WideMatrix {
    int16_t* values;  // [N/16][Kp/2][16][2], outputs padded with zeros; 64-byte aligned
    float* scales;    // [N/16][K/64][16]
    int64_t outputs;  // N
    int64_t inputs;   // K

    int64_t panels() const { return (outputs + WIDE_PANEL - 1) / WIDE_PANEL; }
    int64_t padded() const { return wide_inputs(inputs); }
    int64_t groups() const { return wide_groups(inputs); }
};

// Rows of x as x = scale * q.
struct WideRows {
    int16_t* values;  // [rows, Kp]
    float* scales;    // [rows, K/64]
    int64_t inputs;   // K

    int64_t padded() const { return wide_inputs(inputs); }
    int64_t groups() const { return wide_groups(inputs); }
};

enum EncoderActivation : int32_t { ACT_GELU = 0, ACT_GELU_TANH = 1, ACT_RELU = 2, ACT_SILU = 3 };

// One block. What a model does not have is null.
struct EncoderLayer {
    const float* attention_norm;  // [hidden]: after attention, or before it with `pre_norm`
    const float* attention_norm_bias;
    const float* mlp_norm;  // [hidden]: after the MLP, or before it
    const float* mlp_norm_bias;
    const float* qkv_bias;     // [3 hidden]
    const float* output_bias;  // [hidden]
    const float* up_bias;      // [I], or [2 I] where the MLP is gated
    const float* down_bias;    // [hidden]
    const float* cos;          // [positions, D / 2], or null: no rotary positions
    const float* sin;
    const WideMatrix* qkv;     // [3 hidden, hidden]
    const WideMatrix* output;  // [hidden, hidden]
    const WideMatrix* up;      // [I, hidden], or [2 I, hidden]: act(first half) * second half
    const WideMatrix* down;    // [hidden, I]
    int64_t window;            // a token sees those at most so far away; below 0: all
};

struct EncoderModel {
    const EncoderLayer* layers;
    const float* tokens;     // [V, hidden]
    const float* positions;  // [positions, hidden] from a sequence's first, or null
    const float* types;      // [types, hidden], or null
    const float* embedding_norm;
    const float* embedding_norm_bias;
    const float* final_norm;  // null: none
    const float* final_norm_bias;
    int64_t hidden;
    int64_t inner;  // I
    int32_t num_heads;
    int32_t head_dim;
    int32_t pre_norm;
    int32_t gated;
    int32_t activation;  // EncoderActivation
    float eps;
};

// R sequences with T tokens in all.
struct EncoderStep {
    const int32_t* input_ids;        // [T]
    const int32_t* token_types;      // [T], or null: all 0
    const int32_t* query_start_loc;  // [R + 1]
    float* hidden;                   // [T, hidden]
    void* arena;                     // pe_encoder_arena() bytes, aligned to 64
    int64_t num_rows;
    int64_t num_tokens;
    int32_t num_layers;  // that are run; the final norm comes after the last one only
    int32_t is_whole;    // all layers, and the final norm
};

// out = W x, + bias and residual where there are.
struct WideEpilogue {
    float* out;
    int64_t stride;
    const float* bias;
    const float* residual;  // of out's stride; may be out
};

struct NormRows {
    const float* x;  // [rows, size]
    const float* weight;
    const float* bias;  // or null
    float* out;         // may be x
    int64_t size;
    float eps;
};

struct EncoderAttention {
    const float* qkv;  // [T, 3 hidden]
    float* out;        // [T, hidden]
    const int32_t* query_start_loc;
    const float* cos;
    const float* sin;
    int64_t window;
    int64_t hidden;
    int64_t head_dim;
    int64_t num_heads;
};

// What `encoder.cpp` takes from the unit of each instruction set.
struct EncoderKernels {
    void (*multiply)(const WideMatrix& w, const WideRows& x, Range rows, Range panels, const WideEpilogue& e);
    void (*norm)(const NormRows& args, Range rows);
    void (*quantize)(const float* x, int64_t stride, Range rows, const WideRows& to);
    // x [rows, I] -> act(x), or [rows, 2 I] -> act(first half) * second half; in the place of the first I.
    void (*activate)(int32_t activation, bool gated, float* x, int64_t inner, Range rows);
    // Sequence `row`, head `head`; `scratch` has `attention_scratch` bytes.
    void (*attend)(const EncoderAttention& args, int64_t row, int64_t head, void* scratch);
};

int64_t attention_scratch(int64_t length, int64_t head_dim);

const EncoderKernels& encoder_kernels_portable();
const EncoderKernels& encoder_kernels_avx2();
const EncoderKernels& encoder_kernels_avx512();

}  // namespace pe
