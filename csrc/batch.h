// Writes the rows of one pass into the integer buffers that a tape reads: see types.PackedBatch for what they mean.
// Knows no Python objects.
#pragma once

#include <algorithm>
#include <cstdint>

#include "block_pool.h"
#include "ops.h"

namespace wager {

struct BatchBuffers {
    int32_t *tokens, *positions, *parents, *slot_mapping, *seq_ids, *logits_indices;  // [max_rows]
    int32_t *query_start_loc, *num_computed_tokens;                                   // [max_sequences + 1], [max_sequences]
    int32_t* block_tables;                                                            // [max_sequences, max_blocks]
    int32_t *state_uses, *replays;  // [max_sequences, kStateInts], [max_rows]; see StateUse of ops.h
    int max_rows, max_sequences, max_blocks;
};

// Begin a span with `begin`, add its known tokens and its guesses, then `end` it; `finish` after the last one. Each returns
// false if the buffers have no room for it, or if a guess's parent does not precede it.
class BatchWriter {
  public:
    explicit BatchWriter(const BatchBuffers& to) : to_(to) {}

    int rows() const { return rows_; }
    int sequences() const { return sequences_; }
    int logits_rows() const { return logits_; }
    int blocks() const { return blocks_; }  // of the longest span

    bool begin(int64_t computed) {
        if (sequences_ == to_.max_sequences || computed < 0 || computed > INT32_MAX - to_.max_rows) return false;
        first_ = rows_;
        computed_ = static_cast<int32_t>(computed);
        to_.query_start_loc[sequences_] = first_;
        to_.num_computed_tokens[sequences_] = computed_;
        return true;
    }

    bool known(int32_t token) {
        const int before = rows_ == first_ ? -1 : rows_ - 1;
        return add(token, computed_ + rows_ - first_, before);
    }

    // Guesses of the draft, in order; `parent` counts them from 0, and is -1 for the last known token.
    bool guess(int32_t token, int64_t parent, int last_known) {
        const int64_t before = last_known + 1 + parent;
        return parent >= -1 && before < rows_ && add(token, to_.positions[before] + 1, static_cast<int32_t>(before));
    }

    void need_logits(int from) {
        for (int row = from; row < rows_; ++row) to_.logits_indices[logits_++] = row;
    }

    // How many blocks cover the span.
    int needed_blocks() const { return (computed_ + rows_ - first_ + kBlockSize - 1) / kBlockSize; }
    bool has_room(int blocks) const { return blocks <= to_.max_blocks; }
    // What the pass does to the states of a sequence: see StateUse of ops.h. `known` are its rows before its guesses. Without a
    // table it has the slot of its place in the batch. False if there is no room for its replayed rows.
    bool states(BlockTable* table, int known) {
        auto& use = reinterpret_cast<StateUse*>(to_.state_uses)[sequences_];
        use = {-1, -1, known, 0, {-1, -1}, {-1, -1}};
        if (table == nullptr || table->states.state < 0) {
            use.state = sequences_, use.source = computed_ > 0 ? sequences_ : -1;
            return true;
        }
        TableStates& states = table->states;
        states.first_guess = first_ + known;
        use.state = states.state, use.source = states.source, use.replays = static_cast<int32_t>(states.replays.size());
        if (replays_ + use.replays > to_.max_rows) return false;
        std::copy(states.replays.begin(), states.replays.end(), to_.replays + replays_);
        replays_ += use.replays;
        for (size_t save = 0; save < states.saves.size(); ++save) {
            use.save_at[save] = static_cast<int32_t>(states.saves[save].position);
            use.save_slot[save] = states.saves[save].slot;
        }
        return true;
    }

    int32_t* block_table() { return to_.block_tables + static_cast<int64_t>(sequences_) * to_.max_blocks; }

    // After the first `needed_blocks` of the block table were written.
    void end() {
        const int32_t* table = block_table();
        for (int row = first_; row < rows_; ++row) {
            const int at = computed_ + row - first_;
            to_.slot_mapping[row] = table[at / kBlockSize] * kBlockSize + at % kBlockSize;
        }
        blocks_ = std::max(blocks_, needed_blocks());
        ++sequences_;
    }

    // The tables are padded with 0 to the longest of them.
    void finish() {
        to_.query_start_loc[sequences_] = rows_;
        for (int s = 0; s < sequences_; ++s) {
            const int end = to_.num_computed_tokens[s] + to_.query_start_loc[s + 1] - to_.query_start_loc[s];
            int32_t* const table = to_.block_tables + static_cast<int64_t>(s) * to_.max_blocks;
            std::fill(table + (end + kBlockSize - 1) / kBlockSize, table + blocks_, 0);
        }
    }

  private:
    bool add(int32_t token, int32_t position, int32_t parent) {
        if (rows_ == to_.max_rows) return false;
        to_.tokens[rows_] = token;
        to_.positions[rows_] = position;
        to_.parents[rows_] = parent;
        to_.seq_ids[rows_] = sequences_;
        ++rows_;
        return true;
    }

    const BatchBuffers& to_;
    int rows_ = 0, sequences_ = 0, logits_ = 0, blocks_ = 0, first_ = 0, replays_ = 0;
    int32_t computed_ = 0;
};

}  // namespace wager
