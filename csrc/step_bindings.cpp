// The binding that packs a step: reads spans and drafts as plain tuples and writes the integers that a tape reads.
#include "step_bindings.h"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <string>

#include "batch.h"
#include "block_pool.h"
#include "values.h"

namespace nb = nanobind;
using wager::as_int, wager::as_int32, wager::BlockTable, wager::CacheError, wager::CallError, wager::Items;

namespace {

// One span with its draft, and the blocks of its sequence in `pool`.
struct SpanRows {
    std::string name;
    int64_t start = 0;
    Items tokens, guesses, parents;
    nb::object listed[2];  // what guesses and parents are read from
    bool needs_logits = false;
    std::shared_ptr<BlockTable> table;

    SpanRows(PyObject* span, nb::handle drafts, const wager::BlockPool& pool) {
        static const wager::Name of_tokens("tokens"), of_parents("parents");
        PyObject** const fields = wager::fields_of(span, 4, "a span is five values");
        name = nb::cast<std::string>(nb::handle(fields[0]));
        if (!as_int(fields[1], start) || start < 0) throw std::invalid_argument("a position is no int from 0 on");
        const nb::object draft = wager::value_of(drafts, fields[0]);
        if (draft.is_valid()) {
            listed[0] = of_tokens.require(draft.ptr()), listed[1] = of_parents.require(draft.ptr());
            if (!guesses.read(listed[0].ptr()) || !parents.read(listed[1].ptr()) || guesses.size != parents.size)
                throw std::invalid_argument("tokens and parents are lists or tuples, and guesses have a parent each");
        }
        if (!tokens.read(fields[2])) throw std::invalid_argument("the tokens of a span are a list or a tuple");
        needs_logits = fields[3] == Py_True;
        if (tokens.size == 0)
            throw CallError("The span of '" + name + "' has no rows.", "Run at least the last known token.");
        if (guesses.size > 0 && !needs_logits)
            throw CallError("A draft for '" + name + "' would follow a prompt chunk.", "Draft for spans that need logits only.");
        table = pool.find(name);
        if (!table) throw nb::key_error(name.c_str());
    }

    int64_t rows() const { return tokens.size + guesses.size; }
};

class BatchPacker {
  public:
    // `view` makes the batch of (rows, sequences, logits rows, blocks of the longest span): views of the buffers.
    BatchPacker(nb::tuple addresses, int max_rows, int max_sequences, int max_blocks, nb::object view) : view_(view) {
        const auto in = [&](int i) { return at<int32_t>(nb::cast<Address>(addresses[i])); };
        buffers_ = {in(0), in(1), in(2), in(3), in(4), in(5), in(6), in(7), in(8), in(9), in(10), max_rows, max_sequences,
                    max_blocks};
    }

    nb::object pack(nb::handle spans, nb::handle drafts, const wager::BlockPool& pool) {
        packed = sizes = nb::none();
        const Items listed = wager::items_of(spans, "spans are a list");
        std::vector<SpanRows> all;
        all.reserve(listed.size);
        int64_t rows = 0;
        for (Py_ssize_t i = 0; i < listed.size; ++i) {
            all.emplace_back(listed.items[i], drafts, pool);
            rows += all.back().rows();
        }
        if (rows > buffers_.max_rows)
            throw CallError("A step has " + std::to_string(rows) + " rows; the target takes " + std::to_string(buffers_.max_rows) + ".",
                            "A policy may admit at most the rows of its budget.");
        if (static_cast<int64_t>(all.size()) > buffers_.max_sequences)
            throw CallError("A step has " + std::to_string(all.size()) + " sequences; the target takes " +
                                std::to_string(buffers_.max_sequences) + ".",
                            "Raise max_sequences.");
        wager::BatchWriter to(buffers_);
        for (const SpanRows& each : all) add(to, each);
        to.finish();
        Batch& batch = batch_of({to.rows(), to.sequences(), to.logits_rows(), to.blocks()});
        sizes = batch.sizes;
        packed = batch.views;
        return packed;
    }

    nb::object packed = nb::none(), sizes = nb::none();  // of what the buffers hold

  private:
    static constexpr size_t kMostBatches = 256;  // that are kept; each is some views of the buffers
    using Sizes = std::array<int, 4>;
    struct Batch {
        nb::object views, sizes;
    };

    Batch& batch_of(const Sizes& sizes) {
        const auto found = batches_.find(sizes);
        if (found != batches_.end()) return found->second;
        if (batches_.size() == kMostBatches) batches_.clear();
        const nb::object made = nb::make_tuple(sizes[0], sizes[1], sizes[2], sizes[3]);
        return batches_[sizes] = {view_(*made), made};
    }

    static int32_t token_at(const Items& items, Py_ssize_t index) {
        int32_t token = 0;
        if (!as_int32(items.items[index], token)) throw std::invalid_argument("a token is no int of 32 bits");
        return token;
    }

    static void add(wager::BatchWriter& to, const SpanRows& span) {
        if (!to.begin(span.start)) throw std::invalid_argument("a position is too large");
        for (Py_ssize_t i = 0; i < span.tokens.size; ++i) to.known(token_at(span.tokens, i));
        const int last = to.rows() - 1;
        for (Py_ssize_t i = 0; i < span.guesses.size; ++i) {
            int64_t parent = 0;
            if (!as_int(span.parents.items[i], parent) || !to.guess(token_at(span.guesses, i), parent, last))
                throw std::invalid_argument("a guess's parent does not precede it");
        }
        if (span.needs_logits) to.need_logits(last);
        add_blocks(to, span);
    }

    static void add_blocks(wager::BatchWriter& to, const SpanRows& span) {
        const int needed = to.needed_blocks();
        const std::vector<int32_t>& blocks = span.table->blocks;
        const auto held = static_cast<int64_t>(blocks.size());
        if (held < needed)
            throw CacheError("'" + span.name + "' holds " + std::to_string(held) + " blocks and its rows need " +
                                 std::to_string(needed) + ".",
                             "Reserve before packing.");
        if (!to.has_room(needed))
            throw CallError("A span needs " + std::to_string(needed) + " blocks, more than the target takes.", "Raise max_context.");
        std::copy_n(blocks.begin(), needed, to.block_table());
        if (!to.states(span.table.get(), static_cast<int>(span.tokens.size)))
            throw CacheError("'" + span.name + "' has more accepted guesses than a pass has rows.", "This is a defect in wager.");
        to.end();
    }

    wager::BatchBuffers buffers_;
    nb::object view_;
    std::map<Sizes, Batch> batches_;
};

}  // namespace

void bind_step(nb::module_& m) {
    nb::class_<BatchPacker>(m, "BatchPacker")
        .def(nb::init<nb::tuple, int, int, int, nb::object>())
        .def("pack", &BatchPacker::pack)
        .def_ro("packed", &BatchPacker::packed)
        .def_ro("sizes", &BatchPacker::sizes);
}
