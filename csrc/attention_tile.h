// One tile of attention: scores, softmax and values of a few rows against one segment of their keys.
//
// A tile is a few consecutive rows of one sequence; with the query heads of one kv head they share each load of a block.
// Rows of a tree whose ancestors are scattered in the cache read, from a block on, copies in path order, so that every row
// computes over the same blocks as in plain decoding. Keys that a row does not attend to have probability 0 and leave its
// sums unchanged, whatever their numbers; so a row's result does not depend on which rows share its tile.
#pragma once

#include <cmath>

#include "attention_block.h"
#include "softmax_state.h"

namespace wager::WAGER_NS {

// Attention of one (tile, kv head): its buffers in this thread's scratch memory, and where each row's keys are.
struct AttentionTile {
    const Attention& op;
    const Step& step;
    int row, rows, head, d, values_d, group;
    int shared;              // blocks below this one are read from the cache by all rows
    int full_from, full_to;  // every key of the blocks in [from, to) is visible to every row
    uint16_t *q, *p;         // [row-heads, d], [row-heads, 64]
    float* s;                // [row-heads, 64]
    SoftmaxState segment_state, full_state;  // of the current segment; of all segments so far
    uint16_t *tail_keys, *tail_values;  // [rows, tail_blocks, 16 * d]
    uint16_t* masked_values;            // [rows, 16 * d]
    uint16_t* transposed;               // [16 * d]: the current cached block as values, where the cache is latent
    uint32_t masked;                    // rows whose values of the current block are in masked_values, as bits
    const int32_t* table;

    AttentionTile(const Attention& op_, const Step& step_, uint8_t* scratch)
        : op(op_),
          step(step_),
          d(op.cache.head_dim),
          values_d(op.cache.value_dim),
          group(op.heads / op.cache.kv_heads),
          s(reinterpret_cast<float*>(scratch)),
          segment_state(s + tile_height(group) * kKeyTile, group, d),
          full_state(segment_state.o + state_floats(group, d), group, d) {
        const size_t height = tile_height(group);
        q = reinterpret_cast<uint16_t*>(full_state.o + state_floats(group, d));
        p = q + height * d;
        tail_keys = p + height * kKeyTile;
        tail_values = tail_keys + tail_offset(tile_rows(group), 0);
        masked_values = tail_values + tail_offset(tile_rows(group), 0);
        transposed = masked_values + static_cast<size_t>(tile_rows(group)) * kBlockSize * d;
    }

    int position(int t) const { return step.in.positions[row + t]; }
    int first_key(int t) const {
        const int low = position(t) - op.window + 1;
        return op.window && low > 0 ? low : 0;
    }
    size_t tail_offset(int t, int block) const {
        return (static_cast<size_t>(t) * step.plan.tail_blocks + block) * kBlockSize * d;
    }
    bool gathered(int t, int block) const { return block >= step.plan.tails[row + t]; }
    const uint16_t* cached(const uint16_t* all, int block) const {
        return all + cache_offset(op.cache, op.layer, table[block], head);
    }
    const uint16_t* keys_of(int t, int block) const {
        return gathered(t, block) ? tail_keys + tail_offset(t, block - step.plan.tails[row + t]) : cached(op.cache.keys, block);
    }
    const uint16_t* values_of(int t, int block) const {
        if (masked >> t & 1u) return masked_values + static_cast<size_t>(t) * kBlockSize * d;
        if (gathered(t, block)) return tail_values + tail_offset(t, block - step.plan.tails[row + t]);
        return op.cache.values ? cached(op.cache.values, block) : transposed;
    }
    bool visible(int t, int block) const {
        return block * kBlockSize <= position(t) && first_key(t) < (block + 1) * kBlockSize;
    }

    void begin(int tile, int kv_head) {
        row = step.plan.tile_rows[tile];
        rows = step.plan.tile_sizes[tile];
        head = kv_head;
        table = step.in.block_tables + static_cast<size_t>(step.in.seq_ids[row]) * step.in.max_blocks;
        shared = full_to = INT32_MAX;
        full_from = 0;
        masked = 0;
        for (int t = 0; t < rows; ++t) {
            const int blocks = position(t) / kBlockSize + 1, tail = step.plan.tails[row + t];
            shared = blocks < shared ? blocks : shared;
            shared = tail < shared ? tail : shared;
            const int low = (first_key(t) + kBlockSize - 1) / kBlockSize, high = (position(t) + 1) / kBlockSize;
            full_from = low > full_from ? low : full_from;
            full_to = high < full_to ? high : full_to;
            const uint16_t* from = op.q + (static_cast<size_t>(row + t) * op.heads + head * group) * d;
            std::memcpy(q + t * group * d, from, static_cast<size_t>(group) * d * 2);
        }
    }
    int first_segment() const {
        int low = first_key(0);
        for (int t = 1; t < rows; ++t) low = first_key(t) < low ? first_key(t) : low;
        return low / kSegment;
    }
    int end_segment() const {
        int high = 0;
        for (int t = 0; t < rows; ++t) high = position(t) > high ? position(t) : high;
        return high / kSegment + 1;
    }

