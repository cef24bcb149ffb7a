// Trees of guesses of several drafters as one, how often a drafter was right, and where a second one is asked.
// tests/oracle/merging.py has the same in Python. Knows no Python.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <unordered_map>
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

// How many of those are on the path of the tokens that became known.
inline long right_and_worth(const JudgedDraft& draft, const std::vector<long>& tokens, double row) {
    long were = 0, node = -1;
    for (const long token : tokens) {
        size_t child = static_cast<size_t>(node + 1);
        while (child < draft.parents.size() && (draft.parents[child] != node || draft.tokens[child] != token)) ++child;
        if (child == draft.parents.size() || (!draft.scores.empty() && draft.scores[child] <= row)) break;
        ++were;
        node = static_cast<long>(child);
    }
    return were;
}

// How often a drafter was right where it guessed, and how often it should have been by its scores.
struct Reliability {
    static constexpr double kPrior = 10.0;  // guesses for which the assumption counts that it is right as often as it thinks
    double right = kPrior, expected = kPrior;

    double factor() const { return right / expected; }

    // Compares its guesses with the tokens that became known, as far as its path was right.
    void learn(const JudgedDraft& draft, const std::vector<long>& tokens) {
        const std::vector<double> rates = rates_of(draft);
        double should = 0.0;
        long were = 0, node = -1;
        for (const long token : tokens) {
            double sum = 0.0;
            long found = -1;
            bool guessed = false;
            for (size_t child = 0; child < draft.parents.size(); ++child) {
                if (draft.parents[child] != node) continue;
                guessed = true, sum += rates[child];
                if (found < 0 && draft.tokens[child] == token) found = static_cast<long>(child);
            }
            if (!guessed) break;
            should += std::min(1.0, sum);
            if (found < 0) break;
            ++were;
            node = found;
        }
        expected += should, right += static_cast<double>(were);
    }
};

// What must be paid, in tokens: see DraftPrices of Python.
struct Prices {
    double row, call, guess, keeping;
};

// A second drafter, asked where the first one's guesses are worth little: what it brings where that one is about equally sure, in
// tokens that would not have been guessed without it, less the price of its guesses and rows; and whether it is worth its keeping.
class SecondDrafter {
  public:
    // `borders` are of bins of the first one's sureness; a trial behind a rest costs `share` of what is generated meanwhile.
    SecondDrafter(std::vector<double> borders, double share) : borders_(std::move(borders)), share_(share) { begin_anew(); }

    // It rests until call number `until`, but for the last calls before that, in which it is shown states.
    int64_t until = 0;

    // Whether to ask it at a place of `sequence`, where the first one's best first guess is `sure`; of a call `now` for that many
    // sequences. Then `least` is the survival at which its next guess would not be worth its pass and its row.
    bool ask(const std::string& sequence, double sure, const Prices& prices, int64_t now, long sequences, double& least) {
        const size_t place = std::upper_bound(borders_.begin(), borders_.end(), sure) - borders_.begin();
        PlaceGain& gain = (*gains_)[place];
        const bool pays = gain.mean > prices.call || gain.left_out >= kRetried;
        gain.left_out = pays ? 0 : gain.left_out + 1;
        if (pays) asked_[sequence] = {gains_, place, prices, {}, {}, {}};
        credit_ -= prices.keeping;
        if (prices.keeping > 0 && credit_ < 0) {  // it has cost too much
            until = now + static_cast<int64_t>(std::nearbyint(kCredit / (share_ * static_cast<double>(sequences))));
            begin_anew();
        }
        least = std::min(kMostSure, (prices.row + prices.guess) / kNextRate / second_.factor());
        return pays;
    }

    // The tree of both drafts, of so many nodes, of a place where it was asked; what the first one guesses `behind` a chain of the
    // second's, if anything, goes on there.
    JudgedDraft join(const JudgedDraft& first, const JudgedDraft& second, size_t nodes, const JudgedDraft* behind) const {
        std::vector<JudgedDraft> trees{first, second};
        rescale(trees[0], first_.factor());
        rescale(trees[1], second_.factor());
        if (behind != nullptr) {
            if (second.parents.empty()) throw std::invalid_argument("nothing to go on behind");
            JudgedDraft more = *behind;
            rescale(more, first_.factor());
            append_behind(trees[1], more);
        }
        return merge(trees, nodes);
    }

    // What came of a place where it was asked: the draft of each, and the one that was `made`.
    void answer(const std::string& sequence, JudgedDraft first, JudgedDraft second, JudgedDraft made) {
        AskedPlace& place = asked_.at(sequence);
        place.first = std::move(first), place.second = std::move(second), place.made = std::move(made);
    }

    // Learns from the tokens that became known.
    void accept(const std::string& sequence, const std::vector<long>& tokens) {
        const auto found = asked_.find(sequence);
        if (found == asked_.end()) return;
        const AskedPlace& place = found->second;
        if (!place.second.parents.empty()) {
            const auto [row, call, guess, keeping] = place.prices;
            JudgedDraft alone = place.first;
            rescale(alone, first_.factor());
            const double cost = row * static_cast<double>(worth(place.made, row) - worth(alone, row)) +
                                guess * static_cast<double>(place.second.parents.size());
            // A guess that is not worth a row is not verified, and brings nothing if it is right.
            const long right = right_and_worth(place.made, tokens, row) - right_and_worth(alone, tokens, row);
            const double brought = static_cast<double>(right) - cost;
            first_.learn(place.first, tokens);
            second_.learn(place.second, tokens);
            (*place.gains)[place.index].learn(brought);
            credit_ = std::min(kMostCredit, credit_ + (brought - call));
        }
        asked_.erase(found);
    }

    void end(const std::string& sequence) { asked_.erase(sequence); }

  private:
    // Tokens that asking is taken to bring before it was asked where the first knows nothing (less, the surer that is), and the
    // places that this counts for: what it brings at one place is 0 to 7 tokens.
    static constexpr double kFirstGain = 0.45, kFirstWeight = 20.0;
    static constexpr double kMemory = 400.0;  // places that count of those where it was asked
    static constexpr long kRetried = 64;      // of so many places at which asking does not seem to pay, it is asked at one
    // Tokens by which keeping and asking it may cost more than it brings, until it rests: at first, and once it has brought as
    // many more. What it brings scatters, so that one that brings a little needs many.
    static constexpr double kCredit = 10.0, kMostCredit = 60.0;
    static constexpr double kNextRate = 0.6;  // how often a further guess of a chain is right, about, if those before it are
    static constexpr double kMostSure = 0.95;

    struct PlaceGain {
        double mean, places = kFirstWeight;
        long left_out = 0;

        void learn(double gain) {
            places = std::min(kMemory, places + 1.0);
            mean += (gain - mean) / places;
        }
    };
    using Gains = std::shared_ptr<std::vector<PlaceGain>>;

    struct AskedPlace {
        Gains gains;  // those of before a rest are no more learned for anything
        size_t index;
        Prices prices;
        JudgedDraft first, second, made;
    };

    void begin_anew() {
        gains_ = std::make_shared<std::vector<PlaceGain>>(1, PlaceGain{kFirstGain});
        for (const double least : borders_) gains_->push_back({kFirstGain * (1.0 - least)});
        credit_ = kCredit;
        second_ = {};
    }

    const std::vector<double> borders_;
    const double share_;
    Gains gains_;
    double credit_ = kCredit;
    Reliability first_, second_;
    std::unordered_map<std::string, AskedPlace> asked_;  // of each sequence the last place, if it was asked there
};

}  // namespace wager
