// The bindings of what the policy computes in small batches. As in step_bindings.cpp, they read the engine's own values.
#include <nanobind/stl/vector.h>

#include "judging.h"
#include "kalman.h"
#include "planning.h"
#include "step_bindings.h"
#include "values.h"

namespace nb = nanobind;
using wager::as_int, wager::Items, wager::Name, wager::ValueType;

namespace {

bool read_floats(PyObject* value, std::vector<double>& out, Py_ssize_t first = 0, Py_ssize_t most = PY_SSIZE_T_MAX) {
    Items items;
    if (!items.read(value)) return false;
    out.clear();
    for (Py_ssize_t i = first; i < items.size && i - first < most; ++i) {
        if (!PyFloat_Check(items.items[i])) return false;
        out.push_back(PyFloat_AS_DOUBLE(items.items[i]));
    }
    return true;
}

class Filter {
  public:
    Filter(nb::tuple rules, std::vector<double> change, double noise, double uncertainty)
        : filter_(read(rules), std::move(change), noise, uncertainty) {}

    void update(nb::handle slopes, double error) { filter_.update(checked(slopes), error); }
    double deviation(nb::handle slopes) { return filter_.deviation(checked(slopes)); }

    nb::list values() const {
        nb::list values;
        for (const double value : filter_.values()) values.append(value);
        return values;
    }

  private:
    static wager::FilterRules read(nb::tuple rules) {
        const auto at = [&](int i) { return nb::cast<double>(rules[i]); };
        return {at(0), at(1), at(2), at(3), at(4), at(5), static_cast<int>(at(6))};
    }

    const std::vector<double>& checked(nb::handle slopes) {
        if (!read_floats(slopes.ptr(), slopes_) || slopes_.size() != filter_.size())
            throw std::invalid_argument("slopes must be one float for each unknown");
        return slopes_;
    }

    wager::KalmanFilter filter_;
    std::vector<double> slopes_;
};

class TokenJudge {
  public:
    TokenJudge(nb::handle draft, std::vector<double> borders, double highest)
        : draft_(draft, {"seq_id", "tokens", "parents", "scores", "drafter", "draft_probs"}), rules_{std::move(borders), highest} {}

    // (what is taken of each of `drafts`, how many tokens, gain, cut or None, benefit) for drafts whose tokens have scores;
    // None for drafts without, or with draft_probs, or that are not as they should be. `corrections` and `weights` are one of
    // each draft, or one for all (no weights: 1), `seconds` those of 0, 1, ... more rows from `first` on.
    nb::object judge(nb::handle drafts, nb::handle corrections, nb::handle weights, nb::handle seconds, Py_ssize_t first,
                     double goodput, long limit) {
        Items tables, each_weight;
        const bool weighted = !weights.is_none();
        if (!PyDict_Check(drafts.ptr()) || !tables.read(corrections.ptr())) return nb::none();
        const Py_ssize_t count = PyDict_Size(drafts.ptr());
        if (tables.size != count && tables.size != 1) return nb::none();
        if (weighted && (!each_weight.read(weights.ptr()) || each_weight.size != count)) return nb::none();
        gains_.clear();
        starts_.clear();
        PyObject *key = nullptr, *draft = nullptr;
        Py_ssize_t at = 0;
        for (Py_ssize_t i = 0; PyDict_Next(drafts.ptr(), &at, &key, &draft); ++i) {
            starts_.push_back(gains_.size());
            const double weight = weighted ? PyFloat_AsDouble(each_weight.items[i]) : 1.0;
            if ((i < tables.size && !read_floats(tables.items[i], corrections_)) || !add(draft, weight)) {
                PyErr_Clear();
                return nb::none();
            }
        }
        starts_.push_back(gains_.size());
        if (!read_floats(seconds.ptr(), seconds_, first, gains_.size() + 1)) return nb::none();
        if (seconds_.size() <= gains_.size()) return nb::none();
        return result(drafts, wager::select_tokens(gains_, seconds_, goodput, limit));
    }

