// The block pool and the state of the steps as Python holds them.
#include <algorithm>
#include <optional>
#include <tuple>

#include "step_bindings.h"
#include "step_state.h"
#include "values.h"

namespace nb = nanobind;
using namespace nb::literals;
using wager::BlockPool, wager::BlockTable, wager::SequencePtr, wager::SequenceState, wager::StepState;

namespace {

// CacheIntegrityError and UsageError of errors.py.
void raise_errors(const std::exception_ptr& thrown, void*) {
    const auto raise = [](const char* name, const wager::CacheError& error) {
        const nb::object type = nb::module_::import_("wager.errors").attr(name);
        const nb::object made = type(error.what(), error.hint);
        PyErr_SetObject(type.ptr(), made.ptr());
    };
    try {
        std::rethrow_exception(thrown);
    } catch (const wager::CallError& error) {
        raise("UsageError", error);
    } catch (const wager::CacheError& error) {
        raise("CacheIntegrityError", error);
    }
}

int64_t match_prefix(BlockPool& pool, const std::string& name, nb::handle tokens, const std::string& tenant) {
    const std::vector<int32_t> ids = wager::read_tokens(tokens);
    return pool.match_prefix(name, ids.data(), static_cast<int64_t>(ids.size()), tenant);
}

// Of `tokens` only those of blocks that become full are read.
void commit(BlockPool& pool, const std::string& name, nb::handle tokens, std::optional<int64_t> length) {
    const std::shared_ptr<BlockTable> table = pool.find(name);
    if (!table) throw nb::key_error(name.c_str());
    const int64_t count = length ? *length : static_cast<int64_t>(nb::len(tokens)) - pool.lead();
    const int64_t full = count / wager::kBlockTokens, committed = table->committed;
    if (full <= committed) return;
    const int64_t first = committed == 0 ? 0 : pool.lead() + committed * wager::kBlockTokens;
    const nb::object part = nb::steal(PySequence_GetSlice(tokens.ptr(), first, pool.lead() + full * wager::kBlockTokens));
    if (!part.is_valid()) throw nb::python_error();
    const std::vector<int32_t> ids = wager::read_tokens(part);
    if (static_cast<int64_t>(ids.size()) != pool.lead() + full * wager::kBlockTokens - first)
        throw std::invalid_argument("fewer tokens than are committed");
    pool.commit(*table, {ids.data(), first}, count);
}

void check(const BlockPool& pool, const std::optional<nb::dict>& lengths) {
    pool.check();
    if (!lengths) return;
    const char* const hint = "This is a defect in wager: please report it, with the command that led here.";
    for (const auto& [name, table] : pool.tables())
        if (!lengths->contains(nb::str(name.c_str(), name.size())))
            throw wager::CacheError("Sequence '" + name + "' is held but not running.", hint);
    for (const auto [key, value] : *lengths) {
        const std::string name = nb::cast<std::string>(key);
        const std::shared_ptr<BlockTable> table = pool.find(name);
        const int64_t length = nb::cast<int64_t>(value);
        if (!table) throw wager::CacheError("Sequence '" + name + "' is running but not held.", hint);
        if (static_cast<int64_t>(table->blocks.size()) < wager::blocks_for(length))
            throw wager::CacheError(
                "Sequence '" + name + "' caches " + std::to_string(length) + " positions but has too few blocks.", hint);
    }
}

void bind_pool(nb::module_& m) {
    nb::class_<BlockPool>(m, "BlockPool")
        .def(nb::init<int64_t, bool, int64_t, int64_t, int64_t>(), "num_blocks"_a, nb::kw_only(), "prefix_cache"_a, "lead"_a = 0,
             "states"_a = 0, "snapshots"_a = 0)
        .def_prop_ro("num_blocks", &BlockPool::num_blocks)
        .def_prop_ro("num_free_blocks", &BlockPool::num_free)
        .def("block_table",
             [](const BlockPool& pool, const std::string& name) {
                 const std::shared_ptr<BlockTable> table = pool.find(name);
                 return table ? table->blocks : std::vector<int32_t>();
             })
        .def("is_held", &BlockPool::is_held)
        .def("match_prefix", &match_prefix, "seq_id"_a, "tokens"_a, nb::kw_only(), "tenant"_a = "")
        .def("reserve", nb::overload_cast<const std::string&, int64_t>(&BlockPool::reserve))
        .def("trim",
             [](BlockPool& pool, const std::string& name, int64_t length) {
                 if (const std::shared_ptr<BlockTable> table = pool.find(name)) pool.trim(*table, length);
             })
        .def("commit", &commit, "seq_id"_a, "tokens"_a, nb::kw_only(), "length"_a = nb::none())
        .def("fork", &BlockPool::fork)
        .def("release", &BlockPool::release)
        .def("reset_prefix_cache", &BlockPool::reset_prefix_cache)
        .def("check", &check, "lengths"_a = nb::none());
}

// A sequence, with the values of Python that the steps name it by: every dict of a step is keyed by the same str.
struct NamedSequence : SequenceState {
    nb::object name, request, index;
};
const NamedSequence& named(const SequenceState& sequence) { return static_cast<const NamedSequence&>(sequence); }

SequencePtr make_sequence(nb::str id, nb::str request_id, nb::int_ choice, nb::handle tokens, int64_t max_length,
                          nb::handle stop_ids, std::string tenant, uint64_t seed, std::optional<double> temperature,
                          std::tuple<int64_t, double, double> filters, double greedy, bool streamed) {
    auto made = std::make_shared<NamedSequence>();
    made->name = id, made->request = request_id, made->index = choice;
    made->id = nb::cast<std::string>(id);
    made->request_id = nb::cast<std::string>(request_id);
    made->tenant = std::move(tenant);
    made->choice = nb::cast<int32_t>(choice);
    made->tokens = wager::read_tokens(tokens);
    made->prompt_tokens = made->length();
    made->max_length = max_length;
    made->stop_ids = wager::read_tokens(stop_ids);
    made->seed = seed;
    made->streamed = streamed;
    if (temperature) {
        made->choosing = *temperature <= greedy ? wager::Choosing::greedy : wager::Choosing::sampled;
        made->temperature = *temperature;
        std::tie(made->filters.top_k, made->filters.top_p, made->filters.min_p) = filters;
    }
    return made;
}

std::vector<int32_t> tokens_from(const SequenceState& sequence, int64_t first) {
    return {sequence.tokens.begin() + std::clamp<int64_t>(first, 0, sequence.length()), sequence.tokens.end()};
}

void bind_sequence(nb::module_& m) {
    nb::class_<SequenceState>(m, "SequenceState")
        .def(nb::new_(&make_sequence), nb::kw_only(), "id"_a, "request_id"_a, "choice"_a, "tokens"_a, "max_length"_a, "stop_ids"_a,
             "tenant"_a, "seed"_a, "temperature"_a.none(), "filters"_a, "greedy"_a, "streamed"_a = false)
        .def_prop_ro("num_tokens", &SequenceState::length)
        .def("tokens_from", &tokens_from)
        .def_ro("num_computed_tokens", &SequenceState::computed)
        .def_ro("admitted_at", &SequenceState::admitted_at)
        .def_ro("first_token_at", &SequenceState::first_token_at)
        .def_ro("last_token_at", &SequenceState::last_token_at)
        .def_ro("cached_tokens", &SequenceState::cached_tokens)
        .def_ro("rounds", &SequenceState::rounds)
        .def_ro("drafted", &SequenceState::drafted)
        .def_ro("accepted", &SequenceState::accepted)
        .def_ro("preemptions", &SequenceState::preemptions);
}

const char* name_of(wager::Finish finish) {
    return finish == wager::Finish::stop ? "stop" : finish == wager::Finish::length ? "length" : nullptr;
}

// What a step's record says it did and took; its seconds are by stage.
wager::TakenStep taken_step(nb::handle record) {
    PyObject** const fields = wager::fields_of(record, 6, "a record is seven values");
    wager::TakenStep step;
    if (!wager::as_int(fields[0], step.rows) || !wager::as_int(fields[1], step.sequences) || !wager::as_int(fields[2], step.drafted))
        throw std::invalid_argument("rows, sequences and guesses of a record are no ints");
    for (const auto& [_, seconds] : nb::cast<nb::dict>(nb::handle(fields[5]))) step.seconds += nb::cast<double>(seconds);
    return step;
}

// A StepState, and the classes of what it makes for Python.
class Steps {
  public:
    Steps(std::shared_ptr<BlockPool> pool, int64_t max_rows, int64_t max_sequences, int64_t max_context, int64_t max_drafts,
          std::optional<int64_t> max_prefill_rows, nb::handle span, nb::handle delta, nb::handle committed, nb::handle record)
        : state(std::move(pool), max_rows, max_sequences, max_context, max_drafts, wager::PromptRows(max_prefill_rows)),
          span_(span),
          delta_(delta, {"request_id", "index", "token_ids", "text", "drafted_by", "logprobs", "finish_reason", "error", "stats",
                         "error_status", "stop_string"}),
          committed_(committed),
          record_(record) {}

