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

// The drafts by sequence that are not empty, if they answer the requests in their order, each is one of `drafter` that is valid (with
// `chains` a chain) within the limit of its sequence, and none has probabilities or, with `needs`, needs them; None where Python has
// to look at them.
nb::object valid_drafts(nb::handle drafts, nb::handle requests, const nb::dict& limits, nb::handle drafter, int64_t vocab,
                        bool chains, bool needs) {
    static const Name of_seq_id("seq_id"), of_tokens("tokens"), of_probs("draft_probs"), of_drafter("drafter"),
        of_needs("needs_draft_probs");
    wager::Items made, asked;
    if (!made.read(drafts.ptr()) || !asked.read(requests.ptr()) || made.size != asked.size) return nb::none();
    nb::dict valid;
    for (Py_ssize_t i = 0; i < made.size; ++i) {
        PyObject *const draft = made.items[i], *const request = asked.items[i];
        const nb::object seq_id = of_seq_id.of(draft);
        if (!seq_id.is_valid()) return PyErr_Clear(), nb::none();  // the drafts before it count
        int64_t limit = 0;
        if (!of_seq_id.require(request).equal(seq_id) || (needs && of_needs.require(request).ptr() != Py_False) ||
            !of_drafter.require(draft).equal(drafter) || !of_probs.require(draft).is_none() ||
            !wager::as_int(wager::value_of(limits, seq_id.ptr()).ptr(), limit) || !is_valid(draft, limit, vocab, chains))
            return nb::none();
        if (PyTuple_GET_SIZE(of_tokens.require(draft).ptr()) > 0) valid[seq_id] = nb::handle(draft);
    }
    return valid;
}

// A named tuple with other values in fields that are given by their numbers, in their order.
nb::object with_fields(nb::handle tuple, std::initializer_list<std::pair<Py_ssize_t, nb::object>> values) {
    PyObject** const fields = wager::fields_of(tuple, std::prev(values.end())->first + 1, "a request has too few fields");
    PyTypeObject* const type = Py_TYPE(tuple.ptr());
    const Py_ssize_t size = PyTuple_GET_SIZE(tuple.ptr());
    const nb::object made = nb::steal(type->tp_alloc(type, size));
    if (!made.is_valid()) throw nb::python_error();
    for (Py_ssize_t i = 0; i < size; ++i) PyTuple_SET_ITEM(made.ptr(), i, Py_NewRef(fields[i]));
    for (const auto& [field, value] : values) Py_SETREF(PySequence_Fast_ITEMS(made.ptr())[field], Py_NewRef(value.ptr()));
    return made;
}

// Makes the drafts of a drafter of that name from those of others.
class DraftMerger {
  public:
    DraftMerger(nb::handle draft, const std::string& drafter) : drafts_(draft, drafter) {}

    // `drafts` are (draft, factor).
    nb::object merge(nb::handle seq_id, nb::list drafts, size_t nodes) const {
        std::vector<JudgedDraft> trees;
        for (nb::handle pair : drafts) {
            PyObject** const fields = wager::fields_of(pair, 2, "a draft and its factor");
            trees.push_back(wager::read_draft(fields[0], true));
            wager::rescale(trees.back(), nb::cast<double>(nb::handle(fields[1])));
        }
        return made(seq_id, wager::merge(trees, nodes), nb::none());
    }

    nb::object rename(nb::handle draft) const { return drafts_.rename(draft); }

  protected:
    nb::object made(nb::handle seq_id, const JudgedDraft& tree, nb::handle computed) const {
        return drafts_.make(seq_id, tree.scores, [&](size_t node) { return tree.tokens[node]; },
                            [&](size_t node) { return tree.parents[node]; }, computed);
    }

  private:
    const wager::Drafts drafts_;
};

// A second drafter, behind a first one, whose drafts both make.
class BackedDrafts : public DraftMerger {
  public:
    BackedDrafts(nb::handle draft, const std::string& drafter, std::vector<double> borders, double share)
        : DraftMerger(draft, drafter), second(std::move(borders), share) {}

    // What is asked of the second one, in call `now` for that many sequences; None where it is not asked. Places are told apart by
    // the score of the first one's best first guess; all are one where it gives none. `keeps`: keeping it has a price.
    nb::object ask(nb::handle request, nb::handle own, int64_t now, long sequences, bool keeps) {
        static const Name of_scores("scores"), of_parents("parents"), of_seq_id("seq_id"), of_survival("min_survival");
        double sure = 0.0, least = 0.0;
        if (!own.is_none()) {
            std::vector<double> scores;
            std::vector<long> parents;
            wager::read_floats(of_scores.require(own.ptr()).ptr(), scores);
            wager::read_ints(of_parents.require(own.ptr()), parents);
            for (size_t node = 0; node < std::min(scores.size(), parents.size()); ++node)
                if (parents[node] < 0) sure = std::max(sure, scores[node]);
        }
        const wager::Prices prices = prices_of(request, keeps);
        const auto seq_id = nb::cast<std::string>(of_seq_id.require(request.ptr()));
        if (!second.ask(seq_id, sure, prices, now, sequences, least)) return nb::none();
        least = std::max(least, nb::cast<double>(of_survival.require(request.ptr())));
        return with_fields(request, {{kMinSurvival, nb::float_(least)}});
    }

