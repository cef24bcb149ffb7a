// How likely draft tokens are to be accepted, learned online; economics/acceptance.py says what is estimated, and why.
// tests/oracle/acceptance.py has the same in Python. Knows no Python.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <vector>

#include "judging.h"

namespace wager {

struct LearningRules {
    double aged, prior_trials, chained_prior_trials, spread, prior_sequences, ended, drift, trial_weight;
    size_t samples;  // drafts remembered for how much confidence moved their survival
};

// Log-odds by cell, and their exponentials; a trial has those of its cell plus an offset.
class LogOddsTable {
  public:
    LogOddsTable(std::vector<double> prior, bool chained)
        : log_odds(prior), trials(prior.size()), prior_(std::move(prior)), accepted_(trials), offsets_(trials), chained_(chained) {
        take_odds();
    }

    // Counts a trial, of which `odds` is exp(offset); the acceptance rate expected of it.
    double add(size_t cell, double accepted, double offset, double odds_of_offset, double weight = 1.0) {
        trials[cell] += weight;
        accepted_[cell] += weight * accepted;
        offsets_[cell] += weight * offset;
        ++new_trials_;
        const double expected = odds[cell] * odds_of_offset;
        return expected / (1.0 + expected);
    }

    // Whether they may be the estimates of such a table, none beyond `most`.
    bool fits(const std::vector<double>& estimates, double most) const {
        const auto is_sound = [most](double each) { return std::abs(each) <= most; };
        return estimates.size() == prior_.size() && std::all_of(estimates.begin(), estimates.end(), is_sound);
    }

    // Estimates of an earlier process become the prior.
    void start_from(std::vector<double> estimates) {
        prior_ = log_odds = std::move(estimates);
        take_odds();
    }

    void age(double kept) {
        prior_ = log_odds;
        for (std::vector<double>* counts : {&trials, &accepted_, &offsets_})
            for (double& count : *counts) count = kept * count;
    }

    // Estimates the cells anew, if more than a sixteenth of the trials are new.
    void refresh(const LearningRules& rules, double highest) {
        if (16 * static_cast<double>(new_trials_) <= known_trials_) return;
        known_trials_ = 0.0, new_trials_ = 0;
        for (const double each : trials) known_trials_ += each;
        double moved = 0.0;  // of the cell above, from its prior
        for (size_t cell = 0; cell < prior_.size(); ++cell) {
            const double prior_trials = chained_ && cell ? rules.chained_prior_trials : rules.prior_trials;
            double found = prior_[cell] + moved;
            if (trials[cell] != 0.0) {
                const double offset = offsets_[cell] / trials[cell];  // the prior trials are taken to have the same
                const double accepted = accepted_[cell] + prior_trials / (1.0 + std::exp(-found - offset));
                found = log_odds_of(accepted / (trials[cell] + prior_trials), highest) - offset;
            }
            log_odds[cell] = found, odds[cell] = std::exp(found);
            moved = chained_ ? found - prior_[cell] : 0.0;
        }
    }

    static double log_odds_of(double probability, double highest) {
        const double bounded = std::min(highest, std::max(1.0 - highest, probability));
        return std::log(bounded / (1.0 - bounded));
    }

    std::vector<double> log_odds, odds, trials;

  private:
    void take_odds() {
        odds.clear();
        for (const double each : log_odds) odds.push_back(std::exp(each));
    }

    std::vector<double> prior_, accepted_, offsets_;
    bool chained_;
    long new_trials_ = 0;
    double known_trials_ = 0.0;
};

// How much easier one sequence is for a drafter than others: mean and variance of its offset in log-odds.
struct SequenceAcceptance {
    double mean, variance, odds;

    SequenceAcceptance(double mean, double variance) : mean(mean), variance(variance), odds(std::exp(mean)) {}

    void set(double new_mean, double new_variance, double most) {
        mean = std::min(most, std::max(-most, new_mean)), variance = new_variance, odds = std::exp(mean);
    }
};

// A draft beside the tokens that were emitted: the nodes that these can be compared with, and those of them that agree, from the
// root down.
struct ComparedDraft {
    std::vector<size_t> tested, right;

