// What `attention.cpp` takes from the unit of each instruction set.
#pragma once

#include "attention.h"

namespace pe {

// An item that costs more than 1 / (ATTENTION_SHARES x threads) of all work is divided, so at most so many are.
constexpr int64_t ATTENTION_SHARES = 8;

struct AttentionUnits {
    int64_t parts;
    int64_t merges;  // of divided items, once all parts are done
};

struct AttentionKernels {
    int64_t (*scratch_bytes)(const AttentionArgs& args);       // that `run_parts` takes as its memory
    int64_t (*shared_state_bytes)(const AttentionArgs& args);  // for each partition of a divided item
    AttentionUnits (*count_units)(const AttentionArgs& args);
    void (*run_parts)(const AttentionArgs& args, int64_t begin, int64_t end, void* memory);
    void (*run_merges)(const AttentionArgs& args, int64_t begin, int64_t end);
};

AttentionKernels attention_kernels_portable(int32_t kv_dtype);
AttentionKernels attention_kernels_avx2(int32_t kv_dtype);
AttentionKernels attention_kernels_avx512(int32_t kv_dtype);

// On AMX, for the caches that suit its tiles: by the model and the cache alone, so that all rows go the same way.
bool suits_amx(const AttentionArgs& args);
AttentionKernels attention_kernels_amx();

}  // namespace pe
