// The attention kernel, compiled once for each instruction set. See attention.h for what it computes.
//
// All work is a product of some query rows with a tile of keys, a softmax step, and a product with the tile's values
// (flash attention, Dao 2022, arXiv:2205.14135). An item of work is a kv head and some query tokens of one sequence; its
// rows are these tokens in all query heads that share the kv head. So a decode row reads each key and value once, and
// a prefill item packs them once for about a hundred rows.
//
// Both products run over units of 32 bits: one float, or a pair of bfloat16 that one instruction multiplies and adds.
// Packing turns a tile of the cache into panels of units, COLUMNS wide:
//   keys [panel of COLUMNS keys][D / STEP][COLUMNS], values [panel of COLUMNS dimensions][TILE / STEP][COLUMNS]
#pragma once

#include "attention.h"
#include "vector.h"

namespace pe {
namespace {

constexpr int TILE = 64;  // keys packed at a time
constexpr int VECTORS = 2;
constexpr int COLUMNS = VECTORS * LANES;
#if defined(__AVX512F__)
constexpr int ROWS = 8;  // of a product: ROWS x VECTORS accumulators in registers
#else
constexpr int ROWS = 4;
#endif
constexpr int MAX_ROWS = 128;     // of an item
constexpr int MAX_SHARED_ROWS = 16;  // of an item that threads may share
constexpr float LOG2_E = 1.44269504f;

static_assert(ATTENTION_PARTITION % TILE == 0 && TILE % COLUMNS == 0, "tiles do not cross partitions");
static_assert(MAX_ROWS >= ATTENTION_MAX_GROUP, "a query token is not divided");

PE_ALWAYS_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
PE_ALWAYS_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
PE_ALWAYS_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
PE_ALWAYS_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// One float a unit, from a cache of Cache.
template <typename Cache>
struct FloatUnit {
    using Element = Cache;
    static constexpr int STEP = 1;

    PE_ALWAYS_INLINE static f32v dot(f32v sum, float a, u32v b) { return fma(splat(a), bit_cast<f32v>(b), sum); }

    PE_ALWAYS_INLINE static void put(float* to, f32v values, int64_t left) { store_upto(to, values, left); }

    PE_ALWAYS_INLINE static u32v key_units(const Cache* key, int64_t left) {
        return bit_cast<u32v>(load_upto(key, left));
    }

    // A panel's row: COLUMNS dimensions of one position.
    PE_ALWAYS_INLINE static void value_units(u32v* units, const Cache* value, const Cache*, int64_t left) {
        for (int v = 0; v < VECTORS; ++v, value += LANES, left -= LANES)
            units[v] = left > 0 ? bit_cast<u32v>(load_upto(value, left)) : u32v{};
    }
};

#if defined(__AVX512BF16__)
// Two neighbouring bfloat16 a unit.
struct PairUnit {
    using Element = bf16;
    static constexpr int STEP = 2;

    PE_ALWAYS_INLINE static f32v dot(f32v sum, float a, u32v b) {
        return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(bit_cast<int32_t>(a)), (__m512bh)b);
    }

    PE_ALWAYS_INLINE static void put(float* to, f32v values, int64_t left) {
        store_upto(reinterpret_cast<bf16*>(to), values, left);
    }

    PE_ALWAYS_INLINE static u32v key_units(const bf16* key, int64_t left) {
        return (u32v)_mm512_maskz_loadu_epi16(first_lanes(left * STEP), key);
    }

    // A panel's row: COLUMNS dimensions of two positions, of which the second may be missing.
    PE_ALWAYS_INLINE static void value_units(u32v* units, const bf16* even, const bf16* odd, int64_t left) {
        const __m512i a = _mm512_maskz_loadu_epi16(first_lanes(left), even);
        const __m512i b = _mm512_maskz_loadu_epi16(odd == nullptr ? 0 : first_lanes(left), odd);
        // Lane i takes a[i] and b[i] in the first vector, a[16 + i] and b[16 + i] in the second.
        const i32v pairs = lane_index() * 0x00010001 + (32 << 16);
        units[0] = (u32v)_mm512_permutex2var_epi16(a, (__m512i)pairs, b);
        units[1] = (u32v)_mm512_permutex2var_epi16(a, (__m512i)(pairs + 0x00100010), b);
    }

