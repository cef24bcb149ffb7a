// The bindings of the n-gram drafter: the indexes of all sequences, and the drafts of all requests in one call.
#include <string>
#include <unordered_map>

#include "ngrams.h"
#include "step_bindings.h"
#include "values.h"

namespace nb = nanobind;
using wager::Drafts, wager::NgramIndex, wager::read_tokens;

namespace {

class NgramTable {
  public:
    NgramTable(nb::handle draft, const std::string& drafter, int longest, std::vector<double> prior, double weight, double min_survival)
        : drafts_(draft, drafter), rules_{longest, std::move(prior), weight, min_survival} {}

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
            const nb::object seq_id = drafts_.seq_id(request);
            NgramIndex& index = of(nb::cast<std::string>(seq_id));
            index.catch_up();
            index.survival(drafts_.depth(request), survival_);
            drafts.append(drafts_.make(seq_id, survival_, [&](size_t i) { return index.copied(i); },
                                       [](size_t i) { return static_cast<long>(i) - 1; }));
        }
        return drafts;
    }

  private:
    NgramIndex& of(const std::string& seq_id) {
        const auto found = indexes_.find(seq_id);
        if (found == indexes_.end()) throw nb::key_error(seq_id.c_str());
        return found->second;
    }

    const Drafts drafts_;
    wager::NgramRules rules_;
    std::unordered_map<std::string, NgramIndex> indexes_;
    std::vector<double> survival_;
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
