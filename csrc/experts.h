// Mixture of experts: logits, the choice of experts, and the two products of those that some row chose.
//
// Rows are gathered by expert, so that an expert's weights are read once for all its rows. The first product is shared out
// by expert and panel, the second by output panels alone: a thread adds every expert to its own outputs, in the order of
// ids, and so needs no other thread's results. A row's sums never see the rows that chose the same expert.
#pragma once

#include <cmath>

namespace wager::WAGER_NS {

// x . w with one reduction tree; the weights are float32.
inline float router_dot(const uint16_t* x, const float* w, int n) {
    F acc[4] = {zero(), zero(), zero(), zero()};
    int i = 0;
    for (; i + 64 <= n; i += 64) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) acc[j] = fma(widen(x + i + 16 * j), load(w + i + 16 * j), acc[j]);
    }
    for (; i < n; i += 16) {
        uint16_t lanes[16] = {};
        std::memcpy(lanes, x + i, static_cast<size_t>(n - i < 16 ? n - i : 16) * 2);
        acc[0] = fma(widen(lanes), load_part(w + i, n - i), acc[0]);
    }
    return sum(add(add(acc[0], acc[1]), add(acc[2], acc[3])));
}

inline void router(const Router& op, const Step& step, int thread) {
    const int first = static_cast<int>(part(op.experts, thread, step.threads));
    const int last = static_cast<int>(part(op.experts, thread + 1, step.threads));
    for (int expert = first; expert < last; ++expert) {
        const float* weight = op.weight + static_cast<size_t>(expert) * op.k;
        for (int row = 0; row < step.rows; ++row)
            op.logits[static_cast<size_t>(row) * op.experts + expert] =
                router_dot(op.x + static_cast<size_t>(row) * op.k, weight, op.k);
    }
}

// Marks the `count` largest of values[0, n), the lowest index among equals. Whatever is no number comes last, and still
// exactly `count` are marked.
inline void mark_best(const float* values, int n, int count, bool* marked) {
    for (int i = 0; i < n; ++i) marked[i] = false;
    for (int c = 0; c < count; ++c) {
        int best = -1;
        for (int i = 0; i < n; ++i) {
            if (marked[i]) continue;
            if (best < 0 || values[i] > values[best] || (values[best] != values[best] && values[i] == values[i])) best = i;
        }
        marked[best] = true;
    }
}

// exp(logit - top) or the sigmoid, lane by lane; padded to sixteen.
inline void score(const float* logits, const Choice& how, float* scores) {
    F top = splat(-__builtin_inff());
    for (int i = 0; i < how.experts; ++i) top = max(top, splat(logits[i]));
    for (int i = 0; i < how.experts; i += 16) {
        const F x = load_part(logits + i, how.experts - i);
        if (how.sigmoid) store(scores + i, div(splat(1.0f), add(splat(1.0f), exp2(mul(x, splat(-kLog2e))))));
        else store(scores + i, exp2(mul(sub(x, top), splat(kLog2e))));
    }
}

// Keeps the experts of the best groups and puts the others out of reach.
inline void limit_groups(const Choice& how, float* merit, bool* marked) {
    float best[kMaxExperts];
    const int size = how.experts / how.groups;
    for (int g = 0; g < how.groups; ++g) {
        mark_best(merit + g * size, size, how.group_best, marked);
        best[g] = 0.0f;
        for (int i = 0; i < size; ++i)
            if (marked[i]) best[g] += merit[g * size + i];
    }
    mark_best(best, how.groups, how.top_groups, marked);
    for (int g = how.groups - 1; g >= 0; --g)
        for (int i = 0; i < size; ++i)
            if (!marked[g]) merit[g * size + i] = -__builtin_inff();
}

inline void choose_row(const Choose& op, int row) {
    const Choice& how = op.how;
    alignas(64) float scores[kMaxExperts + 16], merit[kMaxExperts];
    bool marked[kMaxExperts];
    const float* logits = op.logits + static_cast<size_t>(row) * how.experts;
    score(logits, how, scores);
    for (int i = 0; i < how.experts; ++i) merit[i] = (how.sigmoid ? scores[i] : logits[i]) + (op.bias ? op.bias[i] : 0.0f);
    if (how.groups > 1) limit_groups(how, merit, marked);
    mark_best(merit, how.experts, how.chosen, marked);
    int32_t* ids = op.ids + static_cast<size_t>(row) * how.chosen;
    float* shares = op.shares + static_cast<size_t>(row) * how.chosen;
    float all = 0.0f, chosen = 0.0f;
    int n = 0;
    for (int i = 0; i < how.experts; ++i) {
        all += scores[i];
        if (!marked[i]) continue;
        chosen += scores[i];
        ids[n] = i;
        shares[n++] = scores[i];
    }
    const bool sound = all == all;
    const float total = !sound ? all : how.normalised ? chosen + 1e-20f : how.sigmoid ? 1.0f : all;
    for (int j = 0; j < n; ++j) shares[j] = shares[j] / total * how.scale;
}

inline void choose(const Choose& op, const Step& step, int thread) {
    const int first = static_cast<int>(part(step.rows, thread, step.threads));
    const int last = static_cast<int>(part(step.rows, thread + 1, step.threads));
    for (int row = first; row < last; ++row) choose_row(op, row);
}

