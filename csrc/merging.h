// Trees of guesses of several drafters as one, and how often a drafter was right. tests/oracle/merging.py has the same in Python.
// Knows no Python.
#pragma once

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "judging.h"

namespace wager {

constexpr double kUnknownRate = 0.5;  // of a guess of a drafter without scores, until something was learned of it

// The probability of each node to be right if its parent is, by the drafter's own scores.
inline std::vector<double> rates_of(const JudgedDraft& draft) {
    std::vector<double> rates;
    for (size_t node = 0; node < draft.parents.size(); ++node) {
        const long parent = draft.parents[node];
        if (draft.scores.empty()) {
            rates.push_back(kUnknownRate / static_cast<double>(std::count(draft.parents.begin(), draft.parents.end(), parent)));
        } else {
            const double above = parent < 0 ? 1.0 : draft.scores[parent];
            rates.push_back(above > 0 ? std::min(1.0, draft.scores[node] / above) : 0.0);
        }
    }
    return rates;
}

// Lets the scores be as they were lately borne out: `factor` times as often as the drafter thought.
inline void rescale(JudgedDraft& draft, double factor) {
    std::vector<double> scores;
    for (const double rate : rates_of(draft)) {
        const long parent = draft.parents[scores.size()];
        scores.push_back((parent < 0 ? 1.0 : scores[parent]) * std::min(1.0, rate * factor));
    }
    draft.scores = std::move(scores);
}

// Appends a tree behind the last node of one that is not empty.
inline void append_behind(JudgedDraft& draft, const JudgedDraft& more) {
    const long last = static_cast<long>(draft.parents.size()) - 1;
    const double above = draft.scores[last];
    draft.tokens.insert(draft.tokens.end(), more.tokens.begin(), more.tokens.end());
    for (const long parent : more.parents) draft.parents.push_back(last + 1 + parent);  // -1 is the last node
    for (const double score : more.scores) draft.scores.push_back(above * score);
}

// One tree: equal paths share their nodes, which take the greater score (and never a greater one than their parents); its `nodes`
// best nodes, in the order of their scores.
inline JudgedDraft merge(const std::vector<JudgedDraft>& trees, size_t nodes) {
    JudgedDraft all;
    std::map<std::pair<long, long>, long> known;  // by the node before and the token
    for (const JudgedDraft& tree : trees) {
        std::vector<long> place;
        for (size_t node = 0; node < tree.parents.size(); ++node) {
            const long parent = tree.parents[node] < 0 ? -1 : place[tree.parents[node]];
            const auto [found, added] = known.try_emplace({parent, tree.tokens[node]}, static_cast<long>(all.parents.size()));
            if (added) all.tokens.push_back(tree.tokens[node]), all.parents.push_back(parent), all.scores.push_back(0.0);
            place.push_back(found->second);
            all.scores[found->second] = std::max(all.scores[found->second], tree.scores[node]);
        }
    }
    for (size_t node = all.parents.size(); node-- > 0;)  // an ancestor is at least as likely as what follows it
        if (const long parent = all.parents[node]; parent >= 0) all.scores[parent] = std::max(all.scores[parent], all.scores[node]);
    std::vector<size_t> order(all.parents.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return all.scores[a] > all.scores[b]; });
    order.resize(std::min(nodes, order.size()));
    std::vector<long> place(all.parents.size());
    JudgedDraft best;
    for (const size_t node : order) {
        place[node] = static_cast<long>(best.parents.size());
        best.tokens.push_back(all.tokens[node]);
        best.parents.push_back(all.parents[node] < 0 ? -1 : place[all.parents[node]]);
        best.scores.push_back(all.scores[node]);
    }
    return best;
}

// How many guesses are worth the price of a row; all of them where nothing says how likely they are.
inline long worth(const JudgedDraft& draft, double row) {
    if (draft.scores.empty()) return static_cast<long>(draft.parents.size());
    return std::count_if(draft.scores.begin(), draft.scores.end(), [&](double score) { return score > row; });
}

struct BorneOut {
    double expected = 0.0;  // guesses that should have been right
    long right = 0;         // that were
};

// Compares a drafter's guesses with the tokens that became known, as far as its path was right.
inline BorneOut bear_out(const JudgedDraft& draft, const std::vector<long>& tokens) {
    BorneOut found;
    const std::vector<double> rates = rates_of(draft);
    long node = -1;
    for (const long token : tokens) {
        double sum = 0.0;
        long right = -1;
        bool guessed = false;
        for (size_t child = 0; child < draft.parents.size(); ++child) {
            if (draft.parents[child] != node) continue;
            guessed = true, sum += rates[child];
            if (right < 0 && draft.tokens[child] == token) right = static_cast<long>(child);
        }
        if (!guessed) break;
        found.expected += std::min(1.0, sum);
        if (right < 0) break;
        ++found.right;
        node = right;
    }
    return found;
}

}  // namespace wager
