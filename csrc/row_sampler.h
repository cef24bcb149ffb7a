// The token of one row for a request with penalties, biases, a grammar or filters (top-k, top-p, min-p): that which
// verify/distribution.py's definition chooses. The sums that top-p compares are computed in another order than there, so where
// one is so near to its limit that the order might decide, nothing is chosen, and the definition is asked.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops.h"

namespace wager {

constexpr int32_t kNotFinite = -1, kUndecided = -2;

// Which ids may be chosen: 0, 1 and 0 are all of them.
struct Filters {
    int64_t top_k = 0;
    double top_p = 1, min_p = 0;

    bool none() const { return top_k <= 0 && top_p >= 1 && min_p <= 0; }
};

// Ids that a grammar allows, ascending; all if there are none.
struct Allowed {
    const int64_t* ids = nullptr;
    int64_t size = 0;
};

// Keeps its memory from row to row. For one thread.
class RowSampler {
  public:
    // `edits` may be in any order and are sorted. kNotFinite if a logit of the row is; kUndecided as above, and for edits that
    // floats do not hold well enough. Up to the temperature `greedy` the token is the likeliest of all that are allowed.
    int32_t sample(const Table& table, Draw draw, const Filters& filters, std::vector<Edit>& edits, Allowed allowed, double greedy) {
        MaxLogit top = table.max_logit(draw.logits, 0, draw.vocab);
        if (top.id < 0) return kNotFinite;
        const bool likeliest = draw.temperature <= greedy;
        if (likeliest) draw.temperature = 1;
        if (!edits.empty() || allowed.ids != nullptr) {
            if (!change(draw, edits, allowed)) return kUndecided;
            top = table.max_logit(draw.logits, 0, draw.vocab);
            if (top.value <= kBanned) return kUndecided;  // all that is allowed has that very logit
        }
        if (likeliest) {
            rank(table, draw, 1);
            return ranked_[0].id;
        }
        Filters active = filters;
        const int64_t size = allowed.ids != nullptr ? allowed.size : draw.vocab;
        if (active.top_k >= size) active.top_k = 0;
        if (active.none()) return table.draw(draw, top, 0, draw.vocab).id;
        if (active.top_k <= 0) {
            const int32_t token = first_that_passes(table, draw, active, top);
            if (token != kNone) return token;
        }
        const int count = survivors(table, draw, active, top.value);
        return count != kUnclear ? table.draw_among(draw, ranked_.data(), count).id : kUndecided;
    }

  private:
    static constexpr float kBanned = -std::numeric_limits<float>::max();
    static constexpr int kTries = 3;           // draws, before ids are ranked
    static constexpr int kFirstRanked = 256;   // ids that are ranked at first where a filter does not say how many
    static constexpr double kRounding = 1e-11;  // relative, of sums and logarithms that are computed in different ways
    static constexpr int32_t kNone = -3;        // instead of a token
    static constexpr int kUnclear = 0, kMore = -1;  // instead of a number of ids: rounding would decide it; more must be ranked
    enum class Passing { no, yes, unclear };

    // A copy of the row with what the request changes. False if a changed logit is not finite as a float, or so large beside
    // the temperature that its rounding matters: sums below are taken of the rounded row and then corrected.
    bool change(Draw& draw, std::vector<Edit>& edits, Allowed allowed) {
        row_.assign(draw.logits, draw.logits + draw.vocab);
        std::sort(edits.begin(), edits.end(), [](const Edit& a, const Edit& b) { return a.id < b.id; });
        for (const Edit& edit : edits) {
            if (!(std::abs(edit.logit) < 1e38) || edit.id < 0 || edit.id >= draw.vocab) return false;
            const float near = static_cast<float>(edit.logit);
            const float up = near < edit.logit ? std::nextafter(near, std::numeric_limits<float>::infinity()) : near;
            if (up - edit.logit > draw.temperature) return false;
            row_[edit.id] = up;
        }
        if (allowed.ids != nullptr) {
            int64_t next = 0;
            for (int64_t i = 0; i < allowed.size; next = allowed.ids[i++] + 1) {
                if (allowed.ids[i] < next || allowed.ids[i] >= draw.vocab) return false;
                std::fill(row_.begin() + next, row_.begin() + allowed.ids[i], kBanned);
            }
            std::fill(row_.begin() + next, row_.end(), kBanned);
            edits.erase(std::remove_if(edits.begin(), edits.end(), [&](const Edit& e) { return row_[e.id] == kBanned; }), edits.end());
        }
        draw.logits = row_.data(), draw.edits = edits.data(), draw.num_edits = static_cast<int>(edits.size());
        return true;
    }

