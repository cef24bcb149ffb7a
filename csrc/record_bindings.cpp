// What a step did, counted from its values: engine/records.py has the same in Python, and says what is counted.
#include "step_bindings.h"
#include "values.h"

namespace nb = nanobind;
using wager::as_int, wager::Items, wager::Name, wager::ValueType;

namespace {

class StepCounter {
  public:
    explicit StepCounter(nb::handle record)
        : record_(record, {"rows", "sequences", "drafted", "accepted", "emitted", "seconds", "context_lens"}) {}

    nb::object record(nb::list spans, nb::dict outcomes, nb::list deltas, nb::handle seconds) const {
        int64_t rows = 0, drafted = 0, accepted = 0, emitted = 0;
        const nb::object context = nb::steal(PyTuple_New(spans.size()));
        for (size_t i = 0; i < spans.size(); ++i) {
            PyObject* const span = PyList_GET_ITEM(spans.ptr(), i);
            rows += size_of(tokens_, span);
            PyTuple_SET_ITEM(context.ptr(), i, require(num_computed_tokens_.of(span)).release().ptr());
        }
        PyObject *seq_id = nullptr, *outcome = nullptr;
        for (Py_ssize_t at = 0; PyDict_Next(outcomes.ptr(), &at, &seq_id, &outcome);) {
            int64_t count = 0;
            if (!as_int(require(drafted_.of(outcome)).ptr(), count)) throw nb::type_error("drafted is no int");
            drafted += count;
        }
        for (nb::handle delta : deltas) {
            emitted += size_of(token_ids_, delta.ptr());
            if (drafted) accepted += drafted_tokens(delta.ptr());
        }
        return record_.make({nb::int_(rows + drafted), nb::int_(spans.size()), nb::int_(drafted), nb::int_(accepted),
                             nb::int_(emitted), seconds, context});
    }

    // The tokens that became known by sequence, and the ids of the sequences that ended.
    nb::tuple outputs(nb::list deltas) const {
        nb::dict known;
        nb::list ended;
        for (nb::handle delta : deltas) {
            const nb::object seq_id = sequence_id(delta.ptr());
            if (require(finish_reason_.of(delta.ptr())).is_none()) known[seq_id] = require(token_ids_.of(delta.ptr()));
            else ended.append(seq_id);
        }
        return nb::make_tuple(known, ended);
    }

  private:
    static nb::object require(nb::object value) {
        if (!value.is_valid()) throw nb::python_error();
        return value;
    }

    static int64_t size_of(const Name& name, PyObject* value) {
        const nb::object items = require(name.of(value));
        if (!PyTuple_Check(items.ptr())) throw nb::type_error("not a tuple");
        return PyTuple_GET_SIZE(items.ptr());
    }

    // Tokens of a delta that a drafter guessed: those that name one.
    int64_t drafted_tokens(PyObject* delta) const {
        const nb::object names = require(drafted_by_.of(delta));
        Items all;
        if (!all.read(names.ptr())) throw nb::type_error("drafted_by is no tuple");
        int64_t count = 0;
        for (Py_ssize_t i = 0; i < all.size; ++i) count += PyObject_IsTrue(all.items[i]) == 1;
        return count;
    }

    nb::object sequence_id(PyObject* delta) const {
        const nb::object request_id = require(request_id_.of(delta)), index = require(index_.of(delta));
        int64_t choice = 0;
        if (!as_int(index.ptr(), choice)) throw nb::type_error("index is no int");
        return choice == 0 ? request_id : require(nb::steal(PyUnicode_FromFormat("%S#%S", request_id.ptr(), index.ptr())));
    }

    ValueType record_;
    const Name tokens_{"tokens"}, num_computed_tokens_{"num_computed_tokens"}, drafted_{"drafted"}, token_ids_{"token_ids"};
    const Name drafted_by_{"drafted_by"}, finish_reason_{"finish_reason"}, request_id_{"request_id"}, index_{"index"};
};

}  // namespace

void bind_records(nb::module_& m) {
    nb::class_<StepCounter>(m, "StepCounter")
        .def(nb::init<nb::handle>())
        .def("record", &StepCounter::record)
        .def("outputs", &StepCounter::outputs);
}
