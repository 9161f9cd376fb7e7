#include "logits.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "sampling_kernels.h"
#include "scratch.h"

namespace pe {
namespace {

constexpr float LOWEST = std::numeric_limits<float>::lowest();
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();
constexpr int64_t BLOCK = 16;  // tokens that are looked at together: few were seen before

// A product as it is: fused with an addition, the result would not be the reference's.
float product(float a, float b) {
    volatile float rounded = a * b;
    return rounded;
}

float penalized(float logit, int32_t count, float repetition, float frequency, float presence) {
    const float repeated = logit > 0 ? logit / repetition : product(logit, repetition);
    return repeated - product(static_cast<float>(count), frequency) - (count > 0 ? presence : 0.0f);
}

bool is_any_seen(const int32_t* counts, const uint8_t* mask, int64_t size) {
    int32_t any = 0;
    for (int64_t i = 0; i < size; ++i) any |= (counts[i] > 0) | mask[i];
    return any != 0;
}

// A log probability that is a number even where a logit is infinite or none.
float logprob(float logit, float log_total) {
    const float value = logit - log_total;
    return value >= LOWEST ? value : LOWEST;
}

struct Entry {
    float logprob;
    int32_t token;
};

bool is_likelier(const Entry& a, const Entry& b) {
    return a.logprob != b.logprob ? a.logprob > b.logprob : a.token < b.token;
}

// One row's log probabilities.
class Logprobs {
  public:
    Logprobs(const float* logits, int64_t count, const SamplingKernels& set) : logits_(logits), count_(count) {
        const float top = logits[set.argmax(logits, count)];
        log_total_ = static_cast<float>(top + std::log(set.sum_exp(logits, count, top, MINUS_INFINITY)));
    }

    float of(int32_t token) const { return logprob(logits_[token], log_total_); }

    int32_t rank(int32_t token) const {
        const float own = of(token);
        int32_t likelier = 0;
        for (int64_t i = 0; i < count_; ++i) likelier += logprob(logits_[i], log_total_) > own;
        return likelier + 1;
    }

    // The `num_top` likeliest, in order.
    void top(int64_t num_top, Entry* entries) const {
        if (num_top == 0) return;
        for (int64_t i = 0; i < num_top; ++i) entries[i] = entry(i);
        std::make_heap(entries, entries + num_top, is_likelier);  // its first is the least likely
        for (int64_t i = num_top; i < count_; ++i) {
            const Entry next = entry(i);
            if (!(next.logprob > entries[0].logprob)) continue;  // of equals the lower id counts, which is in already
            std::pop_heap(entries, entries + num_top, is_likelier);
            entries[num_top - 1] = next;
            std::push_heap(entries, entries + num_top, is_likelier);
        }
        std::sort_heap(entries, entries + num_top, is_likelier);
    }

  private:
    Entry entry(int64_t token) const { return {of(static_cast<int32_t>(token)), static_cast<int32_t>(token)}; }

    const float* logits_;
    int64_t count_;
    float log_total_;
};

}  // namespace

void apply_penalties(const PenaltyArgs& args, Range rows) {
    const int64_t size = args.vocab_size;
    for (int64_t i = rows.begin; i < rows.end; ++i) {
        const float repetition = args.repetition[i], frequency = args.frequency[i], presence = args.presence[i];
        if (repetition == 1 && frequency == 0 && presence == 0) continue;
        float* logits = args.logits + args.rows[i] * size;
        const int32_t* counts = args.output_counts + args.slots[i] * size;
        const uint8_t* mask = args.prompt_mask + args.slots[i] * size;
        for (int64_t begin = 0; begin < size; begin += BLOCK) {
            const int64_t end = std::min(begin + BLOCK, size);
            if (!is_any_seen(counts + begin, mask + begin, end - begin)) continue;
            for (int64_t token = begin; token < end; ++token)
                if (counts[token] > 0 || mask[token])
                    logits[token] = penalized(logits[token], counts[token], repetition, frequency, presence);
        }
    }
}

void apply_token_bitmask(const BitmaskArgs& args, Range rows) {
    const int64_t covered = std::min(args.vocab_size, 32 * args.num_words);
    for (int64_t i = rows.begin; i < rows.end; ++i) {
        float* logits = args.logits + args.rows[i] * args.vocab_size;
        const int32_t* words = args.words + i * args.num_words;
        for (int64_t begin = 0; begin < covered; begin += 32) {
            const uint32_t word = static_cast<uint32_t>(words[begin / 32]);
            const int64_t end = std::min(begin + 32, covered);
            if (word == 0) {
                std::fill(logits + begin, logits + end, MINUS_INFINITY);
            } else if (word != ~0u) {
                for (int64_t token = begin; token < end; ++token)
                    if (!(word >> (token - begin) & 1)) logits[token] = MINUS_INFINITY;
            }
        }
        std::fill(logits + covered, logits + args.vocab_size, MINUS_INFINITY);
    }
}

void gather_logprobs(const LogprobArgs& args, Range rows) {
    const SamplingKernels set = sampling_kernels();
    const int64_t width = args.num_top + 1;
    Entry* entries = reinterpret_cast<Entry*>(thread_scratch(width * static_cast<int64_t>(sizeof(Entry))));
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        const Logprobs logprobs(args.logits + row * args.logits_stride, args.vocab_size, set);
        const int32_t chosen = args.token_ids[row];
        int32_t* ids = args.ids + row * width;
        float* values = args.logprobs + row * width;
        ids[0] = chosen;
        values[0] = logprobs.of(chosen);
        args.ranks[row] = logprobs.rank(chosen);
        logprobs.top(args.num_top, entries);
        for (int64_t i = 0; i < args.num_top; ++i) {
            ids[i + 1] = entries[i].token;
            values[i + 1] = entries[i].logprob;
        }
    }
}

namespace {

template <typename Args>
void on_all_threads(const Args& args, void (*run)(const Args&, Range)) {
    run_phases([&](Phases& phases) { phases.each(args.num_rows, [&](Range rows) { run(args, rows); }); });
}

}  // namespace
}  // namespace pe

// On all threads of the pool.
PE_EXPORT void pe_apply_penalties(const pe::PenaltyArgs* args) { pe::on_all_threads(*args, pe::apply_penalties); }
PE_EXPORT void pe_apply_token_bitmask(const pe::BitmaskArgs* args) {
    pe::on_all_threads(*args, pe::apply_token_bitmask);
}
PE_EXPORT void pe_gather_logprobs(const pe::LogprobArgs* args) { pe::on_all_threads(*args, pe::gather_logprobs); }
