// Products of rows of activations with one panel of weights, of bf16 or of quantised blocks, and what they prefetch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "weight_layout.h"

namespace wager::WAGER_NS {

// What a product prefetches while it reads a panel: the bytes `distance` ahead of those it reads, which beyond the end of the
// thread's panels are the first ones of what it reads next.

struct Prefetch {
    ptrdiff_t distance;
    const uint8_t *end, *after;
    // Several tiles of rows read the same panel: each prefetches for every `turns`-th piece of it, from piece `turn` on.
    int turn, turns;
    bool once;  // non-temporal: the bytes are read once, and other levels of the cache keep what they have
    WAGER_INLINE const uint8_t* ahead(const uint8_t* at) const {
        const uint8_t* to = at + distance;
        return to < end ? to : after + (to - end);
    }
};

// Which pieces of a panel a tile prefetches for.
struct Turns {
    int next, step;

    explicit Turns(const Prefetch& prefetch) : next(prefetch.turn), step(prefetch.turns) {}
    WAGER_INLINE bool due(int piece) {
        if (piece != next) return false;
        next += step;
        return true;
    }
};

// Part `index` of `parts` of the cache lines of `bytes` at `at`.
template <int bytes, int index, int parts>
WAGER_INLINE void fetch_part(const uint8_t* at, bool once) {
    constexpr int kLines = (bytes + 63) / 64, kFirst = kLines * index / parts, kEnd = kLines * (index + 1) / parts;
    if (once) {
#pragma GCC unroll 16
        for (int line = kFirst; line < kEnd; ++line) fetch_once(at + 64 * line);
    } else {
#pragma GCC unroll 16
        for (int line = kFirst; line < kEnd; ++line) fetch(at + 64 * line);
    }
}

// Accumulators of a product, and that of bf16 activations with bf16 weights whose outputs lie across lanes. Every output has a
// single accumulator that takes its pairs in order, whatever the number of rows or columns beside it: this makes a row's
// results independent of the others.

constexpr int kPieceInputs = 32;  // inputs of a panel after which prefetching takes another turn

// Sixteens of outputs that M rows are multiplied with at once. Of few rows, whose sums wait for each other, more.
constexpr int tile_columns(int rows) { return rows <= kFewRows ? kColumns : kTileCols; }

// M rows, `stride` elements apart. Every third has a pointer: an address can add a stride to it, or two.
template <int M, class X>
struct RowsAt {
    const X* bases[(M + 2) / 3];
    size_t stride;

