// The cache's slow paths: copying a slot, reading one. Plain loops: none of it runs once per token.
#pragma once

#include <cstring>

#include "ops.h"
#include "pool.h"
#include "sizes.h"

namespace wager {

struct Slot {
    uint16_t *key, *value;  // key pairs 2 * kBlockSize apart, values 2 apart; no value in a latent cache
};

inline Slot slot_of(const CacheView& cache, int layer, int head, int slot) {
    const int d = cache.head_dim, at = slot % kBlockSize;
    const size_t block = cache_offset(cache, layer, slot / kBlockSize, head);
    return {cache.keys + block + at * 2, cache.values ? cache.values + block + at / 2 * (2 * d) + at % 2 : nullptr};
}

// Copies slots source[i] -> target[i], i ascending, in all layers.
inline void move_slots(Pool& pool, const CacheView& cache, const int32_t* source, const int32_t* target, int n) {
    const int parts = cache.layers * cache.kv_heads, d = cache.head_dim;
    pool.run([&](int thread) {
        const int first = static_cast<int>(part(parts, thread, pool.threads()));
        const int last = static_cast<int>(part(parts, thread + 1, pool.threads()));
        for (int item = first; item < last; ++item) {
            for (int i = 0; i < n; ++i) {
                const Slot from = slot_of(cache, item / cache.kv_heads, item % cache.kv_heads, source[i]);
                const Slot to = slot_of(cache, item / cache.kv_heads, item % cache.kv_heads, target[i]);
                for (int j = 0; j < d / 2; ++j) std::memcpy(to.key + j * 2 * kBlockSize, from.key + j * 2 * kBlockSize, 4);
                for (int j = 0; j < (cache.values ? d : 0); ++j) to.value[2 * j] = from.value[2 * j];
            }
        }
    });
}

// One slot as [layers][2][kv_heads][d], or [layers][1][1][d] of latents.
inline void read_slot(const CacheView& cache, int slot, uint16_t* out) {
    const int d = cache.head_dim, kinds = cache.values ? 2 : 1;
    for (int layer = 0; layer < cache.layers; ++layer) {
        for (int head = 0; head < cache.kv_heads; ++head) {
            const Slot from = slot_of(cache, layer, head, slot);
            uint16_t* key = out + (static_cast<size_t>(layer) * kinds * cache.kv_heads + head) * d;
            uint16_t* value = key + static_cast<size_t>(cache.kv_heads) * d;
            for (int j = 0; j < d / 2; ++j) std::memcpy(key + 2 * j, from.key + j * 2 * kBlockSize, 4);
            for (int j = 0; j < (cache.values ? d : 0); ++j) value[j] = from.value[2 * j];
        }
    }
}

inline void clear_block(const CacheView& cache, int block) {
    const size_t bytes = static_cast<size_t>(cache.kv_heads) * kBlockSize * cache.head_dim * 2;
    for (int layer = 0; layer < cache.layers; ++layer) {
        std::memset(cache.keys + cache_offset(cache, layer, block, 0), 0, bytes);
        if (cache.values) std::memset(cache.values + cache_offset(cache, layer, block, 0), 0, bytes);
    }
}

}  // namespace wager
