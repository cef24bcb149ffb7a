// Partial results of an online softmax over key tiles, and how those of earlier and later keys are combined.
#pragma once

namespace wager::WAGER_NS {

// The keys [low, high) that a row sees, counted from the first key of a tile, and the tile's blocks [first, last) that any
// row sees.
struct TileKeys {
    int low, high, first, last;
};

// Partial result of an online softmax over some keys, for each row-head (a row and a query head): the weighted sum of
// values, lane-wise sums of the probabilities and the score that they are relative to, in units of log2.
struct SoftmaxState {
    static constexpr float kNone = -1e30f, kSlack = 8.0f;
    float *o, *sum, *top;  // [row-heads, d], [.., 16], [..]

    SoftmaxState(float* memory, int group, int d) {
        const size_t height = tile_height(group);
        o = memory;
        sum = o + height * d;
        top = sum + height * 16;
    }
    void clear(int n, int d) {
        std::memset(o, 0, static_cast<size_t>(n) * d * 4);
        std::memset(sum, 0, static_cast<size_t>(n) * 16 * 4);
        for (int i = 0; i < n; ++i) top[i] = kNone;
    }

    // Raises the reference of row-head i for scores whose lane-wise maximum is `best`: only where they exceed it by far, and
    // with its sum and output. Probabilities relative to it are at most 2^kSlack, which changes no relative precision.
    WAGER_INLINE void raise(int i, int d, F best, float scale) {
        const float found = max_lane(best) * scale, before = top[i];
        if (!(found > before + kSlack)) return;
        top[i] = found;
        if (before > kNone) rescale(i, d, exp2(splat(before - found)));
    }
    [[gnu::noinline]] void rescale(int i, int d, F factor) {
        store(sum + 16 * i, mul(load(sum + 16 * i), factor));
        float* at = o + static_cast<size_t>(i) * d;
        for (int j = 0; j < d; j += 16) store(at + j, mul(load(at + j), factor));
    }

    // Looks at the scores of row-head i for a key tile; -inf replaces them where it does not see the key. `scales`: what they
    // are multiplied by, or null.
    WAGER_INLINE void look(int i, int d, float* scores, const float* scales, TileKeys keys, float scale) {
        const F hidden = splat(-__builtin_inff());
        F best = hidden;
        for (int b = 0; b < keys.first; ++b) store(scores + 16 * b, hidden);
        for (int b = keys.last; b < kTileBlocks; ++b) store(scores + 16 * b, hidden);
        for (int b = keys.first; b < keys.last; ++b) {
            const F raw = load(scores + 16 * b), scaled = scales ? mul(raw, load(scales + 16 * b)) : raw;
            const F score = keep(scaled, hidden, keys.low - 16 * b, keys.high - 16 * b);
            store(scores + 16 * b, score);
            best = max(best, score);
        }
        raise(i, d, best, scale);
    }
    // The same where it sees every key of the tile.
    WAGER_INLINE void look_at_all(int i, int d, const float* scores, float scale) {
        static_assert(kTileBlocks == 4);
        raise(i, d, max(max(load(scores), load(scores + 16)), max(load(scores + 32), load(scores + 48))), scale);
    }
    // Adds the probabilities of its scores of a key tile to its sum, and gives each sixteen of them to change(block, them)
    // before they are stored.
    template <class Change>
    WAGER_INLINE void weigh(int i, const float* scores, uint16_t* p, float scale, Change change) {
        static_assert(kTileBlocks % kExpBlocks == 0);
        const F reference = splat(-top[i]), factor = splat(scale);
        F total = load(sum + 16 * i);
#pragma GCC unroll 2
        for (int from = 0; from < kTileBlocks; from += kExpBlocks) {
            F some[kExpBlocks];
#pragma GCC unroll 4
            for (int b = 0; b < kExpBlocks; ++b) some[b] = fma(load(scores + 16 * (from + b)), factor, reference);
            exp2_short(some);
#pragma GCC unroll 4
            for (int b = 0; b < kExpBlocks; ++b) total = add(total, some[b]);
#pragma GCC unroll 4
            for (int b = 0; b < kExpBlocks; b += 2)
                narrow_two(p + 16 * (from + b), change(from + b, some[b]), change(from + b + 1, some[b + 1]));
        }
        store(sum + 16 * i, total);
    }
    WAGER_INLINE void weigh(int i, const float* scores, uint16_t* p, float scale) {
        weigh(i, scores, p, scale, [](int, F probability) { return probability; });
    }
    // The same with the values' scales in the probabilities. A key that is not seen keeps 0, whatever its scale.
    WAGER_INLINE void weigh_scaled(int i, const float* scores, uint16_t* p, const float* scales, TileKeys keys, float scale) {
        weigh(i, scores, p, scale, [=](int b, F probability) {
            return keep(mul(probability, load(scales + 16 * b)), zero(), keys.low - 16 * b, keys.high - 16 * b);
        });
    }

    // Adds the partial result of later keys. One without any key (top kNone) leaves every bit as it was.
    void fold(const SoftmaxState& later, int n, int d) {
        alignas(64) float scales[16], later_scales[16];
        for (int i = 0; i < n; ++i) {
            if (i % 16 == 0) {  // sixteen row-heads at once; there is room for them past the last
                const F own = load(top + i), other = load(later.top + i), both = max(other, own);
                store(scales, exp2(sub(own, both)));
                store(later_scales, exp2(sub(other, both)));
                store(top + i, both);
            }
            const F scale = splat(scales[i % 16]), later_scale = splat(later_scales[i % 16]);
            float *s = sum + 16 * i, *at = o + static_cast<size_t>(i) * d;
            const float* from = later.o + static_cast<size_t>(i) * d;
            store(s, fma(load(s), scale, mul(load(later.sum + 16 * i), later_scale)));
            for (int j = 0; j < d; j += 16) store(at + j, fma(load(at + j), scale, mul(load(from + j), later_scale)));
        }
    }
};

}  // namespace wager::WAGER_NS
