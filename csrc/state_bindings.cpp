// The block pool and the state of the steps as Python holds them.
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

// The tables of a pool by sequence, as they are at any time.
struct BlockTables {
    std::shared_ptr<BlockPool> pool;
};

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
    nb::class_<BlockTable>(m, "BlockTable")
        .def("__len__", [](const BlockTable& table) { return table.blocks.size(); })
        .def("__getitem__", [](const BlockTable& table, int64_t index) {
            const auto size = static_cast<int64_t>(table.blocks.size());
            if (index < 0) index += size;
            if (index < 0 || index >= size) throw nb::index_error();
            return table.blocks[index];
        });
    nb::class_<BlockTables>(m, "BlockTables").def("__getitem__", [](const BlockTables& tables, const std::string& name) {
        const std::shared_ptr<BlockTable> table = tables.pool->find(name);
        if (!table) throw nb::key_error(name.c_str());
        return table;
    });
    nb::class_<BlockPool>(m, "BlockPool")
        .def(nb::init<int64_t, bool, int64_t, int64_t, int64_t>(), "num_blocks"_a, nb::kw_only(), "prefix_cache"_a, "lead"_a = 0,
             "states"_a = 0, "snapshots"_a = 0)
        .def_prop_ro("num_snapshots", &BlockPool::num_snapshots)
        .def_prop_ro("num_blocks", &BlockPool::num_blocks)
        .def_prop_ro("num_free_blocks", &BlockPool::num_free)
        .def_prop_ro("block_tables", [](std::shared_ptr<BlockPool> pool) { return BlockTables{std::move(pool)}; })
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

SequencePtr make_sequence(std::string id, std::string request_id, int32_t choice, nb::handle tokens, int64_t max_length,
                          nb::handle stop_ids, std::string tenant, uint64_t seed, std::optional<double> temperature,
                          std::tuple<int64_t, double, double> filters, double greedy) {
    auto made = std::make_shared<SequenceState>();
    made->id = std::move(id);
    made->request_id = std::move(request_id);
    made->tenant = std::move(tenant);
    made->choice = choice;
    made->tokens = wager::read_tokens(tokens);
    made->prompt_tokens = made->length();
    made->max_length = max_length;
    made->stop_ids = wager::read_tokens(stop_ids);
    made->seed = seed;
    if (temperature) {
        made->choosing = *temperature <= greedy ? wager::Choosing::greedy : wager::Choosing::sampled;
        made->temperature = *temperature;
        std::tie(made->filters.top_k, made->filters.top_p, made->filters.min_p) = filters;
    }
    return made;
}

nb::list tokens_from(const SequenceState& sequence, int64_t first) {
    nb::list tokens;
    for (int64_t i = first; i < sequence.length(); ++i) tokens.append(sequence.tokens[i]);
    return tokens;
}

void bind_sequence(nb::module_& m) {
    nb::class_<SequenceState>(m, "SequenceState")
        .def(nb::new_(&make_sequence), nb::kw_only(), "id"_a, "request_id"_a, "choice"_a, "tokens"_a, "max_length"_a, "stop_ids"_a,
             "tenant"_a, "seed"_a, "temperature"_a.none(), "filters"_a, "greedy"_a)
        .def_ro("id", &SequenceState::id)
        .def_prop_ro("num_tokens", &SequenceState::length)
        .def("tokens_from", &tokens_from)
        .def_ro("num_computed_tokens", &SequenceState::computed)
        .def_ro("running", &SequenceState::running)
        .def_ro("admitted_at", &SequenceState::admitted_at)
        .def_ro("first_token_at", &SequenceState::first_token_at)
        .def_ro("last_token_at", &SequenceState::last_token_at)
        .def_ro("cached_tokens", &SequenceState::cached_tokens)
        .def_ro("rounds", &SequenceState::rounds)
        .def_ro("drafted", &SequenceState::drafted)
        .def_ro("accepted", &SequenceState::accepted)
        .def_ro("preemptions", &SequenceState::preemptions);
}

// Of each span its sequence's id, the position of its first row, its tokens, whether the last of them is the last known one, and
// the room for guesses.
nb::list schedule(StepState& state, int64_t drafts, int64_t kept, int64_t most, double now) {
    nb::list spans;
    for (const wager::ScheduledRows& each : state.schedule(drafts, kept, most, now)) {
        const SequenceState& sequence = *each.sequence;
        const nb::object tokens = nb::steal(PyTuple_New(each.end - each.start));
        for (int64_t i = each.start; i < each.end; ++i)
            PyTuple_SET_ITEM(tokens.ptr(), i - each.start, PyLong_FromLong(sequence.tokens[i]));
        spans.append(nb::make_tuple(sequence.id, each.start, tokens, each.end == sequence.length(), each.drafts));
    }
    return spans;
}

const char* name_of(wager::Finish finish) {
    return finish == wager::Finish::stop ? "stop" : finish == wager::Finish::length ? "length" : nullptr;
}

nb::tuple cut(const StepState& state, const SequenceState& sequence, nb::handle tokens) {
    const wager::Kept kept = state.cut(sequence, wager::read_tokens(tokens));
    return nb::make_tuple(kept.tokens, name_of(kept.finish));
}

// `results` are (sequence, rows computed, guesses verified, tokens that follow, nodes accepted). Of each the number of tokens
// kept and why it ends; then the slots that the keys and values of accepted nodes are in, and those that they belong in.
nb::tuple commit_step(StepState& state, nb::list results, double now) {
    std::vector<wager::PassResult> passes;  // all are read before any is written, so that one that is wrong changes nothing
    for (nb::handle each : results) {
        wager::PassResult& result = passes.emplace_back();
        result.sequence = nb::cast<SequencePtr>(each[0]);
        result.rows = nb::cast<int64_t>(each[1]);
        result.drafted = nb::cast<int64_t>(each[2]);
        result.tokens = wager::read_tokens(each[3]);
        result.accepted = wager::read_tokens(each[4]);
        StepState::check(result);
    }
    nb::list kept;
    std::vector<int32_t> from, to;
    for (const wager::PassResult& result : passes) {
        const wager::Kept done = state.commit(result, now, from, to);
        kept.append(nb::make_tuple(done.tokens, name_of(done.finish)));
    }
    return nb::make_tuple(kept, from, to);
}

void bind_steps(nb::module_& m) {
    nb::class_<StepState>(m, "StepState")
        .def(nb::init<std::shared_ptr<BlockPool>, int64_t, int64_t, int64_t>(), nb::kw_only(), "pool"_a, "max_rows"_a,
             "max_sequences"_a, "max_context"_a)
        .def_prop_ro("num_running", [](const StepState& state) { return state.running().size(); })
        .def_prop_ro("num_waiting", [](const StepState& state) { return state.waiting().size(); })
        .def_prop_ro("num_decoding", &StepState::num_decoding)
        .def_prop_ro("running",
                     [](const StepState& state) {
                         nb::list names;
                         for (const SequencePtr& each : state.running()) names.append(each->id);
                         return names;
                     })
        .def_prop_ro("waiting",
                     [](const StepState& state) {
                         nb::list names;
                         for (const SequencePtr& each : state.waiting()) names.append(each->id);
                         return names;
                     })
        .def("add", &StepState::add)
        .def("remove", &StepState::remove)
        .def("preempt_all", &StepState::preempt_all)
        .def("schedule", &schedule)
        .def("cut", &cut)
        .def("commit", &commit_step);
}

}  // namespace

void bind_state(nb::module_& m) {
    nb::register_exception_translator(raise_errors);
    bind_pool(m);
    bind_sequence(m);
    bind_steps(m);
}
