#include "llama.h"

#include "attention.h"
#include "gemm.h"
#include "kv_cache.h"
#include "rowwise.h"
#include "scratch.h"
#include "thread_pool.h"
#include "vector.h"

PE_EXPORT void pe_unpack(const pe::PackedMatrix* from, int64_t num_rows, const int64_t* outputs, float* to);

namespace pe {
namespace {

// Tokens that go through the second half of a layer together: what they need stays in the cache.
constexpr int64_t BLOCK_TOKENS = 512;
constexpr int64_t BLOCK_TOKENS_PER_THREAD = 64;

int64_t block_tokens(int32_t threads) {
    const int64_t wide = BLOCK_TOKENS_PER_THREAD * threads;
    return wide > BLOCK_TOKENS ? wide : BLOCK_TOKENS;
}

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Of q, k, v and what attention makes of them. Norms of heads are float32, and want the same.
DType type_of_heads(const LlamaLayer& layer) { return layer.q_norm ? F32 : activation_type(*layer.output); }

class Memory {
  public:
    explicit Memory(void* begin) : at_(static_cast<char*>(begin)) {}

    template <typename T>
    T* take(int64_t count) {
        char* const begin = at_;
        at_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return reinterpret_cast<T*>(begin);
    }

    const char* end() const { return at_; }

  private:
    char* at_;
};

// Query tokens that are attended together, as attention wants them: cut into blocks, so that a row of the step may be
// several here, one in each block that it has tokens in.
class Queries {
  public:
    struct Block {
        int64_t first_token;  // counted among these
        int64_t num_tokens;
        int64_t num_rows;
        const int32_t* query_start_loc;  // [num_rows + 1], from 0
        const int32_t* seq_lens;         // [num_rows], up to the row's last token in this block
        const int32_t* block_tables;     // [num_rows, table_width]
    };

    // For `num_tokens` tokens in `num_runs` runs of neighbours of one row.
    Queries(const LlamaStep& step, int64_t num_tokens, int64_t num_runs, int64_t block, Memory& memory)
        : step_(step), block_(block), table_width_(ceil_div(step.max_seq_len, step.block_size)) {
        const int64_t most_blocks = ceil_div(num_tokens, block), most_rows = num_runs + most_blocks;
        starts_ = memory.take<int32_t>(most_rows + most_blocks + 1);
        seq_lens_ = memory.take<int32_t>(most_rows + 1);
        tables_ = memory.take<int32_t>(most_rows * table_width_);
        blocks_ = memory.take<Block>(most_blocks + 1);
    }

    // The next token, in order: that at `position` of the step's row `row`. `token` counts the step's tokens.
    void add(int32_t row, int32_t token, int32_t position) {
        if (num_blocks_ == 0 || blocks_[num_blocks_ - 1].num_tokens == block_) open_block();
        Block& block = blocks_[num_blocks_ - 1];
        if (block.num_rows == 0 || row != last_row_ || token != last_token_ + 1) open_row(block, row);
        ++block.num_tokens;
        starts_[num_rows_ + num_blocks_ - 1] = static_cast<int32_t>(block.num_tokens);
        seq_lens_[num_rows_ - 1] = position + 1;
        last_row_ = row;
        last_token_ = token;
    }

    int64_t num_blocks() const { return num_blocks_; }
    int64_t table_width() const { return table_width_; }
    const Block& block(int64_t index) const { return blocks_[index]; }

  private:
    void open_block() {
        const int64_t first = num_blocks_ == 0 ? 0 : blocks_[num_blocks_ - 1].first_token + block_;
        int32_t* const starts = starts_ + num_rows_ + num_blocks_;
        starts[0] = 0;
        blocks_[num_blocks_++] = {first, 0, 0, starts, seq_lens_ + num_rows_, tables_ + num_rows_ * table_width_};
    }

