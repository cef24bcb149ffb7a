// Paged attention over every row's own path, with online softmax over tiles of 64 keys at absolute positions, and the
// results of segments of 256 keys combined in order. Work items are (kv head, tile) pairs, those of a head side by side: they
// read the same keys. Many of them are taken in turn by the threads; where there are few, each thread has an even share of
// their segments. Results are combined in the same order either way, so every bit is equal.
#pragma once

#include "attention_tile.h"

namespace wager::WAGER_NS {

// Segments [first, end) of the current item into `state`.
inline void attend(AttentionTile& tile, int first, int end, SoftmaxState& state) {
    tile.end_block = tile.block_after(end);
    tile.segment(first, state);
    for (int segment = first + 1; segment < end; ++segment) {
        tile.segment(segment, tile.segment_state);
        state.fold(tile.segment_state, tile.rows * tile.group, tile.values_d);
    }
}

// Threads take items one by one, the long ones of a prompt first, and each knows its next one beforehand.
inline void attend_in_turn(AttentionTile& tile) {
    const int items = tile.plan.tiles * tile.op.cache.kv_heads;
    const auto take = [&] { return items - 1 - tile.op.next->fetch_add(1, std::memory_order_relaxed); };
    for (int item = take(); item >= 0;) {
        const int next = take();
        tile.begin(item);
        tile.follow(next);
        attend(tile, tile.first_segment(), tile.end_segment(), tile.full_state);
        tile.finish(tile.full_state);
        item = next;
    }
}

// The segments of all items in a line, cut into a contiguous share of even cost for each thread.
struct SegmentShares {
    AttentionTile& tile;
    const AttentionPlan& plan;
    int items, threads, thread;
    int64_t total, before;  // cost of all items, and of those before the current one

    SegmentShares(AttentionTile& tile_, int thread_)
        : tile(tile_),
          plan(tile.plan),
          items(plan.tiles * tile.op.cache.kv_heads),
          threads(tile.step.threads),
          thread(thread_),
          total(0),
          before(0) {
        for (int i = 0; i < plan.tiles; ++i) {
            tile.place(i);
            for (int s = tile.first_segment(); s < tile.end_segment(); ++s) total += cost(s) * tile.op.cache.kv_heads;
        }
    }
    // In key tiles times row-heads; what a key tile costs beside its products is that of some row-heads more.
    int64_t cost(int segment) const {
        const int from = segment * kSegment, to = from + kSegment;
        const int first = tile.first_seen > from ? tile.first_seen : from, last = tile.end_seen < to ? tile.end_seen : to;
        return int64_t{(last - 1) / kKeyTile - first / kKeyTile + 1} * (tile.rows * tile.group + 12);
    }
    // The thread whose share a segment is that begins at this cost.
    int owner(int64_t from, int64_t segment_cost) const {
        return static_cast<int>((2 * from + segment_cost) * threads / (2 * total));
    }
    SoftmaxState part(int of, int index) const {
        const size_t floats = state_floats(tile.group, tile.d);
        return SoftmaxState(plan.parts + (static_cast<size_t>(of) * (plan.segments + 1) + index) * floats, tile.group, tile.d);
    }

    void run() {
        for (int item = 0; item < items; ++item) {
            tile.place(item % plan.tiles);
            int first = -1, end = -1, owners = 0, last_owner = -1;
            int64_t at = before;
            for (int s = tile.first_segment(); s < tile.end_segment(); at += cost(s), ++s) {
                const int by = owner(at, cost(s));
                owners += by != last_owner;
                last_owner = by;
                if (by != thread) continue;
                first = first < 0 ? s : first;
                end = s + 1;
            }
            if (first >= 0) attend_share(item, first, end, owners, at);
            before = at;
        }
    }

    // Segments [first, end) of an item. If they are not all, the thread that completes the last of them combines them.
    void attend_share(int item, int first, int end, int owners, int64_t item_end) {
        const bool followed = end == tile.end_segment() && item + 1 < items && owner(item_end, 0) == thread;
        tile.begin(item);
        tile.follow(followed ? item + 1 : -1);
        if (owners == 1) {
            attend(tile, first, end, tile.full_state);
            return tile.finish(tile.full_state);
        }
        if (first == tile.first_segment()) {
            SoftmaxState state = part(thread, 0);
            attend(tile, first, end, state);
        } else {
            for (int s = first; s < end; ++s) {
                SoftmaxState state = part(thread, 1 + s - first);
                attend(tile, s, s + 1, state);
            }
        }
        if (plan.done[item].fetch_add(1, std::memory_order_acq_rel) + 1 != owners) return;
        plan.done[item].store(0, std::memory_order_relaxed);  // for the next layer; a barrier lies between
        combine();
    }

    void combine() {
        const int first = tile.first_segment();
        const int first_owner = owner(before, cost(first));
        SoftmaxState state = part(first_owner, 0);
        int64_t at = before;
        for (int s = first, last_owner = first_owner, index = 0; s < tile.end_segment(); at += cost(s), ++s) {
            const int by = owner(at, cost(s));
            index = by == last_owner ? index + 1 : 1;
            last_owner = by;
            if (by != first_owner) state.fold(part(by, index), tile.rows * tile.group, tile.values_d);
        }
        tile.finish(state);
    }
};

inline void attention(const Attention& op, const Step& step, int thread) {
    AttentionTile tile(op, step, step.scratch + step.scratch_bytes * thread);
    if (tile.plan.segments > 0) SegmentShares(tile, thread).run();
    else attend_in_turn(tile);
}

}  // namespace wager::WAGER_NS
