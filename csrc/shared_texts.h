// What ended requests generated, in one tree: SharedTexts of tests/oracle/lookup.py has the same. Knows no Python.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "corpus.h"
#include "coupling.h"
#include "suffix_tree.h"

namespace wager {

struct LookupRules {
    int longest = 0;             // tokens of a context in the trees; 0: no tree
    size_t shared_tokens = 0;    // of all texts that ended; 0: no shared tree
    std::vector<double> prior;   // acceptance rates by cell, of one source after the other: see lookup.h
    double prior_weight, min_survival, most_certain;
    std::vector<double> weights;  // of the sources, where tokens are sampled
    CouplingRules coupling;
};

// The texts that ended: the latest ones, of `shared_tokens` tokens at most.
class SharedTexts {
  public:
    explicit SharedTexts(const LookupRules& rules) : rules_(&rules), tree_(rules.longest) {}

    static constexpr int kInterpolated = 5;     // tokens of a context; the tree has those of rules.longest at most
    static constexpr int kLatest = 32;          // followers in the tree, the latest ones, that are looked at
    static constexpr double kSmoothing = 4.0;   // draft/store_file.py: _SMOOTHING

    Corpus* corpus = nullptr;  // of older texts

    SuffixTree& tree() { return tree_; }
    size_t bytes() const { return tree_.bytes() + sizeof(int32_t) * (tokens_ + waiting_tokens_); }

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

    // What followed the last tokens before `end`, the likeliest first; `match` is their longest run in the tree. As in a
    // store (draft/store_file.py), the probability after the last m tokens is interpolated with that after m - 1.
    void interpolate(const int32_t* end, size_t size, SuffixTree::Match match, std::vector<LikelyToken>& out) {
        out.clear();
        uint32_t nodes[kInterpolated + 1];
        const int longest = std::min(match.length, kInterpolated);
        for (; match.length > 0; match = tree_.shorter(match))
            if (match.length <= kInterpolated) nodes[match.length] = match.node;
        for (int length = 1; length <= kInterpolated && static_cast<size_t>(length) <= size; ++length) {
            double all = 0.0;
            seen_.clear();
            const auto count = [&](int32_t token, double times) {
                all += times;
                of(seen_, token).probability += times;
            };
            if (length <= longest) {
                tree_.latest(nodes[length], kLatest, followers_);
                for (const SuffixTree::Follower& each : followers_) count(each.token, each.count);
            }
            if (corpus != nullptr) corpus->each_follower(end, length, count);
            if (seen_.empty()) break;
            const double pull = kSmoothing * seen_.size();
            for (const LikelyToken& each : out) of(seen_, each.token).probability += pull * each.probability;
            for (LikelyToken& each : seen_) each.probability /= all + pull;
            out.swap(seen_);
        }
        const auto likelier = [](const LikelyToken& a, const LikelyToken& b) { return a.probability > b.probability; };
        std::stable_sort(out.begin(), out.end(), likelier);
    }

  private:
    static LikelyToken& of(std::vector<LikelyToken>& tokens, int32_t token) {
        for (LikelyToken& each : tokens)
            if (each.token == token) return each;
        return tokens.emplace_back(LikelyToken{token, 0.0});
    }

    const LookupRules* rules_;
    SuffixTree tree_;
    std::deque<std::vector<int32_t>> texts_, waiting_;
    size_t tokens_ = 0, waiting_tokens_ = 0;
    std::vector<SuffixTree::Follower> followers_;
    std::vector<LikelyToken> seen_;
};

}  // namespace wager
