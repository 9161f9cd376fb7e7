#include "encoder.h"

#include "cpu.h"
#include "scratch.h"

namespace pe {
namespace {

// Tokens that go through the second half of a layer together: what they need stays in the cache.
constexpr int64_t BLOCK_TOKENS = 192;
constexpr int64_t QUERY_BLOCK = 8;  // the most query rows that attention takes at once
constexpr int64_t WIDEST_SPAN = 32;

const EncoderKernels& kernels() {
#if defined(__x86_64__)
    switch (isa()) {
        case AMX:
        case AVX512: return encoder_kernels_avx512();
        case AVX2: return encoder_kernels_avx2();
        default: break;
    }
#endif
    return encoder_kernels_portable();
}

int64_t rounded_up(int64_t size, int64_t to) { return (size + to - 1) / to * to; }
int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Where the activations of a step are.
struct Arena {
    float* x;         // [T, hidden]: the residual stream
    float* normed;    // [T, hidden], with pre-norm
    float* qkv;       // [T, 3 hidden]
    float* attended;  // [T, hidden]
    float* inner;     // [block, I], or [block, 2 I]
    WideRows whole;   // [T, hidden], quantised
    WideRows block;   // [block, I], quantised
    const char* end;

    Arena(const EncoderModel& model, const EncoderStep& step, void* begin) {
        char* at = static_cast<char*>(begin);
        const auto take = [&](int64_t bytes) {
            char* const from = at;
            at += rounded_up(bytes, 64);
            return from;
        };
        const auto floats = [&](int64_t count) { return reinterpret_cast<float*>(take(count * 4)); };
        const auto rows = [&](int64_t count, int64_t inputs) {
            int16_t* const values = reinterpret_cast<int16_t*>(take(count * wide_inputs(inputs) * 2));
            return WideRows{values, floats(count * wide_groups(inputs)), inputs};
        };
        const int64_t tokens = step.num_tokens, in_block = least(tokens, BLOCK_TOKENS);
        x = floats(tokens * model.hidden);
        normed = model.pre_norm ? floats(tokens * model.hidden) : nullptr;
        qkv = floats(tokens * 3 * model.hidden);
        attended = floats(tokens * model.hidden);
        inner = floats(in_block * model.inner * (model.gated ? 2 : 1));
        whole = rows(tokens, model.hidden);
        block = rows(in_block, model.inner);
        end = at;
    }
};

// One thread's way through a step.
class Encoding {
  public:
    Encoding(const EncoderModel& model, const EncoderStep& step, const Arena& arena)
        : model_(model), step_(step), arena_(arena), set_(kernels()) {}

    void run(Phases& phases) const {
        phases.each(step_.num_tokens, [&](Range tokens) { embed(tokens); });
        for (int32_t index = 0; index < step_.num_layers; ++index) {
            const EncoderLayer& layer = model_.layers[index];
            attend(phases, layer);
            for (int64_t first = 0; first < step_.num_tokens; first += BLOCK_TOKENS)
                finish(phases, layer, {first, least(first + BLOCK_TOKENS, step_.num_tokens)});
        }
        phases.each(step_.num_tokens, [&](Range tokens) { hand_out(tokens); });
    }

  private:
    int32_t position_of(int64_t token, int64_t& row) const {
        while (step_.query_start_loc[row + 1] <= token) ++row;
        return static_cast<int32_t>(token - step_.query_start_loc[row]);
    }

    void embed(Range tokens) const {
        const int64_t hidden = model_.hidden;
        int64_t row = 0;
        for (int64_t token = tokens.begin; token < tokens.end; ++token) {
            const float* const word = model_.tokens + step_.input_ids[token] * hidden;
            const float* const position =
                model_.positions == nullptr ? nullptr : model_.positions + position_of(token, row) * hidden;
            const int32_t kind = step_.token_types == nullptr ? 0 : step_.token_types[token];
            const float* const type = model_.types == nullptr ? nullptr : model_.types + kind * hidden;
            float* const x = arena_.x + token * hidden;
            for (int64_t i = 0; i < hidden; ++i)
                x[i] = word[i] + (type == nullptr ? 0.0f : type[i]) + (position == nullptr ? 0.0f : position[i]);
        }
        norm(arena_.x, model_.embedding_norm, model_.embedding_norm_bias, arena_.x, tokens);
    }

    void norm(const float* x, const float* weight, const float* bias, float* out, Range rows) const {
        set_.norm({x, weight, bias, out, model_.hidden, model_.eps}, rows);
    }

    void attend(Phases& phases, const EncoderLayer& layer) const {
        const int64_t tokens = step_.num_tokens, hidden = model_.hidden;
        phases.each(tokens, [&](Range rows) {
            const float* from = arena_.x;
            if (model_.pre_norm && layer.attention_norm != nullptr) {
                norm(arena_.x, layer.attention_norm, layer.attention_norm_bias, arena_.normed, rows);
                from = arena_.normed;
            }
            set_.quantize(from, hidden, rows, arena_.whole);
        });
        multiply(phases, *layer.qkv, arena_.whole, 0, {0, tokens}, {arena_.qkv, 3 * hidden, layer.qkv_bias, nullptr});
        const EncoderAttention args{arena_.qkv,    arena_.attended, step_.query_start_loc, layer.cos,       layer.sin,
                                    layer.window, hidden,          model_.head_dim,       model_.num_heads};
        phases.each(
            step_.num_rows * model_.num_heads,
            [&](Range units) {
                for (int64_t unit = units.begin; unit < units.end; ++unit) {
                    const int64_t row = unit / model_.num_heads;
                    const int64_t length = step_.query_start_loc[row + 1] - step_.query_start_loc[row];
                    void* const scratch = thread_scratch(attention_scratch(length, model_.head_dim));
                    set_.attend(args, row, unit % model_.num_heads, scratch);
                }
            },
            4);
    }

