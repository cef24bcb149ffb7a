// Guesses from what followed the last tokens elsewhere: in the text itself, in texts that ended, in a static store.
// draft/lookup.py has the same in Python, and says what it does. Knows no Python.
#pragma once

#include <algorithm>
#include <cstdint>
#include <queue>
#include <vector>

#include "coupling.h"
#include "shared_texts.h"
#include "store_table.h"
#include "suffix_tree.h"

namespace wager {

enum LookupSource { kOwnText, kSharedTexts, kStore, kSources };

// Continuations of a source in a tree of guesses, and followers of a run, the latest ones, among which they are chosen.
constexpr int kContinuations = 4, kLatest = SharedTexts::kLatest;
constexpr int kShortest = 2;  // run in a corpus: one of one token says little, and many places are behind it
constexpr double kOtherWeights[kSources] = {2.2, 0.9, 2.2};  // draft/lookup.py: OTHER_WEIGHTS

// Cells: of the text's own tree by the length of the match and its kind; of earlier texts and of the store by the
// probability; of runs in earlier texts that are longer than kInterpolated tokens as of the tree.
constexpr int kMatchCells = 8, kTreeCells = 4 * kMatchCells, kProbabilityCells = 16;
constexpr int kSharedCell = kTreeCells, kStoreCell = kSharedCell + kProbabilityCells, kLongCell = kStoreCell + kProbabilityCells,
              kCells = kLongCell + 4 * (kMatchCells - SharedTexts::kInterpolated);

// What a source guesses next; its rate is that of its cell.
struct LookupGuess {
    int32_t token = -1;
    int cell = -1;  // -1: the source has no guess
};

// A place in a text, real or drafted.
struct LookupPlace {
    static constexpr size_t kLast = Corpus::kLongest;

    SuffixTree::Match own, shared;
    int32_t last[kLast] = {};
    size_t known = 0;  // of those

    void add(int32_t token) {
        if (known == kLast)
            std::copy(last + 1, last + known, last);
        else
            ++known;
        last[known - 1] = token;
    }
};

// One sequence.
class LookupText {
  public:
    LookupText(const LookupRules& rules, SharedTexts& shared, const StoreTable* store, std::vector<int32_t> prompt,
               std::vector<int32_t> prediction)
        : rules_(&rules), shared_(&shared), store_(store), own_(rules.longest), prompt_(std::move(prompt)),
          prediction_(std::move(prediction)), rates_(rules.prior), tried_(rules.prior.size(), rules.prior_weight),
          candidates_(rules.coupling) {}

    void know(int32_t token) { unindexed_.push_back(token); }

    size_t bytes() const { return own_.bytes() + sizeof(int32_t) * (prompt_.size() + prediction_.size() + tokens_.size()); }

    // Indexes what became known, and learns from each token which sources predicted it. The predicted output comes before
    // the prompt, as a text of its own.
    void catch_up() {
        if (!prompt_.empty()) {
            for (const int32_t token : rules_->longest != 0 ? prediction_ : std::vector<int32_t>()) own_.append(endings_, token);
            endings_.assign(1, SuffixTree::kRoot);
            prediction_ = {};
            for (const int32_t token : prompt_) append(token);
            generated_ = tokens_.size();
            prompt_ = {};
            find_place();
            predict(place_, guesses_);
        } else if (shared_version_ != shared_->version()) {
            find_place();
            predict(place_, guesses_);
        }
        size_t known = ahead_version_ == shared_->version() ? ahead_.size() : 0;
        for (size_t i = 0; i < unindexed_.size(); ++i) {
            const int32_t token = unindexed_[i];
            learn(token);
            append(token);
            move(place_, token);
            place_.own = {endings_.back(), static_cast<int>(endings_.size()) - 1};
            if (i < known && ahead_[i].token != token) known = i;
            predict(place_, guesses_, i < known ? &ahead_[i].guess : nullptr);
        }
        unindexed_.clear();
        ahead_.clear();
    }