    PE_ALWAYS_INLINE static __mmask32 first_lanes(int64_t count) {
        return static_cast<__mmask32>(count >= 32 ? 0xffffffffu : (1u << count) - 1);
    }
};
#endif

// c[r][0 .. VECTORS_HERE lanes) = c * factors[r] (0 without factors) + a [NUM_ROWS, depth] x b [depth, COLUMNS], units.
template <typename Unit, int NUM_ROWS, int VECTORS_HERE>
PE_ALWAYS_INLINE void multiply(const float* a, int64_t a_stride, const u32v* b, int64_t depth, float* c,
                               int64_t c_stride, const float* factors) {
    f32v sums[NUM_ROWS][VECTORS_HERE];
#pragma GCC unroll 8
    for (int r = 0; r < NUM_ROWS; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS_HERE; ++v)
            sums[r][v] = factors == nullptr ? f32v{} : load(c + r * c_stride + v * LANES) * factors[r];
    for (int64_t k = 0; k < depth; ++k) {
#pragma GCC unroll 8
        for (int r = 0; r < NUM_ROWS; ++r)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS_HERE; ++v)
                sums[r][v] = Unit::dot(sums[r][v], a[r * a_stride + k], b[k * VECTORS + v]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < NUM_ROWS; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS_HERE; ++v) store(c + r * c_stride + v * LANES, sums[r][v]);
}

// A kv head and some neighbouring query tokens of one sequence.
struct Item {
    int64_t row;           // of the batch
    int64_t kv_head;
    int64_t first_token;   // of the packed query tokens
    int64_t num_tokens;
    int64_t first_position;  // of its first token in its sequence
    int64_t keys_begin;    // positions that any of its tokens sees
    int64_t keys_end;
    int64_t num_rows;      // num_tokens x heads of the group

    int64_t first_partition() const { return keys_begin / ATTENTION_PARTITION; }
    int64_t end_partition() const { return ceil_div(keys_end, ATTENTION_PARTITION); }
    // What a partition costs, in arbitrary units: packing is worth some rows.
    int64_t cost(int64_t partition) const {
        const int64_t begin = most(keys_begin, partition * ATTENTION_PARTITION);
        const int64_t end = least(keys_end, (partition + 1) * ATTENTION_PARTITION);
        return (end - begin) * (num_rows + 12);
    }
    int64_t cost() const { return (keys_end - keys_begin) * (num_rows + 12); }
    bool is_shareable() const { return num_rows <= MAX_SHARED_ROWS && end_partition() - first_partition() > 1; }
};

struct Sizes {
    int64_t group;         // query heads to a kv head
    int64_t query_tokens;  // of an item
    int64_t key_units;     // floats of a packed query or key
    int64_t padded_dim;
    int64_t state_stride;  // floats of a row's state: LANES partial sums of probabilities, then the weighted values

    template <typename Unit>
    static Sizes of(const AttentionArgs& args) {
        const int64_t group = args.num_heads / args.num_kv_heads;
        const int64_t padded_dim = round_up(args.head_dim, LANES);
        const int64_t tokens = MAX_ROWS / group;
        return {group, tokens > ROWS ? tokens / ROWS * ROWS : tokens, ceil_div(args.head_dim, Unit::STEP), padded_dim,
                LANES + padded_dim};
    }
};

// Calls visit(item) for all items of the batch, in one order for all threads.
template <typename Visit>
PE_ALWAYS_INLINE void for_each_item(const AttentionArgs& args, const Sizes& sizes, const Visit& visit) {
    for (int64_t row = 0; row < args.num_rows; ++row) {
        const int64_t row_begin = args.query_start_loc[row], row_end = args.query_start_loc[row + 1];
        const int64_t length = args.seq_lens[row], context = length - (row_end - row_begin);
        for (int64_t token = row_begin; token < row_end; token += sizes.query_tokens) {
            const int64_t count = least(sizes.query_tokens, row_end - token);
            const int64_t position = context + token - row_begin;
            const int64_t begin = args.sliding_window > 0 ? most(0, position + 1 - args.sliding_window) : 0;
            const int64_t end = args.is_causal ? position + count : length;
            for (int64_t head = 0; head < args.num_kv_heads; ++head)
                visit(Item{row, head, token, count, position, begin, end, count * sizes.group});
        }
    }
}

// The states of an item's rows: what a softmax over some of the keys has summed up. `highest` is the largest score.
struct States {
    float* highest;
    float* sums;  // [rows, state_stride]
};

struct Scratch {
    float* queries;  // [rows, key_units]
    u32v* keys;
    u32v* values;
    States total;
    States part;