    void open_row(Block& block, int32_t row) {
        std::memcpy(tables_ + num_rows_ * table_width_, step_.block_tables + step_.table_rows[row] * step_.table_stride,
                    table_width_ * sizeof(int32_t));
        ++num_rows_;
        ++block.num_rows;
    }

    const LlamaStep& step_;
    int64_t block_;
    int64_t table_width_;
    int32_t* starts_;
    int32_t* seq_lens_;
    int32_t* tables_;
    Block* blocks_;
    int64_t num_rows_ = 0;
    int64_t num_blocks_ = 0;
    int32_t last_row_ = -1;
    int32_t last_token_ = -1;
};

// What a step needs beside its inputs and its result.
struct Arena {
    float* residual;  // [T, hidden]
    void* qkv;        // [T, (H + 2 Hkv) D], of `type_of_heads`
    void* wanted_q;   // [wanted, H D], of the same
    void* attended;   // [block, H D], of the same
    void* inner;      // [block, I], of the type that `down` takes
    void* activations[3];  // each enough for any matrix and a block
    void* attention;  // workspace
    int64_t* positions;     // [T]
    int64_t* slot_mapping;  // [T]

    Arena(const LlamaModel& model, const LlamaStep& step, int64_t block, int64_t attention_bytes, Memory& memory) {
        const int64_t tokens = step.num_tokens, rows = least(tokens, block);
        residual = memory.take<float>(tokens * model.hidden);
        qkv = memory.take<float>(tokens * model.qkv_size());
        wanted_q = memory.take<float>(step.num_wanted * model.q_size());
        attended = memory.take<float>(rows * model.q_size());
        inner = memory.take<float>(rows * model.inner);
        const int64_t bytes = most_activation_bytes(model, rows);
        for (void*& part : activations) part = memory.take<char>(bytes);
        attention = memory.take<char>(attention_bytes);
        positions = memory.take<int64_t>(tokens);
        slot_mapping = memory.take<int64_t>(tokens);
    }

  private:
    static int64_t most_activation_bytes(const LlamaModel& model, int64_t rows) {
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
        return most;
    }
};

AttentionArgs attention_args(const LlamaModel& model, const LlamaStep& step, int32_t threads) {
    AttentionArgs args{};
    args.num_heads = model.num_heads;
    args.num_kv_heads = model.num_kv_heads;
    args.head_dim = model.head_dim;
    args.block_size = step.block_size;
    args.sliding_window = model.sliding_window;
    args.is_causal = 1;
    args.kv_dtype = step.kv_dtype;
    args.num_threads = threads;
    args.scale = model.scale;
    return args;
}

// One thread's way through a step. Members are the same for all threads, and nothing here changes them.
class Forward {
  public:
    Forward(const LlamaModel& model, const LlamaStep& step, const Arena& arena, const Queries& all,
            const Queries& wanted)
        : model_(model), step_(step), arena_(arena), all_(all), wanted_(wanted) {}

    void run(Phases& phases) const {
        embed(phases);
        if (model_.num_layers == 0) gather_wanted(phases, F32);
        for (int32_t index = 0; index < model_.num_layers; ++index) {
            const LlamaLayer& layer = model_.layers[index];
            const DType type = type_of_heads(layer);
            for (int64_t i = 0; i < all_.num_blocks(); ++i) project(phases, layer, type, all_.block(i));
            keep(phases, index, type);
            const bool is_last = index + 1 == model_.num_layers;
            if (is_last) gather_wanted(phases, type);
            const Source source = is_last && step_.wanted != nullptr
                                      ? Source{&wanted_, step_.hidden, arena_.wanted_q, model_.q_size()}
                                      : Source{&all_, is_last ? step_.hidden : arena_.residual, arena_.qkv,
                                               model_.qkv_size()};
            if (!is_last || step_.num_wanted > 0) finish(phases, index, type, source);
        }
        norm_hidden(phases);
    }

  private:
    // Where the tokens of the second half of a layer are.
    struct Source {
        const Queries* queries;
        float* residual;  // [tokens, hidden]
        void* q;          // [tokens, H D]
        int64_t q_stride;
    };