    ComparedDraft(const JudgedDraft& draft, const std::vector<long>& emitted) {
        std::vector<const long*> next(draft.tokens.size() + 1);  // the token after the root, and after each node
        if (!emitted.empty()) next[0] = &emitted[0];
        long last = -1;
        for (size_t node = 0; node < draft.tokens.size(); ++node) {
            const long* const expected = next[draft.parents[node] + 1];
            if (expected == nullptr) continue;
            tested.push_back(node);
            if (draft.tokens[node] != *expected || draft.parents[node] != last) continue;
            last = static_cast<long>(node);
            right.push_back(node);
            if (right.size() < emitted.size()) next[node + 1] = &emitted[right.size()];
        }
    }
};

class AcceptanceModel {
  public:
    AcceptanceModel(const LearningRules& rules, ConfidenceRules confidence, std::vector<double> prior)
        : depths(std::move(prior), true),
          bins(std::vector<double>(confidence.borders.size() + 1), false),
          confidence(std::move(confidence)),
          rules_(rules),
          most_(std::log(this->confidence.highest / (1.0 - this->confidence.highest))),
          spread_(rules.spread),
          shifts_(rules.samples * depths.odds.size(), 1.0) {}

    SequenceAcceptance start_sequence() const { return {mean_, spread_}; }

    void end_sequence(const SequenceAcceptance& sequence) {
        const double kept = rules_.ended;
        ended_ = {kept * ended_[0] + 1.0, kept * ended_[1] + sequence.mean,
                  kept * ended_[2] + sequence.mean * sequence.mean + sequence.variance};
    }

    // See economics/acceptance.py: a step of expectation-maximisation.
    void compare_sequences(const std::vector<SequenceAcceptance*>& sequences) {
        double total = 0.0, squares = 0.0;
        for (const SequenceAcceptance* each : sequences) total += each->mean, squares += each->mean * each->mean + each->variance;
        const double number = ended_[0] + (static_cast<double>(sequences.size()) + rules_.prior_sequences);
        const double centre = (ended_[1] + total) / number;
        const double spread = (ended_[2] + (squares + rules_.prior_sequences * rules_.spread)) / number - centre * centre;
        for (SequenceAcceptance* each : sequences) {
            const double variance = 1.0 / (1.0 / spread + std::max(1.0 / each->variance - 1.0 / spread_, 0.0));
            const double evidence = each->mean / each->variance - mean_ / spread_;
            each->set(variance * (centre / spread + evidence), variance, most_);
        }
        mean_ = centre, spread_ = spread;
    }

    std::vector<double> survival(const JudgedDraft& draft, const SequenceAcceptance& sequence) {
        std::vector<double> found;
        has_scores = draft.scores.size() == draft.parents.size();
        add_survival(confidence, draft, bins.odds, depths.odds, sequence.odds, 1.0, found);
        return found;
    }

    // A draft to at most `depth`, of which the tokens that were emitted tell; `accepted`: how many of its nodes were, where that
    // is not what the tokens say, which then tell nothing else. `stops_early`: the drafter may have stopped before. With a
    // `forecast` of survival by depth, of `size`, it is learned how scores moved it. Returns whether all that was emitted was
    // drafted, and more after it.
    bool learn_draft(SequenceAcceptance& sequence, const JudgedDraft& draft, const std::vector<long>& emitted, const long* accepted,
                     long depth, bool stops_early, const double* forecast, size_t size) {
        const ComparedDraft compared(draft, emitted);
        const long right = accepted ? *accepted : static_cast<long>(compared.right.size()), given = emitted.size();
        const bool scored = !draft.scores.empty() && !accepted;
        bool chain = true;
        long deepest = 0;
        std::vector<long> levels;
        for (const long parent : draft.parents) {
            chain &= parent == static_cast<long>(levels.size()) - 1;
            levels.push_back(parent < 0 ? 1 : levels[parent] + 1);
            deepest = std::max(deepest, levels.back());
        }
        // the drafter could have drafted deeper and did not: a token that is not accepted
        const bool declined = right == deepest && deepest < depth && !stops_early && given > right;
        if (scored && !chain)
            learn_tree(sequence, survival(draft, sequence));
        else
            learn_round(sequence, right, std::min({right + 1, deepest + declined, given}));
        if (scored) learn_scores(draft, compared);
        if (forecast && !accepted && has_scores) {
            std::vector<double> reached = survival(draft, sequence);
            std::sort(reached.begin(), reached.end(), std::greater<>());  // as learn_tree does
            reached.resize(std::max<size_t>(reached.size(), stops_early ? 1 : depth));
            learn_shift(forecast, size, reached);
        }
        return right == given && right < deepest && chain && !accepted;
    }

    // Depths 1 to `tested` were tested and the first `accepted` accepted; `known` were learned before.
    void learn_round(SequenceAcceptance& sequence, long accepted, long tested, long known = 0) {
        double surprise = static_cast<double>(accepted - known), information = 0.0;
        const double offset = sequence.mean, odds = sequence.odds;
        for (long depth = known; depth < tested; ++depth) {
            const double rate = depths.add(std::min<size_t>(depth, last_depth()), depth < accepted, offset, odds);
            surprise -= rate;
            information += rate * (1.0 - rate);
        }
        update(sequence, surprise, information);
        depths.refresh(rules_, confidence.highest);
    }

