// Guesses from what followed the last tokens elsewhere: in the text itself, in texts that ended, in a store, in learned texts.
// draft/lookup.py says what it does; tests/oracle/lookup.py has the same in Python. Knows no Python.
#pragma once

#include <algorithm>
#include <cstdint>
#include <queue>
#include <vector>

#include "coupling.h"
#include "shared_texts.h"
#include "suffix_tree.h"

namespace wager {

// ---- a static store of continuations, as draft/store_file.py lays it out in a file

// Slots of 64 bits: 36 bits of the context's hash, 20 of the token, 8 of its probability in 255ths; 0 is a free slot. The
// continuations of a context follow each other from its home on, the likeliest first.
class StoreTable {
  public:
    static constexpr int kLongest = 5;  // tokens of a context

    struct Continuation {
        int32_t token;
        int probability;  // in 255ths
    };

    // `slots` must stay valid, and the last one must be free.
    StoreTable(const uint64_t* slots, uint64_t homes) : slots_(slots), homes_(homes) {}

    // The continuations of the longest known context of the `size` tokens before `end`, at most `most`; their number of tokens, 0 if none is known.
    int find(const int32_t* end, size_t size, size_t most, std::vector<Continuation>& out) const {
        out.clear();
        uint64_t hashes[kLongest + 1] = {0};
        const int longest = hash(end, size, hashes);
        for (int m = longest; m > 0; --m) {
            of_context(hashes[m], most, [&](int32_t token, int probability) { out.push_back({token, probability}); });
            if (!out.empty()) return m;
        }
        return 0;
    }

    // Calls `use` with the token and the probability of the continuations of every known context of these, at most `most` of each.
    template <class Use> void each(const int32_t* end, size_t size, size_t most, Use use) const {
        uint64_t hashes[kLongest + 1] = {0};
        const int longest = hash(end, size, hashes);
        for (int m = longest; m > 0; --m) of_context(hashes[m], most, use);
    }

  private:
    // Of contexts of 1, 2, ... tokens; returns the number of tokens of the longest.
    int hash(const int32_t* end, size_t size, uint64_t* hashes) const {
        const int longest = size < kLongest ? static_cast<int>(size) : kLongest;
        for (int m = 1; m <= longest; ++m) {
            hashes[m] = mix(hashes[m - 1] + static_cast<uint32_t>(end[-m]) + 1);
            __builtin_prefetch(slots_ + home(hashes[m]));
        }
        return longest;
    }

    template <class Use> void of_context(uint64_t hash, size_t most, Use use) const {
        const uint64_t check = hash << 28;
        for (const uint64_t* slot = slots_ + home(hash); *slot != 0 && most > 0; ++slot) {
            if ((*slot ^ check) >> 28 != 0) continue;
            use(static_cast<int32_t>(*slot >> 8 & 0xFFFFF), static_cast<int>(*slot & 0xFF));
            --most;
        }
    }

    static uint64_t mix(uint64_t value) {  // splitmix64
        value += 0x9E3779B97F4A7C15u;
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9u;
        value = (value ^ value >> 27) * 0x94D049BB133111EBu;
        return value ^ value >> 31;
    }

    uint64_t home(uint64_t hash) const { return (hash >> 32) * homes_ >> 32; }

    const uint64_t* slots_;
    uint64_t homes_;
};

// ---- the guesses of all sources

enum LookupSource { kOwnText, kSharedTexts, kStore, kLearned, kSources };

// Continuations of a source in a tree of guesses, and followers of a run, the latest ones, among which they are chosen.
constexpr int kContinuations = 4, kLatest = SharedTexts::kLatest;
constexpr int kShortest = 2;  // run in a corpus: one of one token says little, and many places are behind it
constexpr double kOtherWeights[kSources] = {2.2, 0.9, 2.2, 0.9};  // draft/lookup.py: OTHER_WEIGHTS

// Cells: of the text's own tree by the length of the match and its kind; of earlier texts and of the store by the
// probability; of runs in earlier texts that are longer than kInterpolated tokens as of the tree. Then of learned texts as of
// earlier ones, and kAgreeing further on those of the same guesses where another source makes them too.
constexpr int kInterpolated = Interpolation::kLongest;
constexpr int kMatchCells = 8, kTreeCells = 4 * kMatchCells, kProbabilityCells = 16, kLongCells = 4 * (kMatchCells - kInterpolated);
constexpr int kSharedCell = kTreeCells, kStoreCell = kSharedCell + kProbabilityCells, kLongCell = kStoreCell + kProbabilityCells,
              kLearnedCell = kLongCell + kLongCells, kLearnedLongCell = kLearnedCell + kProbabilityCells,
              kAgreeing = kProbabilityCells + kLongCells, kCells = kLearnedCell + 2 * kAgreeing;

// What a source guesses next; its rate is that of its cell.
struct LookupGuess {
    int32_t token = -1;
    int cell = -1;  // -1: the source has no guess
};

// What the sources guess at a place. `shared` and `learned`: what followed, the likeliest first, where the guess is by that.
struct Predicted {
    LookupGuess guesses[kSources];
    std::vector<LikelyToken> shared, learned;

