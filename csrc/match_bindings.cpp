// Follows the guesses that are the target's tokens, greedy and sampled: verify/accept.py's `match`, for a whole batch.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sampling.h"
#include "step_bindings.h"
#include "step_state.h"
#include "values.h"

namespace nb = nanobind;
using namespace nb::literals;
using wager::Choosing, wager::Elements, wager::Items, wager::read_ints, wager::SequenceState;

namespace {

class TokenMatcher {
  public:
    // `outcome`, `verdict` and `draft` are the classes of these; with `follows` false all is left to Python.
    TokenMatcher(nb::object pool, nb::object isa, double greedy, nb::handle outcome, nb::handle verdict, nb::object draft, bool follows)
        : outcome_(outcome),
          verdict_(verdict),
          draft_(std::move(draft)),
          follows_(follows),
          kept_(nb::make_tuple(pool, isa)),
          pool_(*nb::cast<wager::Pool*>(pool)),
          table_(*nb::cast<Isa*>(isa)->table),
          greedy_(greedy) {}

    TokenMatcher(const TokenMatcher&) = delete;

    // The outcome of each span that needs logits, by sequence, and the first row of logits of those that Python has to find, which
    // are None meanwhile: where more than temperature and filters change a sequence's tokens, where something else is reported of
    // them, or with a row that has no token. `greedy` are the greedy tokens of all rows, -1 where they are not finite.
    nb::tuple match(nb::handle spans, nb::handle drafts, nb::handle sequences, nb::handle greedy, nb::handle logits) {
        paths_.clear();
        size_t rows = 0;
        bool samples = false;
        const Items all = wager::items_of(spans, "spans are a list");
        for (Py_ssize_t i = 0; i < all.size; ++i) {
            PyObject** const span = wager::fields_of(all.items[i], 4, "a span is five values");
            if (span[3] != Py_True) continue;
            Path path(span[0], wager::value_of(drafts, span[0]), wager::value_of(sequences, span[0]), rows);
            rows += 1 + path.guesses.size();
            samples |= path.sequence->choosing == Choosing::sampled;
            paths_.push_back(std::move(path));
        }
        if (follows_) follow_all(rows, samples, greedy, logits);
        nb::dict outcomes;
        nb::list left;
        for (const Path& path : paths_) {
            const bool found = follows_ && path.sequence->choosing != Choosing::other && !path.failed;
            outcomes[nb::handle(path.seq_id)] = found ? outcome_of(path) : nb::none();
            if (!found) left.append(nb::make_tuple(nb::handle(path.seq_id), path.first));
        }
        paths_.clear();  // they hold values of Python
        return nb::make_tuple(outcomes, left);
    }

  private:
    // One sequence's rows, and how far its path was followed.
    struct Path {
        PyObject* seq_id;  // of its span
        nb::object draft;
        const SequenceState* sequence = nullptr;
        std::vector<int64_t> guesses, parents, accepted, emitted;
        size_t first;  // of its rows of logits
        wager::Draw draw{};
        int64_t current = -1;  // the last accepted node
        bool failed = false, ended = false;

        // Without a draft it is not valid.
        Path(PyObject* seq_id, nb::object made, const nb::object& known, size_t first) : seq_id(seq_id), draft(std::move(made)), first(first) {
            static const wager::Name of_state("state"), of_tokens("tokens"), of_parents("parents");
            if (!known.is_valid()) throw nb::key_error("a span of an unknown sequence");
            sequence = nb::cast<const SequenceState*>(of_state.require(known.ptr()));
            if (draft.is_valid()) {
                read_ints(of_tokens.require(draft.ptr()), guesses);
                read_ints(of_parents.require(draft.ptr()), parents);
            }
            if (guesses.size() != parents.size()) throw std::invalid_argument("a parent for each guess");
            draw.temperature = sequence->temperature;
            draw.seed = sequence->seed;
            draw.position = static_cast<uint32_t>(sequence->tokens.size());
            draw.choice = static_cast<uint32_t>(sequence->choice);
        }

        // The target's token after the current node: the guess that it is, if there is one, becomes the current node.
        void step(int64_t token) {
            emitted.push_back(token);
            for (auto next = static_cast<size_t>(current + 1); next < guesses.size(); ++next)
                if (parents[next] == current && guesses[next] == token) {
                    accepted.push_back(static_cast<int64_t>(next));
                    current = static_cast<int64_t>(next);
                    return;
                }
            ended = true;
        }
    };

    nb::object outcome_of(const Path& path) const {
        const nb::object accepted = wager::tuple_of(path.accepted);
        const nb::object verdict = verdict_.make({nb::handle(path.seq_id), accepted, wager::tuple_of(path.emitted)});
        return outcome_.make({verdict, nb::int_(path.guesses.size()), drafted_by(path, accepted), none_, nothing_, zero_});
    }