  private:
    bool add(PyObject* draft, double weight) {
        const nb::object scores = scores_of_.of(draft), parents = parents_of_.of(draft), probs = draft_probs_.of(draft);
        Items before;
        if (!read_floats(scores.ptr(), scores_) || !before.read(parents.ptr()) || !probs.is_none()) return false;
        if (scores_.size() != static_cast<size_t>(before.size)) return false;
        parents_.clear();
        for (Py_ssize_t i = 0; i < before.size; ++i) {
            int64_t parent = 0;
            if (!as_int(before.items[i], parent)) return false;
            parents_.push_back(parent);
        }
        if (corrections_.size() != rules_.borders.size() + 1) return false;
        return wager::add_survival(rules_, scores_, parents_, corrections_, weight, gains_);
    }

    nb::object result(nb::handle drafts, const wager::TakenTokens& taken) {
        const nb::object cut = taken.has_cut ? nb::object(nb::float_(taken.cut)) : nb::object(nb::none());
        nb::object admitted = nb::borrow(drafts);
        if (taken.nodes.size() < gains_.size()) admitted = kept(drafts, taken.nodes);
        return nb::make_tuple(admitted, taken.nodes.size(), taken.gain, cut, taken.benefit);
    }

    // The drafts with these nodes alone.
    nb::object kept(nb::handle drafts, std::vector<size_t> nodes) {
        std::sort(nodes.begin(), nodes.end());
        nb::dict admitted;
        PyObject *key = nullptr, *draft = nullptr;
        Py_ssize_t at = 0;
        size_t next = 0;
        for (size_t i = 0; PyDict_Next(drafts.ptr(), &at, &key, &draft); ++i) {
            const size_t begin = next;
            while (next < nodes.size() && nodes[next] < starts_[i + 1]) nodes[next++] -= starts_[i];
            const size_t size = next - begin;
            if (size == starts_[i + 1] - starts_[i])
                admitted[nb::handle(key)] = nb::borrow(draft);
            else if (size > 0)
                admitted[nb::handle(key)] = part(draft, &nodes[begin], size);
        }
        return admitted;
    }

    nb::object part(PyObject* draft, const size_t* nodes, size_t size) {
        const nb::object all[] = {tokens_of_.of(draft), parents_of_.of(draft), scores_of_.of(draft)};
        std::vector<long> renamed(PyTuple_Size(all[1].ptr()), -1);
        nb::object parts[3];
        for (nb::object& each : parts) each = nb::steal(PyTuple_New(size));
        for (size_t i = 0; i < size; ++i) {
            renamed[nodes[i]] = static_cast<long>(i);
            const long parent = PyLong_AsLong(PyTuple_GetItem(all[1].ptr(), nodes[i]));
            PyTuple_SET_ITEM(parts[1].ptr(), i, PyLong_FromLong(parent < 0 ? -1 : renamed[parent]));
            for (const int same : {0, 2})
                PyTuple_SET_ITEM(parts[same].ptr(), i, nb::borrow(PyTuple_GetItem(all[same].ptr(), nodes[i])).release().ptr());
        }
        return draft_.make({seq_id_.of(draft), parts[0], parts[1], parts[2], drafter_.of(draft), nb::none()});
    }

    ValueType draft_;
    wager::ConfidenceRules rules_;
    std::vector<double> gains_, seconds_, scores_, corrections_;
    std::vector<long> parents_;
    std::vector<size_t> starts_;
    const Name scores_of_{"scores"}, parents_of_{"parents"}, tokens_of_{"tokens"}, draft_probs_{"draft_probs"};
    const Name seq_id_{"seq_id"}, drafter_{"drafter"};
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

    wager::Table shaped() const { return wager::Table(view_.shape[0], view_.shape[1]); }
    double* data() const { return static_cast<double*>(view_.buf); }

