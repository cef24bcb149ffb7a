// Whole-vocabulary sampling of several rows on the pool: every row's largest logit first, then the race for the token.
#pragma once

#include <vector>

#include "ops.h"
#include "pool.h"

namespace wager {

// Out int32 [n]: the token of each draw, -1 where a logit is not finite; `greedy` ones take the largest logit.
inline void sample_rows(Pool& pool, const Table& table, const std::vector<Draw>& draws, double greedy, int32_t* out) {
    constexpr int kUnit = 32;  // ids come in whole counters whatever the number of threads
    const int n = static_cast<int>(draws.size()), threads = pool.threads();
    std::vector<Peak> peaks(static_cast<size_t>(n) * threads);
    std::vector<Winner> winners(static_cast<size_t>(n) * threads);
    const auto top = [&](int i) {
        Peak best = peaks[static_cast<size_t>(i) * threads];
        for (int t = 1; t < threads; ++t) {
            const Peak& other = peaks[static_cast<size_t>(i) * threads + t];
            if (best.id < 0) break;
            if (other.id < 0 || other.value > best.value) best = other;
        }
        return best;
    };
    pool.run([&](int thread) {
        const auto cut = [&](int vocab, int t) {
            const int64_t units = (vocab + kUnit - 1) / kUnit, at = part(units, t, threads) * kUnit;
            return at < vocab ? static_cast<int>(at) : vocab;
        };
        for (int i = 0; i < n; ++i) {
            const int first = cut(draws[i].vocab, thread), last = cut(draws[i].vocab, thread + 1);
            Peak& peak = peaks[static_cast<size_t>(i) * threads + thread];
            peak = first < last ? table.peak(draws[i].logits, first, last) : Peak{-__builtin_inff(), 0};
        }
        pool.barrier();
        for (int i = 0; i < n; ++i) {
            const Peak best = top(i);
            Winner& winner = winners[static_cast<size_t>(i) * threads + thread];
            if (best.id < 0 || draws[i].temperature <= greedy) winner = {0.0, best.id};
            else winner = table.draw(draws[i], best, cut(draws[i].vocab, thread), cut(draws[i].vocab, thread + 1));
        }
    });
    for (int i = 0; i < n; ++i) {
        Winner best = winners[static_cast<size_t>(i) * threads];
        for (int t = 1; t < threads; ++t) {
            const Winner& other = winners[static_cast<size_t>(i) * threads + t];
            if (other.score > best.score || (other.score == best.score && other.id < best.id)) best = other;
        }
        out[i] = best.id;
    }
}

}  // namespace wager
