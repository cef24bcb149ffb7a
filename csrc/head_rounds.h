// Chains that a head on the target's states guesses: what it keeps of each sequence, and a whole round of all of them in one
// call. draft/heads/autoregressive.py says what a round is, and has it with a pass for each guess. Knows no Python.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "block_pool.h"
#include "tape.h"

namespace wager {

// A sequence in a head's cache, which holds the final entries of the positions `origin` to `origin` + `entries` - 1, and the
// states of the positions `first` to `end` - 1, of `width` elements, which wait; the last `most` of them count. Adding some costs
// the same however many wait: a head that rests gets one in every step. `temperature` is what its guesses are drawn with in the
// head's pass, none where they are not.
class HeadSequence {
  public:
    HeadSequence(std::vector<int32_t> tokens, int width, int64_t most, std::string tenant, std::optional<double> temperature)
        : tokens(std::move(tokens)), tenant(std::move(tenant)), temperature(temperature), width_(width), most_(most) {}

    std::vector<int32_t> tokens;
    const std::string tenant;
    const std::optional<double> temperature;
    int64_t origin = 0, entries = 0;

    int width() const { return width_; }
    int64_t count() const { return count_; }
    int64_t end() const { return first_ + count_; }
    // Entries of known tokens.
    int64_t known() const { return static_cast<int64_t>(tokens.size()) - 1 - origin; }
    int64_t pending() const { return known() - entries; }

    // Copies the states of the positions from `start` on that are new and count, `rows` of a pass, whose taps [*, tap width] lie
    // side by side in a state. Behind a gap they begin anew. How many were copied.
    int64_t read(const std::vector<const float*>& taps, int64_t start, const std::vector<int64_t>& rows) {
        const int64_t after = start + static_cast<int64_t>(rows.size());
        const int64_t begin = std::max({origin + entries, end(), start, after - most_});
        if (begin >= after) return 0;
        const size_t part = width_ / taps.size();
        float* to = room(begin, after - begin);
        for (int64_t position = begin; position < after; ++position)
            for (const float* tap : taps) to = std::copy_n(tap + rows[position - start] * part, part, to);
        return after - begin;
    }

    // Forgets the states of the positions below; the memory of a prompt's is given back with the last of them.
    void drop(int64_t below) {
        const int64_t rows = std::clamp<int64_t>(below - first_, 0, count_);
        first_ += rows, count_ -= rows, begin_ += rows;
        if (count_ == 0 && size_ > kMostRows) memory_.reset(), size_ = 0;
    }

    // Moves the next states, at most so many, to `to`; how many.
    int64_t take(float* to, int64_t rows) {
        rows = std::min(rows, count_);
        if (rows > 0) std::copy_n(memory_.get() + begin_ * width_, rows * width_, to);
        drop(first_ + rows);
        return rows;
    }

    // Lets the entries in the cache and the states that wait meet: by what the prefix cache has, or by beginning where the states
    // do. False while the state of a token is missing: there is nothing to guess from.
    bool join(BlockPool& pool, const std::string& name) {
        if (count_ == 0 || end() < static_cast<int64_t>(tokens.size()) - 1) return false;
        if (entries == 0 && origin == 0) {
            const std::shared_ptr<BlockTable> table = pool.find(name);
            if (!table || table->blocks.empty())
                entries = pool.match_prefix(name, tokens.data(), static_cast<int64_t>(tokens.size()), tenant);
        }
        drop(std::max(origin + entries, end() - most_));
        if (first_ > origin + entries) {
            pool.release(name);
            origin = first_, entries = 0;
        }
        return true;
    }

    // Lets others find the first `length` entries, which were computed.
    void commit(BlockPool& pool, const std::string& name, int64_t length) const {
        const std::shared_ptr<BlockTable> table = pool.find(name);
        if (!table || origin != 0) return;
        if (length + pool.lead() > static_cast<int64_t>(tokens.size())) throw std::invalid_argument("fewer tokens than are committed");
        pool.commit(*table, {tokens.data(), 0}, length);
    }

  private:
    static constexpr int64_t kLeastRows = 30, kMostRows = 8 * kLeastRows;  // that are kept room for where none waits

    float* room(int64_t start, int64_t rows) {
        if (start != end() || count_ == 0) first_ = start, count_ = 0, begin_ = 0;
        if (begin_ + count_ + rows > size_) {
            size_ = 2 * (count_ + rows) + kLeastRows;
            std::unique_ptr<float[]> memory(new float[size_ * width_]);
            if (count_ > 0) std::copy_n(memory_.get() + begin_ * width_, count_ * width_, memory.get());
            memory_ = std::move(memory), begin_ = 0;
        }
        float* const to = memory_.get() + (begin_ + count_) * width_;
        count_ += rows;
        return to;
    }

