// The attention kernel, compiled once for each instruction set. See attention.h for what it computes.
//
// All work is a product of some query rows with a tile of keys, a softmax step, and a product with the tile's values
// (flash attention, Dao 2022, arXiv:2205.14135), for the items of `attention_work.h`. So each key and value is read from
// memory once for all rows of an item.
//
// The left side of both products is packed as the unit wants it; the right side is read where it lies (kv_cache.h).
#pragma once

#include "attention_work.h"
#include "kv_cache.h"

namespace pe {
namespace {

constexpr int TILE = 64;  // keys worked on at a time
constexpr int64_t LINE = 64;  // of a cache
// Rows of a product at a time, with so many vectors for each that sums, right side and one of the left fit the registers.
#if defined(__AVX512F__)
constexpr int ROWS = 8;
constexpr int vectors_at_once(int rows) { return rows <= 4 ? 4 : 2; }
#elif defined(__AVX2__)
constexpr int ROWS = 6;
constexpr int vectors_at_once(int rows) { return rows <= 2 ? 4 : 2; }
#else
constexpr int ROWS = 4;
constexpr int vectors_at_once(int) { return 2; }
#endif

static_assert(ATTENTION_PARTITION % TILE == 0, "tiles do not cross partitions");

// What the 32 bits of a unit hold on the right side of a product, and how LANES of them are multiplied with one of the
// left side, which takes PACKED floats: one after the other, each with a part of the right side.

struct FloatUnit {
    static constexpr int STEP = 1;  // neighbours (dimensions of a key, positions of a value) to a unit
    static constexpr int PACKED = 1;
    static constexpr bool IS_FLOAT = true;

    PE_ALWAYS_INLINE static u32v part(u32v b, int) { return b; }
    PE_ALWAYS_INLINE static f32v add(f32v sum, float a, u32v b) { return fma(splat(a), bit_cast<f32v>(b), sum); }
    PE_ALWAYS_INLINE static void pack(float* to, int64_t at, f32v values, int64_t left) {
        store_upto(to + at, values, left);
    }
};

#if defined(__AVX512BF16__)
struct PairUnit {
    static constexpr int STEP = 2;
    static constexpr int PACKED = 1;
    static constexpr bool IS_FLOAT = false;

    PE_ALWAYS_INLINE static u32v part(u32v b, int) { return b; }
    PE_ALWAYS_INLINE static f32v add(f32v sum, float a, u32v b) {
        return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(bit_cast<int32_t>(a)), (__m512bh)b);
    }
    PE_ALWAYS_INLINE static void pack(float* to, int64_t at, f32v values, int64_t left) {
        store_upto(reinterpret_cast<bf16*>(to) + at, values, left);
    }
};
#else
struct PairUnit {
    static constexpr int STEP = 2;
    static constexpr int PACKED = 2;
    static constexpr bool IS_FLOAT = true;

    PE_ALWAYS_INLINE static u32v part(u32v b, int i) { return i == 0 ? b << 16 : b & 0xffff0000u; }
    PE_ALWAYS_INLINE static f32v add(f32v sum, float a, u32v b) { return fma(splat(a), bit_cast<f32v>(b), sum); }
    PE_ALWAYS_INLINE static void pack(float* to, int64_t at, f32v values, int64_t left) {
        store_upto(to + at, values, left);
    }
};
#endif

// Four dimensions of a key as unsigned bytes (128 more than what they stand for), and of a query as signed ones. The sums
// are integers in the lanes of a float vector, exact and alike whatever the instruction set.
struct ByteUnit {
    static constexpr int STEP = 4;
    static constexpr bool IS_FLOAT = false;
#if defined(__AVX512VNNI__)
    static constexpr int PACKED = 1;

