// Which draft tokens are verified: economics/acceptance.py (survival) and economics/policy/admission.py (select) have the same
// in Python, and say why. Knows no Python.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

namespace wager {

struct ConfidenceRules {
    std::vector<double> borders;  // of the bins of conditional confidence
    double highest;               // the most that one is taken for
};

// Appends to `gains` the survival of the nodes of a draft, from `scores` and what confidences of each bin mean; false where a
// parent does not precede its node. `parents` are indices within the draft, -1 for the root.
inline bool add_survival(const ConfidenceRules& rules, const std::vector<double>& scores, const std::vector<long>& parents,
                         const std::vector<double>& corrections, double weight, std::vector<double>& gains) {
    std::vector<double> survival(scores.size());
    for (size_t node = 0; node < scores.size(); ++node) {
        const long parent = parents[node];
        if (parent >= static_cast<long>(node) || parent < -1) return false;
        const double score_above = parent < 0 ? 1.0 : scores[parent], above = parent < 0 ? 1.0 : survival[parent];
        const double confidence = score_above > 0 ? std::min(rules.highest, scores[node] / score_above) : 0.0;
        const size_t bin = std::upper_bound(rules.borders.begin(), rules.borders.end(), confidence) - rules.borders.begin();
        const double odds = confidence * corrections[bin];
        survival[node] = above * odds / (odds + 1.0 - confidence);
        gains.push_back(weight == 1.0 ? survival[node] : weight * survival[node]);
    }
    return true;
}

struct TakenTokens {
    std::vector<size_t> nodes;  // best first
    double gain = 0.0, cut = 0.0, benefit = 0.0;
    bool has_cut = false;
};

// `seconds` are those that 0, 1, ... more rows add, at least as many as there are gains, and one.
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