    // Takes what it needs from `memory`; returns the end of it.
    template <typename Unit>
    char* place(const Sizes& sizes, char* memory) {
        const auto take = [&memory](int64_t floats) {
            char* const begin = memory;
            memory += round_up(floats * sizeof(float), 64);
            return begin;
        };
        queries = reinterpret_cast<float*>(take(MAX_ROWS * sizes.key_units));
        keys = reinterpret_cast<u32v*>(take(TILE * sizes.key_units));
        values = reinterpret_cast<u32v*>(take(TILE / Unit::STEP * round_up(sizes.padded_dim, COLUMNS)));
        total = {reinterpret_cast<float*>(take(MAX_ROWS)), nullptr};
        total.sums = reinterpret_cast<float*>(take(MAX_ROWS * sizes.state_stride));
        part = {reinterpret_cast<float*>(take(MAX_ROWS)), nullptr};
        part.sums = reinterpret_cast<float*>(take(MAX_ROWS * sizes.state_stride));
        return memory;
    }
};

constexpr float NOTHING = -__builtin_inff();  // the highest score before there is one

// total = total and part together.
__attribute__((noinline)) void merge(States total, States part, int64_t num_rows, const Sizes& sizes, float scale) {
    for (int64_t r = 0; r < num_rows; ++r) {
        float* const to = total.sums + r * sizes.state_stride;
        const float* const from = part.sums + r * sizes.state_stride;
        if (part.highest[r] == NOTHING) continue;
        if (total.highest[r] == NOTHING) {
            total.highest[r] = part.highest[r];
            std::memcpy(to, from, sizes.state_stride * sizeof(float));
            continue;
        }
        const float highest = total.highest[r] > part.highest[r] ? total.highest[r] : part.highest[r];
        const f32v a = exp2_clamped(splat((total.highest[r] - highest) * scale));
        const f32v b = exp2_clamped(splat((part.highest[r] - highest) * scale));
        for (int64_t i = 0; i < sizes.state_stride; i += LANES)
            store(to + i, fma(a, load(to + i), b * load(from + i)));
        total.highest[r] = highest;
    }
}

PE_ALWAYS_INLINE void clear(States states, int64_t num_rows, const Sizes& sizes) {
    for (int64_t r = 0; r < num_rows; ++r) states.highest[r] = NOTHING;
    std::memset(states.sums, 0, num_rows * sizes.state_stride * sizeof(float));
}

// One item's way over its keys.
template <typename Unit>
class ItemWorker {
    using Element = typename Unit::Element;

  public:
    ItemWorker(const AttentionArgs& args, const Sizes& sizes, const Scratch& scratch, const Item& item)
        : args_(args), sizes_(sizes), scratch_(scratch), item_(item), scale_(args.scale * LOG2_E) {
        for (int64_t token = 0; token < item.num_tokens; ++token)
            for (int64_t head = 0; head < sizes.group; ++head) pack_query(token, head);
    }

    void sum_partition(int64_t partition, States states) {
        clear(states, item_.num_rows, sizes_);
        const int64_t begin = most(partition * ATTENTION_PARTITION, item_.keys_begin / TILE * TILE);
        const int64_t end = least((partition + 1) * ATTENTION_PARTITION, item_.keys_end);
        for (int64_t key = begin; key < end; key += TILE) sum_tile(key, least(TILE, end - key), states);
    }

    void sum_all(States total) {
        sum_partition(item_.first_partition(), total);
        for (int64_t p = item_.first_partition() + 1; p < item_.end_partition(); ++p) {
            sum_partition(p, scratch_.part);
            merge(total, scratch_.part, item_.num_rows, sizes_, scale_);
        }
    }

    void write(States total) const {
        for (int64_t token = 0; token < item_.num_tokens; ++token)
            for (int64_t head = 0; head < sizes_.group; ++head) {
                const int64_t row = token * sizes_.group + head;
                const int64_t at = element_of(token, head, args_.out_stride);
                const float* const sums = total.sums + row * sizes_.state_stride;
                if (args_.q_dtype == BF16)
                    write_row(static_cast<bf16*>(args_.out) + at, sums);
                else
                    write_row(static_cast<float*>(args_.out) + at, sums);
            }
    }

  private:
    int64_t element_of(int64_t token, int64_t head, int64_t token_stride) const {
        return (item_.first_token + token) * token_stride +
               (item_.kv_head * sizes_.group + head) * args_.head_dim;
    }

