// One block of 16 keys and values: its products with a few query heads, latents transposed into values, and which values
// are not finite.
//
// The caller decides on rows and masks. A masked key's score stays in its own lane and is replaced there; its value is a term
// of a sum, so one that is not finite must be removed from the block beforehand.
#pragma once

namespace wager::WAGER_NS {

using BlockKernel = void (*)(const uint16_t* x, size_t x_stride, const uint16_t* w, int d, float* out, size_t out_stride);

// Scores of M query heads against the 16 keys of a block.
template <int M>
void score_tile(const uint16_t* q, size_t, const uint16_t* keys, int d, float* out, size_t stride) {
    Tile<M, 1> tile;
    tile.clear();
    tile.run(q, static_cast<size_t>(d), keys, 2 * kBlockSize, d / 2);
    tile.write(out, stride);
}

// Adds the probabilities of a block's 16 keys times its values, for M query heads.
template <int M, int N>
WAGER_INLINE void value_columns(const uint16_t* p, size_t p_stride, const uint16_t* values, int d, float* out) {
    Tile<M, N> tile;
    tile.read(out, static_cast<size_t>(d));
    tile.run(p, p_stride, values, 2 * static_cast<size_t>(d), kBlockSize / 2);
    tile.write(out, static_cast<size_t>(d));
}
template <int M>
void value_tile(const uint16_t* p, size_t p_stride, const uint16_t* values, int d, float* out, size_t) {
    int i = 0;
    for (; i + 16 * kPvCols <= d; i += 16 * kPvCols) value_columns<M, kPvCols>(p, p_stride, values + 2 * i, d, out + i);
    for (; i < d; i += 16) value_columns<M, 1>(p, p_stride, values + 2 * i, d, out + i);
}

template <int... M>
struct BlockKernels {
    static constexpr BlockKernel score[] = {nullptr, score_tile<M>...};
    static constexpr BlockKernel value[] = {nullptr, value_tile<M>...};
};
template <int Last, int... M>
struct BlockKernelUpTo : BlockKernelUpTo<Last - 1, Last, M...> {};
template <int... M>
struct BlockKernelUpTo<0, M...> : BlockKernels<M...> {};

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
