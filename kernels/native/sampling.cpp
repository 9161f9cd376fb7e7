#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "cpu.h"
#include "sampling_kernels.h"
#include "scratch.h"

namespace pe {
namespace {

constexpr float GREEDY_TEMPERATURE = 1e-5f;
constexpr float LOWEST = -std::numeric_limits<float>::infinity();
// How far the mass before a token may be from the reference's: that adds float32 probabilities, of a float32 total.
constexpr double MASS_ERROR = 4e-6;
constexpr int64_t FIRST_NUCLEUS = 64;  // tokens that a nucleus is looked for in at first

// The hashes of kernels/sampling/randomness.py.
uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

uint64_t row_key(int64_t seed, int64_t position) {
    constexpr uint64_t GAMMA = 0x9e3779b97f4a7c15u;
    return mix(mix(static_cast<uint64_t>(seed) + GAMMA) + (static_cast<uint64_t>(position) + 1) * GAMMA);
}

uint32_t mix32(uint32_t z) {
    z ^= z >> 16;
    z *= 0x7feb352du;
    z ^= z >> 15;
    z *= 0x846ca68bu;
    return z ^ (z >> 16);
}

// In (0, 1], float32 as the reference has it.
float random_number(uint64_t key, int64_t token) {
    const uint32_t z = mix32(static_cast<uint32_t>(key) ^ static_cast<uint32_t>(token) * 0x9e3779b9u);
    const uint32_t bits = mix32(z ^ static_cast<uint32_t>(key >> 32)) & 0x7fffffffu;
    return (static_cast<float>(static_cast<int32_t>(bits)) + 0.5f) * 0x1p-31f;
}

struct Candidate {
    float value;
    int32_t token;
    double probability;  // for top_p
};

bool is_likelier(const Candidate& a, const Candidate& b) {
    return a.value != b.value ? a.value > b.value : a.token < b.token;
}

// Whose score, scaled logit plus noise, is the largest?
struct Race {
    const float* scaled;
    uint64_t key;
    double best = -std::numeric_limits<double>::infinity();
    double second = best;
    double tolerance = 0;
    int64_t winner = -1;

    // What a score must reach to matter: below, it is neither the best nor close to it.
    float goal() const { return static_cast<float>(best - tolerance); }

    void enter(int64_t token) {
        if (token == winner) return;
        const double w = random_number(key, token);
        const double noise = -std::log(-std::log1p(-w)), score = scaled[token] + noise;
        if (score > best) {
            second = best;
            best = score;
            winner = token;
            // By how much float32 may be off: a few units in the last place of the noise and of the score.
            tolerance = 2e-6 + 1e-6 * (std::abs(noise) + std::abs(score));
        } else if (score > second) {
            second = score;
        }
    }

    // As `search` does for whole rows: most tokens are out of the race at sight of their random number.
    bool may_matter(int64_t token) const {
        return std::log2(random_number(key, token)) <= (scaled[token] - goal()) * 1.44269504f + 1e-3f;
    }

    bool is_close() const { return !(best - second > tolerance); }
};

// One row, to be drawn from.
class Draw {
  public:
    Draw(const SampleArgs& args, int64_t row, const SamplingKernels& set)
        : set_(set), count_(args.vocab_size), num_blocks_((count_ + SAMPLING_BLOCK - 1) / SAMPLING_BLOCK) {
        uint8_t* memory = thread_scratch(scratch_bytes(count_));
        candidates_ = reinterpret_cast<Candidate*>(memory);
        scaled_ = reinterpret_cast<float*>(memory + count_ * sizeof(Candidate));
        block_tops_ = scaled_ + count_;
        sorted_tops_ = block_tops_ + num_blocks_;
        top_ = set.scale(args.logits + row * args.logits_stride, args.temperature[row], count_, scaled_, block_tops_);
    }

    // Returns whether it is certain that the reference takes the same.
    bool run(const SampleArgs& args, int64_t row, int32_t& token) {
        if (!std::isfinite(top_)) {  // there is no distribution: the first NaN, or of what is largest
            token = static_cast<int32_t>(set_.argmax(scaled_, count_));
            return true;
        }
        if (args.features & MIN_P && args.log_min_p[row] > LOWEST) floor_ = top_ + args.log_min_p[row];
        if (args.features & TOP_K && args.top_k[row] > 0 && args.top_k[row] < count_) keep_top_k(args.top_k[row]);
        if (args.features & TOP_P && args.top_p[row] < 1) keep_nucleus(args.top_p[row]);

        Race race{scaled_, row_key(args.seeds[row], args.positions[row])};
        race.enter(first_of_the_likeliest());
        const bool is_certain = has_candidates_ ? race_candidates(race) : race_all(race);
        token = static_cast<int32_t>(race.winner);
        return is_certain && !race.is_close();
    }

    static int64_t scratch_bytes(int64_t count) {
        const int64_t blocks = (count + SAMPLING_BLOCK - 1) / SAMPLING_BLOCK;
        return count * static_cast<int64_t>(sizeof(Candidate) + sizeof(float)) + 2 * blocks * int64_t{sizeof(float)};
    }

  private:
    // A value that at least `wanted` tokens reach: as many blocks have it as their largest.
    float reached_by(int64_t wanted) {
        if (wanted > num_blocks_) return LOWEST;
        std::copy(block_tops_, block_tops_ + num_blocks_, sorted_tops_);
        std::nth_element(sorted_tops_, sorted_tops_ + wanted - 1, sorted_tops_ + num_blocks_, std::greater<float>());
        return sorted_tops_[wanted - 1];
    }

