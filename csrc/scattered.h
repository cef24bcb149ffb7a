// Keys and values of rows of a tree whose ancestors are scattered in the cache, copied into path order.
#pragma once

namespace wager::WAGER_NS {

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
        room = step->plan.tail_blocks * cache_block(op->cache);
        tail_keys = memory;
        tail_values = tail_keys + most_rows * room;
    }

    int tail(int t) const { return step->plan.tails[row + t]; }

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

}  // namespace wager::WAGER_NS
