// One tile of attention: scores, softmax and values of a few rows against one segment of their keys.
//
// A tile is a few consecutive rows of one sequence; with the query heads of one kv head they share each load of a block.
// Rows of a tree whose ancestors are scattered in the cache read, from a block on, copies in path order, so
// that every row computes over the same blocks as in plain decoding. Keys that a row does not attend to have probability 0
// and leave its sums unchanged, whatever their numbers; so a row's result does not depend on which rows share its tile.
#pragma once

#include <cmath>

#include "attention_block.h"

namespace wager::WAGER_NS {

// Copies of the keys or values of one key tile, where a product cannot read them in the cache: widened from int8, latents
// transposed into values, or values without those that are not finite.

struct BlockCopies {
    uint16_t* memory;                      // [kTileBlocks, size]
    int size;                              // elements of a block
    const uint16_t* sources[kTileBlocks];  // what was copied; null: nothing that can be used again
    float scales[kKeyTile];                // of int8

    BlockCopies(uint16_t* memory_, int size_) : memory(memory_), size(size_) { forget(); }
    // To be called whenever the sources may have changed.
    void forget() {
        for (const uint16_t*& source : sources) source = nullptr;
    }
    uint16_t* at(int place) const { return memory + static_cast<size_t>(place) * size; }

    const uint16_t* transposed(const uint16_t* latents, int d, int place) {
        if (sources[place] != latents) transpose_latents(latents, d, at(place));
        sources[place] = latents;
        return at(place);
    }
    const uint16_t* without(uint32_t keys, const uint16_t* values, int d, int place) {
        copy_without(keys, values, d, at(place));
        sources[place] = nullptr;
        return at(place);
    }

