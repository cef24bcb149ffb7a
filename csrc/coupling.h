// Guesses that follow the noise of a request: draft/coupling.py says how likely each is. Knows no Python.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#define WAGER_NS drafting  // not the kernels' copies, which are compiled for one instruction set each
#include "noise.h"
#undef WAGER_NS
#include "ops.h"
#include "token_numbers.h"

namespace wager {

inline bool greedy(const RequestNoise& noise) { return noise.temperature <= 0.0; }

struct LikelyToken {
    int32_t token;
    double probability;
};

struct CouplingRules {
    double sharpness, noise, settled, unseen;  // draft/coupling.py
};

// The candidates for a position: to each the sources give masses, which add up.
class Candidates {
  public:
    explicit Candidates(const CouplingRules& rules) : rules_(rules) {}

    void clear() {
        numbers_.clear();
        found_.clear();
    }

    void add(int32_t token, double mass) {
        const uint32_t number = numbers_.of(token);
        if (number == found_.size()) found_.push_back({token, rules_.unseen});
        found_[number].probability += mass;
    }

    // Of each candidate the probability that it is the target's token `ahead` guesses after the request's first one, whose
    // position `noise` has.
    const std::vector<LikelyToken>& judge(const RequestNoise& noise, size_t ahead) {
        const double t = noise.temperature;
        double all = std::exp(rules_.sharpness * (t * t - rules_.settled));  // of what is no candidate
        for (LikelyToken& each : found_) {
            const double g = drafting::gumbel(noise.seed, noise.position + static_cast<uint32_t>(ahead), noise.choice, each.token);
            each.probability = std::exp(rules_.sharpness * std::log(each.probability) + rules_.noise * t * g);
            all += each.probability;
        }
        for (LikelyToken& each : found_) each.probability /= all;
        return found_;
    }

  private:
    CouplingRules rules_;
    TokenNumbers numbers_;
    std::vector<LikelyToken> found_;  // by number, with their masses, then their probabilities
};

}  // namespace wager
