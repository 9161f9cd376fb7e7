#include "attention.h"

#include "cpu.h"

namespace pe {

int64_t attention_workspace_portable(const AttentionArgs& args, int64_t max_seq_len, int32_t num_threads);
void attention_portable(const AttentionArgs& args, const Team& team);
#if defined(__x86_64__)
int64_t attention_workspace_avx2(const AttentionArgs& args, int64_t max_seq_len, int32_t num_threads);
int64_t attention_workspace_avx512(const AttentionArgs& args, int64_t max_seq_len, int32_t num_threads);
void attention_avx2(const AttentionArgs& args, const Team& team);
void attention_avx512(const AttentionArgs& args, const Team& team);
#endif

int64_t attention_workspace(const AttentionArgs& args, int64_t max_seq_len, int32_t num_threads) {
    switch (isa()) {
#if defined(__x86_64__)
        case AVX512: return attention_workspace_avx512(args, max_seq_len, num_threads);
        case AVX2: return attention_workspace_avx2(args, max_seq_len, num_threads);
#endif
        default: return attention_workspace_portable(args, max_seq_len, num_threads);
    }
}

void attention(const AttentionArgs& args, const Team& team) {
    switch (isa()) {
#if defined(__x86_64__)
        case AVX512: return attention_avx512(args, team);
        case AVX2: return attention_avx2(args, team);
#endif
        default: return attention_portable(args, team);
    }
}

}  // namespace pe

PE_EXPORT int64_t pe_attention_workspace(const pe::AttentionArgs* args, int64_t max_seq_len, int32_t num_threads) {
    return pe::attention_workspace(*args, max_seq_len, num_threads);
}

// All rows, on all threads of the pool.
PE_EXPORT void pe_attention(const pe::AttentionArgs* args) {
    pe::parallel([&](const pe::Team& team) { pe::attention(*args, team); });
}
