#include <immintrin.h>

#include "epilogue_avx512.h"
#include "gemm_kernels.h"
#include "quantize_avx512.h"

namespace pe {
namespace {

constexpr int INT_ROWS = 6;    // accumulators: 2 x 6 integer, 2 x 6 float
constexpr int BF16_ROWS = 12;  // accumulators: 2 x 12
constexpr int USUAL_GROUP = 32;
constexpr int64_t LINE = 64;

PE_INLINE __m512i broadcast4(const void* from) {
    int32_t value;
    std::memcpy(&value, from, 4);
    return _mm512_set1_epi32(value);
}

// sum += the dot products of 16 x 4 bytes of w with those of a. In place of the intrinsic, for which GCC 12 copies the
// accumulators around and spills them. Whoever multiplies two vectors with the same four bytes broadcasts them once: an
// operand that the instruction broadcasts itself is one more load, and these would be as many as the products.
PE_INLINE void dot4(__m512i& sum, __m512i w, __m512i a) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(a)); }

// Adds the residual to 16 values and stores those in `mask`.
PE_INLINE void store16(const Epilogue& e, int64_t row, int64_t column, __mmask16 mask, __m512 y) {
    const int64_t at = row * e.out_stride + column;
    if (e.out_type == F32) {
        if (e.residual) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, static_cast<const float*>(e.residual) + at));
        _mm512_mask_storeu_ps(static_cast<float*>(e.out) + at, mask, y);
        return;
    }
    if (e.residual) {
        const __m256i bits = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(e.residual) + at);
        y = _mm512_add_ps(y, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)));
    }
    _mm256_mask_storeu_epi16(static_cast<uint16_t*>(e.out) + at, mask, (__m256i)_mm512_cvtneps_pbh(y));
}

// Not inlined: one copy for the many tiles, and a call is nothing beside a tile.
__attribute__((noinline)) void finish(const Epilogue& e, int64_t row, int64_t output, int64_t outputs, __m512 low, __m512 high) {
    const __mmask16 low_mask = mask_below(outputs - output), high_mask = mask_below(outputs - output - 16);
    if (e.bias) {
        low = _mm512_add_ps(low, _mm512_maskz_loadu_ps(low_mask, e.bias + output));
        high = _mm512_add_ps(high, _mm512_maskz_loadu_ps(high_mask, e.bias + output + 16));
    }
    if (e.silu_mul) {
        store16(e, row, output / 2, low_mask, _mm512_mul_ps(silu(low), high));
    } else {
        store16(e, row, output, low_mask, low);
        if (high_mask) store16(e, row, output + 16, high_mask, high);
    }
}

// Brings the next panel from memory while tiles of this one are computed, each tile its part of it, spread over the loop:
// otherwise memory would rest while all tiles but the first find their weights in the cache.
struct Prefetch {
    const char* at;
    int64_t step_bytes;  // how far to go on for each step of the loop, all tiles together covering the panel
    int lines;           // what to ask for in each step

    static constexpr int64_t MOST_TILES = 8;  // with more of them, the wait in the first is too little to matter

    static Prefetch part(NextPanel next, int64_t loop_steps, int64_t tile, int64_t tiles) {
        const int64_t tile_bytes = next.bytes / tiles, step_bytes = tile_bytes / loop_steps;
        return {reinterpret_cast<const char*>(next.at) + tile * tile_bytes, step_bytes,
                next.at && tiles <= MOST_TILES ? static_cast<int>((step_bytes + LINE - 1) / LINE) : 0};
    }

    void step() {
        for (int line = 0; line < lines; ++line) _mm_prefetch(at + LINE * line, _MM_HINT_T1);
        at += step_bytes;
    }
};

// The weights of two consecutive steps, 32 outputs each.
template <bool PACKED4>
struct TwoSteps {
    __m512i low[2], high[2];

    PE_INLINE TwoSteps load(const uint8_t* from) {
        const __m512i* at = reinterpret_cast<const __m512i*>(from);
        if (!PACKED4) {
            return {{_mm512_loadu_si512(at), _mm512_loadu_si512(at + 2)},
                    {_mm512_loadu_si512(at + 1), _mm512_loadu_si512(at + 3)}};
        }
        const __m512i nibble = _mm512_set1_epi8(15);
        const __m512i low = _mm512_loadu_si512(at), high = _mm512_loadu_si512(at + 1);
        return {{_mm512_and_si512(low, nibble), _mm512_and_si512(_mm512_srli_epi16(low, 4), nibble)},
                {_mm512_and_si512(high, nibble), _mm512_and_si512(_mm512_srli_epi16(high, 4), nibble)}};
    }

