// How many rows of a step prompts may take, by the seconds that they added to the last steps. Knows no Python.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

namespace wager {

// What a step did, and what it took.
struct TakenStep {
    int64_t rows = 0, sequences = 0, drafted = 0;
    double seconds = 0.0;
};

// Bounds the rows of prompts in a step by the seconds that they add: at most 0.02 s where others decode, or what the step takes
// without them if that is more. `most`: a fixed bound instead.
class PromptRows {
  public:
    explicit PromptRows(std::optional<int64_t> most) : most_(most) {}

    // Rows of prompts in a step in which so many sequences decode, none: any number. `streamed`: whether someone waits for tokens of
    // a sequence that runs or waits.
    std::optional<int64_t> limit(int64_t decoding, bool streamed) const {
        if (most_) return decoding > 0 ? most_ : std::nullopt;
        if (!streamed) return std::nullopt;
        if (row_s_ == 0.0) return decoding > 0 ? std::optional(kFirstRows) : std::nullopt;
        return rows_in(std::max(decoding > 0 ? kLongestWaitS : kLongestPromptStepS, decode_s_));
    }

    // Rows that add 0.02 s to a step, however long it takes; none: any number.
    std::optional<int64_t> beside_others(bool streamed) const {
        if (most_ || !streamed) return most_;
        return row_s_ != 0.0 ? rows_in(kLongestWaitS) : kFirstRows;
    }

    void observe(const TakenStep& step) {
        if (step.rows == step.sequences + step.drafted) {
            decode_s_ = mean(decode_s_, step.seconds, step.seconds < decode_s_ ? kNew : kNewSlower);
            return;
        }
        const int64_t prompts = step.rows - step.drafted - step.sequences;  // but for the last row of each, which may decode
        if (prompts > 0) row_s_ = mean(row_s_, std::max(0.0, step.seconds - decode_s_) / static_cast<double>(prompts), kNew);
    }

  private:
    // Rows of prompts in a step in which others decode: before it is known what one takes, and however long one takes. With fewer,
    // what a row takes could not be told from what a step takes anyway.
    static constexpr int64_t kFirstRows = 64, kLeastRows = 24;
    // Seconds that prompts may add to a step in which others decode, and that a step of prompts alone may take, for which whoever
    // arrives meanwhile waits. A step of twice the rows computes a row little faster: even 0.02 s are eight times what reading the
    // weights takes.
    static constexpr double kLongestWaitS = 0.02, kLongestPromptStepS = 0.06;
    // Weight of a new step in what a row of a prompt takes: it follows quickly, since rows of a long context take longer. But a step
    // in which the machine stood still counts as this many times the usual at most.
    static constexpr double kNew = 0.5, kMostGrowth = 4.0;
    // Weight of a slower step in what a step without prompts takes. There are few such steps while prompts wait, so that one in
    // which the machine stood still would count for long, and allow more rows.
    static constexpr double kNewSlower = 0.05;
    // Seconds of a row of a prompt where steps with prompts took no longer than those without.
    static constexpr double kLeastRowS = 1e-9;

    static double mean(double known, double seconds, double weight) {
        return known != 0.0 ? known + (std::min(seconds, kMostGrowth * known) - known) * weight : seconds;
    }
    int64_t rows_in(double seconds) const {
        return std::max(kLeastRows, static_cast<int64_t>(seconds / std::max(row_s_, kLeastRowS)));
    }

    std::optional<int64_t> most_;
    double decode_s_ = 0.0;  // of a step without prompts
    double row_s_ = 0.0;     // 0: not known
};

// Rows that prompts leave to the guesses of `decoding` sequences: twice what these lately took (`recent`), so that they can grow, and
// half of all rows at most. `drafts` is the most guesses of a sequence.
inline int64_t rows_kept_for_guesses(int64_t max_rows, int64_t decoding, int64_t drafts, int64_t recent) {
    constexpr int64_t kLeastShare = 16;  // while prompts are computed, at least one of this many rows is left to guesses
    const int64_t least = std::max(decoding, max_rows / kLeastShare);
    return std::min({drafts * decoding, std::max(least, 2 * recent), max_rows / 2});
}

}  // namespace wager
