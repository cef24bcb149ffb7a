// Partial results of an online softmax, and how those of earlier and later keys are combined.
#pragma once

namespace wager::WAGER_NS {

// Partial result of an online softmax over some keys, for each row-head (a row and a query head): the weighted sum of
// values, lane-wise sums of the probabilities and the maximum score.
struct SoftmaxState {
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
        for (int i = 0; i < n; ++i) top[i] = -1e30f;
    }
    // Adds the partial result of later keys. One without any key (top -1e30) leaves every bit as it was.
    void fold(const SoftmaxState& later, int n, int d) {
        for (int i = 0; i < n; ++i) {
            const float top_of_both = later.top[i] > top[i] ? later.top[i] : top[i];
            const F scale = exp2(splat(top[i] - top_of_both)), later_scale = exp2(splat(later.top[i] - top_of_both));
            float *s = sum + 16 * i, *at = o + static_cast<size_t>(i) * d;
            const float* from = later.o + static_cast<size_t>(i) * d;
            store(s, add(mul(load(s), scale), mul(load(later.sum + 16 * i), later_scale)));
            for (int j = 0; j < d; j += 16) store(at + j, add(mul(load(at + j), scale), mul(load(from + j), later_scale)));
            top[i] = top_of_both;
        }
    }
};

}  // namespace wager::WAGER_NS
