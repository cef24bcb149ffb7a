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

    // The reference of row-head i for its scores of a key tile, replaced by -inf where it does not see the key.
    WAGER_INLINE void look(int i, int d, float* scores, TileKeys keys, float scale) {
        const F hidden = splat(-__builtin_inff());
        F best = hidden;
        for (int b = keys.first; b < keys.last; ++b) {
            const F score = keep(load(scores + 16 * b), hidden, keys.low - 16 * b, keys.high - 16 * b);
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
    // Its scores to probabilities p, bf16.
    WAGER_INLINE void weigh(int i, const float* scores, uint16_t* p, int first, int last, float scale) {
        const F reference = splat(-top[i]), factor = splat(scale);
        F total = load(sum + 16 * i);
#pragma GCC unroll 4
        for (int b = first; b < last; ++b) {
            const F probability = exp2_short(fma(load(scores + 16 * b), factor, reference));
            narrow(p + 16 * b, probability);
            total = add(total, probability);
        }
        store(sum + 16 * i, total);
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
