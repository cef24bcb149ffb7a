// Sampling by instruction set: the noise field of draws, argmax over ids with that noise, the sums that top-p compares, and the
// guess of each row of a draft model's or head's logits.
#pragma once

#include <cmath>

#include "noise.h"

namespace wager::WAGER_NS {

// ---- the noise: of one id, exact to the definition (noise.h); and of sixteen counters at a time

inline double gumbel(const Draw& draw, int id) { return gumbel(draw.seed, draw.position, draw.choice, id); }

// Upper words of the noise of ids 2 * counter and 2 * counter + 1, for sixteen counters c0.
WAGER_INLINE void philox_uppers(const Draw& draw, U c0, U& even, U& odd) {
    U c1 = splat_u(draw.position), c2 = splat_u(draw.choice), c3 = splat_u(0);
    uint32_t k0 = static_cast<uint32_t>(draw.seed), k1 = static_cast<uint32_t>(draw.seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round, k0 += kPhiloxW0, k1 += kPhiloxW1) {
        U a_high, a_low, b_high, b_low;
        multiply(c0, kPhiloxM0, a_high, a_low);
        multiply(c2, kPhiloxM1, b_high, b_low);
        c0 = exor(exor(b_high, c1), splat_u(k0));
        c2 = exor(exor(a_high, c3), splat_u(k1));
        c1 = b_low;
        c3 = a_low;
    }
    even = c1;
    odd = c3;
}

// ---- draws

// The argmax over ids of z / T + g, g the Gumbel field, is an exponential race. With E = -log1p(-u) an id can only win if
// u <= E <= exp(z / T - best), so sixteen lanes of float arithmetic discard nearly every id on the upper bits of u, and
// the few that remain are scored in double, exactly as the definition says. The token is that of the float64 definition.

// The exact logit of an id, which `draw.logits` has rounded where it was changed.
inline double logit(const Draw& draw, int id) {
    int first = 0, last = draw.num_edits;
    while (first < last) {
        const int middle = (first + last) / 2;
        if (draw.edits[middle].id < id) first = middle + 1;
        else last = middle;
    }
    return first < draw.num_edits && draw.edits[first].id == id ? draw.edits[first].logit : draw.logits[id];
}

struct Race {
    const Draw& draw;
    MaxLogit top;
    const int32_t* ids;  // whose noise belongs to each logit; or null: its own
    ScoredToken best;
    float bound;  // exp(top / T - best score), with slack for float rounding

    Race(const Draw& draw_, MaxLogit top_, const int32_t* ids_) : draw(draw_), top(top_), ids(ids_), best{score(top_.id), top_.id} {
        update_bound();
    }
    double score(int id) const { return logit(draw, id) / draw.temperature + gumbel(draw, ids ? ids[id] : id); }

    void consider(int id) {
        if (id == best.id) return;
        for (int i = 0; i < draw.num_excluded; ++i)
            if (id == draw.excluded[i]) return;
        const double found = score(id);
        if (found > best.score || (found == best.score && id < best.id)) {
            best = {found, id};
            update_bound();
        }
    }
    void update_bound() {
        const double lead = static_cast<double>(top.value) / draw.temperature - best.score;
        bound = static_cast<float>(::exp(lead) * 1.001);
    }
};

// `top` is the largest logit of the row over all ids; returns the best of ids [first, last) or, if it scores higher, top's.
inline ScoredToken draw(const Draw& draw, MaxLogit top, int first, int last) {
    Race race(draw, top, nullptr);
    const F peak_value = splat(top.value), unit = splat(0x1p-24f);
    const F slope = splat(static_cast<float>(1.4426950408889634 / draw.temperature));
    int id = first;
    for (; id + 32 <= last; id += 32) {
        F even, odd;
        split(draw.logits + id, even, odd);
        U even_words, odd_words;
        philox_uppers(draw, count_from(static_cast<uint32_t>(id) / 2), even_words, odd_words);
        const F bound = splat(race.bound);
        even = mul(exp2(mul(sub(even, peak_value), slope)), bound);
        odd = mul(exp2(mul(sub(odd, peak_value), slope)), bound);
        uint32_t hits = at_most(mul(upper_bits(even_words), unit), even);
        for (; hits; hits &= hits - 1) race.consider(id + 2 * __builtin_ctz(hits));
        hits = at_most(mul(upper_bits(odd_words), unit), odd);
        for (; hits; hits &= hits - 1) race.consider(id + 2 * __builtin_ctz(hits) + 1);
    }
    for (; id < last; ++id) race.consider(id);
    return race.best;
}

// The same over all logits of a row, the noise of which is that of `ids`; `halves` are those ids by two. The place of the best.
inline ScoredToken draw_as(const Draw& draw, MaxLogit top, const int32_t* ids, const int32_t* halves) {
    Race race(draw, top, ids);
    const F peak_value = splat(top.value), unit = splat(0x1p-24f);
    const F slope = splat(static_cast<float>(1.4426950408889634 / draw.temperature));
    int i = 0;
    for (; i + 16 <= draw.vocab; i += 16) {
        U even, odd;
        philox_uppers(draw, load_u(halves + i), even, odd);
        const F limit = mul(exp2(mul(sub(load(draw.logits + i), peak_value), slope)), splat(race.bound));
        const F first = mul(upper_bits(even), unit), second = mul(upper_bits(odd), unit);  // an id has one of both
        for (uint32_t hits = at_most(first, limit) | at_most(second, limit); hits; hits &= hits - 1)
            race.consider(i + __builtin_ctz(hits));
    }
    for (; i < draw.vocab; ++i) race.consider(i);
    return race.best;
}

// The same over `n` >= 1 candidates, whose scores z / T descend.
inline ScoredToken draw_among(const Draw& draw, const ScoredToken* ranked, int n) {
    constexpr double kMostNoise = 36.8;  // of 52 random bits
    ScoredToken best = {ranked[0].score + gumbel(draw, ranked[0].id), ranked[0].id};
    for (int i = 1; i < n && ranked[i].score + kMostNoise >= best.score; ++i) {
        const double score = ranked[i].score + gumbel(draw, ranked[i].id);
        if (score > best.score || (score == best.score && ranked[i].id < best.id)) best = {score, ranked[i].id};
    }
    return best;
}

// Writes the ids in [first, last) whose logit is at least `limit`, ascending, and returns their number.
inline int at_least(const float* logits, int first, int last, float limit, int32_t* ids) {
    int count = 0, id = first;
    const F least = splat(limit);
    for (; id + 16 <= last; id += 16)
        for (uint32_t hits = at_most(least, load(logits + id)); hits; hits &= hits - 1) ids[count++] = id + __builtin_ctz(hits);
    for (; id < last; ++id)
        if (logits[id] >= limit) ids[count++] = id;
    return count;
}

// ---- masses

// Sums of exp((z - peak) / T) over a row, in double precision: what top-p compares. Vectors of the compiler, which every
// instruction set computes alike: the lanes are eight, and their order of summing is fixed.

typedef float Floats __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(64)));
typedef int64_t Longs __attribute__((vector_size(64)));

