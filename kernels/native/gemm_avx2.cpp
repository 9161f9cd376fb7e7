#include <immintrin.h>

#include "gemm_kernels.h"
#include "gemm_scalar.h"
#include "quantize_avx2.h"
#include "scratch.h"
#include "vector.h"

#define PE_INLINE static inline __attribute__((always_inline))

// There are sixteen registers. A tile is some rows by two vectors of 8 outputs, so that its sums stay in them, beside
// two vectors of weights, an activation and what a product passes through; one row takes a whole panel at once, in the
// order in which it lies in memory.
namespace pe {
namespace {

constexpr int INT8_ROWS = 5;
constexpr int INT4_ROWS = 4;
constexpr int SPREAD4_ROWS = 5;               // without what takes two values from a byte, one row more fits
constexpr int64_t SPREAD4_FROM_ROWS = 12;     // that many rows pay for writing a panel's values to bytes of their own
constexpr int BF16_ROWS = 6;
constexpr int WIDTH = 8;                      // floats or 32-bit integers to a vector
constexpr int PANEL_VECTORS = PANEL / WIDTH;
constexpr int64_t BF16_CHUNK = 512;           // k whose activations are widened at a time, and stay in the first-level cache
constexpr int64_t MOST_GROUP = 512;
constexpr int64_t AHEAD = 2048;               // bytes of weights between what one row meets and what it asks memory for
constexpr int32_t INT4_GROUP = 32;            // 32 products of 15 and 127, two to a sum, fit in 16 bits

PE_INLINE __m256 load_half(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

PE_INLINE __m256i load_bytes(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

// sums[v] += b[v] x a, the four bytes at `a` with all lanes of b: as a float, as a pair of 16 bits, as four bytes (b's are
// unsigned), whose products are added up in 32 and in 16 bits. In place of the intrinsics, of which GCC 12 moves loads and
// additions about until the sums no longer fit the registers.
typedef int32_t __attribute__((may_alias)) four_bytes;

PE_INLINE const four_bytes& at_four_bytes(const void* a) { return *static_cast<const four_bytes*>(a); }

template <int VECTORS>
PE_INLINE void add_floats(__m256 (&sums)[VECTORS], const __m256 (&b)[VECTORS], const void* a) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v += 2) {
        __m256 all;
        asm("vbroadcastss %5, %2\n\tvfmadd231ps %2, %3, %0\n\tvfmadd231ps %2, %4, %1"
            : "+x"(sums[v]), "+x"(sums[v + 1]), "=&x"(all)
            : "x"(b[v]), "x"(b[v + 1]), "m"(at_four_bytes(a)));
    }
}

#define PE_ADD_PRODUCTS(multiply, add)                                                                      \
    asm("vpbroadcastd %6, %2\n\t" multiply " %2, %4, %3\n\t" add " %3, %0, %0\n\t" multiply " %2, %5, %3\n\t" add \
        " %3, %1, %1"                                                                                        \
        : "+x"(sums[v]), "+x"(sums[v + 1]), "=&x"(all), "=&x"(product)                                       \
        : "x"(b[v]), "x"(b[v + 1]), "m"(at_four_bytes(a)))

template <int VECTORS>
PE_INLINE void add_pairs(__m256i (&sums)[VECTORS], const __m256i (&b)[VECTORS], const void* a) {
    __m256i all, product;
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v += 2) PE_ADD_PRODUCTS("vpmaddwd", "vpaddd");
}

template <int VECTORS>
PE_INLINE void add_bytes(__m256i (&sums)[VECTORS], const __m256i (&b)[VECTORS], const void* a) {
    __m256i all, product;
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v += 2) PE_ADD_PRODUCTS("vpmaddubsw", "vpaddw");
}

// One row reads each weight once, in order, through all panels, faster than the processor by itself asks for what follows.
template <int ROWS>
PE_INLINE void ask_ahead(const uint8_t* at) {
    if (ROWS > 1) return;
    _mm_prefetch(at + AHEAD, _MM_HINT_T0);
    _mm_prefetch(at + AHEAD + 64, _MM_HINT_T0);
}