    PE_ALWAYS_INLINE static u32v part(u32v b, int) { return b; }
    PE_ALWAYS_INLINE static f32v add(f32v sum, float a, u32v b) {
        const __m512i four = _mm512_set1_epi32(bit_cast<int32_t>(a));
        return bit_cast<f32v>(_mm512_dpbusd_epi32(bit_cast<__m512i>(sum), bit_cast<__m512i>(b), four));
    }
    PE_ALWAYS_INLINE static void put(float* to, int64_t i, int32_t q) {
        reinterpret_cast<int8_t*>(to)[i] = static_cast<int8_t>(q);
    }
#elif defined(__AVX2__)
    static constexpr int PACKED = 2;  // pairs of 16 bits: dimensions 0 and 2, 1 and 3

    PE_ALWAYS_INLINE static u32v part(u32v b, int i) {
        return i == 0 ? b & 0x00ff00ffu : bit_cast<u32v>(_mm256_srli_epi16(bit_cast<__m256i>(b), 8));
    }
    PE_ALWAYS_INLINE static f32v add(f32v sum, float a, u32v b) {
        const __m256i pair = _mm256_set1_epi32(bit_cast<int32_t>(a));
        return bit_cast<f32v>(_mm256_add_epi32(bit_cast<__m256i>(sum), _mm256_madd_epi16(bit_cast<__m256i>(b), pair)));
    }
    PE_ALWAYS_INLINE static void put(float* to, int64_t i, int32_t q) {
        reinterpret_cast<int16_t*>(to)[i / 4 * 4 + i % 2 * 2 + i % 4 / 2] = static_cast<int16_t>(q);
    }
#else
    static constexpr int PACKED = 4;

