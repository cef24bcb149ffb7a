// The binding that packs a step. Like those beside it, it reads the engine's own values (types.py), since making arrays of
// these first would take longer than the work: after a pass the processor's caches are cold.
#include "step_bindings.h"

#include <array>
#include <map>

#include "batch.h"
#include "values.h"

namespace nb = nanobind;
using wager::as_int, wager::as_int32, wager::Items, wager::Name;

namespace {

using Address = uintptr_t;

// Packs spans and drafts into the buffers of a tape. The names of the attributes live as long as the process.
class BatchPacker {
  public:
    // `view` makes the batch of (rows, sequences, logits rows, blocks of the longest span): views of the buffers.
    BatchPacker(nb::tuple addresses, int max_rows, int max_sequences, int max_blocks, nb::object view) : view_(view) {
        const auto at = [&](int i) { return reinterpret_cast<int32_t*>(nb::cast<Address>(addresses[i])); };
        buffers_ = {at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), max_rows, max_sequences, max_blocks};
    }

    // The batch; None for values that are not as they should be, or that do not fit: verify/pack.py says then what is wrong. A
    // value is never kept beyond the call.
    nb::object pack(nb::handle spans, nb::handle drafts, nb::handle block_tables) {
        wager::BatchWriter to(buffers_);
        packed = sizes = nb::none();
        Items all;
        if (!all.read(spans.ptr()) || !PyDict_Check(drafts.ptr()) || !PyDict_Check(block_tables.ptr())) return nb::none();
        for (Py_ssize_t i = 0; i < all.size; ++i)
            if (!add(to, all.items[i], drafts.ptr(), block_tables.ptr())) {
                PyErr_Clear();
                return nb::none();
            }
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

    bool add(wager::BatchWriter& to, PyObject* span, PyObject* drafts, PyObject* block_tables) const {
        const nb::object seq_id = seq_id_.of(span), tokens = tokens_.of(span), needs_logits = needs_logits_.of(span);
        int64_t computed = 0;
        Items known;
        if (!seq_id.is_valid() || !needs_logits.is_valid() || !known.read(tokens.ptr()) || known.size == 0) return false;
        if (!as_int(num_computed_tokens_.of(span).ptr(), computed) || !to.begin(computed)) return false;
        for (Py_ssize_t i = 0; i < known.size; ++i) {
            int32_t token = 0;
            if (!as_int32(known.items[i], token) || !to.known(token)) return false;
        }
        const int last = to.rows() - 1;
        const bool live = needs_logits.ptr() == Py_True;
        PyObject* const draft = PyDict_GetItemWithError(drafts, seq_id.ptr());
        if (draft != nullptr && !add_guesses(to, draft, last, live)) return false;
        if (live) to.need_logits(last);
        return add_blocks(to, PyDict_GetItemWithError(block_tables, seq_id.ptr()));
    }

    bool add_guesses(wager::BatchWriter& to, PyObject* draft, int last, bool live) const {
        const nb::object tokens = tokens_.of(draft), parents = parents_.of(draft);
        Items guesses, before;
        if (!guesses.read(tokens.ptr()) || !before.read(parents.ptr()) || before.size != guesses.size) return false;
        if (guesses.size > 0 && !live) return false;
        for (Py_ssize_t i = 0; i < guesses.size; ++i) {
            int32_t token = 0;
            int64_t parent = 0;
            if (!as_int32(guesses.items[i], token) || !as_int(before.items[i], parent)) return false;
            if (!to.guess(token, parent, last)) return false;
        }
        return true;
    }

    static bool add_blocks(wager::BatchWriter& to, nb::handle table) {
        Items blocks;
        const int needed = to.needed_blocks();
        if (!blocks.read(table.ptr()) || blocks.size < needed || !to.has_room(needed)) return false;
        int32_t* const target = to.block_table();
        for (int i = 0; i < needed; ++i)
            if (!as_int32(blocks.items[i], target[i])) return false;
        to.end();
        return true;
    }

    wager::BatchBuffers buffers_;
    nb::object view_;
    std::map<Sizes, Batch> batches_;
    const Name seq_id_{"seq_id"};
    const Name tokens_{"tokens"};
    const Name parents_{"parents"};
    const Name needs_logits_{"needs_logits"};
    const Name num_computed_tokens_{"num_computed_tokens"};
};

}  // namespace

void bind_step(nb::module_& m) {
    nb::class_<BatchPacker>(m, "BatchPacker")
        .def(nb::init<nb::tuple, int, int, int, nb::object>())
        .def("pack", &BatchPacker::pack)
        .def_ro("packed", &BatchPacker::packed)
        .def_ro("sizes", &BatchPacker::sizes);
}