PE_INLINE __m256 silu_ps(__m256 x) {
    // Beyond 2^126 the quotient is next to nothing anyway. x is second, so that NaN stays.
    const f32v power = x * -1.44269504f;
    return x / (1.0f + exp2_clamped(-max(splat(-126.0f), -power)));
}

template <typename T>
PE_INLINE void store_row(T* out, const T* residual, const float* y, int64_t count) {
    for (int64_t i = 0; i < count; i += WIDTH) {
        const f32v v = load(y + i);
        store(out + i, residual ? v + load(residual + i) : v);
    }
}

PE_INLINE void store_row(const Epilogue& e, int64_t at, const float* y, int64_t count) {
    if (e.out_type == F32) {
        store_row(static_cast<float*>(e.out) + at, e.residual ? static_cast<const float*>(e.residual) + at : nullptr, y, count);
    } else {
        store_row(static_cast<bf16*>(e.out) + at, e.residual ? static_cast<const bf16*>(e.residual) + at : nullptr, y, count);
    }
}

// As `finish_row`, for whole panels in vectors.
void finish(const Epilogue& e, int64_t row, int64_t output, int64_t outputs, float* y) {
    if (outputs - output < PANEL) return finish_row(e, row, output, outputs, y);
    if (e.bias) {
        for (int64_t i = 0; i < PANEL; i += WIDTH) store(y + i, load(y + i) + load(e.bias + output + i));
    }
    if (!e.silu_mul) return store_row(e, row * e.out_stride + output, y, PANEL);
    for (int64_t i = 0; i < PANEL / 2; i += WIDTH) store(y + i, silu_ps(load(y + i)) * load(y + i + PANEL / 2));
    store_row(e, row * e.out_stride + output / 2, y, PANEL / 2);
}

// Calls tile(row, rows) for rows in tiles of at most `most`, as even as they go: a tile of few rows does less per load.
template <typename Tile>
PE_INLINE void each_tile(Range rows, int64_t most, const Tile& tile) {
    const int64_t tiles = (rows.size() + most - 1) / most;
    for (int64_t i = 0, row = rows.begin; i < tiles; ++i) {
        const int64_t count = rows.size() / tiles + (i < rows.size() % tiles);
        tile(row, count);
        row += count;
    }
}

// Integers. Bytes of weights are unsigned (quant.h); what their offset adds is taken off a group's sum.

// Activations of some rows, from the first on: of their values, or of what is left of them. By value, because the compiler
// takes every store of a vector for one that may change what a reference refers to.
struct RowsOf {
    const int8_t* values;
    const float* scales;
    const int32_t* minus_sums;
    int64_t inputs;
    int64_t groups;

    RowsOf(const QuantizedRows& x, int64_t row, int rest)
        : values(x.values + row * x.inputs + rest * x.rest_of_values()),
          scales(x.scales + row * x.groups + rest * x.rest_of_groups()),
          minus_sums(x.minus_sums + row * x.groups + rest * x.rest_of_groups()),
          inputs(x.inputs),
          groups(x.groups) {}
};

// Adds one group's sums [ROWS][VECTORS] for outputs `first` .. of the panel to y [ROWS][32].
template <int ROWS, int VECTORS, int OFFSET_SHIFT>
PE_INLINE void add_sums(const IntPanel w, const RowsOf x, int64_t group, int64_t first, bool has_mins,
                        const __m256i (&sums)[ROWS][VECTORS], float* y) {
    y = hide(y + first);
    __m256 scales[VECTORS], mins[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
        const int64_t column = group * PANEL + first + v * WIDTH;
        scales[v] = w.channel_scales ? _mm256_set1_ps(1.0f) : load_half(w.scales + column);
        mins[v] = has_mins ? load_half(w.mins + column) : _mm256_setzero_ps();
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
        const __m256i minus_sum = _mm256_set1_epi32(x.minus_sums[r * x.groups + group]);
        const __m256i offset = OFFSET_SHIFT > 0 ? _mm256_slli_epi32(minus_sum, OFFSET_SHIFT) : _mm256_setzero_si256();
        const __m256 scale = _mm256_set1_ps(x.scales[r * x.groups + group]);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
            const __m256i sum = OFFSET_SHIFT > 0 ? _mm256_add_epi32(sums[r][v], offset) : sums[r][v];
            __m256 part = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), scales[v]);
            if (has_mins) part = _mm256_fnmadd_ps(mins[v], _mm256_cvtepi32_ps(minus_sum), part);
            float* const out = y + r * PANEL + v * WIDTH;
            _mm256_storeu_ps(out, _mm256_fmadd_ps(part, scale, _mm256_loadu_ps(out)));
        }
    }
}

