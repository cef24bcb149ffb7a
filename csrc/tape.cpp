#include "tape.h"

namespace wager {

namespace {

template <class... Ts>
struct Overloaded : Ts... {
    using Ts::operator()...;
};
template <class... Ts>
Overloaded(Ts...) -> Overloaded<Ts...>;

constexpr int kSplitBelow = 4;  // items of attention per thread from which they share out evenly enough
constexpr int kParts = 64;      // segments per thread whose states can be held

void require(bool ok, const char* what, int at, int value, const char* why = "outside the tape's buffers") {
    if (!ok) {
        throw std::out_of_range(std::string(what) + " is " + std::to_string(value) + " at index " + std::to_string(at) +
                                ", " + why);
    }
}

}  // namespace

Tape::Tape(std::shared_ptr<Pool> pool, const Table* table, const Inputs& in, int heads, int kv_heads, int head_dim)
    : pool_(std::move(pool)),
      table_(table),
      in_(in),
      kv_heads_(kv_heads),
      group_(heads / kv_heads),
      head_dim_(head_dim),
      tail_pages_(in.max_rows / kPage + 2),
      vocab_(INT32_MAX),
      positions_(INT32_MAX),
      pages_(INT32_MAX),
      scratch_bytes_(attention_scratch(group_, head_dim, tail_pages_)),
      scratch_(scratch_bytes_ * pool_->threads()),
      parts_(kParts * pool_->threads() * state_floats(group_, head_dim) * sizeof(float)),
      done_(new std::atomic<int>[kSplitBelow * pool_->threads()]()) {
    tile_rows_.reserve(in.max_rows);
    tile_sizes_.reserve(in.max_rows);
    tails_.resize(in.max_rows);
}

void Tape::record(const Linear& op) {
    if (last_linear_ >= 0) {
        Linear& before = std::get<Linear>(ops_[last_linear_]);
        before.next_weight = op.weight;
        before.next_panel = op.panel_elements();
        before.next_panels = op.panels;
    }
    last_linear_ = static_cast<std::ptrdiff_t>(ops_.size());
    ops_.push_back(op);
}

void Tape::record(Attention op) {
    see(op.cache);
    counters_.push_back(std::make_unique<std::atomic<int>>(0));
    op.next = counters_.back().get();
    ops_.push_back(op);
}

void Tape::check_row(int row, int sequences) const {
    const int owner = in_.seq_ids[row], position = in_.positions[row];
    require(owner >= 0 && owner < sequences, "seq_ids", row, owner);
    require(in_.tokens[row] >= 0 && in_.tokens[row] < vocab_, "tokens", row, in_.tokens[row]);
    require(position >= 0 && position < positions_ && position / kPage < in_.max_pages, "positions", row, position);
    require(in_.slot_mapping[row] >= 0 && in_.slot_mapping[row] / kPage < pages_, "slot_mapping", row, in_.slot_mapping[row]);
    require(row >= in_.query_start_loc[owner], "query_start_loc", owner, in_.query_start_loc[owner], "past a row of its sequence");
    check_path(row);
}

// A path is followed from row to row and its keys laid out by position, so each step must lead one position down.
void Tape::check_path(int row) const {
    const int owner = in_.seq_ids[row], position = in_.positions[row], parent = in_.parents[row];
    require(parent >= -1 && parent < row, "parents", row, parent);
    if (parent < 0) {
        require(position == in_.num_computed_tokens[owner], "positions", row, position, "not the base of its sequence");
        return;
    }
    require(in_.seq_ids[parent] == owner, "parents", row, parent, "a row of another sequence");
    require(position == in_.positions[parent] + 1, "positions", row, position, "not one past its parent's");
}

void Tape::check(int rows, int sequences, int head_rows) const {
    require(rows >= 0 && rows <= in_.max_rows, "rows", 0, rows);
    require(sequences >= 0 && sequences <= in_.max_sequences, "sequences", 0, sequences);
    require(head_rows >= 0 && head_rows <= in_.max_rows, "logits_rows", 0, head_rows);
    for (int s = 0; s < sequences; ++s) {
        require(in_.num_computed_tokens[s] >= 0, "num_computed_tokens", s, in_.num_computed_tokens[s]);
        require(in_.query_start_loc[s] >= 0 && in_.query_start_loc[s] < rows, "query_start_loc", s, in_.query_start_loc[s]);
    }
    int checked = -1, pages = 0;  // pages of the table already seen, for the sequence before
    for (int row = 0; row < rows; ++row) {
        check_row(row, sequences);
        const int owner = in_.seq_ids[row];
        if (owner != checked) pages = 0;
        checked = owner;
        const int32_t* table = in_.block_tables + static_cast<size_t>(owner) * in_.max_pages;
        for (; pages <= in_.positions[row] / kPage; ++pages)
            require(table[pages] >= 0 && table[pages] < pages_, "block_tables", pages, table[pages]);
    }
    for (int s = 0; s < sequences; ++s)
        require(in_.seq_ids[in_.query_start_loc[s]] == s, "query_start_loc", s, in_.query_start_loc[s], "not a row of its sequence");
    for (int i = 0; i < head_rows; ++i) require(in_.logits_indices[i] >= 0 && in_.logits_indices[i] < rows, "logits_indices", i, in_.logits_indices[i]);
}

// Attention is handed out by segment where tiles and kv heads alone would leave threads idle, and the parts have room.
int Tape::segments() const {
    const int items = static_cast<int>(tile_rows_.size()) * kv_heads_, threads = pool_->threads();
    if (threads == 1 || items >= kSplitBelow * threads) return 0;
    int last = 0;
    for (size_t tile = 0; tile < tile_rows_.size(); ++tile)
        for (int row = tile_rows_[tile]; row < tile_rows_[tile] + tile_sizes_[tile]; ++row)
            last = in_.positions[row] > last ? in_.positions[row] : last;
    const int segments = last / kSegment + 1;
    return segments > 1 && int64_t{items} * segments <= int64_t{kParts} * threads ? segments : 0;
}

AttentionPlan Tape::plan(int rows) {
    tile_rows_.clear();
    tile_sizes_.clear();
    for (int row = 0; row < rows; ++row) {
        const int owner = in_.seq_ids[row], start = in_.query_start_loc[owner], base = in_.num_computed_tokens[owner];
        const bool fresh = row == 0 || in_.seq_ids[row - 1] != owner || tile_sizes_.back() == tile_rows(group_);
        if (fresh) {
            tile_rows_.push_back(row);
            tile_sizes_.push_back(1);
        } else {
            ++tile_sizes_.back();
        }
        int32_t tail = AttentionPlan::kDirect;
        for (int a = row; a >= start && a - start != in_.positions[a] - base; a = in_.parents[a])
            tail = in_.positions[a] / kPage;
        tails_[row] = tail;
    }
    return {tile_rows_.data(), tile_sizes_.data(), tails_.data(), static_cast<int>(tile_rows_.size()), tail_pages_, segments(),
            reinterpret_cast<float*>(parts_.data()), done_.get()};
}

void Tape::run(int rows, int sequences, int head_rows) {
    check(rows, sequences, head_rows);
    for (auto& counter : counters_) counter->store(0, std::memory_order_relaxed);
    const Step step{in_, rows, sequences, head_rows, pool_->threads(), plan(rows), scratch_.data(), scratch_bytes_};
    pool_->run([&](int thread) {
        const Table& table = *table_;
        for (const Op& op : ops_) {
            std::visit(Overloaded{
                           [&](const Embed& o) { table.embed(o, step, thread); },
                           [&](const RmsNorm& o) { table.rms_norm(o, step, thread); },
                           [&](const Linear& o) { table.linear(o, step, thread); },
                           [&](const PerHead& o) { table.per_head(o, step, thread); },
                           [&](const Router& o) { table.router(o, step, thread); },
                           [&](const Choose& o) { table.choose(o, step, thread); },
                           [&](const Gather& o) { table.gather(o, step, thread); },
                           [&](const ExpertsIn& o) { table.experts_in(o, step, thread); },
                           [&](const ExpertsOut& o) { table.experts_out(o, step, thread); },
                           [&](const LatentWrite& o) { table.latent(o, step, thread); },
                           [&](const Rotary& o) { table.rotary(o, step, thread); },
                           [&](const Attention& o) { table.attention(o, step, thread); },
                           [&](const Select& o) { table.select(o, step, thread); },
                           [&](const Argmax& o) { table.argmax(o, step, thread); },
                       },
                       op);
            pool_->barrier();
        }
    });
}

}  // namespace wager
