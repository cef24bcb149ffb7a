// A recorded pass: ops over fixed buffers, replayed for any number of rows in one parallel region. Checks the integer
// inputs before it runs, so that a mistake in packing is an error that names it and not a stray write.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "memory.h"
#include "ops.h"
#include "pool.h"

namespace wager {

class Tape {
  public:
    Tape(std::shared_ptr<Pool> pool, const Table* table, const Inputs& in, int heads, int kv_heads, int head_dim);

    void record(const Embed& op) { ops_.push_back(op), vocab_ = smaller(vocab_, op.vocab); }
    void record(const RmsNorm& op) { ops_.push_back(op); }
    void record(const Linear& op);
    void record(const PerHead& op) { ops_.push_back(op); }
    void record(const Router& op) { ops_.push_back(op); }
    void record(const Choose& op) { ops_.push_back(op); }
    void record(const Gather& op) { ops_.push_back(op); }
    void record(const ExpertsIn& op) { ops_.push_back(op); }
    void record(const ExpertsOut& op) { ops_.push_back(op); }
    void record(const LatentWrite& op) { ops_.push_back(op), see(op.cache), positions_ = smaller(positions_, op.positions); }
    void record(const Rotary& op) { ops_.push_back(op), see(op.cache), positions_ = smaller(positions_, op.positions); }
    void record(Attention op);
    void record(const Select& op) { ops_.push_back(op); }
    void record(const Argmax& op) { ops_.push_back(op); }

    void run(int rows, int sequences, int head_rows);

  private:
    using Op = std::variant<Embed, RmsNorm, Linear, PerHead, Router, Choose, Gather, ExpertsIn, ExpertsOut, LatentWrite, Rotary,
                            Attention, Select, Argmax>;

    static int smaller(int a, int b) { return a < b ? a : b; }
    void see(const CacheView& cache) { pages_ = smaller(pages_, cache.pages); }
    void check(int rows, int sequences, int head_rows) const;
    void check_row(int row, int sequences) const;
    void check_path(int row) const;
    AttentionPlan plan(int rows);
    int segments() const;

    std::shared_ptr<Pool> pool_;
    const Table* table_;
    Inputs in_;
    int kv_heads_, group_, head_dim_, tail_pages_, vocab_, positions_, pages_;
    size_t scratch_bytes_;
    Block scratch_, parts_;
    std::unique_ptr<std::atomic<int>[]> done_;
    std::vector<Op> ops_;
    std::vector<std::unique_ptr<std::atomic<int>>> counters_;
    std::ptrdiff_t last_linear_ = -1;
    std::vector<int32_t> tile_rows_, tile_sizes_, tails_;
};

}  // namespace wager
