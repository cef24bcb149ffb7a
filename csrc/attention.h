// Paged attention over every row's own path, with online softmax over tiles of 64 keys at absolute positions, and the
// results of segments of 256 keys combined in order. Work items are (tile, kv head) pairs; where there are too few of them
// for an even share per thread, segments too. Results are combined in the same order either way, so every bit is equal.
#pragma once

#include "attention_tile.h"

namespace wager::WAGER_NS {

// All segments of a tile and kv head, one after the other.
inline void attend(AttentionTile& tile, float scale) {
    const int n = tile.rows * tile.group;
    tile.full_state.clear(n, tile.values_d);
    for (int segment = tile.first_segment(); segment < tile.end_segment(); ++segment) {
        tile.segment(segment, scale);
        tile.full_state.fold(tile.segment_state, n, tile.values_d);
    }
    tile.finish();
}

// One segment; the thread that completes the last one of its tile and kv head combines them all.
inline void attend_segment(AttentionTile& tile, const AttentionPlan& plan, int item, int segment, float scale) {
    const int first = tile.first_segment(), end = tile.end_segment(), n = tile.rows * tile.group;
    if (segment < first || segment >= end) return;
    const SoftmaxState own = tile.segment_state;
    const auto part_of = [&](int s) {
        const size_t at = static_cast<size_t>(item) * plan.segments + s;
        return SoftmaxState(plan.parts + at * state_floats(tile.group, tile.d), tile.group, tile.d);
    };
    tile.segment_state = part_of(segment);
    tile.segment(segment, scale);
    tile.segment_state = own;
    if (plan.done[item].fetch_add(1, std::memory_order_acq_rel) + 1 != end - first) return;
    plan.done[item].store(0, std::memory_order_relaxed);  // for the next layer; a barrier lies between
    tile.full_state.clear(n, tile.values_d);
    for (int s = first; s < end; ++s) tile.full_state.fold(part_of(s), n, tile.values_d);
    tile.finish();
}

inline void attention(const Attention& op, const Step& step, int thread) {
    AttentionTile tile(op, step, step.scratch + step.scratch_bytes * thread);
    const int kv_heads = op.cache.kv_heads, items = step.plan.tiles * kv_heads;
    const float scale = op.scale > 0 ? kLog2e * op.scale : kLog2e / sqrtf(static_cast<float>(tile.d));
    const bool split = step.plan.segments > 0;
    const int total = split ? items * step.plan.segments : items;
    for (;;) {
        const int next = op.next->fetch_add(1, std::memory_order_relaxed);
        if (next >= total) return;
        const int item = split ? next % items : items - 1 - next;  // long rows first
        tile.begin(item / kv_heads, item % kv_heads);
        if (split) attend_segment(tile, step.plan, item, next / items, scale);
        else attend(tile, scale);
    }
}

}  // namespace wager::WAGER_NS
