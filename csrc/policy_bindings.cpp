// The bindings of the policy's inner loops: numbers and arrays in, numbers out.
#include "judging.h"
#include "kalman.h"
#include "planning.h"
#include "values.h"

namespace nb = nanobind;
using wager::as_int, wager::Items;
using Numbers = std::vector<double>;

namespace {

void read_floats(PyObject* value, Numbers& out, Py_ssize_t first = 0, Py_ssize_t most = PY_SSIZE_T_MAX) {
    Items items;
    if (!items.read(value)) throw std::invalid_argument("numbers must be a list or a tuple");
    out.clear();
    for (Py_ssize_t i = first; i < items.size && i - first < most; ++i) {
        const double number = PyFloat_AsDouble(items.items[i]);
        if (number == -1.0 && PyErr_Occurred()) throw nb::python_error();
        out.push_back(number);
    }
}

Items items_of(nb::handle value, const char* error) {
    Items items;
    if (!items.read(value.ptr())) throw std::invalid_argument(error);
    return items;
}

class Filter {
  public:
    Filter(double max_surprise, double drift, double noise_weight, double most_noise, double first_trend_weight,
           double trend_weight, double trend, int drift_interval, int trend_growth, Numbers change, double noise, double uncertainty)
        : filter_({max_surprise, drift, noise_weight, most_noise, first_trend_weight, trend_weight, trend, drift_interval,
                   trend_growth},
                  std::move(change), noise, uncertainty) {}

    void update(nb::handle slopes, double error) { filter_.update(checked(slopes), error); }
    double deviation(nb::handle slopes) { return filter_.deviation(checked(slopes)); }
    const Numbers& values() const { return filter_.values(); }

  private:
    const Numbers& checked(nb::handle slopes) {
        read_floats(slopes.ptr(), slopes_);
        if (slopes_.size() != filter_.size()) throw std::invalid_argument("slopes must be one float for each unknown");
        return slopes_;
    }

    wager::KalmanFilter filter_;
    Numbers slopes_;
};

class TokenJudge {
  public:
    TokenJudge(Numbers borders, double highest) : rules_{std::move(borders), highest} {}

    // Of drafts, given by their `scores` (empty: none) and `parents`: (nodes kept of each, or None where all are; how many; their
    // gain; cut or None; benefit). `confidence_odds` and `depth_odds` are one list for each draft, or one for all; `offsets` the
    // odds of each sequence (needed without scores, may be None); `weights` of each one's tokens (None: 1); `seconds` those that
    // 0, 1, ... more rows add, from `first` on.
    nb::tuple judge(nb::handle scores, nb::handle parents, nb::handle confidence_odds, nb::handle depth_odds, nb::handle offsets,
                    nb::handle weights, nb::handle seconds, Py_ssize_t first, double goodput, long limit) {
        const Items each_scores = items_of(scores, "scores must be a list"), each_parents = items_of(parents, "parents must be a list");
        const Items tables = items_of(confidence_odds, "odds must be a list"), depths = items_of(depth_odds, "odds must be a list");
        if (each_parents.size != each_scores.size || (tables.size != 1 && tables.size != each_scores.size) || tables.size != depths.size)
            throw std::invalid_argument("each draft must have one value");
        values(offsets, each_scores.size, offsets_);
        values(weights, each_scores.size, weights_);
        gains_.clear();
        starts_.clear();
        for (Py_ssize_t i = 0; i < each_scores.size; ++i) {
            starts_.push_back(gains_.size());
            if (i < tables.size) read_odds(tables.items[i], depths.items[i]);
            add(each_scores.items[i], each_parents.items[i], offsets_.empty() ? 1.0 : offsets_[i],
                weights_.empty() ? 1.0 : weights_[i]);
        }
        starts_.push_back(gains_.size());
        read_floats(seconds.ptr(), seconds_, first, gains_.size() + 1);
        if (seconds_.size() <= gains_.size()) throw std::invalid_argument("seconds of too few rows");
        wager::TakenTokens taken = wager::select_tokens(gains_, seconds_, goodput, limit);
        const nb::object cut = taken.has_cut ? nb::object(nb::float_(taken.cut)) : nb::object(nb::none());
        const size_t count = taken.nodes.size();
        const nb::object kept = count < gains_.size() ? nb::object(by_draft(taken.nodes)) : nb::object(nb::none());
        return nb::make_tuple(kept, count, taken.gain, cut, taken.benefit);
    }

