// A panel of bf16 is already what TDPBF16PS takes as its second operand: rows of 16 outputs by two k.
//
// A thread's units are one stream of tiles. Tiles leave the vector units idle, so that what these have to do is done a
// little in each step of a product: sums of the rows before go out, and the next panel's integers become bf16.
#include <immintrin.h>

#include "amx_tiles.h"
#include "epilogue_avx512.h"
#include "gemm_amx.h"
#include "scratch.h"

#define PE_ALWAYS_INLINE inline __attribute__((always_inline))
#define PE_LAMBDA_INLINE __attribute__((always_inline))

namespace pe {
namespace {

constexpr int64_t K_STEP = 32;                  // k that a tile takes
constexpr int64_t ROWS = 2 * TILE_ROWS;         // that are multiplied together
constexpr int64_t STEP_BYTES = 2 * TILE_BYTES;  // between rows of a panel's tile: two k of 32 outputs
constexpr int64_t K_BYTES = 2 * PANEL;          // of one k of a panel of bf16
constexpr int64_t LINE = 64;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The four sums of 32 rows, by two halves of 16 outputs.
struct alignas(64) Sums {
    float values[2][ROWS * 16];
};

// What is added to the sums of a panel, and where they belong.
struct PanelOutputs {
    __m512 bias[2];
    __mmask16 mask[2];
    int64_t first;

    PanelOutputs(const Epilogue& e, int64_t output, int64_t outputs) : first(output) {
        for (int half = 0; half < 2; ++half) {
            const int64_t at = output + 16 * half;
            mask[half] = mask_below(outputs - at);
            bias[half] = e.bias ? _mm512_maskz_loadu_ps(mask[half], e.bias + at) : _mm512_setzero_ps();
        }
    }
};

PE_INLINE void store_outputs(float* to, const float* residual, __mmask16 mask, __m512 y) {
    if (residual != nullptr) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, residual));
    _mm512_mask_storeu_ps(to, mask, y);
}

PE_INLINE void store_outputs(bf16* to, const bf16* residual, __mmask16 mask, __m512 y) {
    if (residual != nullptr) {
        const __m256i bits = _mm256_maskz_loadu_epi16(mask, residual);
        y = _mm512_add_ps(y, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)));
    }
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(y));
}

// The outputs of a row and a panel.
template <bool SILU, typename Out>
PE_INLINE void put_row(const Epilogue& e, const PanelOutputs& panel, int64_t row, __m512 low, __m512 high) {
    const int64_t at = row * e.out_stride + (SILU ? panel.first / 2 : panel.first);
    Out* const to = static_cast<Out*>(e.out) + at;
    const Out* const residual = e.residual ? static_cast<const Out*>(e.residual) + at : nullptr;
    if (SILU) {
        store_outputs(to, residual, panel.mask[0], _mm512_mul_ps(silu(low), high));
    } else {
        store_outputs(to, residual, panel.mask[0], low);
        store_outputs(to + 16, residual ? residual + 16 : nullptr, panel.mask[1], high);
    }
}

// Sums on their way out.
template <bool SILU, typename Out>
class Leaving {
  public:
    // Sums are `factor` times too small.
    Leaving(const Epilogue& e, float factor) : e_(e), factor_(_mm512_set1_ps(factor)), panel_(e, 0, 0) {}

    // These, of `rows`. Those before have left.
    PE_ALWAYS_INLINE void start(const Sums& sums, const PanelOutputs& panel, Range rows) {
        sums_ = &sums;
        panel_ = panel;
        row_ = rows.begin;
        at_ = 0;
        left_ = rows.size();
    }

    PE_ALWAYS_INLINE void put(int64_t most) {
        for (; most > 0 && left_ > 0; --most, --left_, ++row_, ++at_)
            put_row<SILU, Out>(e_, panel_, row_, output_of(0), output_of(1));
    }

  private:
    PE_ALWAYS_INLINE __m512 output_of(int half) const {
        return _mm512_fmadd_ps(_mm512_load_ps(sums_->values[half] + 16 * at_), factor_, panel_.bias[half]);
    }

