// Products of a few query heads with up to four blocks of 16 keys and values; latents transposed into values, and which values
// are not finite.
//
// Every output has one accumulator that takes its pairs in order, whatever the rows and blocks beside it. The caller decides
// on rows and masks. A masked key's score stays in its own lane and is replaced there; its value is a term of a sum, so one
// that is not finite must be removed from the block beforehand.
#pragma once

#include "panel_products.h"

namespace wager::WAGER_NS {

constexpr int kTileBlocks = kKeyTile / kBlockSize;

// Blocks to prefetch during products, as many at a time as a product reads, a line of each per step of its inner loop: in one
// burst they would stall its loads.
struct BlockFetch {
    const char* at[kTileBlocks];
    int blocks, lines;
    int first = 0, left = lines;  // of the blocks from `first` on

    WAGER_INLINE void step() {
        if (first >= blocks) return;
        for (int i = first; i < blocks && i < first + kQkCols; ++i) {
            fetch(at[i]);
            at[i] += 64;
        }
        if (--left == 0) first += kQkCols, left = lines;
    }
};

// Sixteen numbers of bf16 as factors.
WAGER_INLINE void copy_factors(uint16_t* to, const uint16_t* from) { std::memcpy(to, from, 32); }
WAGER_INLINE void copy_factors(float* to, const uint16_t* from) { store(to, widen(from)); }

// Scores of M query heads [M, d] against N blocks: out [M, kKeyTile], the first 16 N of each.
using ScoreKernel = void (*)(const Factor* q, int d, const uint16_t* const* keys, float* out, BlockFetch& fetches);
template <int M, int N>
void score_blocks(const Factor* q, int d, const uint16_t* const* keys, float* out, BlockFetch& fetches) {
    const RowsAt<M, Factor> rows(q, d);
    const uint16_t* at[N];
    for (int j = 0; j < N; ++j) at[j] = keys[j];
    Tile<M, N> tile;
    tile.clear();
    for (int pair = 0; pair < d / 2; ++pair) {
        fetches.step();
        Pair key[N];
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) key[j] = load_pairs(at[j] + 2 * kBlockSize * pair);
        tile.step(rows, pair, key);
    }
    tile.write(out, kKeyTile);
}

// Adds the probabilities p [M, kKeyTile] of the keys of `blocks` blocks times their values to out [M, d].
using ValueKernel = void (*)(const Factor* p, const uint16_t* const* values, int blocks, int d, float* out, BlockFetch& fetches);
template <int M, int N>
WAGER_INLINE void value_columns(const Factor* p, const uint16_t* const* values, int blocks, int d, int column, float* out,
                                BlockFetch& fetches) {
    Tile<M, N> tile;
    tile.read(out + column, d);
    for (int block = 0; block < blocks; ++block) {
        const uint16_t* at = values[block] + 2 * column;
        const RowsAt<M, Factor> rows(p + block * kBlockSize, kKeyTile);
#pragma GCC unroll 1
        for (int pair = 0; pair < kBlockSize / 2; ++pair) {
            fetches.step();
            Pair value[N];
            tile.load_weights(at + 2 * d * pair, value);
            tile.step(rows, pair, value);
        }
    }
    tile.write(out + column, d);
}
template <int M>
void value_blocks(const Factor* p, const uint16_t* const* values, int blocks, int d, float* out, BlockFetch& fetches) {
    int i = 0;
    for (; i + 16 * kPvCols <= d; i += 16 * kPvCols) value_columns<M, kPvCols>(p, values, blocks, d, i, out, fetches);
    for (; i < d; i += 16) value_columns<M, 1>(p, values, blocks, d, i, out, fetches);
}

// Kernels by their number of query heads, 1 to Last.
template <int N, int... M>
struct BlockKernels {
    static constexpr ScoreKernel score[] = {nullptr, score_blocks<M, N>...};
    static constexpr ValueKernel value[] = {nullptr, value_blocks<M>...};
};
template <int N, int Last, int... M>
struct BlockKernelUpTo : BlockKernelUpTo<N, Last - 1, Last, M...> {};
template <int N, int... M>
struct BlockKernelUpTo<N, 0, M...> : BlockKernels<N, M...> {};

