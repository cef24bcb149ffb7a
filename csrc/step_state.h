// What the steps of an engine change: each sequence's tokens, how many of them are computed, its blocks and its counts, and
// which sequences run and wait. Knows no Python; engine/scheduler.py says what the verbs mean.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "block_pool.h"
#include "row_sampler.h"

namespace wager {

// ---- how many rows of a step prompts may take, by the seconds that they added to the last steps

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
// half of those that remain at most. `drafts` is the most guesses of a sequence.
inline int64_t rows_kept_for_guesses(int64_t max_rows, int64_t decoding, int64_t drafts, int64_t recent) {
    constexpr int64_t kLeastShare = 16;  // while prompts are computed, at least one of this many rows is left to guesses
    const int64_t least = std::max(decoding, max_rows / kLeastShare);
    return std::min({drafts * decoding, std::max(least, 2 * recent), (max_rows - decoding) / 2});
}

// ---- the state

enum class Finish { none, stop, length };

// How a sequence's tokens follow from logits: the greedy ones, sampled by temperature and filters alone, or as Python finds.
enum class Choosing { greedy, sampled, other };

// One sequence, that is, one choice of one request. Times are readings of the engine's clock, negative while unset.
struct SequenceState {
    std::string id, request_id, tenant;
    int32_t choice = 0;
    std::vector<int32_t> tokens;
    int64_t prompt_tokens = 0, max_length = 0;
    std::vector<int32_t> stop_ids;
    Choosing choosing = Choosing::other;
    uint64_t seed = 0;
    double temperature = 0.0;
    Filters filters;
    bool streamed = false;  // whether someone waits for its tokens

    int64_t computed = 0;  // leading tokens whose keys and values are in the cache
    std::shared_ptr<BlockTable> table;
    bool running = false;
    double admitted_at = -1.0, first_token_at = -1.0, last_token_at = -1.0;
    int64_t cached_tokens = 0, rounds = 0, drafted = 0, accepted = 0, preemptions = 0;
    int64_t overtaken = 0;  // by sequences that came later, while it was the first that waits

    int64_t length() const { return static_cast<int64_t>(tokens.size()); }
    int64_t pending() const { return length() - computed; }  // at least one while it runs
    bool decodes() const { return pending() == 1; }
};
using SequencePtr = std::shared_ptr<SequenceState>;

// The rows of a sequence in a step: tokens [start, end) and room for `drafts` guesses.
struct ScheduledRows {
    SequencePtr sequence;
    int64_t start, end, drafts;
};

// What a pass means for a sequence: `rows` of its tokens were computed; `tokens` follow, the first of them the accepted nodes
// of its draft. Without tokens it was a chunk of a prompt.
struct PassResult {
    SequencePtr sequence;
    int64_t rows = 0, drafted = 0;
    std::vector<int32_t> tokens, accepted;
};

// How many of the tokens that followed, and of the accepted nodes, are kept; and why the sequence ends, if it does.
struct Kept {
    int64_t tokens = 0, accepted = 0;
    Finish finish = Finish::none;
};

class StepState {
  public:
    // `max_drafts` bounds the guesses of one sequence.
    StepState(std::shared_ptr<BlockPool> pool, int64_t max_rows, int64_t max_sequences, int64_t max_context, int64_t max_drafts,
              PromptRows prompt_rows)
        : prompt_rows(prompt_rows),
          max_drafts(max_drafts),
          pool_(std::move(pool)),
          max_rows_(max_rows),
          max_sequences_(max_sequences),
          max_context_(max_context) {}

    PromptRows prompt_rows;
    int64_t max_drafts;

    BlockPool& pool() const { return *pool_; }
    const std::vector<SequencePtr>& running() const { return running_; }
    const std::deque<SequencePtr>& waiting() const { return waiting_; }

    void add(const SequencePtr& sequence) {
        if (!sequences_.emplace(sequence->id, sequence).second)
            throw CallError("Sequence '" + sequence->id + "' runs or waits already.", "Give every sequence its own id.");
        waiting_.push_back(sequence);
        streamed_ += sequence->streamed;
    }

