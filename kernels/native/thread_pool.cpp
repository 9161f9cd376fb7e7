#include "thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
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
        value_.fetch_add(1, std::memory_order_seq_cst);
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

class Pool {
  public:
    // Returns the number of threads the pool has now: less than asked for if the system refuses more.
    int32_t resize(int32_t wanted) {
        const std::lock_guard<std::mutex> turn(turn_);
        stop_workers();
        wanted = wanted < 1 ? 1 : wanted > MAX_THREADS ? MAX_THREADS : wanted;
        stopping_ = false;
        start_ = regions_.read();
        int32_t started = 1;
        while (started < wanted && start_worker(started)) ++started;
        size_.store(started);
        return started;
    }

    int32_t size() const { return size_.load(std::memory_order_relaxed); }

    void run(void (*body)(void*, const Team&), void* context) {
        if (inside_region || size() == 1) {
            run_alone(body, context);
            return;
        }
        const std::lock_guard<std::mutex> turn(turn_);
        body_ = body;
        context_ = context;
        const int32_t size = this->size();
        regions_.advance();
        inside_region = true;
        body(context, Team{0, size});
        inside_region = false;
        end_.arrive_and_wait(size);
    }

    void barrier(int32_t num_threads) { phase_.arrive_and_wait(num_threads); }

  private:
    struct Worker {
        Pool* pool;
        pthread_t handle;
        int32_t index;
    };

    static void run_alone(void (*body)(void*, const Team&), void* context) {
        const bool nested = inside_region;
        inside_region = true;
        body(context, Team{0, 1});
        inside_region = nested;
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
        for (uint32_t seen = start_;; ++seen) {
            regions_.wait_past(seen, SPIN_AFTER_REGION_NS);
            if (stopping_) return;
            const int32_t size = this->size();
            body_(context_, Team{index, size});
            end_.arrive_and_wait(size);
        }
    }

    std::mutex turn_;
    std::atomic<int32_t> size_{1};
    // Written before `regions_` advances, read after.
    void (*body_)(void*, const Team&) = nullptr;
    void* context_ = nullptr;
    bool stopping_ = false;
    uint32_t start_ = 0;
    Signal regions_;
    Barrier phase_;
    Barrier end_;
    Worker workers_[MAX_THREADS];
};

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

void run_region(void (*body)(void*, const Team&), void* context) { pool().run(body, context); }

}  // namespace pe

PE_EXPORT int32_t pe_num_threads() { return pe::num_threads(); }

PE_EXPORT int32_t pe_set_num_threads(int32_t wanted) { return pe::pool().resize(wanted); }