    void pack_query(int64_t token, int64_t head) {
        const int64_t row = token * sizes_.group + head;
        const int64_t at = element_of(token, head, args_.q_stride);
        float* const to = scratch_.queries + row * sizes_.key_units;
        if (args_.q_dtype == BF16)
            pack_row(to, static_cast<const bf16*>(args_.q) + at);
        else
            pack_row(to, static_cast<const float*>(args_.q) + at);
        const int64_t position = item_.first_position + token;
        rows_end_[row] = args_.is_causal ? position + 1 : item_.keys_end;
        rows_begin_[row] = args_.sliding_window > 0 ? most(0, position + 1 - args_.sliding_window) : 0;
    }

    template <typename Query>
    PE_ALWAYS_INLINE void pack_row(float* to, const Query* from) const {
        for (int64_t i = 0; i < args_.head_dim; i += LANES)
            Unit::put(to + i / Unit::STEP, load_upto(from + i, args_.head_dim - i), args_.head_dim - i);
    }

    template <typename Query>
    PE_ALWAYS_INLINE void write_row(Query* to, const float* sums) const {
        const f32v factor = splat(1.0f / reduce_add(load(sums)));
        for (int64_t i = 0; i < args_.head_dim; i += LANES)
            store_upto(to + i, load(sums + LANES + i) * factor, args_.head_dim - i);
    }

    // Keys first_key .. first_key + count, which lie in one partition.
    void sum_tile(int64_t first_key, int64_t count, States states) {
        int64_t offsets[TILE];
        const int32_t* const table = args_.block_tables + item_.row * args_.table_stride;
        for (int64_t i = 0; i < count; ++i) {
            const int64_t position = first_key + i;
            offsets[i] = table[position / args_.block_size] * args_.block_stride +
                         position % args_.block_size * args_.token_stride + item_.kv_head * args_.head_stride;
        }
        pack_keys(offsets, count);
        pack_values(offsets, count);
        for (int64_t row = 0; row < item_.num_rows; row += ROWS) {
            switch (least(ROWS, item_.num_rows - row)) {
                case 1: sum_rows<1>(row, first_key, count, states); break;
                case 2: sum_rows<2>(row, first_key, count, states); break;
                case 3: sum_rows<3>(row, first_key, count, states); break;
                case 4: sum_rows<4>(row, first_key, count, states); break;
#if defined(__AVX512F__)
                case 5: sum_rows<5>(row, first_key, count, states); break;
                case 6: sum_rows<6>(row, first_key, count, states); break;
                case 7: sum_rows<7>(row, first_key, count, states); break;
                case 8: sum_rows<8>(row, first_key, count, states); break;
#endif
            }
        }
    }

    void pack_keys(const int64_t* offsets, int64_t count) {
        const Element* const keys = static_cast<const Element*>(args_.keys);
        for (int64_t first = 0; first < round_up(count, COLUMNS); first += LANES) {
            u32v* const panel = scratch_.keys + first / COLUMNS * sizes_.key_units * VECTORS + first % COLUMNS / LANES;
            for (int64_t unit = 0; unit < sizes_.key_units; unit += LANES) {
                const int64_t left = sizes_.key_units - unit;
                u32v rows[LANES];
                for (int i = 0; i < LANES; ++i)
                    rows[i] = first + i < count
                                  ? Unit::key_units(keys + offsets[first + i] + unit * Unit::STEP, left)
                                  : u32v{};
                transpose(rows);
                for (int i = 0; i < LANES && i < left; ++i) panel[(unit + i) * VECTORS] = rows[i];
            }
        }
    }

    void pack_values(const int64_t* offsets, int64_t count) {
        const Element* const values = static_cast<const Element*>(args_.values);
        for (int64_t i = 0; i < count; i += Unit::STEP) {
            const Element* const value = values + offsets[i];
            const Element* const next = i + 1 < count ? values + offsets[i + 1] : nullptr;
            u32v* to = scratch_.values + i / Unit::STEP * VECTORS;
            for (int64_t d = 0; d < args_.head_dim; d += COLUMNS, to += TILE / Unit::STEP * VECTORS)
                Unit::value_units(to, value + d, next == nullptr ? next : next + d, args_.head_dim - d);
        }
    }

