#include "thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdio>
#include <mutex>

#include "abi.h"

namespace pe {
namespace {

constexpr int32_t MAX_THREADS = 256;
constexpr int64_t SPIN_AFTER_REGION_NS = 50'000;  // a layer's Python costs about that much at most
constexpr int64_t SPIN_AT_BARRIER_NS = 100'000;   // parts are even: whoever is later was descheduled

inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// A counter that threads can wait on: first spinning, then asleep in the kernel.
class alignas(64) Signal {
  public:
    uint32_t read() const { return value_.load(std::memory_order_acquire); }

    void advance() {
        increment();
        wake();
    }

    // `advance` in two steps, for what has to be done before sleepers are woken.
    void increment() { value_.fetch_add(1, std::memory_order_seq_cst); }
    void wake() {
        if (sleepers_.load(std::memory_order_seq_cst) > 0) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
    }

    // Returns once the counter is no longer `seen`.
    void wait_past(uint32_t seen, int64_t spin_ns) {
        const int64_t deadline = now_ns() + spin_ns;
        do {
            for (int i = 0; i < 64; ++i) {
                if (read() != seen) return;
                pause_cpu();
            }
        } while (now_ns() < deadline);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        while (value_.load(std::memory_order_seq_cst) == seen) futex(FUTEX_WAIT_PRIVATE, seen);
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }

  private:
    void futex(int operation, uint32_t value) {
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value_), operation, value, nullptr, nullptr, 0);
    }

    std::atomic<uint32_t> value_{0};
    std::atomic<int32_t> sleepers_{0};
};

class Barrier {
  public:
    void arrive_and_wait(int32_t num_threads) {
        const uint32_t round = round_.read();
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.advance();
        } else {
            round_.wait_past(round, SPIN_AT_BARRIER_NS);
        }
    }

  private:
    alignas(64) std::atomic<int32_t> arrived_{0};
    Signal round_;
};

thread_local bool inside_region = false;

}  // namespace

class Pool {
  public:
    // Returns the number of threads the pool has now: less than asked for if the system refuses more.
    int32_t resize(int32_t wanted) {
        const std::lock_guard<std::mutex> turn(turn_);
        stop_workers();
        wanted = wanted < 1 ? 1 : wanted > MAX_THREADS ? MAX_THREADS : wanted;
        stopping_ = false;
        int32_t started = 1;
        while (started < wanted && start_worker(started)) ++started;
        size_.store(started);
        return started;
    }

    int32_t size() const { return size_.load(std::memory_order_relaxed); }

    void run_team(void (*body)(void*, const Team&), void* context) {
        if (inside_region || size() == 1) {
            const AsRegion here;
            body(context, Team{0, 1});
            return;
        }
        const std::lock_guard<std::mutex> turn(turn_);
        const AsRegion here;
        open({body, nullptr, context, size(), 0});
        body(context, Team{0, job_.size});
        end_.arrive_and_wait(job_.size);
        close();
    }

    void run_phases(void (*body)(void*, Phases&), void* context) {
        if (inside_region || size() == 1) {
            const AsRegion here;
            Phases phases(1, 0);
            body(context, phases);
            return;
        }
        const std::lock_guard<std::mutex> turn(turn_);
        const AsRegion here;
        open({nullptr, body, context, size(), phases_done_.read()});
        Phases phases(job_.size, job_.first_phase);
        body(context, phases);
        close();
    }

    void barrier(int32_t num_threads) { barrier_.arrive_and_wait(num_threads); }

    // `next_unit_` holds the number of the current phase and the first unit that nobody has taken. A thread that is behind
    // finds a later phase there, and its own done.
    void run_phase(uint32_t phase, uint32_t units, int32_t shares, void (*body)(void*, Range), void* context) {
        uint64_t seen = next_unit_.load(std::memory_order_acquire);
        for (;;) {
            const int32_t ahead = static_cast<int32_t>(static_cast<uint32_t>(seen >> 32) - phase);
            if (ahead > 0) return;
            const uint32_t next = static_cast<uint32_t>(seen);
            if (ahead == 0 && next >= units) break;
            if (ahead < 0) {  // whoever ends the phase before is about to say so
                pause_cpu();
                seen = next_unit_.load(std::memory_order_acquire);
                continue;
            }
            const uint32_t even = (units - next) / static_cast<uint32_t>(shares);
            const uint32_t take = even > 1 ? even : 1;
            if (!next_unit_.compare_exchange_weak(seen, seen + take, std::memory_order_acq_rel)) continue;
            body(context, Range{next, next + take});
            if (units_done_.fetch_add(take, std::memory_order_acq_rel) + take == units) return end_phase(phase);
            seen = next_unit_.load(std::memory_order_acquire);
        }
        phases_done_.wait_past(phase, SPIN_AT_BARRIER_NS);
    }

