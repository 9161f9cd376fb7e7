// The library's one thread pool.
//
// A parallel region runs one function on every thread of the pool; the caller is thread 0. Inside it, `Team::barrier`
// separates phases, so that a whole layer, or a whole forward pass, costs one dispatch:
//
//     pe::parallel([&](const pe::Team& team) {
//         rms_norm_rows(x, team.share(num_rows));
//         team.barrier();                              // all rows are normalised
//         gemm_columns(x, team.share(num_columns, 16));
//     });
//
// Workers spin for some tens of microseconds after a region, in case another follows, and then sleep in the kernel.
// The partition is static: which thread does what is a function of (size, number of threads) alone.
#pragma once

#include <cstdint>

namespace pe {

struct Range {
    int64_t begin;
    int64_t end;
    int64_t size() const { return end - begin; }
};

// Part `index` of `count` of [0, total), as even as multiples of `grain` allow. Late parts may be empty.
static inline Range share_of(int64_t total, int64_t grain, int64_t index, int64_t count) {
    const int64_t units = (total + grain - 1) / grain;
    const int64_t begin = units * index / count * grain;
    const int64_t end = units * (index + 1) / count * grain;
    return {begin < total ? begin : total, end < total ? end : total};
}

// A thread's view of the region it runs in.
struct Team {
    int32_t thread;  // 0 is the caller of `parallel`
    int32_t num_threads;

    Range share(int64_t total, int64_t grain = 1) const { return share_of(total, grain, thread, num_threads); }

    // Returns when every thread of the team has called it. What they wrote before is visible to all after.
    void barrier() const;
};

int32_t num_threads();

// Runs body(context, team) on every thread of the pool and returns when all are done. Regions of different callers take
// turns; a region inside a region runs on its caller's thread alone.
void run_region(void (*body)(void*, const Team&), void* context);

template <typename Body>
static inline void parallel(const Body& body) {
    run_region([](void* context, const Team& team) { (*static_cast<const Body*>(context))(team); },
               const_cast<void*>(static_cast<const void*>(&body)));
}

// body(range) over [0, total), cut at multiples of `grain`. Not worth a wake-up for less than ~20 us of work in all:
// call body({0, total}) then.
template <typename Body>
static inline void parallel_for(int64_t total, int64_t grain, const Body& body) {
    parallel([&](const Team& team) {
        const Range range = team.share(total, grain);
        if (range.size() > 0) body(range);
    });
}

}  // namespace pe