    // The name of the drafter of each accepted guess, and "" for the target.
    nb::object drafted_by(const Path& path, const nb::object& accepted) const {
        static const wager::Name of_drafter("drafter"), of_node("drafter_of");
        const size_t count = path.accepted.size();
        if (count == 0) return alone_;
        const bool one = Py_TYPE(path.draft.ptr()) == reinterpret_cast<PyTypeObject*>(draft_.ptr());
        const nb::object name = one ? of_drafter.require(path.draft.ptr()) : nb::object();
        return wager::tuple_of(count + 1, [&](size_t i) {
            if (i == count || one) return Py_NewRef(i == count ? nothing_.ptr() : name.ptr());
            PyObject* const each = PyObject_CallMethodOneArg(path.draft.ptr(), of_node.ptr(), PyTuple_GET_ITEM(accepted.ptr(), i));
            if (each == nullptr) throw nb::python_error();
            return each;
        });
    }

    void follow_all(size_t rows, bool samples, nb::handle greedy, nb::handle logits) {
        const Elements& tokens = greedy_of(greedy);
        if (tokens.size(0) < rows) throw std::invalid_argument("fewer rows than drafts need");
        for (Path& path : paths_)
            if (path.sequence->choosing == Choosing::greedy) follow(path, tokens.data<const int32_t>() + path.first);
        if (!samples) return;
        const Elements values(logits, 2, "f", 4);
        if (values.size(0) < rows) throw std::invalid_argument("fewer rows than drafts need");
        for (const bool filtered : {false, true}) sample(filtered, values.data<const float>(), static_cast<int>(values.size(1)));
    }

    // The elements of an array that passes give again and again are looked for once: numpy takes as long as all the rest.
    const Elements& greedy_of(nb::handle array) {
        for (auto& [known, elements] : arrays_)
            if (known.is(array)) return *elements;
        if (arrays_.size() == kMostArrays) arrays_.clear();
        auto elements = std::make_unique<Elements>(array, 1, "il", 4);  // on Windows numpy's int32 is l
        arrays_.emplace_back(nb::borrow(array), std::move(elements));
        return *arrays_.back().second;
    }

    // Along the greedy tokens of its rows. All of them are looked at: a row without a token is Python's to report.
    static void follow(Path& path, const int32_t* tokens) {
        for (size_t row = 0; row <= path.guesses.size(); ++row) path.failed |= tokens[row] < 0;
        while (!path.failed && !path.ended) path.step(tokens[1 + path.current]);
    }

    // Along sampled tokens: one row of every sequence at a time, so that a row is sampled only if its path reaches it.
    void sample(bool filtered, const float* logits, int vocab) {
        std::vector<Path*> active;
        for (Path& path : paths_)
            if (path.sequence->choosing == Choosing::sampled && path.sequence->filters.none() != filtered) active.push_back(&path);
        while (!active.empty()) sample_next(active, filtered, logits, vocab);
    }

    // The next token of each path; those that have ended or failed are taken out.
    void sample_next(std::vector<Path*>& active, bool filtered, const float* logits, int vocab) {
        std::vector<wager::Draw> draws;
        std::vector<wager::Filters> filters;
        for (Path* path : active) {
            path->draw.logits = logits + (path->first + 1 + path->current) * static_cast<size_t>(vocab);
            path->draw.vocab = vocab;
            draws.push_back(path->draw);
            filters.push_back(path->sequence->filters);
        }
        std::vector<int32_t> tokens(active.size());
        {
            nb::gil_scoped_release release;
            if (filtered) wager::sample_filtered_rows(pool_, table_, draws, filters, samplers_, greedy_, tokens.data());
            else wager::sample_rows(pool_, table_, draws, greedy_, tokens.data());
        }
        size_t still = 0;
        for (size_t i = 0; i < active.size(); ++i) {
            Path& path = *active[i];
            path.failed = tokens[i] < 0;
            if (!path.failed) path.step(tokens[i]);
            ++path.draw.position;
            if (!path.failed && !path.ended) active[still++] = &path;
        }
        active.resize(still);
    }

    static constexpr size_t kMostArrays = 8;

    const wager::TupleType outcome_, verdict_;
    const nb::object draft_;
    const bool follows_;
    const nb::str nothing_{""};
    const nb::int_ zero_{0};
    const nb::tuple none_ = nb::make_tuple(), alone_ = nb::make_tuple(nothing_);
    const nb::object kept_;  // what the references below are of
    wager::Pool& pool_;
    const wager::Table& table_;
    const double greedy_;                      // the greatest temperature that is greedy
    std::vector<wager::RowSampler> samplers_;  // one a thread, of rows with filters
    std::vector<std::pair<nb::object, std::unique_ptr<Elements>>> arrays_;  // of greedy tokens, kept while they may come again
    std::vector<Path> paths_;                  // of the step that is matched; kept so that its memory is
};

}  // namespace

void bind_match(nb::module_& m) {
    nb::class_<TokenMatcher>(m, "TokenMatcher")
        .def(nb::init<nb::object, nb::object, double, nb::handle, nb::handle, nb::object, bool>(), "pool"_a, "isa"_a, nb::kw_only(), "greedy"_a,
             "outcome"_a, "verdict"_a, "draft"_a, "follows"_a)
        .def("match", &TokenMatcher::match);
}