    StepState state;

    // `last` is the record of the last step; () if it is known or there was none.
    nb::list next(const nb::tuple& last, double now) {
        if (nb::len(last) > 0) state.prompt_rows.observe(taken_step(last));
        return spans(state.next(now));
    }

    // Writes what a pass means for the sequences of `spans`, and adds their texts: these first, since what is wrong, or raises, must
    // change no sequence: others find the blocks that a write fills, whose accepted nodes are moved behind it. Returns the CommittedStep; the places of deltas
    // that are their sequences' last, each with the reason; the slots that the keys and values of accepted nodes are in, and those
    // that they belong in; and the blocks of sequences that end in an error.
    nb::tuple commit(nb::handle spans, nb::handle outcomes, nb::handle sequences, double now) {
        std::vector<Pass> passes = read(spans, outcomes, sequences);
        nb::list deltas, ended, verdicts, last;
        nb::dict known;
        std::vector<int32_t> from, to, invalid;
        const nb::object contexts =
            wager::tuple_of(passes.size(), [&](size_t i) { return PyLong_FromLongLong(passes[i].result.sequence->computed); });
        int64_t rows = 0, drafted = 0, accepted = 0, emitted = 0;
        for (Pass& pass : passes) {
            wager::PassResult& result = pass.result;
            rows += result.rows;
            drafted += result.drafted;
            if (pass.outcome == nullptr) continue;
            const wager::Kept kept = state.cut(*result.sequence, result.tokens);
            nb::object tokens = first_of(pass.verdict[2], kept.tokens);
            const char* const reason = name_of(kept.finish);
            nb::object finish = reason == nullptr ? nb::none() : nb::object(nb::str(reason));
            const nb::object added =
                nb::steal(PyObject_CallMethodObjArgs(pass.sequence, add_text_.ptr(), tokens.ptr(), finish.ptr(), nullptr));
            if (!added.is_valid()) throw nb::python_error();
            PyObject** const text = wager::fields_of(added, 3, "a text comes with the number of tokens and why it ends");
            int64_t count = 0;
            if (!wager::as_int(text[1], count) || count < 0 || count > kept.tokens) throw std::invalid_argument("more tokens than there are");
            if (count < kept.tokens) tokens = first_of(tokens.ptr(), count);
            finish = nb::borrow(text[2]);
            result.tokens.resize(count);
            if (pass.failed) invalid.insert(invalid.end(), result.sequence->table->blocks.begin(), result.sequence->table->blocks.end());
            const bool failed = pass.failed && finish.is_none();
            const nb::object names = first_of(pass.outcome[2], count);
            deltas.append(delta_.make({named(*result.sequence).request, named(*result.sequence).index, tokens, nb::handle(text[0]),
                                       names, first_of(pass.outcome[3], count), nb::none(),
                                       failed ? nb::handle(pass.outcome[4]) : nb::handle(nothing_), nb::none(),
                                       failed ? nb::handle(pass.outcome[5]) : nb::handle(zero_), nothing_}));
            if (failed) finish = error_;
            verdicts.append(nb::handle(pass.outcome[0]));
            if (finish.is_none()) {
                known[nb::handle(pass.seq_id)] = tokens;
            } else {
                last.append(nb::make_tuple(nb::len(deltas) - 1, finish));
                ended.append(nb::handle(pass.seq_id));
            }
            emitted += count;
            if (result.drafted > 0) accepted += count_named(names);
        }
        const nb::object record = record_.make({nb::int_(rows + drafted), nb::int_(passes.size()), nb::int_(drafted), nb::int_(accepted),
                                                nb::int_(emitted), nb::dict(), contexts});
        const nb::object committed = committed_.make({deltas, known, ended, verdicts, record});
        for (const Pass& pass : passes) state.commit(pass.result, now, from, to);
        state.verified(drafted);
        return nb::make_tuple(committed, last, from, to, invalid);
    }

