#include "attention_kernel.h"

namespace pe {

int64_t attention_workspace_avx2(const AttentionArgs& args, int64_t max_seq_len, int32_t num_threads) {
    return workspace_for(args, max_seq_len, num_threads);
}

void attention_avx2(const AttentionArgs& args, const Team& team) { run_any(args, team); }

}  // namespace pe
