// One token a row: the most likely one, or a draw whose randomness is a function of (seed, position, token).
//
// The tokens are those of kernels/sampling/reference.py, whose logarithms are float32 and may be rounded differently on
// every machine. Scores are computed here in double precision, and where float32 could have decided otherwise (the runner-up
// is too close, or the winner stands at the very edge of a nucleus) the row is reported as uncertain: about one row in
// thirty thousand.
#pragma once

#include <cstdint>

#include "abi.h"
#include "thread_pool.h"

namespace pe {

// As SamplingFeatures: what at least one row asks for. What none does is not looked at.
enum SamplingFeature : int32_t { RANDOM = 1, TOP_K = 2, TOP_P = 4, MIN_P = 8 };

struct SampleArgs {
    const float* logits;       // [rows, vocab_size]
    const float* temperature;  // [rows]; below 1e-5 the most likely token is taken. This and what follows: if RANDOM
    const int32_t* top_k;      // [rows]; 0: off
    const float* top_p;        // [rows]; 1: off
    const float* log_min_p;    // [rows]; -infinity: off
    const int64_t* seeds;      // [rows]
    const int64_t* positions;  // [rows], of the token to be drawn
    int32_t* tokens;           // [rows], filled in
    int8_t* uncertain;         // [rows], filled in: 1 where the reference may take another token
    int64_t logits_stride;     // elements between rows
    int64_t num_rows;
    int64_t vocab_size;
    int32_t features;
};

// Some of the rows.
void sample(const SampleArgs& args, Range rows);

}  // namespace pe