    // Removes a sequence that has ended, and frees its blocks.
    void remove(const SequencePtr& sequence) {
        const auto known = sequences_.find(sequence->id);
        if (known == sequences_.end() || known->second != sequence)
            throw CallError("Sequence '" + sequence->id + "' neither runs nor waits.", "Remove a sequence once.");
        if (sequence->running) running_.erase(std::find(running_.begin(), running_.end(), sequence));
        else waiting_.erase(std::find(waiting_.begin(), waiting_.end(), sequence));
        release(*sequence);
        streamed_ -= sequence->streamed;
        sequences_.erase(sequence->id);
    }
    bool streamed() const { return streamed_ > 0; }

    // Frees the blocks of running sequences, the youngest first; they keep their tokens and are the first of those that wait.
    void preempt_all() {
        while (!running_.empty()) preempt(running_.back());
    }

    // The rows of the next step, with blocks reserved for them and for guesses of each sequence, as many as all that decode may
    // have, and as length and blocks allow. Sequences that decode are served first, the oldest first; then prompts, as many rows of
    // them as the last steps allow, in the rows that guesses leave: short ones, then those that were begun, then those that wait.
    // Where blocks run out, room for guesses goes first, then a sequence is preempted.
    std::vector<ScheduledRows> next(double now) {
        std::vector<ScheduledRows> rows;
        std::vector<SequencePtr> decoding;
        bool enough_blocks = true;
        for (const SequencePtr& each : running_)
            if (each->decodes()) decoding.push_back(each);
        const int64_t count_decoding = static_cast<int64_t>(decoding.size());
        const int64_t drafts = std::min(max_drafts, std::max<int64_t>(0, max_rows_ / std::max<int64_t>(1, count_decoding) - 1));
        for (const SequencePtr& each : decoding)
            if (const int64_t left = max_rows_ - count(rows); left > 0 && each->running)
                enough_blocks &= schedule(each, left, drafts, rows);
        if (waiting_.empty() && decoding.size() >= running_.size()) return rows;
        const int64_t kept = rows_kept_for_guesses(max_rows_, count_decoding, drafts, recent_drafted_);
        const int64_t most = std::min(prompt_rows.limit(count_decoding, streamed()).value_or(max_rows_), max_rows_);
        schedule_prompts(drafts, kept, most, now, enough_blocks, rows);
        return rows;
    }

    // Throws if a pass cannot have been of the sequence as it is: it was removed or preempted since it was scheduled.
    static void check(const PassResult& result) {
        const SequenceState& sequence = *result.sequence;
        if (!sequence.running || result.rows < 0 || result.rows > sequence.pending())
            throw CallError("The rows of '" + sequence.id + "' are not those that were scheduled.",
                            "Abort and preempt between steps only.");
    }

    // How many of the tokens that follow a sequence's own are kept: up to one that ends it.
    Kept cut(const SequenceState& sequence, const std::vector<int32_t>& tokens) const {
        const int64_t longest = std::min(sequence.max_length, max_context_);
        Kept kept;
        for (const int32_t token : tokens) {
            ++kept.tokens;
            if (std::find(sequence.stop_ids.begin(), sequence.stop_ids.end(), token) != sequence.stop_ids.end())
                kept.finish = Finish::stop;
            else if (sequence.length() + kept.tokens >= longest)
                kept.finish = Finish::length;
            if (kept.finish != Finish::none) break;
        }
        return kept;
    }

