// The bindings for what a step does beside the kernels. They read the engine's own values (types.py), since making arrays of
// these first would take longer than the work: after a pass the processor's caches are cold.
#include "step_bindings.h"

#include "batch.h"
#include "values.h"

namespace nb = nanobind;
using wager::as_int, wager::as_int32, wager::Items, wager::Name, wager::ValueType;

namespace {

using Address = uintptr_t;

// Packs spans and drafts into the buffers of a tape. The names of the attributes live as long as the process.
class BatchPacker {
  public:
    BatchPacker(nb::tuple addresses, int max_rows, int max_sequences, int max_blocks) {
        const auto at = [&](int i) { return reinterpret_cast<int32_t*>(nb::cast<Address>(addresses[i])); };
        buffers_ = {at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), max_rows, max_sequences, max_blocks};
    }

    // (rows, sequences, logits rows, blocks of the longest span); None for values that are not as they should be, or that do
    // not fit: verify/pack.py says then what is wrong. A value is never kept beyond the call.
    nb::object pack(nb::handle spans, nb::handle drafts, nb::handle block_tables) const {
        wager::BatchWriter to(buffers_);
        Items all;
        if (!all.read(spans.ptr()) || !PyDict_Check(drafts.ptr()) || !PyDict_Check(block_tables.ptr())) return nb::none();
        for (Py_ssize_t i = 0; i < all.size; ++i)
            if (!add(to, all.items[i], drafts.ptr(), block_tables.ptr())) {
                PyErr_Clear();
                return nb::none();
            }
        to.finish();
        return nb::make_tuple(to.rows(), to.sequences(), to.logits_rows(), to.blocks());
    }

  private:
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
    const Name seq_id_{"seq_id"};
    const Name tokens_{"tokens"};
    const Name parents_{"parents"};
    const Name needs_logits_{"needs_logits"};
    const Name num_computed_tokens_{"num_computed_tokens"};
};

// Follows the guesses that are the target's greedy tokens: verify/accept.py's `match` with the greedy token of every row.
class GreedyMatcher {
  public:
    GreedyMatcher(nb::handle verdict, nb::handle outcome)
        : verdict_(verdict, {"seq_id", "accepted", "tokens"}),
          outcome_(outcome, {"verdict", "drafted", "drafted_by", "logprobs", "error"}) {}

    // The outcomes of the spans that need logits, by sequence, in their order; None in place of those that Python has to
    // find: of sequences that are not greedy, or with a row whose token is unknown (-1). None for values that are not as
    // they should be. `greedy` are the tokens of all rows of logits.
    nb::object match(nb::handle spans, nb::handle drafts, nb::handle greedy, nb::handle sequences) const {
        Items all, tokens;
        if (!all.read(spans.ptr()) || !tokens.read(greedy.ptr())) return nb::none();
        if (!PyDict_Check(drafts.ptr()) || !PyDict_Check(sequences.ptr())) return nb::none();
        nb::dict outcomes;
        Py_ssize_t first = 0;
        for (Py_ssize_t i = 0; i < all.size; ++i) {
            const nb::object seq_id = seq_id_.of(all.items[i]), needs_logits = needs_logits_.of(all.items[i]);
            if (!seq_id.is_valid() || !needs_logits.is_valid()) return irregular();
            if (needs_logits.ptr() != Py_True) continue;
            PyObject* const draft = PyDict_GetItemWithError(drafts.ptr(), seq_id.ptr());
            Guesses guesses;
            if (draft != nullptr && !guesses.read(*this, draft)) return irregular();
            if (first + guesses.tokens.size >= tokens.size) return irregular();
            const nb::object greedily = is_greedy(PyDict_GetItemWithError(sequences.ptr(), seq_id.ptr()));
            if (!greedily.is_valid()) return irregular();
            nb::object outcome = nb::none();
            if (greedily.ptr() == Py_True) outcome = follow(seq_id, draft, guesses, tokens.items + first);
            if (!outcome.is_valid()) return irregular();
            outcomes[seq_id] = outcome;
            first += 1 + guesses.tokens.size;
        }
        return outcomes;
    }

  private:
    struct Guesses {
        nb::object token_tuple, parent_tuple;
        Items tokens, parents;

        bool read(const GreedyMatcher& names, PyObject* draft) {
            token_tuple = names.tokens_.of(draft), parent_tuple = names.parents_.of(draft);
            return tokens.read(token_tuple.ptr()) && parents.read(parent_tuple.ptr()) && tokens.size == parents.size;
        }
    };

    nb::object is_greedy(PyObject* sequence) const { return sequence == nullptr ? nb::object() : greedy_.of(sequence); }

    static nb::object irregular() {
        PyErr_Clear();
        return nb::none();
    }

    // The outcome of one sequence, None where a row's token is unknown; not valid where a value is no int.
    nb::object follow(nb::handle seq_id, PyObject* draft, const Guesses& guesses, PyObject** targets) const {
        int64_t token = 0;
        for (Py_ssize_t row = 0; row <= guesses.tokens.size; ++row) {
            if (!as_int(targets[row], token)) return {};
            if (token < 0) return nb::none();
        }
        nb::list accepted, emitted;
        int64_t current = -1;
        while (true) {
            if (!as_int(targets[1 + current], token)) return {};
            emitted.append(nb::handle(targets[1 + current]));
            int64_t next = current + 1, parent = 0, guess = 0;
            for (; next < guesses.tokens.size; ++next) {
                if (!as_int(guesses.parents.items[next], parent) || !as_int(guesses.tokens.items[next], guess)) return {};
                if (parent == current && guess == token) break;
            }
            if (next >= guesses.tokens.size) break;
            accepted.append(nb::int_(next));
            current = next;
        }
        return outcome(seq_id, draft, guesses.tokens.size, accepted, emitted);
    }

    nb::object outcome(nb::handle seq_id, PyObject* draft, Py_ssize_t drafted, const nb::list& accepted,
                       const nb::list& emitted) const {
        const nb::object nodes = nb::steal(PyList_AsTuple(accepted.ptr())), ids = nb::steal(PyList_AsTuple(emitted.ptr()));
        const nb::object verdict = verdict_.make({seq_id, nodes, ids});
        nb::object drafted_by = target_alone_;
        if (accepted.size() > 0) {
            const nb::object drafter = drafter_.of(draft);
            drafted_by = nb::steal(PyTuple_New(accepted.size() + 1));
            for (size_t i = 0; i < accepted.size(); ++i) PyTuple_SET_ITEM(drafted_by.ptr(), i, Py_NewRef(drafter.ptr()));
            PyTuple_SET_ITEM(drafted_by.ptr(), accepted.size(), Py_NewRef(empty_.ptr()));
        }
        return outcome_.make({verdict, nb::int_(drafted), drafted_by, nothing_, empty_});
    }

    ValueType verdict_, outcome_;
    const nb::object empty_ = nb::str(""), nothing_ = nb::tuple(), target_alone_ = nb::make_tuple(empty_);
    const Name seq_id_{"seq_id"}, tokens_{"tokens"}, parents_{"parents"}, needs_logits_{"needs_logits"}, greedy_{"greedy"};
    const Name drafter_{"drafter"};
};

}  // namespace

void bind_step(nb::module_& m) {
    nb::class_<BatchPacker>(m, "BatchPacker")
        .def(nb::init<nb::tuple, int, int, int>())
        .def("pack", &BatchPacker::pack);
    nb::class_<GreedyMatcher>(m, "GreedyMatcher")
        .def(nb::init<nb::handle, nb::handle>())
        .def("match", &GreedyMatcher::match);
}