    void clear() {
        std::fill(guesses, guesses + kSources, LookupGuess());
        shared.clear(), learned.clear();
    }
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
          prediction_(std::move(prediction)), gain_(shared.gain.value(), rules.learned.gain_weight), candidates_(rules.coupling) {
        for (const LookupMean& wrong : shared.wrong)
            wrong_.emplace_back(wrong.value(), wrong_.size() < kLearnedCell ? rules.prior_weight : rules.learned.prior_weight);
    }

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
            looks_ = looks();
            find_place();
        } else if (shared_version_ != shared_->version()) {
            find_place();
        }
        size_t known = ahead_version_ == shared_->version() ? ahead_.size() : 0;
        for (size_t i = 0; i < unindexed_.size(); ++i) {
            const int32_t token = unindexed_[i];
            learn(token);
            append(token);
            move(place_, token);
            place_.own = {endings_.back(), static_cast<int>(endings_.size()) - 1};
            if (i < known && ahead_[i].token != token) known = i;
            looks_ = looks();
            predict(place_, known_, looks_, i < known ? &ahead_[i] : nullptr);
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
        if (after.empty()) here_ = known_;
        ahead_.clear(), ahead_version_ = shared_->version();
        double reached = 1.0;
        while (static_cast<int>(tokens.size()) < depth) {
            if (!(after.empty() && tokens.empty())) {
                predict_at(place, noise);
                if (after.empty() && is_useful()) ahead_.push_back({tokens.back(), here_.guesses[kLearned], here_.learned});
            }
            if (greedy(noise))
                named(here_.guesses, likely_);
            else
                coupled(place, noise, tokens.size());
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
            if (parent < 0 && after.empty())
                here_ = known_;
            else
                predict_at(place, noise);
            if (greedy(noise))
                continuations(place, likely_);
            else
                coupled(place, noise, depth);
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
    // A guess of the chain that was drafted last, and what learned texts say is next.
    struct Ahead {
        int32_t token;
        LookupGuess guess;
        std::vector<LikelyToken> learned;
    };

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
        predict(place_, known_, looks_);
    }

    // Learned texts are looked up where they are useful, and at some places to see whether they are.
    bool is_useful() const { return has_learned_texts() && gain_.value() >= rules_->learned.least_gain; }
    bool looks() const { return is_useful() || (has_learned_texts() && tokens_.size() % rules_->learned.rest == 0); }
    bool has_learned_texts() const { return rules_->shared_tokens != 0 && shared_->corpus != nullptr && !shared_->corpus->empty(); }

    // `ahead` is what learned texts say, if that is known; else they are looked up if it `looks`.
    void predict(const LookupPlace& place, Predicted& out, bool looks, const Ahead* ahead = nullptr) {
        out.clear();
        if (rules_->longest != 0) out.guesses[kOwnText] = of_tree(own_, place.own, 0);
        if (rules_->shared_tokens != 0) out.guesses[kSharedTexts] = of_shared_texts(place, out.shared);
        if (store_ != nullptr && store_->find(place.last + place.known, place.known, 1, found_) != 0)
            out.guesses[kStore] = {found_[0].token, kStoreCell + found_[0].probability * kProbabilityCells / 256};
        if (!looks) return;
        if (ahead != nullptr)
            out.guesses[kLearned] = ahead->guess, out.learned = ahead->learned;
        else
            out.guesses[kLearned] = of_learned_texts(place, out.learned);
    }

    // At a place of a draft. Where tokens are sampled, the guesses of the other sources are not used.
    void predict_at(const LookupPlace& place, const RequestNoise& noise) {
        if (greedy(noise)) return predict(place, here_, is_useful());
        here_.clear();
        if (is_useful()) here_.guesses[kLearned] = of_learned_texts(place, here_.learned);
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

    // A long run is said to go on as it did; else what followed counts by its probability.
    LookupGuess of_shared_texts(const LookupPlace& place, std::vector<LikelyToken>& likely) {
        const SuffixTree::Match match = known(shared_->tree(), place.shared);
        if (match.length > kInterpolated) return of_tree(shared_->tree(), match, kLongCell - 4 * kInterpolated);
        shared_->interpolate(place.shared, kContinuations, likely);
        return by_probability(likely, kSharedCell);
    }

    LookupGuess of_learned_texts(const LookupPlace& place, std::vector<LikelyToken>& likely) {
        Corpus& corpus = *shared_->corpus;
        const int length = corpus.look_up(place.last + place.known, place.known);
        if (length < kShortest) return {};
        if (length <= kInterpolated) {
            shared_->interpolation.find([&](int size, auto count) { corpus.each_follower(size, count); }, kContinuations, likely);
            return by_probability(likely, kLearnedCell);
        }
        const uint32_t all = corpus.followers(followers_);
        const size_t most = std::min<size_t>(followers_.size(), kContinuations);
        for (size_t i = 0; i < most; ++i) likely.push_back({followers_[i].token, double(followers_[i].count) / all});
        return of_match(followers_[0], all, length, kLearnedLongCell - 4 * kInterpolated);
    }

    static LookupGuess by_probability(const std::vector<LikelyToken>& likely, int first_cell) {
        if (likely.empty()) return {};
        const int sixteenths = static_cast<int>(likely[0].probability * kProbabilityCells);
        return {likely[0].token, first_cell + std::min(sixteenths, kProbabilityCells - 1)};
    }

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

    // The tokens that the sources name, in their order; they compete by their odds.
    void named(const LookupGuess (&guesses)[kSources], std::vector<LikelyToken>& out) const {
        out.clear();
        double all = 1.0;
        for (const LookupGuess& guess : guesses) {
            if (guess.cell < 0 || has(out, guess.token)) continue;
            out.push_back({guess.token, 1.0 / wrong(guesses, guess.token, kSources) - 1.0});
            all += out.back().probability;
        }
        for (LikelyToken& token : out) token.probability /= all;
    }

    // The probability that a token is wrong which some of the first `sources` name. They are so as if independently, but
    // for learned texts: these say what others do in all texts of a language, so how much surer that makes a guess is learned.
    double wrong(const LookupGuess (&guesses)[kSources], int32_t token, int sources) const {
        double all = 1.0;
        for (int source = 0; source < sources; ++source) {
            const LookupGuess& guess = guesses[source];
            if (guess.cell < 0 || guess.token != token) continue;
            all *= source == kLearned && all < 1.0 ? wrong_[guess.cell + kAgreeing].value()
                                                   : std::max(wrong_[guess.cell].value(), 1.0 - rules_->most_certain);
        }
        return std::min(all, 1.0);
    }

    // Where tokens are sampled: every source gives masses to what it has seen after each ending of the text, `ahead` guesses
    // after the first.
    void coupled(const LookupPlace& place, const RequestNoise& noise, size_t ahead) {
        candidates_.clear();
        if (rules_->longest != 0) add_followers(own_, place.own, rules_->weights[kOwnText]);
        if (rules_->shared_tokens != 0) add_followers(shared_->tree(), place.shared, rules_->weights[kSharedTexts]);
        if (const LookupGuess& guess = here_.guesses[kLearned]; guess.cell >= 0) {
            const double mass = rules_->weights[kLearned] * (1.0 - wrong_[guess.cell].value()) / here_.learned[0].probability;
            for (const LikelyToken& each : here_.learned) candidates_.add(each.token, mass * each.probability);
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
            for (const SuffixTree::Follower& each : followers_) candidates_.add(each.token, weight * each.count / followers_.size());
        }
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
    void continuations(const LookupPlace& place, std::vector<LikelyToken>& out) {
        named(here_.guesses, out);
        const size_t count = out.size();
        for (int source = 0; source < kSources; ++source) {
            const LookupGuess& guess = here_.guesses[source];
            if (guess.cell < 0) continue;
            double named = 0.0;
            for (size_t i = 0; i < count; ++i)
                if (out[i].token == guess.token) named = out[i].probability;
            find_others(place, source, guess);
            double all = 1.0;
            for (const LikelyToken& other : others_) all += other.probability;
            const double most = kOtherWeights[source] * named * (1.0 - named) / all;
            for (const LikelyToken& other : others_)
                if (!has(out, other.token)) out.push_back({other.token, std::min(named, most) * other.probability});
        }
    }

    // The other continuations of a source than its guess at this place, and how frequent each is beside it.
    void find_others(const LookupPlace& place, int source, const LookupGuess& guess) {
        others_.clear();
        if (source == kStore) {
            store_->find(place.last + place.known, place.known, kContinuations, found_);
            for (const StoreTable::Continuation& other : found_)
                if (other.token != guess.token) others_.push_back({other.token, double(other.probability) / found_[0].probability});
            return;
        }
        if (source == kLearned || (source == kSharedTexts && guess.cell < kLongCell)) {
            const std::vector<LikelyToken>& likely = source == kLearned ? here_.learned : here_.shared;
            for (size_t i = 1; i < likely.size(); ++i) others_.push_back({likely[i].token, likely[i].probability / likely[0].probability});
            return;
        }
        SuffixTree& tree = source == kOwnText ? own_ : shared_->tree();
        const SuffixTree::Match match = known(tree, source == kOwnText ? place.own : place.shared);
        const double most = tree.best(match.node).count;
        tree.frequent(match.node, kLatest, kContinuations, followers_);
        for (const SuffixTree::Follower& other : followers_)
            if (other.token != guess.token) others_.push_back({other.token, other.count / most});
    }

    static SuffixTree::Match known(SuffixTree& tree, SuffixTree::Match match) {
        while (match.length > 0 && !tree.has_followers(match.node)) match = tree.shorter(match);
        return match;
    }

    void learn(int32_t token) {
        if (looks_) learn_of_learned_texts(token);
        for (int source = 0; source < kLearned; ++source) {
            const LookupGuess& guess = known_.guesses[source];
            if (guess.cell >= 0) wrong_[guess.cell].observe(guess.token != token, 1.0, kAll);
        }
    }

    // For the tenant's later sequences, too. Guesses that others make as well are compared with what these say.
    void learn_of_learned_texts(int32_t token) {
        const LearnedRules& rules = rules_->learned;
        const LookupGuess& guess = known_.guesses[kLearned];
        double gain = 0.0;
        if (guess.cell >= 0) {
            gain = worth(known_.guesses, token);
            LookupGuess others[kSources];
            std::copy(known_.guesses, known_.guesses + kLearned, others);
            gain -= worth(others, token);
            const double said = wrong(known_.guesses, guess.token, kLearned), is_wrong = guess.token != token;
            const auto observe = [&](int cell, double amount) {
                wrong_[cell].observe(is_wrong, amount, kAll);
                shared_->wrong[cell].observe(is_wrong, amount, rules.remembered);
            };
            observe(guess.cell, 1.0);
            if (said < 1.0) observe(guess.cell + kAgreeing, said);
        }
        gain_.observe(gain, 1.0, 2.0 * rules.gain_weight);
        shared_->gain.observe(gain, 1.0, rules.remembered);
    }

    // What the likeliest guess was worth, in tokens: it is verified where its probability exceeds the price of a row, of which all from
    // 0 to 1 are as frequent.
    double worth(const LookupGuess (&guesses)[kSources], int32_t token) {
        named(guesses, likely_);
        const LikelyToken best = likeliest();
        return best.token < 0 ? 0.0 : best.probability * ((best.token == token ? 1.0 : 0.0) - best.probability / 2.0);
    }

    static constexpr double kAll = 1e300;  // observations

    const LookupRules* rules_;
    SharedTexts* shared_;
    const StoreTable* store_;
    SuffixTree own_;
    std::vector<uint32_t> endings_{SuffixTree::kRoot};
    std::vector<int32_t> prompt_, prediction_, tokens_, unindexed_;
    size_t generated_ = 0;  // where the answer begins
    LookupPlace place_;
    uint64_t shared_version_ = 0;
    Predicted known_, here_;  // at the end of the text, and where a draft is
    bool looks_ = false;      // learned texts were looked up at the end of the text
    std::vector<Ahead> ahead_;
    uint64_t ahead_version_ = 0;
    std::vector<LookupMean> wrong_;  // how often guesses are wrong, by cell
    LookupMean gain_;
    std::vector<StoreTable::Continuation> found_;
    std::vector<SuffixTree::Follower> followers_;
    std::vector<LikelyToken> likely_, others_;
    Candidates candidates_;
};

}  // namespace wager
