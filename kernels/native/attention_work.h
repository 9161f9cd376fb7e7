// How attention is cut into items and who works on them: what the kernels of all instruction sets share.
//
// An item of work is a kv head and some query tokens of one sequence; its rows are these tokens in all query heads that
// share the kv head. A worker (of `attention_kernel.h`, or of a unit of its own) sums up an item's keys, partition by
// partition (flash attention, Dao 2022, arXiv:2205.14135); here its states are merged, in order, and written.
#pragma once

#include "attention_kernels.h"
#include "vector.h"

namespace pe {
namespace {

constexpr int MAX_ROWS = 128;        // of an item
constexpr int MAX_SHARED_ROWS = 16;  // of an item that threads may share
constexpr float LOG2_E = 1.44269504f;

static_assert(MAX_ROWS >= ATTENTION_MAX_GROUP, "a query token is not divided");

PE_ALWAYS_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
PE_ALWAYS_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
PE_ALWAYS_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
PE_ALWAYS_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

struct Sizes {
    int64_t group;         // query heads to a kv head
    int64_t query_tokens;  // of an item
    int64_t key_units;     // of a query or key
    int64_t head_units;    // of a head of a block in the cache, for keys as for values
    int64_t padded_dim;    // head_dim in whole vectors
    bool is_whole_dim;
    int64_t state_stride;  // floats of a row's state: LANES partial sums of probabilities, then the weighted values

    // Heads of a block take `head_units` each, of `step` neighbours to a unit.
    static Sizes of(const AttentionArgs& args, int64_t query_tokens, int64_t step, int64_t head_units) {
        const int64_t padded_dim = round_up(args.head_dim, LANES);
        return {args.num_heads / args.num_kv_heads, query_tokens, ceil_div(args.head_dim, step), head_units, padded_dim,
                args.head_dim == padded_dim, LANES + padded_dim};
    }

    int64_t shared_state_floats() const { return MAX_SHARED_ROWS * (state_stride + LANES); }
};

// A kv head and some neighbouring query tokens of one sequence.
struct Item {
    int64_t row;  // of the batch
    int64_t kv_head;
    int64_t first_token;  // of the packed query tokens
    int64_t num_tokens;
    int64_t first_position;  // of its first token in its sequence
    int64_t keys_begin;      // positions that any of its tokens sees
    int64_t keys_end;
    int64_t num_rows;  // num_tokens x heads of the group

    int64_t first_partition() const { return keys_begin / ATTENTION_PARTITION; }
    int64_t num_partitions() const { return ceil_div(keys_end, ATTENTION_PARTITION) - first_partition(); }
};

// A row of the batch as work: `num_tiles` of query tokens x kv heads are its items. An item that is a large part of all
// the work, as when few rows have long contexts, is divided further, into a unit for each of its partitions.
struct Row {
    int64_t index;
    int64_t num_tiles;
    int64_t num_tokens;
    int64_t length;
    int64_t cost;  // of an item, roughly
    int64_t num_partitions;
    bool is_shareable;

    Row(const AttentionArgs& args, const Sizes& sizes, int64_t row) : index(row) {
        num_tokens = args.query_start_loc[row + 1] - args.query_start_loc[row];
        num_tiles = ceil_div(num_tokens, sizes.query_tokens);
        length = args.seq_lens[row];
        if (num_tiles == 0) {
            cost = num_partitions = 0;
            is_shareable = false;
            return;
        }
        const Item item = this->item(args, sizes, 0, 0);
        cost = (item.keys_end - item.keys_begin) * (item.num_rows + 12);  // reading a key costs as much as some rows
        num_partitions = item.num_partitions();
        is_shareable = item.num_rows <= MAX_SHARED_ROWS && num_tiles == 1 && num_partitions > 1;
    }

    // Tiles count from the last one, which sees the most keys: what takes longest is begun first.
    Item item(const AttentionArgs& args, const Sizes& sizes, int64_t tile, int64_t kv_head) const {
        const int64_t first = (num_tiles - 1 - tile) * sizes.query_tokens;
        const int64_t count = least(sizes.query_tokens, num_tokens - first);
        const int64_t position = length - num_tokens + first;
        const int64_t begin = args.sliding_window > 0 ? most(0, position + 1 - args.sliding_window) : 0;
        const int64_t end = args.is_causal ? position + count : length;
        return {index, kv_head, args.query_start_loc[index] + first, count, position, begin, end, count * sizes.group};
    }
};

// How the work is cut: a function of the arguments and the number of threads.
struct Plan {
    int64_t most_undivided;  // cost

    Plan(const AttentionArgs& args, const Sizes& sizes) {
        int64_t total = 0;
        for (int64_t r = 0; r < args.num_rows; ++r) {
            const Row row(args, sizes, r);
            total += row.cost * row.num_tiles * args.num_kv_heads;
        }
        most_undivided = args.num_threads == 1 ? INT64_MAX : total / (ATTENTION_SHARES * args.num_threads);
    }