    // Replaces n blocks of int8, the first at `place` of the tile, by copies in bf16, which holds their numbers exactly, and
    // keeps their scales. As many blocks of `next` are prefetched meanwhile, since this takes long beside a product of few rows.
    void widen(const uint16_t** blocks, int n, int place, BlockFetch& next) {
        for (int i = 0; i < n; ++i) {
            const uint16_t* block = blocks[i];
            const bool prefetch = i < next.blocks;
            blocks[i] = at(place + i);
            if (sources[place + i] == block) continue;
            sources[place + i] = block;
            std::memcpy(scales + (place + i) * kBlockSize, scales_of(block), kBlockSize * sizeof(float));
            if (prefetch) fetch(next.at[i]);
            for (int j = 0; j < size; j += 64) {
                if (prefetch) fetch(next.at[i] + kBlockSize * sizeof(float) + j);
                widen_bytes(at(place + i) + j, bytes_of(block) + j);
                widen_bytes(at(place + i) + j + 32, bytes_of(block) + j + 32);
            }
        }
        const int done = n < next.blocks ? n : next.blocks;
        next.blocks -= done;
        for (int i = 0; i < next.blocks; ++i) next.at[i] = next.at[i + done];
    }
};

// Partial results of an online softmax over key tiles, and how those of earlier and later keys are combined.

// The keys [low, high) that a row sees, counted from the first key of a tile, and the tile's blocks [first, last) that any
// row sees.
struct TileKeys {
    int low, high, first, last;
};

// Partial result of an online softmax over some keys, for each row-head (a row and a query head): the weighted sum of
// values, lane-wise sums of the probabilities and the score that they are relative to, in units of log2.
struct SoftmaxState {
    static constexpr float kNone = -1e30f, kSlack = 8.0f;
    static constexpr float kLeastSum = 0x1p-100f;  // of values that products are added to: as kLeastBf16
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
        for (int j = 0; j < d; j += 16) store(at + j, without_below(mul(load(at + j), factor), kLeastSum));
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
    WAGER_INLINE void weigh(int i, const float* scores, Factor* p, float scale, Change change) {
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
    WAGER_INLINE void weigh(int i, const float* scores, Factor* p, float scale) {
        weigh(i, scores, p, scale, [](int, F probability) { return probability; });
    }
    // The same with the values' scales in the probabilities. A key that is not seen keeps 0, whatever its scale.
    WAGER_INLINE void weigh_scaled(int i, const float* scores, Factor* p, const float* scales, TileKeys keys, float scale) {
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

// Keys and values of rows of a tree whose ancestors are scattered in the cache, copied into path order.

inline const int32_t* block_table(const Step& step, int row) {
    return step.in.block_tables + static_cast<size_t>(step.in.seq_ids[row]) * step.in.max_blocks;
}
inline int first_key_of(const Attention& op, int position) {
    const int low = position - op.window + 1;
    return op.window && low > 0 ? low : 0;
}
inline const uint16_t* cached(const Attention& op, const uint16_t* all, int block, int head) {
    return all + cache_offset(op.cache, op.layer, block, head);
}

// The copies of one tile's rows, made once per tile and kv head: from the block where a row's path leaves position order
// (its tail), that block and then the row's ancestors in the step.
struct Scattered {
    const Attention* op;
    const Step* step;
    int row, rows, head;
    int first;    // blocks below this one are read from the cache by all rows
    bool copied;  // the copies are made
    uint16_t *tail_keys, *tail_values;  // [rows, tail_blocks, cache_block]
    size_t room;                        // of one row's tail

    Scattered(const Attention& op_, const Step& step_, uint16_t* memory, int most_rows) : op(&op_), step(&step_) {
        room = plan_of(*step, *op).tail_blocks * cache_block(op->cache);
        tail_keys = memory;
        tail_values = tail_keys + most_rows * room;
    }

    int tail(int t) const { return plan_of(*step, *op).tails[row + t]; }

    void begin(int row_, int rows_, int head_) {
        row = row_, rows = rows_, head = head_;
        copied = false;
        first = AttentionPlan::kDirect;
        for (int t = 0; t < rows; ++t) first = tail(t) < first ? tail(t) : first;
    }
    // Makes the copies if blocks below `end` need them.
    void gather(int end) {
        if (first >= end || copied) return;
        copied = true;
        for (int t = 0; t < rows; ++t)
            if (tail(t) != AttentionPlan::kDirect) copy(t);
    }

    bool holds(int t, int block) const { return block >= tail(t); }
    const uint16_t* keys(int t, int block) const { return tail_keys + t * room + offset(block - tail(t)); }
    const uint16_t* values(int t, int block) const { return tail_values + t * room + offset(block - tail(t)); }

    size_t offset(int block) const { return block * cache_block(op->cache); }

    void copy(int t) {
        const CacheView& cache = op->cache;
        const int from = tail(t), sequence = step->in.seq_ids[row], base = step->in.num_computed_tokens[sequence];
        const int blocks = step->in.positions[row + t] / kBlockSize - from + 1, block = block_table(*step, row)[from];
        const size_t block_bytes = offset(1) * 2;
        uint16_t *keys = tail_keys + t * room, *values = tail_values + t * room;
        std::memset(keys, 0, blocks * block_bytes);
        std::memcpy(keys, cached(*op, cache.keys, block, head), block_bytes);
        if (cache.values) {
            std::memset(values, 0, blocks * block_bytes);
            std::memcpy(values, cached(*op, cache.values, block, head), block_bytes);
        }
        const int start = step->in.query_start_loc[sequence];
        for (int a = row + t; a >= start; a = step->in.parents[a]) {
            const int at = step->in.positions[a];
            if (a - start == at - base) break;  // from here down the path lies in position order
            copy_slot(step->in.slot_mapping[a], keys, values, at - from * kBlockSize);
        }
        for (int i = 0; i < (cache.values ? 0 : blocks); ++i) transpose_latents(keys + offset(i), cache.value_dim, values + offset(i));
    }
    void copy_slot(int slot, uint16_t* keys, uint16_t* values, int to) const {
        const int from = slot / kBlockSize, block = to / kBlockSize;
        copy_key(op->cache, cached(*op, op->cache.keys, from, head), slot % kBlockSize, keys + offset(block), to % kBlockSize);
        if (!op->cache.values) return;
        copy_value(op->cache, cached(*op, op->cache.values, from, head), slot % kBlockSize, values + offset(block), to % kBlockSize);
    }
};

// Blocks of a sequence's cache that will be read next, to be prefetched.
struct NextBlocks {
    const int32_t* table;
    int head, first, last;
};

// Attention of one (tile, kv head): its buffers in this thread's scratch memory, and where each row's keys are.
struct AttentionTile {
    const Attention& op;
    const Step& step;
    const AttentionPlan& plan;
    int row, rows, out_row, head, d, values_d, group;
    int first_seen, end_seen;  // positions that some row sees
    int all_from, all_to;      // positions that every row sees
    float factor, scale;  // of products of queries and keys; of scores, in units of log2
    float* s;                                // [row-heads, 64]
    SoftmaxState segment_state, full_state;  // of the current segment; of all segments so far
    Factor *q, *p;                           // [row-heads, d], [row-heads, 64]
    BlockCopies key_copies, value_copies;
    Scattered scattered;
    const int32_t* table;
    int end_block;     // where this thread stops reading the current item
    NextBlocks after;  // what it reads then

    AttentionTile(const Attention& op_, const Step& step_, uint8_t* scratch)
        : op(op_),
          step(step_),
          plan(plan_of(step, op)),
          d(op.cache.head_dim),
          values_d(op.cache.value_dim),
          group(op.heads / op.cache.kv_heads),
          factor(op.scale > 0 ? op.scale : 1.0f / sqrtf(static_cast<float>(d))),
          scale(op.soft_cap > 0 ? kLog2e : kLog2e * factor),
          s(reinterpret_cast<float*>(scratch)),
          segment_state(s + tile_height(group) * kKeyTile, group, d),
          full_state(segment_state.o + state_floats(group, d), group, d),
          q(reinterpret_cast<Factor*>(full_state.o + state_floats(group, d))),
          p(q + tile_height(group) * d),
          key_copies(reinterpret_cast<uint16_t*>(p + tile_height(group) * kKeyTile), kBlockSize * d),
          value_copies(key_copies.at(kTileBlocks), kBlockSize * d),
          scattered(op, step, value_copies.at(kTileBlocks), tile_rows(group)),
          after{nullptr, 0, 0, 0} {}

    int first_key(int t) const { return first_key_of(op, step.in.positions[row + t]); }
    int end_key(int t) const { return plan.ends[row + t]; }

    // The rows of a tile, and the positions that they see.
    void place(int tile) {
        row = plan.tile_rows[tile];
        rows = plan.tile_sizes[tile];
        out_row = plan.tile_outs[tile];
        first_seen = all_to = INT32_MAX;
        end_seen = all_from = 0;
        for (int t = 0; t < rows; ++t) {
            const int low = first_key(t), high = end_key(t);
            first_seen = low < first_seen ? low : first_seen;
            end_seen = high > end_seen ? high : end_seen;
            all_from = low > all_from ? low : all_from;
            all_to = high < all_to ? high : all_to;
        }
    }
    void begin(int item) {
        place(item % plan.tiles);
        head = item / plan.tiles;
        table = block_table(step, row);
        for (int t = 0; t < rows; ++t) {
            const uint16_t* from = op.q + (static_cast<size_t>(row + t) * op.heads + head * group) * d;
            for (int i = 0; i < group * d; i += 16) copy_factors(q + t * group * d + i, from + i);
        }
        key_copies.forget();
        value_copies.forget();
        scattered.begin(row, rows, head);
    }
    // The item that this thread turns to afterwards, -1: none; its first blocks are prefetched.
    void follow(int item) {
        after.first = after.last = 0;
        if (item < 0) return;
        const int first = plan.tile_rows[item % plan.tiles], position = step.in.positions[first];
        after = {block_table(step, first), item / plan.tiles, first_key_of(op, position) / kBlockSize, position / kBlockSize + 1};
    }
    int first_segment() const { return first_seen / kSegment; }
    int end_segment() const { return (end_seen - 1) / kSegment + 1; }
    int block_after(int segments) const {
        return ((end_seen < segments * kSegment ? end_seen : segments * kSegment) - 1) / kBlockSize + 1;
    }

    // Attends to the keys of one segment, into `state`, which begins empty.
    void segment(int index, SoftmaxState& state) {
        const int first = (first_seen > index * kSegment ? first_seen : index * kSegment) / kBlockSize;
        const int last = block_after(index + 1);
        state.clear(rows * group, values_d);
        scattered.gather(last);
        for (int block = first; block < last;) {
            const int tile_end = (block / kTileBlocks + 1) * kTileBlocks, end = tile_end < last ? tile_end : last;
            if (end > scattered.first || !together(block, end, state)) apart(block, end, state);
            block = end;
        }
    }

    // The blocks of a key tile that all rows read from the cache. False, and nothing done, if a value that some row must not
    // see is not finite: 0 x NaN is NaN.
    bool together(int first, int last, SoftmaxState& state) {
        const uint16_t *keys[kTileBlocks], *values[kTileBlocks];
        const int blocks = last - first, total = rows * group;
        for (int i = 0; i < blocks; ++i) {
            keys[i] = cached(op, op.cache.keys, table[first + i], head);
            values[i] = cached_values(first + i);
            if (!op.cache.q8 && !all_finite(first + i, values[i])) return false;
        }
        const int place = first % kTileBlocks * kBlockSize, from = first / kTileBlocks * kKeyTile;
        const bool whole = from >= all_from && from + kKeyTile <= all_to;
        BlockFetch fetches = next_blocks(op.cache.keys, last);
        if (op.cache.q8) key_copies.widen(keys, blocks, first % kTileBlocks, fetches);
        each_part(total, kQkRows, [&](int i, int n, int part, int parts) {
            BlockFetch own = share(fetches, part, parts);
            score(n, blocks, q + i * d, d, keys, s + i * kKeyTile + place, own);
        });
        if (op.soft_cap > 0) cap_scores(0, total, first, last);
        fetches = next_blocks(op.cache.values, last);
        if (op.cache.q8) value_copies.widen(values, blocks, first % kTileBlocks, fetches);
        if (whole && !op.cache.q8) {
            for (int i = 0; i < total; ++i) state.look_at_all(i, values_d, s + i * kKeyTile, scale);
            for (int i = 0; i < total; ++i) state.weigh(i, s + i * kKeyTile, p + i * kKeyTile, scale);
        } else {
            weigh(0, total, first, last, state);
        }
        each_part(total, kPvRows, [&](int i, int n, int part, int parts) {
            const ValueKernel kernel = BlockKernelUpTo<1, kPvRows>::value[n];
            BlockFetch own = share(fetches, part, parts);
            kernel(p + i * kKeyTile + place, values, blocks, values_d, state.o + i * values_d, own);
        });
        return true;
    }
    // The same where rows read different copies of a block: row by row, each over the blocks that it sees.
    void apart(int first, int last, SoftmaxState& state) {
        for (int t = 0; t < rows; ++t) {
            const int low = first_key(t), high = end_key(t);
            const int from = low / kBlockSize > first ? low / kBlockSize : first;
            const int to = (high - 1) / kBlockSize + 1 < last ? (high - 1) / kBlockSize + 1 : last;
            if (from >= to) continue;
            const uint16_t *keys[kTileBlocks], *values[kTileBlocks];
            for (int block = from; block < to; ++block) {
                const bool copied = scattered.holds(t, block);
                keys[block - from] = copied ? scattered.keys(t, block) : cached(op, op.cache.keys, table[block], head);
                values[block - from] = copied ? scattered.values(t, block) : cached_values(block);
                if (!op.cache.q8) values[block - from] = finite(values[block - from], block, low, high);
            }
            const int place = from % kTileBlocks * kBlockSize;
            BlockFetch none{};
            if (op.cache.q8) {
                key_copies.widen(keys, to - from, from % kTileBlocks, none);
                value_copies.widen(values, to - from, from % kTileBlocks, none);
            }
            each_part(group, kQkRows, [&](int i, int n, int, int) {
                const int at = t * group + i;
                score(n, to - from, q + at * d, d, keys, s + at * kKeyTile + place, none);
            });
            if (op.soft_cap > 0) cap_scores(t * group, (t + 1) * group, from, to);
            weigh(t * group, (t + 1) * group, from, to, state);
            each_part(group, kPvRows, [&](int i, int n, int, int) {
                const int at = t * group + i;
                const ValueKernel kernel = BlockKernelUpTo<1, kPvRows>::value[n];
                kernel(p + at * kKeyTile + place, values, to - from, values_d, state.o + at * values_d, none);
            });
        }
    }

    // The soft cap of the products of row-heads [begin, end) with the keys of blocks [first, last): they become scores.
    [[gnu::noinline]] void cap_scores(int begin, int end, int first, int last) {
        for (int i = begin; i < end; ++i) {
            for (int b = first % kTileBlocks; b <= (last - 1) % kTileBlocks; ++b) {
                float* at = s + i * kKeyTile + b * kBlockSize;
                const F raw = load(at);
                const F product = op.cache.q8 ? mul(raw, load(key_copies.scales + b * kBlockSize)) : raw;
                store(at, soft_capped(product, factor, op.soft_cap));
            }
        }
    }

    // Probabilities of row-heads [begin, end) for the keys that each sees of blocks [first, last).
    void weigh(int begin, int end, int first, int last, SoftmaxState& state) {
        const int from = first / kTileBlocks * kKeyTile, first_in = first % kTileBlocks, last_in = (last - 1) % kTileBlocks + 1;
        const auto keys = [&](int i) { return TileKeys{first_key(i / group) - from, end_key(i / group) - from, first_in, last_in}; };
        const float* by = op.cache.q8 && op.soft_cap <= 0 ? key_copies.scales : nullptr;
        for (int i = begin; i < end; ++i) state.look(i, values_d, s + i * kKeyTile, by, keys(i), scale);
        for (int i = begin; i < end; ++i) {
            Factor* weights = p + i * kKeyTile;
            if (op.cache.q8) state.weigh_scaled(i, s + i * kKeyTile, weights, value_copies.scales, keys(i), scale);
            else state.weigh(i, s + i * kKeyTile, weights, scale);
        }
    }

    // A block of values in the cache; of latents, transposed.
    const uint16_t* cached_values(int block) {
        if (op.cache.values) return cached(op, op.cache.values, table[block], head);
        return value_copies.transposed(cached(op, op.cache.keys, table[block], head), values_d, block % kTileBlocks);
    }
    // Whether the values of a block are finite that some row does not see.
    bool all_finite(int block, const uint16_t* values) const {
        const int from = block * kBlockSize;
        if (from >= all_from && from + kBlockSize <= all_to) return true;
        return (nonfinite_keys(values, values_d) & ~key_range(all_from - from, all_to - from)) == 0;
    }
    // The values without those of keys outside [low, high) that are not finite.
    const uint16_t* finite(const uint16_t* values, int block, int low, int high) {
        const uint32_t hidden = ~key_range(low - block * kBlockSize, high - block * kBlockSize) & 0xFFFFu;
        const uint32_t removed = hidden ? hidden & nonfinite_keys(values, values_d) : 0;
        return removed ? value_copies.without(removed, values, values_d, block % kTileBlocks) : values;
    }

    // Calls body(first, how many, part, parts) for even parts of [0, total) of at most `most`.
    template <class Body>
    WAGER_INLINE static void each_part(int total, int most, Body body) {
        const int parts = (total + most - 1) / most;
        for (int i = 0; i < parts; ++i) {
            const int first = static_cast<int>(part(total, i, parts)), last = static_cast<int>(part(total, i + 1, parts));
            body(first, last - first, i, parts);
        }
    }

    // The blocks read after block `last` - 1: of this tile, else of the next one.
    BlockFetch next_blocks(const uint16_t* all, int last) const {
        BlockFetch next{{}, 0, static_cast<int>(cache_block(op.cache) / 32)};
        if (all == nullptr) return next;
        const NextBlocks from = last < end_block ? NextBlocks{table, head, last, end_block} : after;
        const int most = from.first + kTileBlocks < from.last ? from.first + kTileBlocks : from.last;
        for (int block = from.first; block < most; ++block)
            next.at[next.blocks++] = reinterpret_cast<const char*>(cached(op, all, from.table[block], from.head));
        return next;
    }
    // The part of it that one of `parts` products prefetches.
    static BlockFetch share(const BlockFetch& all, int index, int parts) {
        const int each = (all.blocks + parts - 1) / parts;
        BlockFetch own{{}, 0, all.lines};
        for (int i = index * each; i < all.blocks && i < (index + 1) * each; ++i) own.at[own.blocks++] = all.at[i];
        return own;
    }

    // The sum of probabilities with that of a sink, which has no value: all are relative to 2^top.
    static F with_sink(float keys, float sink, float top) { return add(splat(keys), exp2(splat(kLog2e * sink - top))); }

    void finish(const SoftmaxState& state) {
        for (int i = 0; i < rows * group; ++i) {
            const int t = i / group;
            uint16_t* out = op.out + (static_cast<size_t>(out_row + t) * op.heads + head * group + i % group) * values_d;
            const float keys = sum(load(state.sum + 16 * i));
            const F total = op.sinks ? with_sink(keys, op.sinks[head * group + i % group], state.top[i]) : splat(keys);
            const float* o = state.o + static_cast<size_t>(i) * values_d;
            for (int j = 0; j < values_d; j += 16) narrow(out + j, add(div(load(o + j), total), zero()));  // no minus zero
        }
    }
};

}  // namespace wager::WAGER_NS
