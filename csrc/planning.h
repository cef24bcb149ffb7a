// Before drafting: which drafter each sequence uses, and how deep. Each drafter is evaluated for every sequence and depth; plans
// are made for assumed costs of a row, and the most profitable one is kept. Profit is weighted tokens - goodput * seconds.
// Draft tokens with scores can still be rejected before they are verified: one gains what survives that, and takes a row only
// then. tests/oracle/planning.py has the same in numpy. Knows no Python.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace wager {

using Numbers = std::vector<double>;

// [sequences, depth] or [samples, depth], row by row.
struct NumberTable {
    size_t rows = 0, columns = 0;
    Numbers values;

    NumberTable() = default;
    NumberTable(size_t rows, size_t columns, double value = 0.0) : rows(rows), columns(columns), values(rows * columns, value) {}
    double& at(size_t row, size_t column) { return values[row * columns + column]; }
    double at(size_t row, size_t column) const { return values[row * columns + column]; }
};

// A drafter; `seconds` are those that the j-th sequence to draft at a depth adds, `shifts` samples of how scores move survival.
struct PlannedDrafter {
    Numbers log_odds, means, deviations, catch_up;
    NumberTable seconds, shifts, survival;
    Numbers shifts_by_depth;  // the same, column by column
    std::vector<bool> unjudged;
    bool has_scores = false, stops_early = false;
};

struct PlannedSequences {
    std::vector<long> rooms;
    Numbers weights, extra;  // `extra`: seconds that 0, 1, ... more rows add
    double goodput = 0.0;
};

struct ChosenPlan {
    std::vector<long> drafters, depths;
    Numbers min_survival;
    double profit = 0.0;
};

// Survival of depths 1, 2, ... averaged over what the offset of a sequence in log-odds may be (Gauss-Hermite quadrature).
inline void forecast_survival(PlannedDrafter& drafter, const std::vector<long>& rooms) {
    const double points[] = {-std::sqrt(3.0), 0.0, std::sqrt(3.0)}, weights[] = {1.0 / 6, 2.0 / 3, 1.0 / 6};
    NumberTable& survival = drafter.survival;
    for (size_t row = 0; row < survival.rows; ++row)
        for (int point = 0; point < 3; ++point) {
            double reached = 1.0;
            for (size_t depth = 0; depth < survival.columns && static_cast<long>(depth) < rooms[row]; ++depth) {
                const double known = drafter.log_odds[std::min(depth, drafter.log_odds.size() - 1)];
                reached /= 1.0 + std::exp(-(known + drafter.means[row] + drafter.deviations[row] * points[point]));
                survival.at(row, depth) += weights[point] * reached;
            }
        }
}

// What a drafter is worth to every sequence, down to `depth`.
struct DrafterWorth {
    NumberTable gain, rows, drafted, net;
    Numbers profit, min_survival;
    size_t depth = 0;
    double shared_cost = 0.0;
};

class PlanChooser {
  public:
    PlanChooser(double max_min_survival, const PlannedSequences& batch, const std::vector<PlannedDrafter>& drafters)
        : max_min_survival_(max_min_survival), batch_(batch), drafters_(drafters), size_(batch.weights.size()) {}

    // The plan of greatest profit; none drafts where no plan's exceeds `overhead`.
    ChosenPlan choose(const Numbers& row_costs, double overhead) const {
        ChosenPlan best{std::vector<long>(size_, -1), std::vector<long>(size_, 0), Numbers(size_, -1.0), overhead};
        for (const double row_cost : row_costs) {
            std::vector<DrafterWorth> worths;
            for (const PlannedDrafter& drafter : drafters_) worths.push_back(worth(drafter, row_cost));
            ChosenPlan plan = depths(worths, assign(worths));
            if (plan.profit > best.profit) best = std::move(plan);
            // once all draft, the plan for another cost is no better
            if (std::all_of(best.depths.begin(), best.depths.end(), [](long depth) { return depth > 0; })) break;
        }
        return best;
    }

  private:
    DrafterWorth worth(const PlannedDrafter& drafter, double row_cost) const {
        const size_t columns = drafter.survival.columns;
        DrafterWorth worth;
        worth.min_survival = min_survival(drafter, row_cost);
        worth.gain = drafter.survival, worth.net = NumberTable(size_, columns);
        worth.rows = NumberTable(size_, columns), worth.drafted = NumberTable(size_, columns, 1.0);
        for (size_t row = 0; row < size_; ++row) admission(drafter, row, row_cost, worth);
        NumberTable profit(size_, columns);
        Numbers drafting(columns, 0.0);
        const size_t last = drafter.seconds.rows - 1;
        for (size_t row = 0; row < size_; ++row) {
            double net = 0.0, sum = 0.0;
            for (size_t k = 0; k < columns; ++k) {
                worth.gain.at(row, k) *= batch_.weights[row];
                const double mine = worth.gain.at(row, k) - row_cost * worth.rows.at(row, k);
                net = k == 0 ? mine : std::min(net, mine);
                worth.net.at(row, k) = net;
                sum += net - batch_.goodput * drafter.seconds.at(last, k) * worth.drafted.at(row, k);
                profit.at(row, k) = sum;
                if (sum > 0) drafting[k] += worth.drafted.at(row, k);
            }
        }
        settle(drafter, profit, drafting, worth);
        return worth;
    }