    // The candidates are all tokens that reach `value` and the floor.
    void collect(float value) {
        value = std::max(value, floor_);
        num_candidates_ = 0;
        has_candidates_ = true;
        for (int64_t block = 0; block < num_blocks_; ++block) {
            if (block_tops_[block] < value) continue;
            const int64_t end = std::min(count_, (block + 1) * SAMPLING_BLOCK);
            for (int64_t i = block * SAMPLING_BLOCK; i < end; ++i)
                if (scaled_[i] >= value) candidates_[num_candidates_++] = {scaled_[i], static_cast<int32_t>(i), 0};
        }
        num_certain_ = num_candidates_;
    }

    // Exactly k of them; the lowest ids among equals.
    void keep_top_k(int64_t k) {
        collect(reached_by(k));
        if (num_candidates_ <= k) return;
        std::nth_element(candidates_, candidates_ + k - 1, candidates_ + num_candidates_, is_likelier);
        num_candidates_ = num_certain_ = k;
    }

    // Candidates become those that may be in the nucleus; the first `num_certain_` surely are.
    void keep_nucleus(double top_p) {
        double sum = 0;
        if (has_candidates_) {
            for (int64_t i = 0; i < num_candidates_; ++i) sum += std::exp(static_cast<double>(candidates_[i].value) - top_);
            find_probabilities(sum);
        } else {
            sum = set_.sum_exp(scaled_, count_, top_, floor_);
            int64_t wanted = FIRST_NUCLEUS;
            collect(reached_by(wanted));
            while (find_probabilities(sum) < top_p + mass_error_ && wanted <= num_blocks_) {
                wanted = wanted < num_blocks_ ? std::min(8 * wanted, num_blocks_) : num_blocks_ + 1;
                collect(reached_by(wanted));
            }
        }
        num_candidates_ = nucleus_size(num_candidates_, top_p + mass_error_);
        num_certain_ = nucleus_size(num_candidates_, top_p - mass_error_);
    }

    // Of the candidates, given the sum of exp(value - top) of all that may be drawn. Returns the candidates' mass.
    double find_probabilities(double sum) {
        const float log_total = static_cast<float>(top_ + std::log(sum));
        mass_error_ = MASS_ERROR + 4e-7 * std::abs(log_total);
        double mass = 0;
        for (int64_t i = 0; i < num_candidates_; ++i) {
            candidates_[i].probability = std::exp(static_cast<double>(candidates_[i].value - log_total));
            mass += candidates_[i].probability;
        }
        return mass;
    }

    // How many of the `count` first candidates are needed for a mass of `target`, the likeliest first, and at least one;
    // moves them to the front. By halves, each of which is divided, not sorted.
    int64_t nucleus_size(int64_t count, double target) {
        int64_t begin = 0, end = count;
        double before = 0;
        while (end - begin > 1) {
            const int64_t middle = (begin + end) / 2;
            std::nth_element(candidates_ + begin, candidates_ + middle, candidates_ + end, is_likelier);
            double mass = 0;
            for (int64_t i = begin; i < middle; ++i) mass += candidates_[i].probability;
            if (before + mass >= target) {
                end = middle;
            } else {
                before += mass;
                begin = middle;
            }
        }
        return end;
    }

    int64_t first_of_the_likeliest() const {
        int64_t token = 0;
        while (block_tops_[token / SAMPLING_BLOCK] != top_) token += SAMPLING_BLOCK;
        while (scaled_[token] != top_) ++token;
        return token;
    }

    bool race_candidates(Race& race) const {
        bool is_certain = true;  // the likeliest token always is
        for (int64_t i = 0; i < num_candidates_; ++i) {
            const int64_t before = race.winner, token = candidates_[i].token;
            if (race.may_matter(token)) race.enter(token);
            if (race.winner != before) is_certain = i < num_certain_;
        }
        return is_certain;
    }

    bool race_all(Race& race) const {
        set_.search(scaled_, count_, race.key, floor_, race.goal(), &race, [](void* context, int64_t token) {
            Race& here = *static_cast<Race*>(context);
            here.enter(token);
            return here.goal();
        });
        return true;
    }

    const SamplingKernels& set_;
    const int64_t count_;
    const int64_t num_blocks_;
    float* scaled_;
    float* block_tops_;   // the largest of each block
    float* sorted_tops_;  // scratch for them
    float top_;
    float floor_ = LOWEST;  // what is below is not drawn
    double mass_error_ = 0;

    Candidate* candidates_;  // if there are any, only they are drawn
    bool has_candidates_ = false;
    int64_t num_candidates_ = 0;
    int64_t num_certain_ = 0;
};

void sample_row(const SampleArgs& args, int64_t row, const SamplingKernels& set) {
    if (args.features & RANDOM && args.temperature[row] >= GREEDY_TEMPERATURE) {
        args.uncertain[row] = !Draw(args, row, set).run(args, row, args.tokens[row]);
    } else {
        args.tokens[row] = static_cast<int32_t>(set.argmax(args.logits + row * args.logits_stride, args.vocab_size));
        args.uncertain[row] = 0;
    }
}

}  // namespace

SamplingKernels sampling_kernels() {
#if defined(__x86_64__)
    switch (isa()) {
        case AMX:
        case AVX512: return sampling_kernels_avx512();
        case AVX2: return sampling_kernels_avx2();
        default: break;
    }
#endif
    return sampling_kernels_portable();
}

void sample(const SampleArgs& args, Range rows) {
    const SamplingKernels set = sampling_kernels();
    for (int64_t row = rows.begin; row < rows.end; ++row) sample_row(args, row, set);
}

}  // namespace pe

// On all threads of the pool.
PE_EXPORT void pe_sample(const pe::SampleArgs* args) {
    pe::run_phases([&](pe::Phases& phases) {
        phases.each(args->num_rows, [&](pe::Range rows) { pe::sample(*args, rows); });
    });
}
