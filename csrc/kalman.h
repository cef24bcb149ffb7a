// The Kalman filter of economics/surface.py, which says what it does and why. Knows no Python.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace wager {

struct FilterRules {
    double max_surprise, drift, noise_weight, most_noise, passing, first_trend_weight, trend_weight, trend;
    int drift_interval, trend_growth;
};

class KalmanFilter {
  public:
    // `change` is a covariance, row by row.
    KalmanFilter(const FilterRules& rules, std::vector<double> change, double noise, double uncertainty)
        : rules_(rules), change_(std::move(change)), least_noise_(noise), noise_(noise), jitter_(noise) {
        const size_t size = static_cast<size_t>(std::lround(std::sqrt(static_cast<double>(change_.size()))));
        values_.assign(size, 0.0);
        towards_.assign(size, 0.0);
        with_passing_.assign(size, 0.0);
        for (const double each : change_) covariance_.push_back(each * (uncertainty * uncertainty));
        for (size_t i = 0; i < size; ++i) variances_.push_back(covariance_[i * size + i]);
    }

    size_t size() const { return values_.size(); }
    const std::vector<double>& values() const { return values_; }

    void update(const std::vector<double>& slopes, double error) {
        const size_t n = size();
        if (++observations_ % rules_.drift_interval == 0) drift();
        const double alone = std::min(noise_, jitter_), kept = rules_.passing;
        passing_ *= kept, passing_variance_ = kept * kept * passing_variance_ + (1 - kept * kept) * (noise_ - alone);
        double known = 0.0, shared = 0.0;
        for (size_t i = 0; i < n; ++i) {
            with_passing_[i] *= kept;
            double sum = 0.0;
            for (size_t j = 0; j < n; ++j)
                if (slopes[j] != 0.0) sum += covariance_[i * n + j] * slopes[j];
            towards_[i] = sum;
        }
        for (size_t i = 0; i < n; ++i)
            if (slopes[i] != 0.0) known += slopes[i] * towards_[i], shared += slopes[i] * with_passing_[i];
        const double shift = observations_ > 1 ? error - last_error_ : 0.0;
        jitter_ += rules_.noise_weight * (bounded(std::min(shift * shift / 2, jitter_ * most_squared())) - jitter_);
        last_error_ = error;
        const double most = rules_.max_surprise, towards_passing = shared + passing_variance_;
        const double variance = known + shared + towards_passing + alone, deviation = std::sqrt(variance);
        const double surprise = std::max(-most, std::min(most, (error - passing_) / deviation));
        for (size_t i = 0; i < n; ++i) towards_[i] += with_passing_[i], values_[i] += towards_[i] * (surprise / deviation);
        passing_ += towards_passing * (surprise / deviation);
        if (std::abs(surprise) < most) {
            for (size_t i = 0; i < n; ++i) {
                for (size_t j = 0; j < n; ++j) covariance_[i * n + j] -= towards_[i] * (towards_[j] / variance);
                with_passing_[i] -= towards_[i] * (towards_passing / variance);
            }
            passing_variance_ -= towards_passing * (towards_passing / variance);
        }
        noise_ += rules_.noise_weight * (bounded(std::min(error * error, (known + noise_) * most_squared()) - known) - noise_);
        // An offset that errors share is no part of what they differ by, so it stays visible however long it lasts.
        const double offset = std::max(-most, std::min(most, error / std::sqrt(known + jitter_)));
        const double grown = 1 / (1 / rules_.first_trend_weight + static_cast<double>(observations_) / rules_.trend_growth);
        trend_ += std::max(rules_.trend_weight, grown) * (offset - trend_);
        if (std::abs(trend_) > rules_.trend) {
            for (size_t i = 0; i < n * n; ++i) covariance_[i] += change_[i];
            trend_ = 0.0;
        }
    }

    // An unknown is `least` at least. The others move as far as they go with it, so that the seconds that were observed
    // stay explained (the mean under a constraint, Simon and Chia 2002).
    void keep_above(size_t unknown, double least) {
        const size_t n = size();
        const double missing = least - values_[unknown];
        if (missing <= 0.0) return;
        const double variance = covariance_[unknown * n + unknown];
        for (size_t i = 0; i < n; ++i) values_[i] += covariance_[i * n + unknown] * (missing / variance);
        passing_ += with_passing_[unknown] * (missing / variance);
    }

    double deviation(const std::vector<double>& slopes) const {
        const size_t n = size();
        double sum = 0.0;
        for (size_t i = 0; i < n; ++i)
            if (slopes[i] != 0.0)
                for (size_t j = 0; j < n; ++j) sum += slopes[i] * covariance_[i * n + j] * slopes[j];
        return std::sqrt(std::max(0.0, sum));
    }

  private:
    double most_squared() const { return rules_.max_surprise * rules_.max_surprise; }

    double bounded(double variance) const {
        return std::min(std::max(variance, least_noise_), rules_.most_noise * rules_.most_noise);
    }

    void drift() {
        const size_t n = size();
        std::vector<char> drifts(n);
        for (size_t i = 0; i < n; ++i) drifts[i] = covariance_[i * n + i] < variances_[i];
        for (size_t i = 0; i < n; ++i)
            for (size_t j = 0; j < n; ++j)
                if (drifts[i] && drifts[j]) covariance_[i * n + j] += change_[i * n + j] * rules_.drift;
    }

    FilterRules rules_;
    std::vector<double> change_, covariance_, variances_, values_, towards_;
    // What slows the steps of a while: its value, variance, and covariance with each unknown.
    double passing_ = 0.0, passing_variance_ = 0.0;
    std::vector<double> with_passing_;
    double least_noise_, noise_, jitter_, last_error_ = 0.0, trend_ = 0.0;
    int observations_ = 0;
};

}  // namespace wager