    // A chain of at most `depth` guesses with their survival: at every place the likeliest token. It follows the guesses
    // `after` of another drafter.
    void draft(int depth, const std::vector<int32_t>& after, const RequestNoise& noise, std::vector<int32_t>& tokens,
               std::vector<double>& survival) {
        tokens.clear(), survival.clear();
        LookupPlace place = place_after(after);
        LookupGuess guesses[kSources];
        std::copy(guesses_, guesses_ + kSources, guesses);
        ahead_.clear(), ahead_version_ = shared_->version();
        double reached = 1.0;
        while (static_cast<int>(tokens.size()) < depth) {
            if (noise.greedy() && !(after.empty() && tokens.empty())) {
                predict(place, guesses);
                if (after.empty()) ahead_.push_back({tokens.back(), guesses[kSharedTexts]});
            }
            if (noise.greedy()) named(guesses, likely_);
            else coupled(place, noise, tokens.size());
            const LikelyToken next = likeliest();
            reached *= next.probability;
            if (reached < rules_->min_survival) return;
            tokens.push_back(next.token), survival.push_back(reached);
            move(place, next.token);
        }
    }

    // The likeliest nodes of a tree, at most `most`, each after its parent; the rest as in `draft`.
    void draft_tree(int most, const std::vector<int32_t>& after, const RequestNoise& noise, std::vector<int32_t>& tokens,
                    std::vector<int32_t>& parents, std::vector<double>& survival) {
        tokens.clear(), parents.clear(), survival.clear();
        std::priority_queue<Branch> open;
        int pushed = 0;
        const auto expand = [&](const LookupPlace& place, int32_t parent, int depth, double reached) {
            if (noise.greedy()) {
                LookupGuess guesses[kSources];
                predict(place, guesses);
                continuations(place, guesses, likely_);
            } else {
                coupled(place, noise, depth);
            }
            for (const LikelyToken& next : likely_)
                if (reached * next.probability >= rules_->min_survival)
                    open.push({reached * next.probability, pushed++, parent, next.token, depth, place});
        };
        expand(place_after(after), -1, 0, 1.0);
        while (static_cast<int>(tokens.size()) < most && !open.empty()) {
            Branch next = open.top();
            open.pop();
            const int32_t node = static_cast<int32_t>(tokens.size());
            tokens.push_back(next.token), parents.push_back(next.parent), survival.push_back(next.survival);
            move(next.place, next.token);
            expand(next.place, node, next.depth + 1, next.survival);
        }
    }

    // The tokens that were generated, with the last ones of the prompt before them as context.
    std::vector<int32_t> generated() const {
        if (!prompt_.empty()) return {};
        const size_t before = std::min(generated_, static_cast<size_t>(rules_->longest));
        std::vector<int32_t> text(tokens_.begin() + (generated_ - before), tokens_.end());
        text.insert(text.end(), unindexed_.begin(), unindexed_.end());
        return text.size() > before ? text : std::vector<int32_t>();
    }

  private:
    void append(int32_t token) {
        if (rules_->longest != 0) own_.append(endings_, token);
        tokens_.push_back(token);
    }

    void move(LookupPlace& place, int32_t token) {
        if (rules_->longest != 0) place.own = own_.after(place.own, token);
        if (rules_->shared_tokens != 0) place.shared = shared_->tree().after(place.shared, token);
        place.add(token);
    }

    LookupPlace place_after(const std::vector<int32_t>& tokens) {
        LookupPlace place = place_;
        for (const int32_t token : tokens) move(place, token);
        return place;
    }

    void find_place() {
        place_ = {};
        shared_version_ = shared_->version();
        const size_t most = std::max<size_t>(rules_->longest, LookupPlace::kLast);
        for (size_t i = tokens_.size() - std::min(tokens_.size(), most); i < tokens_.size(); ++i) move(place_, tokens_[i]);
        place_.own = {endings_.back(), static_cast<int>(endings_.size()) - 1};
    }

    // `of_shared` is what earlier texts say, if that is known.
    void predict(const LookupPlace& place, LookupGuess (&guesses)[kSources], const LookupGuess* of_shared = nullptr) {
        guesses[kOwnText] = rules_->longest != 0 ? of_tree(own_, place.own, 0) : LookupGuess();
        guesses[kSharedTexts] = of_shared != nullptr ? *of_shared : rules_->shared_tokens != 0 ? of_shared_texts(place) : LookupGuess();
        guesses[kStore] = LookupGuess();
        if (store_ == nullptr || store_->find(place.last + place.known, place.known, 1, found_) == 0) return;
        guesses[kStore] = {found_[0].token, kStoreCell + found_[0].probability * kProbabilityCells / 256};
    }