    static constexpr int64_t BYTES = PACKED4 ? 128 : 256;
};

// What stands for 0 adds itself times the group's sum: 128 in bytes, 8 in four bits, and 0 in these with mins.
template <bool PACKED4, bool MINS>
PE_INLINE __m512i first_sum(const int32_t* minus_sum) {
    if (PACKED4 && MINS) return _mm512_setzero_si512();
    return _mm512_slli_epi32(broadcast4(minus_sum), PACKED4 ? 3 : 7);
}

// The scales of a group of a panel, and what its integer sums add to the outputs.
template <bool CHANNEL_SCALES, bool MINS>
struct GroupScales {
    __m512 scale[2], min[2];

    PE_INLINE GroupScales load(const IntPanel& w, int64_t group) {
        GroupScales s;
        for (int half = 0; half < 2; ++half) {
            if (!CHANNEL_SCALES) s.scale[half] = load_half(w.scales + group * PANEL + 16 * half);
            if (MINS) s.min[half] = load_half(w.mins + group * PANEL + 16 * half);
        }
        return s;
    }

    void add(__m512& y, int half, __m512i sum, float a_scale, const int32_t* minus_sum) const {
        __m512 part = _mm512_cvtepi32_ps(sum);
        if (!CHANNEL_SCALES) part = _mm512_mul_ps(part, scale[half]);
        if (MINS) part = _mm512_fnmadd_ps(min[half], _mm512_cvtepi32_ps(broadcast4(minus_sum)), part);
        y = _mm512_fmadd_ps(part, _mm512_set1_ps(a_scale), y);
    }
};

// The activations of one group of some rows: values, or what they leave, at `a`.
struct GroupRows {
    const int8_t* a;
    const float* scales;
    const int32_t* minus_sums;
};

// y += what a group of ROWS rows contributes. GROUP: see int_tile.
template <bool PREFETCH, int ROWS, int GROUP, bool PACKED4, bool CHANNEL_SCALES, bool MINS>
PE_INLINE void add_group(__m512 (&y)[ROWS][2], const IntPanel& w, int64_t group, const uint8_t* values, GroupRows rows,
                         const QuantizedRows& x, Prefetch& prefetch) {
    const int pairs = (GROUP ? GROUP : w.group) / 8;
    __m512i sum[ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) sum[r][0] = sum[r][1] = first_sum<PACKED4, MINS>(rows.minus_sums + r * x.groups);
#pragma GCC unroll 4
    for (int pair = 0; pair < pairs; ++pair, rows.a += 8, values += TwoSteps<PACKED4>::BYTES) {
        if (PREFETCH) prefetch.step();
        const TwoSteps<PACKED4> b = TwoSteps<PACKED4>::load(values);
#pragma GCC unroll 2
        for (int step = 0; step < 2; ++step) {
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const __m512i four = broadcast4(rows.a + r * x.inputs + 4 * step);
                dot4(sum[r][0], b.low[step], four);
                dot4(sum[r][1], b.high[step], four);
            }
        }
    }
    const GroupScales<CHANNEL_SCALES, MINS> scales = GroupScales<CHANNEL_SCALES, MINS>::load(w, group);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
        scales.add(y[r][0], 0, sum[r][0], rows.scales[r * x.groups], rows.minus_sums + r * x.groups);
        scales.add(y[r][1], 1, sum[r][1], rows.scales[r * x.groups], rows.minus_sums + r * x.groups);
    }
}

