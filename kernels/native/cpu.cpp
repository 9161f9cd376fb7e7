#include "cpu.h"

#include <atomic>

#include "abi.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pe {
namespace {

// Whether this process may use tiles. Linux gives their 8 KiB of state a thread only to those that ask; threads which start
// later have it too.
bool amx_ready() {
#if defined(__x86_64__) && defined(__linux__)
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    constexpr unsigned AMX_BF16 = 1u << 22, AVX512_FP16 = 1u << 23, AMX_TILE = 1u << 24, ALL = AMX_BF16 | AVX512_FP16 | AMX_TILE;
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & ALL) != ALL) return false;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return false;
#endif
}

Isa detect() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    if (avx2 && avx512) return amx_ready() ? AMX : AVX512;
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