    // The most frequent follower of the longest ending that has one. Cells are by the length of the match, and by how
    // often something followed and how often this: once; always; mostly; less.
    static LookupGuess of_tree(SuffixTree& tree, SuffixTree::Match match, int first_cell) {
        match = known(tree, match);
        if (match.length == 0) return {};
        return of_match(tree.best(match.node), tree.followers(match.node), match.length, first_cell);
    }

    static LookupGuess of_match(SuffixTree::Follower best, uint32_t all, int length, int first_cell) {
        const int kind = all == 1 ? 0 : best.count == all ? 1 : 2 * best.count > all ? 2 : 3;
        return {best.token, first_cell + 4 * (std::min(length, kMatchCells) - 1) + kind};
    }

    // The latest texts are in a tree, older ones in a corpus, if there is one. A long run is said to go on as it did,
    // the longer one of the two; else what followed counts by its probability.
    LookupGuess of_shared_texts(const LookupPlace& place) {
        constexpr int kFirst = kLongCell - 4 * SharedTexts::kInterpolated;
        const SuffixTree::Match match = known(shared_->tree(), place.shared);
        const int length = find_in_corpus(place, match.length);
        if (length > SharedTexts::kInterpolated) {
            const uint32_t all = shared_->corpus->followers(followers_);
            return of_match(followers_[0], all, length, kFirst);
        }
        if (match.length > SharedTexts::kInterpolated && length == 0) return of_tree(shared_->tree(), match, kFirst);
        shared_->interpolate(place.shared, kContinuations, interpolated_);
        if (interpolated_.empty()) return {};
        const LikelyToken& best = interpolated_[0];
        return {best.token, kSharedCell + std::min(static_cast<int>(best.probability * kProbabilityCells), kProbabilityCells - 1)};
    }

    // Looks the place up in the corpus; the length of a run there that is longer than `in_tree`, else 0.
    int find_in_corpus(const LookupPlace& place, int in_tree) {
        if (shared_->corpus == nullptr) return 0;
        const int length = shared_->corpus->look_up(place.last + place.known, place.known);
        return length > std::max(in_tree, kShortest - 1) ? length : 0;
    }

    // A guess of the chain that was drafted last, and what earlier texts say is next.
    struct Ahead {
        int32_t token;
        LookupGuess guess;
    };

    struct Branch {
        double survival;
        int number;  // in the order in which branches were found
        int32_t parent, token;
        int depth;          // of the token, from 0
        LookupPlace place;  // before the token
        bool operator<(const Branch& other) const {
            return survival != other.survival ? survival < other.survival : number > other.number;
        }
    };

    // The tokens that the sources name, in their order. Sources that agree are wrong together as if independently; tokens
    // compete by their odds.
    void named(const LookupGuess (&guesses)[kSources], std::vector<LikelyToken>& out) const {
        out.clear();
        double all = 1.0;
        for (int source = 0; source < kSources; ++source) {
            const LookupGuess& guess = guesses[source];
            if (guess.cell < 0 || has(out, guess.token)) continue;
            double wrong = 1.0;
            for (int other = source; other < kSources; ++other)
                if (guesses[other].cell >= 0 && guesses[other].token == guess.token)
                    wrong *= 1.0 - std::min(rates_[guesses[other].cell], rules_->most_certain);
            out.push_back({guess.token, 1.0 / wrong - 1.0});
            all += out.back().probability;
        }
        for (LikelyToken& token : out) token.probability /= all;
    }

    // Where tokens are sampled: every source gives masses to what it has seen after each ending of the text, `ahead` guesses
    // after the first.
    void coupled(const LookupPlace& place, const RequestNoise& noise, size_t ahead) {
        candidates_.clear();
        if (rules_->longest != 0) add_followers(own_, place.own, rules_->weights[kOwnText]);
        if (rules_->shared_tokens != 0) {
            add_followers(shared_->tree(), place.shared, rules_->weights[kSharedTexts]);
            if (find_in_corpus(place, known(shared_->tree(), place.shared).length) != 0) {
                shared_->corpus->followers(followers_);
                add_followers(rules_->weights[kSharedTexts]);
            }
        }
        if (store_ != nullptr)
            store_->each(place.last + place.known, place.known, kContinuations, [&](int32_t token, int probability) {
                candidates_.add(token, rules_->weights[kStore] * probability / 255.0);
            });
        likely_ = candidates_.judge(noise, ahead);
    }

