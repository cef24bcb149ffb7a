// What ended requests generated, in one tree: SharedTexts of tests/oracle/lookup.py has the same. Knows no Python.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <vector>

#include "corpus.h"
#include "coupling.h"
#include "suffix_tree.h"
#include "token_numbers.h"

namespace wager {

// What is learned of learned texts: draft/lookup.py has the same, LearnedRules.
struct LearnedRules {
    double prior_weight, remembered, first_gain, least_gain, gain_weight;
    int rest;
};

struct LookupRules {
    int longest = 0;             // tokens of a context in the trees; 0: no tree
    size_t shared_tokens = 0;    // of all texts that ended; 0: no shared tree
    std::vector<double> prior;   // acceptance rates by cell, of one source after the other: see lookup.h
    double prior_weight, min_survival, most_certain;
    LearnedRules learned;
    std::vector<double> weights;  // of the sources, where tokens are sampled
    CouplingRules coupling;
};

// A mean of what was observed.
class LookupMean {
  public:
    LookupMean(double value, double observed) : value_(value), observed_(observed) {}

    double value() const { return value_; }
    double observed() const { return observed_; }

    // `amount` observations are `value` together. What was before counts for less than `remembered` of them.
    void observe(double value, double amount, double remembered) {
        observed_ = std::min(observed_ + amount, remembered);
        value_ += (value - amount * value_) / observed_;
    }

  private:
    double value_, observed_;
};

// Of the tokens that followed a place, those that are likeliest to do so again.
class Interpolation {
  public:
    static constexpr int kLongest = 5;          // tokens of a context
    static constexpr double kSmoothing = 4.0;   // draft/store_file.py: _SMOOTHING

    // The `most` likeliest; `each_follower(length, count)` calls count(token, times) with what followed the last `length` tokens. As in
    // a store (draft/store_file.py), the probability after m tokens is interpolated with that after m - 1.
    template <class EachFollower> void find(EachFollower each_follower, size_t most, std::vector<LikelyToken>& out) {
        numbers_.clear();
        seen_.clear();
        for (int length = 1; length <= kLongest; ++length) {
            double all = 0.0;
            uint32_t different = 0;
            each_follower(length, [&](int32_t token, double times) {
                all += times;
                const uint32_t number = numbers_.of(token);
                if (number == seen_.size()) seen_.push_back({token});
                Seen& each = seen_[number];
                if (each.length != length) each.length = length, each.rank = different++;
                each.times += times;
            });
            if (different == 0) break;
            const double pull = kSmoothing * different;
            for (Seen& each : seen_) each.probability = (each.times + pull * each.probability) / (all + pull), each.times = 0.0;
        }
        best_.clear();
        for (const Seen& each : seen_) {
            if (best_.size() < most)
                best_.push_back(&each);
            else if (each < *best_.back())
                best_.back() = &each;
            else
                continue;
            for (size_t at = best_.size() - 1; at > 0 && *best_[at] < *best_[at - 1]; --at) std::swap(best_[at], best_[at - 1]);
        }
        out.clear();
        for (const Seen* each : best_) out.push_back({each->token, each->probability});
    }

  private:
    // A token that followed: how often after the present length, the greatest length after which it did, and as which one.
    struct Seen {
        int32_t token;
        int length = 0;
        uint32_t rank = 0;
        double times = 0.0, probability = 0.0;

        // Of equals the one that followed more tokens, then the one that was counted first.
        bool operator<(const Seen& other) const {
            if (probability != other.probability) return probability > other.probability;
            return length != other.length ? length > other.length : rank < other.rank;
        }
    };

    TokenNumbers numbers_;
    std::vector<Seen> seen_;  // by number
    std::vector<const Seen*> best_;
};

// The texts that ended: the latest ones, of `shared_tokens` tokens at most.
class SharedTexts {
  public:
    explicit SharedTexts(const LookupRules& rules)
        : gain(rules.learned.first_gain, rules.learned.gain_weight), rules_(&rules), tree_(rules.longest) {
        for (const double rate : rules.prior) wrong.emplace_back(1.0 - rate, rules.learned.prior_weight);
    }

    static constexpr int kLatest = 32;  // followers in the tree, the latest ones, that are looked at

    Corpus* corpus = nullptr;  // of older texts; given to `read`
    Interpolation interpolation;

    // What the tenant's sequences found: how often guesses from the corpus are wrong, by cell, and what they added to others.
    std::vector<LookupMean> wrong;
    LookupMean gain;

    SuffixTree& tree() { return tree_; }
    // Only grows, also where a tenant's corpus was closed and is another one now: a Match that is taken for one of this tree may
    // lead to nodes that are none.
    uint64_t version() const { return before_ + tree_.version() + (corpus == nullptr ? 0 : corpus->version()); }

    void read(Corpus& given) {
        if (&given == corpus) return;
        before_ = version() + 1 - tree_.version() - given.version();
        corpus = &given;
    }

    size_t bytes() const {
        return tree_.bytes() + sizeof(int32_t) * (tokens_ + waiting_tokens_) + (corpus == nullptr ? 0 : corpus->bytes());
    }

    void end(std::vector<int32_t> text) {
        if (text.size() > rules_->shared_tokens) text.erase(text.begin(), text.end() - rules_->shared_tokens);
        waiting_tokens_ += text.size();
        waiting_.push_back(std::move(text));
        while (waiting_tokens_ > rules_->shared_tokens) {
            waiting_tokens_ -= waiting_.front().size();
            waiting_.pop_front();
        }
    }

    // Adds one of the texts that wait, and takes out the oldest ones where there are too many tokens.
    void absorb() {
        if (waiting_.empty()) return;
        texts_.push_back(std::move(waiting_.front()));
        waiting_.pop_front();
        waiting_tokens_ -= texts_.back().size();
        tokens_ += texts_.back().size();
        while (tokens_ > rules_->shared_tokens) {
            tree_.remove(texts_.front());
            tokens_ -= texts_.front().size();
            texts_.pop_front();
        }
        std::vector<uint32_t> endings{SuffixTree::kRoot};
        for (const int32_t token : texts_.back()) tree_.append(endings, token);
    }

    // What followed in the tree, the `most` likeliest first; `match` is the longest run in it.
    void interpolate(SuffixTree::Match match, size_t most, std::vector<LikelyToken>& out) {
        uint32_t nodes[Interpolation::kLongest + 1];
        const int longest = std::min(match.length, Interpolation::kLongest);
        for (; match.length > 0; match = tree_.shorter(match))
            if (match.length <= Interpolation::kLongest) nodes[match.length] = match.node;
        interpolation.find([&](int length, auto count) {
            if (length > longest) return;
            tree_.latest(nodes[length], kLatest, followers_);
            for (const SuffixTree::Follower& each : followers_) count(each.token, each.count);
        }, most, out);
    }

  private:
    const LookupRules* rules_;
    SuffixTree tree_;
    std::deque<std::vector<int32_t>> texts_, waiting_;
    size_t tokens_ = 0, waiting_tokens_ = 0;
    uint64_t before_ = 0;  // what the version has of corpora that were read before
    std::vector<SuffixTree::Follower> followers_;
};

}  // namespace wager