    WAGER_INLINE RowsAt(const X* first, size_t stride_) : stride(stride_) {
#pragma GCC unroll 8
        for (int i = 0; i < (M + 2) / 3; ++i) bases[i] = first + 3 * i * stride;
    }
    WAGER_INLINE const X* operator()(int i) const { return bases[i / 3] + (i % 3) * stride; }
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
    WAGER_INLINE void write(float* p, size_t stride) const {
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
            for (int j = 0; j < N; ++j) store(p + i * stride + 16 * j, acc[i][j]);
    }
    WAGER_INLINE void read(const float* p, size_t stride) {
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
            for (int j = 0; j < N; ++j) acc[i][j] = load(p + i * stride + 16 * j);
    }
    // One pair of inputs of M rows, times weights of N * 16 outputs.
    WAGER_INLINE void step(const RowsAt<M, uint16_t>& x, int pair, const Pair (&weights)[N]) {
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i) {
            const auto value = splat_pair(x(i) + 2 * pair);
#pragma GCC unroll 4
            for (int j = 0; j < N; ++j) acc[i][j] = dot(acc[i][j], value, weights[j]);
        }
    }
    // The same sums of rows of floats: where there is no product of pairs, or a slow one. AVX-512 has two fused multiply-adds in
    // a cycle, on Intel's processors, and half a product of pairs.
    WAGER_INLINE void step(const RowsAt<M, float>& x, int pair, const Pair (&weights)[N]) {
        F low[N], high[N];
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) widen_pairs(weights[j], low[j], high[j]);
        step_half(x, 2 * pair + 1, high);
        step_half(x, 2 * pair, low);
    }
    WAGER_INLINE void step_half(const RowsAt<M, float>& x, int input, const F (&w)[N]) {
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i) {
            const F value = splat_at(x(i) + input);
#pragma GCC unroll 4
            for (int j = 0; j < N; ++j) acc[i][j] = add_exact(acc[i][j], value, w[j]);
        }
    }
    static WAGER_INLINE void widen_rows(const uint16_t* x, size_t x_stride, float (&values)[M][kPieceInputs]) {
        for (int i = 0; i < M; ++i, x += x_stride)
            for (int c = 0; c < kPieceInputs; c += 16) store(values[i] + c, widen(x + c));
    }
    // x [M rows, x_stride] of 2 * pairs values times N columns of a panel, the first of which begins at w.
    WAGER_INLINE void run_panel(const uint16_t* x, size_t x_stride, const uint16_t* w, int pairs, const Prefetch& prefetch) {
        constexpr int kPairs = kPieceInputs / 2, kStride = 2 * kPanel;
        const RowsAt<M, uint16_t> rows(x, x_stride);
        Turns turns(prefetch);
        int k = 0;
        for (; k + kPairs <= pairs; k += kPairs) {
            const uint8_t* at = reinterpret_cast<const uint8_t*>(w + static_cast<size_t>(k) * kStride);
            const uint8_t* ahead = turns.due(k / kPairs) ? prefetch.ahead(at) : nullptr;
            alignas(64) float values[M][kPieceInputs];
            if constexpr (M >= kWideRows) widen_rows(x + 2 * k, x_stride, values);
#pragma GCC unroll 16
            for (int u = 0; u < kPairs; ++u) {
                if (ahead) fetch_part<64 * N, 0, 1>(ahead + 2 * kStride * u, prefetch.once);
                Pair weights[N];
                load_weights(w + static_cast<size_t>(k + u) * kStride, weights);
                if constexpr (M >= kWideRows) step(RowsAt<M, float>(values[0], kPieceInputs), u, weights);
                else step(rows, k + u, weights);
            }
        }
        for (; k < pairs; ++k) {
            Pair weights[N];
            load_weights(w + static_cast<size_t>(k) * kStride, weights);
            step(rows, k, weights);
        }
    }
    static WAGER_INLINE void load_weights(const uint16_t* w, Pair (&weights)[N]) {
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) weights[j] = load_pairs(w + 32 * j);
    }
};

// Fills out[M, 32] with M rows of bf16 activations, `stride` bytes apart, times one panel of e4m3. A code is a bf16 too, and a group's
// products are added in the order in which those with bf16 weights are, by the float; the sum, times the group's scale, is
// added to the groups before.
template <WeightFormat format, int M>
__attribute__((aligned(64))) void e4m3_panel(const uint8_t* x, size_t stride, int, int k, const uint8_t* panel, float* out,
                                            const Prefetch& prefetch) {
    constexpr int kQuads = kPieceInputs / 4, kQuadBytes = 4 * kPanel, kCols = tile_columns(M);
    const int inputs = scaled_inputs(format, k);
    alignas(64) float values[M][kPieceInputs];
    std::memset(out, 0, sizeof(float) * kPanel * M);
    Turns turns[] = {Turns(prefetch), Turns(prefetch)};  // of each column
    for (int first = 0; first < k; first += inputs, panel += scaled_bytes(inputs)) {
        for (int column = 0; column < kColumns; column += kCols) {
            Tile<M, kCols> tile;
            tile.clear();
            const uint8_t* at = panel + kScaleBytes + 64 * column;
            for (int done = 0; done < inputs; done += kPieceInputs, at += kQuads * kQuadBytes) {
                const uint8_t* ahead = turns[column].due((first + done) / kPieceInputs) ? prefetch.ahead(at) : nullptr;
                if (ahead && done == 0 && column == 0) fetch_part<kScaleBytes, 0, 1>(prefetch.ahead(panel), prefetch.once);
                const uint16_t* row = reinterpret_cast<const uint16_t*>(x) + first + done;
                if constexpr (M > 1) tile.widen_rows(row, stride / 2, values);
#pragma GCC unroll 8
                for (int quad = 0; quad < kQuads; ++quad) {
                    if (ahead) fetch_part<64 * kCols, 0, 1>(ahead + kQuadBytes * quad, prefetch.once);
                    Pair pairs[2][kCols];
#pragma GCC unroll 2
                    for (int j = 0; j < kCols; ++j) widen_e4m3(load_bytes(at + kQuadBytes * quad + 64 * j), pairs[0][j], pairs[1][j]);
#pragma GCC unroll 2
                    for (int half = 0; half < 2; ++half) {
                        if constexpr (M == 1) tile.step(RowsAt<1, uint16_t>(row, 0), 2 * quad + half, pairs[half]);
                        else tile.step(RowsAt<M, float>(values[0], kPieceInputs), 2 * quad + half, pairs[half]);
                    }
                }
            }
#pragma GCC unroll 2
            for (int j = 0; j < kCols; ++j) {
                const F scale = load(reinterpret_cast<const float*>(panel) + 16 * (column + j));
#pragma GCC unroll 16
                for (int i = 0; i < M; ++i) {
                    float* to = out + i * kPanel + 16 * (column + j);
                    store(to, fma(tile.acc[i][j], scale, load(to)));
                }
            }
        }
    }
}