    // Rows `row` .. of the item against the packed tile, all or those of its panels that they see.
    template <int NUM_ROWS>
    void sum_rows(int64_t row, int64_t first_key, int64_t count, States states) {
        const int64_t begin = most(0, rows_begin_[row] - first_key) / COLUMNS * COLUMNS;
        const int64_t end = least(count, rows_end_[row + NUM_ROWS - 1] - first_key);
        if (begin >= end) return;
        alignas(64) float scores[NUM_ROWS * TILE];
        alignas(64) float probabilities[NUM_ROWS * TILE / Unit::STEP];
        float factors[NUM_ROWS];
        for (int64_t panel = begin / COLUMNS; panel * COLUMNS < end; ++panel)
            multiply<Unit, NUM_ROWS, VECTORS>(scratch_.queries + row * sizes_.key_units, sizes_.key_units,
                                              scratch_.keys + panel * sizes_.key_units * VECTORS, sizes_.key_units,
                                              scores + panel * COLUMNS, TILE, nullptr);
        for (int r = 0; r < NUM_ROWS; ++r)
            factors[r] = take_scores(scores + r * TILE, probabilities + r * TILE / Unit::STEP, begin, end,
                                     rows_begin_[row + r] - first_key, rows_end_[row + r] - first_key,
                                     states.highest[row + r], states.sums + (row + r) * sizes_.state_stride);
        float* const sums = states.sums + row * sizes_.state_stride + LANES;
        const int64_t skipped = begin / Unit::STEP, depth = ceil_div(end, Unit::STEP) - skipped;
        for (int64_t d = 0; d < sizes_.padded_dim; d += COLUMNS) {
            const u32v* const panel = scratch_.values + (d / COLUMNS * (TILE / Unit::STEP) + skipped) * VECTORS;
            if (sizes_.padded_dim - d >= COLUMNS)
                multiply<Unit, NUM_ROWS, VECTORS>(probabilities + skipped, TILE / Unit::STEP, panel, depth, sums + d,
                                                  sizes_.state_stride, factors);
            else
                multiply<Unit, NUM_ROWS, 1>(probabilities + skipped, TILE / Unit::STEP, panel, depth, sums + d,
                                            sizes_.state_stride, factors);
        }
    }

    // One row's softmax step over scores begin .. end, of which it sees those from `first` to `last`: fills in its
    // probabilities, adds them to the sums, and returns what the weighted values of before are to be multiplied by.
    PE_ALWAYS_INLINE float take_scores(float* scores, float* probabilities, int64_t begin, int64_t end, int64_t first,
                                       int64_t last, float& highest, float* sums) {
        const int64_t whole_end = round_up(end, LANES);
        if (first >= end || last <= begin) {
            for (int64_t i = begin; i < whole_end; i += LANES) Unit::put(probabilities + i / Unit::STEP, f32v{}, LANES);
            return 1.0f;
        }
        const auto is_seen = [&](int64_t i) {
            const i32v at = lane_index() + splat_int(static_cast<int32_t>(i));
            return (at >= static_cast<int32_t>(most(first, 0))) & (at < static_cast<int32_t>(least(last, end)));
        };
        const int64_t clear_begin = most(first, begin), clear_end = least(last, end);
        f32v top = splat(highest);
        for (int64_t i = begin; i < whole_end; i += LANES) {
            f32v s = load(scores + i);
            if (i < clear_begin || i + LANES > clear_end) s = is_seen(i) ? s : splat(NOTHING);
            top = max(top, s);
        }
        const float before = highest;
        highest = reduce_max(top);
        const f32v offset = splat(-highest * scale_), scale = splat(scale_);
        f32v sum = {};
        for (int64_t i = begin; i < whole_end; i += LANES) {
            f32v p = exp2_clamped(fma(load(scores + i), scale, offset));
            if (i < clear_begin || i + LANES > clear_end) p = is_seen(i) ? p : f32v{};
            sum += p;
            Unit::put(probabilities + i / Unit::STEP, p, LANES);
        }
        const f32v factor = exp2_clamped(splat((before - highest) * scale_));
        store(sums, fma(load(sums), factor, sum));
        return factor[0];
    }

