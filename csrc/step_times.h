// What steps and drafting take by their shape, corrected by what they took; economics/surface.py says what of, and why.
// tests/oracle/step_times.py has the same in Python. Knows no Python.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "kalman.h"

namespace wager {

// The knot right of a value and the share of the way to it from its left neighbour, above 1 beyond the last; (0, 0) below the first
// knot, and where there is only one.
struct Place {
    size_t right = 0;
    double share = 0.0;

    Place(const std::vector<double>& knots, double value) {
        right = static_cast<size_t>(std::upper_bound(knots.begin(), knots.end(), value) - knots.begin());
        if (right == 0 || knots.size() == 1) {
            right = 0;
            return;
        }
        right = std::min(right, knots.size() - 1);
        share = (value - knots[right - 1]) / (knots[right] - knots[right - 1]);
    }

    // Calls with each knot beside the value and its weight.
    template <class Use>
    void each(Use use) const {
        if (right == 0) return use(size_t{0}, 1.0);
        use(right - 1, 1.0 - share);
        use(right, share);
    }
};

// The shape of a step.
struct StepShape {
    double rows, requests, context_sum;

    double pairs() const { return requests != 0.0 ? rows * context_sum / requests : 0.0; }
};

class StepTimes {
  public:
    // The filter follows the logs of the scale, of what rows cost and of each knot, the cost of a request, and then
    // what a caller follows besides, of which a step that is observed here tells nothing.
    StepTimes(KalmanFilter filter, std::vector<double> rows, std::vector<double> fitted, double per_request, double per_context,
              double per_pair)
        : per_context(per_context),
          per_pair(per_pair),
          filter(std::move(filter)),
          rows_(std::move(rows)),
          fitted_(std::move(fitted)),
          fitted_per_request_(per_request) {
        correct();
    }

    double seconds(const StepShape& shape) const {
        size_t right = 0;
        return shape.rows > 0.0 ? seconds_from(shape, right) : 0.0;
    }

    // Of several counts of rows, ascending.
    std::vector<double> seconds_by_rows(const std::vector<double>& counts, double requests, double context_sum) const {
        std::vector<double> taken;
        size_t right = 0;
        for (const double count : counts) taken.push_back(seconds_from({count, requests, context_sum}, right));
        return taken;
    }

    // Seconds that a unit of each unknown adds to a step.
    std::vector<double> slopes(const StepShape& shape) const {
        std::vector<double> found(rows_.size() + 3);
        double curve = 0.0;
        Place place(rows_, shape.rows);
        if (place.right && corrected[place.right] < corrected[place.right - 1]) place.share = std::min(1.0, place.share);
        place.each([&](size_t knot, double weight) {
            const double seconds = weight * scale * corrected[knot];
            found[1] += seconds * (1.0 - fitted_[0] / uncorrected_[knot]);
            found[2 + knot] = seconds;
            curve += seconds;
        });
        const double others = per_request * shape.requests + per_context * shape.context_sum + per_pair * shape.pairs();
        found[0] = curve + scale * others;
        found.back() = scale * fitted_[0] * shape.requests;
        return found;
    }

    // A step of this shape took that long.
    void observe(const StepShape& shape, double taken) {
        const double expected = seconds(shape);
        std::vector<double> relative = slopes(shape);
        for (double& slope : relative) slope /= expected;
        relative.resize(filter.size());
        filter.update(relative, std::log(taken / expected));
        correct();
    }

    // How uncertain the difference in seconds is between this step and each of others that differ in rows alone.
    std::vector<double> deviations(const StepShape& shape, const std::vector<double>& others) const {
        const std::vector<double> one = slopes(shape);
        std::vector<double> found;
        for (const double count : others) {
            std::vector<double> other = slopes({count, shape.requests, shape.context_sum});
            for (size_t i = 0; i < one.size(); ++i) other[i] -= one[i];
            other.resize(filter.size());
            found.push_back(filter.deviation(other));
        }
        return found;
    }

