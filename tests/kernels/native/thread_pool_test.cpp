// Run by test_thread_pool.py, which compiles it with the pool. Prints what went wrong; returns 0 if nothing did.
#include "thread_pool.h"

#include <sched.h>

#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

extern "C" int32_t pe_set_num_threads(int32_t wanted);

namespace {

int failures = 0;

void expect(bool holds, const char* what) {
    if (holds) return;
    std::printf("not so: %s\n", what);
    ++failures;
}

// Each phase reads what all units of the one before wrote.
void every_unit_runs_once_and_after_the_phase_before(int64_t units, int phases_in_region) {
    std::vector<std::vector<int64_t>> values(phases_in_region + 1, std::vector<int64_t>(units, 0));
    pe::run_phases([&](pe::Phases& phases) {
        for (int phase = 0; phase < phases_in_region; ++phase) {
            phases.each(units, [&](pe::Range range) {
                for (int64_t i = range.begin; i < range.end; ++i)
                    values[phase + 1][i] += values[phase][units - 1 - i] + 1;
            });
        }
    });
    bool right = true;
    for (int phase = 0; phase <= phases_in_region; ++phase)
        for (int64_t i = 0; i < units; ++i) right = right && values[phase][i] == phase;
    expect(right, "every unit runs once, after all of the phase before");
}

// Whoever has the first unit waits for the last one: somebody else must take it.
void a_thread_that_is_held_up_keeps_no_other_units() {
    std::atomic<bool> last_ran{false};
    const auto caller = std::this_thread::get_id();
    pe::run_phases([&](pe::Phases& phases) {
        phases.each(64, [&](pe::Range range) {
            if (std::this_thread::get_id() != caller)
                while (!last_ran && range.end < 64) sched_yield();
            if (range.end == 64) last_ran = true;
        });
    });
    expect(last_ran, "the last unit ran");
}

void a_team_meets_at_its_barriers(int32_t threads) {
    std::atomic<int> arrived{0};
    std::atomic<bool> together{true};
    std::vector<int> seen(threads, 0);
    pe::parallel([&](const pe::Team& team) {
        for (int round = 1; round <= 20; ++round) {
            ++arrived;
            team.barrier();
            if (arrived != round * team.num_threads) together = false;
            team.barrier();
        }
        ++seen[team.thread];
    });
    bool once = true;
    for (int count : seen) once = once && count == 1;
    expect(together, "no thread passes a barrier before all have come");
    expect(once, "each thread of a team runs the body once");
}

void regions_nest_on_one_thread() {
    std::atomic<int> sum{0};
    pe::run_phases([&](pe::Phases& outer) {
        outer.each(8, [&](pe::Range range) {
            pe::parallel([&](const pe::Team& team) { sum += team.num_threads * static_cast<int>(range.size()); });
            pe::parallel_for(10, 4, [&](pe::Range inner) { sum += static_cast<int>(inner.size() * range.size()); });
        });
    });
    expect(sum == 8 * 1 + 8 * 10, "regions inside a region run once, on one thread");
}

void callers_take_turns() {
    std::vector<std::thread> callers;
    for (int i = 0; i < 3; ++i)
        callers.emplace_back([] {
            for (int round = 0; round < 50; ++round) every_unit_runs_once_and_after_the_phase_before(17, 3);
        });
    for (std::thread& caller : callers) caller.join();
}

void parts_are_even_and_complete() {
    for (int64_t total : {0, 1, 31, 32, 33, 1000})
        for (int64_t count : {1, 2, 3, 7}) {
            int64_t next = 0;
            for (int64_t index = 0; index < count; ++index) {
                const pe::Range range = pe::share_of(total, 32, index, count);
                expect(range.begin == next && (range.end % 32 == 0 || range.end == total), "parts follow each other");
                next = range.end;
            }
            expect(next == total, "parts cover all");
        }
}

}  // namespace

int main() {
    parts_are_even_and_complete();
    for (int32_t threads : {1, 2, 5, 3}) {
        expect(pe_set_num_threads(threads) == threads, "the pool has the threads asked for");
        for (int64_t units : {0, 1, 2, 3, 64, 1001})
            for (int round = 0; round < 40; ++round) every_unit_runs_once_and_after_the_phase_before(units, 1 + round % 7);
        for (int round = 0; round < 20; ++round) a_thread_that_is_held_up_keeps_no_other_units();
        for (int round = 0; round < 20; ++round) a_team_meets_at_its_barriers(threads);
        regions_nest_on_one_thread();
        callers_take_turns();
    }
    return failures != 0;
}