  private:
    // A span and its outcome (null: a chunk of a prompt), whose values are borrowed.
    struct Pass {
        wager::PassResult result;
        PyObject *seq_id = nullptr, *sequence = nullptr, **outcome = nullptr, **verdict = nullptr;
        bool failed = false;
    };

    std::vector<Pass> read(nb::handle spans, nb::handle outcomes, nb::handle sequences) const {
        wager::Items all;
        if (!all.read(spans.ptr()) || !PyDict_Check(outcomes.ptr()) || !PyDict_Check(sequences.ptr()))
            throw std::invalid_argument("spans are a list, outcomes and sequences dicts");
        std::vector<Pass> passes(all.size);
        for (Py_ssize_t i = 0; i < all.size; ++i) {
            Pass& pass = passes[i];
            PyObject** const span = wager::fields_of(all.items[i], 3, "a span is five values");
            pass.seq_id = span[0];
            pass.sequence = wager::value_of(sequences, span[0]).ptr();
            if (pass.sequence == nullptr) throw nb::key_error("a span of an unknown sequence");
            pass.result.sequence = nb::cast<SequencePtr>(state_.require(pass.sequence));
            pass.result.rows = wager::items_of(span[2], "the tokens of a span are no tuple").size;
            const nb::object outcome = wager::value_of(outcomes, span[0]);
            if (outcome.is_valid()) {
                pass.outcome = wager::fields_of(outcome, 6, "an outcome is six values");
                pass.verdict = wager::fields_of(pass.outcome[0], 3, "a verdict is three values");
                if (!wager::as_int(pass.outcome[1], pass.result.drafted)) throw std::invalid_argument("the number of guesses is no int");
                pass.result.accepted = wager::read_tokens(pass.verdict[1]);
                pass.result.tokens = wager::read_tokens(pass.verdict[2]);
                pass.failed = PyObject_IsTrue(pass.outcome[4]) == 1;
            }
            StepState::check(pass.result);
        }
        return passes;
    }

