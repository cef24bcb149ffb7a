// The n-gram index of one sequence: draft/ngram.py says what it does, tests/oracle/ngrams.py has the same in Python. Knows no Python.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace wager {

struct NgramRules {
    int longest;                // of the n-grams that are indexed
    std::vector<double> prior;  // acceptance rates after a match of 1, 2, ... tokens
    double prior_weight, min_survival;
};

class NgramIndex {
  public:
    NgramIndex(const NgramRules& rules, std::vector<int32_t> prompt)
        : rules_(&rules), prompt_(std::move(prompt)), rates_(rules.prior), tried_(rules.prior.size(), rules.prior_weight) {}

    void know(int32_t token) { unindexed_.push_back(token); }

    // Indexes what became known, and learns from each token whether the match before it predicted it.
    void catch_up() {
        if (!prompt_.empty()) {
            for (const int32_t token : prompt_) append(token);
            prompt_ = {};
            match();
        }
        for (const int32_t token : unindexed_) {
            learn(token);
            append(token);
            match();
        }
        unindexed_.clear();
    }

    // Survival of depths 1, 2, ..., `depth` at most.
    void survival(int depth, std::vector<double>& out) const {
        out.clear();
        if (length_ == 0) return;
        double reached = 1.0;
        const int last = static_cast<int>(rates_.size()) - 1;
        for (int d = 0; d < depth; ++d) {
            reached *= rates_[std::min(length_ - 1 + d, last)];
            if (reached < rules_->min_survival) break;
            out.push_back(reached);
        }
    }

    // The token at depth 1 + i: from where the match continues, periodically.
    int32_t copied(size_t i) const { return tokens_[hit_ + i % (tokens_.size() - hit_)]; }

  private:
    // An n-gram by the position after it; 0: none. Its tokens are compared in the text.
    struct Slot {
        int32_t after = 0, size = 0;
    };

    void append(int32_t token) {
        const int end = static_cast<int>(tokens_.size());
        for (int n = 1; n <= std::min(rules_->longest, end); ++n) {
            if (2 * (used_ + 1) > slots_.size()) grow();
            Slot& slot = find(end, n);
            used_ += slot.size == 0;
            slot = {end, n};
        }
        tokens_.push_back(token);
    }

    void match() {
        length_ = 0;
        const int end = static_cast<int>(tokens_.size());
        for (int n = std::min(rules_->longest, end); n > 0 && length_ == 0 && !slots_.empty(); --n) {
            const Slot& slot = find(end, n);
            if (slot.size != 0) hit_ = slot.after, length_ = n;
        }
        if (length_ != rules_->longest) return;
        const int most = std::min<int>(hit_, static_cast<int>(rules_->prior.size()));
        while (length_ < most && tokens_[hit_ - length_ - 1] == tokens_[end - length_ - 1]) ++length_;
    }

    void learn(int32_t token) {
        if (length_ == 0) return;
        const int row = length_ - 1;
        tried_[row] += 1;
        rates_[row] += ((tokens_[hit_] == token ? 1.0 : 0.0) - rates_[row]) / tried_[row];
    }

    // The slot of the n-gram before position `end`, or the free one where it belongs.
    Slot& find(int end, int n) {
        const int32_t* const text = tokens_.data() + end - n;
        uint64_t hash = static_cast<uint64_t>(n);
        for (int i = 0; i < n; ++i) hash = (hash ^ static_cast<uint32_t>(text[i])) * 0x9E3779B97F4A7C15u;
        const size_t mask = slots_.size() - 1;
        for (size_t at = (hash >> 20) & mask;; at = (at + 1) & mask) {
            Slot& slot = slots_[at];
            if (slot.size == 0 || (slot.size == n && std::equal(text, text + n, tokens_.data() + slot.after - n))) return slot;
        }
    }

    void grow() {
        std::vector<Slot> before(slots_.empty() ? 512 : 2 * slots_.size());
        before.swap(slots_);
        for (const Slot& slot : before)
            if (slot.size != 0) find(slot.after, slot.size) = slot;
    }

    const NgramRules* rules_;
    std::vector<int32_t> prompt_, tokens_, unindexed_;
    std::vector<Slot> slots_;
    size_t used_ = 0;
    int hit_ = 0, length_ = 0;  // where the current match continues, and how many tokens match
    std::vector<double> rates_, tried_;
};

}  // namespace wager
