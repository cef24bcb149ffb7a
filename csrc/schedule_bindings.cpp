// The spans of a step in which every sequence simply goes on: engine/scheduler.py has the same in Python, for every step, and
// schedules itself what is declined here.
#include <algorithm>
#include <vector>

#include "block_lists.h"
#include "step_bindings.h"
#include "values.h"

namespace nb = nanobind;
using wager::as_int, wager::BlockLists, wager::Name, wager::ValueType;

namespace {

class PlainScheduler {
  public:
    PlainScheduler(nb::handle span, nb::handle lists, int64_t max_context)
        : span_(span, {"seq_id", "num_computed_tokens", "tokens", "needs_logits", "max_draft_tokens"}),
          blocks_(lists),
          max_context_(max_context) {}

    // The spans of `running`, with blocks reserved for them and for `drafts` guesses each, as far as length and context allow.
    // None, with nothing reserved, unless each has one token to compute and there are free blocks enough.
    nb::object next(nb::list running, int64_t drafts) {
        parts_.clear();
        int64_t missing = 0;
        for (nb::handle sequence : running) {
            Part part;
            if (!read(part, sequence, drafts)) return declined();
            missing += part.missing;
            parts_.push_back(std::move(part));
        }
        if (missing > blocks_.num_free()) return declined();
        const nb::object spans = nb::steal(PyList_New(parts_.size()));
        for (size_t i = 0; i < parts_.size(); ++i) {
            for (int64_t taken = 0; taken < parts_[i].missing; ++taken) blocks_.take(parts_[i].table);
            PyList_SET_ITEM(spans.ptr(), i, make(parts_[i]).release().ptr());
        }
        parts_.clear();
        return spans;
    }

  private:
    struct Part {
        nb::object seq_id, computed, token, table;
        int64_t drafts = 0, missing = 0;
    };

    nb::object declined() {
        PyErr_Clear();
        parts_.clear();
        return nb::none();
    }

    bool read(Part& part, nb::handle sequence, int64_t drafts) const {
        const nb::object tokens = tokens_.of(sequence.ptr());
        part.seq_id = id_.of(sequence.ptr());
        part.computed = num_computed_tokens_.of(sequence.ptr());
        int64_t computed = 0, longest = 0;
        if (!tokens.is_valid() || !PyList_Check(tokens.ptr()) || !part.seq_id.is_valid()) return false;
        const int64_t known = PyList_GET_SIZE(tokens.ptr());
        if (!as_int(part.computed.ptr(), computed) || computed + 1 != known) return false;
        if (!as_int(max_length_.of(sequence.ptr()).ptr(), longest)) return false;
        part.token = nb::borrow(PyList_GET_ITEM(tokens.ptr(), computed));
        part.drafts = std::max<int64_t>(0, std::min({drafts, longest - known - 1, max_context_ - known - 1}));
        part.table = blocks_.table(part.seq_id.ptr());
        if (!part.table.is_valid() || !PyList_Check(part.table.ptr())) return false;
        part.missing = std::max<int64_t>(0, wager::blocks_for(known + part.drafts) - PyList_GET_SIZE(part.table.ptr()));
        return true;
    }

    nb::object make(const Part& part) const {
        const nb::object tokens = nb::steal(PyTuple_Pack(1, part.token.ptr()));
        return span_.make({part.seq_id, part.computed, tokens, nb::bool_(true), nb::int_(part.drafts)});
    }

    ValueType span_;
    const BlockLists blocks_;
    const int64_t max_context_;
    std::vector<Part> parts_;  // kept so that its memory is
    const Name id_{"id"}, tokens_{"tokens"}, num_computed_tokens_{"num_computed_tokens"}, max_length_{"max_length"};
};

}  // namespace

void bind_schedule(nb::module_& m) {
    nb::class_<PlainScheduler>(m, "PlainScheduler")
        .def(nb::init<nb::handle, nb::handle, int64_t>())
        .def("next", &PlainScheduler::next);
}
