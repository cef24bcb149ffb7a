// Mixture of experts: router logits, the top experts of each row, and the two products of those that some row selected.
//
// Rows are gathered by expert, so that an expert's weights are read once for all its rows. The first product is split
// by expert and panel, the second by output panels alone: a thread adds every expert to its own outputs, in the order of
// ids, and so needs no other thread's results. A row's sums do not depend on the other rows of its experts.
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
    const auto [first, last] = own_part(op.experts, step, thread);
    for (int expert = first; expert < last; ++expert) {
        const float* weight = op.weight + static_cast<size_t>(expert) * op.k;
        for (int row = 0; row < step.rows; ++row)
            op.logits[static_cast<size_t>(row) * op.experts + expert] =
                router_dot(op.x + static_cast<size_t>(row) * op.k, weight, op.k) + (op.bias ? op.bias[expert] : 0.0f);
    }
}

// Marks the `count` largest of values[0, n), the lowest index among equals. NaNs come last, and still exactly `count` are
// marked.
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
inline void score(const float* logits, const RoutingParams& params, float* scores) {
    F top = splat(-__builtin_inff());
    for (int i = 0; i < params.experts; ++i) top = max(top, splat(logits[i]));
    for (int i = 0; i < params.experts; i += 16) {
        const F x = load_part(logits + i, params.experts - i);
        if (params.sigmoid) store(scores + i, sigmoid(x));
        else store(scores + i, exp2(mul(sub(x, top), splat(kLog2e))));
    }
}

// Keeps the experts of the best groups and ranks all others last.
inline void limit_groups(const RoutingParams& params, float* ranking, bool* marked) {
    float best[kMaxExperts];
    const int size = params.experts / params.groups;
    for (int g = 0; g < params.groups; ++g) {
        mark_best(ranking + g * size, size, params.group_best, marked);
        best[g] = 0.0f;
        for (int i = 0; i < size; ++i)
            if (marked[i]) best[g] += ranking[g * size + i];
    }
    mark_best(best, params.groups, params.top_groups, marked);
    for (int g = params.groups - 1; g >= 0; --g)
        for (int i = 0; i < size; ++i)
            if (!marked[g]) ranking[g * size + i] = -__builtin_inff();
}

inline void top_experts_of_row(const TopExperts& op, int row) {
    const RoutingParams& params = op.params;
    alignas(64) float scores[kMaxExperts + 16], ranking[kMaxExperts];
    bool marked[kMaxExperts];
    const float* logits = op.logits + static_cast<size_t>(row) * params.experts;
    score(logits, params, scores);
    const float* plain = params.sigmoid ? scores : logits;
    for (int i = 0; i < params.experts; ++i) ranking[i] = plain[i] + (op.bias ? op.bias[i] : 0.0f);
    if (params.groups > 1) limit_groups(params, ranking, marked);
    mark_best(ranking, params.experts, params.top_k, marked);
    int32_t* ids = op.ids + static_cast<size_t>(row) * params.top_k;
    float* shares = op.shares + static_cast<size_t>(row) * params.top_k;
    float all = 0.0f, selected = 0.0f;
    int n = 0;
    for (int i = 0; i < params.experts; ++i) {
        all += scores[i];
        if (!marked[i]) continue;
        selected += scores[i];
        ids[n] = i;
        shares[n++] = scores[i];
    }
    const bool finite = all == all;
    const float total = !finite ? all : params.normalised ? selected + 1e-20f : params.sigmoid ? 1.0f : all;
    for (int j = 0; j < n; ++j) shares[j] = shares[j] / total * params.scale;
    for (int j = 0; op.scales && j < n; ++j) shares[j] *= op.scales[ids[j]];
}

inline void top_experts(const TopExperts& op, const Step& step, int thread) {
    const auto [first, last] = own_part(step.rows, step, thread);
    for (int row = first; row < last; ++row) top_experts_of_row(op, row);
}

// Every thread computes the order; the first stores it, and each copies its part of the rows.
inline void gather(const Gather& op, const Step& step, int thread) {
    const int pairs = step.rows * op.top_k;
    int32_t next[kMaxExperts + 1] = {};
    for (int i = 0; i < pairs; ++i) ++next[op.ids[i] + 1];
    int hits = 0;
    for (int e = 0; e < op.experts; ++e) {
        if (next[e + 1] && thread == 0) {
            op.groups.hits[hits] = e;
            op.groups.starts[hits++] = next[e];
        }
        next[e + 1] += next[e];
    }
    if (thread == 0) {
        op.groups.starts[hits] = pairs;
        *op.groups.count = hits;
    }
    const auto [first, last] = own_part(pairs, step, thread);
    for (int i = 0; i < pairs; ++i) {
        const int at = next[op.ids[i]]++;
        if (thread == 0) op.groups.order[at] = i;
        if (at < first || at >= last) continue;
        const uint16_t* from = op.x + static_cast<size_t>(i / op.top_k) * op.k;
        std::memcpy(op.out + static_cast<size_t>(at) * op.k, from, static_cast<size_t>(op.k) * 2);
    }
}

// Rows that are computed in about the time that reading a panel takes.
inline int free_rows(WeightFormat format) {
    return format == WeightFormat::bf16 ? 12 : is_e4m3(format) ? 6 : format == WeightFormat::q8_0 ? 7 : 4;
}

