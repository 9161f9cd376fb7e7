#include "llama.h"

#include "attention.h"
#include "cpu.h"
#include "gemm.h"
#include "llama_rows.h"
#include "scratch.h"
#include "thread_pool.h"

PE_EXPORT void pe_unpack(const pe::PackedMatrix* from, int64_t num_rows, const int64_t* outputs, float* to);

namespace pe {
namespace {

// Tokens that go through the second half of a layer together: what they need stays in the cache.
constexpr int64_t BLOCK_TOKENS = 512;
constexpr int64_t BLOCK_TOKENS_PER_THREAD = 64;
// Query rows (tokens x heads that share a kv head) of one piece of attention.
constexpr int64_t RUN_ROWS = 128;

const RowKernels& row_kernels() {
    switch (isa()) {
#if defined(__x86_64__)
        case AVX512: return rows_avx512;
        case AVX2: return rows_avx2;
#endif
        default: return rows_portable;
    }
}

int64_t block_tokens(int32_t threads) {
    const int64_t wide = BLOCK_TOKENS_PER_THREAD * threads;
    return wide > BLOCK_TOKENS ? wide : BLOCK_TOKENS;
}

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Neighbouring query tokens of one row, and where among the rows of a block their results go.
struct Run {
    int32_t row;
    int32_t num_tokens;
    int32_t token;
    int32_t out_row;
    int32_t context;  // positions up to the last of them
};

// Runs, in order of their tokens, cut so that none crosses a block.
class Runs {
  public:
    Runs(Run* memory, int64_t block, int64_t most_tokens) : runs_(memory), block_(block), most_tokens_(most_tokens) {}

    // The next token in order, at `position` of its row.
    void add(int32_t row, int32_t token, int32_t position) {
        Run* last = size_ > 0 ? &runs_[size_ - 1] : nullptr;
        const bool goes_on = last != nullptr && num_tokens_ % block_ != 0 && last->row == row &&
                             last->token + last->num_tokens == token && last->num_tokens < most_tokens_;
        if (goes_on) {
            ++last->num_tokens;
            last->context = position + 1;
        } else {
            runs_[size_++] = {row, 1, token, static_cast<int32_t>(num_tokens_ % block_), position + 1};
        }
        ++num_tokens_;
    }

    // Those of the block that begins with the `first`th token; `from` is where those of the block before ended.
    Range of_block(int64_t from, int64_t first) const {
        int64_t end = from, tokens = 0;
        while (end < size_ && tokens < least(block_, num_tokens_ - first)) tokens += runs_[end++].num_tokens;
        return {from, end};
    }

    const Run& operator[](int64_t index) const { return runs_[index]; }
    int64_t num_tokens() const { return num_tokens_; }

  private:
    Run* runs_;
    int64_t block_;
    int64_t most_tokens_;
    int64_t size_ = 0;
    int64_t num_tokens_ = 0;
};

int64_t most_bytes(const LlamaModel& model, int64_t rows) {
    int64_t most = 0;
    const auto see = [&](const PackedMatrix* w) {
        const int64_t bytes = w == nullptr ? 0 : activation_bytes(*w, rows);
        most = bytes > most ? bytes : most;
    };
    for (int32_t i = 0; i < model.num_layers; ++i) {
        for (const PackedMatrix* part : model.layers[i].qkv) see(part);
        see(model.layers[i].output);
        see(model.layers[i].gate_up);
        see(model.layers[i].down);
    }
    return (most + 63) / 64 * 64;
}

struct Arena {
    float* residual;   // [T, hidden]
    float* qkv;        // [T, (H + 2 Hkv) D]
    float* attended;   // [block, H D]
    float* inner;      // [block, I]
    char* activations[3];  // each enough for any matrix and a block
    Run* runs;         // [T]
    Run* wanted_runs;  // [T]

