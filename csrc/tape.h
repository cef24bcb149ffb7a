// A recorded pass: ops over fixed buffers, replayed for any number of rows in one parallel region. Checks the integer
// inputs before it runs, so that a mistake in packing is an error that names it, not a write to a wrong address. One thread
// at a time: a second one that records or runs meanwhile gets an error.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "batch.h"
#include "memory.h"
#include "ops.h"
#include "pool.h"

namespace wager {

// Guesses of a sequence, one after the other, with their survival: at most `depth`, and none behind one whose survival is below
// `least`. `blocks` are those of its cache.
struct Chain {
    int depth;
    double least;
    std::vector<int32_t> blocks, tokens;
    std::vector<double> survival;
};

// Any op that there is a kernel for.
template <class... Ops>
std::variant<Ops...> any_of(const Kernels<Ops...>&);

class Tape {
  public:
    using Op = decltype(any_of(std::declval<Table>()));

    // whole_spans: every row also sees the rows of its span behind it, which is a chain.
    Tape(std::shared_ptr<Pool> pool, const Table* table, const BatchBuffers& in, bool whole_spans);

    // All throw std::runtime_error while another thread is inside one of them; `run` throws std::out_of_range for inputs
    // that contradict the tape's buffers or each other.
    size_t record(Op op);  // the number of the op
    // Where a recorded Copy writes from now on; null: it does nothing.
    void redirect(size_t copy, float* out, int stride);
    // The ops from number `first` on, up to number `last`.
    void run(int rows, int sequences, int logits_rows, size_t first, size_t last);
    // What a guess is followed by: the ops from number `first` on over a row that stands for it, with its row of `fed` [*, n],
    // bf16 or float32, copied to `state` [*, n]. The last op is the guess.
    void feed(size_t first, const void* fed, bool narrow, float* state, int n) { fed_ = {first, fed, narrow, state, n}; }
    // Behind a pass whose rows of logits are those of the chains: its guesses and the further ones. Changes the guess's keys.
    void follow(std::vector<Chain>& chains);
    size_t ops() const { return ops_.size(); }
    const BatchBuffers& buffers() const { return source_; }
    // The last op.
    const Guess& guess() const { return std::get<Guess>(ops_.back()); }

  private:
    struct Fed {
        size_t first = 0;
        const void* from = nullptr;
        bool narrow = false;
        float* state = nullptr;
        int n = 0;

        void copy(size_t from_row, size_t to_row) const;
    };

    // Which sequence writes to a block of the cache, and in which run.
    struct Writer {
        uint64_t run = 0;
        int sequence = 0;
    };

    // Attention's tiles over a set of rows; see AttentionPlan.
    struct Tiles {
        std::vector<int32_t> rows, sizes, outs;
    };

    // Heads of attention: key-value heads, query heads of each, and dimensions. Layers with the same have the same tiles.
    struct Shape {
        int kv_heads, group, head_dim;
        Tiles tiles, logits_tiles;
    };

    void replay(int rows, int sequences, int logits_rows, size_t first, size_t last);
    void limit_blocks(const CacheView& cache, bool writes);
    void limit_slots(const StateView& states);
    void quantise_before(const Op& op);
    void add_quantise(const QuantiseRows& op);
    void link_prefetch(const Linear& op);
    int shape_of(const Attention& op);
    void copy_inputs(int rows, int sequences, int logits_rows);
    void check(int rows, int sequences, int logits_rows);
    void check_row(int row, int sequences) const;
    void check_path(int row) const;
    void check_slot(int row, int sequences);
    void check_logits_indices(int rows, int logits_rows) const;
    void check_states(int sequences);
    void write_slot(int slot, int sequence, const char* what);
    const StateUse& state_use(int sequence) const { return reinterpret_cast<const StateUse*>(in_.state_uses)[sequence]; }
    void give_state_room(int sequences);
    std::string sequence_of(int block, int sequences) const;
    const int32_t* block_table(int sequence) const { return in_.block_tables + static_cast<size_t>(sequence) * in_.max_blocks; }
    void find_keys(int rows);
    AttentionPlan plan(const Shape& shape, Tiles& tiles, const int32_t* rows, int count);
    void cut(const Shape& shape, Tiles& tiles, const int32_t* rows, int count, int times) const;

    std::shared_ptr<Pool> pool_;
    const Table* table_;
    BatchBuffers source_;  // the caller's
    Inputs in_;            // the copy of a step's inputs in storage_
    Fed fed_;
    int last_logits_rows_ = 0;
    std::vector<int32_t> storage_;
    int tail_blocks_, vocab_, positions_, num_blocks_;
    bool whole_spans_;
    size_t scratch_bytes_ = 0;  // of a thread, for the largest shape of heads
    std::unique_ptr<Buffer> scratch_;
    std::vector<Shape> shapes_;
    std::vector<AttentionPlan> plans_, whole_plans_;  // as Step::plans; the latter without segments, for one thread
    std::unique_ptr<Buffer> parts_;  // grows with the longest context of a step with few rows
    size_t own_blocks_ = 0, shared_blocks_ = 0;  // activation blocks per thread, and of all rows
    std::unique_ptr<Buffer> own_, shared_;
    std::unique_ptr<std::atomic<int>[]> done_;
    std::vector<Op> ops_;
    std::vector<const Op*> stages_;  // of the current run
    std::vector<Step> steps_;        // by the number of threads that share a stage, from one
    std::vector<std::unique_ptr<std::atomic<int>>> counters_;
    std::ptrdiff_t last_linear_ = -1;
    std::vector<int32_t> every_row_, tails_, ends_;  // 0, 1, 2 ..; see AttentionPlan
    std::vector<Writer> writers_;  // by block of the smallest cache; empty for a tape that writes to none
    int slots_ = 0, key_dim_ = 0, tile_ = 0;  // of recurrent layers; 0: there are none
    std::vector<Writer> slot_writers_;        // by slot
    std::vector<int32_t> replay_starts_;
    std::unique_ptr<Buffer> state_room_;  // grows with the most guesses of a sequence in a step
    size_t state_room_floats_ = 0;        // of a thread
    uint64_t runs_ = 0;
    std::atomic<bool> busy_{false};
};

}  // namespace wager
