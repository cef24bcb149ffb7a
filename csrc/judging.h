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

// A draft: `parents` are indices within it, -1 for the root; `scores` the drafter's confidence in each node, or none.
struct JudgedDraft {
    std::vector<double> scores;
    std::vector<long> parents;
};

// What a drafter's confidences mean: odds by bin of confidence; and the odds of each depth, for drafts without scores.
struct AcceptanceOdds {
    std::vector<double> confidence, depth;
};

// Appends the survival of the nodes of a draft to `gains`: by its scores, or by depth with the sequence's `offset` (odds), where
// siblings share the rate of their depth, since at most one of them is accepted. False where a draft is not as it should be.
inline bool add_survival(const ConfidenceRules& rules, const JudgedDraft& draft, const AcceptanceOdds& odds, double offset,
                         double weight, std::vector<double>& gains) {
    const size_t size = draft.parents.size();
    const bool scored = draft.scores.size() == size;
    if (odds.depth.empty() || odds.confidence.size() != rules.borders.size() + 1) return false;
    std::vector<double> survival(size);
    std::vector<size_t> depths(size), children(size + 1);
    for (const long parent : draft.parents)
        if (parent < -1 || parent >= static_cast<long>(size)) return false;
        else ++children[parent + 1];
    for (size_t node = 0; node < size; ++node) {
        const long parent = draft.parents[node];
        if (parent >= static_cast<long>(node)) return false;
        const double above = parent < 0 ? 1.0 : survival[parent];
        if (scored) {
            const double score_above = parent < 0 ? 1.0 : draft.scores[parent];
            const double confidence = score_above > 0 ? std::min(rules.highest, draft.scores[node] / score_above) : 0.0;
            const auto bin = std::upper_bound(rules.borders.begin(), rules.borders.end(), confidence) - rules.borders.begin();
            const double moved = confidence * odds.confidence[bin];
            survival[node] = above * moved / (moved + 1.0 - confidence);
        } else {
            depths[node] = parent < 0 ? 0 : depths[parent] + 1;
            const double moved = odds.depth[std::min(depths[node], odds.depth.size() - 1)] * offset;
            survival[node] = above * moved / (1.0 + moved) / static_cast<double>(children[parent + 1]);
        }
        gains.push_back(weight == 1.0 ? survival[node] : weight * survival[node]);
    }
    return true;
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