    // Takes what it needs from `memory`; returns the end of it.
    char* place(const LlamaModel& model, int64_t num_tokens, int64_t block, char* memory) {
        const auto take = [&memory](int64_t bytes) {
            char* const begin = memory;
            memory += (bytes + 63) / 64 * 64;
            return begin;
        };
        const int64_t rows = least(num_tokens, block);
        residual = reinterpret_cast<float*>(take(4 * num_tokens * model.hidden));
        qkv = reinterpret_cast<float*>(take(4 * num_tokens * model.qkv_size()));
        attended = reinterpret_cast<float*>(take(4 * rows * model.q_size()));
        inner = reinterpret_cast<float*>(take(4 * rows * model.inner));
        const int64_t bytes = most_bytes(model, rows);
        for (char*& part : activations) part = take(bytes);
        runs = reinterpret_cast<Run*>(take(static_cast<int64_t>(sizeof(Run)) * num_tokens));
        wanted_runs = reinterpret_cast<Run*>(take(static_cast<int64_t>(sizeof(Run)) * num_tokens));
        return memory;
    }
};

// One thread's way through a step. All members are the same for all threads.
class Forward {
  public:
    Forward(const LlamaModel& model, const LlamaStep& step, const Arena& arena, const Runs& runs, const Runs& wanted,
            int64_t block)
        : model_(model), step_(step), arena_(arena), runs_(runs), wanted_(wanted), block_(block), rows_(row_kernels()) {}

    void run(Phases& phases) const {
        embed(phases);
        for (int32_t index = 0; index < model_.num_layers; ++index) {
            const LlamaLayer& layer = model_.layers[index];
            for (int64_t first = 0; first < step_.num_tokens; first += block_) {
                const Range tokens{first, least(first + block_, step_.num_tokens)};
                project(phases, layer, tokens);
                phases.each(tokens.size(), [&](Range part) {
                    turn_and_keep(index, {tokens.begin + part.begin, tokens.begin + part.end});
                });
            }
            if (index + 1 < model_.num_layers)
                finish(phases, index, runs_, arena_.residual);
            else
                finish_wanted(phases, index);
        }
    }

  private:
    void embed(Phases& phases) const {
        phases.each(step_.num_tokens, [&](Range tokens) {
            for (int64_t token = tokens.begin; token < tokens.end; ++token) {
                const int64_t id = step_.input_ids[token];
                pe_unpack(model_.embedding, 1, &id, arena_.residual + token * model_.hidden);
            }
        });
    }

    // The rows of a batch that the last layer is asked for go on in a place of their own.
    void finish_wanted(Phases& phases, int32_t index) const {
        if (step_.num_wanted == 0) return;
        const int64_t hidden = model_.hidden;
        phases.each(step_.num_wanted, [&](Range rows) {
            for (int64_t row = rows.begin; row < rows.end; ++row) {
                const int64_t token = step_.wanted == nullptr ? row : step_.wanted[row];
                std::memcpy(step_.hidden + row * hidden, arena_.residual + token * hidden, hidden * sizeof(float));
            }
        });
        finish(phases, index, wanted_, step_.hidden);
        phases.each(step_.num_wanted, [&](Range rows) {
            for (int64_t row = rows.begin; row < rows.end; ++row) {
                float* const x = step_.hidden + row * hidden;
                rows_.rms_norm(x, model_.final_norm, hidden, model_.eps, x, F32);
            }
        });
    }

    // q | k | v of some tokens.
    void project(Phases& phases, const LlamaLayer& layer, Range tokens) const {
        Activations ready[3];
        phases.each(tokens.size(), [&](Range rows) {
            norm_and_prepare(layer.input_norm, arena_.residual + tokens.begin * model_.hidden, rows, layer.qkv, 3,
                             tokens.size());
        });
        const int64_t width = model_.qkv_size();
        int64_t output = 0;
        place_activations(layer.qkv, 3, tokens.size(), ready);
        for (int i = 0; i < 3 && layer.qkv[i] != nullptr; ++i) {
            const PackedMatrix& w = *layer.qkv[i];
            const float* bias = layer.qkv_bias == nullptr ? nullptr : layer.qkv_bias + output;
            const Epilogue e{arena_.qkv + tokens.begin * width + output, width, F32, 0, bias, nullptr};
            phases.each(linear_units(w, tokens.size()),
                        [&](Range units) { linear_part(w, ready[i], tokens.size(), e, units); });
            output += w.outputs;
        }
    }

    // Where the activations of each part lie. Parts of equal groups share them.
    void place_activations(const PackedMatrix* const* parts, int count, int64_t num_rows, Activations* to) const {
        for (int i = 0; i < count && parts[i] != nullptr; ++i) {
            int same = 0;
            while (!meet_the_same(*parts[same], *parts[i])) ++same;
            to[i] = activations_for(*parts[i], nullptr, F32, 0, num_rows, arena_.activations[same]);
        }
    }

