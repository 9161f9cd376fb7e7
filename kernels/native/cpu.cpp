#include "cpu.h"

#include <atomic>

#include "abi.h"

namespace pe {
namespace {

Isa detect() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    if (avx2 && avx512) return AVX512;
    if (avx2) return AVX2;  // every CPU with AVX2 has F16C too
#endif
    return PORTABLE;
}

const Isa best = detect();
std::atomic<Isa> current{best};

}  // namespace

Isa isa() { return current.load(std::memory_order_relaxed); }

}  // namespace pe

PE_EXPORT int32_t pe_best_isa() { return pe::best; }

PE_EXPORT int32_t pe_isa() { return pe::isa(); }

// Returns 0, or -1 where this CPU cannot run `level` (nothing changes then).
PE_EXPORT int32_t pe_set_isa(int32_t level) {
    if (level < pe::PORTABLE || level > pe::best) return -1;
    pe::current.store(static_cast<pe::Isa>(level), std::memory_order_relaxed);
    return 0;
}