template <int ROWS, int VECTORS>
PE_INLINE void clear(__m256i (&sums)[ROWS][VECTORS]) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) sums[r][v] = _mm256_setzero_si256();
}

// INT8: a step of four k is two products of pairs of 16 bits, of even and of odd k, which no sum of 32 bits overflows.
// (A product of bytes does half as many instructions, but two of them do not fit in 16 bits.)
template <int ROWS>
struct Int8Group {
    static constexpr int MOST_ROWS = INT8_ROWS;

    // Activations of some groups. Of each row: for every 32 k the 8 pairs of even k, then those of odd ones. Rows do not
    // meet in the same lines of the cache.
    alignas(32) int16_t a[ROWS][MOST_GROUP + 16];
    int64_t first_group;

    static int64_t groups_at_once(const IntPanel& w) { return MOST_GROUP / w.group; }

    PE_ALWAYS_INLINE Int8Group(const IntPanel w, const RowsOf x, Range groups) : first_group(groups.begin) {
        const int8_t* const from = x.values + groups.begin * w.group;
        const int64_t size = groups.size() * w.group;
        for (int r = 0; r < ROWS; ++r) {
            int64_t k = 0;
            for (; k + 32 <= size; k += 32) widen(r, k, load_bytes(from + r * x.inputs + k));
            if (k == size) continue;
            const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + r * x.inputs + k));
            widen(r, k, _mm256_zextsi128_si256(half));
        }
    }

    PE_ALWAYS_INLINE void widen(int r, int64_t k, __m256i bytes) {
        const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), odd = _mm256_srai_epi16(bytes, 8);
        _mm256_store_si256(reinterpret_cast<__m256i*>(a[r] + k), even);
        _mm256_store_si256(reinterpret_cast<__m256i*>(a[r] + k + 16), odd);
    }

    template <int VECTORS>
    PE_ALWAYS_INLINE void add(const IntPanel w, const RowsOf x, int64_t group, int64_t first, float* y) const {
        const __m256i low_bytes = _mm256_set1_epi16(0xff);
        const uint8_t* at = w.values + group * w.group * PANEL + 4 * first;
        __m256i sums[ROWS][VECTORS];
        clear(sums);
        const int64_t begin = (group - first_group) * w.group;
        for (int64_t k = begin; k < begin + w.group; k += 16) {
            const int64_t pair = k / 32 * 32 + k % 32 / 2;
#pragma GCC unroll 4
            for (int step = 0; step < 4; ++step, at += 4 * PANEL) {
                ask_ahead<ROWS>(at);
                __m256i b[VECTORS];
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; ++v) b[v] = _mm256_and_si256(load_bytes(at + 32 * v), low_bytes);
                multiply(sums, b, pair + 2 * step);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; ++v) b[v] = _mm256_srli_epi16(load_bytes(at + 32 * v), 8);
                multiply(sums, b, pair + 2 * step + 16);
            }
        }
        add_sums<ROWS, VECTORS, 7>(w, x, group, first, w.mins != nullptr, sums, y);
    }

    template <int VECTORS>
    PE_ALWAYS_INLINE void multiply(__m256i (&sums)[ROWS][VECTORS], const __m256i (&b)[VECTORS], int64_t pair) const {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) add_pairs(sums[r], b, a[r] + pair);
    }
};

// INT4 in groups of 32: products of bytes, added up in 16 bits until the group ends. Two values lie in a byte, or are spread
// to one each, in the order of INT8.
template <int ROWS, bool HAS_MINS, bool IS_SPREAD>
struct Int4Group {
    static constexpr int MOST_ROWS = IS_SPREAD ? SPREAD4_ROWS : INT4_ROWS;