    const Epilogue e_;
    const __m512 factor_;
    PanelOutputs panel_;
    const Sums* sums_ = nullptr;
    int64_t row_ = 0, at_ = 0, left_ = 0;
};

// Integer weights on their way to bf16. They are computed in fp16, as their scales are, times 2^8, which keeps small ones above
// what tiles take for zero; so none may be larger than 255. The bits of an fp16 number, rounded and three places to the right,
// are those of a bf16 number 2^112 times smaller. Activations are 2^100 times larger, so that no product is too small; what
// remains of all that, outputs are multiplied with.
constexpr float ROW_FACTOR = 0x1p100f, WEIGHT_FACTOR = 0x1p8f, OUTPUT_FACTOR = 0x1p4f;

// 32 weights of 16 outputs, two of each, to bf16.
PE_INLINE __m512i to_bf16(__m512h w) {
    // (w + 4) >> 3 in one instruction; and what the shift copied of the sign.
    const __m512i shifted = _mm512_mulhrs_epi16(_mm512_castph_si512(w), _mm512_set1_epi16(1 << 12));
    return _mm512_and_si512(shifted, _mm512_set1_epi16(static_cast<int16_t>(0x8fff)));
}

// 16 values, each for the two words of a dword.
PE_INLINE __m512h twice(__m256i values) {
    const __m512i once = _mm512_cvtepu16_epi32(values);
    return _mm512_castsi512_ph(_mm512_or_si512(once, _mm512_slli_epi32(once, 16)));
}

// A group's scales, and what is added to integers `offset` too large times these, for 32 outputs.
struct GroupScales {
    __m512h scale[2], addend[2];

    PE_ALWAYS_INLINE GroupScales(const uint16_t* scales, const uint16_t* mins, float offset) {
        const __m512h factor = _mm512_set1_ph(WEIGHT_FACTOR);
        const __m512h all = _mm512_mul_ph(_mm512_castsi512_ph(_mm512_loadu_si512(scales)), factor);
        __m512h add = _mm512_mul_ph(all, _mm512_set1_ph(-offset));
        if (mins != nullptr) add = _mm512_fmadd_ph(_mm512_castsi512_ph(_mm512_loadu_si512(mins)), factor, add);
        const __m512i scale_bits = _mm512_castph_si512(all), add_bits = _mm512_castph_si512(add);
        scale[0] = twice(_mm512_castsi512_si256(scale_bits));
        scale[1] = twice(_mm512_extracti64x4_epi64(scale_bits, 1));
        addend[0] = twice(_mm512_castsi512_si256(add_bits));
        addend[1] = twice(_mm512_extracti64x4_epi64(add_bits, 1));
    }

    PE_ALWAYS_INLINE __m512i bf16s(__m512h integers, int half) const {
        return to_bf16(_mm512_fmadd_ph(integers, scale[half], addend[half]));
    }
};

constexpr int64_t AHEAD = 8192;       // bytes of a panel that are asked for before they are read
constexpr int64_t GROUPS_AHEAD = 16;  // the same of scales and mins

// Rows `row` of a panel of bf16: two k of 32 outputs, of which `half` are these.
PE_INLINE void put(uint8_t* to, int64_t row, int half, __m512i values) {
    _mm512_store_si512(to + row * STEP_BYTES + half * TILE_BYTES, values);
}

// COUNT k of a panel of eight bits, to bf16.
struct SpreadEight {
    static constexpr int64_t BYTES = PANEL;  // of one k
    static constexpr float OFFSET = 128.0f;

    template <int COUNT>
    static PE_ALWAYS_INLINE void run(const uint8_t* from, const GroupScales& scales, uint8_t* to) {
#pragma GCC unroll 8
        for (int step = 0; step < COUNT / 4; ++step)
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const uint8_t* const at = from + 128 * step + 64 * half;
                _mm_prefetch(at + AHEAD, _MM_HINT_T0);
                const __m512i x = _mm512_loadu_si512(at);
                const __m512i even = _mm512_and_si512(x, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16(x, 8);
                put(to, 2 * step, half, scales.bf16s(_mm512_cvtepu16_ph(even), half));
                put(to, 2 * step + 1, half, scales.bf16s(_mm512_cvtepu16_ph(odd), half));
            }
    }
};

