// argmax over ids of z / T + g, g the Gumbel field: an exponential race. With E = -log1p(-u) an id can only win if
// u <= E <= exp(z / T - best), so sixteen lanes of float arithmetic discard nearly every id on the upper bits of u, and
// the few that remain are scored in double, exactly as the definition says. The token is that of the float64 definition.
#pragma once

#include <cmath>

namespace wager::WAGER_NS {

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

}  // namespace wager::WAGER_NS