    // The attention's projection and the MLP of a block of tokens.
    void finish(Phases& phases, const EncoderLayer& layer, Range tokens) const {
        const int64_t hidden = model_.hidden, inner = model_.inner, first = tokens.begin;
        float* const x = arena_.x;
        each_token(phases, tokens, [&](Range rows) { set_.quantize(arena_.attended, hidden, rows, arena_.whole); });
        multiply(phases, *layer.output, arena_.whole, 0, tokens, {x, hidden, layer.output_bias, x});
        each_token(phases, tokens, [&](Range rows) {
            const bool pre = model_.pre_norm;
            const float* from = pre ? arena_.normed : x;
            norm(x, pre ? layer.mlp_norm : layer.attention_norm, pre ? layer.mlp_norm_bias : layer.attention_norm_bias,
                 pre ? arena_.normed : x, rows);
            set_.quantize(from, hidden, rows, arena_.whole);
        });
        const int64_t wide = inner * (model_.gated ? 2 : 1);
        multiply(phases, *layer.up, arena_.whole, 0, tokens, {arena_.inner - first * wide, wide, layer.up_bias, nullptr});
        phases.each(tokens.size(), [&](Range rows) {
            set_.activate(model_.activation, model_.gated != 0, arena_.inner, inner, rows);
            set_.quantize(arena_.inner, wide, rows, arena_.block);
        });
        multiply(phases, *layer.down, arena_.block, first, tokens, {x, hidden, layer.down_bias, x});
        if (model_.pre_norm) return;
        each_token(phases, tokens, [&](Range rows) { norm(x, layer.mlp_norm, layer.mlp_norm_bias, x, rows); });
    }

    template <typename Body>
    void each_token(Phases& phases, Range tokens, const Body& body) const {
        phases.each(tokens.size(),
                    [&](Range rows) { body(Range{tokens.begin + rows.begin, tokens.begin + rows.end}); });
    }

    // Rows `rows` of the product; those of x are counted from `first_row`.
    void multiply(Phases& phases, const WideMatrix& w, WideRows x, int64_t first_row, Range rows,
                  const WideEpilogue& e) const {
        x.values -= first_row * x.padded();
        x.scales -= first_row * x.groups();
        const int64_t panels = w.panels(), blocks = (rows.size() + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
        phases.each(blocks * panels, [&](Range units) {
            for (int64_t unit = units.begin; unit < units.end;) {
                const int64_t block = unit / panels, panel = unit % panels;
                const int64_t end = least(panel + units.end - unit, panels);
                const Range in_block = share_of(rows.size(), 1, block, blocks);
                set_.multiply(w, x, {rows.begin + in_block.begin, rows.begin + in_block.end}, {panel, end}, e);
                unit += end - panel;
            }
        });
    }

    void hand_out(Range tokens) const {
        if (step_.is_whole && model_.final_norm != nullptr) {
            norm(arena_.x, model_.final_norm, model_.final_norm_bias, step_.hidden, tokens);
            return;
        }
        std::memcpy(step_.hidden + tokens.begin * model_.hidden, arena_.x + tokens.begin * model_.hidden,
                    tokens.size() * model_.hidden * sizeof(float));
    }

    const EncoderModel& model_;
    const EncoderStep& step_;
    const Arena& arena_;
    const EncoderKernels& set_;
};

}  // namespace

int64_t attention_scratch(int64_t length, int64_t head_dim) {
    const int64_t padded = rounded_up(length, WIDEST_SPAN), dims = rounded_up(head_dim, WIDEST_SPAN);
    return 4 * (2 * padded * dims + QUERY_BLOCK * (padded + dims));
}

}  // namespace pe

// Fills W from `rows`, float32 [n, K]; row i becomes output first + i.
PE_EXPORT void pe_wide_pack(const pe::WideMatrix* w, const float* rows, int64_t count, int64_t first) {
    using namespace pe;
    const int64_t padded = w->padded(), groups = w->groups();
    for (int64_t i = 0; i < count; ++i) {
        const float* const row = rows + i * w->inputs;
        const int64_t output = first + i, lane = output % WIDE_PANEL;
        int16_t* const panel = w->values + output / WIDE_PANEL * padded * WIDE_PANEL;
        float* const scales = w->scales + output / WIDE_PANEL * groups * WIDE_PANEL;
        for (int64_t group = 0; group < groups; ++group) {
            const int64_t begin = group * WIDE_GROUP, end = least(begin + WIDE_GROUP, w->inputs);
            float peak = 0;
            for (int64_t k = begin; k < end; ++k) peak = __builtin_fmaxf(peak, __builtin_fabsf(row[k]));
            scales[group * WIDE_PANEL + lane] = peak / WIDE_PEAK;
            const float factor = peak > 1e-30f ? WIDE_PEAK / peak : 0.0f;
            for (int64_t k = begin; k < end; ++k)
                panel[k / 2 * 2 * WIDE_PANEL + 2 * lane + k % 2] =
                    static_cast<int16_t>(__builtin_lrintf(row[k] * factor));
        }
    }
}

// Bytes of a step's arena. Of `step` only the counts are read.
PE_EXPORT int64_t pe_encoder_arena(const pe::EncoderModel* model, const pe::EncoderStep* step) {
    return pe::Arena(*model, *step, nullptr).end - static_cast<const char*>(nullptr);
}

PE_EXPORT void pe_encoder_forward(const pe::EncoderModel* model, const pe::EncoderStep* step) {
    using namespace pe;
    const Arena arena(*model, *step, step->arena);
    const Encoding encoding(*model, *step, arena);
    run_phases([&](Phases& phases) { encoding.run(phases); });
}