// y [ROWS][2] += what the rests of a tile's rows contribute, where a row has one: of the same weights once more. Apart from
// `int_tile`, whose sums stay in registers only if its loop holds nothing else.
template <int ROWS, int GROUP, bool PACKED4, bool CHANNEL_SCALES, bool MINS>
__attribute__((noinline)) void add_rests(float* to, const IntPanel& w, const QuantizedRows& x, int64_t row) {
    const int64_t group_size = GROUP ? GROUP : w.group, words = x.mask_words();
    Prefetch none{nullptr, 0, 0};
    __m512 y[ROWS][2];
    for (int r = 0; r < ROWS; ++r)
        for (int half = 0; half < 2; ++half) y[r][half] = _mm512_load_ps(to + 32 * r + 16 * half);
    for (int64_t word = 0; word < words; ++word) {
        uint64_t mask = 0;
        for (int r = 0; r < ROWS; ++r) mask |= x.rest_masks[(row + r) * words + word];
        for (; mask != 0; mask &= mask - 1) {
            const int64_t group = 64 * word + __builtin_ctzll(mask), at = row * x.groups + group + x.rest_of_groups();
            const GroupRows rests{x.values + x.rest_of_values() + row * x.inputs + group * group_size, x.scales + at,
                                  x.minus_sums + at};
            add_group<false, ROWS, GROUP, PACKED4, CHANNEL_SCALES, MINS>(
                y, w, group, w.values + group * group_size / 8 * TwoSteps<PACKED4>::BYTES, rests, x, none);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int half = 0; half < 2; ++half) _mm512_store_ps(to + 32 * r + 16 * half, y[r][half]);
}

// The products of a tile's rows with a panel, rests apart. `PREFETCH`: whether there is anything to ask for; even a test of
// that costs the loop 4 % of its speed.
template <bool PREFETCH, int ROWS, int GROUP, bool PACKED4, bool CHANNEL_SCALES, bool MINS>
PE_INLINE void add_groups(__m512 (&y)[ROWS][2], const IntPanel& w, const QuantizedRows& x, int64_t row,
                          Prefetch prefetch) {
    const int64_t group_size = GROUP ? GROUP : w.group;
    GroupRows rows{x.values + row * x.inputs, x.scales + row * x.groups, x.minus_sums + row * x.groups};
    const uint8_t* values = w.values;
    for (int64_t group = 0; group < x.groups; ++group) {
        add_group<PREFETCH, ROWS, GROUP, PACKED4, CHANNEL_SCALES, MINS>(y, w, group, values, rows, x, prefetch);
        rows = {rows.a + group_size, rows.scales + 1, rows.minus_sums + 1};
        values += group_size / 8 * TwoSteps<PACKED4>::BYTES;
    }
}

// GROUP: the size of groups where it is known, so that the compiler unrolls; 0: `w.group`.
template <int ROWS, int GROUP, bool PACKED4, bool CHANNEL_SCALES, bool MINS>
void int_tile(const IntPanel& w, const QuantizedRows& x, int64_t row, int64_t output, int64_t outputs,
              const Epilogue& e, Prefetch prefetch) {
    __m512 y[ROWS][2];
    for (int r = 0; r < ROWS; ++r) y[r][0] = y[r][1] = _mm512_setzero_ps();
    if (prefetch.lines > 0)
        add_groups<true, ROWS, GROUP, PACKED4, CHANNEL_SCALES, MINS>(y, w, x, row, prefetch);
    else
        add_groups<false, ROWS, GROUP, PACKED4, CHANNEL_SCALES, MINS>(y, w, x, row, prefetch);
    alignas(64) float sums[ROWS * PANEL];
    for (int r = 0; r < ROWS; ++r)
        for (int half = 0; half < 2; ++half) _mm512_store_ps(sums + 32 * r + 16 * half, y[r][half]);
    uint64_t any_rest = 0;
    for (int64_t word = 0; word < ROWS * x.mask_words(); ++word) any_rest |= x.rest_masks[row * x.mask_words() + word];
    if (any_rest != 0) add_rests<ROWS, GROUP, PACKED4, CHANNEL_SCALES, MINS>(sums, w, x, row);
    for (int r = 0; r < ROWS; ++r) {
        __m512 low = _mm512_load_ps(sums + 32 * r), high = _mm512_load_ps(sums + 32 * r + 16);
        if (CHANNEL_SCALES) {
            low = _mm512_mul_ps(low, load_half(w.scales));
            high = _mm512_mul_ps(high, load_half(w.scales + 16));
        }
        finish(e, row + r, output, outputs, low, high);
    }
}

template <int ROWS>
void bf16_tile(const uint8_t* panel, int64_t inputs, const bf16* x, int64_t x_stride, int64_t row, int64_t output,
               int64_t outputs, const Epilogue& e, Prefetch prefetch) {
    const bf16* a[ROWS];
    for (int r = 0; r < ROWS; ++r) a[r] = x + (row + r) * x_stride;
    __m512 y[ROWS][2];
    for (int r = 0; r < ROWS; ++r) y[r][0] = y[r][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < inputs; k += 8) {
        prefetch.step();
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; ++pair, panel += 2 * LINE) {
            const __m512bh low = (__m512bh)_mm512_loadu_si512(panel), high = (__m512bh)_mm512_loadu_si512(panel + LINE);
            for (int r = 0; r < ROWS; ++r) {
                const __m512bh two = (__m512bh)broadcast4(a[r] + k + 2 * pair);
                y[r][0] = _mm512_dpbf16_ps(y[r][0], low, two);
                y[r][1] = _mm512_dpbf16_ps(y[r][1], high, two);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r) finish(e, row + r, output, outputs, y[r][0], y[r][1]);
}

// Calls tile.run<ROWS>(row, index, count) for row tiles of at most MAX rows, all about the same height.
template <int ROWS, typename Tile>
PE_INLINE void run_tile(int64_t height, const Tile& tile, int64_t row, int64_t index, int64_t count) {
    if constexpr (ROWS > 1) {
        if (height != ROWS) return run_tile<ROWS - 1>(height, tile, row, index, count);
    }
    tile.template run<ROWS>(row, index, count);
}

template <int MAX, typename Tile>
PE_INLINE void for_each_tile(Range rows, const Tile& tile) {
    const int64_t count = (rows.size() + MAX - 1) / MAX;
    for (int64_t index = 0; index < count; ++index) {
        const Range part = share_of(rows.size(), 1, index, count);
        run_tile<MAX>(part.size(), tile, rows.begin + part.begin, index, count);
    }
}

template <int GROUP, bool PACKED4, bool CHANNEL_SCALES, bool MINS>
struct IntTile {
    const IntPanel& w;
    const QuantizedRows& x;
    int64_t output, outputs;
    const Epilogue& epilogue;
    NextPanel next;

    template <int ROWS>
    void run(int64_t row, int64_t index, int64_t count) const {
        int_tile<ROWS, GROUP, PACKED4, CHANNEL_SCALES, MINS>(w, x, row, output, outputs, epilogue,
                                                             Prefetch::part(next, w.inputs / 8, index, count));
    }
};

struct Bf16Tile {
    const uint8_t* panel;
    int64_t inputs;
    const bf16* x;
    int64_t x_stride, output, outputs;
    const Epilogue& epilogue;
    NextPanel next;

    template <int ROWS>
    void run(int64_t row, int64_t index, int64_t count) const {
        bf16_tile<ROWS>(panel, inputs, x, x_stride, row, output, outputs, epilogue,
                        Prefetch::part(next, inputs / 8, index, count));
    }
};

template <int GROUP, bool PACKED4>
void int_block_of(const IntPanel& w, const QuantizedRows& x, Range rows, int64_t output, int64_t outputs,
                  const Epilogue& e, NextPanel next) {
    if (w.channel_scales) {
        for_each_tile<INT_ROWS>(rows, IntTile<GROUP, PACKED4, true, false>{w, x, output, outputs, e, next});
    } else if (w.mins) {
        for_each_tile<INT_ROWS>(rows, IntTile<GROUP, PACKED4, false, true>{w, x, output, outputs, e, next});
    } else {
        for_each_tile<INT_ROWS>(rows, IntTile<GROUP, PACKED4, false, false>{w, x, output, outputs, e, next});
    }
}

void int_block(const IntPanel& w, const QuantizedRows& x, Range rows, int64_t output, int64_t outputs,
               const Epilogue& e, NextPanel next) {
    if (w.packed4) {
        int_block_of<USUAL_GROUP, true>(w, x, rows, output, outputs, e, next);
    } else if (w.group == USUAL_GROUP) {
        int_block_of<USUAL_GROUP, false>(w, x, rows, output, outputs, e, next);
    } else {
        int_block_of<0, false>(w, x, rows, output, outputs, e, next);
    }
}

void bf16_block(const uint8_t* panel, int64_t inputs, const bf16* x, int64_t x_stride, Range rows, int64_t output,
                int64_t outputs, const Epilogue& e, NextPanel next) {
    for_each_tile<BF16_ROWS>(rows, Bf16Tile{panel, inputs, x, x_stride, output, outputs, e, next});
}

void unpack4(const uint8_t* panel, int64_t inputs, uint8_t offset, uint8_t* bytes) {
    const __m512i add = _mm512_set1_epi8(static_cast<char>(offset));
    for (int64_t k = 0; k < inputs; k += 8, panel += TwoSteps<true>::BYTES, bytes += TwoSteps<false>::BYTES) {
        const TwoSteps<true> b = TwoSteps<true>::load(panel);
        for (int step = 0; step < 2; ++step) {
            _mm512_storeu_si512(bytes + 128 * step, _mm512_add_epi8(b.low[step], add));
            _mm512_storeu_si512(bytes + 128 * step + 64, _mm512_add_epi8(b.high[step], add));
        }
    }
}

}  // namespace

const KernelSet kernels_avx512{int_block, bf16_block, unpack4, USUAL_GROUP, 2 * INT_ROWS, narrow_avx512, quantize_rows_avx512};

}  // namespace pe
