#include "attention.h"

#include "attention_kernels.h"
#include "cpu.h"
#include "scratch.h"

namespace pe {
namespace {

AttentionKernels kernels(const AttentionArgs& args) {
    const int32_t kv_dtype = args.kv_dtype;
#if defined(__x86_64__)
    switch (isa()) {
        case AMX: return suits_amx(args) ? attention_kernels_amx() : attention_kernels_avx512(kv_dtype);
        case AVX512: return attention_kernels_avx512(kv_dtype);
        case AVX2: return attention_kernels_avx2(kv_dtype);
        default: break;
    }
#endif
    return attention_kernels_portable(kv_dtype);
}

// Units of a prompt's first tokens are a small part of those of its last ones, which come first: the thread that took half
// of them would be the last to end.
constexpr int32_t FINER = 4;

}  // namespace

int64_t attention_workspace(const AttentionArgs& args, int64_t max_seq_len) {
    if (args.num_threads == 1) return 0;
    const int64_t partitions = (max_seq_len + ATTENTION_PARTITION - 1) / ATTENTION_PARTITION + 1;
    return ATTENTION_SHARES * args.num_threads * partitions * kernels(args).shared_state_bytes(args);
}

void attention(Phases& phases, const AttentionArgs& args) {
    const AttentionKernels set = kernels(args);
    const AttentionUnits units = set.count_units(args);
    const auto run = [&](Range range) {
        set.run_parts(args, range.begin, range.end, thread_scratch(set.scratch_bytes(args)));
    };
    phases.each(units.parts, run, FINER);
    if (units.merges > 0)
        phases.each(units.merges, [&](Range range) { set.run_merges(args, range.begin, range.end); });
}

}  // namespace pe

PE_EXPORT int64_t pe_attention_workspace(const pe::AttentionArgs* args, int64_t max_seq_len) {
    return pe::attention_workspace(*args, max_seq_len);
}

// On all threads of the pool; `num_threads` is the pool's size.
PE_EXPORT void pe_attention(const pe::AttentionArgs* args) {
    pe::run_phases([&](pe::Phases& phases) { pe::attention(phases, *args); });
}