    const int width_;
    const int64_t most_;
    std::unique_ptr<float[]> memory_;  // has room for `size_` states; those that wait begin at `begin_`
    int64_t first_ = 0, count_ = 0, begin_ = 0, size_ = 0;
};

struct HeadLimits {
    int max_rows, max_sequences;
    int64_t max_context;
};

// A chain that is asked for. `key` is that of its first guess.
struct AskedChain {
    std::string name;
    HeadSequence* sequence;
    int depth;
    double least;
    RequestNoise key;
};

class HeadRounds {
  public:
    // `states` f32 [max_rows, width] are those that the tape reads; its last op is the guess, and behind one it goes on as `feed`
    // says.
    HeadRounds(std::shared_ptr<Tape> tape, std::shared_ptr<BlockPool> pool, float* states, int width, HeadLimits limits)
        : tape_(std::move(tape)), pool_(std::move(pool)), states_(states), width_(width), limits_(limits) {}

    // The guesses of each; none where a state is missing, the cache has no blocks, or the context is too long.
    std::vector<Chain> guess(const std::vector<AskedChain>& asked) {
        std::vector<Chain> chains(asked.size());
        std::vector<size_t> waiting;
        for (size_t i = 0; i < asked.size(); ++i)
            if (start(asked[i], chains[i])) waiting.push_back(i);
        const std::vector<size_t> started = waiting;
        while (!waiting.empty()) {  // a prompt that takes several passes does not delay the others
            std::stable_sort(waiting.begin(), waiting.end(),
                             [&](size_t a, size_t b) { return asked[a].sequence->pending() < asked[b].sequence->pending(); });
            pass(asked, waiting, chains);
            const auto done = [&](size_t i) { return asked[i].sequence->pending() == 0; };
            waiting.erase(std::remove_if(waiting.begin(), waiting.end(), done), waiting.end());
        }
        for (const size_t i : started) pool_->trim(*table_of(asked[i]), asked[i].sequence->entries);
        return chains;
    }

  private:
    std::shared_ptr<BlockTable> table_of(const AskedChain& chain) const {
        std::shared_ptr<BlockTable> table = pool_->find(chain.name);
        if (!table) throw std::out_of_range("'" + chain.name + "' holds no blocks");
        return table;
    }

    bool start(const AskedChain& asked, Chain& chain) const {
        HeadSequence& sequence = *asked.sequence;
        if (sequence.width() != width_) throw std::invalid_argument("states of another width");
        if (!sequence.join(*pool_, asked.name) || sequence.pending() < 1) return false;
        chain.depth = static_cast<int>(std::min<int64_t>(asked.depth, limits_.max_context - sequence.known() + 1));
        chain.least = asked.least;
        return chain.depth >= 1 && pool_->reserve(asked.name, sequence.known() + chain.depth - 1);
    }

    // One pass over entries that wait, as many as there is room for, and all guesses of the sequences that have none left.
    void pass(const std::vector<AskedChain>& asked, const std::vector<size_t>& waiting, std::vector<Chain>& chains) {
        BatchWriter to(tape_->buffers());
        std::vector<size_t> written, served;
        for (const size_t i : waiting) {
            const int room = limits_.max_rows - to.rows();
            if (room < 1 || to.sequences() == limits_.max_sequences) break;
            if (write(to, asked[i], std::min<int64_t>(room, asked[i].sequence->pending()))) {
                tape_->guess().keys[served.size()] = asked[i].key;
                served.push_back(i);
            }
            written.push_back(i);
        }
        to.finish();
        tape_->run(to.rows(), to.sequences(), to.logits_rows(), 0, tape_->ops());
        for (const size_t i : written) asked[i].sequence->commit(*pool_, asked[i].name, asked[i].sequence->entries);
        std::vector<Chain> followed;
        for (const size_t i : served) {
            chains[i].blocks = table_of(asked[i])->blocks;
            followed.push_back(std::move(chains[i]));
        }
        tape_->follow(followed);
        for (size_t row = 0; row < served.size(); ++row) chains[served[row]] = std::move(followed[row]);
    }

    // The next entries of a sequence as rows of the pass; whether it has no others.
    bool write(BatchWriter& to, const AskedChain& asked, int64_t rows) {
        HeadSequence& sequence = *asked.sequence;
        const int first = to.rows();
        if (!to.begin(sequence.entries)) throw std::out_of_range("a position is too large");
        const int32_t* token = sequence.tokens.data() + sequence.origin + sequence.entries + 1;
        for (int64_t row = 0; row < rows; ++row) to.known(token[row]);
        if (sequence.take(states_ + static_cast<int64_t>(first) * width_, rows) != rows)
            throw std::out_of_range("'" + asked.name + "' has fewer states than tokens");
        sequence.entries += rows;
        const bool complete = sequence.pending() == 0;
        if (complete) to.need_logits(to.rows() - 1);
        const std::shared_ptr<BlockTable> table = table_of(asked);
        const int blocks = to.needed_blocks();
        if (!to.has_room(blocks) || blocks > static_cast<int>(table->blocks.size()))
            throw std::out_of_range("'" + asked.name + "' has rows without a block");
        std::copy_n(table->blocks.data(), blocks, to.block_table());
        to.states(nullptr, static_cast<int>(rows));
        to.end();
        return complete;
    }

    const std::shared_ptr<Tape> tape_;
    const std::shared_ptr<BlockPool> pool_;
    float* const states_;
    const int width_;
    const HeadLimits limits_;
};

}  // namespace wager
