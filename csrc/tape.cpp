#include "tape.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "sizes.h"

namespace wager {

namespace {

template <class... Ts>
struct Overloaded : Ts... {
    using Ts::operator()...;
};
template <class... Ts>
Overloaded(Ts...) -> Overloaded<Ts...>;

constexpr int kSplitBelow = 8;  // work items of attention per thread from which their split is even enough

// Whether an op does something in a step.
bool runs(const Tape::Op& op, const Step& step) {
    if (const auto* o = std::get_if<QuantiseRows>(&op)) return row_count(step, o->row_set) * o->per_row > kOwnRows;
    if (const auto* o = std::get_if<Copy>(&op)) return o->out != nullptr;
    if (std::get_if<Replay>(&op)) return step.replay_starts[step.sequences] > 0;
    return true;
}

// Marks a tape as in use during a scope, also when an exception leaves it.
class Exclusive {
  public:
    explicit Exclusive(std::atomic<bool>& busy) : busy_(busy) {
        if (busy_.exchange(true, std::memory_order_acquire)) throw std::runtime_error("another thread is using the tape");
    }
    ~Exclusive() { busy_.store(false, std::memory_order_release); }
    Exclusive(const Exclusive&) = delete;
    Exclusive& operator=(const Exclusive&) = delete;

