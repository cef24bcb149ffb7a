// The bindings of drafts: whether one is valid, several as one, and what became of one.
#include "draft_reader.h"
#include "merging.h"
#include "step_bindings.h"

namespace nb = nanobind;
using wager::JudgedDraft, wager::Name;

namespace {

// Whether the guesses are a tree (with `chains`: a chain) of at most `limit` ids below `vocab`, with probabilities as scores or
// none. False also for what Python has to convert: values of other types.
bool is_valid(nb::handle draft, int64_t limit, int64_t vocab, bool chains) {
    static const Name of_scores("scores"), of_parents("parents"), of_tokens("tokens");
    const nb::object tokens = of_tokens.require(draft.ptr()), parents = of_parents.require(draft.ptr()),
                     scores = of_scores.require(draft.ptr());
    if (!PyTuple_CheckExact(tokens.ptr()) || !PyTuple_CheckExact(parents.ptr()) || !PyTuple_CheckExact(scores.ptr())) return false;
    const Py_ssize_t size = PyTuple_GET_SIZE(tokens.ptr()), scored = PyTuple_GET_SIZE(scores.ptr());
    if (size > limit || PyTuple_GET_SIZE(parents.ptr()) != size || (scored != 0 && scored != size)) return false;
    for (Py_ssize_t node = 0; node < size; ++node) {
        PyObject *const token = PyTuple_GET_ITEM(tokens.ptr(), node), *const before = PyTuple_GET_ITEM(parents.ptr(), node);
        int64_t id = 0, parent = 0;
        if (!PyLong_CheckExact(token) || !PyLong_CheckExact(before) || !wager::as_int(token, id) || !wager::as_int(before, parent))
            return false;
        if (id < 0 || id >= vocab || parent < (chains ? node - 1 : -1) || parent >= node) return false;
        if (scored == 0) continue;
        PyObject* const score = PyTuple_GET_ITEM(scores.ptr(), node);
        if (!PyFloat_CheckExact(score) || !(PyFloat_AS_DOUBLE(score) >= 0.0 && PyFloat_AS_DOUBLE(score) <= 1.0)) return false;
    }
    return true;
}

// The drafts that are not empty, by sequence, if they answer the requests in their order, none of which needs draft_probs, and each
// is a valid chain of `drafter` within the limit of its sequence; None where Python has to look at them.
nb::object valid_chains(nb::handle drafts, nb::handle requests, const nb::dict& limits, nb::handle drafter, int64_t vocab) {
    static const Name of_seq_id("seq_id"), of_drafter("drafter"), of_tokens("tokens"), of_needs("needs_draft_probs"), of_probs("draft_probs");
    wager::Items made, asked;
    if (!made.read(drafts.ptr()) || !asked.read(requests.ptr()) || made.size != asked.size) return nb::none();
    nb::dict valid;
    for (Py_ssize_t i = 0; i < made.size; ++i) {
        PyObject *const draft = made.items[i], *const request = asked.items[i];
        const nb::object seq_id = of_seq_id.of(draft);
        if (!seq_id.is_valid()) return PyErr_Clear(), nb::none();  // the drafts before it count
        int64_t limit = 0;
        if (!of_seq_id.require(request).equal(seq_id) || of_needs.require(request).ptr() != Py_False) return nb::none();
        if (!of_drafter.require(draft).equal(drafter) || !wager::as_int(wager::value_of(limits, seq_id.ptr()).ptr(), limit)) return nb::none();
        if (!is_valid(draft, limit, vocab, true) || !of_probs.require(draft).is_none()) return nb::none();
        if (PyTuple_GET_SIZE(of_tokens.require(draft).ptr()) > 0) valid[seq_id] = nb::handle(draft);
    }
    return valid;
}

// Makes the drafts of a drafter of that name from those of others.
class DraftMerger {
  public:
    DraftMerger(nb::handle draft, const std::string& drafter) : drafts_(draft, drafter) {}

    // `drafts` are (draft, factor), of which the last has `computed` guesses that took time (None: it does not say); what is `behind`,
    // if anything, goes on behind that. And how many more guesses than the first draft has are worth the price of a `row`.
    nb::tuple merge(nb::handle seq_id, nb::list drafts, size_t nodes, nb::handle behind, nb::handle computed, double row) const {
        std::vector<JudgedDraft> trees;
        for (nb::handle pair : drafts) trees.push_back(judged(pair));
        if (!behind.is_none()) {
            if (trees.empty() || trees.back().parents.empty()) throw std::invalid_argument("nothing to go on behind");
            wager::append_behind(trees.back(), judged(behind));
        }
        const JudgedDraft found = wager::merge(trees, nodes);
        const nb::object made = drafts_.make(seq_id, found.scores, [&](size_t node) { return found.tokens[node]; },
                                             [&](size_t node) { return found.parents[node]; }, computed);
        const long before = nb::len(drafts) > 0 ? worth(drafts[0][0], row) : 0;
        return nb::make_tuple(made, wager::worth(found, row) - before);
    }

    nb::object rename(nb::handle draft) const { return drafts_.rename(draft); }

    static long worth(nb::handle draft, double row) { return wager::worth(wager::read_draft(draft.ptr()), row); }

  private:
    static JudgedDraft judged(nb::handle pair) {
        if (!PyTuple_Check(pair.ptr()) || PyTuple_GET_SIZE(pair.ptr()) != 2) throw std::invalid_argument("a draft and its factor");
        JudgedDraft draft = wager::read_draft(PyTuple_GET_ITEM(pair.ptr(), 0), true);
        wager::rescale(draft, nb::cast<double>(nb::handle(PyTuple_GET_ITEM(pair.ptr(), 1))));
        return draft;
    }

    const wager::Drafts drafts_;
};

std::pair<double, long> bear_out(nb::handle draft, nb::handle known) {
    std::vector<long> tokens;
    wager::read_ints(known, tokens);
    const wager::BorneOut found = wager::bear_out(wager::read_draft(draft.ptr(), true), tokens);
    return {found.expected, found.right};
}

}  // namespace

void bind_drafts(nb::module_& m) {
    m.def("is_valid_draft", &is_valid);
    m.def("valid_chains", &valid_chains);
    nb::class_<DraftMerger>(m, "DraftMerger")
        .def(nb::init<nb::handle, std::string>())
        .def("merge", &DraftMerger::merge, nb::arg("seq_id"), nb::arg("drafts"), nb::arg("nodes"), nb::arg("behind").none() = nb::none(),
             nb::arg("computed").none() = nb::none(), nb::arg("row") = 0.0)
        .def("rename", &DraftMerger::rename)
        .def_static("worth", &DraftMerger::worth);
    m.def("bear_out", &bear_out);
}