    static void* at(void* base, DType type, int64_t element) {
        return static_cast<char*>(base) + element * (type == BF16 ? 2 : 4);
    }

    void embed(Phases& phases) const {
        phases.each(step_.num_tokens, [&](Range tokens) {
            for (int64_t token = tokens.begin; token < tokens.end; ++token) {
                const int64_t id = step_.input_ids[token];
                pe_unpack(model_.embedding, 1, &id, arena_.residual + token * model_.hidden);
            }
        });
    }

    // q | k | v of a block.
    void project(Phases& phases, const LlamaLayer& layer, DType type, const Queries::Block& block) const {
        const int64_t count = block.num_tokens, width = model_.qkv_size();
        const float* const x = arena_.residual + block.first_token * model_.hidden;
        phases.each(count, [&](Range rows) { norm_and_prepare(layer.input_norm, x, rows, layer.qkv, 3, count); });
        Activations ready[3];
        place_activations(layer.qkv, 3, count, ready);
        int64_t output = 0;
        for (int i = 0; i < 3 && layer.qkv[i] != nullptr; ++i) {
            const PackedMatrix& w = *layer.qkv[i];
            const float* bias = layer.qkv_bias == nullptr ? nullptr : layer.qkv_bias + output;
            const Epilogue e{at(arena_.qkv, type, block.first_token * width + output), width, type, 0, bias, nullptr};
            phases.each(linear_units(w, count), [&](Range units) { linear_part(w, ready[i], count, e, units); });
            output += w.outputs;
        }
    }

    // Turns queries and keys by their positions, and writes keys and values of all tokens to the cache.
    void keep(Phases& phases, int32_t index, DType type) const {
        const LlamaLayer& layer = model_.layers[index];
        const int64_t width = model_.qkv_size();
        KVWriteArgs args{};
        args.q = arena_.qkv;
        args.k = at(arena_.qkv, type, model_.q_size());
        args.v = at(arena_.qkv, type, model_.q_size() + model_.kv_size());
        args.keys = step_.keys[index];
        args.values = step_.values[index];
        args.q_norm = layer.q_norm;
        args.k_norm = layer.k_norm;
        args.cos = model_.cos;
        args.sin = model_.sin;
        args.positions = arena_.positions;
        args.slot_mapping = arena_.slot_mapping;
        args.q_stride = args.k_stride = args.v_stride = width;
        args.num_tokens = step_.num_tokens;
        args.num_heads = model_.num_heads;
        args.num_kv_heads = model_.num_kv_heads;
        args.head_dim = model_.head_dim;
        args.block_size = step_.block_size;
        args.dtype = type;
        args.kv_dtype = step_.kv_dtype;
        args.eps = model_.eps;
        phases.each(step_.num_tokens, [&](Range tokens) { write_kv(args, tokens); });
    }

    // In the last layer only some tokens go on, side by side.
    void gather_wanted(Phases& phases, DType type) const {
        const int64_t hidden = model_.hidden, size = type == BF16 ? 2 : 4;
        phases.each(step_.num_wanted, [&](Range rows) {
            for (int64_t row = rows.begin; row < rows.end; ++row) {
                const int64_t token = step_.wanted == nullptr ? row : step_.wanted[row];
                std::memcpy(step_.hidden + row * hidden, arena_.residual + token * hidden, hidden * sizeof(float));
                if (step_.wanted == nullptr) continue;
                std::memcpy(at(arena_.wanted_q, type, row * model_.q_size()),
                            at(arena_.qkv, type, token * model_.qkv_size()), model_.q_size() * size);
            }
        });
    }