    static int64_t groups_at_once(const IntPanel& w) { return w.inputs / INT4_GROUP; }

    PE_ALWAYS_INLINE Int4Group(const IntPanel, const RowsOf, Range) {}

    template <int VECTORS>
    PE_ALWAYS_INLINE void add(const IntPanel w, const RowsOf x, int64_t group, int64_t first, float* y) const {
        constexpr int64_t GROUP_BYTES = INT4_GROUP * PANEL / (IS_SPREAD ? 1 : 2);
        const uint8_t* const at = hide(w.values + group * GROUP_BYTES + 4 * first);
        const int8_t* a[ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) a[r] = hide(x.values + r * x.inputs + group * INT4_GROUP);
        __m256i sums[ROWS][VECTORS];
        clear(sums);
        if (IS_SPREAD)
            add_spread(sums, at, a);
        else
            add_packed(sums, at, a);
        const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) sums[r][v] = _mm256_madd_epi16(sums[r][v], ones);
        add_sums<ROWS, VECTORS, HAS_MINS ? 0 : 3>(w, x, group, first, HAS_MINS, sums, y);
    }

    template <int VECTORS>
    PE_ALWAYS_INLINE static void add_packed(__m256i (&sums)[ROWS][VECTORS], const uint8_t* at, const int8_t* const (&a)[ROWS]) {
        const __m256i nibbles = _mm256_set1_epi8(15);
#pragma GCC unroll 4
        for (int step = 0; step < INT4_GROUP / 8; ++step) {
            ask_ahead<ROWS>(at + step * 4 * PANEL);
            __m256i b[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) b[v] = _mm256_and_si256(load_bytes(at + step * 4 * PANEL + 32 * v), nibbles);
            multiply(sums, b, a, 8 * step);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v)
                b[v] = _mm256_and_si256(_mm256_srli_epi16(load_bytes(at + step * 4 * PANEL + 32 * v), 4), nibbles);
            multiply(sums, b, a, 8 * step + 4);
        }
    }

    template <int VECTORS>
    PE_ALWAYS_INLINE static void add_spread(__m256i (&sums)[ROWS][VECTORS], const uint8_t* at, const int8_t* const (&a)[ROWS]) {
#pragma GCC unroll 8
        for (int step = 0; step < INT4_GROUP / 4; ++step) {
            __m256i b[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) b[v] = load_bytes(at + step * 4 * PANEL + 32 * v);
            multiply(sums, b, a, 4 * step);
        }
    }

    template <int VECTORS>
    PE_ALWAYS_INLINE static void multiply(__m256i (&sums)[ROWS][VECTORS], const __m256i (&b)[VECTORS],
                                          const int8_t* const (&a)[ROWS], int64_t k) {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) add_bytes(sums[r], b, a[r] + k);
    }
};

template <bool HAS_MINS, bool IS_SPREAD>
struct Int4 {
    template <int ROWS>
    using Group = Int4Group<ROWS, HAS_MINS, IS_SPREAD>;
};

// Adds one group of ROWS rows to y [ROWS][32].
template <int ROWS, typename Groups>
PE_INLINE void add_group(const Groups& of_rows, const IntPanel w, const RowsOf x, int64_t group, float* y) {
    constexpr int VECTORS = ROWS == 1 ? PANEL_VECTORS : 2;
#pragma GCC unroll 1
    for (int v = 0; v < PANEL_VECTORS; v += VECTORS) of_rows.template add<VECTORS>(w, x, group, v * WIDTH, y);
}

template <template <int> class Group, int ROWS>
PE_INLINE void add_rest(const IntPanel w, const QuantizedRows& x, int64_t row, int64_t group, float* y) {
    const RowsOf rests(x, row, 1);
    add_group<ROWS>(Group<ROWS>(w, rests, {group, group + 1}), w, rests, group, y);
}