    static bool meet_the_same(const PackedMatrix& a, const PackedMatrix& b) {
        const bool is_float = a.format == WEIGHT_BF16;
        return is_float == (b.format == WEIGHT_BF16) && (is_float || a.group == b.group);
    }

    // Rows `rows` of x [num_rows, hidden], normed, in the form that the matrices take.
    void norm_and_prepare(const float* norm, const float* x, Range rows, const PackedMatrix* const* parts, int count,
                          int64_t num_rows) const {
        Activations to[3];
        place_activations(parts, count, num_rows, to);
        const int64_t hidden = model_.hidden;
        float* const normed = reinterpret_cast<float*>(thread_scratch(4 * hidden));
        for (int64_t row = rows.begin; row < rows.end; ++row) {
            bool is_float = false;
            for (int i = 0; i < count && parts[i] != nullptr; ++i) {
                bool is_done = false;
                for (int before = 0; before < i; ++before) is_done |= meet_the_same(*parts[before], *parts[i]);
                if (is_done) continue;
                if (parts[i]->format == WEIGHT_BF16) {
                    bf16* const narrow = const_cast<bf16*>(to[i].rows) + row * to[i].stride;
                    rows_.rms_norm(x + row * hidden, norm, hidden, model_.eps, narrow, BF16);
                    continue;
                }
                if (!is_float) rows_.rms_norm(x + row * hidden, norm, hidden, model_.eps, normed, F32);
                is_float = true;
                quantize_rows(normed, F32, 0, {row, row + 1}, to[i].quantized);
            }
        }
    }

    void turn_and_keep(int32_t index, Range tokens) const {
        const LlamaLayer& layer = model_.layers[index];
        int64_t row = 0;
        while (step_.query_start_loc[row + 1] <= tokens.begin) ++row;
        const int64_t element = step_.kv_dtype == BF16 ? 2 : 4;
        for (int64_t token = tokens.begin; token < tokens.end; ++token) {
            while (step_.query_start_loc[row + 1] <= token) ++row;
            const int64_t position = step_.seq_lens[row] - (step_.query_start_loc[row + 1] - token);
            const int64_t block = table_of(row)[position / step_.block_size];
            const int64_t at = (block * step_.block_stride + position % step_.block_size * step_.token_stride) * element;
            rows_.turn_and_keep({arena_.qkv + token * model_.qkv_size(),
                                 static_cast<char*>(step_.keys[index]) + at,
                                 static_cast<char*>(step_.values[index]) + at,
                                 model_.cos + position * (model_.head_dim / 2),
                                 model_.sin + position * (model_.head_dim / 2),
                                 layer.q_norm, layer.k_norm, step_.head_stride, model_.num_heads, model_.num_kv_heads,
                                 model_.head_dim, step_.kv_dtype, model_.eps});
        }
    }

    const int32_t* table_of(int64_t row) const {
        return step_.block_tables + step_.table_rows[row] * step_.table_stride;
    }

    // Attention, its projection and the gated MLP for the tokens of `runs`, block after block. x [tokens of runs, hidden]
    // is their residual stream.
    void finish(Phases& phases, int32_t index, const Runs& runs, float* x) const {
        const LlamaLayer& layer = model_.layers[index];
        int64_t done = 0;
        for (int64_t first = 0; first < runs.num_tokens(); first += block_) {
            const int64_t count = least(block_, runs.num_tokens() - first);
            const Range own = runs.of_block(done, first);
            done = own.end;
            attend(phases, index, runs, own);
            float* const rows = x + first * model_.hidden;
            mix(phases, layer, rows, count);
            feed_forward(phases, layer, rows, count);
        }
    }

    void attend(Phases& phases, int32_t index, const Runs& runs, Range own) const {
        const int64_t heads = model_.num_kv_heads;
        phases.each(own.size() * heads, [&](Range units) {
            for (int64_t unit = units.begin; unit < units.end; ++unit)
                attend_run(index, runs[own.begin + unit / heads], unit % heads);
        });
    }