    // Attention, its projection and the gated MLP, block after block.
    void finish(Phases& phases, int32_t index, DType type, const Source& source) const {
        const LlamaLayer& layer = model_.layers[index];
        for (int64_t i = 0; i < source.queries->num_blocks(); ++i) {
            const Queries::Block& block = source.queries->block(i);
            float* const x = source.residual + block.first_token * model_.hidden;
            attend(phases, index, type, source, block);
            const Epilogue mixed{x, model_.hidden, F32, 0, layer.output_bias, x};
            multiply(phases, *layer.output, arena_.attended, type, model_.q_size(), block.num_tokens, mixed);
            feed_forward(phases, layer, x, block.num_tokens);
        }
    }

    void attend(Phases& phases, int32_t index, DType type, const Source& source, const Queries::Block& block) const {
        AttentionArgs args = attention_args(model_, step_, phases.num_threads());
        args.q = at(source.q, type, block.first_token * source.q_stride);
        args.out = arena_.attended;
        args.keys = step_.keys[index];
        args.values = step_.values[index];
        args.query_start_loc = block.query_start_loc;
        args.seq_lens = block.seq_lens;
        args.block_tables = block.block_tables;
        args.workspace = arena_.attention;
        args.q_stride = source.q_stride;
        args.out_stride = model_.q_size();
        args.table_stride = source.queries->table_width();
        args.num_rows = static_cast<int32_t>(block.num_rows);
        args.q_dtype = type;
        attention(phases, args);
    }

    // x += (silu(gate) * up) W^T, of normed x
    void feed_forward(Phases& phases, const LlamaLayer& layer, float* x, int64_t count) const {
        const PackedMatrix& w = *layer.gate_up;
        const DType type = activation_type(*layer.down);
        phases.each(count, [&](Range rows) {
            norm_and_prepare(layer.post_attention_norm, x, rows, &layer.gate_up, 1, count);
        });
        Activations ready;
        place_activations(&layer.gate_up, 1, count, &ready);
        const Epilogue inner{arena_.inner, model_.inner, type, 1, layer.gate_up_bias, nullptr};
        phases.each(linear_units(w, count), [&](Range units) { linear_part(w, ready, count, inner, units); });
        const Epilogue summed{x, model_.hidden, F32, 0, layer.down_bias, x};
        multiply(phases, *layer.down, arena_.inner, type, model_.inner, count, summed);
    }

    void norm_hidden(Phases& phases) const {
        if (model_.final_norm == nullptr) return;
        RmsNormArgs args = norm_args(step_.hidden, model_.final_norm);
        args.out = step_.hidden;
        phases.each(step_.num_wanted, [&](Range rows) { rms_norm(args, rows); });
    }

    // x W^T through the epilogue, where x is of the type that comes before W.
    void multiply(Phases& phases, const PackedMatrix& w, const void* x, DType type, int64_t stride, int64_t count,
                  const Epilogue& epilogue) const {
        const Activations ready = activations_for(w, x, type, stride, count, arena_.activations[0]);
        if (needs_preparing(w, type)) phases.each(count, [&](Range rows) { prepare_rows(w, x, type, stride, rows, ready); });
        phases.each(linear_units(w, count), [&](Range units) { linear_part(w, ready, count, epilogue, units); });
    }

    RmsNormArgs norm_args(const float* x, const float* weight) const {
        RmsNormArgs args{};
        args.x = x;
        args.weight = weight;
        args.x_stride = args.out_stride = args.size = model_.hidden;
        args.dtype = args.weight_dtype = args.out_dtype = F32;
        args.eps = model_.eps;
        return args;
    }

    // Rows of x [num_rows, hidden], normed, in the form that each of the matrices takes.
    void norm_and_prepare(const float* norm, const float* x, Range rows, const PackedMatrix* const* parts, int count,
                          int64_t num_rows) const {
        Activations to[3];
        place_activations(parts, count, num_rows, to);
        RmsNormArgs args = norm_args(x, norm);
        for (int i = 0; i < count && parts[i] != nullptr; ++i) {
            if (first_alike(parts, i) != i) continue;
            if (parts[i]->format == WEIGHT_BF16) {
                args.out = const_cast<bf16*>(to[i].rows);
                args.out_dtype = BF16;
                args.out_stride = model_.hidden;
                rms_norm(args, rows);
                continue;
            }
            float* const normed = reinterpret_cast<float*>(thread_scratch(4 * model_.hidden));
            args.out = normed;
            args.out_dtype = F32;
            args.out_stride = 0;
            for (int64_t row = rows.begin; row < rows.end; ++row) {
                rms_norm(args, {row, row + 1});
                prepare_rows(*parts[i], normed, F32, 0, {row, row + 1}, to[i]);
            }
        }
    }