    nb::list spans(const std::vector<wager::ScheduledRows>& rows) const {
        nb::list made;
        for (const wager::ScheduledRows& each : rows) {
            const SequenceState& sequence = *each.sequence;
            const int32_t* const first = sequence.tokens.data() + each.start;
            const nb::object tokens = wager::tuple_of(each.end - each.start, [&](size_t i) { return PyLong_FromLong(first[i]); });
            made.append(span_.make({named(sequence).name, nb::int_(each.start), tokens,
                                    nb::bool_(each.end == sequence.length()), nb::int_(each.drafts)}));
        }
        return made;
    }

    // The first values of a tuple; the tuple itself if it has no more.
    static nb::object first_of(PyObject* values, int64_t count) {
        if (PyTuple_CheckExact(values) && PyTuple_GET_SIZE(values) <= count) return nb::borrow(values);
        const nb::object first = nb::steal(PySequence_GetSlice(values, 0, count));
        if (!first.is_valid()) throw nb::python_error();
        return first;
    }

    // How many of the names of drafters are not empty.
    static int64_t count_named(const nb::object& names) {
        const wager::Items all = wager::items_of(names, "the names of drafters are no tuple");
        return std::count_if(all.items, all.items + all.size, [](PyObject* name) { return PyObject_IsTrue(name) == 1; });
    }

    const wager::TupleType span_;
    const wager::ValueType delta_;
    const wager::TupleType committed_, record_;
    const wager::Name state_{"state"}, add_text_{"add_text"};
    const nb::str nothing_{""}, error_{"error"};
    const nb::int_ zero_{0};
};

void bind_steps(nb::module_& m) {
    nb::class_<Steps>(m, "StepState")
        .def(nb::init<std::shared_ptr<BlockPool>, int64_t, int64_t, int64_t, int64_t, std::optional<int64_t>, nb::handle, nb::handle,
                      nb::handle, nb::handle>(),
             nb::kw_only(), "pool"_a, "max_rows"_a, "max_sequences"_a, "max_context"_a, "max_drafts"_a, "max_prefill_rows"_a.none(),
             "span"_a, "delta"_a, "committed"_a, "record"_a)
        .def_prop_ro("num_running", [](const Steps& steps) { return steps.state.running().size(); })
        .def_prop_ro("num_waiting", [](const Steps& steps) { return steps.state.waiting().size(); })
        .def_prop_rw("max_drafts", [](const Steps& steps) { return steps.state.max_drafts; },
                     [](Steps& steps, int64_t most) { steps.state.max_drafts = most; })
        .def_prop_ro("running",
                     [](const Steps& steps) {
                         std::vector<std::string> names;
                         for (const SequencePtr& each : steps.state.running()) names.push_back(each->id);
                         return names;
                     })
        .def_prop_ro("rows_beside_others",
                     [](const Steps& steps) { return steps.state.prompt_rows.beside_others(steps.state.streamed()); })
        .def("add", [](Steps& steps, const SequencePtr& sequence) { steps.state.add(sequence); })
        .def("remove", [](Steps& steps, const SequencePtr& sequence) { steps.state.remove(sequence); })
        .def("preempt_all", [](Steps& steps) { steps.state.preempt_all(); })
        .def("next", &Steps::next)
        .def("commit", &Steps::commit);
}

}  // namespace

void bind_state(nb::module_& m) {
    nb::register_exception_translator(raise_errors);
    bind_pool(m);
    bind_sequence(m);
    bind_steps(m);
}