// Panels of the first product by expert, cut among threads so that each has the same work; work counts a panel's reading
// and its rows.
inline void experts_in(const ExpertsIn& op, const Step& step, int thread) {
    const bool gates = op.activation != Activation::relu2;
    const int hits = *op.groups.count, each = gates ? 16 : kPanel, panels = (op.n + each - 1) / each;  // outputs of a panel
    const auto cost = [&](int h) { return int64_t{free_rows(op.weight.format)} + op.groups.starts[h + 1] - op.groups.starts[h]; };
    int64_t total = 0;
    for (int h = 0; h < hits; ++h) total += cost(h) * panels;
    const int64_t low = part(total, thread, step.threads), high = part(total, thread + 1, step.threads);
    const size_t bytes = panels * panel_bytes(op.weight);  // of an expert
    const Activations all = activations(op.x, op.weight.k, op.weight.format, step.rows * op.top_k, step, thread);
    int64_t before = 0;
    for (int h = 0; h < hits; before += cost(h++) * panels) {
        // A panel belongs to the thread in whose part its beginning lies.
        const auto from = [&](int64_t edge) {
            const int64_t panel = edge <= before ? 0 : (edge - before + cost(h) - 1) / cost(h);
            return static_cast<int>(panel < panels ? panel : panels);
        };
        const int first = from(low), last = from(high), start = op.groups.starts[h];
        if (first >= last) continue;
        const uint8_t* after = nullptr;
        if (last == panels && h + 1 < hits) after = op.weight.panels + op.groups.hits[h + 1] * bytes;
        const Matrix weight{op.weight.panels + op.groups.hits[h] * bytes, op.weight.format, op.weight.k};
        const int rows = op.groups.starts[h + 1] - start;
        const float* bias = op.bias ? op.bias + static_cast<size_t>(op.groups.hits[h]) * panels * kPanel : nullptr;
        multiply_panels(Panels{weight, first, last, all.from(start), rows, after, {}},
             [&](int panel, int row, int height, const float* sums) {
                 for (int r = 0; r < height; ++r) {
                     F gate = load(sums + r * kPanel), up = load(sums + r * kPanel + 16);
                     uint16_t* out = op.out + static_cast<size_t>(start + row + r) * op.n + panel * each;
                     if (!gates) {
                         const F low = max(zero(), gate), high = max(zero(), up);
                         narrow_part(out, mul(low, low), op.n - panel * kPanel);
                         if (op.n - panel * kPanel > 16) narrow_part(out + 16, mul(high, high), op.n - panel * kPanel - 16);
                         continue;
                     }
                     if (bias) {
                         gate = add(gate, load(bias + panel * kPanel));
                         up = add(up, load(bias + panel * kPanel + 16));
                     }
                     narrow_part(out, gated(op.activation, gate, up), op.n - panel * 16);
                 }
             });
    }
}

inline void experts_out(const ExpertsOut& op, const Step& step, int thread) {
    const int hits = *op.groups.count, panels = (op.n + kPanel - 1) / kPanel;
    const auto [first, last] = own_part(panels, step, thread);
    const size_t bytes = panel_bytes(op.weight);
    const Activations all = activations(op.x, op.weight.k, op.weight.format, step.rows * op.top_k, step, thread);
    for (int h = 0; h < hits; ++h) {
        const int start = op.groups.starts[h], rows = op.groups.starts[h + 1] - start;
        const Matrix weight{op.weight.panels + op.groups.hits[h] * panels * bytes, op.weight.format, op.weight.k};
        const uint8_t* after = nullptr;
        if (h + 1 < hits) after = op.weight.panels + (static_cast<size_t>(op.groups.hits[h + 1]) * panels + first) * bytes;
        const float* bias = op.bias ? op.bias + static_cast<size_t>(op.groups.hits[h]) * panels * kPanel : nullptr;
        multiply_panels(Panels{weight, first, last, all.from(start), rows, after, {}},
             [&](int panel, int row, int height, const float* sums) {
                 for (int r = 0; r < height; ++r) {
                     const int pair = op.groups.order[start + row + r];
                     const F share = splat(op.shares[pair]);
                     float* out = op.out + static_cast<size_t>(pair / op.top_k) * op.n + panel * kPanel;
                     for (int c = 0; c < kPanel && panel * kPanel + c < op.n; c += 16) {
                         const int n = op.n - panel * kPanel - c;
                         F value = load(sums + r * kPanel + c);
                         if (bias) value = add(value, load(bias + panel * kPanel + c));
                         store_part(out + c, add(load_part(out + c, n), mul(share, value)), n);
                     }
                 }
             });
    }
}

inline void add_gated(const AddGated& op, const Step& step, int thread) {
    const auto [first, last] = own_part(step.rows, step, thread);
    for (int row = first; row < last; ++row) {
        const float logit = router_dot(op.x + static_cast<size_t>(row) * op.k, op.weight, op.k);
        const F share = sigmoid(splat(logit));
        const float* y = op.y + static_cast<size_t>(row) * op.n;
        float* out = op.out + static_cast<size_t>(row) * op.n;
        for (int i = 0; i < op.n; i += 16) {
            const int n = op.n - i;
            store_part(out + i, add(load_part(out + i, n), mul(share, load_part(y + i, n))), n);
        }
    }
}

}  // namespace wager::WAGER_NS