// MINS: whether the matrix has any.
template <bool MINS>
struct SpreadFour {
    static constexpr int64_t BYTES = PANEL / 2;
    static constexpr float OFFSET = MINS ? 16.0f : 0.0f;

    // q, or without mins q - 8, and more by `OFFSET`. Where four bits are shifted to be the first of a mantissa, and the rest
    // says 16, it is 16 + q.
    static PE_ALWAYS_INLINE __m512h as_half(__m512i shifted) {
        constexpr int AND_OR = 0xea;  // (a & b) | c
        const __m512h more = _mm512_castsi512_ph(_mm512_ternarylogic_epi32(
            shifted, _mm512_set1_epi16(15 << 6), _mm512_set1_epi16(0x4c00), AND_OR));
        return MINS ? more : _mm512_sub_ph(more, _mm512_set1_ph(24.0f));
    }

    template <int COUNT>
    static PE_ALWAYS_INLINE void run(const uint8_t* from, const GroupScales& scales, uint8_t* to) {
#pragma GCC unroll 4
        for (int pair = 0; pair < COUNT / 8; ++pair)
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const uint8_t* const at = from + 128 * pair + 64 * half;
                _mm_prefetch(at + AHEAD, _MM_HINT_T0);
                const __m512i x = _mm512_loadu_si512(at);
                put(to, 4 * pair, half, scales.bf16s(as_half(_mm512_slli_epi16(x, 6)), half));
                put(to, 4 * pair + 1, half, scales.bf16s(as_half(_mm512_srli_epi16(x, 2)), half));
                put(to, 4 * pair + 2, half, scales.bf16s(as_half(_mm512_slli_epi16(x, 2)), half));
                put(to, 4 * pair + 3, half, scales.bf16s(as_half(_mm512_srli_epi16(x, 6)), half));
            }
    }
};

// Makes the panels of a matrix bf16, one after the other, K_STEP k at a time. CHUNK: k that surely share a scale.
template <typename Spread, int CHUNK>
class Spreader {
  public:
    Spreader(const PackedMatrix& w, int64_t first_panel)
        : from_(w.panel(first_panel)),
          scales_(w.panel_scales(first_panel)),
          mins_(w.panel_mins(first_panel)),
          group_(w.channel_scales ? w.inputs : w.group) {
        // What `step` asks for ahead of time, for the first steps: all at once, and not one wait after the other.
        for (int64_t line = 0; line < AHEAD; line += LINE) _mm_prefetch(from_ + line, _MM_HINT_T0);
        for (int64_t group = 0; group < GROUPS_AHEAD; ++group) {
            _mm_prefetch(scales_ + group * PANEL, _MM_HINT_T0);
            if (mins_ != nullptr) _mm_prefetch(mins_ + group * PANEL, _MM_HINT_T0);
        }
    }

    PE_ALWAYS_INLINE void step(uint8_t* to) {
        for (int k = 0; k < K_STEP; k += CHUNK, to += CHUNK * K_BYTES) {
            Spread::template run<CHUNK>(from_, GroupScales(scales_, mins_, Spread::OFFSET), to);
            from_ += CHUNK * Spread::BYTES;
            in_group_ += CHUNK;
            if (in_group_ < group_) continue;
            in_group_ = 0;
            scales_ += PANEL;
            _mm_prefetch(scales_ + GROUPS_AHEAD * PANEL, _MM_HINT_T0);
            if (mins_ == nullptr) continue;
            mins_ += PANEL;
            _mm_prefetch(mins_ + GROUPS_AHEAD * PANEL, _MM_HINT_T0);
        }
    }

  private:
    const uint8_t* from_;
    const uint16_t* scales_;
    const uint16_t* mins_;
    int64_t group_;
    int64_t in_group_ = 0;
};