  private:
    Py_buffer view_;
};

// A drafter as plan_choice.py gives it: log-odds by depth, shifts [samples, depth], seconds [sequences, depth], means, variances,
// seconds of catching up and what is unjudged, by sequence, whether it has scores and stops early, and where the survival goes.
wager::PlannedDrafter planned_drafter(nb::tuple from) {
    using Numbers = std::vector<double>;
    wager::PlannedDrafter drafter;
    drafter.log_odds = nb::cast<Numbers>(from[0]);
    const Matrix shifts(from[1]), survival(from[9]);
    drafter.shifts = shifts.shaped();
    std::copy_n(shifts.data(), drafter.shifts.values.size(), drafter.shifts.values.begin());
    const auto seconds = nb::cast<std::vector<Numbers>>(from[2]);
    drafter.means = nb::cast<Numbers>(from[3]), drafter.deviations = nb::cast<Numbers>(from[4]);
    for (double& each : drafter.deviations) each = std::sqrt(each);
    drafter.catch_up = nb::cast<Numbers>(from[5]), drafter.unjudged = nb::cast<std::vector<bool>>(from[6]);
    drafter.has_scores = nb::cast<bool>(from[7]), drafter.stops_early = nb::cast<bool>(from[8]);
    drafter.survival = survival.shaped();
    drafter.seconds = wager::Table(seconds.size(), drafter.survival.columns);
    for (size_t row = 0; row < seconds.size(); ++row) {
        if (seconds[row].size() < drafter.seconds.columns) throw std::invalid_argument("seconds must be given for every depth");
        std::copy_n(seconds[row].begin(), drafter.seconds.columns, &drafter.seconds.at(row, 0));
    }
    for (const size_t size : {seconds.size(), drafter.means.size(), drafter.deviations.size(), drafter.catch_up.size(),
                              drafter.unjudged.size()})
        if (size != drafter.survival.rows) throw std::invalid_argument("each sequence must have one value");
    return drafter;
}

nb::tuple plan_drafts(nb::list drafters, std::vector<long> rooms, std::vector<double> weights, std::vector<double> extra,
                      double goodput, std::vector<double> row_costs, double several_drafters, double max_min_survival) {
    std::vector<wager::PlannedDrafter> planned;
    for (nb::handle each : drafters) {
        planned.push_back(planned_drafter(nb::cast<nb::tuple>(each)));
        wager::PlannedDrafter& drafter = planned.back();
        if (drafter.survival.rows != weights.size() || rooms.size() != weights.size())
            throw std::invalid_argument("each sequence must have one value");
        if (extra.size() < drafter.survival.values.size() + 2) throw std::invalid_argument("seconds of too few rows");
        wager::forecast_survival(drafter, rooms);
        const Matrix out(nb::cast<nb::tuple>(each)[9]);
        std::copy(drafter.survival.values.begin(), drafter.survival.values.end(), out.data());
    }
    const wager::PlannedSequences batch{std::move(rooms), std::move(weights), std::move(extra), goodput};
    const wager::PlanRules rules{several_drafters, max_min_survival};
    const wager::ChosenPlan plan = wager::PlanChooser(rules, batch, planned).choose(row_costs);
    return nb::make_tuple(plan.drafters, plan.depths, plan.min_survival, plan.profit);
}

}  // namespace

void bind_policy(nb::module_& m) {
    m.def("plan_drafts", &plan_drafts);
    nb::class_<Filter>(m, "KalmanFilter")
        .def(nb::init<nb::tuple, std::vector<double>, double, double>())
        .def("update", &Filter::update)
        .def("deviation", &Filter::deviation)
        .def("values", &Filter::values)
        .def("__deepcopy__", [](const Filter& filter, nb::handle) { return Filter(filter); });
    nb::class_<TokenJudge>(m, "TokenJudge")
        .def(nb::init<nb::handle, std::vector<double>, double>())
        .def("__deepcopy__", [](nb::handle judge, nb::handle) { return nb::borrow(judge); })
        .def("judge", &TokenJudge::judge, nb::arg("drafts"), nb::arg("corrections"), nb::arg("weights").none(),
             nb::arg("seconds"), nb::arg("first"), nb::arg("goodput"), nb::arg("limit"));
}