    void attend_run(int32_t index, const Run& run, int64_t kv_head) const {
        const int64_t group = model_.num_heads / model_.num_kv_heads, width = model_.qkv_size();
        const int64_t element = step_.kv_dtype == BF16 ? 2 : 4;
        const int64_t head = kv_head * group * model_.head_dim;
        const int32_t query_start_loc[2] = {0, run.num_tokens};
        AttentionArgs args{};
        args.q = arena_.qkv + run.token * width + head;
        args.out = arena_.attended + run.out_row * model_.q_size() + head;
        args.keys = static_cast<char*>(step_.keys[index]) + kv_head * step_.head_stride * element;
        args.values = static_cast<char*>(step_.values[index]) + kv_head * step_.head_stride * element;
        args.query_start_loc = query_start_loc;
        args.seq_lens = &run.context;
        args.block_tables = table_of(run.row);
        args.q_stride = width;
        args.out_stride = model_.q_size();
        args.block_stride = step_.block_stride;
        args.token_stride = step_.token_stride;
        args.head_stride = step_.head_stride;
        args.num_rows = 1;
        args.num_heads = static_cast<int32_t>(group);
        args.num_kv_heads = 1;
        args.head_dim = model_.head_dim;
        args.block_size = step_.block_size;
        args.sliding_window = model_.sliding_window;
        args.is_causal = 1;
        args.q_dtype = F32;
        args.kv_dtype = step_.kv_dtype;
        args.scale = model_.scale;
        args.workspace = thread_scratch(attention_workspace(args, step_.max_seq_len, 1));
        attention(args, Team{0, 1});
    }

    // x += attended W^T
    void mix(Phases& phases, const LlamaLayer& layer, float* x, int64_t count) const {
        const PackedMatrix& w = *layer.output;
        const Epilogue e{x, model_.hidden, F32, 0, layer.output_bias, x};
        multiply(phases, w, arena_.attended, model_.q_size(), count, e);
    }

    // x += (silu(gate) * up) W^T, of normed x
    void feed_forward(Phases& phases, const LlamaLayer& layer, float* x, int64_t count) const {
        phases.each(count, [&](Range rows) {
            norm_and_prepare(layer.post_attention_norm, x, rows, &layer.gate_up, 1, count);
        });
        const PackedMatrix& w = *layer.gate_up;
        Activations ready;
        place_activations(&layer.gate_up, 1, count, &ready);
        const Epilogue inner{arena_.inner, model_.inner, F32, 1, layer.gate_up_bias, nullptr};
        phases.each(linear_units(w, count), [&](Range units) { linear_part(w, ready, count, inner, units); });
        const Epilogue e{x, model_.hidden, F32, 0, layer.down_bias, x};
        multiply(phases, *layer.down, arena_.inner, model_.inner, count, e);
    }

    // x W^T, x [count, W's inputs] of float32.
    void multiply(Phases& phases, const PackedMatrix& w, const float* x, int64_t stride, int64_t count,
                  const Epilogue& epilogue) const {
        const Activations ready = activations_for(w, x, F32, stride, count, arena_.activations[0]);
        phases.each(count, [&](Range rows) {
            if (w.format != WEIGHT_BF16) return quantize_rows(x, F32, stride, rows, ready.quantized);
            for (int64_t row = rows.begin; row < rows.end; ++row)
                rows_.narrow(x + row * stride, w.inputs, const_cast<bf16*>(ready.rows) + row * ready.stride);
        });
        phases.each(linear_units(w, count), [&](Range units) { linear_part(w, ready, count, epilogue, units); });
    }

    const LlamaModel& model_;
    const LlamaStep& step_;
    const Arena& arena_;
    const Runs& runs_;
    const Runs& wanted_;
    const int64_t block_;
    const RowKernels& rows_;
};

void add_all(const LlamaStep& step, Runs& runs) {
    for (int32_t row = 0; row < step.num_rows; ++row) {
        const int32_t end = step.query_start_loc[row + 1];
        for (int32_t token = step.query_start_loc[row]; token < end; ++token)
            runs.add(row, token, step.seq_lens[row] - (end - token));
    }
}

void add_wanted(const LlamaStep& step, Runs& runs) {
    if (step.wanted == nullptr) return add_all(step, runs);
    int32_t row = 0;
    for (int32_t i = 0; i < step.num_wanted; ++i) {
        const int32_t token = static_cast<int32_t>(step.wanted[i]);
        while (step.query_start_loc[row + 1] <= token) ++row;
        runs.add(row, token, step.seq_lens[row] - (step.query_start_loc[row + 1] - token));
    }
}

// The largest logit of some rows, panel by panel.
struct Largest {
    float value;
    int32_t index;
};

}  // namespace
}  // namespace pe

