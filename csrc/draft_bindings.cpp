// Makes the requests of a plan and checks the drafts that come back: engine/proposer.py has the same in Python, for every
// draft, and does itself what is declined here.
#include "step_bindings.h"
#include "values.h"

namespace nb = nanobind;
using wager::as_int, wager::Items, wager::Name, wager::ValueType;

namespace {

class DraftCalls {
  public:
    explicit DraftCalls(nb::handle request)
        : request_(request, {"seq_id", "position", "depth", "params", "seed", "choice", "needs_draft_probs", "min_survival"}) {}

    // The room for guesses of each span in the plan, and the draft requests by drafter; `first` drafts where no drafter is named.
    // None unless these are a list and dicts.
    nb::object requests(nb::handle spans, nb::handle plan, nb::handle sequences, nb::str first, bool needs_draft_probs) const {
        Items all;
        if (!all.read(spans.ptr()) || !PyDict_Check(plan.ptr()) || !PyDict_Check(sequences.ptr())) return nb::none();
        nb::dict limits, requests;
        for (Py_ssize_t i = 0; i < all.size; ++i) {
            PyObject* const span = all.items[i];
            const nb::object seq_id = require(seq_id_.of(span));
            PyObject* const decision = PyDict_GetItemWithError(plan.ptr(), seq_id.ptr());
            if (decision == nullptr) continue;
            limits[seq_id] = require(max_draft_tokens_.of(span));
            const nb::object depth = require(depth_.of(decision));
            if (PyObject_IsTrue(depth.ptr()) != 1) continue;
            nb::object drafter = require(drafter_.of(decision));
            if (PyObject_IsTrue(drafter.ptr()) != 1) drafter = first;
            PyObject* list = PyDict_GetItemWithError(requests.ptr(), drafter.ptr());
            if (list == nullptr) {
                requests[drafter] = nb::list();
                list = PyDict_GetItemWithError(requests.ptr(), drafter.ptr());
            }
            const nb::object sequence = nb::borrow(PyDict_GetItem(sequences.ptr(), seq_id.ptr()));
            if (!sequence.is_valid()) throw nb::key_error("a span of an unknown sequence");
            const nb::object request = request_of(seq_id, sequence.ptr(), depth, needs_draft_probs, decision);
            if (PyList_Append(list, request.ptr()) < 0) throw nb::python_error();
        }
        return nb::make_tuple(limits, requests);
    }

    // The drafts that are not empty, by sequence, if each is a chain as it should be, in the order of the requests, none of
    // which needs draft_probs; else None.
    nb::object valid_chains(nb::handle requests, nb::handle drafts, nb::handle limits, nb::str name, int64_t vocab) const {
        Items all, expected;
        if (!all.read(drafts.ptr()) || !expected.read(requests.ptr()) || all.size != expected.size) return nb::none();
        if (!PyDict_Check(limits.ptr())) return nb::none();
        nb::dict valid;
        for (Py_ssize_t i = 0; i < all.size; ++i) {
            Py_ssize_t size = 0;
            const nb::object seq_id = seq_id_.of(all.items[i]);
            const nb::object requested = seq_id_.of(expected.items[i]);
            const nb::object needs_draft_probs = needs_draft_probs_.of(expected.items[i]);
            if (!seq_id.is_valid() || !requested.is_valid() || needs_draft_probs.ptr() != Py_False || !seq_id.equal(requested) ||
                !is_valid_chain(all.items[i], PyDict_GetItemWithError(limits.ptr(), seq_id.ptr()), name, vocab, size)) {
                PyErr_Clear();
                return nb::none();
            }
            if (size > 0) valid[seq_id] = nb::handle(all.items[i]);
        }
        return valid;
    }

  private:
    static nb::object require(nb::object value) {
        if (!value.is_valid()) throw nb::python_error();
        return value;
    }

    nb::object request_of(const nb::object& seq_id, PyObject* sequence, const nb::object& depth, bool needs_draft_probs,
                          PyObject* decision) const {
        const nb::object tokens = require(tokens_.of(sequence));
        const Py_ssize_t known = PyObject_Length(tokens.ptr());
        if (known < 0) throw nb::python_error();
        return request_.make({seq_id, nb::int_(known), depth, require(params_.of(sequence)), require(seed_.of(sequence)),
                              require(choice_.of(sequence)), nb::bool_(needs_draft_probs), require(min_survival_.of(decision))});
    }

    // A chain of at most `limit` known tokens by `name`, without draft_probs, with a probability for each token or with none.
    bool is_valid_chain(PyObject* draft, PyObject* limit, const nb::str& name, int64_t vocab, Py_ssize_t& size) const {
        const nb::object tokens = tokens_.of(draft), parents = parents_.of(draft), scores = scores_.of(draft),
                         drafter = drafter_.of(draft), probs = draft_probs_.of(draft);
        Items guesses, before, survival;
        int64_t most = 0;
        if (!as_int(limit, most) || !guesses.read(tokens.ptr()) || !before.read(parents.ptr()) || !survival.read(scores.ptr()))
            return false;
        if (guesses.size > most || before.size != guesses.size || (survival.size != 0 && survival.size != guesses.size)) return false;
        if (!drafter.is_valid() || !drafter.equal(name) || !probs.is_valid() || !probs.is_none()) return false;
        if (!PyTuple_Check(tokens.ptr()) || !PyTuple_Check(parents.ptr()) || !PyTuple_Check(scores.ptr())) return false;
        for (Py_ssize_t i = 0; i < guesses.size; ++i) {
            int64_t token = 0, parent = 0;
            if (!as_int(guesses.items[i], token) || !as_int(before.items[i], parent)) return false;
            if (token < 0 || token >= vocab || parent != i - 1) return false;
        }
        for (Py_ssize_t i = 0; i < survival.size; ++i) {
            if (!PyFloat_Check(survival.items[i])) return false;
            const double score = PyFloat_AS_DOUBLE(survival.items[i]);
            if (!(score >= 0.0 && score <= 1.0)) return false;
        }
        size = guesses.size;
        return true;
    }

    ValueType request_;
    const Name seq_id_{"seq_id"}, tokens_{"tokens"}, max_draft_tokens_{"max_draft_tokens"}, depth_{"depth"}, drafter_{"drafter"};
    const Name min_survival_{"min_survival"}, params_{"params"}, seed_{"seed"}, choice_{"choice"}, parents_{"parents"};
    const Name scores_{"scores"}, draft_probs_{"draft_probs"}, needs_draft_probs_{"needs_draft_probs"};
};

}  // namespace

void bind_drafts(nb::module_& m) {
    nb::class_<DraftCalls>(m, "DraftCalls")
        .def(nb::init<nb::handle>())
        .def("requests", &DraftCalls::requests)
        .def("valid_chains", &DraftCalls::valid_chains);
}