    Numbers min_survival(const PlannedDrafter& drafter, double row_cost) const {
        Numbers least(size_, -1.0);
        if (!drafter.stops_early || !drafter.has_scores) return least;
        const double next_rate = 1.0 / (1.0 + std::exp(-drafter.log_odds[1]));
        const size_t second = std::min<size_t>(1, drafter.seconds.columns - 1);  // the first one has the call's own seconds
        const double pass = batch_.goodput * drafter.seconds.at(drafter.seconds.rows - 1, second);
        const double cost = (row_cost + pass) / next_rate;
        for (size_t row = 0; row < size_; ++row) least[row] = std::min(cost / batch_.weights[row], max_min_survival_);
        return least;
    }

    // The gain (survival so far), the rows and the passes to expect of one sequence.
    void admission(const PlannedDrafter& drafter, size_t row, double row_cost, DrafterWorth& worth) const {
        const size_t columns = drafter.survival.columns, samples = drafter.shifts.rows;
        if (!drafter.has_scores || drafter.unjudged[row]) {
            for (size_t k = 0; k < columns; ++k) worth.rows.at(row, k) = drafter.survival.at(row, k) > 0;
            return;
        }
        const double least_admitted = row_cost / batch_.weights[row], least = worth.min_survival[row];
        Numbers &later = later_, &before = before_;
        later.resize(samples), before.resize(samples);
        for (size_t k = 0; k < columns; ++k) {
            const double survival = drafter.survival.at(row, k), odds = survival / std::max(1 - survival, 1e-6);
            double sum = 0.0, gain = 0.0;
            size_t verified = 0, drafted = 0;
            const double* const shift = drafter.shifts_by_depth.data() + std::min(k, drafter.shifts.columns - 1) * samples;
            for (size_t i = 0; i < samples; ++i) later[i] = odds * shift[i] / (1 + odds * shift[i]);
            for (size_t i = 0; i < samples; ++i) sum += later[i];
            const double scale = survival / std::max(sum / samples, 1e-9);
            for (size_t i = 0; i < samples; ++i) {
                later[i] = std::min(later[i] * scale, 1.0);
                if (k > 0 && !(before[i] > least)) continue;
                ++drafted;
                if (later[i] > least_admitted) ++verified, gain += later[i];
            }
            worth.gain.at(row, k) = gain / samples;
            worth.rows.at(row, k) = static_cast<double>(verified) / samples;
            worth.drafted.at(row, k) = static_cast<double>(drafted) / samples;
            std::swap(before, later);
        }
    }

    // The depth to which passes pay for all sequences together, and what each gains there.
    void settle(const PlannedDrafter& drafter, const NumberTable& profit, const Numbers& drafting, DrafterWorth& worth) const {
        double shared = 0.0, most = 0.0;
        NumberTable best(size_, profit.columns);
        for (size_t k = 0; k < profit.columns; ++k) {
            shared += batch_.goodput * shared_seconds(drafter.seconds, k, drafting[k]);
            double total = -shared;
            for (size_t row = 0; row < size_; ++row) {
                const double above = k ? best.at(row, k - 1) : profit.at(row, 0);
                best.at(row, k) = std::max(above, profit.at(row, k));
                total += std::max(0.0, best.at(row, k) - batch_.goodput * drafter.catch_up[row]);
            }
            if (k == 0 || total > most) most = total, worth.depth = k + 1, worth.shared_cost = shared;
        }
        for (size_t row = 0; row < size_; ++row)
            worth.profit.push_back(std::max(0.0, best.at(row, worth.depth - 1) - batch_.goodput * drafter.catch_up[row]));
    }

    static double shared_seconds(const NumberTable& seconds, size_t column, double drafting) {
        const size_t last = seconds.rows - 1, whole = std::min(static_cast<size_t>(drafting), last);
        double lower = 0.0;
        for (size_t row = 0; row < whole; ++row) lower += seconds.at(row, column) - seconds.at(last, column);
        const double next = seconds.at(whole, column) - seconds.at(last, column);
        return std::max(lower + next * (drafting - static_cast<double>(whole)), 0.0);
    }

