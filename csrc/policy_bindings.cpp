// The bindings of the policy's inner loops: numbers and arrays in, numbers out.
#include "acceptance.h"
#include "collapse.h"
#include "draft_reader.h"
#include "planning.h"
#include "step_times.h"
#include "values.h"

namespace nb = nanobind;
using wager::Items, wager::items_of, wager::read_draft, wager::read_floats, wager::read_ints;
using Numbers = std::vector<double>;

namespace {

// Of a list, a tuple or a range.
Numbers floats_of(nb::handle values) {
    Numbers numbers;
    read_floats(wager::listed(values, "numbers must be a sequence").ptr(), numbers);
    return numbers;
}

// Of as many numbers as there are unknowns.
Numbers slopes_of(nb::handle values, const wager::KalmanFilter& filter) {
    Numbers slopes = floats_of(values);
    if (slopes.size() != filter.size()) throw std::invalid_argument("slopes must be one float for each unknown");
    return slopes;
}

// Ascending knots, and as many values at them of each curve.
void check_knots(const Numbers& knots, std::initializer_list<const Numbers*> curves) {
    bool fits = !knots.empty();
    for (const Numbers* curve : curves) fits &= curve->size() == knots.size();
    for (size_t i = 1; i < knots.size(); ++i) fits &= knots[i - 1] < knots[i];
    if (!fits) throw std::invalid_argument("ascending knots must have one value each");
}

// Of rows of equal length.
wager::NumberTable table_of(nb::handle rows) {
    const Items each = items_of(rows, "a table must be a list of rows");
    wager::NumberTable table(each.size, each.size ? nb::len(nb::handle(each.items[0])) : 0);
    table.values.clear();
    Numbers row;
    for (Py_ssize_t i = 0; i < each.size; ++i) {
        read_floats(each.items[i], row);
        if (row.size() != table.columns) throw std::invalid_argument("rows of a table must be of one length");
        table.values.insert(table.values.end(), row.begin(), row.end());
    }
    return table;
}

std::vector<Numbers> rows_of(const wager::NumberTable& table) {
    std::vector<Numbers> rows;
    for (size_t row = 0; row < table.rows; ++row) {
        const auto first = table.values.begin() + static_cast<long>(row * table.columns);
        rows.emplace_back(first, first + static_cast<long>(table.columns));
    }
    return rows;
}

// Chooses the tokens of drafts that are verified. `draft_type`: the class of drafts.
class DraftSelector {
  public:
    explicit DraftSelector(nb::handle draft_type) : type_(draft_type) {}

    // Of `drafts` by sequence: those that are kept, as far as they are (`drafts` itself where all are whole); how many tokens; their
    // gain; cut or None; benefit. `models` are one for each draft, or one for all, and `sequences` as many as drafts (None where all
    // have scores); `weights` are of each one's tokens (None: 1); `seconds` those that 0, 1, ... more rows add, from `first` on.
    nb::tuple select(nb::dict drafts, nb::handle models, nb::handle sequences, nb::handle weights, nb::handle seconds,
                     Py_ssize_t first, double goodput, long limit) {
        const size_t count = nb::len(drafts);
        const Items judges = items_of(models, "models must be a list");
        if (judges.size != 1 && static_cast<size_t>(judges.size) != count) throw std::invalid_argument("each draft must have one model");
        Items states;
        if (!sequences.is_none()) states = items_of(sequences, "sequences must be a list");
        Numbers each_weight(count, 1.0), gains, of_rows;
        if (!weights.is_none()) read_floats(weights.ptr(), each_weight);
        if ((!sequences.is_none() && static_cast<size_t>(states.size) != count) || each_weight.size() != count)
            throw std::invalid_argument("each draft must have one value");
        std::vector<size_t> starts{0};
        wager::AcceptanceModel* model = nullptr;
        Py_ssize_t number = 0;
        for (const auto& [_, value] : drafts) {
            const wager::JudgedDraft draft = read_draft(value.ptr());
            if (number < judges.size) {
                model = &nb::cast<wager::AcceptanceModel&>(nb::handle(judges.items[number]));
                model->has_scores = draft.scores.size() == draft.parents.size();
            }
            const double odds = states.size ? nb::cast<const wager::SequenceAcceptance&>(nb::handle(states.items[number])).odds : 1.0;
            wager::add_survival(model->confidence, draft, model->bins.odds, model->depths.odds, odds, each_weight[number], gains);
            starts.push_back(gains.size());
            ++number;
        }
        read_floats(seconds.ptr(), of_rows, first, gains.size() + 1);
        if (of_rows.size() <= gains.size()) throw std::invalid_argument("seconds of too few rows");
        wager::TakenTokens taken = wager::select_tokens(gains, of_rows, goodput, limit);
        const nb::object cut = taken.has_cut ? nb::object(nb::float_(taken.cut)) : nb::object(nb::none());
        const bool whole = taken.nodes.size() == gains.size();
        std::sort(taken.nodes.begin(), taken.nodes.end());
        return nb::make_tuple(whole ? drafts : kept(drafts, taken.nodes, starts), taken.nodes.size(), taken.gain, cut, taken.benefit);
    }

