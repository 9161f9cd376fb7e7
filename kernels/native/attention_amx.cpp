// Attention of a bfloat16 cache on AMX tiles, for items of `attention_work.h`.
//
// The cache's units of 32 bits (kv_cache.h) are what a tile of the right side consists of: 16 keys, or 16 dimensions of
// values, side by side. A partition's scores are computed as a whole before its softmax, so the weighted values of a
// partition are summed up in tiles, without a rescaling between.
//
// Few rows go the same way as many, with tiles that are not full: they wait for memory anyway. TDPBF16PS has an order
// of its own: it sums up even and odd places apart, each with fused multiplications from 0, and adds both to the total
// at the end of a tile. VDPBF16PS does not; AVX-512 could do the same in float32 only.
#include "amx_tiles.h"
#include "attention_work.h"
#include "kv_cache.h"

namespace pe {
namespace {

constexpr int SIDE = 16;             // rows of a tile, and columns of 32 bits
constexpr int DEPTH = 2 * SIDE;      // bfloat16 of a left tile's row: dimensions of a query, or keys
constexpr int WORDS = SIDE * SIDE;   // of a tile, of 32 bits
constexpr int HEIGHT = 2 * SIDE;     // rows that a right tile is loaded for
constexpr int64_t KEYS = ATTENTION_PARTITION;
constexpr int KEY_TILES = KEYS / SIDE;
constexpr int STEPS = KEYS / DEPTH;  // of the product with the values

static_assert(MAX_ROWS % SIDE == 0 && MAX_SHARED_ROWS == SIDE, "states have room for whole tiles");

// Tiles (0 to 3 are sums, 4 and 5 the left side, 6 and 7 the right one); and floats below the least normal one are zero, as they
// are in tiles: probabilities may become as small, which would take a hundred cycles each.
class TileSetting {
  public:
    TileSetting() : control_(_mm_getcsr()) {
        constexpr unsigned FLUSH_RESULTS = 0x8000, FLUSH_OPERANDS = 0x0040;
        _mm_setcsr(control_ | FLUSH_RESULTS | FLUSH_OPERANDS);
    }
    ~TileSetting() { _mm_setcsr(control_); }
    TileSetting(const TileSetting&) = delete;
    TileSetting& operator=(const TileSetting&) = delete;