    // Writes what a pass means: appends tokens, registers blocks that are full, frees those that only guesses needed. Adds the
    // slots that accepted nodes of trees lie in to `from`, and those of their positions to `to`.
    Kept commit(const PassResult& result, double now, std::vector<int32_t>& from, std::vector<int32_t>& to) {
        SequenceState& sequence = *result.sequence;
        Kept kept = cut(sequence, result.tokens);
        kept.accepted = std::min(kept.tokens, static_cast<int64_t>(result.accepted.size()));
        const int64_t known = sequence.length();
        for (int64_t depth = 0; depth < kept.accepted; ++depth)
            if (const int64_t node = result.accepted[depth]; node != depth) {
                from.push_back(sequence.table->slot(known + node));
                to.push_back(sequence.table->slot(known + depth));
            }
        sequence.tokens.insert(sequence.tokens.end(), result.tokens.begin(), result.tokens.begin() + kept.tokens);
        sequence.computed += result.rows + kept.accepted;
        pool_->commit(*sequence.table, {sequence.tokens.data(), 0}, sequence.computed);
        pool_->commit_states(*sequence.table, sequence.computed - kept.accepted, result.accepted, kept.accepted);
        pool_->trim(*sequence.table, sequence.computed);
        if (kept.tokens > 0) {
            if (sequence.first_token_at < 0) sequence.first_token_at = now;
            sequence.last_token_at = now;
            sequence.rounds += 1;
            sequence.drafted += result.drafted;
            sequence.accepted += kept.accepted;
        }
        return kept;
    }

    // How many guesses the step verified.
    void verified(int64_t drafted) {
        constexpr double kDecay = 0.75;  // share of the rows that guesses lately took that is still expected a step later
        recent_drafted_ = std::max(drafted, static_cast<int64_t>(kDecay * static_cast<double>(recent_drafted_)));
    }

  private:
    static constexpr int64_t kShortRows = 64;      // of a step for prompts that fit in them whole: they wait for no long ones
    static constexpr int64_t kMostOvertaken = 64;  // how often the first that waits is overtaken before it is its turn

    static int64_t count(const std::vector<ScheduledRows>& rows) {
        int64_t sum = 0;
        for (const ScheduledRows& each : rows) sum += each.end - each.start;
        return sum;
    }

    void schedule_prompts(int64_t drafts, int64_t kept, int64_t most, double now, bool enough_blocks,
                          std::vector<ScheduledRows>& rows) {
        const int64_t free_rows = max_rows_ - count(rows) - kept, end = count(rows) + std::min(free_rows, most);
        std::vector<SequencePtr> begun;
        for (const SequencePtr& each : running_)
            if (each->pending() > 1) begun.push_back(each);
        std::vector<SequencePtr> prompts = begun;
        prompts.insert(prompts.end(), waiting_.begin(), waiting_.end());
        int64_t short_rows = std::min(kShortRows, free_rows);
        for (const SequencePtr& each : prompts) {
            if (short_rows <= 0 || !enough_blocks) break;
            const int64_t pending = each->pending();
            if (pending > short_rows || (!each->running && !overtake(each, now))) continue;
            enough_blocks &= schedule(each, pending, drafts, rows);
            short_rows -= pending;
        }
        for (const SequencePtr& each : begun) {
            const bool scheduled = std::any_of(rows.begin(), rows.end(), [&](const ScheduledRows& r) { return r.sequence == each; });
            if (const int64_t left = end - count(rows); left > 0 && !scheduled && each->running)
                enough_blocks &= schedule(each, left, drafts, rows);
        }
        while (enough_blocks && !waiting_.empty() && static_cast<int64_t>(running_.size()) < max_sequences_) {
            const int64_t left = end - count(rows);
            if (left <= 0 || !start(waiting_.front(), now)) break;
            schedule(running_.back(), left, drafts, rows);
        }
    }

    // Starts a waiting sequence before those that came earlier; false where it has no place, or where the first one was
    // overtaken so often that it is its turn.
    bool overtake(const SequencePtr& sequence, double now) {
        const SequencePtr first = waiting_.front();
        if (static_cast<int64_t>(running_.size()) >= max_sequences_) return false;
        if (sequence != first && first->overtaken >= kMostOvertaken) return false;
        if (!start(sequence, now)) return false;
        if (sequence != first) first->overtaken += 1;
        return true;
    }