    // A draft with these of its nodes, ascending and closed under parents.
    nb::object keep(nb::handle draft, const std::vector<long>& nodes) const {
        static const wager::Name of_seq_id("seq_id"), of_tokens("tokens"), of_parents("parents"), of_scores("scores"),
            of_drafter("drafter"), of_probs("draft_probs"), of_computed("computed");
        const nb::object tokens = of_tokens.require(draft.ptr()), parents = of_parents.require(draft.ptr()),
                         scores = of_scores.require(draft.ptr());
        std::vector<long> before, place;
        read_ints(parents, before);
        if (nodes.size() == before.size()) return nb::borrow(draft);
        place.resize(before.size());
        nb::list kept_tokens, kept_parents, kept_scores;
        for (size_t i = 0; i < nodes.size(); ++i) {
            const long node = nodes[i];
            if (node < 0 || node >= static_cast<long>(before.size()) || before[node] >= node) throw std::out_of_range("no such node");
            place[node] = static_cast<long>(i);
            kept_tokens.append(tokens[node]);
            kept_parents.append(before[node] < 0 ? -1 : place[before[node]]);
            if (nb::len(scores)) kept_scores.append(scores[node]);
        }
        nb::object probs = of_probs.require(draft.ptr());
        if (!probs.is_none()) probs = probs[nb::cast(nodes)];
        return type_.make({of_seq_id.require(draft.ptr()), nb::tuple(kept_tokens), nb::tuple(kept_parents), nb::tuple(kept_scores),
                           of_drafter.require(draft.ptr()), probs, of_computed.require(draft.ptr())});
    }

  private:
    // The drafts with these nodes alone, which ascend; they are numbered through all drafts, of which the i-th begins at starts[i].
    nb::dict kept(const nb::dict& drafts, const std::vector<size_t>& nodes, const std::vector<size_t>& starts) const {
        nb::dict found;
        size_t next = 0, number = 0;
        for (const auto& [seq_id, draft] : drafts) {
            const size_t first = starts[number], end = starts[++number];
            std::vector<long> mine;
            for (; next < nodes.size() && nodes[next] < end; ++next) mine.push_back(static_cast<long>(nodes[next] - first));
            if (!mine.empty()) found[seq_id] = keep(draft, mine);
        }
        return found;
    }