    bool is_divided(const Row& row) const { return row.is_shareable && row.cost > most_undivided; }
    int64_t units_per_item(const Row& row) const { return is_divided(row) ? row.num_partitions : 1; }
};

// The states of an item's rows: what a softmax over some of the keys has summed up. `highest` is the largest score.
struct States {
    float* highest;
    float* sums;  // [rows, state_stride]
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

// Where a query of an item begins in q, or its result in out.
PE_ALWAYS_INLINE int64_t element_of(const AttentionArgs& args, const Sizes& sizes, const Item& item, int64_t token,
                                    int64_t head, int64_t token_stride) {
    return (item.first_token + token) * token_stride + (item.kv_head * sizes.group + head) * args.head_dim;
}

template <typename Query>
PE_ALWAYS_INLINE void write_row(Query* to, const float* sums, int64_t head_dim) {
    const f32v factor = splat(1.0f / reduce_add(load(sums)));
    for (int64_t i = 0; i < head_dim; i += LANES)
        store_upto(to + i, load(sums + LANES + i) * factor, head_dim - i);
}

__attribute__((noinline)) void write(const AttentionArgs& args, const Sizes& sizes, const Item& item, States total) {
    for (int64_t token = 0; token < item.num_tokens; ++token)
        for (int64_t head = 0; head < sizes.group; ++head) {
            const int64_t at = element_of(args, sizes, item, token, head, args.out_stride);
            const float* const sums = total.sums + (token * sizes.group + head) * sizes.state_stride;
            if (args.q_dtype == BF16)
                write_row(static_cast<bf16*>(args.out) + at, sums, args.head_dim);
            else
                write_row(static_cast<float*>(args.out) + at, sums, args.head_dim);
        }
}

// Where the state of a partition of a divided item waits to be merged.
PE_ALWAYS_INLINE States shared_states(const AttentionArgs& args, const Sizes& sizes, int64_t index) {
    float* const at = static_cast<float*>(args.workspace) + index * sizes.shared_state_floats();
    return {at + MAX_SHARED_ROWS * sizes.state_stride, at};
}

// What a worker has, beside its constructor and `sum_partition`: `Scratch`, its memory for an item; `Setting`, which
// lives while items are worked on and merged, and puts the thread in the state that this takes; `sizes`.

// All partitions of an item, one after the other.
template <typename Worker>
void sum_all(Worker& worker, const typename Worker::Scratch& scratch, const AttentionArgs& args, const Sizes& sizes,
             const Item& item) {
    worker.sum_partition(item.first_partition(), scratch.total);
    for (int64_t p = 1; p < item.num_partitions(); ++p) {
        worker.sum_partition(item.first_partition() + p, scratch.part);
        merge(scratch.total, scratch.part, item.num_rows, sizes, args.scale * LOG2_E);
    }
}

template <typename Worker>
AttentionUnits count_units(const AttentionArgs& args) {
    const Sizes sizes = Worker::sizes(args);
    const Plan plan(args, sizes);
    AttentionUnits units{0, 0};
    for (int64_t r = 0; r < args.num_rows; ++r) {
        const Row row(args, sizes, r);
        const int64_t items = row.num_tiles * args.num_kv_heads;
        units.parts += items * plan.units_per_item(row);
        if (plan.is_divided(row)) units.merges += items;
    }
    return units;
}

template <typename Worker>
void run_parts(const AttentionArgs& args, int64_t begin, int64_t end, void* memory) {
    const Sizes sizes = Worker::sizes(args);
    const Plan plan(args, sizes);
    const typename Worker::Setting setting;
    typename Worker::Scratch scratch;
    scratch.place(sizes, static_cast<char*>(memory));
    int64_t row_begin = 0, shared = 0;  // units and shared states of the rows before
    for (int64_t r = 0; r < args.num_rows && row_begin < end; ++r) {
        const Row row(args, sizes, r);
        const bool is_divided = plan.is_divided(row);
        const int64_t per_item = plan.units_per_item(row), count = row.num_tiles * args.num_kv_heads * per_item;
        for (int64_t i = most(0, begin - row_begin); i < least(count, end - row_begin); ++i) {
            const int64_t number = i / per_item;
            const Item item = row.item(args, sizes, number / args.num_kv_heads, number % args.num_kv_heads);
            Worker worker(args, sizes, scratch, item);
            if (is_divided) {
                worker.sum_partition(item.first_partition() + i % per_item, shared_states(args, sizes, shared + i));
            } else {
                sum_all(worker, scratch, args, sizes, item);
                write(args, sizes, item, scratch.total);
            }
        }
        row_begin += count;
        if (is_divided) shared += count;
    }
}

template <typename Worker>
void run_merges(const AttentionArgs& args, int64_t begin, int64_t end) {
    const Sizes sizes = Worker::sizes(args);
    const Plan plan(args, sizes);
    const typename Worker::Setting setting;
    int64_t row_begin = 0, shared = 0;  // divided items and shared states of the rows before
    for (int64_t r = 0; r < args.num_rows && row_begin < end; ++r) {
        const Row row(args, sizes, r);
        if (!plan.is_divided(row)) continue;
        const int64_t count = row.num_partitions;
        for (int64_t i = most(0, begin - row_begin); i < least(args.num_kv_heads, end - row_begin); ++i) {
            const Item item = row.item(args, sizes, 0, i);
            const States total = shared_states(args, sizes, shared + i * count);
            for (int64_t p = 1; p < count; ++p)
                merge(total, shared_states(args, sizes, shared + i * count + p), item.num_rows, sizes,
                      args.scale * LOG2_E);
            write(args, sizes, item, total);
        }
        row_begin += args.num_kv_heads;
        shared += args.num_kv_heads * count;
    }
}

template <typename Worker>
AttentionKernels kernels_for() {
    return {
        [](const AttentionArgs& args) {
            typename Worker::Scratch scratch;
            return scratch.place(Worker::sizes(args), nullptr) - static_cast<char*>(nullptr);
        },
        [](const AttentionArgs& args) { return Worker::sizes(args).shared_state_floats() * int64_t{sizeof(float)}; },
        count_units<Worker>,
        run_parts<Worker>,
        run_merges<Worker>,
    };
}

}  // namespace
}  // namespace pe
