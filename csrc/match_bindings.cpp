// Follows the guesses that are the target's tokens, greedy and sampled: verify/accept.py's `match`, for a whole batch.
#include <optional>
#include <vector>

#include "sampling.h"
#include "step_bindings.h"
#include "values.h"

namespace nb = nanobind;
using wager::as_int, wager::Items, wager::Name, wager::ValueType;

namespace {

// What samples the rows of a pass: the pool and the instruction set of the kernels, and their greatest greedy temperature.
struct Sampler {
    nb::object kept;
    wager::Pool* pool;
    const wager::Table* table;
    double greedy;
};

class TokenMatcher {
  public:
    TokenMatcher(nb::handle verdict, nb::handle outcome)
        : verdict_(verdict, {"seq_id", "accepted", "tokens"}),
          outcome_(outcome, {"verdict", "drafted", "drafted_by", "logprobs", "error", "error_status"}) {}

    void sample_with(nb::object pool, nb::object isa, double greedy) {
        sampler_ = Sampler{nb::make_tuple(pool, isa), nb::cast<wager::Pool*>(pool), nb::cast<Isa*>(isa)->table, greedy};
    }

    // The outcomes of the spans that need logits, by sequence, in their order; None in place of those that Python has to
    // find: where more than temperature and filters change a sequence's tokens, where something else is reported of them, or with a
    // row that has no token. Then whether there is one of these. None for values that are not as they should be. `greedy`
    // are the greedy tokens of all rows of `logits`, -1 where they are not finite.
    nb::object match(nb::handle spans, nb::handle drafts, nb::handle greedy, nb::handle logits, nb::handle sequences) {
        Items all, tokens;
        if (!all.read(spans.ptr()) || !tokens.read(greedy.ptr())) return nb::none();
        if (!PyDict_Check(drafts.ptr()) || !PyDict_Check(sequences.ptr())) return nb::none();
        paths_.clear();
        Py_ssize_t rows = 0;
        bool samples = false;
        for (Py_ssize_t i = 0; i < all.size; ++i) {
            const nb::object needs_logits = needs_logits_.of(all.items[i]);
            if (!needs_logits.is_valid()) return irregular();
            if (needs_logits.ptr() != Py_True) continue;
            Path path;
            path.first = rows;
            if (!read(path, all.items[i], drafts.ptr(), sequences.ptr()) || rows + path.size() >= tokens.size) return irregular();
            if (path.kind == Kind::greedy && !follow(path, tokens.items + rows)) return irregular();
            samples |= path.kind == Kind::sampled;
            rows += 1 + path.size();
            paths_.push_back(std::move(path));
        }
        if (samples && !sample(logits, rows)) return irregular();
        return outcomes();
    }

  private:
    enum class Kind { greedy, sampled, other };

    // One sequence's rows, and how far its path was followed.
    struct Path {
        nb::object seq_id, draft, guess_tuple, parent_tuple;
        Items guesses, parents;
        Kind kind = Kind::other;
        Py_ssize_t first = 0;  // of its rows of logits
        wager::Draw draw{};
        wager::Filters filters;
        std::vector<int64_t> accepted, emitted;
        int64_t current = -1;  // the last accepted node
        bool failed = false, ended = false;

        Py_ssize_t size() const { return guesses.size; }

        // The target's token after the current node: the guess that it is, if there is one, becomes the current node. False
        // where a guess is no int.
        bool step(int64_t token) {
            emitted.push_back(token);
            for (int64_t next = current + 1, parent = 0, guess = 0; next < size(); ++next) {
                if (!as_int(parents.items[next], parent) || !as_int(guesses.items[next], guess)) return false;
                if (parent == current && guess == token) {
                    accepted.push_back(next);
                    current = next;
                    return true;
                }
            }
            ended = true;
            return true;
        }
    };

    nb::object irregular() {
        PyErr_Clear();
        paths_.clear();
        return nb::none();
    }

