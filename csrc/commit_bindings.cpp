// Writes what a pass emitted to the sequences that simply go on: engine/scheduler.py has the same in Python, for every
// sequence, and does itself what is left here.
#include "block_lists.h"
#include "step_bindings.h"
#include "values.h"

namespace nb = nanobind;
using wager::as_int, wager::BlockLists, wager::Items, wager::Name, wager::ValueType;

namespace {

class PlainCommitter {
  public:
    PlainCommitter(nb::handle delta, nb::dict sequences, nb::handle lists, int64_t max_context)
        : delta_(delta, {"request_id", "index", "token_ids", "text", "drafted_by", "logprobs", "finish_reason", "error", "stats",
                         "error_status"}),
          sequences_(sequences),
          blocks_(lists),
          max_context_(max_context) {}

    // Of each span the delta, or None; the indices of the spans that are left, which nothing was written for; the sequences
    // with blocks to register or to free that were not; and the number of guesses verified in the others.
    nb::tuple commit(nb::list spans, nb::dict outcomes, nb::object now) const {
        nb::list deltas, left, unsettled;
        int64_t drafted = 0;
        for (size_t i = 0; i < spans.size(); ++i) {
            Part part;
            if (read(part, spans[i], outcomes)) {
                deltas.append(write(part, now));
                drafted += part.drafted;
                if (!blocks_.settle(part.seq_id.ptr(), part.known.ptr(), part.computed)) unsettled.append(part.sequence);
            } else {
                PyErr_Clear();
                deltas.append(nb::none());
                left.append(nb::int_(i));
            }
        }
        return nb::make_tuple(deltas, left, unsettled, drafted);
    }

  private:
    // One sequence's part of the step, checked before anything is written.
    struct Part {
        nb::object seq_id, sequence, known, outcome, tokens, text;
        int64_t computed = 0, drafted = 0, accepted = 0;
    };

    bool read(Part& part, nb::handle span, const nb::dict& outcomes) const {
        part.seq_id = seq_id_.of(span.ptr());
        if (!part.seq_id.is_valid()) return false;
        part.outcome = nb::borrow(PyDict_GetItemWithError(outcomes.ptr(), part.seq_id.ptr()));
        part.sequence = nb::borrow(PyDict_GetItemWithError(sequences_.ptr(), part.seq_id.ptr()));
        if (!part.outcome.is_valid() || !part.sequence.is_valid()) return false;
        const nb::object error = error_.of(part.outcome.ptr()), span_tokens = tokens_.of(span.ptr());
        if (!error.is_valid() || !PyUnicode_Check(error.ptr()) || PyUnicode_GET_LENGTH(error.ptr()) != 0) return false;
        Items rows;
        if (!as_int(drafted_.of(part.outcome.ptr()).ptr(), part.drafted) || !rows.read(span_tokens.ptr())) return false;
        if (!as_int(num_computed_tokens_.of(span.ptr()).ptr(), part.computed) || !read_verdict(part)) return false;
        part.computed += rows.size + part.accepted;
        return goes_on(part) && read_text(part) && blocks_.knows(part.seq_id.ptr());
    }

    // Accepted guesses must be a chain's: then their keys and values lie where they belong.
    bool read_verdict(Part& part) const {
        const nb::object verdict = verdict_.of(part.outcome.ptr());
        if (!verdict.is_valid()) return false;
        const nb::object accepted = accepted_.of(verdict.ptr());
        part.tokens = tokens_.of(verdict.ptr());
        Items nodes;
        if (!nodes.read(accepted.ptr()) || !part.tokens.is_valid() || !PyTuple_Check(part.tokens.ptr())) return false;
        for (Py_ssize_t i = 0; i < nodes.size; ++i) {
            int64_t node = 0;
            if (!as_int(nodes.items[i], node) || node != i) return false;
        }
        part.accepted = nodes.size;
        return PyTuple_GET_SIZE(part.tokens.ptr()) > 0;
    }

    // Neither the length nor a stop token ends it, and it has no grammar, which may.
    bool goes_on(Part& part) const {
        if (constrained_.of(part.sequence.ptr()).ptr() != Py_False) return false;
        part.known = tokens_.of(part.sequence.ptr());
        int64_t longest = 0;
        if (!part.known.is_valid() || !PyList_Check(part.known.ptr())) return false;
        if (!as_int(max_length_.of(part.sequence.ptr()).ptr(), longest)) return false;
        const int64_t length = PyList_GET_SIZE(part.known.ptr()) + PyTuple_GET_SIZE(part.tokens.ptr());
        if (length >= longest || length >= max_context_) return false;
        const nb::object stops = stop_ids_.of(part.sequence.ptr());
        if (!stops.is_valid()) return false;
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(part.tokens.ptr()); ++i)
            if (PySet_Contains(stops.ptr(), PyTuple_GET_ITEM(part.tokens.ptr(), i)) != 0) return false;
        return true;
    }