    // A follower counts by how often it followed, shared among the different ones.
    void add_followers(const SuffixTree& tree, SuffixTree::Match match, double weight) {
        for (; match.length > 0; match = tree.shorter(match)) {
            tree.latest(match.node, kLatest, followers_);
            add_followers(weight);
        }
    }

    void add_followers(double weight) {
        for (const SuffixTree::Follower& each : followers_) candidates_.add(each.token, weight * each.count / followers_.size());
    }

    LikelyToken likeliest() const {
        LikelyToken best{-1, 0.0};
        for (const LikelyToken& token : likely_)
            if (token.probability > best.probability) best = token;
        return best;
    }

    static bool has(const std::vector<LikelyToken>& tokens, int32_t token) {
        return std::any_of(tokens.begin(), tokens.end(), [&](const LikelyToken& each) { return each.token == token; });
    }

    // The tokens that the sources name, and their other continuations: tests/oracle/lookup.py says how likely these are.
    void continuations(const LookupPlace& place, const LookupGuess (&guesses)[kSources], std::vector<LikelyToken>& out) {
        named(guesses, out);
        const size_t count = out.size();
        for (int source = 0; source < kSources; ++source) {
            if (guesses[source].cell < 0) continue;
            double named = 0.0;
            for (size_t i = 0; i < count; ++i)
                if (out[i].token == guesses[source].token) named = out[i].probability;
            find_others(place, source, guesses[source]);
            double all = 1.0;
            for (const LikelyToken& other : others_) all += other.probability;
            const double most = kOtherWeights[source] * named * (1.0 - named) / all;
            for (const LikelyToken& other : others_)
                if (!has(out, other.token)) out.push_back({other.token, std::min(named, most) * other.probability});
        }
    }

    // The other continuations of a source than its guess, the last one that it made, and how frequent each is beside it.
    void find_others(const LookupPlace& place, int source, const LookupGuess& guess) {
        others_.clear();
        if (source == kStore) {
            store_->find(place.last + place.known, place.known, kContinuations, found_);
            for (const StoreTable::Continuation& other : found_)
                if (other.token != guess.token) others_.push_back({other.token, double(other.probability) / found_[0].probability});
            return;
        }
        if (source == kSharedTexts && guess.cell < kLongCell) {
            for (size_t i = 1; i < interpolated_.size(); ++i)
                others_.push_back({interpolated_[i].token, interpolated_[i].probability / interpolated_[0].probability});
            return;
        }
        double most = 0.0;
        SuffixTree& tree = source == kOwnText ? own_ : shared_->tree();
        const SuffixTree::Match match = known(tree, source == kOwnText ? place.own : place.shared);
        if (source == kSharedTexts && find_in_corpus(place, match.length) != 0) {
            shared_->corpus->followers(followers_);
            most = followers_[0].count;
            if (followers_.size() > kContinuations) followers_.resize(kContinuations);
        } else {
            most = tree.best(match.node).count;
            tree.frequent(match.node, kLatest, kContinuations, followers_);
        }
        for (const SuffixTree::Follower& other : followers_)
            if (other.token != guess.token) others_.push_back({other.token, other.count / most});
    }

    static SuffixTree::Match known(SuffixTree& tree, SuffixTree::Match match) {
        while (match.length > 0 && !tree.has_followers(match.node)) match = tree.shorter(match);
        return match;
    }

    void learn(int32_t token) {
        for (const LookupGuess& guess : guesses_) {
            if (guess.cell < 0) continue;
            tried_[guess.cell] += 1;
            rates_[guess.cell] += ((guess.token == token ? 1.0 : 0.0) - rates_[guess.cell]) / tried_[guess.cell];
        }
    }

    const LookupRules* rules_;
    SharedTexts* shared_;
    const StoreTable* store_;
    SuffixTree own_;
    std::vector<uint32_t> endings_{SuffixTree::kRoot};
    std::vector<int32_t> prompt_, prediction_, tokens_, unindexed_;
    size_t generated_ = 0;  // where the answer begins
    LookupPlace place_;
    uint64_t shared_version_ = 0;
    LookupGuess guesses_[kSources];
    std::vector<Ahead> ahead_;
    uint64_t ahead_version_ = 0;
    std::vector<double> rates_, tried_;
    std::vector<StoreTable::Continuation> found_;
    std::vector<SuffixTree::Follower> followers_;
    std::vector<LikelyToken> likely_, others_, interpolated_;
    Candidates candidates_;
};

}  // namespace wager