    PE_ALWAYS_INLINE static u32v part(u32v b, int i) { return (b >> (8 * i)) & 0xffu; }
    PE_ALWAYS_INLINE static f32v add(f32v sum, float a, u32v b) {
        return bit_cast<f32v>(bit_cast<i32v>(sum) + bit_cast<i32v>(b) * bit_cast<int32_t>(a));
    }
    PE_ALWAYS_INLINE static void put(float* to, int64_t i, int32_t q) { to[i] = bit_cast<float>(q); }
#endif
};

// What caches hold: keys and values as they are multiplied, or bytes with a scale for each key and value. Values of bytes
// are widened, a tile at a time, into what is multiplied fastest.

struct FloatCache {
    static constexpr bool HAS_SCALES = false;
    using Keys = FloatUnit;
    using Values = FloatUnit;
};

struct PairCache {
    static constexpr bool HAS_SCALES = false;
    using Keys = PairUnit;
    using Values = PairUnit;
};

struct ByteCache {
    static constexpr bool HAS_SCALES = true;
    using Keys = ByteUnit;
#if defined(__AVX512BF16__)
    using Values = PairUnit;
#else
    using Values = FloatUnit;
#endif
};

PE_ALWAYS_INLINE u32v load_units(const uint32_t* from) {
    u32v v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

// Loaded once, and not again for every row.
PE_ALWAYS_INLINE u32v kept(u32v units) {
    PE_KEEP_IN_REGISTER(units);
    return units;
}

// Lines of memory that are needed soon: asked for one by one between products, which goes on while they come. All at once
// they would fill what keeps track of lines on their way, and whatever is loaded next would wait for them.
class LinesAhead {
  public:
    void clear() {
        left_ = 0;
        next_ = count_ = 0;
    }

    // `count` lines, `stride` bytes apart.
    void add(const void* first, int64_t stride, int64_t count) {
        pieces_[count_++] = {static_cast<const char*>(first), stride, count};
    }

    PE_ALWAYS_INLINE void ask() {
        if (left_ == 0) {
            if (next_ == count_) return;
            at_ = pieces_[next_].first;
            left_ = pieces_[next_].count;
            stride_ = pieces_[next_++].stride;
        }
        __builtin_prefetch(at_, 0, 3);
        at_ += stride_;
        --left_;
    }

  private:
    struct Piece {
        const char* first;
        int64_t stride;
        int64_t count;
    };
    const char* at_;
    int64_t left_ = 0, stride_, next_ = 0, count_ = 0;
    Piece pieces_[TILE + 2 * TILE / LANES];  // rows of values, and keys by the vector
};

// sums[v] += the float at `a` x b[v], for two vectors.
template <typename Unit>
PE_ALWAYS_INLINE void add_two(f32v& sum0, f32v& sum1, const float* a, u32v b0, u32v b1) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (Unit::IS_FLOAT) {  // in place of intrinsics, whose sums GCC 12 moves between registers and memory
        f32v all, one = sum0, two = sum1;
        asm("vbroadcastss %5, %2\n\tvfmadd231ps %2, %3, %0\n\tvfmadd231ps %2, %4, %1"
            : "+x"(one), "+x"(two), "=&x"(all)
            : "x"(b0), "x"(b1), "m"(*a));
        sum0 = one;
        sum1 = two;
        return;
    }
#endif
    sum0 = Unit::add(sum0, *a, b0);
    sum1 = Unit::add(sum1, *a, b1);
}

// c[r][v] = c[r][v] * factors[r] (0 without factors) + sum over k < depth of a[r][k] x right(k, v), where c[r][v] is the
// v-th vector of row r and right(k, v) one of units.
template <typename Unit, int NUM_ROWS, int NUM_VECTORS, typename Right>
PE_ALWAYS_INLINE void multiply(const float* a, int64_t a_stride, int64_t depth, const Right& right, float* c,
                               int64_t c_stride, const float* factors, LinesAhead& ahead) {
    f32v sums[NUM_ROWS][NUM_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < NUM_ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NUM_VECTORS; ++v)
            sums[r][v] = factors == nullptr ? f32v{} : load(c + r * c_stride + v * LANES) * factors[r];
    const float* other = a + NUM_ROWS / 2 * a_stride;  // so that the rows' places are at most two strides away
    for (int64_t k = 0; k < depth; ++k, a += Unit::PACKED, other += Unit::PACKED) {
        for (int64_t line = 0; line < NUM_VECTORS * LANES * 4; line += LINE) ahead.ask();  // as many as are read here
        a = hide(a);
        other = hide(other);
#pragma GCC unroll 4
        for (int i = 0; i < Unit::PACKED; ++i) {
            u32v b[NUM_VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < NUM_VECTORS; ++v) b[v] = kept(Unit::part(right(k, v), i));
#pragma GCC unroll 8
            for (int r = 0; r < NUM_ROWS; ++r) {
                const float* const left = (r < NUM_ROWS / 2 ? a + r * a_stride : other + (r - NUM_ROWS / 2) * a_stride) + i;
                if constexpr (NUM_VECTORS == 1) {
                    sums[r][0] = Unit::add(sums[r][0], *left, b[0]);
                } else {
#pragma GCC unroll 4
                    for (int v = 0; v + 1 < NUM_VECTORS; v += 2)
                        add_two<Unit>(sums[r][v], sums[r][v + 1], left, b[v], b[v + 1]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < NUM_ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NUM_VECTORS; ++v) store(c + r * c_stride + v * LANES, sums[r][v]);
}

template <typename Cache>
struct ItemScratch {
    float* queries;    // [rows, key_units], packed
    uint32_t* keys;    // [key_units, TILE], for blocks that whole vectors do not fit in
    uint32_t* values;  // [padded_dim], the last values of an odd number; a widened tile's [TILE, padded_dim]
    States total;
    States part;

    // Takes what it needs from `memory`; returns the end of it.
    char* place(const Sizes& sizes, char* memory) {
        const auto take = [&memory](int64_t floats) {
            char* const begin = memory;
            memory += round_up(floats * sizeof(float), 64);
            return begin;
        };
        queries = reinterpret_cast<float*>(take(MAX_ROWS * sizes.key_units * Cache::Keys::PACKED));
        keys = reinterpret_cast<uint32_t*>(take(TILE * sizes.key_units));
        values = reinterpret_cast<uint32_t*>(take((Cache::HAS_SCALES ? TILE : 1) * sizes.padded_dim));
        total = {reinterpret_cast<float*>(take(MAX_ROWS)), nullptr};
        total.sums = reinterpret_cast<float*>(take(MAX_ROWS * sizes.state_stride));
        part = {reinterpret_cast<float*>(take(MAX_ROWS)), nullptr};
        part.sums = reinterpret_cast<float*>(take(MAX_ROWS * sizes.state_stride));
        return memory;
    }
};

// One item's way over its keys.
template <typename Cache>
class ItemWorker {
    using Keys = typename Cache::Keys;
    using Values = typename Cache::Values;
    static constexpr int KEY_VECTORS = TILE / LANES;
    static constexpr int PROBABILITIES = TILE / Values::STEP * Values::PACKED;  // floats of a packed row

  public:
    using Scratch = ItemScratch<Cache>;
    struct Setting {
        Setting() {}  // nothing to do
    };

    static Sizes sizes(const AttentionArgs& args) {
        const int64_t tokens = MAX_ROWS / (args.num_heads / args.num_kv_heads);
        return Sizes::of(args, tokens > ROWS ? tokens / ROWS * ROWS : tokens, Keys::STEP,
                         Cache::HAS_SCALES ? int8_head_bytes(args.block_size, args.head_dim) / 4
                                           : args.block_size / Keys::STEP * args.head_dim);
    }

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

  private:
    void pack_query(int64_t token, int64_t head) {
        const int64_t row = token * sizes_.group + head;
        const int64_t at = element_of(args_, sizes_, item_, token, head, args_.q_stride);
        float* const to = scratch_.queries + row * sizes_.key_units * Keys::PACKED;
        if (args_.q_dtype == BF16)
            pack_row(row, to, static_cast<const bf16*>(args_.q) + at);
        else
            pack_row(row, to, static_cast<const float*>(args_.q) + at);
        const int64_t position = item_.first_position + token;
        rows_end_[row] = args_.is_causal ? position + 1 : item_.keys_end;
        rows_begin_[row] = args_.sliding_window > 0 ? most(0, position + 1 - args_.sliding_window) : 0;
    }

    template <typename Query>
    PE_ALWAYS_INLINE void pack_row(int64_t row, float* to, const Query* from) {
        if constexpr (Cache::HAS_SCALES) {
            int32_t sum = 0;
            query_scales_[row] = quantize_head(from, args_.head_dim, [&](int64_t i, int32_t q) {
                Keys::put(to, i, q);
                sum += q;
            });
            query_offsets_[row] = -128 * sum;
        } else {
            for (int64_t i = 0; i < args_.head_dim; i += LANES)
                Keys::pack(to, i, load_upto(from + i, args_.head_dim - i), args_.head_dim - i);
        }
    }

    // Keys first_key .. first_key + count, which lie in one partition.
    void sum_tile(int64_t first_key, int64_t count, States states) {
        ahead_.clear();
        find_keys(first_key, count);
        if constexpr (Cache::HAS_SCALES) {
            find_key_scales(first_key, count);
            widen_values(first_key, count);
        } else {
            find_values(first_key, count);
            fetch_values(count);
        }
        fetch_next_keys(first_key, count);
        for (int64_t row = 0; row < item_.num_rows; row += ROWS) {
            switch (least(ROWS, item_.num_rows - row)) {
                case 1: sum_rows<1>(row, first_key, count, states); break;
                case 2: sum_rows<2>(row, first_key, count, states); break;
                case 3: sum_rows<3>(row, first_key, count, states); break;
                case 4: sum_rows<4>(row, first_key, count, states); break;
#if defined(__AVX2__)
                case 5: sum_rows<5>(row, first_key, count, states); break;
                case 6: sum_rows<6>(row, first_key, count, states); break;
#endif
#if defined(__AVX512F__)
                case 7: sum_rows<7>(row, first_key, count, states); break;
                case 8: sum_rows<8>(row, first_key, count, states); break;
#endif
            }
        }
    }

    const uint32_t* head_of_block(const void* cache, int64_t block) const {
        return head_of_block(cache, block, item_.kv_head);
    }
    const uint32_t* head_of_block(const void* cache, int64_t block, int64_t head) const {
        const int64_t id = args_.block_tables[item_.row * args_.table_stride + block];
        return static_cast<const uint32_t*>(cache) + (id * args_.num_kv_heads + head) * sizes_.head_units;
    }

    // Where each vector of keys lies, and how far apart its units are.
    void find_keys(int64_t first_key, int64_t count) {
        if (args_.block_size % LANES != 0) return gather_keys(first_key, count);
        key_stride_ = args_.block_size;
        for (int64_t i = 0; i < KEY_VECTORS; ++i) {
            const int64_t key = first_key + (i * LANES < count ? i * LANES : 0);  // any place to read: it is masked
            key_vectors_[i] = head_of_block(args_.keys, key / args_.block_size) + key % args_.block_size;
        }
    }

    // Copies the keys side by side.
    void gather_keys(int64_t first_key, int64_t count) {
        key_stride_ = TILE;
        for (int64_t i = 0; i < KEY_VECTORS; ++i) key_vectors_[i] = scratch_.keys + i * LANES;
        for (int64_t i = 0; i < count;) {
            const int64_t key = first_key + i, within = key % args_.block_size;
            const int64_t here = least(count - i, args_.block_size - within);
            const uint32_t* const from = head_of_block(args_.keys, key / args_.block_size) + within;
            for (int64_t unit = 0; unit < sizes_.key_units; ++unit)
                std::memcpy(scratch_.keys + unit * TILE + i, from + unit * args_.block_size, here * sizeof *from);
            i += here;
        }
    }

    // Calls visit(i, block's head in `cache`, its place there, how many) for runs of keys that lie in one block.
    template <typename Visit>
    PE_ALWAYS_INLINE void each_run(const void* cache, int64_t first_key, int64_t count, const Visit& visit) const {
        for (int64_t i = 0; i < count;) {
            const int64_t key = first_key + i, within = key % args_.block_size;
            const int64_t here = least(count - i, args_.block_size - within);
            visit(i, head_of_block(cache, key / args_.block_size), within, here);
            i += here;
        }
    }

    const float* scales_of(const uint32_t* head) const {
        return reinterpret_cast<const float*>(head + args_.block_size * args_.head_dim / 4);
    }

    // The scales of the tile's keys; 0 beyond the last, whose scores are masked.
    void find_key_scales(int64_t first_key, int64_t count) {
        for (int64_t i = count; i < TILE; ++i) key_scales_[i] = 0;
        each_run(args_.keys, first_key, count, [&](int64_t i, const uint32_t* head, int64_t within, int64_t here) {
            std::memcpy(key_scales_ + i, scales_of(head) + within, here * sizeof(float));
        });
    }

    // Writes the tile's values as the units that they are multiplied in, side by side.
    void widen_values(int64_t first_key, int64_t count) {
        for (int64_t i = 0; i < TILE / Values::STEP; ++i) value_rows_[i] = scratch_.values + i * sizes_.padded_dim;
        if (count % Values::STEP != 0) std::memset(scratch_.values + count / Values::STEP * sizes_.padded_dim, 0, 4 * sizes_.padded_dim);
        each_run(args_.values, first_key, count, [&](int64_t i, const uint32_t* head, int64_t within, int64_t here) {
            const int8_t* const from = reinterpret_cast<const int8_t*>(head) + within * args_.head_dim;
            for (int64_t j = 0; j < here; ++j)
                widen_value(from + j * args_.head_dim, scales_of(head)[within + j], i + j);
        });
    }

    PE_ALWAYS_INLINE void widen_value(const int8_t* from, float scale, int64_t i) {
        uint32_t* const to = scratch_.values + i / Values::STEP * sizes_.padded_dim;
        if constexpr (Values::STEP == 1) {
            int64_t d = 0;
#if defined(__AVX2__)
            for (; d + 8 <= args_.head_dim; d += 8) {  // bytes may be anything's: the compiler dares not do it by itself
                const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + d));
                const __m256 wide = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
                _mm256_storeu_ps(reinterpret_cast<float*>(to + d), _mm256_mul_ps(wide, _mm256_set1_ps(scale)));
            }
#endif
            for (; d < args_.head_dim; ++d) to[d] = bit_cast<uint32_t>(static_cast<float>(from[d]) * scale);
        } else {
            bf16* const halves = reinterpret_cast<bf16*>(to) + i % 2;
            for (int64_t d = 0; d < args_.head_dim; ++d) halves[2 * d] = to_bf16(static_cast<float>(from[d]) * scale);
        }
    }

    // Dots of integers, as `multiply` left them, become scores.
    template <int NUM_ROWS>
    PE_ALWAYS_INLINE void scale_scores(float* scores, int64_t row, int64_t begin, int64_t end) const {
        for (int r = 0; r < NUM_ROWS; ++r) {
            const i32v offset = splat_int(query_offsets_[row + r]);
            const f32v scale = splat(query_scales_[row + r]);
            for (int64_t i = begin; i < end; i += LANES) {
                const i32v dots = bit_cast<i32v>(load(scores + r * TILE + i)) + offset;
                store(scores + r * TILE + i, __builtin_convertvector(dots, f32v) * scale * load(key_scales_ + i));
            }
        }
    }

    // Asks for the tile's values, which are needed once the scores are there.
    void fetch_values(int64_t count) {
        for (int64_t i = 0; i < count / Values::STEP; ++i) ahead_.add(value_rows_[i], LINE, ceil_div(args_.head_dim * 4, LINE));
    }

    // Asks for the keys of the next tile, or of the next head's first.
    void fetch_next_keys(int64_t first_key, int64_t count) {
        int64_t key = first_key + count, head = item_.kv_head, left = item_.keys_end - key;
        if (left <= 0) {
            key = item_.keys_begin / TILE * TILE;
            left = item_.keys_end - key;
            if (++head == args_.num_kv_heads) return;
        }
        const int64_t end = key + least(left, TILE);
        for (; key < end; key += LANES) {
            const uint32_t* const at = head_of_block(args_.keys, key / args_.block_size, head) + key % args_.block_size;
            if constexpr (Cache::HAS_SCALES) {  // the values of this head are read before its scores
                const uint32_t* const values = head_of_block(args_.values, key / args_.block_size, head) +
                                               key % args_.block_size * args_.head_dim / 4;
                ahead_.add(values, LINE, ceil_div(LANES * args_.head_dim, LINE));
            }
            if (reinterpret_cast<uintptr_t>(at) % LINE != 0 && key % args_.block_size != 0) continue;  // another vector's line
            ahead_.add(at, args_.block_size * sizeof *at, sizes_.key_units);
        }
    }

    // Where each row of value units lies. What is beyond the last value may be NaN and is replaced: 0 x NaN is no 0.
    void find_values(int64_t first_key, int64_t count) {
        for (int64_t i = 0; i < count; i += Values::STEP) {
            const int64_t key = first_key + i;
            value_rows_[i / Values::STEP] = head_of_block(args_.values, key / args_.block_size) +
                                          key % args_.block_size / Values::STEP * args_.head_dim;
        }
        if (count % Values::STEP == 0) return;
        const uint32_t*& last = value_rows_[count / Values::STEP];
        for (int64_t d = 0; d < args_.head_dim; ++d) scratch_.values[d] = last[d] & 0x0000ffffu;
        last = scratch_.values;
    }

    // Rows `row` .. of the item against the packed tile, all or those of its panels that they see.
    template <int NUM_ROWS>
    void sum_rows(int64_t row, int64_t first_key, int64_t count, States states) {
        const int64_t begin = most(0, rows_begin_[row] - first_key) / LANES * LANES;
        const int64_t end = least(count, rows_end_[row + NUM_ROWS - 1] - first_key);
        if (begin >= end) return;
        alignas(64) float scores[NUM_ROWS * TILE];
        alignas(64) float probabilities[NUM_ROWS * PROBABILITIES];
        alignas(64) float factors[LANES];
        const float* const queries = scratch_.queries + row * sizes_.key_units * Keys::PACKED;
        const int64_t key_stride = key_stride_;
        for_vectors<NUM_ROWS>(begin / LANES, ceil_div(end, LANES), [&](auto vectors, int64_t first) {
            const uint32_t* keys[vectors.COUNT];
            for (int v = 0; v < vectors.COUNT; ++v) keys[v] = key_vectors_[first + v];
            multiply<Keys, NUM_ROWS, vectors.COUNT>(
                queries, sizes_.key_units * Keys::PACKED, sizes_.key_units,
                [&](int64_t k, int64_t v) { return load_units(keys[v] + k * key_stride); },
                scores + first * LANES, TILE, nullptr, ahead_);
        });
        if constexpr (Cache::HAS_SCALES) scale_scores<NUM_ROWS>(scores, row, begin, end);
        if (rows_begin_[row + NUM_ROWS - 1] <= first_key && rows_end_[row] >= first_key + TILE)
            take_all_scores<NUM_ROWS>(scores, probabilities, states.highest + row,
                                      states.sums + row * sizes_.state_stride, factors);
        else
            for (int r = 0; r < NUM_ROWS; ++r)
                factors[r] = take_scores(scores + r * TILE, probabilities + r * PROBABILITIES, begin, end,
                                         rows_begin_[row + r] - first_key, rows_end_[row + r] - first_key,
                                         states.highest[row + r], states.sums + (row + r) * sizes_.state_stride);
        float* const sums = states.sums + row * sizes_.state_stride + LANES;
        if (sizes_.is_whole_dim)
            add_values<NUM_ROWS, true>(probabilities, begin / Values::STEP, ceil_div(end, Values::STEP), factors, sums);
        else
            add_values<NUM_ROWS, false>(probabilities, begin / Values::STEP, ceil_div(end, Values::STEP), factors, sums);
    }

    // sums = sums * factors + probabilities x values, over value units first .. end.
    template <int NUM_ROWS, bool IS_WHOLE_DIM>
    PE_ALWAYS_INLINE void add_values(const float* probabilities, int64_t first, int64_t end, const float* factors,
                                     float* sums) {
        const uint32_t* const* const rows = value_rows_ + first;
        for_vectors<NUM_ROWS>(0, sizes_.padded_dim / LANES, [&](auto vectors, int64_t vector) {
            multiply<Values, NUM_ROWS, vectors.COUNT>(
                probabilities + first * Values::PACKED, PROBABILITIES, end - first,
                [&](int64_t k, int64_t v) {
                    const uint32_t* const from = rows[k] + (vector + v) * LANES;
                    if (IS_WHOLE_DIM) return load_units(from);
                    return bit_cast<u32v>(load_upto(reinterpret_cast<const float*>(from),
                                                    args_.head_dim - (vector + v) * LANES));
                },
                sums + vector * LANES, sizes_.state_stride, factors, ahead_);
        });
    }

    template <int N>
    struct Vectors {
        static constexpr int COUNT = N;
    };

    // Calls multiply_some(number of vectors, the first) for vectors first .. end, several at a time.
    template <int NUM_ROWS, typename MultiplySome>
    PE_ALWAYS_INLINE static void for_vectors(int64_t first, int64_t end, const MultiplySome& multiply_some) {
        constexpr int AT_ONCE = vectors_at_once(NUM_ROWS);
        for (; first + AT_ONCE <= end; first += AT_ONCE) multiply_some(Vectors<AT_ONCE>{}, first);
        for (; first < end; ++first) multiply_some(Vectors<1>{}, first);
    }

    // The softmax step of rows that see the whole tile, as most do of a long prompt: bit by bit what `take_scores` does, all
    // rows at once so that none waits for another's maximum, and one power for the factors of all.
    template <int NUM_ROWS>
    PE_ALWAYS_INLINE void take_all_scores(const float* scores, float* probabilities, float* highest, float* sums,
                                          float* factors) const {
        static_assert(NUM_ROWS <= LANES, "a lane for each row");
        alignas(64) float before[LANES] = {}, now[LANES] = {};
#pragma GCC unroll 8
        for (int r = 0; r < NUM_ROWS; ++r) {
            before[r] = highest[r];
            f32v top = splat(before[r]);
            for (int i = 0; i < TILE; i += LANES) top = max(top, load(scores + r * TILE + i));
            highest[r] = now[r] = reduce_max(top);
        }
        store(factors, exp2_clamped((load(before) - load(now)) * splat(scale_)));
        const f32v scale = splat(scale_);
#pragma GCC unroll 8
        for (int r = 0; r < NUM_ROWS; ++r) {
            const f32v offset = splat(-now[r] * scale_);
            f32v sum = {};
            for (int i = 0; i < TILE; i += LANES) {
                const f32v p = exp2_clamped(fma(load(scores + r * TILE + i), scale, offset));
                sum += p;
                Values::pack(probabilities + r * PROBABILITIES, i, p, LANES);
            }
            store(sums + r * sizes_.state_stride, fma(load(sums + r * sizes_.state_stride), splat(factors[r]), sum));
        }
    }

    // One row's softmax step over scores begin .. end, of which it sees those from `first` to `last`: fills in its
    // probabilities, adds them to the sums, and returns what the weighted values of before are to be multiplied by.
    PE_ALWAYS_INLINE float take_scores(const float* scores, float* probabilities, int64_t begin, int64_t end,
                                       int64_t first, int64_t last, float& highest, float* sums) const {
        end = round_up(end, LANES);
        if (first <= begin && end <= last)
            return take_seen(scores, probabilities, begin, end, [](int64_t, f32v v, float) { return v; }, highest, sums);
        if (first < end && begin < last) {
            const i32v from = splat_int(static_cast<int32_t>(most(first, 0)));
            const i32v to = splat_int(static_cast<int32_t>(least(last, TILE)));
            const auto masked = [&](int64_t i, f32v v, float otherwise) {
                const i32v at = lane_index() + splat_int(static_cast<int32_t>(i));
                return (at >= from) & (at < to) ? v : splat(otherwise);
            };
            return take_seen(scores, probabilities, begin, end, masked, highest, sums);
        }
        for (int64_t i = begin; i < end; i += LANES) Values::pack(probabilities, i, f32v{}, LANES);
        return 1.0f;
    }

    // masked(i, values, otherwise): the values that belong to scores i .. where the row sees them.
    template <typename Masked>
    PE_ALWAYS_INLINE float take_seen(const float* scores, float* probabilities, int64_t begin, int64_t end,
                                     const Masked& masked, float& highest, float* sums) const {
        f32v top = splat(highest);
        for (int64_t i = begin; i < end; i += LANES) top = max(top, masked(i, load(scores + i), NOTHING));
        const float before = highest, now = reduce_max(top);
        highest = now;
        const f32v scale = splat(scale_), offset = splat(-now * scale_);
        f32v sum = {};
        for (int64_t i = begin; i < end; i += LANES) {
            const f32v p = masked(i, exp2_clamped(fma(load(scores + i), scale, offset)), 0.0f);
            sum += p;
            Values::pack(probabilities, i, p, LANES);
        }
        const f32v factor = exp2_clamped(splat((before - now) * scale_));
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
    float query_scales_[Cache::HAS_SCALES ? MAX_ROWS : 1];  // of each row, where keys have scales
    int32_t query_offsets_[Cache::HAS_SCALES ? MAX_ROWS : 1];
    // Of the tile.
    LinesAhead ahead_;
    alignas(64) float key_scales_[Cache::HAS_SCALES ? TILE : 1];
    const uint32_t* key_vectors_[KEY_VECTORS];
    int64_t key_stride_;
    const uint32_t* value_rows_[TILE];
};

AttentionKernels kernels_of(int32_t kv_dtype) {
    switch (kv_dtype) {
        case BF16: return kernels_for<ItemWorker<PairCache>>();
        case INT8: return kernels_for<ItemWorker<ByteCache>>();
        default: return kernels_for<ItemWorker<FloatCache>>();
    }
}

}  // namespace
}  // namespace pe