// Products of quantised weights with quantised activations. Sums within a block of 32 inputs (16 in q6_k) are exact integers;
// blocks are added in order to one float accumulator per output, whatever the rows and columns beside it: this makes a row's
// results independent of the others.

// One block of a panel as the lanes of a product.
template <WeightFormat format>
struct WeightBlock {
    static constexpr BlockLayout kLayout = layout_of(format);
    const uint8_t *group, *block;

    WeightBlock(const uint8_t* panel, int index) : group(panel + kLayout.group_at(index)), block(panel + kLayout.block_at(index)) {}

    // The block that is prefetched while columns of this one are read, or null. The header of a group goes with its first block.
    WAGER_INLINE const uint8_t* ahead(int index, int column, Turns& turns, const Prefetch& prefetch) const {
        if (!turns.due(index)) return nullptr;
        if (kLayout.grouped() && index % kLayout.blocks == 0 && column == 0)
            fetch_part<kLayout.header, 0, 1>(prefetch.ahead(group), prefetch.once);
        return prefetch.ahead(block);
    }
    // A quarter of what is read of that block. Where one column of a whole panel is read after the other, each fetches its own lines,
    // the first one scales too: if it fetched all of them, memory would be idle during the others.
    template <int quarter>
    static WAGER_INLINE void fetch_quarter(const uint8_t* at, int column, bool once) {
        constexpr int kParts = kColumns / kBlockCols, kLow = kLayout.low / kParts, kHigh = kLayout.high / kParts;
        if constexpr (kParts == 1) return fetch_part<kLayout.block_bytes(), quarter, 4>(at, once);
        constexpr int kMore = (kLayout.header | kLayout.block_bytes()) % 64 ? 64 : 0;  // columns share lines
        if (quarter == 0 && column == 0) fetch_part<kLayout.scales, 0, 1>(at, once);
        if (kHigh > 0) fetch_part<kHigh + kMore, quarter, 4>(at + kLayout.high_at() + column * kHigh, once);
        fetch_part<kLow + kMore, quarter, 4>(at + kLayout.low_at() + column * kLow, once);
    }