    // Adds a running sequence's rows, at most `left`. False if blocks were too few, even if only its guesses lacked them.
    bool schedule(const SequencePtr& sequence, int64_t left, int64_t drafts, std::vector<ScheduledRows>& rows) {
        const int64_t start = sequence->computed, known = sequence->length(), end = std::min(known, start + left);
        if (end < known) drafts = 0;
        else drafts = std::max<int64_t>(0, std::min(drafts, std::min(sequence->max_length, max_context_) - known - 1));
        const bool enough_blocks = pool_->reserve(*sequence->table, end + drafts);
        if (!enough_blocks) {
            drafts = 0;
            while (!pool_->reserve(*sequence->table, end)) {
                const SequencePtr preempted = preempted_next();
                preempt(preempted);
                rows.erase(std::remove_if(rows.begin(), rows.end(), [&](const ScheduledRows& each) { return each.sequence == preempted; }),
                           rows.end());
                if (preempted == sequence) return false;
            }
        }
        pool_->plan_snapshots(*sequence->table, start, end, sequence->prompt_tokens);
        rows.push_back({sequence, start, end, drafts});
        return enough_blocks;
    }

    // The youngest sequence of the request that runs the most, of the tenant that runs the most: a request of many choices takes
    // blocks from itself, not from a neighbour. The oldest of all is preempted only where it runs alone, so that it ends.
    SequencePtr preempted_next() const {
        std::unordered_map<std::string, int64_t> by_tenant, by_request;
        for (const SequencePtr& each : running_) {
            ++by_tenant[each->tenant];
            ++by_request[each->request_id];
        }
        const auto load = [&](const SequencePtr& each) { return std::pair(by_tenant[each->tenant], by_request[each->request_id]); };
        return *std::max_element(running_.rbegin(), running_.rend(),
                                 [&](const SequencePtr& a, const SequencePtr& b) { return load(a) < load(b); });
    }

    void preempt(SequencePtr sequence) {
        running_.erase(std::find(running_.begin(), running_.end(), sequence));
        release(*sequence);
        sequence->preemptions += 1;
        waiting_.push_front(std::move(sequence));
    }

    void release(SequenceState& sequence) {
        pool_->release(sequence.id);
        sequence.table = nullptr;
        sequence.computed = 0;
        sequence.running = false;
    }

    // Moves a waiting sequence to the running ones, if there are blocks for all of its known tokens and those that the prompts of
    // running ones still need.
    bool start(SequencePtr sequence, double now) {
        const auto found = sequence->choice > 0 ? sequences_.find(sequence->request_id) : sequences_.end();
        const SequencePtr first = found == sequences_.end() || !found->second->running ? nullptr : found->second;
        if (first && first->computed < first->prompt_tokens) return false;  // the first choice computes the prompt for all
        int64_t needed = blocks_for(sequence->length() + 1);
        for (const SequencePtr& each : running_)
            if (each->pending() > 1)
                needed += std::max<int64_t>(0, blocks_for(each->length() + 1) - static_cast<int64_t>(each->table->blocks.size()));
        if (needed > pool_->num_free()) return false;
        waiting_.erase(std::find(waiting_.begin(), waiting_.end(), sequence));
        running_.push_back(sequence);
        sequence->running = true;
        if (first) {
            pool_->fork(first->id, sequence->id, sequence->prompt_tokens - 1);
        } else {
            pool_->match_prefix(sequence->id, sequence->tokens.data(), sequence->length(), sequence->tenant);
        }
        sequence->table = pool_->find(sequence->id);
        sequence->computed = sequence->table->committed * kBlockTokens;
        if (sequence->admitted_at < 0) {
            sequence->admitted_at = now;
            sequence->cached_tokens = sequence->computed;
        }
        return true;
    }

    const std::shared_ptr<BlockPool> pool_;
    const int64_t max_rows_, max_sequences_, max_context_;
    int64_t streamed_ = 0, recent_drafted_ = 0;
    std::unordered_map<std::string, SequencePtr> sequences_;
    std::vector<SequencePtr> running_;
    std::deque<SequencePtr> waiting_;
};

}  // namespace wager
