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
    std::vector<double> prior;   // acceptance rates by cell: cells of the trees, twice, then those of the store
    double prior_weight, min_survival, most_certain;
    std::vector<double> weights;  // of the sources, where tokens are sampled
    CouplingRules coupling;
};

// The texts that ended: the latest ones, of `shared_tokens` tokens at most.
class SharedTexts {
  public:
    explicit SharedTexts(const LookupRules& rules) : rules_(&rules), tree_(rules.longest) {}

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

  private:
    const LookupRules* rules_;
    SuffixTree tree_;
    std::deque<std::vector<int32_t>> texts_, waiting_;
    size_t tokens_ = 0, waiting_tokens_ = 0;
};

}  // namespace wager
