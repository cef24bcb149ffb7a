// After drafting: what each token survives, and which tokens are verified over the whole batch. They are taken in the order of
// their expected gain, so any number of them is the best set of that size, and closed under parents, since survival never rises
// along a path. Every number is compared: seconds are a step function of rows, so after a token that does not pay more may.
// tests/oracle/judging.py has the same in Python. Knows no Python.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

namespace wager {

struct ConfidenceRules {
    std::vector<double> borders;  // of the bins of conditional confidence
    double highest;               // the most that one is taken for
};

// A draft: `parents` are indices within it that precede their children, -1 for the root; `scores` the drafter's confidence in each
// node, or none.
struct JudgedDraft {
    std::vector<double> scores;
    std::vector<long> parents, tokens;  // `tokens` where they matter
};

// The drafter's confidence that a node is accepted if the one above it is.
inline double conditional_confidence(const ConfidenceRules& rules, const JudgedDraft& draft, size_t node) {
    const double above = draft.parents[node] < 0 ? 1.0 : draft.scores[draft.parents[node]];
    return above > 0 ? std::min(rules.highest, draft.scores[node] / above) : 0.0;
}

inline size_t bin_of(const ConfidenceRules& rules, double confidence) {
    return std::upper_bound(rules.borders.begin(), rules.borders.end(), confidence) - rules.borders.begin();
}

// Appends the survival of the nodes of a draft to `gains`: by its scores and the odds of their bins, or by the odds of depths with
// the sequence's `offset` (odds), where siblings share the rate of their depth, since at most one of them is accepted.
inline void add_survival(const ConfidenceRules& rules, const JudgedDraft& draft, const std::vector<double>& bins,
                         const std::vector<double>& by_depth, double offset, double weight, std::vector<double>& gains) {
    const size_t size = draft.parents.size();
    const bool scored = draft.scores.size() == size;
    std::vector<double> survival(size);
    std::vector<size_t> depths(size), children(size + 1);
    for (const long parent : draft.parents) ++children[parent + 1];
    for (size_t node = 0; node < size; ++node) {
        const long parent = draft.parents[node];
        const double above = parent < 0 ? 1.0 : survival[parent];
        if (scored) {
            const double confidence = conditional_confidence(rules, draft, node);
            const double moved = confidence * bins[bin_of(rules, confidence)];
            survival[node] = above * moved / (moved + 1.0 - confidence);
        } else {
            depths[node] = parent < 0 ? 0 : depths[parent] + 1;
            const double moved = by_depth[std::min(depths[node], by_depth.size() - 1)] * offset;
            survival[node] = above * moved / (1.0 + moved) / static_cast<double>(children[parent + 1]);
        }
        gains.push_back(weight == 1.0 ? survival[node] : weight * survival[node]);
    }
}

struct TakenTokens {
    std::vector<size_t> nodes;  // best first
    double gain = 0.0, cut = 0.0, benefit = 0.0;
    bool has_cut = false;
};

// The n tokens of greatest gain for the n that maximises gain - goodput * seconds[n], where `seconds` are those that 0, 1, ...
// more rows add, one more than there are gains; at most `most`, and none without gain. Of equal ones the earlier comes first.
// `cut` lies between the last one taken and the first one left; `benefit` is the profit beyond that of taking every one.
inline TakenTokens select_tokens(const std::vector<double>& gains, const std::vector<double>& seconds, double goodput,
                                 long most) {
    std::vector<size_t> order(gains.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return gains[a] > gains[b]; });
    size_t limit = std::max(0L, std::min(most, static_cast<long>(order.size()))), count = 0;
    double profit = goodput * seconds[0], best = 0.0, net = 0.0;
    for (size_t number = 1; number <= limit; ++number) {
        const double gain = gains[order[number - 1]];
        if (gain <= 0) {
            limit = number - 1;
            break;
        }
        profit += gain;
        net = profit - goodput * seconds[number];
        if (net > best) best = net, count = number;
    }
    TakenTokens taken;
    taken.has_cut = count > 0 && count < limit;
    if (taken.has_cut) taken.cut = (gains[order[count - 1]] + gains[order[count]]) / 2;
    taken.nodes.assign(order.begin(), order.begin() + count);
    for (const size_t node : taken.nodes) taken.gain += gains[node];
    taken.benefit = best - net;
    return taken;
}

}  // namespace wager