    bool read(Path& path, PyObject* span, PyObject* drafts, PyObject* sequences) const {
        path.seq_id = seq_id_.of(span);
        if (!path.seq_id.is_valid()) return false;
        path.draft = nb::borrow(PyDict_GetItemWithError(drafts, path.seq_id.ptr()));
        if (path.draft.is_valid()) {
            path.guess_tuple = tokens_.of(path.draft.ptr()), path.parent_tuple = parents_.of(path.draft.ptr());
            if (!path.guesses.read(path.guess_tuple.ptr()) || !path.parents.read(path.parent_tuple.ptr())) return false;
            if (path.guesses.size != path.parents.size) return false;
        }
        PyObject* const sequence = PyDict_GetItemWithError(sequences, path.seq_id.ptr());
        if (sequence == nullptr) return false;
        const nb::object greedy = greedy_.of(sequence);
        if (!greedy.is_valid()) return false;
        if (greedy.ptr() == Py_True) path.kind = Kind::greedy;
        return path.kind == Kind::greedy || !sampler_ || read_sampling(path, sequence);
    }

    bool read_sampling(Path& path, PyObject* sequence) const {
        const nb::object temperature = temperature_.of(sequence);
        if (!temperature.is_valid()) return false;
        if (temperature.is_none()) return true;
        const nb::object known = tokens_.of(sequence), seed = seed_.of(sequence);
        int64_t choice = 0;
        if (!known.is_valid() || !PyList_Check(known.ptr()) || !seed.is_valid() || !PyLong_Check(seed.ptr())) return false;
        if (!PyFloat_Check(temperature.ptr()) || !as_int(choice_.of(sequence).ptr(), choice)) return false;
        path.draw.temperature = PyFloat_AS_DOUBLE(temperature.ptr());
        path.draw.seed = PyLong_AsUnsignedLongLongMask(seed.ptr());
        path.draw.position = static_cast<uint32_t>(PyList_GET_SIZE(known.ptr()));
        path.draw.choice = static_cast<uint32_t>(choice);
        const nb::object filters = filters_.of(sequence);
        if (!filters.is_valid()) return false;
        if (!filters.is_none() && !read_filters(path.filters, filters.ptr())) return false;
        path.kind = Kind::sampled;
        return true;
    }

    static bool read_filters(wager::Filters& filters, PyObject* given) {
        if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 3) return false;
        PyObject *const top_p = PyTuple_GET_ITEM(given, 1), *const min_p = PyTuple_GET_ITEM(given, 2);
        if (!as_int(PyTuple_GET_ITEM(given, 0), filters.top_k) || !PyFloat_Check(top_p) || !PyFloat_Check(min_p)) return false;
        filters.top_p = PyFloat_AS_DOUBLE(top_p), filters.min_p = PyFloat_AS_DOUBLE(min_p);
        return true;
    }

    // Along the greedy tokens of its rows. All of them are looked at: a row without a token is Python's to report.
    static bool follow(Path& path, PyObject** tokens) {
        int64_t token = 0;
        for (Py_ssize_t row = 0; row <= path.size(); ++row) {
            if (!as_int(tokens[row], token)) return false;
            path.failed |= token < 0;
        }
        while (!path.failed && !path.ended)
            if (!as_int(tokens[1 + path.current], token) || !path.step(token)) return false;
        return true;
    }