    WAGER_INLINE F scale(int column, int half) const {
        if (kLayout.own == Own::powers) return mul(splat(0.5f), load_powers(block + 16 * column));
        const F all = load_halves((kLayout.grouped() ? group : block) + 32 * column);
        const uint8_t* own = block + 16 * column;
        switch (kLayout.own) {
            case Own::none:
            case Own::powers: break;
            case Own::whole: return mul(all, load_unsigned(own));
            case Own::integers: return mul(all, load_signed(own + kPanel * half));
            case Own::nibbles: return mul(all, load_low_nibbles(own + kPanel * half));
            case Own::steps: {
                const F step = half ? load_high_nibbles(own) : load_low_nibbles(own);
                return mul(mul(all, splat(kLayout.unit)), add(step, splat(0.5f)));
            }
        }
        return all;
    }
    WAGER_INLINE F minimum(int column, int half) const {
        const uint8_t* floats = (kLayout.grouped() ? group : block) + 32 * column;
        const uint8_t* own = block + 16 * column;
        if (kLayout.zero) return mul(load_halves(floats), sub(splat(0.0f), load_unsigned((kLayout.grouped() ? group : block) + 2 * kPanel + 16 * column)));
        const F all = load_halves(floats + 2 * kPanel);
        if (kLayout.own == Own::whole) return mul(all, load_unsigned(own + kPanel));
        return kLayout.own == Own::nibbles ? mul(all, load_high_nibbles(own + kPanel * half)) : all;
    }
    // Quads 2 * pair and 2 * pair + 1.
    template <int pair>
    WAGER_INLINE void quads(int column, Bytes& first, Bytes& second) const {
        const uint8_t* low = block + kLayout.low_at();
        if constexpr (kLayout.bits == 8) {
            first = load_bytes(low + (8 * column + 2 * pair) * 64);
            second = load_bytes(low + (8 * column + 2 * pair + 1) * 64);
        } else if constexpr (kLayout.bits <= 3) {
            quads_of_two_bits<pair>(column, low, first, second);
        } else {
            quads_of_nibbles<pair>(column, low, first, second);
        }
        if constexpr (kLayout.codebook != Codebook::none) {
            const Lookup numbers = load_lookup(kCodebooks[static_cast<int>(kLayout.codebook)]);
            first = looked_up(first, numbers);
            second = looked_up(second, numbers);
        }
    }
    template <int pair>
    WAGER_INLINE void quads_of_two_bits(int column, const uint8_t* low, Bytes& first, Bytes& second) const {
        const Bytes fields = load_bytes(low + (2 * column + pair / 2) * 64);
        first = shifted<-4 * (pair % 2)>(fields, 3);
        second = shifted<-4 * (pair % 2) - 2>(fields, 3);
        if constexpr (kLayout.bits == 3) {
            const Bytes bits = load_bytes(block + kLayout.high_at() + 64 * column);
            first = either(first, shifted<2 - 2 * pair>(bits, 4));
            second = either(second, shifted<1 - 2 * pair>(bits, 4));
        }
    }
    template <int pair>
    WAGER_INLINE void quads_of_nibbles(int column, const uint8_t* low, Bytes& first, Bytes& second) const {
        const Bytes nibbles = load_bytes(low + (4 * column + pair) * 64);
        first = shifted<0>(nibbles, 15);
        second = shifted<-4>(nibbles, 15);
        const uint8_t* high = block + kLayout.high_at();
        if constexpr (kLayout.bits == 5) {
            const Bytes bits = load_bytes(high + 64 * column);
            first = either(first, shifted<4 - 2 * pair>(bits, 16));
            second = either(second, shifted<3 - 2 * pair>(bits, 16));
        } else if constexpr (kLayout.bits == 6) {
            const Bytes bits = load_bytes(high + (2 * column + pair / 2) * 64);
            first = either(first, shifted<4 - 4 * (pair % 2)>(bits, 48));
            second = either(second, shifted<2 - 4 * (pair % 2)>(bits, 48));
        }
    }
};

// The columns of a block from `column` on in registers, for row after row.
template <WeightFormat format>
struct HeldBlock {
    static constexpr BlockLayout kLayout = layout_of(format);
    Bytes weights[kBlockCols][kBlockInputs / 4];
    F scales[kBlockCols][kLayout.halves], minima[kBlockCols][kLayout.halves];

    WAGER_INLINE HeldBlock(const WeightBlock<format>& from, int column, const uint8_t* ahead, bool once) {
        hold<0>(from, column, ahead, once);
        hold<1>(from, column, ahead, once);
        hold<2>(from, column, ahead, once);
        hold<3>(from, column, ahead, once);
#pragma GCC unroll 2
        for (int j = 0; j < kBlockCols; ++j)
#pragma GCC unroll 2
            for (int half = 0; half < kLayout.halves; ++half) {
                scales[j][half] = from.scale(column + j, half);
                minima[j][half] = kLayout.minimum ? from.minimum(column + j, half) : zero();
            }
    }
    template <int pair>
    WAGER_INLINE void hold(const WeightBlock<format>& from, int column, const uint8_t* ahead, bool once) {
        if (ahead) fetch_part<kLayout.block_bytes(), pair, 4>(ahead, once);
#pragma GCC unroll 2
        for (int j = 0; j < kBlockCols; ++j) from.template quads<pair>(column + j, weights[j][2 * pair], weights[j][2 * pair + 1]);
    }
    // By `load`: GCC copies an F in memory by halves, which the load of the whole waits for.
    WAGER_INLINE F scale(int column, int half) const { return load(reinterpret_cast<const float*>(&scales[column][half])); }
    WAGER_INLINE F minimum(int column, int half) const { return load(reinterpret_cast<const float*>(&minima[column][half])); }
    template <int pair>
    WAGER_INLINE void quads(int column, Bytes& first, Bytes& second) const {
        first = weights[column][2 * pair];
        second = weights[column][2 * pair + 1];
    }
};

// M rows times kBlockCols columns of a panel, of a WeightBlock or a HeldBlock; accumulators are in registers, or `stored` in `out`.
template <WeightFormat format, int M, bool stored>
struct BlockTile {
    static constexpr BlockLayout kLayout = layout_of(format);

#ifdef WAGER_I8MM
    static constexpr int kTwos = M / 2;  // pairs of rows that are multiplied at once
    TwoSums twos[kTwos > 0 ? kTwos : 1];
#else
    static constexpr int kTwos = 0;
#endif
    float* out;
    Sums sums[M][kBlockCols];  // of a block, of rows that have no other
    Tile<M, kBlockCols> total;

