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
    const nb::object tokens = of_tokens.of(draft.ptr()), parents = of_parents.of(draft.ptr()), scores = of_scores.of(draft.ptr());
    if (!tokens.is_valid() || !parents.is_valid() || !scores.is_valid()) throw nb::python_error();
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

JudgedDraft judged(nb::handle pair) {
    if (!PyTuple_Check(pair.ptr()) || PyTuple_GET_SIZE(pair.ptr()) != 2) throw std::invalid_argument("a draft and its factor");
    JudgedDraft draft = wager::read_draft(PyTuple_GET_ITEM(pair.ptr(), 0), true);
    wager::rescale(draft, nb::cast<double>(nb::handle(PyTuple_GET_ITEM(pair.ptr(), 1))));
    return draft;
}

// `drafts` are (draft, factor); what is `behind`, if anything, goes on behind the last one. Tokens, parents and scores.
nb::tuple merge_drafts(nb::list drafts, size_t nodes, nb::handle behind) {
    std::vector<JudgedDraft> trees;
    for (nb::handle pair : drafts) trees.push_back(judged(pair));
    if (!behind.is_none()) {
        if (trees.empty() || trees.back().parents.empty()) throw std::invalid_argument("nothing to go on behind");
        wager::append_behind(trees.back(), judged(behind));
    }
    const JudgedDraft found = wager::merge(trees, nodes);
    const size_t size = found.parents.size();
    const nb::object tokens = nb::steal(PyTuple_New(size)), parents = nb::steal(PyTuple_New(size)), scores = nb::steal(PyTuple_New(size));
    for (size_t i = 0; i < size; ++i) {
        PyTuple_SET_ITEM(tokens.ptr(), i, PyLong_FromLong(found.tokens[i]));
        PyTuple_SET_ITEM(parents.ptr(), i, PyLong_FromLong(found.parents[i]));
        PyTuple_SET_ITEM(scores.ptr(), i, PyFloat_FromDouble(found.scores[i]));
    }
    return nb::make_tuple(tokens, parents, scores);
}

std::pair<double, long> bear_out(nb::handle draft, nb::handle known) {
    std::vector<long> tokens;
    wager::read_ints(known, tokens);
    const wager::BorneOut found = wager::bear_out(wager::read_draft(draft.ptr(), true), tokens);
    return {found.expected, found.right};
}

}  // namespace

void bind_drafts(nb::module_& m) {
    m.def("is_valid_draft", &is_valid);
    m.def("merge_drafts", &merge_drafts, nb::arg("drafts"), nb::arg("nodes"), nb::arg("behind").none() = nb::none());
    m.def("bear_out", &bear_out);
}