    // As that of sample.h, which is compiled for one instruction set.
    static double logit(const Draw& draw, int32_t id) {
        const Edit* const end = draw.edits + draw.num_edits;
        const Edit* const found = std::lower_bound(draw.edits, end, id, [](const Edit& e, int32_t i) { return e.id < i; });
        return found != end && found->id == id ? found->logit : draw.logits[id];
    }

    // The `size` likeliest ids, or all that are allowed, with their scores z / T: by falling score, then by rising id.
    void rank(const Table& table, const Draw& draw, int64_t size) {
        constexpr int kPart = 2048;
        const auto before = [](const ScoredToken& a, const ScoredToken& b) {
            return a.score > b.score || (a.score == b.score && a.id < b.id);
        };
        const auto keep = [&] {
            if (static_cast<int64_t>(ranked_.size()) <= size) return;
            std::nth_element(ranked_.begin(), ranked_.begin() + (size - 1), ranked_.end(), before);
            ranked_.resize(size);
        };
        ranked_.clear();
        float limit = std::nextafter(kBanned, 0.0f);
        int32_t ids[kPart];
        for (int first = 0; first < draw.vocab; first += kPart) {
            const int found = table.at_least(draw.logits, first, std::min(first + kPart, draw.vocab), limit, ids);
            for (int i = 0; i < found; ++i) ranked_.push_back({logit(draw, ids[i]) / draw.temperature, ids[i]});
            if (static_cast<int64_t>(ranked_.size()) < 2 * size) continue;
            keep();
            // Rounded down, and z / T may be rounded too: no id that belongs to the likeliest is below it.
            limit = std::nextafter(static_cast<float>(logit(draw, ranked_[size - 1].id)), kBanned);
        }
        keep();
        std::sort(ranked_.begin(), ranked_.end(), before);
    }

    // The best of all ids, if it passes the filters, is the best of those that do; if not, the second best may be, and so on.
    // kNone if none of the first few passes, kUndecided if that is not clear of one.
    int32_t first_that_passes(const Table& table, Draw draw, const Filters& filters, MaxLogit top) {
        int32_t excluded[kTries];
        draw.excluded = excluded;
        double best = top.value / draw.temperature;
        if (draw.num_edits > 0) {
            rank(table, draw, 1);
            best = ranked_[0].score;
        }
        for (draw.num_excluded = 0; draw.num_excluded < kTries; ++draw.num_excluded) {
            const int32_t token = table.draw(draw, top, 0, draw.vocab).id;
            const ScoredToken drawn = {logit(draw, token) / draw.temperature, token};
            const Passing passing = passes(table, draw, filters, top, best, drawn);
            if (passing != Passing::no) return passing == Passing::yes ? token : kUndecided;
            excluded[draw.num_excluded] = token;
        }
        return kNone;
    }

    // Whether an id with its score z / T passes top-p and min-p. `best` is the greatest score, `top` the greatest of the row.
    static Passing passes(const Table& table, const Draw& draw, const Filters& filters, MaxLogit top, double best, ScoredToken token) {
        if (token.id == top.id && draw.num_edits == 0) return Passing::yes;
        if (filters.min_p > 0 && token.score < best) {
            const double limit = best + std::log(filters.min_p), slack = kRounding * (1 + std::abs(limit));
            if (token.score < limit - slack) return Passing::no;
            if (token.score < limit + slack) return Passing::unclear;
        }
        if (filters.top_p >= 1) return Passing::yes;
        // It is in the nucleus if the ids before it do not reach top_p.
        const Masses mass = masses_before(table, draw, top.value, token);
        const double limit = filters.top_p * mass.all, slack = mass.all * kRounding * (1 + 1e-3 * std::abs(best));
        if (mass.least >= limit + slack) return Passing::no;
        return mass.least < limit - slack ? Passing::yes : Passing::unclear;
    }