    const AttentionArgs& args_;
    const Sizes& sizes_;
    const Scratch& scratch_;
    const Item& item_;
    const float scale_;                // of scores, times log2(e)
    int64_t rows_begin_[MAX_ROWS];     // positions that each row sees
    int64_t rows_end_[MAX_ROWS];
};

// Which thread a stretch of the work belongs to: that in whose even share its middle lies.
struct Division {
    int64_t total;
    int64_t num_threads;
    int64_t owner(int64_t before, int64_t cost) const { return (2 * before + cost) * num_threads / (2 * total); }
};

// Calls visit(item, owner of its first partition, owner of its last, cost of the work before it).
template <typename Visit>
PE_ALWAYS_INLINE void for_each_owned(const AttentionArgs& args, const Sizes& sizes, const Division& division,
                                     const Visit& visit) {
    int64_t before = 0;
    for_each_item(args, sizes, [&](const Item& item) {
        const int64_t cost = item.cost();
        if (item.is_shareable()) {
            const int64_t first = item.cost(item.first_partition()), last = item.cost(item.end_partition() - 1);
            visit(item, division.owner(before, first), division.owner(before + cost - last, last), before);
        } else {
            const int64_t owner = division.owner(before, cost);
            visit(item, owner, owner, before);
        }
        before += cost;
    });
}

// Where the state of a partition of a shared item waits to be merged.
PE_ALWAYS_INLINE States shared_states(char* memory, const Sizes& sizes, int64_t index) {
    const int64_t stride = MAX_SHARED_ROWS * (sizes.state_stride + LANES);
    float* const at = reinterpret_cast<float*>(memory) + index * stride;
    return {at + MAX_SHARED_ROWS * sizes.state_stride, at};
}

template <typename Unit>
int64_t workspace_of(const AttentionArgs& args, int64_t max_seq_len, int32_t num_threads) {
    const Sizes sizes = Sizes::of<Unit>(args);
    Scratch scratch;
    const int64_t own = scratch.place<Unit>(sizes, nullptr) - static_cast<char*>(nullptr);
    const int64_t max_shared = (num_threads - 1) * ceil_div(max_seq_len, ATTENTION_PARTITION);
    return num_threads * own + max_shared * MAX_SHARED_ROWS * (sizes.state_stride + LANES) * int64_t{sizeof(float)};
}

template <typename Unit>
void run_share(const AttentionArgs& args, const Team& team) {
    const Sizes sizes = Sizes::of<Unit>(args);
    Scratch scratch;
    const int64_t own = scratch.place<Unit>(sizes, nullptr) - static_cast<char*>(nullptr);
    char* const memory = static_cast<char*>(args.workspace);
    scratch.place<Unit>(sizes, memory + team.thread * own);
    char* const shared = memory + team.num_threads * own;

    Division division{0, team.num_threads};
    for_each_item(args, sizes, [&](const Item& item) { division.total += item.cost(); });
    int64_t num_shared = 0;  // partitions of shared items so far
    for_each_owned(args, sizes, division, [&](const Item& item, int64_t first, int64_t last, int64_t before) {
        if (first == last) {
            if (first != team.thread) return;
            ItemWorker<Unit> worker(args, sizes, scratch, item);
            worker.sum_all(scratch.total);
            worker.write(scratch.total);
            return;
        }
        const int64_t slots = num_shared;
        num_shared += item.end_partition() - item.first_partition();
        if (team.thread < first || team.thread > last) return;
        ItemWorker<Unit> worker(args, sizes, scratch, item);
        for (int64_t p = item.first_partition(), done = before; p < item.end_partition(); done += item.cost(p), ++p)
            if (division.owner(done, item.cost(p)) == team.thread)
                worker.sum_partition(p, shared_states(shared, sizes, slots + p - item.first_partition()));
    });
    if (num_shared == 0) return;

    team.barrier();
    num_shared = 0;
    for_each_owned(args, sizes, division, [&](const Item& item, int64_t first, int64_t last, int64_t) {
        if (first == last) return;
        const int64_t slots = num_shared, count = item.end_partition() - item.first_partition();
        num_shared += count;
        if (first != team.thread) return;
        const States total = shared_states(shared, sizes, slots);
        for (int64_t i = 1; i < count; ++i)
            merge(total, shared_states(shared, sizes, slots + i), item.num_rows, sizes, args.scale * LOG2_E);
        ItemWorker<Unit>(args, sizes, scratch, item).write(total);
    });
}

#if defined(__AVX512BF16__)
using Bf16CacheUnit = PairUnit;
#else
using Bf16CacheUnit = FloatUnit<bf16>;
#endif

int64_t workspace_for(const AttentionArgs& args, int64_t max_seq_len, int32_t num_threads) {
    return args.kv_dtype == BF16 ? workspace_of<Bf16CacheUnit>(args, max_seq_len, num_threads)
                                 : workspace_of<FloatUnit<float>>(args, max_seq_len, num_threads);
}

void run_any(const AttentionArgs& args, const Team& team) {
    args.kv_dtype == BF16 ? run_share<Bf16CacheUnit>(args, team) : run_share<FloatUnit<float>>(args, team);
}

}  // namespace
}  // namespace pe
