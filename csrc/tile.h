// Accumulators of a product, and that of bf16 activations with bf16 weights whose outputs lie across lanes. Every output has a
// single accumulator that takes its pairs in order, whatever the number of rows or columns beside it: this makes a row's
// results independent of the others.
#pragma once

#include <cstddef>

#include "prefetch.h"
#include "sizes.h"

namespace wager::WAGER_NS {

constexpr int kPieceInputs = 32;  // inputs of a panel after which prefetching takes another turn

template <int M, int N>
struct Tile {
    F acc[M][N];

    WAGER_INLINE void clear() {
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
            for (int j = 0; j < N; ++j) acc[i][j] = zero();
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
    // x [M rows, x_stride] of 2 * pairs values times a panel of 32 outputs, prefetching if `first`: the first of the tiles
    // that read these inputs.
    WAGER_INLINE void run_panel(const uint16_t* x, size_t x_stride, const uint16_t* w, int pairs, const Prefetch& prefetch,
                                bool first) {
        constexpr int kPairs = kPieceInputs / 2, kStride = 2 * kPanel;
        const uint16_t* bases[(M + 2) / 3];
        for (int i = 0; i < (M + 2) / 3; ++i) bases[i] = x + 3 * i * x_stride;
        Turns turns(prefetch);
        int k = 0;
        for (; k + kPairs <= pairs; k += kPairs) {
            const uint8_t* at = reinterpret_cast<const uint8_t*>(w + static_cast<size_t>(k) * kStride);
            const uint8_t* ahead = first && turns.due(k / kPairs) ? prefetch.ahead(at) : nullptr;
#pragma GCC unroll 16
            for (int u = 0; u < kPairs; ++u) {
                if (ahead) fetch_part<2 * kStride, 0, 1>(ahead + 2 * kStride * u, prefetch.once());
                step(bases, x_stride, w + static_cast<size_t>(k + u) * kStride, k + u);
            }
        }
        for (; k < pairs; ++k) step(bases, x_stride, w + static_cast<size_t>(k) * kStride, k);
    }
};

}  // namespace wager::WAGER_NS