    // Sums of exp((z - peak) / T) over all ids, and over those before `token`: likelier ones, and equal ones with a lower id.
    static Masses masses_before(const Table& table, const Draw& draw, float peak, ScoredToken token) {
        const float value = draw.logits[token.id];
        const bool rounded = value > logit(draw, token.id);  // then an equal value is likelier, wherever it is
        const double after = rounded ? value : std::nextafter(value, std::numeric_limits<float>::infinity());
        const double t = draw.temperature;
        const auto weight = [&](double z) { return std::exp((z - peak) / t); };
        const int next = token.id + 1;
        const Masses low = table.masses(draw.logits, token.id, peak, t, value);
        const Masses high = table.masses(draw.logits + next, draw.vocab - next, peak, t, after);
        Masses sum = {low.all + high.all + weight(value), low.least + high.least};
        for (int i = 0; i < draw.num_edits; ++i) {  // the row has them rounded
            const Edit& edit = draw.edits[i];
            const float near = draw.logits[edit.id];
            const double old = weight(near), exact = weight(edit.logit), score = edit.logit / t;
            sum.all += exact - old;
            if (edit.id == token.id) continue;
            if (near >= (edit.id < token.id ? value : after)) sum.least -= old;
            if (score > token.score || (score == token.score && edit.id < token.id)) sum.least += exact;
        }
        return sum;
    }

    // How many of `ranked_`, which it fills, pass the filters, or kUnclear.
    int survivors(const Table& table, const Draw& draw, const Filters& filters, float peak) {
        for (int64_t size = filters.top_k > 0 ? filters.top_k : kFirstRanked;; size *= 8) {
            rank(table, draw, size);
            const bool whole = filters.top_k > 0 || static_cast<int64_t>(ranked_.size()) < size;
            int count = nucleus(table, draw, filters, peak, whole);
            if (count > 0) count = likely(filters, count, whole || count < static_cast<int>(ranked_.size()));
            if (count != kMore) return count;
        }
    }

    // The size of the smallest leading set whose probability reaches top_p, kMore or kUnclear.
    int nucleus(const Table& table, const Draw& draw, const Filters& filters, float peak, bool whole) const {
        const int n = static_cast<int>(ranked_.size());
        if (filters.top_p >= 1 || (whole && n == 1)) return n;
        const double best = ranked_[0].score;
        double total = 0;
        if (whole)
            for (const ScoredToken& each : ranked_) total += std::exp(each.score - best);
        else
            total = masses_before(table, draw, peak, ranked_[0]).all * std::exp(peak / draw.temperature - best);
        const double limit = filters.top_p * total, slack = limit * kRounding * (1 + 1e-3 * std::abs(best));
        double reached = 0;
        for (int i = 0; i < n; ++i) {
            reached += std::exp(ranked_[i].score - best);
            if (reached >= limit - slack) return reached < limit + slack ? kUnclear : i + 1;
        }
        return whole ? n : kMore;
    }

    // Of the first `count` those at least min_p times as likely as the likeliest, or kUnclear; kMore if all of them are, unless
    // `closed`: no further id may be one.
    int likely(const Filters& filters, int count, bool closed) const {
        if (filters.min_p <= 0) return count;
        const double limit = ranked_[0].score + std::log(filters.min_p), slack = kRounding * (1 + std::abs(limit));
        for (int i = 1; i < count; ++i) {
            if (ranked_[i].score >= limit + slack || ranked_[i].score == ranked_[0].score) continue;
            return ranked_[i].score < limit - slack ? i : kUnclear;
        }
        return closed ? count : kMore;
    }

    std::vector<float> row_;
    std::vector<ScoredToken> ranked_;
};

}  // namespace wager