  private:
    std::atomic<bool>& busy_;
};

}  // namespace

Tape::Tape(std::shared_ptr<Pool> pool, const Table* table, const BatchBuffers& in, bool whole_spans)
    : pool_(std::move(pool)),
      table_(table),
      source_(in),
      in_{in.tokens, in.positions, in.parents, in.slot_mapping, in.seq_ids, in.logits_indices, in.query_start_loc,
          in.num_computed_tokens, in.block_tables, in.state_uses, in.replays, in.max_rows, in.max_sequences, in.max_blocks},
      storage_(size_t{7} * in.max_rows + size_t{2 + kStateInts} * in.max_sequences + 1 +
               static_cast<size_t>(in.max_sequences) * in.max_blocks),
      tail_blocks_(in.max_rows / kBlockSize + 2),
      vocab_(INT32_MAX),
      positions_(INT32_MAX),
      num_blocks_(INT32_MAX),
      whole_spans_(whole_spans),
      done_(new std::atomic<int>[kSplitBelow * pool_->threads()]()),
      replay_starts_(in.max_sequences + 1) {
    tails_.resize(in.max_rows);
    ends_.resize(in.max_rows);
    every_row_.resize(in.max_rows);
    std::iota(every_row_.begin(), every_row_.end(), 0);
}

void Tape::limit_blocks(const CacheView& cache, bool writes) {
    num_blocks_ = std::min(num_blocks_, cache.num_blocks);
    if (writes) writers_.resize(num_blocks_);
}

void Tape::limit_slots(const StateView& states) {
    slots_ = slots_ == 0 ? states.slots : std::min(slots_, states.slots);
    slot_writers_.resize(slots_);
}

// The shape of its heads, for which there is scratch memory.
int Tape::shape_of(const Attention& op) {
    const int kv_heads = op.cache.kv_heads, group = op.heads / kv_heads, head_dim = op.cache.head_dim;
    for (size_t i = 0; i < shapes_.size(); ++i) {
        const Shape& known = shapes_[i];
        if (known.kv_heads == kv_heads && known.group == group && known.head_dim == head_dim) return static_cast<int>(i);
    }
    const size_t bytes = attention_scratch(group, head_dim, tail_blocks_);
    if (bytes > scratch_bytes_) {
        scratch_ = std::make_unique<Buffer>(bytes * pool_->threads());
        scratch_bytes_ = bytes;
    }
    shapes_.push_back({kv_heads, group, head_dim, {}, {}});
    return static_cast<int>(shapes_.size()) - 1;
}

// Sets what the linear op before this one prefetches after its own weights.
void Tape::link_prefetch(const Linear& op) {
    if (last_linear_ >= 0) {
        Linear& before = std::get<Linear>(ops_[last_linear_]);
        before.next = op.weight;
        before.next_panels = op.panels;
    }
    last_linear_ = static_cast<std::ptrdiff_t>(ops_.size());
}

// Products of quantised weights read quantised rows: room for them, and the op that makes them.
void Tape::add_quantise(const QuantiseRows& op) {
    if (takes_bf16(op.format)) return;
    const size_t blocks = op.k / kBlockInputs, rows = static_cast<size_t>(in_.max_rows) * op.per_row;
    const size_t own = blocks * (kOwnRows + (rows > kOwnRows ? table_->regrouped_rows : 0));
    if (own > own_blocks_) {
        own_blocks_ = own;
        own_ = std::make_unique<Buffer>(own_blocks_ * sizeof(ActivationBlock) * pool_->threads());
    }
    if (rows > kOwnRows && blocks * rows > shared_blocks_) {
        shared_blocks_ = blocks * rows;
        shared_ = std::make_unique<Buffer>(shared_blocks_ * sizeof(ActivationBlock));
    }
    ops_.push_back(op);
}

void Tape::quantise_before(const Op& op) {
    std::visit(Overloaded{
                   [&](const Linear& o) { add_quantise({o.x, o.weight.k, 1, o.row_set, o.weight.format}); },
                   [&](const PerHead& o) { add_quantise({o.x, o.heads * o.weight.k, 1, RowSet::rows, o.weight.format}); },
                   [&](const ExpertsIn& o) { add_quantise({o.x, o.weight.k, o.top_k, RowSet::rows, o.weight.format}); },
                   [&](const ExpertsOut& o) { add_quantise({o.x, o.weight.k, o.top_k, RowSet::rows, o.weight.format}); },
                   [](const auto&) {},
               },
               op);
}

size_t Tape::record(Op op) {
    const Exclusive use(busy_);
    quantise_before(op);
    std::visit(Overloaded{
                   [&](const Embed& o) { if (o.tokens == nullptr) vocab_ = std::min(vocab_, o.vocab); },
                   [&](const Linear& o) { link_prefetch(o); },
                   [&](const LatentWrite& o) { limit_blocks(o.cache, true), positions_ = std::min(positions_, o.positions); },
                   [&](const Rotary& o) { limit_blocks(o.cache, o.value_at >= 0), positions_ = std::min(positions_, o.positions); },
                   [&](Attention& o) {
                       limit_blocks(o.cache, false);
                       counters_.push_back(std::make_unique<std::atomic<int>>(0));
                       o.next = counters_.back().get();
                       o.shape = shape_of(o);
                   },
                   [&](const Convolve& o) { limit_slots(o.states); },
                   [&](const Recur& o) {
                       key_dim_ = std::max(key_dim_, o.states.key_dim);
                       tile_ = std::max(tile_, state_tile(o.states));
                   },
                   [](const auto&) {},
               },
               op);
    ops_.push_back(std::move(op));
    return ops_.size() - 1;
}

void Tape::redirect(size_t copy, float* out, int stride) {
    const Exclusive use(busy_);
    Copy& op = std::get<Copy>(ops_.at(copy));
    op.out = out;
    op.stride = stride;
}

void Tape::find_keys(int rows) {
    for (int row = 0; row < rows; ++row) {
        const int sequence = in_.seq_ids[row], start = in_.query_start_loc[sequence], base = in_.num_computed_tokens[sequence];
        int32_t tail = AttentionPlan::kDirect;
        for (int a = row; a >= start && a - start != in_.positions[a] - base; a = in_.parents[a])
            tail = in_.positions[a] / kBlockSize;
        tails_[row] = tail;
        ends_[row] = whole_spans_ ? base + in_.query_start_loc[sequence + 1] - start : in_.positions[row] + 1;
    }
}

void Tape::give_state_room(int sequences) {
    int most = 0;
    for (int s = 0; s < sequences; ++s)
        most = std::max(most, in_.query_start_loc[s + 1] - in_.query_start_loc[s] - state_use(s).known);
    state_room_floats_ = size_t(key_dim_) * (2 * std::max(most, kStateRows) + size_t(most) * tile_);
    const size_t bytes = state_room_floats_ * pool_->threads() * sizeof(float);
    if (state_room_ == nullptr || state_room_->size() < bytes) state_room_ = std::make_unique<Buffer>(bytes + bytes / 2);
}

// Rows of a sequence that follow each other as tiles, as even and `times` as many as are needed (one row each at most).
void Tape::cut(const Shape& shape, Tiles& tiles, const int32_t* rows, int count, int times) const {
    tiles.rows.clear();
    tiles.sizes.clear();
    tiles.outs.clear();
    const int most = tile_rows(shape.group);
    for (int first = 0, end; first < count; first = end) {
        const auto follows = [&](int i) { return rows[i] == rows[i - 1] + 1 && in_.seq_ids[rows[i]] == in_.seq_ids[rows[i - 1]]; };
        for (end = first + 1; end < count && follows(end);) ++end;
        const int size = end - first, parts = std::min(size, times * ((size + most - 1) / most));
        for (int i = 0; i < parts; ++i) {
            const int begin = static_cast<int>(part(size, i, parts));
            tiles.rows.push_back(rows[first] + begin);
            tiles.sizes.push_back(static_cast<int>(part(size, i + 1, parts)) - begin);
            tiles.outs.push_back(first + begin);
        }
    }
}

// Where tiles and kv heads alone would leave some threads idle, these share out the segments of tiles; where even those are few and
// no thread could have as many as the others, tiles are smaller.
AttentionPlan Tape::plan(const Shape& shape, Tiles& tiles, const int32_t* rows, int count) {
    const int threads = pool_->threads(), enough = kSplitBelow * threads;
    const auto items = [&] { return static_cast<int>(tiles.rows.size()) * shape.kv_heads; };
    cut(shape, tiles, rows, count, 1);
    int segments = 0;
    if (threads > 1 && items() < enough) {
        int last = 0;
        for (int i = 0; i < count; ++i) last = std::max(last, ends_[rows[i]]);
        segments = (last - 1) / kSegment + 1;
        if (const int few = items(); few * segments < enough && few % threads)
            cut(shape, tiles, rows, count, threads / std::gcd(few, threads));
        if (items() >= enough) segments = 0;
    }
    const size_t bytes = static_cast<size_t>(threads) * (segments + 1) * state_floats(shape.group, shape.head_dim) * sizeof(float);
    if (segments > 0 && (parts_ == nullptr || parts_->size() < bytes)) parts_ = std::make_unique<Buffer>(bytes + bytes / 2);
    return {tiles.rows.data(), tiles.sizes.data(), tiles.outs.data(), tails_.data(), ends_.data(),
            static_cast<int>(tiles.rows.size()), tail_blocks_, segments, nullptr, done_.get()};
}

void Tape::run(int rows, int sequences, int logits_rows, size_t first, size_t last) {
    const Exclusive use(busy_);
    replay(rows, sequences, logits_rows, first, last);
}

void Tape::Fed::copy(size_t from_row, size_t to_row) const {
    float* const to = state + to_row * n;
    if (!narrow) {
        std::copy_n(static_cast<const float*>(from) + from_row * n, n, to);
        return;
    }
    const uint16_t* const row = static_cast<const uint16_t*>(from) + from_row * n;
    for (int i = 0; i < n; ++i) {
        const uint32_t bits = uint32_t{row[i]} << 16;
        std::memcpy(to + i, &bits, sizeof bits);
    }
}

void Tape::follow(std::vector<Chain>& chains) {
    const Exclusive use(busy_);
    const Guess& guess = this->guess();
    struct Row {
        Chain* chain;
        int32_t position;
    };
    std::vector<Row> rows;
    if (static_cast<int>(chains.size()) != last_logits_rows_) throw std::out_of_range("the last pass had other chains");
    for (size_t i = 0; i < chains.size(); ++i) rows.push_back({&chains[i], in_.positions[in_.logits_indices[i]]});
    for (;;) {
        BatchWriter to(source_);
        size_t kept = 0;
        for (size_t row = 0; row < rows.size(); ++row) {
            auto [chain, position] = rows[row];
            const int32_t token = guess.tokens[row];
            if (token < 0) continue;
            chain->survival.push_back((chain->tokens.empty() ? 1.0 : chain->survival.back()) * guess.probabilities[row]);
            chain->tokens.push_back(token);
            if (chain->survival.back() < chain->least || static_cast<int>(chain->tokens.size()) >= chain->depth) continue;
            to.begin(++position);
            to.known(token);
            to.need_logits(to.rows() - 1);
            const int blocks = to.needed_blocks();
            if (!to.has_room(blocks) || blocks > static_cast<int>(chain->blocks.size()))
                throw std::out_of_range("position " + std::to_string(position) + " has no block");
            std::copy_n(chain->blocks.data(), blocks, to.block_table());
            to.states(nullptr, 1);
            to.end();
            fed_.copy(row, kept);
            guess.keys[kept] = guess.keys[row];
            ++guess.keys[kept].position;
            rows[kept++] = {chain, position};
        }
        to.finish();
        if (kept == 0) return;
        rows.resize(kept);
        const int count = static_cast<int>(kept);
        replay(count, count, count, fed_.first, ops_.size());
    }
}

void Tape::replay(int rows, int sequences, int logits_rows, size_t first, size_t last) {
    copy_inputs(rows, sequences, logits_rows);
    last_logits_rows_ = logits_rows;
    check(rows, sequences, logits_rows);
    if (key_dim_ > 0) give_state_room(sequences);
    for (auto& counter : counters_) counter->store(0, std::memory_order_relaxed);
    find_keys(rows);
    plans_.clear();
    for (Shape& shape : shapes_) {
        plans_.push_back(plan(shape, shape.tiles, every_row_.data(), rows));
        plans_.push_back(plan(shape, shape.logits_tiles, in_.logits_indices, logits_rows));
    }
    for (AttentionPlan& each : plans_) each.parts = reinterpret_cast<float*>(parts_ ? parts_->data() : nullptr);
    whole_plans_ = plans_;
    for (AttentionPlan& each : whole_plans_) each.segments = 0;  // one thread has nothing to share out
    const auto step_of = [&](int threads) {
        const auto& plans = threads == 1 ? whole_plans_ : plans_;
        return Step{in_, rows, sequences, logits_rows, threads, plans.data(), scratch_ ? scratch_->data() : nullptr, scratch_bytes_,
                    own_ ? reinterpret_cast<ActivationBlock*>(own_->data()) : nullptr,
                    shared_ ? reinterpret_cast<ActivationBlock*>(shared_->data()) : nullptr, own_blocks_,
                    replay_starts_.data(), state_room_ ? reinterpret_cast<float*>(state_room_->data()) : nullptr, state_room_floats_};
    };
    steps_.clear();
    for (int threads = 1; threads <= pool_->threads(); ++threads) steps_.push_back(step_of(threads));
    stages_.clear();
    for (size_t i = first; i < std::min(last, ops_.size()); ++i)
        if (runs(ops_[i], steps_[0])) stages_.push_back(&ops_[i]);
    pool_->run(static_cast<int>(stages_.size()), [&](int stage, int thread, int threads) {
        const auto run_op = [&, &step = steps_[threads - 1]](const auto& op) {
            const Kernel<std::decay_t<decltype(op)>>& kernel = *table_;
            kernel.run(op, step, thread);
        };
        std::visit(run_op, *stages_[stage]);
    });
}

// ---- The integer inputs of a step: copied, then checked, before the tape runs over them ----

namespace {

void require(bool ok, const char* what, int at, int value, const char* why = "outside the tape's buffers") {
    if (!ok) {
        throw std::out_of_range(std::string(what) + " is " + std::to_string(value) + " at index " + std::to_string(at) +
                                ", " + why);
    }
}

}  // namespace

void Tape::check_row(int row, int sequences) const {
    const int sequence = in_.seq_ids[row], position = in_.positions[row];
    require(sequence >= 0 && sequence < sequences, "seq_ids", row, sequence);
    require(in_.tokens[row] >= 0 && in_.tokens[row] < vocab_, "tokens", row, in_.tokens[row]);
    require(position >= 0 && position < positions_ && position / kBlockSize < in_.max_blocks, "positions", row, position);
    const int first = in_.query_start_loc[sequence], end = in_.query_start_loc[sequence + 1];
    require(row >= first, "query_start_loc", sequence, first, "past a row of its sequence");
    check_path(row);
    require(row < end, "query_start_loc", sequence + 1, end, "not a row of its sequence");
}

// A path is followed from row to row and its keys are ordered by position, so each parent must be one position before.
void Tape::check_path(int row) const {
    const int sequence = in_.seq_ids[row], position = in_.positions[row], parent = in_.parents[row];
    require(parent >= -1 && parent < row, "parents", row, parent);
    if (parent < 0) {
        const int start = in_.num_computed_tokens[sequence];
        require(position == start, "positions", row, position, "not the base of its sequence");
        return;
    }
    require(in_.seq_ids[parent] == sequence, "parents", row, parent, "a row of another sequence");
    require(position == in_.positions[parent] + 1, "positions", row, position, "not one past its parent's");
}

// Row j of a sequence's span (of a tree, too) is cached at index num_computed_tokens + j of the sequence's block table. A
// slot elsewhere would overwrite what another sequence has cached, and so would a block that two sequences write to.
void Tape::check_slot(int row, int sequences) {
    const int sequence = in_.seq_ids[row], first = in_.query_start_loc[sequence], slot = in_.slot_mapping[row];
    const int at = in_.num_computed_tokens[sequence] + row - first, index = at / kBlockSize, offset = at % kBlockSize;
    require(index < in_.max_blocks, "slot_mapping", row, slot, "past the end of its sequence's block table");
    const int block = block_table(sequence)[index];
    require(block >= 0 && block < num_blocks_, "block_tables", index, block);
    if (slot != int64_t{block} * kBlockSize + offset) {
        const std::string wanted = std::to_string(int64_t{block} * kBlockSize + offset);
        const std::string why = "not " + wanted + " (entry " + std::to_string(index) + " of the block table of sequence " +
                                std::to_string(sequence) + " is block " + std::to_string(block) + ", offset " +
                                std::to_string(offset) + ")" + sequence_of(slot < 0 ? -1 : slot / kBlockSize, sequences);
        require(false, "slot_mapping", row, slot, why.c_str());
    }
    if (writers_.empty() || (row > first && offset > 0)) return;
    Writer& writer = writers_[block];
    if (writer.run == runs_) {
        const std::string why = "in block " + std::to_string(block) + ", which sequence " + std::to_string(writer.sequence) +
                                " writes to in the same step";
        require(false, "slot_mapping", row, slot, why.c_str());
    }
    writer = {runs_, sequence};
}

// "; block b belongs to sequence s" for the first sequence that has the block in the part of its table that it uses.
std::string Tape::sequence_of(int block, int sequences) const {
    for (int s = 0; s < sequences; ++s) {
        const int end = in_.num_computed_tokens[s] + in_.query_start_loc[s + 1] - in_.query_start_loc[s];
        for (int i = 0; i < in_.max_blocks && i * kBlockSize < end; ++i)
            if (block_table(s)[i] == block)
                return "; block " + std::to_string(block) + " belongs to sequence " + std::to_string(s);
    }
    return "";
}

void Tape::check_logits_indices(int rows, int logits_rows) const {
    for (int i = 0; i < logits_rows; ++i) {
        const int row = in_.logits_indices[i];
        require(row >= 0 && row < rows, "logits_indices", i, row);
    }
}

// Copied first: another thread may write to the caller's buffers between the checks and the run.
void Tape::copy_inputs(int rows, int sequences, int logits_rows) {
    require(rows >= 0 && rows <= in_.max_rows, "rows", 0, rows);
    require(sequences >= 0 && sequences <= in_.max_sequences, "sequences", 0, sequences);
    require(logits_rows >= 0 && logits_rows <= in_.max_rows, "logits_rows", 0, logits_rows);
    int32_t* to = storage_.data();
    const auto copy = [&](const int32_t* from, int n, int room) {
        int32_t* const at = to;
        std::copy_n(from, n, at);
        to += room;
        return at;
    };
    in_.tokens = copy(source_.tokens, rows, in_.max_rows);
    in_.positions = copy(source_.positions, rows, in_.max_rows);
    in_.parents = copy(source_.parents, rows, in_.max_rows);
    in_.slot_mapping = copy(source_.slot_mapping, rows, in_.max_rows);
    in_.seq_ids = copy(source_.seq_ids, rows, in_.max_rows);
    in_.logits_indices = copy(source_.logits_indices, logits_rows, in_.max_rows);
    in_.query_start_loc = copy(source_.query_start_loc, sequences + 1, in_.max_sequences + 1);
    in_.num_computed_tokens = copy(source_.num_computed_tokens, sequences, in_.max_sequences);
    in_.replays = copy(source_.replays, in_.max_rows, in_.max_rows);
    in_.state_uses = copy(source_.state_uses, kStateInts * sequences, kStateInts * in_.max_sequences);
    in_.block_tables = to;
    for (int s = 0; s < sequences; ++s) {  // of each table the entries that its sequence can use
        const int64_t end = (int64_t{in_.num_computed_tokens[s]} + rows) / kBlockSize + 1;
        const int n = static_cast<int>(std::clamp<int64_t>(end, 0, in_.max_blocks));
        copy(source_.block_tables + static_cast<size_t>(s) * in_.max_blocks, n, in_.max_blocks);
    }
}

void Tape::check(int rows, int sequences, int logits_rows) {
    const int32_t* starts = in_.query_start_loc;
    for (int s = 0; s < sequences; ++s) {
        require(in_.num_computed_tokens[s] >= 0, "num_computed_tokens", s, in_.num_computed_tokens[s]);
        require(starts[s] >= 0 && starts[s] < rows, "query_start_loc", s, starts[s]);
    }
    require(starts[sequences] == rows, "query_start_loc", sequences, starts[sequences], "not the number of rows");
    ++runs_;
    int checked = -1, blocks = 0;  // entries of the block table already seen, of the sequence before
    for (int row = 0; row < rows; ++row) {
        check_row(row, sequences);
        const int sequence = in_.seq_ids[row];
        if (sequence != checked) blocks = 0;
        checked = sequence;
        const int32_t* table = block_table(sequence);
        for (; blocks <= in_.positions[row] / kBlockSize; ++blocks)
            require(table[blocks] >= 0 && table[blocks] < num_blocks_, "block_tables", blocks, table[blocks]);
        check_slot(row, sequences);
    }
    for (int s = 0; s < sequences; ++s)
        require(in_.seq_ids[starts[s]] == s, "query_start_loc", s, starts[s], "not a row of its sequence");
    check_logits_indices(rows, logits_rows);
    if (slots_ > 0) check_states(sequences);
}

// A slot that a sequence writes to is written by no other, and read by no other, in the same step.
void Tape::write_slot(int slot, int sequence, const char* what) {
    require(slot >= 0 && slot < slots_, what, sequence, slot);
    require(slot_writers_[slot].run != runs_, what, sequence, slot, "a slot of states that is written to twice in a step");
    slot_writers_[slot] = {runs_, sequence};
}

void Tape::check_states(int sequences) {
    int64_t replays = 0;
    for (int s = 0; s < sequences; ++s) {
        const StateUse& use = state_use(s);
        const int first = in_.query_start_loc[s], rows = in_.query_start_loc[s + 1] - first;
        require(use.known > 0 && use.known <= rows, "known rows", s, use.known, "not of its sequence");
        for (int row = first + 1; row < first + use.known; ++row)
            require(in_.parents[row] == row - 1, "parents", row, in_.parents[row], "not the known row before");
        for (int row = first + use.known; row < first + rows; ++row)
            require(in_.parents[row] >= first + use.known - 1, "parents", row, in_.parents[row], "a known row but the last");
        require(use.replays >= 0 && use.replays <= in_.num_computed_tokens[s], "replays", s, use.replays);
        require(use.source >= -1 && use.source < slots_, "state", s, use.source);
        require(use.source >= 0 || use.replays == in_.num_computed_tokens[s], "state", s, use.source, "none where a text goes on");
        write_slot(use.state, s, "state");
        for (int save = 0; save < kSaves; ++save)
            if (use.save_at[save] >= 0) write_slot(use.save_slot[save], s, "saved state");
        replay_starts_[s] = static_cast<int32_t>(replays);
        replays += use.replays;
        require(replays <= in_.max_rows, "replays", s, use.replays, "more than the rows of a step");
    }
    replay_starts_[sequences] = static_cast<int32_t>(replays);
    for (int i = 0; i < replays; ++i) require(in_.replays[i] >= 0 && in_.replays[i] < in_.max_rows, "replays", i, in_.replays[i]);
    for (int s = 0; s < sequences; ++s) {
        const int source = state_use(s).source;
        if (source < 0 || slot_writers_[source].run != runs_) continue;
        require(slot_writers_[source].sequence == s && source == state_use(s).state, "state", s, source, "written to in the same step");
    }
}

}  // namespace wager