  private:
    struct Job {
        void (*team_body)(void*, const Team&);  // one of the two is null
        void (*phases_body)(void*, Phases&);
        void* context;
        int32_t size;
        uint32_t first_phase;
    };

    struct Worker {
        Pool* pool;
        pthread_t handle;
        int32_t index;
    };

    struct AsRegion {  // the calling thread, for as long as this lives
        const bool before = inside_region;
        AsRegion() { inside_region = true; }
        ~AsRegion() { inside_region = before; }
    };

    void open(const Job& job) {
        job_ = job;
        open_region_.store(++region_, std::memory_order_seq_cst);
        regions_.advance();
    }

    // Afterwards no worker is in the region, or can still enter it: what it refers to may go.
    void close() {
        open_region_.store(0, std::memory_order_seq_cst);
        for (int spins = 0; inside_.load(std::memory_order_seq_cst) != 0; ++spins)
            spins < 4096 ? pause_cpu() : static_cast<void>(sched_yield());
    }

    void end_phase(uint32_t phase) {
        units_done_.store(0, std::memory_order_relaxed);
        phases_done_.increment();
        next_unit_.store(uint64_t{phase + 1} << 32, std::memory_order_release);
        phases_done_.wake();
    }

    bool start_worker(int32_t index) {
        workers_[index] = {this, {}, index};
        if (pthread_create(&workers_[index].handle, nullptr, &Pool::main, &workers_[index]) != 0) return false;
        char name[16];
        std::snprintf(name, sizeof name, "pe-kernels-%d", index);
        pthread_setname_np(workers_[index].handle, name);
        return true;
    }

    void stop_workers() {
        stopping_ = true;
        regions_.advance();
        for (int32_t index = 1; index < size(); ++index) pthread_join(workers_[index].handle, nullptr);
    }

    static void* main(void* argument) {
        const Worker& worker = *static_cast<Worker*>(argument);
        inside_region = true;
        worker.pool->serve(worker.index);
        return nullptr;
    }

    void serve(int32_t index) {
        uint64_t last = 0;
        for (;;) {
            const uint32_t seen = regions_.read();
            if (stopping_) return;
            inside_.fetch_add(1, std::memory_order_seq_cst);
            const uint64_t region = open_region_.load(std::memory_order_seq_cst);
            const bool enter = region != 0 && region != last;
            if (enter) work(index);
            inside_.fetch_sub(1, std::memory_order_seq_cst);
            if (enter) last = region;
            regions_.wait_past(seen, SPIN_AFTER_REGION_NS);
        }
    }

    void work(int32_t index) {
        if (job_.team_body) {
            job_.team_body(job_.context, Team{index, job_.size});
            end_.arrive_and_wait(job_.size);
        } else {
            Phases phases(job_.size, job_.first_phase);
            job_.phases_body(job_.context, phases);
        }
    }

    std::mutex turn_;
    std::atomic<int32_t> size_{1};
    std::atomic<bool> stopping_{false};
    Signal regions_;  // advances when there may be something to do

    // The open region. Workers count themselves in before they look, so that `close` knows of all who saw it open.
    Job job_{};
    uint64_t region_ = 0;
    alignas(64) std::atomic<uint64_t> open_region_{0};
    alignas(64) std::atomic<int32_t> inside_{0};

    Barrier barrier_;
    Barrier end_;

    alignas(64) std::atomic<uint64_t> next_unit_{0};
    alignas(64) std::atomic<uint32_t> units_done_{0};
    Signal phases_done_;  // how many phases have ended, in all regions

    Worker workers_[MAX_THREADS];
};

namespace {

// Never destroyed: its threads may outlive static destructors.
Pool& pool() {
    static Pool& instance = *new Pool;
    return instance;
}

}  // namespace

int32_t num_threads() { return pool().size(); }

void Team::barrier() const {
    if (num_threads > 1) pool().barrier(num_threads);
}

void Phases::run(int64_t units, int32_t finer, void (*body)(void*, Range), void* context) {
    if (units <= 0) return;
    if (num_threads_ == 1) return body(context, Range{0, units});
    pool().run_phase(next_++, static_cast<uint32_t>(units), num_threads_ * finer, body, context);
}

void run_region(void (*body)(void*, const Team&), void* context) { pool().run_team(body, context); }

void run_region_of_phases(void (*body)(void*, Phases&), void* context) { pool().run_phases(body, context); }

}  // namespace pe

PE_EXPORT int32_t pe_num_threads() { return pe::num_threads(); }

PE_EXPORT int32_t pe_set_num_threads(int32_t wanted) { return pe::pool().resize(wanted); }