// The rests of a group where only some rows have one, row by row, or all together: the others' are zeros.
template <template <int> class Group, int ROWS>
__attribute__((noinline)) void add_rests(const IntPanel w, const QuantizedRows& x, int64_t row, int64_t group,
                                         uint32_t which, float* y) {
    if (2 * __builtin_popcount(which) > ROWS) return add_rest<Group, ROWS>(w, x, row, group, y);
    for (int r = 0; r < ROWS; ++r)
        if (which >> r & 1) add_rest<Group, 1>(w, x, row + r, group, y + r * PANEL);
}

// Adds what is left of the values of some rows' groups.
template <template <int> class Group, int ROWS>
PE_INLINE void add_all_rests(const IntPanel w, const QuantizedRows& x, int64_t row, float* y) {
    const int64_t words = x.mask_words();
    const uint64_t* const masks = x.rest_masks + row * words;
    for (int64_t word = 0; word < words; ++word) {
        uint64_t any = 0;
        for (int r = 0; r < ROWS; ++r) any |= masks[r * words + word];
        for (; any != 0; any &= any - 1) {
            const int bit = __builtin_ctzll(any);
            uint32_t which = 0;
            for (int r = 0; r < ROWS; ++r) which |= static_cast<uint32_t>(masks[r * words + word] >> bit & 1) << r;
            add_rests<Group, ROWS>(w, x, row, word * 64 + bit, which, y);
        }
    }
}

template <template <int> class Group, int ROWS>
void int_tile(const IntPanel w, const QuantizedRows& x, int64_t row, int64_t output, int64_t outputs, const Epilogue& e) {
    alignas(32) float y[ROWS * PANEL] = {};
    const RowsOf values(x, row, 0);
    const int64_t at_once = Group<ROWS>::groups_at_once(w);
    for (int64_t begin = 0; begin < values.groups; begin += at_once) {
        const Range groups{begin, begin + at_once < values.groups ? begin + at_once : values.groups};
        const Group<ROWS> of_rows(w, values, groups);
        for (int64_t group = groups.begin; group < groups.end; ++group) add_group<ROWS>(of_rows, w, values, group, y);
    }
    add_all_rests<Group, ROWS>(w, x, row, y);
    for (int r = 0; r < ROWS; ++r) {
        if (w.channel_scales) {
            for (int64_t i = 0; i < PANEL; i += WIDTH)
                store(y + r * PANEL + i, load(y + r * PANEL + i) * load_half(w.scales + i));
        }
        finish(e, row + r, output, outputs, y + r * PANEL);
    }
}

template <template <int> class Group>
void int_rows(const IntPanel& w, const QuantizedRows& x, Range rows, int64_t output, int64_t outputs, const Epilogue& e) {
    each_tile(rows, Group<1>::MOST_ROWS, [&](int64_t row, int64_t count) {
        switch (count) {
            case 1: int_tile<Group, 1>(w, x, row, output, outputs, e); break;
            case 2: int_tile<Group, 2>(w, x, row, output, outputs, e); break;
            case 3: int_tile<Group, 3>(w, x, row, output, outputs, e); break;
            case 4: int_tile<Group, 4>(w, x, row, output, outputs, e); break;
            default: int_tile<Group, Group<1>::MOST_ROWS>(w, x, row, output, outputs, e);
        }
    });
}

template <bool IS_SPREAD>
void int4_rows(const IntPanel& w, const QuantizedRows& x, Range rows, int64_t output, int64_t outputs, const Epilogue& e) {
    return w.mins ? int_rows<Int4<true, IS_SPREAD>::template Group>(w, x, rows, output, outputs, e)
                  : int_rows<Int4<false, IS_SPREAD>::template Group>(w, x, rows, output, outputs, e);
}

void int4_block(const IntPanel& w, const QuantizedRows& x, Range rows, int64_t output, int64_t outputs, const Epilogue& e) {
    if (rows.size() < SPREAD4_FROM_ROWS) return int4_rows<false>(w, x, rows, output, outputs, e);
    uint8_t* const bytes = thread_scratch(PANEL * w.inputs);
    unpack4_scalar(w.values, w.inputs, 0, bytes);
    IntPanel spread = w;
    spread.values = bytes;
    int4_rows<true>(spread, x, rows, output, outputs, e);
}

