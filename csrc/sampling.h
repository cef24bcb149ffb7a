// Sampling of several rows on the pool. Over the full vocabulary: every row's largest logit first, then the exponential race of
// sample.h, a part of the row on each thread. With filters: each row on one thread.
#pragma once

#include <vector>

#include "ops.h"
#include "pool.h"
#include "row_sampler.h"
#include "sizes.h"

namespace wager {

// Out int32 [n]: the token of each draw, -1 where a logit is not finite; `greedy` ones take the largest logit.
inline void sample_rows(Pool& pool, const Table& table, const std::vector<Draw>& draws, double greedy, int32_t* out) {
    constexpr int kUnit = 32;  // no thread begins in the middle of a Philox counter
    const int n = static_cast<int>(draws.size()), threads = pool.threads();
    std::vector<MaxLogit> max_logits(static_cast<size_t>(n) * threads);
    std::vector<ScoredToken> scored(static_cast<size_t>(n) * threads);
    const auto top = [&](int i) {
        MaxLogit best = max_logits[static_cast<size_t>(i) * threads];
        for (int t = 1; t < threads; ++t) {
            const MaxLogit& other = max_logits[static_cast<size_t>(i) * threads + t];
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
            MaxLogit& max_logit = max_logits[static_cast<size_t>(i) * threads + thread];
            max_logit = first < last ? table.max_logit(draws[i].logits, first, last) : MaxLogit{-__builtin_inff(), 0};
        }
        pool.barrier();
        for (int i = 0; i < n; ++i) {
            const MaxLogit best = top(i);
            ScoredToken& token = scored[static_cast<size_t>(i) * threads + thread];
            if (best.id < 0 || draws[i].temperature <= greedy) token = {0.0, best.id};
            else token = table.draw(draws[i], best, cut(draws[i].vocab, thread), cut(draws[i].vocab, thread + 1));
        }
    });
    for (int i = 0; i < n; ++i) {
        ScoredToken best = scored[static_cast<size_t>(i) * threads];
        for (int t = 1; t < threads; ++t) {
            const ScoredToken& other = scored[static_cast<size_t>(i) * threads + t];
            if (other.score > best.score || (other.score == best.score && other.id < best.id)) best = other;
        }
        out[i] = best.id;
    }
}

// The same under the filters of each draw, which may also leave a token undecided (row_sampler.h). One sampler a thread.
inline void sample_filtered_rows(Pool& pool, const Table& table, const std::vector<Draw>& draws,
                                 const std::vector<Filters>& filters, std::vector<RowSampler>& samplers, double greedy,
                                 int32_t* out) {
    samplers.resize(pool.threads());
    std::atomic<size_t> next{0};
    pool.run([&](int thread) {
        std::vector<Edit> none;
        for (size_t i; (i = next.fetch_add(1)) < draws.size();)
            out[i] = samplers[thread].sample(table, draws[i], filters[i], none, {}, greedy);
    });
}

}  // namespace wager
