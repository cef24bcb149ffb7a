// The one product kernel: rows of bf16 activations against bf16 weights whose outputs lie across lanes. Linear layers,
// query-key scores and probability-value sums all use it. Every output has a single accumulator that takes its pairs in
// order, whatever the number of rows or columns beside it: this makes a row's results independent of the others.
#pragma once

#include <cstddef>

namespace wager::WAGER_NS {

// What to prefetch while computing, up to `end`: of every kPrefetchPairs pairs, those whose bit is set in `once` fetch a
// cache line, and those in `twice` another. Spread evenly, because a burst of requests stalls the loads behind it.
constexpr int kPrefetchPairs = 8;

struct Prefetch {
    const char* at;
    const char* end;
    unsigned once, twice;

    void pace(int lines) {  // lines per kPrefetchPairs pairs, at most 2 * kPrefetchPairs
        once = twice = 0;
        for (int u = 0; u < kPrefetchPairs; ++u) {
            const int due = lines * (u + 1) / kPrefetchPairs - lines * u / kPrefetchPairs;
            once |= static_cast<unsigned>(due >= 1) << u;
            twice |= static_cast<unsigned>(due >= 2) << u;
        }
    }
    WAGER_INLINE void fetch_for(int u) {
        if ((once >> u & 1u) && at < end) {
            fetch(at);
            at += 64;
            if (twice >> u & 1u) {
                fetch(at);
                at += 64;
            }
        }
    }
};

template <int M, int N>
struct Tile {
    F acc[M][N];

    WAGER_INLINE void clear() {
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
            for (int j = 0; j < N; ++j) acc[i][j] = zero();
    }
    WAGER_INLINE void read(const float* p, size_t stride) {
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
            for (int j = 0; j < N; ++j) acc[i][j] = load(p + i * stride + 16 * j);
    }
    WAGER_INLINE void write(float* p, size_t stride) const {
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
            for (int j = 0; j < N; ++j) store(p + i * stride + 16 * j, acc[i][j]);
    }
    // One pair of inputs: x [M rows, x_stride], w [N * 16 outputs][2].
    WAGER_INLINE void step(const uint16_t* const (&bases)[(M + 2) / 3], size_t x_stride, const uint16_t* w, int pair) {
        Pair weights[N];
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) weights[j] = load_pairs(w + 32 * j);
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i) {
            const Pair value = splat_pair(bases[i / 3] + (i % 3) * x_stride + 2 * pair);
#pragma GCC unroll 4
            for (int j = 0; j < N; ++j) acc[i][j] = dot(acc[i][j], value, weights[j]);
        }
    }
    // x [M rows, x_stride] of 2 * pairs values; w [pairs, w_stride].
    WAGER_INLINE void run(const uint16_t* x, size_t x_stride, const uint16_t* w, size_t w_stride, int pairs) {
        const uint16_t* bases[(M + 2) / 3];
        for (int i = 0; i < (M + 2) / 3; ++i) bases[i] = x + 3 * i * x_stride;
        for (int k = 0; k < pairs; ++k) step(bases, x_stride, w + k * w_stride, k);
    }
    WAGER_INLINE void run(const uint16_t* x, size_t x_stride, const uint16_t* w, size_t w_stride, int pairs,
                          Prefetch prefetch) {
        const uint16_t* bases[(M + 2) / 3];
        for (int i = 0; i < (M + 2) / 3; ++i) bases[i] = x + 3 * i * x_stride;
        int k = 0;
        for (; k + kPrefetchPairs <= pairs; k += kPrefetchPairs) {
#pragma GCC unroll 8
            for (int u = 0; u < kPrefetchPairs; ++u) {
                prefetch.fetch_for(u);
                step(bases, x_stride, w + (k + u) * w_stride, k + u);
            }
        }
        for (; k < pairs; ++k) step(bases, x_stride, w + k * w_stride, k);
    }
};

}  // namespace wager::WAGER_NS