    // Of each node of one draft.
    Numbers survival(nb::handle scores, nb::handle parents, nb::handle confidence_odds, nb::handle depth_odds, double offset) {
        gains_.clear();
        read_odds(confidence_odds.ptr(), depth_odds.ptr());
        add(scores.ptr(), parents.ptr(), offset, 1.0);
        return gains_;
    }

  private:
    static void values(nb::handle from, Py_ssize_t size, Numbers& out) {
        out.clear();
        if (from.is_none()) return;
        read_floats(from.ptr(), out);
        if (static_cast<Py_ssize_t>(out.size()) != size) throw std::invalid_argument("each draft must have one value");
    }

    void read_odds(PyObject* confidence, PyObject* depth) {
        read_floats(confidence, odds_.confidence);
        read_floats(depth, odds_.depth);
    }

    void add(PyObject* scores, PyObject* parents, double offset, double weight) {
        Items before;
        if (!before.read(parents)) throw std::invalid_argument("parents must be tuples");
        read_floats(scores, draft_.scores);
        draft_.parents.clear();
        for (Py_ssize_t i = 0; i < before.size; ++i) {
            int64_t parent = 0;
            if (!as_int(before.items[i], parent)) throw std::invalid_argument("a parent must be an int");
            draft_.parents.push_back(parent);
        }
        if (!wager::add_survival(rules_, draft_, odds_, offset, weight, gains_))
            throw std::invalid_argument("a draft whose parents do not precede their children, or odds of another size");
    }

    nb::list by_draft(std::vector<size_t>& nodes) const {
        std::sort(nodes.begin(), nodes.end());
        nb::list kept;
        size_t next = 0;
        for (size_t i = 0; i + 1 < starts_.size(); ++i) {
            nb::list mine;
            for (; next < nodes.size() && nodes[next] < starts_[i + 1]; ++next) mine.append(nodes[next] - starts_[i]);
            kept.append(mine);
        }
        return kept;
    }

    wager::ConfidenceRules rules_;
    wager::JudgedDraft draft_;
    wager::AcceptanceOdds odds_;
    Numbers gains_, seconds_, offsets_, weights_;
    std::vector<size_t> starts_;
};

// The numbers of an array [rows, columns] of float64, by Python's buffer protocol: nanobind's own way takes Python calls.
class Matrix {
  public:
    explicit Matrix(nb::handle array) {
        if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE) < 0)
            throw nb::python_error();
        if (view_.ndim == 2 && view_.itemsize == sizeof(double) && view_.format != nullptr && view_.format[0] == 'd') return;
        PyBuffer_Release(&view_);
        throw std::invalid_argument("not a matrix of float64");
    }
    ~Matrix() { PyBuffer_Release(&view_); }
    Matrix(const Matrix&) = delete;
    Matrix& operator=(const Matrix&) = delete;

    wager::Table table() const {
        wager::Table table(view_.shape[0], view_.shape[1]);
        std::copy_n(data(), table.values.size(), table.values.begin());
        return table;
    }
    double* data() const { return static_cast<double*>(view_.buf); }

  private:
    Py_buffer view_;
};

// The plans of the sequences of one step: `add` each drafter, then `choose`.
class DraftPlanner {
  public:
    DraftPlanner(std::vector<long> rooms, Numbers weights, Numbers extra, double goodput, double several_drafters,
                 double max_min_survival)
        : batch_{std::move(rooms), std::move(weights), std::move(extra), goodput}, rules_{several_drafters, max_min_survival} {
        if (batch_.rooms.size() != batch_.weights.size()) throw std::invalid_argument("each sequence must have one value");
    }

