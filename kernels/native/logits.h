// What is done to rows of logits beside drawing from them: penalties, token masks, log probabilities.
//
// The results are those of kernels/logits/reference.py bit for bit, and of kernels/sampling/logprobs.py but for the last
// bit of a row's total.
#pragma once

#include <cstdint>

#include "abi.h"
#include "thread_pool.h"

namespace pe {

// `logits` of all are [*, vocab_size], contiguous but for LogprobArgs, and changed in place but for these.
struct PenaltyArgs {
    float* logits;
    const int64_t* rows;           // [num_rows], of logits, each once
    const int64_t* slots;          // [num_rows], of the tables
    const int32_t* output_counts;  // [slots, vocab_size]
    const uint8_t* prompt_mask;    // [slots, vocab_size], 0 or 1
    const float* repetition;       // [num_rows]
    const float* frequency;
    const float* presence;
    int64_t num_rows;
    int64_t vocab_size;
};

struct BitmaskArgs {
    float* logits;
    const int64_t* rows;    // [num_rows], each once
    const int32_t* words;   // [num_rows, num_words]: bit i of word w allows token 32 w + i
    int64_t num_rows;
    int64_t vocab_size;
    int64_t num_words;
};

struct LogprobArgs {
    const float* logits;
    const int32_t* token_ids;  // [num_rows], the chosen ones
    int32_t* ids;              // [num_rows, num_top + 1], filled in, like what follows: the chosen token, then the likeliest
    float* logprobs;           // [num_rows, num_top + 1]
    int32_t* ranks;            // [num_rows], of the chosen token: how many are likelier, plus one
    int64_t logits_stride;     // elements between rows
    int64_t num_rows;
    int64_t vocab_size;
    int64_t num_top;           // at most vocab_size
};

// Some of the rows.
void apply_penalties(const PenaltyArgs& args, Range rows);
void apply_token_bitmask(const BitmaskArgs& args, Range rows);
void gather_logprobs(const LogprobArgs& args, Range rows);

}  // namespace pe