    // What is asked of the first one behind a chain of the second's: None where a guess that is at most as likely as the last of
    // these is not worth a row.
    nb::object behind(nb::handle request, nb::handle chain) const {
        static const Name of_tokens("tokens"), of_position("position");
        const JudgedDraft draft = wager::read_draft(chain.ptr());
        const long count = static_cast<long>(draft.parents.size()), depth = depth_of(request);
        for (long node = 0; node < count; ++node)
            if (draft.parents[node] != node - 1) return nb::none();
        if (count >= depth || (!draft.scores.empty() && draft.scores.back() <= prices_of(request, false).row)) return nb::none();
        const int64_t position = nb::cast<int64_t>(of_position.require(request.ptr()));
        return with_fields(request, {{kPosition, nb::int_(position + count)}, {kDepth, nb::int_(depth - count)},
                                     {kAfter, of_tokens.require(chain.ptr())}});
    }

    // The draft of both, unless one was made already.
    nb::object join(nb::handle request, nb::handle first, nb::handle other, nb::handle behind, nb::handle already) {
        static const Name of_seq_id("seq_id");
        const nb::object seq_id = of_seq_id.require(request.ptr());
        JudgedDraft mine = wager::read_draft(first.ptr(), true), its = wager::read_draft(other.ptr(), true), more, tree;
        if (!behind.is_none()) more = wager::read_draft(behind.ptr(), true);
        nb::object draft = nb::borrow(already);
        if (already.is_none()) {
            tree = second.join(mine, its, depth_of(request), behind.is_none() ? nullptr : &more);
            draft = made(seq_id, tree, nb::int_(its.parents.size()));
        } else {
            tree = wager::read_draft(already.ptr(), true);
        }
        second.answer(nb::cast<std::string>(seq_id), std::move(mine), std::move(its), std::move(tree));
        return draft;
    }

    void accept(const std::string& seq_id, nb::handle known) {
        wager::read_ints(known, tokens_);
        second.accept(seq_id, tokens_);
    }

    wager::SecondDrafter second;

  private:
    static constexpr Py_ssize_t kPosition = 1, kDepth = 2, kMinSurvival = 7, kAfter = 8;  // fields of a request

    static long depth_of(nb::handle request) {
        static const Name of_depth("depth");
        return nb::cast<long>(of_depth.require(request.ptr()));
    }
    static wager::Prices prices_of(nb::handle request, bool keeps) {
        static const Name of_prices("prices");
        const auto prices = nb::cast<std::tuple<double, double, double, double>>(of_prices.require(request.ptr()));
        const auto& [row, call, guess, keeping] = prices;
        return {row, call, guess, keeps ? keeping : 0.0};
    }

    std::vector<long> tokens_;
};

void learn(wager::Reliability& self, nb::handle draft, nb::handle known) {
    std::vector<long> tokens;
    wager::read_ints(known, tokens);
    self.learn(wager::read_draft(draft.ptr(), true), tokens);
}

}  // namespace

void bind_drafts(nb::module_& m) {
    m.def("valid_drafts", &valid_drafts);
    nb::class_<wager::Reliability>(m, "Reliability")
        .def(nb::init<>())
        .def_prop_ro("factor", &wager::Reliability::factor)
        .def("learn", &learn);
    nb::class_<DraftMerger>(m, "DraftMerger")
        .def(nb::init<nb::handle, std::string>())
        .def("merge", &DraftMerger::merge)
        .def("rename", &DraftMerger::rename);
    nb::class_<BackedDrafts, DraftMerger>(m, "BackedDrafts")
        .def(nb::init<nb::handle, std::string, std::vector<double>, double>())
        .def_prop_rw("until", [](const BackedDrafts& self) { return self.second.until; },
                     [](BackedDrafts& self, int64_t call) { self.second.until = call; })
        .def("ask", &BackedDrafts::ask, nb::arg("request"), nb::arg("own").none(), nb::arg("now"), nb::arg("sequences"),
             nb::arg("keeps"))
        .def("behind", &BackedDrafts::behind)
        .def("join", &BackedDrafts::join, nb::arg("request"), nb::arg("first"), nb::arg("second"),
             nb::arg("behind").none() = nb::none(), nb::arg("made").none() = nb::none())
        .def("accept", &BackedDrafts::accept)
        .def("end", [](BackedDrafts& self, const std::string& seq_id) { self.second.end(seq_id); });
}
