// What a product prefetches while it reads a panel: the bytes `distance` ahead of those it reads, which beyond the end of the
// thread's panels are the first ones of what it reads next.
#pragma once

#include <cstddef>
#include <cstdint>

namespace wager::WAGER_NS {

struct Prefetch {
    ptrdiff_t distance;
    const uint8_t *end, *after;
    // Several tiles of rows read the same panel: each prefetches for every `turns`-th piece of it, from piece `turn` on.
    int turn, turns;

    bool once() const { return turns == 1; }
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

// Part `index` of `parts` of the cache lines of `bytes` at `at`; `once`: they will be read once, so other levels of the cache
// keep what they have.
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

}  // namespace wager::WAGER_NS