    // Attends to the keys of one segment, into `segment_state`.
    void segment(int index, float scale) {
        constexpr int kSegmentBlocks = kSegment / kBlockSize;
        segment_state.clear(rows * group, values_d);
        int first = kSegmentBlocks, last = 0;  // blocks of the segment that some row can see
        for (int t = 0; t < rows; ++t) {
            const int low = first_key(t) / kBlockSize - index * kSegmentBlocks;
            const int high = position(t) / kBlockSize + 1 - index * kSegmentBlocks;
            first = low < first ? low : first;
            last = high > last ? high : last;
            if (step.plan.tails[row + t] < (index + 1) * kSegmentBlocks) gather(t);
        }
        first = (first < 0 ? 0 : first) + index * kSegmentBlocks;
        last = (last > kSegmentBlocks ? kSegmentBlocks : last) + index * kSegmentBlocks;
        constexpr int kBlocksPerTile = kKeyTile / kBlockSize;
        for (int block = first; block < last;) {
            const int tile_end = (block / kBlocksPerTile + 1) * kBlocksPerTile, end = tile_end < last ? tile_end : last;
            key_tile(block, end, scale);
            block = end;
        }
    }

    // Copies scattered keys and values into path order: the block where the row's path leaves position order, then its nodes.
    void gather(int t) {
        const int tail = step.plan.tails[row + t], base = step.in.num_computed_tokens[step.in.seq_ids[row]];
        const int blocks = position(t) / kBlockSize - tail + 1;
        const size_t block_bytes = static_cast<size_t>(kBlockSize) * d * 2;
        uint16_t *keys = tail_keys + tail_offset(t, 0), *values = tail_values + tail_offset(t, 0);
        std::memset(keys, 0, blocks * block_bytes);
        std::memcpy(keys, cached(op.cache.keys, tail), block_bytes);
        if (op.cache.values) {
            std::memset(values, 0, blocks * block_bytes);
            std::memcpy(values, cached(op.cache.values, tail), block_bytes);
        }
        const int start = step.in.query_start_loc[step.in.seq_ids[row]];
        for (int a = row + t; a >= start; a = step.in.parents[a]) {
            const int at = step.in.positions[a];
            if (a - start == at - base) break;  // from here down the path lies in position order
            copy_key(step.in.slot_mapping[a], keys, values, at - tail * kBlockSize);
        }
        for (int block = 0; block < (op.cache.values ? 0 : blocks); ++block)
            transpose_latents(keys + tail_offset(0, block), values_d, values + tail_offset(0, block));
    }
    void copy_key(int slot, uint16_t* keys, uint16_t* values, int to) const {
        const size_t from = cache_offset(op.cache, op.layer, slot / kBlockSize, head);
        const size_t block = static_cast<size_t>(to / kBlockSize) * kBlockSize * d;
        const uint16_t* key = op.cache.keys + from + slot % kBlockSize * 2;
        keys += block + to % kBlockSize * 2;
        for (int i = 0; i < d / 2; ++i) std::memcpy(keys + i * 2 * kBlockSize, key + i * 2 * kBlockSize, 4);
        if (!op.cache.values) return;
        const uint16_t* value = op.cache.values + from + slot % kBlockSize / 2 * (2 * d) + slot % 2;
        values += block + to % kBlockSize / 2 * (2 * d) + to % 2;
        for (int i = 0; i < d; ++i) values[2 * i] = value[2 * i];
    }

    // The cached block of latents as values, if some row reads it from the cache. Kept out of the loops of other caches.
    [[gnu::noinline]] void transpose_cached(int block) {
        for (int t = 0; t < rows; ++t) {
            if (!visible(t, block) || gathered(t, block)) continue;
            transpose_latents(cached(op.cache.keys, block), values_d, transposed);
            return;
        }
    }

    // 0 x NaN is NaN: a row whose masked values are not finite reads the block from a copy without them.
    void mask_nonfinite(int block) {
        masked = 0;
        if (block >= full_from && block < full_to) return;
        const uint16_t* scanned = nullptr;
        uint32_t nonfinite = 0, found = 0;
        for (int t = 0; t < rows; ++t) {
            if (!visible(t, block)) continue;
            const uint16_t* at = values_of(t, block);
            if (at != scanned) nonfinite = nonfinite_keys(at, values_d);
            scanned = at;
            const uint32_t hidden = ~key_range(first_key(t) - block * kBlockSize, position(t) + 1 - block * kBlockSize);
            if ((nonfinite & hidden) == 0) continue;
            copy_without(nonfinite & hidden, at, values_d, masked_values + static_cast<size_t>(t) * kBlockSize * d);
            found |= 1u << t;
        }
        masked = found;
    }