    wager::DraftType type_;
};

// See AcceptanceModel::learn_draft. `draft`: None where none was made; `forecast`: of its survival, or None.
bool learn_draft(wager::AcceptanceModel& model, wager::SequenceAcceptance& sequence, nb::handle draft, nb::handle emitted,
                 std::optional<long> accepted, long depth, bool stops_early, nb::handle forecast) {
    Numbers rates;
    if (!forecast.is_none()) read_floats(forecast.ptr(), rates);
    const double* const values = forecast.is_none() ? nullptr : rates.data();
    if (draft.is_none()) {
        model.learn_missing(sequence, depth, stops_early, values, rates.size());
        return false;
    }
    std::vector<long> tokens;
    read_ints(emitted, tokens);
    return model.learn_draft(sequence, read_draft(draft.ptr(), true), tokens, accepted ? &*accepted : nullptr, depth,
                             stops_early, values, rates.size());
}

// The nodes of a draft that emitted tokens can be compared with, and those of them that agree, from the root down.
nb::tuple compare(nb::handle draft, nb::handle emitted) {
    std::vector<long> tokens;
    read_ints(emitted, tokens);
    const wager::ComparedDraft compared(read_draft(draft.ptr(), true), tokens);
    return nb::make_tuple(compared.tested, compared.right);
}

// The records of drafters, by name.
class DrafterRecords {
  public:
    DrafterRecords(const wager::CollapseRules& rules, Py_ssize_t most_seen) : rules_(rules), most_seen_(most_seen) {}

    // Looks at the first drafts of each of the steps (`PolicyStep`). For each drafter that has collapsed, or recovered: its name,
    // whether it has collapsed, its usual rate, and how many guesses were right lately.
    nb::list add(nb::handle steps) {
        static const wager::Name of_verdicts("verdicts"), of_drafted("drafted"), of_plan("plan"), of_seq_id("seq_id"),
            of_accepted("accepted"), of_tokens("tokens"), of_drafter("drafter");
        nb::list changes;
        const Items taken = items_of(steps, "steps must be a list");
        for (Py_ssize_t i = 0; i < taken.size; ++i) {
            const nb::object drafted = of_drafted.require(taken.items[i]);
            if (!PyDict_Check(drafted.ptr()) || !PyDict_GET_SIZE(drafted.ptr())) continue;
            const nb::object verdicts = of_verdicts.require(taken.items[i]), plan = of_plan.require(taken.items[i]);
            const Items each = items_of(verdicts, "verdicts must be a list");
            for (Py_ssize_t j = 0; j < std::min(each.size, most_seen_); ++j) {
                PyObject* const verdict = each.items[j];
                const nb::object seq_id = of_seq_id.require(verdict);
                PyObject* const draft = PyDict_GetItemWithError(drafted.ptr(), seq_id.ptr());
                if (draft == nullptr) continue;
                const nb::object tokens = of_tokens.require(verdict), guesses = of_tokens.require(draft);
                if (!nb::len(tokens) || !nb::len(guesses)) continue;
                const bool right = nb::len(of_accepted.require(verdict)) || first_is_right(draft, tokens);
                const nb::object drafter = of_drafter.require(nb::object(plan[seq_id]).ptr());
                const std::string name = nb::cast<std::string>(drafter);
                wager::DrafterRecord& record = records_.try_emplace(name, rules_).first->second;
                if (record.see(nb::cast<std::string>(seq_id), right))
                    changes.append(nb::make_tuple(drafter, record.collapsed, record.usual, record.lately));
            }
        }
        return changes;
    }

  private:
    static bool first_is_right(PyObject* draft, const nb::object& emitted) {
        std::vector<long> tokens;
        read_ints(emitted, tokens);
        return !wager::ComparedDraft(read_draft(draft, true), tokens).right.empty();
    }

    wager::CollapseRules rules_;
    Py_ssize_t most_seen_;
    std::unordered_map<std::string, wager::DrafterRecord> records_;
};

// The plans of the sequences of one step: `add` each drafter, then `choose`.
class DraftPlanner {
  public:
    DraftPlanner(std::vector<long> rooms, Numbers weights, Numbers extra, double goodput, double max_min_survival)
        : batch_{std::move(rooms), std::move(weights), std::move(extra), goodput}, max_min_survival_(max_min_survival) {
        if (batch_.rooms.size() != batch_.weights.size()) throw std::invalid_argument("each sequence must have one value");
    }