// Every thread finds the order; the first writes it down, and each copies its part of the rows.
inline void gather(const Gather& op, const Step& step, int thread) {
    const int choices = step.rows * op.chosen;
    int32_t next[kMaxExperts + 1] = {};
    for (int i = 0; i < choices; ++i) ++next[op.ids[i] + 1];
    int hits = 0;
    for (int e = 0; e < op.experts; ++e) {
        if (next[e + 1] && thread == 0) {
            op.groups.hits[hits] = e;
            op.groups.starts[hits++] = next[e];
        }
        next[e + 1] += next[e];
    }
    if (thread == 0) {
        op.groups.starts[hits] = choices;
        *op.groups.count = hits;
    }
    const int first = static_cast<int>(part(choices, thread, step.threads));
    const int last = static_cast<int>(part(choices, thread + 1, step.threads));
    for (int i = 0; i < choices; ++i) {
        const int at = next[op.ids[i]]++;
        if (thread == 0) op.groups.order[at] = i;
        if (at < first || at >= last) continue;
        const uint16_t* from = op.x + static_cast<size_t>(i / op.chosen) * op.k;
        std::memcpy(op.out + static_cast<size_t>(at) * op.k, from, static_cast<size_t>(op.k) * 2);
    }
}

constexpr int kFreeRows = 12;  // about as many rows are computed while a panel is read

// Panels of the first product by expert, cut among threads so that each has the same work; work counts a panel's reading
// and its rows.
inline void experts_in(const ExpertsIn& op, const Step& step, int thread) {
    const int hits = *op.groups.count, panels = (op.n + 15) / 16;
    const auto price = [&](int h) { return int64_t{kFreeRows} + op.groups.starts[h + 1] - op.groups.starts[h]; };
    int64_t total = 0;
    for (int h = 0; h < hits; ++h) total += price(h) * panels;
    const int64_t low = part(total, thread, step.threads), high = part(total, thread + 1, step.threads);
    const size_t elements = static_cast<size_t>(op.k) * kPanel;
    int64_t before = 0;
    for (int h = 0; h < hits; before += price(h++) * panels) {
        // A panel belongs to the thread in whose part its beginning lies.
        const auto from = [&](int64_t edge) {
            const int64_t panel = edge <= before ? 0 : (edge - before + price(h) - 1) / price(h);
            return static_cast<int>(panel < panels ? panel : panels);
        };
        const int first = from(low), last = from(high), start = op.groups.starts[h];
        if (first >= last) continue;
        const uint16_t* after = nullptr;
        if (last == panels && h + 1 < hits) after = op.weight + static_cast<size_t>(op.groups.hits[h + 1]) * panels * elements;
        const uint16_t* weight = op.weight + static_cast<size_t>(op.groups.hits[h]) * panels * elements;
        const uint16_t* x = op.x + static_cast<size_t>(start) * op.k;
        walk(Panels{weight, first, last, op.k, x, static_cast<size_t>(op.k), op.groups.starts[h + 1] - start, after, elements},
             [&](int panel, int row, int height, const float* sums) {
                 for (int r = 0; r < height; ++r) {
                     const F value = mul(silu(load(sums + r * kPanel)), load(sums + r * kPanel + 16));
                     uint16_t* out = op.out + static_cast<size_t>(start + row + r) * op.n + panel * 16;
                     narrow_part(out, value, op.n - panel * 16);
                 }
             });
    }
}

inline void experts_out(const ExpertsOut& op, const Step& step, int thread) {
    const int hits = *op.groups.count, panels = (op.n + kPanel - 1) / kPanel;
    const int first = static_cast<int>(part(panels, thread, step.threads));
    const int last = static_cast<int>(part(panels, thread + 1, step.threads));
    const size_t elements = static_cast<size_t>(op.k) * kPanel;
    for (int h = 0; h < hits; ++h) {
        const int start = op.groups.starts[h], rows = op.groups.starts[h + 1] - start;
        const uint16_t* weight = op.weight + static_cast<size_t>(op.groups.hits[h]) * panels * elements;
        const uint16_t* after = nullptr;
        if (h + 1 < hits) after = op.weight + (static_cast<size_t>(op.groups.hits[h + 1]) * panels + first) * elements;
        const uint16_t* x = op.x + static_cast<size_t>(start) * op.k;
        walk(Panels{weight, first, last, op.k, x, static_cast<size_t>(op.k), rows, after, elements},
             [&](int panel, int row, int height, const float* sums) {
                 for (int r = 0; r < height; ++r) {
                     const int choice = op.groups.order[start + row + r];
                     const F share = splat(op.shares[choice]);
                     float* out = op.out + static_cast<size_t>(choice / op.chosen) * op.n + panel * kPanel;
                     for (int c = 0; c < kPanel && panel * kPanel + c < op.n; c += 16) {
                         const int n = op.n - panel * kPanel - c;
                         store_part(out + c, add(load_part(out + c, n), mul(share, load(sums + r * kPanel + c))), n);
                     }
                 }
             });
    }
}

}  // namespace wager::WAGER_NS
