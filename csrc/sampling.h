// Sampling of several rows on the pool. Over the full vocabulary: every row's largest logit first, then the exponential race of
// sample.h, parts of the row on each thread. With filters: each row on one thread.
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
    const int n = static_cast<int>(draws.size()), parts = pool.threads();
    std::vector<MaxLogit> max_logits(static_cast<size_t>(n) * parts);
    std::vector<ScoredToken> scored(static_cast<size_t>(n) * parts);
    const auto top = [&](int i) {
        MaxLogit best = max_logits[static_cast<size_t>(i) * parts];
        for (int p = 1; p < parts; ++p) {
            const MaxLogit& other = max_logits[static_cast<size_t>(i) * parts + p];
            if (best.id < 0) break;
            if (other.id < 0 || other.value > best.value) best = other;
        }
        return best;
    };
    const auto cut = [&](int vocab, int p) {
        const int64_t units = (vocab + kUnit - 1) / kUnit, at = part(units, p, parts) * kUnit;
        return at < vocab ? static_cast<int>(at) : vocab;
    };
    const auto find_max = [&](int i, int p) {
        const int first = cut(draws[i].vocab, p), last = cut(draws[i].vocab, p + 1);
        max_logits[static_cast<size_t>(i) * parts + p] =
            first < last ? table.max_logit(draws[i].logits, first, last) : MaxLogit{-__builtin_inff(), 0};
    };
    const auto draw = [&](int i, MaxLogit best, int p) {
        ScoredToken& token = scored[static_cast<size_t>(i) * parts + p];
        if (best.id < 0 || draws[i].temperature <= greedy) token = {0.0, best.id};
        else token = table.draw(draws[i], best, cut(draws[i].vocab, p), cut(draws[i].vocab, p + 1));
    };
    pool.run(2, [&](int stage, int thread, int threads) {
        const int first = static_cast<int>(part(parts, thread, threads)), last = static_cast<int>(part(parts, thread + 1, threads));
        for (int i = 0; i < n; ++i) {
            const MaxLogit best = stage == 0 ? MaxLogit{} : top(i);
            for (int p = first; p < last; ++p) {
                if (stage == 0) find_max(i, p);
                else draw(i, best, p);
            }
        }
    });
    for (int i = 0; i < n; ++i) {
        ScoredToken best = scored[static_cast<size_t>(i) * parts];
        for (int p = 1; p < parts; ++p) {
            const ScoredToken& other = scored[static_cast<size_t>(i) * parts + p];
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
    pool.run(1, [&](int, int thread, int) {
        std::vector<Edit> none;
        for (size_t i; (i = next.fetch_add(1)) < draws.size();)
            out[i] = samplers[thread].sample(table, draws[i], filters[i], none, {}, greedy);
    });
}

}  // namespace wager
