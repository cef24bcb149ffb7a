// The slots of recurrent states: which sequence or which snapshot has one. Integers only; knows no Python.
//
// Keys and values of every position stay; a recurrent layer keeps one state. So a sequence has a slot, in which the states behind
// its known tokens are kept, and accepted guesses are replayed from what the pass saved of their rows. A snapshot is the states
// behind the last token of a full block of the cache: it belongs to the block, and a prefix is reused up to a block that has one.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

namespace wager {

// What a sequence has of states. Empty for a model without recurrent layers.
struct TableStates {
    struct Save {
        int64_t position;
        int32_t slot;
        bool rolling;
    };
    int32_t state = -1;             // its slot; -1: none
    int32_t source = -1;            // the slot that the next pass begins with: its own, or a snapshot's; -1: zeros
    int64_t covered = 0;            // tokens behind which the states in `source` are
    std::vector<int32_t> replays;   // rows of the last pass: accepted guesses behind these tokens
    int32_t first_guess = 0;        // row of its first guess in the last pass
    int64_t branch = 0;             // tokens that other texts were found to share, 0: none
    std::vector<Save> saves;        // snapshots that the next pass takes
    int32_t rolling = -1;           // its latest snapshot that follows the text
};

class StateSlots {
  public:
    static constexpr int64_t kRollingTokens = 64;  // a sequence's own snapshot is at most so many tokens old; whole blocks

    // `running` slots for sequences, then `snapshots`.
    StateSlots(int64_t running, int64_t snapshots, int64_t num_blocks)
        : first_snapshot_(static_cast<int32_t>(running)), snapshots_(snapshots) {
        for (int64_t slot = running; slot > 0; --slot) free_.push_back(static_cast<int32_t>(slot - 1));
        if (running > 0) of_block_.assign(num_blocks, -1);
    }

    bool any() const { return !of_block_.empty(); }
    bool has(int32_t block) const { return of_block_[block] >= 0; }

    void begin(TableStates& states) {
        if (free_.empty()) throw std::runtime_error("no slot of states is free");
        states.state = free_.back();
        free_.pop_back();
    }

    void end(TableStates& states) {
        if (states.state < 0) return;
        drop_saves(states);
        leave(states);
        free_.push_back(states.state);
        states = {};
    }

    // The sequence begins with the snapshot of a block, behind so many tokens.
    void read(TableStates& states, int32_t block, int64_t covered) {
        states.source = of_block_[block];
        states.covered = covered;
        Snapshot& snapshot = at(states.source);
        ++snapshot.readers;
        snapshot.used = ++clock_;
    }

    // Which snapshots the next pass takes of a sequence that then has `end` tokens behind it: where its text leaves what others
    // share, at the end of its prompt (`border`), and, with `rolling`, one that follows it.
    void plan(TableStates& states, int64_t end, int64_t border, bool rolling) {
        drop_saves(states);
        const auto passed = [&](int64_t position) { return position > states.covered && position <= end; };
        if (passed(states.branch)) save(states, states.branch, false);
        if (border != states.branch && passed(border)) save(states, border, false);
        const int64_t latest = end / kRollingTokens * kRollingTokens;
        if (rolling && states.saves.empty() && passed(latest)) save(states, latest, true);
    }

    // After a pass: the states behind `known` tokens are in the sequence's slot, and accepted guesses come next.
    void commit(TableStates& states, int64_t known, const std::vector<int32_t>& blocks, int64_t block_tokens,
                std::vector<int32_t> replays) {
        leave(states);
        states.source = states.state;
        states.covered = known;
        states.replays = std::move(replays);
        for (const TableStates::Save& save : states.saves) {
            const int32_t block = blocks[save.position / block_tokens - 1];
            Snapshot& snapshot = at(save.slot);
            snapshot.taken = false;
            if (of_block_[block] >= 0) continue;  // another sequence of the same text was first
            snapshot.block = block;
            snapshot.used = ++clock_;
            of_block_[block] = save.slot;
            if (!save.rolling) continue;
            if (states.rolling >= 0 && at(states.rolling).owner == states.state && at(states.rolling).readers == 0)
                drop(at(states.rolling).block);
            states.rolling = save.slot;
            snapshot.owner = states.state;
        }
        states.saves.clear();
    }

    // A block no longer has the contents that its snapshot follows.
    void drop(int32_t block) {
        if (!any() || block < 0 || of_block_[block] < 0) return;
        Snapshot& snapshot = at(of_block_[block]);
        snapshot.block = snapshot.owner = -1;  // who reads it still holds its slot
        of_block_[block] = -1;
    }

    // False if the slots contradict each other.
    bool consistent() const {
        for (size_t block = 0; block < of_block_.size(); ++block)
            if (of_block_[block] >= 0 && snapshots_[of_block_[block] - first_snapshot_].block != static_cast<int32_t>(block)) return false;
        return true;
    }

  private:
    struct Snapshot {
        int32_t block = -1, owner = -1;  // owner: the slot of the sequence that it follows
        int64_t used = 0, readers = 0;
        bool taken = false;  // by a pass that is to come
    };

    Snapshot& at(int32_t slot) { return snapshots_[slot - first_snapshot_]; }

    void leave(TableStates& states) {
        if (states.source >= first_snapshot_) --at(states.source).readers;
        states.source = -1;
    }

    void drop_saves(TableStates& states) {
        for (const TableStates::Save& save : states.saves) at(save.slot).taken = false;
        states.saves.clear();
    }

    // The slot of the snapshot that was used least recently; none where all are in use.
    void save(TableStates& states, int64_t position, bool rolling) {
        Snapshot* oldest = nullptr;
        for (Snapshot& each : snapshots_) {
            if (each.taken || each.readers > 0) continue;
            if (oldest == nullptr || rank(each) < rank(*oldest)) oldest = &each;
        }
        if (oldest == nullptr) return;
        drop(oldest->block);
        oldest->taken = true;
        states.saves.push_back({position, static_cast<int32_t>(oldest - snapshots_.data()) + first_snapshot_, rolling});
    }

    static int64_t rank(const Snapshot& snapshot) { return snapshot.block < 0 ? 0 : snapshot.used; }

    const int32_t first_snapshot_;
    std::vector<int32_t> free_, of_block_;  // of sequences; by block, -1: it has no snapshot
    std::vector<Snapshot> snapshots_;
    int64_t clock_ = 0;
};

}  // namespace wager