// Scores of `rows` query heads, at most kQkRows, against `blocks` blocks.
inline void score(int rows, int blocks, const Factor* q, int d, const uint16_t* const* keys, float* out, BlockFetch& fetches) {
    for (; blocks > 0; blocks -= kQkCols, keys += kQkCols, out += kQkCols * kBlockSize) {
        if constexpr (kQkCols == 4) {
            if (blocks == 2) return BlockKernelUpTo<2, kQkRows>::score[rows](q, d, keys, out, fetches);
            if (blocks == 3) return BlockKernelUpTo<3, kQkRows>::score[rows](q, d, keys, out, fetches);
        }
        if (blocks < kQkCols) return BlockKernelUpTo<1, kQkRows>::score[rows](q, d, keys, out, fetches);
        BlockKernelUpTo<kQkCols, kQkRows>::score[rows](q, d, keys, out, fetches);
    }
}

// A block of latents, [d/2][16 keys][2], as values, [16/2][d][2]; of the first d dimensions, a multiple of 16. Two
// dimensions of two keys are four adjacent elements in both layouts: the block is a transposed matrix of such groups, with
// the inner two elements of each swapped. Kept out of the loops of other caches.
[[gnu::noinline]] inline void transpose_latents(const uint16_t* keys, int d, uint16_t* values) {
    constexpr int kPairs = kBlockSize / 2;
    for (int i = 0; i < d / 2; i += 8) {
        uint64_t fours[8][kPairs];
        std::memcpy(fours, keys + i * 2 * kBlockSize, sizeof fours);
        for (int j = 0; j < kPairs; ++j) {
            uint64_t out[8];
            for (int u = 0; u < 8; ++u) {
                const uint64_t four = fours[u][j];
                out[u] = (four & 0xFFFF00000000FFFFu) | (four & 0xFFFF0000u) << 16 | (four >> 16 & 0xFFFF0000u);
            }
            std::memcpy(values + (static_cast<size_t>(j) * d + 2 * i) * 2, out, sizeof out);
        }
    }
}

// Keys [lo, hi) of a block, as bits; the bounds may lie outside the block.
inline uint32_t key_range(int lo, int hi) {
    const uint32_t below_hi = hi >= kBlockSize ? 0xFFFFu : hi <= 0 ? 0u : (1u << hi) - 1u;
    const uint32_t below_lo = lo >= kBlockSize ? 0xFFFFu : lo <= 0 ? 0u : (1u << lo) - 1u;
    return below_hi & ~below_lo;
}

// The keys of a block with a value that is not finite, as bits. An exponent of all ones carries into the sign.
inline uint32_t nonfinite_keys(const uint16_t* values, int d) {
    uint16_t some = 0;
    for (int i = 0; i < kBlockSize * d; ++i) some |= static_cast<uint16_t>((values[i] & 0x7F80u) + 0x0080u);
    if ((some & 0x8000u) == 0) return 0;  // as good as always
    uint32_t nonfinite = 0;
    for (int pair = 0; pair < kBlockSize / 2; ++pair) {
        uint32_t seen[16] = {}, words[16], all = 0;
        for (int i = 0; i < d; i += 16) {
            std::memcpy(words, values + (static_cast<size_t>(pair) * d + i) * 2, sizeof words);
            for (int j = 0; j < 16; ++j) seen[j] |= (words[j] & 0x7F807F80u) + 0x00800080u;
        }
        for (int j = 0; j < 16; ++j) all |= seen[j];
        nonfinite |= ((all >> 15 & 1u) | (all >> 30 & 2u)) << 2 * pair;
    }
    return nonfinite;
}

// Copies a block of values with zeros for the keys whose bit is set. Called rarely, so kept out of its caller's loops.
[[gnu::noinline]] inline void copy_without(uint32_t keys, const uint16_t* values, int d, uint16_t* out) {
    for (int key = 0; key < kBlockSize; ++key) {
        const size_t first = static_cast<size_t>(key / 2) * 2 * d + key % 2;
        for (int i = 0; i < d; ++i) out[first + 2 * i] = keys >> key & 1u ? uint16_t{0} : values[first + 2 * i];
    }
}

}  // namespace wager::WAGER_NS