// 2^x to about 1e-15 relative for -1000 <= x <= 0. Taylor series on [-1/2, 1/2].
WAGER_INLINE void exp2(Doubles& x) {
    constexpr double kTerms[] = {2.5678435993488206e-11, 4.4455382718708117e-10, 7.0549116208011227e-09, 1.0178086009239699e-07,
                                 1.3215486790144309e-06, 1.5252733804059841e-05, 1.5403530393381609e-04, 1.3333558146428443e-03,
                                 9.6181291076284772e-03, 5.5504108664821580e-02, 2.4022650695910072e-01, 6.9314718055994531e-01, 1.0};
    constexpr double kBias = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
    const Doubles biased = x + kBias, f = x - (biased - kBias);
    Doubles p = Doubles{} + kTerms[0];
    for (int term = 1; term < 13; ++term) p = p * f + kTerms[term];
    x = (Doubles)((Longs)p + ((Longs)biased << 52));
}

WAGER_INLINE double sum(const Doubles& x) { return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7])); }

// Of finite logits, none above `peak`.
inline Masses masses(const float* logits, int n, double peak, double temperature, double least) {
    constexpr double kLog2e = 1.4426950408889634, kSmallest = -1000.0;
    const double slope = kLog2e / temperature;
    Doubles all = {}, some = {};
    for (int i = 0; i < n; i += 8) {
        Floats few;
        if (i + 8 <= n) {
            std::memcpy(&few, logits + i, sizeof(few));
        } else {
            for (int j = 0; j < 8; ++j) few[j] = i + j < n ? logits[i + j] : -__FLT_MAX__;
        }
        const Doubles z = __builtin_convertvector(few, Doubles);
        Doubles x = (z - peak) * slope;
        const Longs small = x < kSmallest, counts = z >= least;
        x = (Doubles)(((Longs)(Doubles{} + kSmallest) & small) | ((Longs)x & ~small));
        exp2(x);
        all += x;
        some += (Doubles)((Longs)x & counts);
    }
    return {sum(all), sum(some)};
}

// ---- guesses: greedy, or drawn with the noise of the target's ids

WAGER_INLINE F power(F z, F peak) { return exp2(mul(sub(z, peak), splat(kLog2e))); }

// The sum of exp(z - peak), in one order for every number of rows.
inline float sum_of_powers(const float* logits, int n, float peak) {
    F sums[2] = {zero(), zero()};
    const F high = splat(peak);
    alignas(64) float rest[16];
    for (int i = 0; i < n; i += 16) {
        const float* from = logits + i;
        if (i + 16 > n) {
            for (int j = 0; j < 16; ++j) rest[j] = i + j < n ? logits[i + j] : peak - 1000.0f;
            from = rest;
        }
        sums[i / 16 % 2] = add(sums[i / 16 % 2], power(load(from), high));
    }
    return sum(add(sums[0], sums[1]));
}

inline void guess(const Guess& op, const Step& step, int thread) {
    const int rows = row_count(step, op.row_set);
    const auto [first, last] = own_part(rows, step, thread);
    for (int row = first; row < last; ++row) {
        const float* logits = op.logits + static_cast<size_t>(row) * op.stride;
        const MaxLogit top = max_logit(logits, 0, op.n);
        op.tokens[row] = -1;
        op.probabilities[row] = 0.0f;
        if (top.id < 0) continue;
        const RequestNoise& key = op.keys[row];
        int best = top.id;
        if (key.temperature > 0) {
            const Draw of{logits, op.n, key.temperature, key.seed, key.position + op.ahead, key.choice, nullptr, nullptr, 0, 0};
            best = (op.ids ? draw_as(of, top, op.ids, op.halves) : draw(of, top, 0, op.n)).id;
        }
        op.tokens[row] = op.ids ? op.ids[best] : best;
        const float weight = max_lane(power(splat(logits[best]), splat(top.value)));
        op.probabilities[row] = weight / sum_of_powers(logits, op.n, top.value);
    }
}

}  // namespace wager::WAGER_NS