// Bytes of a step's arena, for steps of up to `num_tokens` tokens with the pool's threads of now.
PE_EXPORT int64_t pe_llama_arena(const pe::LlamaModel* model, int64_t num_tokens) {
    pe::Arena arena;
    return arena.place(*model, num_tokens, pe::block_tokens(pe::num_threads()), nullptr) - static_cast<char*>(nullptr);
}

PE_EXPORT void pe_llama_forward(const pe::LlamaModel* model, const pe::LlamaStep* step) {
    using namespace pe;
    const int64_t block = block_tokens(num_threads());
    Arena arena;
    arena.place(*model, step->num_tokens, block, static_cast<char*>(step->arena));
    const int64_t group = model->num_heads / model->num_kv_heads;
    const int64_t most_tokens = group < RUN_ROWS / 8 ? RUN_ROWS / group / 8 * 8 : 1;
    Runs runs(arena.runs, block, most_tokens), wanted(arena.wanted_runs, block, most_tokens);
    add_all(*step, runs);
    add_wanted(*step, wanted);
    const Forward forward(*model, *step, arena, runs, wanted, block);
    run_phases([&](Phases& phases) { forward.run(phases); });
}

// Logits [num_rows, V] of hidden states x [num_rows, hidden]. `memory`: pe_llama_head_bytes, aligned to 64.
PE_EXPORT void pe_llama_logits(const pe::PackedMatrix* head, const float* x, int64_t num_rows, float* logits,
                               void* memory) {
    using namespace pe;
    const Epilogue e{logits, head->outputs, F32, 0, nullptr, nullptr};
    run_phases([&](Phases& phases) { linear(phases, *head, x, F32, head->inputs, num_rows, memory, e); });
}

PE_EXPORT int64_t pe_llama_head_bytes(const pe::PackedMatrix* head, int64_t num_rows) {
    using namespace pe;
    const int64_t activations = (activation_bytes(*head, num_rows) + 63) / 64 * 64;
    return activations + num_rows * head->panels() * static_cast<int64_t>(sizeof(Largest));
}

// The first largest logit of each row: tokens [num_rows]. The logits themselves are not kept.
PE_EXPORT void pe_llama_greedy(const pe::PackedMatrix* head, const float* x, int64_t num_rows, int32_t* tokens,
                               void* memory) {
    using namespace pe;
    const RowKernels& kernels = row_kernels();
    const int64_t panels = head->panels(), units = linear_units(*head, num_rows);
    const Activations ready = activations_for(*head, x, F32, head->inputs, num_rows, memory);
    Largest* const found = reinterpret_cast<Largest*>(static_cast<char*>(memory) +
                                                      (activation_bytes(*head, num_rows) + 63) / 64 * 64);
    run_phases([&](Phases& phases) {
        phases.each(num_rows, [&](Range rows) { prepare_rows(*head, x, F32, head->inputs, rows, ready); });
        phases.each(units, [&](Range own) {
            // A panel's logits, as if they stood in their columns of a matrix that is PANEL wide. Slot 1: slot 0 is the
            // product's own.
            float* const logits = reinterpret_cast<float*>(thread_scratch(4 * num_rows * PANEL, 1));
            for (int64_t unit = own.begin; unit < own.end; ++unit) {
                const Range rows = share_of(num_rows, 1, unit / panels, units / panels);
                const int64_t panel = unit % panels, first = panel * PANEL;
                const Epilogue e{logits - first, PANEL, F32, 0, nullptr, nullptr};
                linear_part(*head, ready, num_rows, e, {unit, unit + 1});
                for (int64_t row = rows.begin; row < rows.end; ++row) {
                    Largest& here = found[row * panels + panel];
                    here = {-__builtin_inff(), static_cast<int32_t>(first)};
                    kernels.largest(logits + row * PANEL, least(PANEL, head->outputs - first),
                                    static_cast<int32_t>(first), &here.value, &here.index);
                }
            }
        });
        phases.each(num_rows, [&](Range rows) {
            for (int64_t row = rows.begin; row < rows.end; ++row) {
                Largest most = found[row * panels];
                for (int64_t panel = 1; panel < panels; ++panel)
                    if (found[row * panels + panel].value > most.value) most = found[row * panels + panel];
                tokens[row] = most.index;
            }
        });
    });
}