// The sums of 32 rows, or with HALF of the first 16, each the same in the same order. `panel(step)`: the panel's K_STEP k of
// a step; `meanwhile` is called in each.
template <bool HALF, typename Panel, typename Meanwhile>
PE_INLINE void multiply(const Panel& panel, int64_t k_steps, const bf16* x, int64_t stride, Sums& sums,
                        const Meanwhile& meanwhile) {
    const int64_t row_bytes = stride * static_cast<int64_t>(sizeof *x);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < k_steps; ++step, x += K_STEP) {
        const uint8_t* const weights = panel(step);
        order_tiles_and_memory();
        _tile_loadd(4, x, row_bytes);
        _tile_loadd(6, weights, STEP_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + TILE_BYTES, STEP_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        if (!HALF) {
            _tile_loadd(5, x + TILE_ROWS * stride, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        meanwhile();
    }
    _tile_stored(0, sums.values[0], TILE_BYTES);
    _tile_stored(1, sums.values[1], TILE_BYTES);
    if (!HALF) {
        _tile_stored(2, sums.values[0] + 16 * TILE_ROWS, TILE_BYTES);
        _tile_stored(3, sums.values[1] + 16 * TILE_ROWS, TILE_BYTES);
    }
    order_tiles_and_memory();
}

template <typename Panel, typename Meanwhile>
PE_INLINE void multiply_rows(int64_t num_rows, const Panel& panel, int64_t k_steps, const bf16* x, int64_t stride,
                             Sums& sums, const Meanwhile& meanwhile) {
    if (num_rows > TILE_ROWS) {
        multiply<false>(panel, k_steps, x, stride, sums, meanwhile);
    } else {
        multiply<true>(panel, k_steps, x, stride, sums, meanwhile);
    }
}

// Of rows that go together: those in the first tiles, and in the second ones. Tiles are whole where more rows follow.
int64_t upper_rows(int64_t num_rows) { return num_rows < TILE_ROWS ? num_rows : TILE_ROWS; }
int64_t lower_rows(int64_t num_rows) {
    return num_rows <= TILE_ROWS ? 1 : num_rows <= ROWS ? num_rows - TILE_ROWS : TILE_ROWS;
}

// Weights that are bf16: each unit's panel, times its rows 32 at a time.
template <bool SILU, typename Out>
void bf16_stream(const PackedMatrix& w, const Activations& x, int64_t num_rows, const Epilogue& e, Range units) {
    const int64_t panels = w.panels(), blocks = linear_units(w, num_rows) / panels, k_steps = w.inputs / K_STEP;
    const Tiles tiles(upper_rows(num_rows), lower_rows(num_rows));
    bf16* const copy = reinterpret_cast<bf16*>(thread_scratch(ROWS * w.inputs * 2));
    Leaving<SILU, Out> leaving(e, 1.0f);
    Sums sums[2];
    int turn = 0;
    for (int64_t unit = units.begin; unit < units.end; ++unit) {
        const Range rows = rows_of_block(num_rows, unit / panels, blocks);
        const PanelOutputs outputs(e, unit % panels * PANEL, w.outputs);
        const uint8_t* const panel = w.panel(unit % panels);
        const uint8_t* ahead = w.panel(unit + 1 < units.end ? (unit + 1) % panels : unit % panels);
        const int64_t lines = ceil_div(w.panel_bytes() / LINE, ceil_div(rows.size(), ROWS) * k_steps);
        for (int64_t first = rows.begin; first < rows.end; first += ROWS, turn ^= 1) {
            const Range part{first, rows.end - first < ROWS ? rows.end : first + ROWS};
            const bf16* at = x.rows + first * x.stride;
            int64_t stride = x.stride;
            if (num_rows > ROWS && part.size() % TILE_ROWS != 0) {  // behind the last row there may be nothing to read
                for (int64_t r = 0; r < part.size(); ++r) std::memcpy(copy + r * w.inputs, at + r * stride, w.inputs * 2);
                at = copy;
                stride = w.inputs;
            }
            const auto of_step = [&](int64_t step) { return panel + step * K_STEP * K_BYTES; };
            multiply_rows(part.size(), of_step, k_steps, at, stride, sums[turn], [&]() PE_LAMBDA_INLINE {
                leaving.put(ceil_div(ROWS, k_steps));
                for (int64_t line = 0; line < lines; ++line, ahead += LINE) _mm_prefetch(ahead, _MM_HINT_T1);
            });
            leaving.start(sums[turn], outputs, part);
        }
    }
    leaving.put(ROWS);
}

// Units' panels on their way to bf16, step by step, into one of two places each.
template <typename Spread, int CHUNK>
class PanelsAhead {
  public:
    PanelsAhead(const PackedMatrix& w, Range units, uint8_t* memory)
        : w_(w),
          spreader_(w, units.begin % w.panels()),
          memory_(memory),
          k_steps_(w.inputs / K_STEP),
          unit_(units.begin),
          end_(units.end) {}

    uint8_t* at(int64_t unit, int64_t step) const {
        return memory_ + ((unit & 1) * k_steps_ + step) * K_STEP * K_BYTES;
    }

    // The next step, unless it is of a unit behind `last`, whose place is in use.
    PE_ALWAYS_INLINE void step(int64_t last) {
        if (unit_ > last || unit_ == end_) return;
        spreader_.step(at(unit_, step_));
        if (++step_ < k_steps_) return;
        step_ = 0;
        if (++unit_ % w_.panels() == 0) spreader_ = Spreader<Spread, CHUNK>(w_, 0);
    }

    void finish(int64_t unit) {
        while (unit_ <= unit && unit_ < end_) step(unit);
    }

  private:
    const PackedMatrix& w_;
    Spreader<Spread, CHUNK> spreader_;
    uint8_t* const memory_;
    const int64_t k_steps_;
    int64_t unit_, step_ = 0;
    const int64_t end_;
};

constexpr int64_t LEAD = 4;  // steps: a store takes its time to where tiles are loaded from

// Integer weights and more rows than go together: each panel becomes bf16 while the one before is multiplied; the first, just
// before its first rows.
template <typename Spread, int CHUNK, bool SILU, typename Out>
void int_stream(const PackedMatrix& w, const Activations& x, int64_t num_rows, const Epilogue& e, Range units) {
    const int64_t panels = w.panels(), blocks = linear_units(w, num_rows) / panels, k_steps = w.inputs / K_STEP;
    const Tiles tiles;
    PanelsAhead<Spread, CHUNK> ahead(w, units, thread_scratch(2 * w.inputs * K_BYTES));
    for (int64_t step = 0; step < LEAD; ++step) ahead.step(units.begin);
    Leaving<SILU, Out> leaving(e, OUTPUT_FACTOR);
    Sums sums[2];
    int turn = 0;
    for (int64_t unit = units.begin; unit < units.end; ++unit) {
        const Range rows = rows_of_block(num_rows, unit / panels, blocks);
        const PanelOutputs outputs(e, unit % panels * PANEL, w.outputs);
        const int64_t row_blocks = ceil_div(rows.size(), ROWS);
        int64_t wait = 0;
        if (unit > units.begin) ahead.finish(unit);
        for (int64_t first = rows.begin; first < rows.end; first += ROWS, turn ^= 1) {
            const bool is_start = unit == units.begin && first == rows.begin;
            const int64_t every = is_start ? 1 : row_blocks - (unit == units.begin);
            const Range part{first, rows.end - first < ROWS ? rows.end : first + ROWS};
            const auto of_step = [&](int64_t step) PE_LAMBDA_INLINE { return ahead.at(unit, step); };
            multiply_rows(part.size(), of_step, k_steps, x.rows + first * x.stride, x.stride, sums[turn],
                          [&]() PE_LAMBDA_INLINE {
                              leaving.put(ceil_div(ROWS, k_steps));
                              if (++wait < every) return;
                              wait = 0;
                              ahead.step(unit + 1);
                          });
            leaving.start(sums[turn], outputs, part);
        }
    }
    leaving.put(ROWS);
}

// The same for rows that go together: what becomes bf16 is used once, soon, and never leaves the first-level cache.
template <typename Spread, int CHUNK, bool SILU, typename Out>
void few_rows_stream(const PackedMatrix& w, const Activations& x, int64_t num_rows, const Epilogue& e, Range units) {
    constexpr int64_t SLOTS = 2 * LEAD;
    alignas(64) uint8_t ring[SLOTS][K_STEP * K_BYTES];
    const Tiles tiles(upper_rows(num_rows), lower_rows(num_rows));
    const int64_t k_steps = w.inputs / K_STEP;
    int64_t left = units.size() * k_steps, spread = 0, used = 0;
    Spreader<Spread, CHUNK> spreader(w, units.begin);
    const auto spread_one = [&]() PE_LAMBDA_INLINE {
        if (left == 0) return;
        --left;
        spreader.step(ring[spread++ % SLOTS]);
    };
    for (int64_t i = 0; i < LEAD; ++i) spread_one();
    Leaving<SILU, Out> leaving(e, OUTPUT_FACTOR);
    Sums sums[2];
    for (int64_t unit = units.begin; unit < units.end; ++unit) {
        const auto of_step = [&](int64_t) { return ring[used++ % SLOTS]; };
        multiply_rows(num_rows, of_step, k_steps, x.rows, x.stride, sums[unit & 1], [&]() PE_LAMBDA_INLINE {
            leaving.put(ceil_div(num_rows, k_steps));
            spread_one();
        });
        leaving.start(sums[unit & 1], PanelOutputs(e, unit * PANEL, w.outputs), {0, num_rows});
    }
    leaving.put(ROWS);
}

PE_INLINE __m512 load16(const float* from) { return _mm512_loadu_ps(from); }
PE_INLINE __m512 load16(const bf16* from) { return widen(from); }

template <typename T>
void tile_row(const T* x, int64_t inputs, bf16* to) {
    const __m512 factor = _mm512_set1_ps(ROW_FACTOR);
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    for (int64_t k = 0; k < inputs; k += 32) {
        const __m512 low = _mm512_mul_ps(load16(x + k), factor), high = _mm512_mul_ps(load16(x + k + 16), factor);
        _mm512_storeu_si512(to + k, _mm512_shuffle_epi8((__m512i)_mm512_cvtne2ps_pbh(high, low), order));
    }
}

}  // namespace

void tile_rows(const void* x, DType type, int64_t stride, Range rows, int64_t inputs, bf16* to) {
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        if (type == F32) {
            tile_row(static_cast<const float*>(x) + row * stride, inputs, to + row * inputs);
        } else {
            tile_row(static_cast<const bf16*>(x) + row * stride, inputs, to + row * inputs);
        }
    }
}