    // Takes over what the filter says.
    void correct() {
        const std::vector<double>& values = filter.values();
        const double first = fitted_[0];
        filter.keep_above(2 + fitted_.size(), -fitted_per_request_ / first);
        const double row_cost = std::exp(values[1]);
        scale = std::exp(values[0]);
        uncorrected_.clear(), corrected.clear();
        for (size_t knot = 0; knot < fitted_.size(); ++knot) {
            uncorrected_.push_back(first + std::max(row_cost * (fitted_[knot] - first), 1e-3 * first - first));
            corrected.push_back(uncorrected_[knot] * std::exp(values[2 + knot]));
        }
        per_request = std::max(0.0, fitted_per_request_ + first * values[2 + fitted_.size()]);
    }

    double scale = 1.0, per_request = 0.0, per_context, per_pair;
    std::vector<double> corrected;
    KalmanFilter filter;

  private:
    // `right`: the first knot beyond the rows of the last call, which had no more.
    double seconds_from(const StepShape& shape, size_t& right) const {
        const size_t last = rows_.size();
        while (right < last && rows_[right] <= shape.rows) ++right;
        double curve = corrected[0];
        if (right != 0 && last != 1) {
            const size_t at = std::min(right, last - 1);
            const double left = corrected[at - 1], rise = corrected[at] - left;
            const double share = (shape.rows - rows_[at - 1]) / (rows_[at] - rows_[at - 1]);
            curve = share <= 1.0 ? left + rise * share : corrected[at] + std::max(0.0, rise) * (share - 1.0);
        }
        return scale * (curve + (per_request * shape.requests + per_context * shape.context_sum + per_pair * shape.pairs()));
    }

    std::vector<double> rows_, fitted_, uncorrected_;
    double fitted_per_request_;
};

class DraftTimes {
  public:
    // The filter follows the logs of what a call and a token cost, and of both at each number of requests.
    DraftTimes(KalmanFilter filter, std::vector<double> requests, std::vector<double> per_call, std::vector<double> per_token)
        : per_call(per_call),
          per_token(per_token),
          filter_(std::move(filter)),
          requests_(std::move(requests)),
          fitted_call_(std::move(per_call)),
          fitted_token_(std::move(per_token)) {}

    std::vector<double> seconds_by_depth(double requests, const std::vector<double>& depths) const {
        const Place place(requests_, requests);
        std::vector<double> found;
        for (const double depth : depths) found.push_back(seconds(place, depth));
        return found;
    }

    // A call took that long. False, and nothing is learned, where it was believed to take no time.
    bool observe(double requests, double depth, double taken) {
        const double expected = seconds(Place(requests_, requests), depth);
        if (expected <= 0.0) return false;
        const Place place(requests_, std::min(requests, requests_.back()));  // slopes beyond the last knot are its own
        const double nearest = seconds(place, depth);
        std::vector<double> slopes(2 + requests_.size());
        double call = 0.0;
        place.each([&](size_t knot, double weight) {
            call += weight * per_call[knot] / nearest;
            slopes[2 + knot] = weight * (per_call[knot] + depth * per_token[knot]) / nearest;
        });
        slopes[0] = call, slopes[1] = 1.0 - call;
        filter_.update(slopes, std::log(taken / expected));
        const std::vector<double>& values = filter_.values();
        for (size_t knot = 0; knot < requests_.size(); ++knot) {
            per_call[knot] = fitted_call_[knot] * std::exp(values[0] + values[2 + knot]);
            per_token[knot] = fitted_token_[knot] * std::exp(values[1] + values[2 + knot]);
        }
        return true;
    }

    std::vector<double> per_call, per_token;

  private:
    // Beyond the last knot the last line goes on if it rises.
    double seconds(const Place& place, double depth) const {
        const size_t left = place.right ? place.right - 1 : 0, right = place.right;
        const double fewer = per_call[left] + depth * per_token[left], more = per_call[right] + depth * per_token[right];
        const double share = more < fewer ? std::min(1.0, place.share) : place.share;
        return (1.0 - share) * fewer + share * more;
    }

    KalmanFilter filter_;
    std::vector<double> requests_, fitted_call_, fitted_token_;
};

}  // namespace wager
