// Offsets and sizes that the kernels and the code around them compute alike. Small functions over the structs of ops.h; they
// live in the namespace of the instruction set they are compiled for (see ops.h), elsewhere in namespace baseline.
#pragma once

#include "ops.h"

#ifndef WAGER_NS
#define WAGER_NS baseline
namespace wager {
namespace baseline {}
using namespace baseline;
}  // namespace wager
#endif

namespace wager::WAGER_NS {

// Where part `index` of `parts` even parts of [0, total) begins.
inline int64_t part(int64_t total, int index, int parts) { return total * index / parts; }

// What a thread does of so many rows, or other items, of an op.
struct Part {
    int first, last;
};
inline Part own_part(int64_t total, const Step& step, int thread) {
    return {static_cast<int>(part(total, thread, step.threads)), static_cast<int>(part(total, thread + 1, step.threads))};
}

// Keys (or values) of one block and kv head, in units of two bytes: bf16, or 16 float scales and then int8.
inline size_t cache_block(const CacheView& cache) {
    const size_t n = static_cast<size_t>(kBlockSize) * cache.head_dim;
    return cache.q8 ? 2 * kBlockSize + n / 2 : n;
}
// Where a block's keys (or values) of one layer and kv head begin. Blocks of a head lie side by side, because attention reads
// one head at a time, and sequences often have consecutive blocks: memory is faster the longer it is read in order.
inline size_t cache_offset(const CacheView& cache, int layer, int block, int head) {
    const size_t at = (static_cast<size_t>(layer) * cache.kv_heads + head) * cache.num_blocks + block;
    return at * cache_block(cache);
}
inline float* scales_of(uint16_t* block) { return reinterpret_cast<float*>(block); }
inline int8_t* bytes_of(uint16_t* block) { return reinterpret_cast<int8_t*>(block + 2 * kBlockSize); }
inline const float* scales_of(const uint16_t* block) { return reinterpret_cast<const float*>(block); }
inline const int8_t* bytes_of(const uint16_t* block) { return reinterpret_cast<const int8_t*>(block + 2 * kBlockSize); }

// Copies one key between two blocks (of the cache, or laid out like its).
inline void copy_key(const CacheView& cache, const uint16_t* from, int at, uint16_t* to, int to_at) {
    const int pairs = cache.head_dim / 2;
    if (!cache.q8) {
        for (int i = 0; i < pairs; ++i) __builtin_memcpy(to + (i * kBlockSize + to_at) * 2, from + (i * kBlockSize + at) * 2, 4);
        return;
    }
    scales_of(to)[to_at] = scales_of(from)[at];
    for (int i = 0; i < pairs; ++i)
        __builtin_memcpy(bytes_of(to) + (i * kBlockSize + to_at) * 2, bytes_of(from) + (i * kBlockSize + at) * 2, 2);
}
inline size_t value_place(const CacheView& cache, int at) { return static_cast<size_t>(at / 2) * 2 * cache.head_dim + at % 2; }
inline void copy_value(const CacheView& cache, const uint16_t* from, int at, uint16_t* to, int to_at) {
    const size_t source = value_place(cache, at), target = value_place(cache, to_at);
    if (!cache.q8) {
        for (int i = 0; i < cache.head_dim; ++i) to[target + 2 * i] = from[source + 2 * i];
        return;
    }
    scales_of(to)[to_at] = scales_of(from)[at];
    for (int i = 0; i < cache.head_dim; ++i) bytes_of(to)[target + 2 * i] = bytes_of(from)[source + 2 * i];
}

// Where the states of a slot begin in a layer.
inline float* tail_of(const StateView& states, int layer, int slot) {
    return states.tails + (static_cast<size_t>(layer) * states.slots + slot) * (states.taps - 1) * states.channels;
}
inline float* head_of(const StateView& states, int layer, int slot, int head) {
    const size_t at = (static_cast<size_t>(layer) * states.slots + slot) * states.num_heads + head;
    return states.heads + at * states.key_dim * states.value_dim;
}
inline float* saved_row(const StateView& states, int layer, int row) {
    return states.saved + (static_cast<size_t>(layer) * states.max_rows + row) * states.width;
}
// Lanes of a head's state that are a unit of work: its columns do not depend on each other.
inline int state_tile(const StateView& states) { return states.value_dim % 32 ? 16 : 32; }
inline const StateUse* state_uses(const Step& step) { return reinterpret_cast<const StateUse*>(step.in.state_uses); }

inline int row_count(const Step& step, RowSet set) { return set == RowSet::rows ? step.rows : step.logits_rows; }
inline const AttentionPlan& plan_of(const Step& step, const Attention& op) {
    return step.plans[2 * op.shape + (op.row_set == RowSet::logits)];
}

// Rows of a sequence that one attention tile holds, its (row, query head) pairs, and the floats of its softmax state.
inline int tile_rows(int group) { return group > kRowHeads ? 1 : kRowHeads / group; }
inline size_t tile_height(int group) { return group > kRowHeads ? group : kRowHeads; }
inline size_t state_floats(int group, int head_dim) {
    const size_t height = tile_height(group);
    return height * (static_cast<size_t>(head_dim) + 16) + (height + 15) / 16 * 16;
}

// Bytes of scratch memory that one thread needs for attention.
inline size_t attention_scratch(int group, int head_dim, int tail_blocks) {
    const size_t height = tile_height(group), d = head_dim;
    // Scores, queries and probabilities, and states.
    const size_t floats = height * (2 * kKeyTile + d) + 2 * state_floats(group, head_dim);
    // Per row: keys and values of its tail. And a key tile of transposed latents, and of values with some masked.
    const size_t blocks = tile_rows(group) * size_t{2} * tail_blocks + 2 * kKeyTile / kBlockSize;
    const size_t halves = blocks * kBlockSize * d;
    return (floats * 4 + halves * 2 + 4095) / 4096 * 4096;
}

}  // namespace wager::WAGER_NS