    // A drafter: its acceptance, that of each sequence (of all of them `offset` where it is given), the seconds that the j-th
    // sequence to draft at a depth adds, [sequences, depth], those of catching up by sequence, and which sequences' drafts are
    // verified whatever their scores. Returns the forecast of survival, [sequences, depth].
    std::vector<Numbers> add(const wager::AcceptanceModel& model, const std::vector<const wager::SequenceAcceptance*>& sequences,
             std::optional<double> offset, nb::handle seconds, Numbers catch_up, std::vector<bool> unjudged, bool stops_early) {
        wager::PlannedDrafter drafter;
        drafter.log_odds = model.depths.log_odds;
        for (const wager::SequenceAcceptance* each : sequences) {
            drafter.means.push_back(offset.value_or(each->mean));
            drafter.deviations.push_back(std::sqrt(each->variance));
        }
        drafter.catch_up = std::move(catch_up), drafter.unjudged = std::move(unjudged);
        drafter.has_scores = model.has_scores, drafter.stops_early = stops_early;
        drafter.seconds = table_of(seconds);
        drafter.survival = wager::NumberTable(drafter.seconds.rows, drafter.seconds.columns);
        drafter.shifts = wager::NumberTable(0, model.depths.odds.size());
        drafter.shifts.values = model.shifts();
        drafter.shifts.rows = drafter.shifts.values.size() / drafter.shifts.columns;
        for (size_t column = 0; column < drafter.shifts.columns; ++column)
            for (size_t row = 0; row < drafter.shifts.rows; ++row)
                drafter.shifts_by_depth.push_back(drafter.shifts.at(row, column));
        for (const size_t size : {drafter.means.size(), drafter.deviations.size(), drafter.catch_up.size(), drafter.unjudged.size(),
                                  drafter.seconds.rows})
            if (size != batch_.weights.size()) throw std::invalid_argument("each sequence must have one value");
        if (batch_.extra.size() < drafter.survival.values.size() + 2) throw std::invalid_argument("seconds of too few rows");
        wager::forecast_survival(drafter, batch_.rooms);
        drafters_.push_back(std::move(drafter));
        return rows_of(drafters_.back().survival);
    }

    // Each sequence's drafter (-1: none), depth and min_survival (-1: none). `overhead`: weighted tokens that a plan must gain.
    nb::tuple choose(const Numbers& row_costs, double overhead) const {
        const wager::ChosenPlan plan = wager::PlanChooser(max_min_survival_, batch_, drafters_).choose(row_costs, overhead);
        return nb::make_tuple(plan.drafters, plan.depths, plan.min_survival);
    }

  private:
    wager::PlannedSequences batch_;
    double max_min_survival_;
    std::vector<wager::PlannedDrafter> drafters_;
};

}  // namespace

