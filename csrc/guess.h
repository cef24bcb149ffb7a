// The guess of each row of a draft model's or head's logits: greedy, or drawn with the noise of the target's ids.
#pragma once

namespace wager::WAGER_NS {

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
