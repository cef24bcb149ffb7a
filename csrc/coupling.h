// Guesses that follow the noise of a request: draft/coupling.py says how likely each is. Knows no Python.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#define WAGER_NS drafting  // not the kernels' copies, which are compiled for one instruction set each
#include "noise.h"
#undef WAGER_NS

namespace wager {

// The noise that a request samples with, `position` that of the first guess. Temperature 0: greedy, there is none.
struct RequestNoise {
    double temperature = 0.0;
    uint64_t seed = 0;
    uint32_t position = 0, choice = 0;

    bool greedy() const { return temperature <= 0.0; }
};

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
    static constexpr size_t kMost = 512;  // further ones are left out

    explicit Candidates(const CouplingRules& rules) : rules_(rules) {}

    void clear() {
        slots_.fill(0);
        found_.clear();
    }

    void add(int32_t token, double mass) {
        for (size_t at = static_cast<uint32_t>(token) * 0x9E3779B1u >> 22;; at = (at + 1) % slots_.size()) {
            uint16_t& slot = slots_[at];
            if (slot == 0) {
                if (found_.size() == kMost) return;
                found_.push_back({token, rules_.unseen});
                slot = static_cast<uint16_t>(found_.size());
            } else if (found_[slot - 1].token != token) {
                continue;
            }
            found_[slot - 1].probability += mass;
            return;
        }
    }

    // Of each candidate the probability that it is the target's token `ahead` guesses after the request's first one.
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
    std::array<uint16_t, 2 * kMost> slots_{};  // number of a candidate, from 1; 0: free
    std::vector<LikelyToken> found_;           // with their masses, then their probabilities
};

}  // namespace wager