void bind_policy(nb::module_& m) {
    using Filter = wager::KalmanFilter;
    nb::class_<Filter>(m, "KalmanFilter")
        .def("__init__",
             [](Filter* made, double max_surprise, double drift, double noise_weight, double most_noise, double passing,
                double first_trend_weight, double trend_weight, double trend, int drift_interval, int trend_growth, Numbers change,
                double noise, double uncertainty) {
                 new (made) Filter({max_surprise, drift, noise_weight, most_noise, passing, first_trend_weight, trend_weight, trend,
                                    drift_interval, trend_growth},
                                   std::move(change), noise, uncertainty);
             },
             nb::kw_only(), nb::arg("max_surprise"), nb::arg("drift"), nb::arg("noise_weight"), nb::arg("most_noise"),
             nb::arg("passing"), nb::arg("first_trend_weight"), nb::arg("trend_weight"), nb::arg("trend"), nb::arg("drift_interval"),
             nb::arg("trend_growth"), nb::arg("change"), nb::arg("noise"), nb::arg("uncertainty"));
    using Steps = wager::StepTimes;
    nb::class_<Steps>(m, "StepTimes")
        .def("__init__",
             [](Steps* made, const Filter& filter, Numbers rows, Numbers seconds, double per_request, double per_context,
                double per_pair) {
                 check_knots(rows, {&seconds});
                 if (filter.size() < rows.size() + 3) throw std::invalid_argument("a filter of too few unknowns");
                 new (made) Steps(filter, std::move(rows), std::move(seconds), per_request, per_context, per_pair);
             },
             nb::arg("filter"), nb::kw_only(), nb::arg("rows"), nb::arg("seconds"), nb::arg("per_request"), nb::arg("per_context"),
             nb::arg("per_pair"))
        .def("seconds", [](const Steps& times, double rows, double requests,
                           double context_sum) { return times.seconds({rows, requests, context_sum}); })
        .def("seconds_by_rows", [](const Steps& times, nb::handle rows, double requests,
                                   double context_sum) { return times.seconds_by_rows(floats_of(rows), requests, context_sum); })
        .def("slopes", [](const Steps& times, double rows, double requests,
                          double context_sum) { return times.slopes({rows, requests, context_sum}); })
        .def("observe", [](Steps& times, double rows, double requests, double context_sum,
                           double taken) { times.observe({rows, requests, context_sum}, taken); })
        .def("deviations", [](const Steps& times, double rows, nb::handle others, double requests,
                              double context_sum) { return times.deviations({rows, requests, context_sum}, floats_of(others)); })
        .def("update", [](Steps& times, nb::handle slopes, double error) {
            times.filter.update(slopes_of(slopes, times.filter), error);
            times.correct();
        })
        .def("deviation", [](const Steps& times, nb::handle slopes) {
            return times.filter.deviation(slopes_of(slopes, times.filter));
        })
        .def("values", [](const Steps& times) { return times.filter.values(); })
        .def_ro("scale", &Steps::scale)
        .def_ro("per_request", &Steps::per_request)
        .def_ro("corrected", &Steps::corrected)
        .def("__deepcopy__", [](const Steps& times, nb::handle) { return times; });
    using Drafting = wager::DraftTimes;
    nb::class_<Drafting>(m, "DraftTimes")
        .def("__init__",
             [](Drafting* made, const Filter& filter, Numbers requests, Numbers per_call, Numbers per_token) {
                 check_knots(requests, {&per_call, &per_token});
                 if (filter.size() != requests.size() + 2) throw std::invalid_argument("a filter of other unknowns");
                 new (made) Drafting(filter, std::move(requests), std::move(per_call), std::move(per_token));
             },
             nb::arg("filter"), nb::kw_only(), nb::arg("requests"), nb::arg("per_call"), nb::arg("per_token"))
        .def("seconds_by_depth", [](const Drafting& times, double requests,
                                    nb::handle depths) { return times.seconds_by_depth(requests, floats_of(depths)); })
        .def("observe", &Drafting::observe)
        .def_ro("per_call", &Drafting::per_call)
        .def_ro("per_token", &Drafting::per_token)
        .def("__deepcopy__", [](const Drafting& times, nb::handle) { return times; });
    nb::class_<wager::CollapseRules>(m, "CollapseRules")
        .def(nb::init<long, long, double, double, double, double>(), nb::kw_only(), nb::arg("long_run"), nb::arg("known"),
             nb::arg("other_texts"), nb::arg("nearly_never"), nb::arg("enough"), nb::arg("share"));
    nb::class_<DrafterRecords>(m, "DrafterRecords")
        .def(nb::init<const wager::CollapseRules&, Py_ssize_t>(), nb::arg("rules"), nb::kw_only(), nb::arg("most_seen"))
        .def("add", &DrafterRecords::add)
        .def("__deepcopy__", [](const DrafterRecords& records, nb::handle) { return records; });
    nb::class_<wager::LogOddsTable>(m, "LogOddsTable")
        .def_ro("log_odds", &wager::LogOddsTable::log_odds)
        .def_ro("odds", &wager::LogOddsTable::odds)
        .def_ro("trials", &wager::LogOddsTable::trials);
    nb::class_<wager::SequenceAcceptance>(m, "SequenceAcceptance")
        .def(nb::init<double, double>(), nb::arg("mean"), nb::arg("variance"))
        .def_ro("mean", &wager::SequenceAcceptance::mean)
        .def_ro("variance", &wager::SequenceAcceptance::variance)
        .def("__deepcopy__", [](const wager::SequenceAcceptance& each, nb::handle) { return each; });
    using Model = wager::AcceptanceModel;
    nb::class_<Model>(m, "AcceptanceModel")
        .def("__init__",
             [](Model* made, Numbers prior, Numbers borders, double highest, double aged, double prior_trials,
                double chained_prior_trials, double spread, double prior_sequences, double ended, double drift,
                double trial_weight, size_t samples) {
                 const wager::LearningRules rules{aged, prior_trials, chained_prior_trials, spread, prior_sequences,
                                                  ended, drift, trial_weight, samples};
                 new (made) Model(rules, {std::move(borders), highest}, std::move(prior));
             },
             nb::kw_only(), nb::arg("prior"), nb::arg("borders"), nb::arg("highest"), nb::arg("aged"), nb::arg("prior_trials"),
             nb::arg("chained_prior_trials"), nb::arg("spread"), nb::arg("prior_sequences"), nb::arg("ended"), nb::arg("drift"),
             nb::arg("trial_weight"), nb::arg("samples"))
        .def_ro("depths", &Model::depths)
        .def_ro("bins", &Model::bins)
        .def_rw("has_scores", &Model::has_scores)
        .def("start_sequence", &Model::start_sequence)
        .def("end_sequence", &Model::end_sequence)
        .def("compare_sequences", &Model::compare_sequences)
        .def("survival", [](Model& model, nb::handle draft,
                            const wager::SequenceAcceptance& sequence) { return model.survival(read_draft(draft.ptr()), sequence); })
        .def("learn_round", &Model::learn_round, nb::arg("sequence"), nb::kw_only(), nb::arg("accepted"), nb::arg("tested"),
             nb::arg("known") = 0)
        .def("learn_draft", &learn_draft, nb::arg("sequence"), nb::arg("draft").none(), nb::arg("emitted"), nb::kw_only(),
             nb::arg("accepted") = nb::none(), nb::arg("depth"), nb::arg("stops_early") = false,
             nb::arg("forecast") = nb::none())
        .def("age", &Model::age)
        .def("start_from", &Model::start_from)
        .def("shifts", &Model::shifts)
        .def("__deepcopy__", [](nb::handle model, nb::handle) {
            const nb::object copy = model.type()();
            nb::cast<Model&>(copy) = nb::cast<const Model&>(model);
            return copy;
        });
    nb::class_<DraftSelector>(m, "DraftSelector")
        .def(nb::init<nb::handle>())
        .def("select", &DraftSelector::select, nb::arg("drafts"), nb::arg("models"), nb::arg("sequences").none(), nb::arg("weights").none(),
             nb::arg("seconds"), nb::arg("first"), nb::arg("goodput"), nb::arg("limit"))
        .def("keep", &DraftSelector::keep)
        .def("__deepcopy__", [](nb::handle selector, nb::handle) { return nb::borrow(selector); });
    m.def("compare", &compare);
    nb::class_<DraftPlanner>(m, "DraftPlanner")
        .def(nb::init<std::vector<long>, Numbers, Numbers, double, double>(), nb::kw_only(), nb::arg("rooms"),
             nb::arg("weights"), nb::arg("extra"), nb::arg("goodput"), nb::arg("max_min_survival"))
        .def("add", &DraftPlanner::add, nb::kw_only(), nb::arg("model"), nb::arg("sequences"), nb::arg("offset").none(),
             nb::arg("seconds"), nb::arg("catch_up"), nb::arg("unjudged"), nb::arg("stops_early"))
        .def("choose", &DraftPlanner::choose, nb::arg("row_costs"), nb::kw_only(), nb::arg("overhead"));
}