    explicit BlockTile(float* out_) : out(out_) {}

    template <class Rows>
    WAGER_INLINE void begin(int half, const Rows& x) {
        constexpr bool kStarts = kLayout.any_byte() ? kByteOffset != 0 : kLayout.offset != 0;
#ifdef WAGER_I8MM
#pragma GCC unroll 16
        for (int i = 0; i < kTwos; ++i)
            twos[i] = kStarts ? begin_two(x(2 * i).start + half, x(2 * i + 1).start + half) : no_sums();
#endif
#pragma GCC unroll 16
        for (int i = 2 * kTwos; i < M; ++i) {
            const Sums start = kStarts ? splat_sum(x(i).start + half) : no_sum();
#pragma GCC unroll 2
            for (int j = 0; j < kBlockCols; ++j) sums[i][j] = start;
        }
    }
#ifdef WAGER_SHORT_SUMS
    // The sums of as many quads as fit 16 bits are added up at once.
    static constexpr int kQuads = kLayout.quads_in_short();
    ShortSums shorts[M][kBlockCols];

    template <int quad, class Rows>
    WAGER_INLINE void add_quad(const Bytes (&w)[kBlockCols], const Rows& x) {
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i) {
            const auto value = load_quad<quad>(x(i).values);
#pragma GCC unroll 2
            for (int j = 0; j < kBlockCols; ++j) {
                const ShortSums some = kLayout.any_byte() ? short_any_sums(w[j], value) : short_sums(w[j], value);
                shorts[i][j] = quad % kQuads == 0 ? some : add(shorts[i][j], some);
                if (quad % kQuads != kQuads - 1) continue;
                sums[i][j] = add_up(sums[i][j], shorts[i][j]);
                if constexpr (stored) now(sums[i][j]);
            }
        }
    }
#else
    template <int quad, class Rows>
    WAGER_INLINE void add_quad(const Bytes (&w)[kBlockCols], const Rows& x) {
#pragma GCC unroll 16
        for (int i = 2 * kTwos; i < M; ++i) {
            const auto value = load_quad<quad>(x(i).values);
#pragma GCC unroll 2
            for (int j = 0; j < kBlockCols; ++j)
                sums[i][j] = kLayout.any_byte() ? dot_any_bytes(sums[i][j], w[j], value) : dot_bytes(sums[i][j], w[j], value);
        }
    }
#endif
    template <int pair, class Block, class Rows>
    WAGER_INLINE void add_pair(const Block& block, int column, const Rows& x, const uint8_t* ahead, bool once) {
        Bytes first[kBlockCols], second[kBlockCols];
        if (ahead) WeightBlock<format>::template fetch_quarter<pair>(ahead, column, once);
#pragma GCC unroll 2
        for (int j = 0; j < kBlockCols; ++j) block.template quads<pair>(column + j, first[j], second[j]);
#ifdef WAGER_I8MM
        if constexpr (kTwos > 0) {
            static_assert(kBlockCols == 1);
            const Eights both = eights(first[0], second[0]);
#pragma GCC unroll 16
            for (int i = 0; i < kTwos; ++i)
                twos[i] = dot_eights(twos[i], both, load_eights(x(2 * i).values + 8 * pair, x(2 * i + 1).values + 8 * pair));
        }
#endif
        add_quad<2 * pair>(first, x);
        add_quad<2 * pair + 1>(second, x);
    }
    WAGER_INLINE Sums sums_at(int i, int j) const {
#ifdef WAGER_I8MM
        if (i < 2 * kTwos) return sums_of(twos[i / 2], i % 2);
#endif
        return sums[i][j];
    }
    // Adds the sums of a block, or of a half, to the accumulators, and the minima, each times the sum of its activations.
    template <int half, class Block, class Rows>
    WAGER_INLINE void end(const Block& block, int column, const Rows& x) {
#pragma GCC unroll 2
        for (int j = 0; j < kBlockCols; ++j) {
            const F scale = block.scale(column + j, half), minimum = kLayout.minimum ? block.minimum(column + j, half) : zero();
#pragma GCC unroll 16
            for (int i = 0; i < M; ++i) {
                F acc = stored ? load(out + i * kPanel + 16 * j) : total.acc[i][j];
                acc = fma(to_float(sums_at(i, j)), mul(scale, splat(x(i).scale)), acc);
                if constexpr (kLayout.minimum && kLayout.halves == 2)
                    acc = fma(minimum, mul(splat(x(i).scale), to_float(splat_sum(x(i).start + half))), acc);
                else if constexpr (kLayout.minimum) acc = fma(minimum, splat(x(i).scaled_sum), acc);
                if constexpr (stored) store(out + i * kPanel + 16 * j, acc);
                else total.acc[i][j] = acc;
            }
        }
    }
    // One block of the columns from `column` on; `ahead`: what is prefetched meanwhile, or null.
    template <class Block, class Rows>
    WAGER_INLINE void step(const Block& block, int column, const Rows& x, const uint8_t* ahead, bool once) {
        begin(0, x);
        add_pair<0>(block, column, x, ahead, once);
        add_pair<1>(block, column, x, ahead, once);
        if constexpr (kLayout.halves == 2) {
            end<0>(block, column, x);
            begin(1, x);
        }
        add_pair<2>(block, column, x, ahead, once);
        add_pair<3>(block, column, x, ahead, once);
        end<kLayout.halves - 1>(block, column, x);
    }
};