namespace {

template <typename Spread, bool SILU, typename Out>
void int_stream_of(const PackedMatrix& w, const Activations& x, int64_t num_rows, const Epilogue& e, Range units) {
    const bool in_32s = w.group % 32 == 0, few = num_rows <= ROWS;
    const auto run = in_32s ? (few ? few_rows_stream<Spread, 32, SILU, Out> : int_stream<Spread, 32, SILU, Out>)
                            : (few ? few_rows_stream<Spread, 16, SILU, Out> : int_stream<Spread, 16, SILU, Out>);
    run(w, x, num_rows, e, units);
}

template <bool SILU, typename Out>
void stream(const PackedMatrix& w, const Activations& x, int64_t num_rows, const Epilogue& e, Range units) {
    const auto run = w.format == WEIGHT_BF16   ? bf16_stream<SILU, Out>
                     : w.format == WEIGHT_INT8 ? int_stream_of<SpreadEight, SILU, Out>
                     : w.mins != nullptr       ? int_stream_of<SpreadFour<true>, SILU, Out>
                                               : int_stream_of<SpreadFour<false>, SILU, Out>;
    run(w, x, num_rows, e, units);
}

}  // namespace

void linear_part_amx(const PackedMatrix& w, const Activations& x, int64_t num_rows, const Epilogue& e, Range units) {
    if (units.begin >= units.end) return;
    if (e.silu_mul) {
        e.out_type == F32 ? stream<true, float>(w, x, num_rows, e, units)
                          : stream<true, bf16>(w, x, num_rows, e, units);
    } else {
        e.out_type == F32 ? stream<false, float>(w, x, num_rows, e, units)
                          : stream<false, bf16>(w, x, num_rows, e, units);
    }
}

}  // namespace pe