    // Where the activations of each matrix lie. Those that take the same share them.
    void place_activations(const PackedMatrix* const* parts, int count, int64_t num_rows, Activations* to) const {
        for (int i = 0; i < count && parts[i] != nullptr; ++i)
            to[i] = activations_for(*parts[i], nullptr, F32, 0, num_rows, arena_.activations[first_alike(parts, i)]);
    }

    static int first_alike(const PackedMatrix* const* parts, int index) {
        const auto group = [&](int i) { return parts[i]->format == WEIGHT_BF16 ? 0 : parts[i]->group; };
        int first = 0;
        while (group(first) != group(index)) ++first;
        return first;
    }

    const LlamaModel& model_;
    const LlamaStep& step_;
    const Arena& arena_;
    const Queries& all_;
    const Queries& wanted_;
};

// Calls visit(row, token, position) for the step's tokens, in order.
template <typename Visit>
void for_each_token(const LlamaStep& step, const Visit& visit) {
    for (int32_t row = 0; row < step.num_rows; ++row) {
        const int32_t end = step.query_start_loc[row + 1];
        for (int32_t token = step.query_start_loc[row]; token < end; ++token)
            visit(row, token, step.seq_lens[row] - (end - token));
    }
}

// Arena, queries of all tokens and of those that are wanted, in one piece of memory.
struct Plan {
    Memory memory;
    const int64_t block;
    Arena arena;
    Queries all;
    Queries wanted;

    Plan(const LlamaModel& model, const LlamaStep& step, void* begin)
        : memory(begin),
          block(block_tokens(num_threads())),
          arena(model, step, block, attention_workspace(attention_args(model, step, num_threads()), step.max_seq_len),
                memory),
          all(step, step.num_tokens, step.num_rows, block, memory),
          wanted(step, num_chosen(step), num_chosen(step), block, memory) {}

    static int64_t num_chosen(const LlamaStep& step) { return step.wanted == nullptr ? 0 : step.num_wanted; }

    void fill(const LlamaStep& step) {
        int32_t next = 0;
        for_each_token(step, [&](int32_t row, int32_t token, int32_t position) {
            all.add(row, token, position);
            const int32_t* const table = step.block_tables + step.table_rows[row] * step.table_stride;
            arena.positions[token] = position;
            arena.slot_mapping[token] =
                int64_t{table[position / step.block_size]} * step.block_size + position % step.block_size;
            if (step.wanted == nullptr || next == step.num_wanted || step.wanted[next] != token) return;
            wanted.add(row, token, position);
            ++next;
        });
    }
};

// The largest logit of a row among those of some panels.
struct Largest {
    float value;
    int32_t index;
};

// Takes the logits of a panel into account. The first of several equal ones counts.
void see_panel(const float* logits, int64_t count, int32_t first_index, Largest& largest) {
    f32v most = load_upto(logits, count);
    if (count == PANEL) {
        for (int64_t i = LANES; i < PANEL; i += LANES) most = max(most, load(logits + i));
        if (!(reduce_max(most) > largest.value)) return;
    }
    for (int64_t i = 0; i < count; ++i)
        if (logits[i] > largest.value) largest = {logits[i], first_index + static_cast<int32_t>(i)};
}

int64_t head_activation_bytes(const PackedMatrix& head, int64_t num_rows) {
    return (activation_bytes(head, num_rows) + 63) / 64 * 64;
}

// Panels of a head whose logits are made before any is looked at.
constexpr int64_t HEAD_PANELS = 8;

// Largest logits of the rows of x by runs of neighbouring panels: found [num_rows, panels], where a run stands in the
// place of its first panel.
void find_largest(const PackedMatrix& head, const Activations& x, int64_t num_rows, Range units, Largest* found) {
    const int64_t panels = head.panels(), blocks = linear_units(head, num_rows) / panels;
    constexpr int64_t WIDTH = HEAD_PANELS * PANEL;
    // The logits of some panels, as if they stood in a matrix as wide as these. Slot 1, for slot 0 is the product's own.
    float* const logits = reinterpret_cast<float*>(thread_scratch(4 * num_rows * WIDTH, 1));
    for (int64_t unit = units.begin, end; unit < units.end; unit = end) {
        const Range rows = rows_of_block(num_rows, unit / panels, blocks);
        const int64_t run = unit % panels, first = run * PANEL;
        end = least(least(unit + HEAD_PANELS, unit - run + panels), units.end);
        linear_part(head, x, num_rows, {logits - first, WIDTH, F32, 0, nullptr, nullptr}, {unit, end});
        for (int64_t row = rows.begin; row < rows.end; ++row)
            for (int64_t panel = 0; panel < end - unit; ++panel) {
                const int64_t output = first + panel * PANEL;
                see_panel(logits + row * WIDTH + panel * PANEL, least(PANEL, head.outputs - output),
                          static_cast<int32_t>(output), found[row * panels + run]);
            }
    }
}

}  // namespace
}  // namespace pe