// Fills out[M, 32] with M rows of activation blocks, `stride` bytes apart, times one panel.
template <WeightFormat format, int M>
__attribute__((aligned(64))) void block_panel(const uint8_t* x, size_t stride, int, int k, const uint8_t* panel, float* out,
                                             const Prefetch& prefetch) {
    constexpr bool stored = M > kBlockRows;
    const RowsAt<M, uint8_t> all(x, stride);
    for (int column = 0; column < kColumns; column += kBlockCols) {
        BlockTile<format, M, stored> tile(out + 16 * column);
        tile.total.clear();
        if constexpr (stored) tile.total.write(tile.out, kPanel);
        Turns turns(prefetch);
        for (int index = 0; index < k / kBlockInputs; ++index) {
            const WeightBlock<format> block(panel, index);
            const auto rows = [&](int i) -> const ActivationBlock& { return reinterpret_cast<const ActivationBlock*>(all(i))[index]; };
            const uint8_t* ahead = block.ahead(index, column, turns, prefetch);
            tile.step(block, column, rows, ahead, prefetch.once);
        }
        if constexpr (!stored) tile.total.write(tile.out, kPanel);
    }
}

// Adds M rows' blocks of activations, `stride` bytes apart, times a held block to out [M, 32].
template <int M, WeightFormat format>
WAGER_INLINE void add_rows(const HeldBlock<format>& block, const uint8_t* x, size_t stride, float* out) {
    // Where there are not as many registers GCC would copy them to another place in memory once more.
    if constexpr (kHeldRows > 1) asm volatile("" : : "r"(&block) : "memory");
    BlockTile<format, M, true> tile(out);
    const auto rows = [&](int i) -> const ActivationBlock& { return *reinterpret_cast<const ActivationBlock*>(x + i * stride); };
    tile.step(block, 0, rows, nullptr, false);
}

// As block_panel for any number of rows, some after the others: their accumulators are in `out`, and a block is unpacked once.
// Rows that lie a block apart are [blocks][rows].
template <WeightFormat format>
__attribute__((aligned(64))) void block_rows(const uint8_t* x, size_t stride, int rows, int k, const uint8_t* panel, float* out,
                                            const Prefetch& prefetch) {
    const size_t next = stride == sizeof(ActivationBlock) ? rows * stride : sizeof(ActivationBlock);  // to a row's next block
    std::memset(out, 0, sizeof(float) * kPanel * rows);
    Turns turns(prefetch);
    for (int index = 0; index < k / kBlockInputs; ++index) {
        const WeightBlock<format> block(panel, index);
        const uint8_t* ahead = block.ahead(index, 0, turns, prefetch);
        for (int column = 0; column < kColumns; column += kBlockCols) {
            const HeldBlock<format> held(block, column, column == 0 ? ahead : nullptr, prefetch.once);
            const uint8_t* at = x + index * next;
            float* to = out + 16 * column;
            int left = rows;
            for (; left >= kHeldRows; left -= kHeldRows, at += kHeldRows * stride, to += kHeldRows * kPanel)
                add_rows<kHeldRows>(held, at, stride, to);
            for (; left > 0; --left, at += stride, to += kPanel) add_rows<1>(held, at, stride, to);
        }
    }
}

}  // namespace wager::WAGER_NS
