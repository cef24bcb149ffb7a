// Follows the guesses that are the target's tokens, greedy and sampled: verify/accept.py's `match`, for a whole batch.
#include <string>
#include <vector>

#include "sampling.h"
#include "step_bindings.h"
#include "step_state.h"
#include "values.h"

namespace nb = nanobind;
using wager::Choosing, wager::Elements, wager::Items, wager::read_ints, wager::SequenceState;

namespace {

class TokenMatcher {
  public:
    TokenMatcher(nb::object pool, nb::object isa, double greedy)
        : kept_(nb::make_tuple(pool, isa)),
          pool_(*nb::cast<wager::Pool*>(pool)),
          table_(*nb::cast<Isa*>(isa)->table),
          greedy_(greedy) {}

    // `drafts` are (sequence, guesses, their parents). Of each the accepted nodes and the tokens; None in place of those that
    // Python has to find: where more than temperature and filters change a sequence's tokens, where something else is reported
    // of them, or with a row that has no token. `greedy` are the greedy tokens of all rows, -1 where they are not finite.
    nb::list match(nb::list drafts, nb::handle greedy, nb::handle logits) {
        paths_.clear();
        size_t rows = 0;
        bool samples = false;
        for (nb::handle each : drafts) {
            Path path(each);
            path.first = rows;
            rows += 1 + path.guesses.size();
            samples |= path.sequence->choosing == Choosing::sampled;
            paths_.push_back(std::move(path));
        }
        const Elements tokens(greedy, 1, "il", 4);  // on Windows numpy's int32 is l
        if (tokens.size(0) < rows) throw std::invalid_argument("fewer rows than drafts need");
        for (Path& path : paths_)
            if (path.sequence->choosing == Choosing::greedy) follow(path, tokens.data<const int32_t>() + path.first);
        if (samples) {
            const Elements values(logits, 2, "f", 4);
            if (values.size(0) < rows) throw std::invalid_argument("fewer rows than drafts need");
            for (const bool filtered : {false, true}) sample(filtered, values.data<const float>(), static_cast<int>(values.size(1)));
        }
        nb::list found;
        for (const Path& path : paths_) found.append(path.found());
        return found;
    }

  private:
    // One sequence's rows, and how far its path was followed.
    struct Path {
        const SequenceState* sequence;
        std::vector<int64_t> guesses, parents, accepted, emitted;
        size_t first = 0;  // of its rows of logits
        wager::Draw draw{};
        int64_t current = -1;  // the last accepted node
        bool failed = false, ended = false;

        explicit Path(nb::handle draft) {
            Items fields;
            if (!fields.read(draft.ptr()) || fields.size != 3) throw std::invalid_argument("a draft is three values");
            sequence = nb::cast<const SequenceState*>(nb::handle(fields.items[0]));
            read_ints(fields.items[1], guesses);
            read_ints(fields.items[2], parents);
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

        nb::object found() const {
            if (sequence->choosing == Choosing::other || failed) return nb::none();
            return nb::make_tuple(tuple_of(accepted), tuple_of(emitted));
        }

        static nb::object tuple_of(const std::vector<int64_t>& values) {
            const nb::object made = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(values.size())));
            for (size_t i = 0; i < values.size(); ++i)
                PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromLongLong(values[i]));
            return made;
        }
    };

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

    const nb::object kept_;  // what the references below are of
    wager::Pool& pool_;
    const wager::Table& table_;
    const double greedy_;                      // the greatest temperature that is greedy
    std::vector<wager::RowSampler> samplers_;  // one a thread, of rows with filters
    std::vector<Path> paths_;                  // of the step that is matched; kept so that its memory is
};

}  // namespace

void bind_match(nb::module_& m) {
    nb::class_<TokenMatcher>(m, "TokenMatcher")
        .def(nb::init<nb::object, nb::object, double>())
        .def("match", &TokenMatcher::match);
}
