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

// The first element of a block's keys (or values) of one layer and kv head.
inline size_t cache_offset(const CacheView& cache, int layer, int block, int head) {
    const size_t at = (static_cast<size_t>(layer) * cache.num_blocks + block) * cache.kv_heads + head;
    return at * kBlockSize * cache.head_dim;
}

inline int row_count(const Step& step, RowSet set) { return set == RowSet::rows ? step.rows : step.logits_rows; }

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
    const size_t floats = height * kKeyTile + 2 * state_floats(group, head_dim);
    // Per row: keys and values of its tail, and values of one block with some masked; and one block of transposed latents.
    const size_t blocks = tile_rows(group) * (size_t{2} * tail_blocks + 1) + 1;
    const size_t halves = height * (d + kKeyTile) + blocks * kBlockSize * d;
    return (floats * 4 + halves * 2 + 4095) / 4096 * 4096;
}

}  // namespace wager::WAGER_NS