    // Along sampled tokens: one row of every sequence at a time, so that a row is sampled only if its path reaches it.
    bool sample(nb::handle logits, Py_ssize_t rows) {
        Py_buffer view;
        if (PyObject_GetBuffer(logits.ptr(), &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) return false;
        const bool fits = view.ndim == 2 && view.itemsize == 4 && std::string(view.format) == "f" && view.shape[0] >= rows;
        const bool followed = fits && sample_rows(static_cast<const float*>(view.buf), static_cast<int>(view.shape[1]));
        PyBuffer_Release(&view);
        return followed;
    }

    bool sample_rows(const float* logits, int vocab) {
        for (const bool filtered : {false, true}) {
            std::vector<Path*> alive;
            for (Path& path : paths_)
                if (path.kind == Kind::sampled && path.filters.none() != filtered) alive.push_back(&path);
            while (!alive.empty())
                if (!sample_next(alive, filtered, logits, vocab)) return false;
        }
        return true;
    }

    // The next token of each path; those that have ended or failed are taken out.
    bool sample_next(std::vector<Path*>& alive, bool filtered, const float* logits, int vocab) {
        std::vector<wager::Draw> draws;
        std::vector<wager::Filters> filters;
        for (Path* path : alive) {
            path->draw.logits = logits + (path->first + 1 + path->current) * static_cast<size_t>(vocab);
            path->draw.vocab = vocab;
            draws.push_back(path->draw);
            filters.push_back(path->filters);
        }
        std::vector<int32_t> tokens(alive.size());
        {
            nb::gil_scoped_release release;
            const Sampler& s = *sampler_;
            if (filtered) wager::sample_filtered_rows(*s.pool, *s.table, draws, filters, samplers_, s.greedy, tokens.data());
            else wager::sample_rows(*s.pool, *s.table, draws, s.greedy, tokens.data());
        }
        size_t still = 0;
        for (size_t i = 0; i < alive.size(); ++i) {
            Path& path = *alive[i];
            path.failed = tokens[i] < 0;
            if (!path.failed && !path.step(tokens[i])) return false;
            ++path.draw.position;
            if (!path.failed && !path.ended) alive[still++] = &path;
        }
        alive.resize(still);
        return true;
    }

    nb::object outcomes() {
        nb::dict found;
        bool all = true;
        for (const Path& path : paths_) {
            const bool known = path.kind != Kind::other && !path.failed;
            found[path.seq_id] = known ? outcome(path) : nb::none();
            all &= known;
        }
        paths_.clear();
        return nb::make_tuple(found, all);
    }

    static nb::object tuple_of(const std::vector<int64_t>& values) {
        const nb::object made = nb::steal(PyTuple_New(values.size()));
        for (size_t i = 0; i < values.size(); ++i) PyTuple_SET_ITEM(made.ptr(), i, PyLong_FromLongLong(values[i]));
        return made;
    }

    nb::object outcome(const Path& path) const {
        const size_t count = path.accepted.size();
        const nb::object nodes = count == 0 ? nothing_ : tuple_of(path.accepted);
        const nb::object verdict = verdict_.make({path.seq_id, nodes, tuple_of(path.emitted)});
        nb::object drafted_by = target_alone_;
        if (count > 0) {
            const nb::object drafter = drafter_.of(path.draft.ptr());
            if (!drafter.is_valid()) throw nb::python_error();
            drafted_by = nb::steal(PyTuple_New(count + 1));
            for (size_t i = 0; i < count; ++i) PyTuple_SET_ITEM(drafted_by.ptr(), i, Py_NewRef(drafter.ptr()));
            PyTuple_SET_ITEM(drafted_by.ptr(), count, Py_NewRef(empty_.ptr()));
        }
        return outcome_.make({verdict, nb::int_(path.size()), drafted_by, nothing_, empty_, zero_});
    }

    ValueType verdict_, outcome_;
    std::optional<Sampler> sampler_;
    std::vector<wager::RowSampler> samplers_;  // one a thread, of rows with filters
    std::vector<Path> paths_;  // of the step that is matched; kept so that its memory is
    const nb::object empty_ = nb::str(""), nothing_ = nb::tuple(), zero_ = nb::int_(0), target_alone_ = nb::make_tuple(empty_);
    const Name seq_id_{"seq_id"}, tokens_{"tokens"}, parents_{"parents"}, needs_logits_{"needs_logits"}, greedy_{"greedy"};
    const Name drafter_{"drafter"}, temperature_{"temperature"}, filters_{"filters"}, seed_{"seed"}, choice_{"choice"};
};

}  // namespace

void bind_match(nb::module_& m) {
    nb::class_<TokenMatcher>(m, "TokenMatcher")
        .def(nb::init<nb::handle, nb::handle>())
        .def("sample_with", &TokenMatcher::sample_with)
        .def("match", &TokenMatcher::match);
}
