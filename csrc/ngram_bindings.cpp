// The bindings of the n-gram drafter: the indexes of all sequences, and the drafts of all requests in one call.
#include <string>
#include <unordered_map>

#include "ngrams.h"
#include "step_bindings.h"
#include "values.h"

namespace nb = nanobind;
using wager::as_int, wager::Name, wager::NgramIndex, wager::read_tokens, wager::ValueType;

namespace {

class NgramTable {
  public:
    NgramTable(nb::handle draft, std::string drafter, int longest, std::vector<double> prior, double weight, double min_survival)
        : draft_(draft, {"seq_id", "tokens", "parents", "scores", "drafter", "draft_probs", "computed"}),
          drafter_(nb::str(drafter.c_str())),
          rules_{longest, std::move(prior), weight, min_survival} {}

    void begin(const std::string& seq_id, nb::handle tokens) {
        indexes_.insert_or_assign(seq_id, NgramIndex(rules_, read_tokens(tokens)));
    }

    void accept(const std::string& seq_id, nb::handle tokens) {
        NgramIndex& index = of(seq_id);
        for (const int32_t token : read_tokens(tokens)) index.know(token);
    }

    void end(const std::string& seq_id) { indexes_.erase(seq_id); }

    nb::list propose(nb::list requests) {
        nb::list drafts;
        for (nb::handle request : requests) {
            const nb::object seq_id = seq_id_.of(request.ptr());
            int64_t depth = 0;
            if (!seq_id.is_valid() || !as_int(depth_.of(request.ptr()).ptr(), depth)) throw nb::python_error();
            NgramIndex& index = of(nb::cast<std::string>(seq_id));
            index.catch_up();
            index.survival(static_cast<int>(depth), survival_);
            drafts.append(draft(seq_id, index));
        }
        return drafts;
    }

  private:
    NgramIndex& of(const std::string& seq_id) {
        const auto found = indexes_.find(seq_id);
        if (found == indexes_.end()) throw nb::key_error(seq_id.c_str());
        return found->second;
    }

    nb::object draft(nb::handle seq_id, const NgramIndex& index) {
        const size_t size = survival_.size();
        const nb::object tokens = nb::steal(PyTuple_New(size)), parents = nb::steal(PyTuple_New(size)),
                         scores = nb::steal(PyTuple_New(size));
        for (size_t i = 0; i < size; ++i) {
            PyTuple_SET_ITEM(tokens.ptr(), i, PyLong_FromLong(index.copied(i)));
            PyTuple_SET_ITEM(parents.ptr(), i, PyLong_FromLong(static_cast<long>(i) - 1));
            PyTuple_SET_ITEM(scores.ptr(), i, PyFloat_FromDouble(survival_[i]));
        }
        return draft_.make({seq_id, tokens, parents, scores, drafter_, nb::none(), nb::none()});
    }

    ValueType draft_;
    nb::object drafter_;
    wager::NgramRules rules_;
    std::unordered_map<std::string, NgramIndex> indexes_;
    std::vector<double> survival_;
    const Name seq_id_{"seq_id"}, depth_{"depth"};
};

}  // namespace

void bind_ngrams(nb::module_& m) {
    nb::class_<NgramTable>(m, "NgramTable")
        .def(nb::init<nb::handle, std::string, int, std::vector<double>, double, double>())
        .def("begin", &NgramTable::begin)
        .def("accept", &NgramTable::accept)
        .def("end", &NgramTable::end)
        .def("propose", &NgramTable::propose);
}