    // Each sequence's drafter (-1: none), the one of those that are left that is worth most to it. All are at first; while it is more
    // profitable without one of them, the one that costs most beside what it brings goes.
    std::vector<long> assign(const std::vector<DrafterWorth>& worths) const {
        std::vector<size_t> left;
        for (size_t index = 0; index < worths.size(); ++index) left.push_back(index);
        std::vector<long> choice;
        double best = assign_among(worths, left, choice);
        for (bool better = true; better && left.size() > 1;) {
            better = false;
            const std::vector<size_t> before = left;
            for (const size_t gone : before) {
                std::vector<size_t> fewer;
                for (const size_t index : before)
                    if (index != gone) fewer.push_back(index);
                std::vector<long> assigned;
                const double total = assign_among(worths, fewer, assigned);
                if (total > best) best = total, choice = assigned, left = fewer, better = true;
            }
        }
        return choice;
    }

    // The profit of all sequences where each drafter is one of `among`; `assigned`: these drafters.
    double assign_among(const std::vector<DrafterWorth>& worths, const std::vector<size_t>& among, std::vector<long>& assigned) const {
        assigned.assign(size_, -1);
        std::vector<bool> used(worths.size());
        double total = 0.0;
        for (size_t row = 0; row < size_; ++row) {
            double most = 0.0;
            for (const size_t index : among)
                if (worths[index].profit[row] > most) most = worths[index].profit[row], assigned[row] = static_cast<long>(index);
            if (most > 0) total += most, used[assigned[row]] = true;
        }
        for (const size_t index : among)
            if (used[index]) total -= worths[index].shared_cost;
        return total;
    }

    struct Cell {
        size_t row, depth;
        double net, gain, rows, seconds;
    };

    ChosenPlan depths(const std::vector<DrafterWorth>& worths, std::vector<long> assigned) const {
        std::vector<Cell> cells;
        for (size_t index = 0; index < worths.size(); ++index) {
            const DrafterWorth& worth = worths[index];
            for (size_t k = 0; k < worth.depth; ++k) {
                const std::vector<size_t> rank = ranks(worth.net, assigned, static_cast<long>(index), k);
                for (size_t row = 0; row < size_; ++row) {
                    if (assigned[row] != static_cast<long>(index) || static_cast<long>(k) >= batch_.rooms[row]) continue;
                    const double taken = drafters_[index].seconds.at(rank[row], k) * worth.drafted.at(row, k);
                    cells.push_back({row, k, worth.net.at(row, k), worth.gain.at(row, k), worth.rows.at(row, k), taken});
                }
            }
        }
        std::sort(cells.begin(), cells.end(), [](const Cell& a, const Cell& b) {
            return a.net != b.net ? a.net > b.net : a.row != b.row ? a.row < b.row : a.depth < b.depth;
        });
        double gain = 0.0, rows = 0.0, seconds = 0.0;
        ChosenPlan plan{assigned, std::vector<long>(size_, 0), Numbers(size_, -1.0), 0.0};
        plan.profit = -batch_.goodput * batch_.extra[0];
        size_t taken = 0;
        for (size_t number = 1; number <= cells.size(); ++number) {
            const Cell& cell = cells[number - 1];
            gain += cell.gain, rows += cell.rows, seconds += cell.seconds;
            const size_t below = static_cast<size_t>(rows);
            const double low = batch_.extra[below], of_rows = (batch_.extra[below + 1] - low) * (rows - below) + low;
            const double profit = gain - batch_.goodput * (of_rows + seconds);
            if (profit > plan.profit) plan.profit = profit, taken = number;
        }
        for (size_t number = 0; number < taken; ++number) ++plan.depths[cells[number].row];
        for (size_t row = 0; row < size_; ++row)
            if (assigned[row] >= 0) plan.min_survival[row] = worths[assigned[row]].min_survival[row];
        return plan;
    }

    // Of each sequence at depth k the rank of its net gain among those of its drafter, from 0 for the greatest.
    static std::vector<size_t> ranks(const NumberTable& net, const std::vector<long>& assigned, long drafter, size_t k) {
        std::vector<size_t> order, ranks(assigned.size());
        for (size_t row = 0; row < assigned.size(); ++row)
            if (assigned[row] == drafter) order.push_back(row);
        std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return net.at(a, k) > net.at(b, k); });
        for (size_t place = 0; place < order.size(); ++place) ranks[order[place]] = place;
        return ranks;
    }

    double max_min_survival_;
    const PlannedSequences& batch_;
    const std::vector<PlannedDrafter>& drafters_;
    size_t size_;
    mutable Numbers later_, before_;
};

}  // namespace wager