  private:
    const Tiles tiles_;
    const unsigned control_;
};

// 2^x for x <= 0, to 4e-6 of its value: bfloat16 keeps 4e-3 of that. Exactly 1 at 0, and NaN where x is.
PE_ALWAYS_INLINE f32v exp2_of_negative(f32v x) {
    constexpr int ROUND_DOWN = 1;
    const f32v fraction = _mm512_reduce_ps(x, ROUND_DOWN);  // x less the integer below
    f32v p = splat(1.35557465e-2f);
    p = fma(p, fraction, splat(5.20323701e-2f));
    p = fma(p, fraction, splat(2.41379768e-1f));
    p = fma(p, fraction, splat(6.93032146e-1f));
    p = fma(p, fraction, splat(1.0f));
    return _mm512_scalef_ps(p, x);  // by the integer below
}

// Two vectors of probabilities as a row of a left tile.
PE_ALWAYS_INLINE void store_pairs(void* to, f32v first, f32v second) {
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

struct TileScratch {
    uint32_t* queries;  // [tiles of rows][head_dim / DEPTH][SIDE][SIDE]
    float* scores;      // [2 tiles of rows][KEY_TILES][SIDE][SIDE]; probabilities of two take the place of the first
    uint32_t* values;   // [STEPS][SIDE][head_dim], of steps that are not in the cache as they are multiplied
    States total;
    States part;

    char* place(const Sizes& sizes, char* memory) {
        const auto take = [&memory](int64_t words) {
            char* const begin = memory;
            memory += round_up(words * sizeof(float), 64);
            return reinterpret_cast<float*>(begin);
        };
        queries = reinterpret_cast<uint32_t*>(take(MAX_ROWS * sizes.key_units));
        scores = take(2 * KEY_TILES * WORDS);
        values = reinterpret_cast<uint32_t*>(take(STEPS * SIDE * sizes.padded_dim));
        total = {take(MAX_ROWS), take(MAX_ROWS * sizes.state_stride)};
        part = {take(MAX_ROWS), take(MAX_ROWS * sizes.state_stride)};
        return memory;
    }
};

// One item's way over its keys.
class TileWorker {
  public:
    using Scratch = TileScratch;
    using Setting = TileSetting;

    static Sizes sizes(const AttentionArgs& args) {
        const int64_t most_tokens = MAX_ROWS / (args.num_heads / args.num_kv_heads);
        return Sizes::of(args, whole_tiles(args, most_tokens), 2, args.block_size / 2 * args.head_dim);
    }

    TileWorker(const AttentionArgs& args, const Sizes& sizes, const Scratch& scratch, const Item& item)
        : args_(args), sizes_(sizes), scratch_(scratch), item_(item), scale_(args.scale * LOG2_E) {
        for (int64_t token = 0; token < item.num_tokens; ++token)
            for (int64_t head = 0; head < sizes.group; ++head) pack_query(token, head);
        for (int64_t row = item.num_rows; row % SIDE != 0; ++row)
            for (int64_t step = 0; step < depth_steps(); ++step) std::memset(query_at(row, step), 0, 2 * DEPTH);
    }

    void sum_partition(int64_t partition, States states) {
        first_key_ = partition * KEYS;
        begin_ = most(0, item_.keys_begin - first_key_);
        end_ = least(KEYS, item_.keys_end - first_key_);
        find_keys();
        find_values();
        for (int64_t row = 0; row < item_.num_rows; row += HEIGHT)
            item_.num_rows - row > SIDE ? sum_rows<2>(row, states) : sum_rows<1>(row, states);
    }

  private:
    // Of a partition, DEPTH keys each.
    struct Steps {
        int64_t first;
        int64_t end;
    };

    // As many tokens as make whole pairs of tiles, if that is possible.
    static int64_t whole_tiles(const AttentionArgs& args, int64_t most_tokens) {
        const int64_t group = args.num_heads / args.num_kv_heads;
        for (int64_t tokens = most_tokens; tokens > 0; --tokens)
            if (tokens * group % HEIGHT == 0) return tokens;
        return most_tokens;
    }

    int64_t depth_steps() const { return args_.head_dim / DEPTH; }

    // Where dimensions DEPTH x step .. of a row's query are.
    uint32_t* query_at(int64_t row, int64_t step) const {
        return scratch_.queries + (row / SIDE * depth_steps() + step) * WORDS + row % SIDE * SIDE;
    }

    void pack_query(int64_t token, int64_t head) {
        const int64_t row = token * sizes_.group + head;
        const int64_t at = element_of(args_, sizes_, item_, token, head, args_.q_stride);
        for (int64_t step = 0; step < depth_steps(); ++step) {
            if (args_.q_dtype == BF16) {
                std::memcpy(query_at(row, step), static_cast<const bf16*>(args_.q) + at + step * DEPTH, 2 * DEPTH);
            } else {
                const float* const from = static_cast<const float*>(args_.q) + at + step * DEPTH;
                store_pairs(query_at(row, step), load(from), load(from + LANES));
            }
        }
        const int64_t position = item_.first_position + token;
        rows_end_[row] = args_.is_causal ? position + 1 : item_.keys_end;
        rows_begin_[row] = args_.sliding_window > 0 ? most(0, position + 1 - args_.sliding_window) : 0;
    }

    // The block that holds the partition's key `key`, and the place of that in it.
    const uint32_t* head_of_block(const void* cache, int64_t key) const {
        const int64_t block = (first_key_ + key) / args_.block_size;
        const int64_t id = args_.block_tables[item_.row * args_.table_stride + block];
        return static_cast<const uint32_t*>(cache) + (id * args_.num_kv_heads + item_.kv_head) * sizes_.head_units;
    }
    int64_t place_in_block(int64_t key) const { return (first_key_ + key) % args_.block_size; }

    void find_keys() {
        for (int64_t key = begin_ / SIDE * SIDE; key < end_; key += SIDE)
            keys_[key / SIDE] = head_of_block(args_.keys, key) + place_in_block(key);
    }

    // Where each step's values lie. Those that no block holds together, or that nobody wrote some of, are copied.
    void find_values() {
        const bool are_whole = args_.block_size % DEPTH == 0;
        for (int64_t step = begin_ / DEPTH; step * DEPTH < end_; ++step) {
            const int64_t key = step * DEPTH;
            if (are_whole && key >= begin_ / SIDE * SIDE && key + DEPTH <= end_) {
                values_[step] = values_at(key);
            } else {
                uint32_t* const to = scratch_.values + step * SIDE * args_.head_dim;
                values_[step] = to;
                for (int64_t half = 0; half < DEPTH; half += SIDE)
                    copy_values(key + half, to + half / 2 * args_.head_dim);
            }
        }
    }

    const uint32_t* values_at(int64_t key) const {
        return head_of_block(args_.values, key) + place_in_block(key) / 2 * args_.head_dim;
    }

    // SIDE values, of which those that no row sees become 0: a probability of 0 times NaN would be NaN.
    void copy_values(int64_t key, uint32_t* to) const {
        const int64_t size = args_.head_dim;
        const int64_t count = key < begin_ / SIDE * SIDE ? 0 : most(0, least(SIDE, end_ - key));
        const uint32_t* const from = count > 0 ? values_at(key) : nullptr;
        for (int64_t i = 0; i < count / 2 * size; i += LANES)
            _mm512_storeu_si512(to + i, _mm512_loadu_si512(from + i));
        int64_t pair = count / 2;
        if (count % 2 != 0) {
            for (int64_t d = 0; d < size; ++d) to[pair * size + d] = from[pair * size + d] & 0x0000ffffu;
            ++pair;
        }
        for (int64_t i = pair * size; i < SIDE / 2 * size; ++i) to[i] = 0;
    }

    // `row` .. of the item, TILES x SIDE of them or fewer, over the keys of the partition that they see.
    template <int TILES>
    void sum_rows(int64_t row, States states) {
        const int64_t row_end = least(row + TILES * SIDE, item_.num_rows);
        const int64_t begin = most(0, rows_begin_[row] - first_key_);
        const int64_t end = least(end_, rows_end_[row_end - 1] - first_key_);
        if (begin >= end) {
            for (int64_t r = row; r < row_end; ++r) states.highest[r] = NOTHING;
            return;
        }
        multiply_keys<TILES>(row, begin / SIDE, ceil_div(end, SIDE));
        const Steps steps{begin / DEPTH, ceil_div(end, DEPTH)};
        const auto scores_of = [&](int64_t r) { return scores_at((r - row) / SIDE, 0) + (r - row) % SIDE * SIDE; };
        // All maxima before the first power: no row waits for its own.
        for (int64_t r = row; r < row_end; ++r) states.highest[r] = highest_score(r, scores_of(r), steps);
        for (int64_t r = row; r < row_end; ++r)
            take_scores(r, scores_of(r), steps, states.highest[r], states.sums + r * sizes_.state_stride);
        multiply_values<TILES>(states.sums + row * sizes_.state_stride + LANES, steps);
    }

    float* scores_at(int64_t row_tile, int64_t key_tile) const {
        return scratch_.scores + (row_tile * KEY_TILES + key_tile) * WORDS;
    }

    // Scores of key tiles first .. end.
    template <int TILES>
    void multiply_keys(int64_t row, int64_t first, int64_t end) const {
        const int64_t stride = 4 * args_.block_size, step_units = SIDE * args_.block_size;
        for (int64_t tile = first; tile < end; tile += 2) {
            const uint32_t* const left = keys_[tile];
            const uint32_t* const right = tile + 1 < end ? keys_[tile + 1] : left;
            clear_sums<TILES>();
            for (int64_t step = 0; step < depth_steps(); ++step)
                add_products<TILES>(query_at(row, step), query_at(row + SIDE, step), left + step * step_units,
                                    right + step * step_units, stride);
            store_sums<TILES>(scores_at(0, tile), scores_at(1, tile), tile + 1 < end ? WORDS : 0, 4 * SIDE);
        }
    }

    // sums = probabilities x values.
    template <int TILES>
    void multiply_values(float* sums, Steps steps) const {
        for (int64_t d = 0; d < args_.head_dim; d += 2 * SIDE) {
            clear_sums<TILES>();
            for (int64_t step = steps.first; step < steps.end; ++step)
                add_products<TILES>(scores_at(0, 2 * step), scores_at(1, 2 * step), values_[step] + d,
                                    values_[step] + d + SIDE, 4 * args_.head_dim);
            store_sums<TILES>(sums + d, sums + SIDE * sizes_.state_stride + d, SIDE, 4 * sizes_.state_stride);
        }
    }

    template <int TILES>
    PE_ALWAYS_INLINE static void clear_sums() {
        asm volatile("" ::: "memory");  // what tiles are loaded from is there: GCC does not know that they read memory
        _tile_zero(0);
        _tile_zero(1);
        if (TILES == 1) return;
        _tile_zero(2);
        _tile_zero(3);
    }

    // Of one or two tiles of rows and two columns of tiles, whose rows are `stride` bytes apart.
    template <int TILES>
    PE_ALWAYS_INLINE static void add_products(const void* upper, const void* lower, const void* left, const void* right,
                                              int64_t stride) {
        _tile_loadd(4, upper, 4 * SIDE);
        _tile_loadd(6, left, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, right, stride);
        _tile_dpbf16ps(1, 4, 7);
        if (TILES == 1) return;
        _tile_loadd(5, lower, 4 * SIDE);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }

    // The second column goes `next` floats beside the first one. With 0 there is none, and what it holds is of no use.
    template <int TILES>
    PE_ALWAYS_INLINE static void store_sums(float* upper, float* lower, int64_t next, int64_t stride) {
        if (next != 0) _tile_stored(1, upper + next, stride);
        _tile_stored(0, upper, stride);
        if (TILES == 1) return;
        if (next != 0) _tile_stored(3, lower + next, stride);
        _tile_stored(2, lower, stride);
    }

    // Of those that a row sees.
    PE_ALWAYS_INLINE float highest_score(int64_t row, const float* scores, Steps steps) const {
        f32v tops[2] = {splat(NOTHING), splat(NOTHING)};
        each_step(row, steps, [&](int64_t step, const auto& seen) {
            for (int i = 0; i < 2; ++i)
                tops[i] = max(tops[i], seen(i, load(scores + (2 * step + i) * WORDS), NOTHING));
        });
        return reduce_max(max(tops[0], tops[1]));
    }

    // A row's probabilities take the place of its scores; the first vector of `sums` is what they add up to.
    PE_ALWAYS_INLINE void take_scores(int64_t row, float* scores, Steps steps, float highest, float* sums) const {
        const f32v scale = splat(scale_), offset = splat(-highest * scale_);
        f32v totals[2] = {};
        each_step(row, steps, [&](int64_t step, const auto& seen) {
            f32v p[2];
            for (int i = 0; i < 2; ++i) {
                const f32v exponents = fma(load(scores + (2 * step + i) * WORDS), scale, offset);
                p[i] = seen(i, exp2_of_negative(exponents), 0.0f);
                totals[i] += p[i];
            }
            store_pairs(scores + 2 * step * WORDS, p[0], p[1]);
        });
        store(sums, totals[0] + totals[1]);
    }

    // Calls visit(step, seen), where seen(i, values, otherwise) are the values of the step's i-th vector that belong to
    // keys which the row sees: in most steps all.
    template <typename Visit>
    PE_ALWAYS_INLINE void each_step(int64_t row, Steps steps, const Visit& visit) const {
        const int64_t from = rows_begin_[row] - first_key_, to = rows_end_[row] - first_key_;
        const i32v begin = splat_int(static_cast<int32_t>(most(from, 0)));
        const i32v past = splat_int(static_cast<int32_t>(most(least(to, KEYS), 0)));
        const auto some = [&](int64_t step) {
            visit(step, [&](int i, f32v v, float otherwise) {
                const i32v at = lane_index() + splat_int(static_cast<int32_t>(step * DEPTH + i * SIDE));
                return (at >= begin) & (at < past) ? v : splat(otherwise);
            });
        };
        int64_t step = steps.first;
        for (; step < steps.end && step * DEPTH < from; ++step) some(step);
        for (; step < steps.end && (step + 1) * DEPTH <= to; ++step) visit(step, [](int, f32v v, float) { return v; });
        for (; step < steps.end; ++step) some(step);
    }

    const AttentionArgs& args_;
    const Sizes& sizes_;
    const Scratch& scratch_;
    const Item& item_;
    const float scale_;             // of scores, times log2(e)
    int64_t rows_begin_[MAX_ROWS];  // positions that each row sees
    int64_t rows_end_[MAX_ROWS];
    // Of the partition, whose keys count from 0: which of them the item sees, and where they and their values are.
    int64_t first_key_ = 0;
    int64_t begin_ = 0;
    int64_t end_ = 0;
    const uint32_t* keys_[KEY_TILES];
    const uint32_t* values_[STEPS];
};

}  // namespace

bool suits_amx(const AttentionArgs& args) {
    return args.kv_dtype == BF16 && args.head_dim % DEPTH == 0 && args.block_size % SIDE == 0;
}

AttentionKernels attention_kernels_amx() { return kernels_for<TileWorker>(); }

}  // namespace pe