void int_block(const IntPanel& w, const QuantizedRows& x, Range rows, int64_t output, int64_t outputs,
               const Epilogue& e, NextPanel next) {
    if (w.packed4) return int4_block(w, x, rows, output, outputs, e);
    if (w.group > MOST_GROUP) return kernels_portable.int_block(w, x, rows, output, outputs, e, next);
    int_rows<Int8Group>(w, x, rows, output, outputs, e);
}

// bfloat16: widened where it is read, weights by a shift and a mask in units that multiplication leaves free, activations
// once a tile. The products of an output are added up one after the other, whatever the tile.

template <int ROWS, int VECTORS>
PE_INLINE void bf16_chunk(const uint8_t* at, int64_t count, const float (&a)[ROWS][BF16_CHUNK + 16], float* y) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u));
    __m256 sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) sums[r][v] = _mm256_loadu_ps(y + r * PANEL + v * WIDTH);
    for (int64_t k = 0; k < count; k += 2, at += 4 * PANEL) {
        ask_ahead<ROWS>(at);
        __m256 b[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) b[v] = _mm256_castsi256_ps(_mm256_slli_epi32(load_bytes(at + 32 * v), 16));
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) add_floats(sums[r], b, a[r] + k);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) b[v] = _mm256_castsi256_ps(_mm256_and_si256(load_bytes(at + 32 * v), upper));
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) add_floats(sums[r], b, a[r] + k + 1);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) _mm256_storeu_ps(y + r * PANEL + v * WIDTH, sums[r][v]);
}

template <int ROWS>
void bf16_tile(const uint8_t* panel, int64_t inputs, const bf16* x, int64_t x_stride, int64_t row, int64_t output,
               int64_t outputs, const Epilogue& e) {
    constexpr int VECTORS = ROWS == 1 ? PANEL_VECTORS : 2;
    alignas(32) float y[ROWS * PANEL] = {};
    alignas(32) float a[ROWS][BF16_CHUNK + 16];  // and rows do not meet in the same lines of the cache
    for (int64_t begin = 0; begin < inputs; begin += BF16_CHUNK) {
        const int64_t count = inputs - begin < BF16_CHUNK ? inputs - begin : BF16_CHUNK;
        for (int r = 0; r < ROWS; ++r)
            for (int64_t k = 0; k < count; k += WIDTH) store(a[r] + k, load(x + (row + r) * x_stride + begin + k));
#pragma GCC unroll 1
        for (int v = 0; v < PANEL_VECTORS; v += VECTORS)
            bf16_chunk<ROWS, VECTORS>(panel + 2 * begin * PANEL + 32 * v, count, a, y + v * WIDTH);
    }
    for (int r = 0; r < ROWS; ++r) finish(e, row + r, output, outputs, y + r * PANEL);
}

void bf16_block(const uint8_t* panel, int64_t inputs, const bf16* x, int64_t x_stride, Range rows, int64_t output,
                int64_t outputs, const Epilogue& e, NextPanel) {
    each_tile(rows, BF16_ROWS, [&](int64_t row, int64_t count) {
        switch (count) {
            case 1: bf16_tile<1>(panel, inputs, x, x_stride, row, output, outputs, e); break;
            case 2: bf16_tile<2>(panel, inputs, x, x_stride, row, output, outputs, e); break;
            case 3: bf16_tile<3>(panel, inputs, x, x_stride, row, output, outputs, e); break;
            case 4: bf16_tile<4>(panel, inputs, x, x_stride, row, output, outputs, e); break;
            case 5: bf16_tile<5>(panel, inputs, x, x_stride, row, output, outputs, e); break;
            default: bf16_tile<6>(panel, inputs, x, x_stride, row, output, outputs, e); break;
        }
    });
}

void narrow(const float* from, int64_t count, bf16* to) {
    for (int64_t i = 0; i < count; i += WIDTH) store(to + i, load(from + i));
}

}  // namespace

const KernelSet kernels_avx2{int_block,  bf16_block, unpack4_scalar,     INT4_GROUP,
                             INT64_MAX, narrow,     quantize_rows_avx2};

}  // namespace pe