    // A draft that is no chain: its n-th likeliest node takes the place of a chain's token at depth n.
    void learn_tree(SequenceAcceptance& sequence, std::vector<double> survival) {
        std::sort(survival.begin(), survival.end(), std::greater<>());
        double above = 1.0, surprise = 0.0, information = 0.0;
        for (size_t index = 0; index < survival.size() && above > 0; ++index) {
            const double rate = survival[index] / above;
            const double expected =
                depths.add(std::min(index, last_depth()), rate, sequence.mean, sequence.odds, above);
            surprise += above * (rate - expected);
            information += above * expected * (1.0 - expected);
            above = survival[index];
        }
        update(sequence, surprise, information);
        depths.refresh(rules_, confidence.highest);
    }

    // None was drafted where up to `depth` tokens might have been: the first one is not accepted.
    void learn_missing(SequenceAcceptance& sequence, long depth, bool stops_early, const double* forecast, size_t size) {
        learn_round(sequence, 0, 1);
        if (forecast && has_scores) learn_shift(forecast, size, std::vector<double>(stops_early ? 1 : depth));
    }

    // Nodes of a draft with scores.
    void learn_scores(const JudgedDraft& draft, const ComparedDraft& compared) {
        size_t right = 0;  // both lists ascend
        for (const size_t node : compared.tested) {
            const double said = conditional_confidence(confidence, draft, node);
            const bool is_right = right < compared.right.size() && compared.right[right] == node;
            right += is_right;
            bins.add(bin_of(confidence, said), is_right, LogOddsTable::log_odds_of(said, confidence.highest), said / (1.0 - said));
        }
        bins.refresh(rules_, confidence.highest);
    }

    // How the survival of a draft's tokens (0 for one that was not drafted) differs from its forecast, by depth; depths that were
    // not requested repeat the last one.
    void learn_shift(const double* forecast, size_t size, const std::vector<double>& survival) {
        const double most = confidence.highest / (1.0 - confidence.highest);
        const size_t count = depths.odds.size(), known = std::min({size, survival.size(), count});
        if (!known) return;
        double* const row = shifts_.data() + num_shifts_ % rules_.samples * count;
        for (size_t depth = 0; depth < count; ++depth) {
            const size_t at = std::min(depth, known - 1);
            const double odds = std::max(1e-6, survival[at]) / std::max(1e-6, 1.0 - survival[at]);
            const double before = std::max(1e-6, forecast[at]) / std::max(1e-6, 1.0 - forecast[at]);
            row[depth] = std::min(most, std::max(1.0 / most, odds / before));
        }
        ++num_shifts_;
    }

    // Estimates are of a bounded rate, less a bounded offset; a depth that was never reached moves from its prior as the one above.
    void start_from(std::vector<double> by_depth, std::vector<double> by_bin) {
        if (!depths.fits(by_depth, 4 * most_) || !bins.fits(by_bin, 2 * most_))
            throw std::invalid_argument("other cells, or no log-odds");
        depths.start_from(std::move(by_depth));
        bins.start_from(std::move(by_bin));
    }

    void age() {
        depths.age(rules_.aged);
        bins.age(rules_.aged);
    }

    // Samples of how scores moved the odds of survival, [samples, depth], row by row.
    std::vector<double> shifts() const {
        const size_t samples = std::min(std::max<size_t>(4, num_shifts_), rules_.samples);
        return {shifts_.begin(), shifts_.begin() + static_cast<long>(samples * depths.odds.size())};
    }

    LogOddsTable depths, bins;
    ConfidenceRules confidence;
    bool has_scores = false;  // whether its last draft carried confidence

  private:
    size_t last_depth() const { return depths.odds.size() - 1; }

    // A round: the sums over its trials of (accepted - expected) and of the variance of what was expected.
    void update(SequenceAcceptance& sequence, double surprise, double information) const {
        const double predicted = std::min(spread_, sequence.variance + rules_.drift * spread_);
        const double variance = predicted / (1.0 + predicted * rules_.trial_weight * information);
        sequence.set(sequence.mean + variance * rules_.trial_weight * surprise, variance, most_);
    }

    LearningRules rules_;
    double most_, mean_ = 0.0, spread_;      // of log-odds; of the offsets of sequences
    std::array<double, 3> ended_{};          // of sequences that ended: number, sum of offsets, and of their squares
    std::vector<double> shifts_;             // [samples, depth]
    size_t num_shifts_ = 0;
};

}  // namespace wager
