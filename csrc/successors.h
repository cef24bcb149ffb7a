// Token recycling: the likeliest tokens that the target last gave after each token. tests/oracle/successors.py has the same in
// Python, and says what it does. Knows no Python.
#pragma once

#include <algorithm>
#include <cstdint>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "coupling.h"

namespace wager {

class Successors {
  public:
    static constexpr int kRanks = 8;

    Successors(int vocab, std::vector<double> rates, double prior_weight, double min_survival, double weight,
               double min_sampled, CouplingRules coupling)
        : vocab_(vocab), ids_(static_cast<size_t>(vocab) * kRanks, -1), logits_(ids_.size()), rates_(std::move(rates)),
          tried_(prior_weight), min_survival_(min_survival), weight_(weight), min_sampled_(min_sampled), candidates_(coupling) {}

    int vocab() const { return vocab_; }

    // Ids by token and rank, rates by rank, and how many rows these were learned from.
    std::tuple<const std::vector<int32_t>&, const std::vector<double>&, double> parts() const { return {ids_, rates_, tried_}; }

    // False, and nothing is set, if an id or a number is out of range.
    bool set_parts(std::vector<int32_t> ids, std::vector<double> rates, double tried) {
        const bool known = std::all_of(ids.begin(), ids.end(), [&](int32_t id) { return id >= -1 && id < vocab_; });
        const bool likely = std::all_of(rates.begin(), rates.end(), [](double rate) { return rate >= 0.0 && rate <= 1.0; });
        if (!known || !likely || !(tried >= 1.0 && tried <= 10000.0)) return false;
        ids_ = std::move(ids), rates_ = std::move(rates), tried_ = tried;
        return true;
    }

    // The row of logits that the target gave after `token`.
    void update(int32_t token, const float* logits) {
        if (token < 0 || token >= vocab_) return;
        int32_t found[kRanks];
        const int count = top(logits, found);
        int32_t* const row = ids_.data() + static_cast<size_t>(token) * kRanks;
        if (row[0] >= 0 && count > 0) learn(row, found[0]);
        std::fill(row, row + kRanks, -1);
        std::copy(found, found + count, row);
        for (int rank = 0; rank < count; ++rank) logits_[static_cast<size_t>(token) * kRanks + rank] = logits[found[rank]];
    }

    // The likeliest nodes of a tree, at most `most`, each after its parent.
    void draft(int32_t last, int most, std::vector<int32_t>& tokens, std::vector<int32_t>& parents, std::vector<double>& survival) const {
        tokens.clear(), parents.clear(), survival.clear();
        std::priority_queue<Candidate> open;
        push(open, last, -1, 0, 1.0);
        while (static_cast<int>(tokens.size()) < most && !open.empty()) {
            const Candidate next = open.top();
            open.pop();
            if (next.survival < min_survival_) return;
            const int32_t node = static_cast<int32_t>(tokens.size());
            const int32_t token = ids_[static_cast<size_t>(next.context) * kRanks + next.rank];
            tokens.push_back(token), parents.push_back(next.parent), survival.push_back(next.survival);
            push(open, next.context, next.parent, next.rank + 1, next.reached);
            push(open, token, node, 0, next.survival);
        }
    }

    // The same where tokens are sampled.
    void draft_sampled(int32_t last, int most, const RequestNoise& noise, std::vector<int32_t>& tokens,
                       std::vector<int32_t>& parents, std::vector<double>& survival) {
        tokens.clear(), parents.clear(), survival.clear();
        std::priority_queue<Sampled> open;
        int pushed = 0;
        const auto expand = [&](int32_t context, int32_t parent, int depth, double reached) {
            for (const LikelyToken& each : sampled(context, noise, depth))
                if (reached * each.probability >= min_sampled_)
                    open.push({reached * each.probability, pushed++, parent, each.token, depth});
        };
        expand(last, -1, 0, 1.0);
        while (static_cast<int>(tokens.size()) < most && !open.empty()) {
            const Sampled next = open.top();
            open.pop();
            tokens.push_back(next.token), parents.push_back(next.parent), survival.push_back(next.survival);
            expand(next.token, static_cast<int32_t>(tokens.size()) - 1, next.depth + 1, next.survival);
        }
    }

  private:
    struct Candidate {
        double survival, reached;  // of the node, and of its parent
        int32_t parent, context;   // context: the parent's token
        int rank;
        // Of equals the one whose parent came first, then of lower rank.
        bool operator<(const Candidate& other) const {
            if (survival != other.survival) return survival < other.survival;
            return parent != other.parent ? parent > other.parent : rank > other.rank;
        }
    };

    struct Sampled {
        double survival;
        int number;  // in the order in which nodes were found
        int32_t parent, token;
        int depth;
        bool operator<(const Sampled& other) const {
            return survival != other.survival ? survival < other.survival : number > other.number;
        }
    };

    const std::vector<LikelyToken>& sampled(int32_t context, const RequestNoise& noise, int depth) {
        candidates_.clear();
        if (context >= 0 && context < vocab_) {
            const size_t first = static_cast<size_t>(context) * kRanks;
            double masses[kRanks], all = 0.0;
            int count = 0;
            for (; count < kRanks && ids_[first + count] >= 0; ++count)
                all += masses[count] = std::exp((logits_[first + count] - logits_[first]) / noise.temperature);
            for (int rank = 0; rank < count; ++rank) candidates_.add(ids_[first + rank], weight_ * masses[rank] / all);
        }
        return candidates_.judge(noise, depth);
    }

    void push(std::priority_queue<Candidate>& open, int32_t context, int32_t parent, int rank, double reached) const {
        if (rank >= kRanks || context < 0 || context >= vocab_ || ids_[static_cast<size_t>(context) * kRanks + rank] < 0) return;
        open.push({reached * rates_[rank], reached, parent, context, rank});
    }

    // Which rank of what was known the target's first choice now has.
    void learn(const int32_t* known, int32_t first) {
        tried_ = std::min(tried_ + 1, 10000.0);
        for (int rank = 0; rank < kRanks; ++rank) rates_[rank] += ((known[rank] == first ? 1.0 : 0.0) - rates_[rank]) / tried_;
    }

    // The ids of the greatest logits, the greatest first, of equals the lowest id; NaN is left out.
    int top(const float* logits, int32_t* ids) const {
        float values[kRanks];
        int count = 0;
        constexpr int kBlock = 256;
        for (int from = 0; from < vocab_; from += kBlock) {
            const int to = std::min(from + kBlock, vocab_);
            if (count == kRanks) {
                const float least = values[kRanks - 1];
                int greater = 0;  // counted, since that is done for several at once
                for (int i = from; i < to; ++i) greater += logits[i] > least;
                if (greater == 0) continue;
            }
            for (int i = from; i < to; ++i) {
                if (!(count < kRanks ? logits[i] == logits[i] : logits[i] > values[kRanks - 1])) continue;
                int at = count < kRanks ? count++ : kRanks - 1;
                for (; at > 0 && logits[i] > values[at - 1]; --at) values[at] = values[at - 1], ids[at] = ids[at - 1];
                values[at] = logits[i], ids[at] = i;
            }
        }
        return count;
    }

    int vocab_;
    std::vector<int32_t> ids_;
    std::vector<float> logits_;  // of these
    std::vector<double> rates_;  // acceptance by rank
    double tried_, min_survival_, weight_, min_sampled_;
    Candidates candidates_;
};

}  // namespace wager