    // The texts of the tokens, if they are known to be whole characters after what came before.
    bool read_text(Part& part) const {
        const nb::object detokenizer = text_.of(part.sequence.ptr());
        if (!detokenizer.is_valid()) return false;
        part.text = empty_;
        if (detokenizer.is_none()) return true;
        const nb::object decoder = unstopped_.of(detokenizer.ptr());
        if (!decoder.is_valid() || decoder.is_none()) return false;
        const nb::object texts = known_texts_.of(decoder.ptr());
        if (!texts.is_valid() || !PyDict_Check(texts.ptr())) return false;
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(part.tokens.ptr()); ++i) {
            const nb::object text = text_of(texts.ptr(), PyTuple_GET_ITEM(part.tokens.ptr(), i));
            if (!text.is_valid()) return false;
            part.text = i == 0 ? text : nb::steal(PyUnicode_Concat(part.text.ptr(), text.ptr()));
            if (!part.text.is_valid()) return false;
        }
        return true;
    }

    // A dict of a class of its own may find the text of a token that it does not have yet.
    static nb::object text_of(PyObject* texts, PyObject* token) {
        PyObject* const known = PyDict_GetItemWithError(texts, token);
        if (known != nullptr || PyDict_CheckExact(texts)) return nb::borrow(known);
        return nb::steal(PyObject_GetItem(texts, token));
    }

    nb::object write(const Part& part, nb::handle now) const {
        const Py_ssize_t size = PyList_GET_SIZE(part.known.ptr());
        if (PyList_SetSlice(part.known.ptr(), size, size, part.tokens.ptr()) < 0) throw nb::python_error();
        num_computed_tokens_.set(part.sequence.ptr(), nb::int_(part.computed));
        const nb::object counters = require(counters_.of(part.sequence.ptr()));
        if (nb::cast<double>(require(first_token_at_.of(counters.ptr()))) < 0) first_token_at_.set(counters.ptr(), now);
        last_token_at_.set(counters.ptr(), now);
        add(counters, rounds_, 1);
        if (part.drafted) add(counters, drafted_, part.drafted);
        if (part.accepted) add(counters, accepted_, part.accepted);
        const nb::object drafted_by = require(drafted_by_.of(part.outcome.ptr()));
        return delta_.make({require(request_id_.of(part.sequence.ptr())), require(choice_.of(part.sequence.ptr())), part.tokens,
                            part.text, drafted_by, require(logprobs_.of(part.outcome.ptr())), nb::none(), empty_, nb::none(),
                            zero_});
    }

    static nb::object require(nb::object value) {
        if (!value.is_valid()) throw nb::python_error();
        return value;
    }

    static void add(const nb::object& counters, const Name& name, int64_t more) {
        name.set(counters.ptr(), nb::int_(nb::cast<int64_t>(require(name.of(counters.ptr()))) + more));
    }

    ValueType delta_;
    const nb::dict sequences_;
    const BlockLists blocks_;
    const int64_t max_context_;
    const nb::object empty_ = nb::str(""), zero_ = nb::int_(0);
    const Name seq_id_{"seq_id"}, tokens_{"tokens"}, num_computed_tokens_{"num_computed_tokens"};
    const Name error_{"error"}, drafted_{"drafted"}, verdict_{"verdict"}, accepted_{"accepted"}, drafted_by_{"drafted_by"};
    const Name logprobs_{"logprobs"}, max_length_{"max_length"}, stop_ids_{"stop_ids"}, text_{"text"}, choice_{"choice"};
    const Name unstopped_{"unstopped"}, known_texts_{"known_texts"}, counters_{"counters"}, request_id_{"request_id"}, rounds_{"rounds"};
    const Name first_token_at_{"first_token_at"}, last_token_at_{"last_token_at"}, constrained_{"constrained"};
};

}  // namespace

void bind_commit(nb::module_& m) {
    nb::class_<PlainCommitter>(m, "PlainCommitter")
        .def(nb::init<nb::handle, nb::dict, nb::handle, int64_t>())
        .def("commit", &PlainCommitter::commit);
}
