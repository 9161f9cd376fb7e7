// The library's one thread pool, and the two ways to use it. In both, the caller is one of the threads.
//
// Phases: threads come when they can, and whoever is free takes the next piece of work. A thread that another process
// keeps from running holds nothing up, unless it is in the middle of a piece. This is what a forward pass is made of:
//
//     pe::run_phases([&](pe::Phases& phases) {
//         phases.each(num_rows, [&](pe::Range rows) { rms_norm_rows(x, rows); });
//         phases.each(num_panels, [&](pe::Range panels) { linear_panels(x, panels); });  // all rows are normalised
//     });
//
// Teams: one function runs once on every thread, which knows its number, and `Team::barrier` waits for all. The partition
// is static: which thread does what is a function of (size, number of threads) alone.
//
//     pe::parallel([&](const pe::Team& team) {
//         rms_norm_rows(x, team.share(num_rows));
//         team.barrier();
//         linear_columns(x, team.share(num_columns, 16));
//     });
//
// Workers spin for some tens of microseconds after a region, in case another follows, and then sleep in the kernel.
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

// A thread's way through the phases of a region.
class Phases {
  public:
    // Calls body(range) for ranges that make up [0, units), large ones first, on whichever threads are free; returns when
    // all are done, and what they wrote is visible. A thread takes its share of what is left, or a `finer`-th part of that
    // where some units take far longer than others.
    template <typename Body>
    void each(int64_t units, const Body& body, int32_t finer = 1) {
        run(units, finer, [](void* context, Range range) { (*static_cast<const Body*>(context))(range); },
            const_cast<void*>(static_cast<const void*>(&body)));
    }

    // The threads that may be at work, for dividing it: at least 1.
    int32_t num_threads() const { return num_threads_; }

  private:
    friend class Pool;
    Phases(int32_t num_threads, uint32_t next) : num_threads_(num_threads), next_(next) {}

    void run(int64_t units, int32_t finer, void (*body)(void*, Range), void* context);

    int32_t num_threads_;
    uint32_t next_;  // the number of the phase that this thread comes to next
};

// Runs body(context, phases) on the caller and on every worker that comes before the caller is through. Every thread that
// runs it must come by the same phases with the same units; outside of phases it only computes values of its own, for a
// late thread does so again when others are far ahead.
void run_region_of_phases(void (*body)(void*, Phases&), void* context);

template <typename Body>
static inline void run_phases(const Body& body) {
    run_region_of_phases([](void* context, Phases& phases) { (*static_cast<const Body*>(context))(phases); },
                         const_cast<void*>(static_cast<const void*>(&body)));
}

// body(range) over [0, total), cut at multiples of `grain`, as a region of one phase. Not worth a wake-up for less than
// ~20 us of work in all: call body({0, total}) then.
template <typename Body>
static inline void parallel_for(int64_t total, int64_t grain, const Body& body) {
    run_phases([&](Phases& phases) {
        phases.each((total + grain - 1) / grain, [&](Range units) {
            const int64_t end = units.end * grain;
            body(Range{units.begin * grain, end < total ? end : total});
        });
    });
}

}  // namespace pe