// Bytes of a step's arena. Of `step` only the counts are read.
PE_EXPORT int64_t pe_llama_arena(const pe::LlamaModel* model, const pe::LlamaStep* step) {
    return pe::Plan(*model, *step, nullptr).memory.end() - static_cast<char*>(nullptr);
}

PE_EXPORT void pe_llama_forward(const pe::LlamaModel* model, const pe::LlamaStep* step) {
    using namespace pe;
    Plan plan(*model, *step, step->arena);
    plan.fill(*step);
    const Forward forward(*model, *step, plan.arena, plan.all, plan.wanted);
    run_phases([&](Phases& phases) { forward.run(phases); });
}

// Bytes of memory for the head's products of `num_rows` rows.
PE_EXPORT int64_t pe_llama_head_bytes(const pe::PackedMatrix* head, int64_t num_rows) {
    using namespace pe;
    return head_activation_bytes(*head, num_rows) + num_rows * head->panels() * static_cast<int64_t>(sizeof(Largest));
}

// Logits [num_rows, V] of hidden states x [num_rows, hidden].
PE_EXPORT void pe_llama_logits(const pe::PackedMatrix* head, const float* x, int64_t num_rows, float* logits,
                               void* memory) {
    using namespace pe;
    const Epilogue e{logits, head->outputs, F32, 0, nullptr, nullptr};
    run_phases([&](Phases& phases) { linear(phases, *head, x, F32, head->inputs, num_rows, memory, e); });
}

// The first largest logit of each row: tokens [num_rows]. The logits themselves are not kept.
PE_EXPORT void pe_llama_greedy(const pe::PackedMatrix* head, const float* x, int64_t num_rows, int32_t* tokens,
                               void* memory) {
    using namespace pe;
    const int64_t panels = head->panels();
    const Activations ready = activations_for(*head, x, F32, head->inputs, num_rows, memory);
    Largest* const found =
        reinterpret_cast<Largest*>(static_cast<char*>(memory) + head_activation_bytes(*head, num_rows));
    run_phases([&](Phases& phases) {
        phases.each(num_rows, [&](Range rows) {
            prepare_rows(*head, x, F32, head->inputs, rows, ready);
            for (int64_t i = rows.begin * panels; i < rows.end * panels; ++i) found[i] = {-__builtin_inff(), 0};
        });
        phases.each(linear_units(*head, num_rows),
                    [&](Range units) { find_largest(*head, ready, num_rows, units, found); });
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