    // A drafter: log-odds by depth, mean and variance of each sequence's offset, the seconds that the j-th sequence to draft at a
    // depth adds, [sequences, depth], those of catching up by sequence, which sequences' drafts are verified whatever their scores,
    // samples of how scores move the odds of survival, [samples, depth]. Fills `survival`, [sequences, depth].
    void add(Numbers log_odds, Numbers means, Numbers variances, nb::handle seconds, Numbers catch_up, std::vector<bool> unjudged,
             nb::handle shifts, bool has_scores, bool stops_early, nb::handle survival) {
        wager::PlannedDrafter drafter;
        drafter.log_odds = std::move(log_odds), drafter.means = std::move(means), drafter.deviations = std::move(variances);
        for (double& each : drafter.deviations) each = std::sqrt(each);
        drafter.catch_up = std::move(catch_up), drafter.unjudged = std::move(unjudged);
        drafter.has_scores = has_scores, drafter.stops_early = stops_early;
        const Matrix out(survival);
        drafter.seconds = Matrix(seconds).table(), drafter.shifts = Matrix(shifts).table(), drafter.survival = out.table();
        for (size_t column = 0; column < drafter.shifts.columns; ++column)
            for (size_t row = 0; row < drafter.shifts.rows; ++row)
                drafter.shifts_by_depth.push_back(drafter.shifts.at(row, column));
        std::fill(drafter.survival.values.begin(), drafter.survival.values.end(), 0.0);
        for (const size_t size : {drafter.means.size(), drafter.deviations.size(), drafter.catch_up.size(), drafter.unjudged.size(),
                                  drafter.seconds.rows, drafter.survival.rows})
            if (size != batch_.weights.size()) throw std::invalid_argument("each sequence must have one value");
        if (drafter.seconds.columns != drafter.survival.columns) throw std::invalid_argument("each depth must have its seconds");
        if (batch_.extra.size() < drafter.survival.values.size() + 2) throw std::invalid_argument("seconds of too few rows");
        wager::forecast_survival(drafter, batch_.rooms);
        std::copy(drafter.survival.values.begin(), drafter.survival.values.end(), out.data());
        drafters_.push_back(std::move(drafter));
    }

    // Each sequence's drafter (-1: none), depth and min_survival (-1: none).
    nb::tuple choose(const Numbers& row_costs) const {
        const wager::ChosenPlan plan = wager::PlanChooser(rules_, batch_, drafters_).choose(row_costs);
        return nb::make_tuple(plan.drafters, plan.depths, plan.min_survival);
    }

  private:
    wager::PlannedSequences batch_;
    wager::PlanRules rules_;
    std::vector<wager::PlannedDrafter> drafters_;
};

}  // namespace

void bind_policy(nb::module_& m) {
    nb::class_<Filter>(m, "KalmanFilter")
        .def(nb::init<double, double, double, double, double, double, double, int, int, Numbers, double, double>(), nb::kw_only(),
             nb::arg("max_surprise"), nb::arg("drift"), nb::arg("noise_weight"), nb::arg("most_noise"),
             nb::arg("first_trend_weight"), nb::arg("trend_weight"), nb::arg("trend"), nb::arg("drift_interval"),
             nb::arg("trend_growth"), nb::arg("change"), nb::arg("noise"), nb::arg("uncertainty"))
        .def("update", &Filter::update)
        .def("deviation", &Filter::deviation)
        .def("values", &Filter::values)
        .def("__deepcopy__", [](const Filter& filter, nb::handle) { return Filter(filter); });
    nb::class_<TokenJudge>(m, "TokenJudge")
        .def(nb::init<Numbers, double>())
        .def("judge", &TokenJudge::judge, nb::arg("scores"), nb::arg("parents"), nb::arg("confidence_odds"), nb::arg("depth_odds"),
             nb::arg("offsets").none(), nb::arg("weights").none(), nb::arg("seconds"), nb::arg("first"), nb::arg("goodput"),
             nb::arg("limit"))
        .def("survival", &TokenJudge::survival)
        .def("__deepcopy__", [](nb::handle judge, nb::handle) { return nb::borrow(judge); });
    nb::class_<DraftPlanner>(m, "DraftPlanner")
        .def(nb::init<std::vector<long>, Numbers, Numbers, double, double, double>(), nb::kw_only(), nb::arg("rooms"),
             nb::arg("weights"), nb::arg("extra"), nb::arg("goodput"), nb::arg("several_drafters"), nb::arg("max_min_survival"))
        .def("add", &DraftPlanner::add, nb::kw_only(), nb::arg("log_odds"), nb::arg("means"), nb::arg("variances"),
             nb::arg("seconds"), nb::arg("catch_up"), nb::arg("unjudged"), nb::arg("shifts"), nb::arg("has_scores"),
             nb::arg("stops_early"), nb::arg("survival"))
        .def("choose", &DraftPlanner::choose);
}
