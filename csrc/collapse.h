// Whether a drafter's guesses go on being right as they were; economics/policy/learning.py says how it is told.
// tests/oracle/collapse.py has the same in Python. Knows no Python.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <unordered_map>

namespace wager {

struct CollapseRules {
    long long_run, known;  // drafts that the long run's rate is a mean of; after which there is one
    double other_texts, nearly_never, enough, share;
};

class DrafterRecord {
  public:
    explicit DrafterRecord(const CollapseRules& rules) : rules_(rules) {}

    // One draft, of which the first guess was right or not; whether the drafter has now collapsed, or recovered.
    bool see(const std::string& sequence, bool is_right) {
        if (evidence_ == 0.0 && !collapsed) usual = std::min(0.98, std::max(0.01, rate_));
        if (!collapsed) {
            ++seen_;
            rate_ += (is_right - rate_) / static_cast<double>(std::min(seen_, rules_.long_run));
        }
        if (seen_ < rules_.known || (is_right && evidence_ == 0.0 && !collapsed)) return false;
        const double sound = usual * rules_.other_texts, never = sound * rules_.nearly_never;
        double ratio = std::log(is_right ? never / sound : (1.0 - never) / (1.0 - sound));
        if (collapsed) {
            ratio = -ratio;
        } else if (!is_right) {  // no sequence counts for more than its share
            double& share = shares_[sequence];
            ratio = std::min(ratio, rules_.share * rules_.enough - share);
            share += ratio;
        }
        evidence_ += ratio;
        right_ += is_right, ++tried_;
        const bool changed = evidence_ >= rules_.enough;
        if (changed) collapsed = !collapsed, lately = std::to_string(right_) + " of " + std::to_string(tried_);
        if (changed || evidence_ <= 0.0) evidence_ = 0.0, right_ = tried_ = 0, shares_.clear();
        return changed;
    }

    bool collapsed = false;
    double usual = 0.0;  // the rate before there was evidence of a collapse, or of a recovery
    std::string lately;  // right of tried guesses since the evidence began, when it last was enough

  private:
    CollapseRules rules_;
    double rate_ = 0.0, evidence_ = 0.0;  // in the long run, of the drafts seen; for a collapse, or against one
    long seen_ = 0, right_ = 0, tried_ = 0;
    std::unordered_map<std::string, double> shares_;  // of the evidence, by sequence
};

}  // namespace wager