    // Calls kernel(first row-head, row-heads, block pointer) for each run of rows that see the block at the same place.
    template <class Place, class Kernel>
    void each_run(int block, int limit, Place place, Kernel kernel) {
        const bool alike = block >= full_from && block < full_to && block < shared;
        for (int t = 0; t < rows;) {
            if (!visible(t, block)) {  // its gathered blocks may end before
                ++t;
                continue;
            }
            const uint16_t* at = place(t, block);
            int end = alike ? rows : t + 1;
            while (end < rows && visible(end, block) && place(end, block) == at) ++end;
            const int total = (end - t) * group, parts = (total + limit - 1) / limit;
            for (int i = 0; i < parts; ++i) {
                const int first = static_cast<int>(part(total, i, parts)), last = static_cast<int>(part(total, i + 1, parts));
                kernel(t * group + first, last - first, at);
            }
            t = end;
        }
    }

    // Prefetches a block that all rows read from the cache; gathered blocks are in the scratch memory already.
    void fetch_block(const uint16_t* all, int block) const {
        if (block >= shared) return;
        const uint16_t* at = cached(all, block);
        for (int i = 0; i < kBlockSize * d; i += 32) fetch(at + i);
    }

    void key_tile(int first_block, int last_block, float scale) {
        for (int block = first_block; block < last_block; ++block) {
            if (op.cache.values) fetch_block(op.cache.values, block);  // used after the scores; keys in the next key tile
            fetch_block(op.cache.keys, block + kKeyTile / kBlockSize);
            float* out = s + block % 4 * kBlockSize;
            const auto place = [this](int t, int at) { return keys_of(t, at); };
            each_run(block, kQkRows, place, [&](int i, int n, const uint16_t* keys) {
                BlockKernelUpTo<kQkRows>::score[n](q + i * d, d, keys, d, out + i * kKeyTile, kKeyTile);
            });
        }
        for (int i = 0; i < rows * group; ++i) softmax(i, first_block, last_block, scale);
        for (int block = first_block; block < last_block; ++block) {
            const uint16_t* in = p + block % 4 * kBlockSize;
            const auto place = [this](int t, int at) { return values_of(t, at); };
            if (!op.cache.values) transpose_cached(block);
            mask_nonfinite(block);
            each_run(block, kPvRows, place, [&](int i, int n, const uint16_t* values) {
                float* out = segment_state.o + i * values_d;
                BlockKernelUpTo<kPvRows>::value[n](in + i * kKeyTile, kKeyTile, values, values_d, out, 0);
            });
            masked = 0;
        }
    }

    // Scores of one row-head to probabilities; its maximum, sum and output are brought to the new maximum.
    void softmax(int i, int first_block, int last_block, float scale) {
        const int t = i / group, low = first_key(t), high = position(t) + 1;
        const F hidden = splat(-__builtin_inff());
        float* scores = s + i * kKeyTile;
        F best = hidden;
        for (int block = first_block; block < last_block; ++block) {
            float* at = scores + block % 4 * kBlockSize;
            const F score = keep(mul(load(at), splat(scale)), hidden, low - block * kBlockSize, high - block * kBlockSize);
            store(at, score);
            best = max(best, score);
        }
        const float found = max_lane(best), before = segment_state.top[i], highest = found > before ? found : before;
        F total = load(segment_state.sum + 16 * i);
        if (highest != before) {
            const F factor = exp2(splat(before - highest));
            float* o = segment_state.o + static_cast<size_t>(i) * values_d;
            total = mul(total, factor);
            for (int j = 0; j < values_d; j += 16) store(o + j, mul(load(o + j), factor));
            segment_state.top[i] = highest;
        }
        for (int block = first_block; block < last_block; ++block) {
            const F probability = exp2(sub(load(scores + block % 4 * kBlockSize), splat(highest)));
            narrow(p + i * kKeyTile + block % 4 * kBlockSize, probability);
            total = add(total, probability);
        }
        store(segment_state.sum + 16 * i, total);
    }

    void finish() {
        for (int i = 0; i < rows * group; ++i) {
            const int t = i / group;
            uint16_t* out = op.out + (static_cast<size_t>(row + t) * op.heads + head * group + i % group) * values_d;
            const F total = splat(sum(load(full_state.sum + 16 * i)));
            const float* o = full_state.o + static_cast<size_t>(i) * values_d;
            for (int j = 0; j < values_d; j += 16) narrow(out + j, add(div(load(o + j), total), zero()));  // no minus zero
        }
    }
};

}  // namespace wager::WAGER_NS
