// The cache's slow paths: copying a slot, reading one. Plain loops: none of it runs once per token.
#pragma once

#include <cstring>

#include "ops.h"
#include "pool.h"
#include "sizes.h"

namespace wager {

inline uint16_t* block_of(const CacheView& cache, uint16_t* all, int layer, int head, int slot) {
    return all + cache_offset(cache, layer, slot / kBlockSize, head);
}

// Copies slots source[i] -> target[i], i ascending, in all layers.
inline void move_slots(Pool& pool, const CacheView& cache, const int32_t* source, const int32_t* target, int n) {
    const int parts = cache.layers * cache.kv_heads;
    pool.run(1, [&](int, int thread, int threads) {
        const int first = static_cast<int>(part(parts, thread, threads));
        const int last = static_cast<int>(part(parts, thread + 1, threads));
        for (int item = first; item < last; ++item) {
            const int layer = item / cache.kv_heads, head = item % cache.kv_heads;
            for (int i = 0; i < n; ++i) {
                const int from = source[i] % kBlockSize, to = target[i] % kBlockSize;
                const auto at = [&](uint16_t* all, int slot) { return block_of(cache, all, layer, head, slot); };
                copy_key(cache, at(cache.keys, source[i]), from, at(cache.keys, target[i]), to);
                if (cache.values) copy_value(cache, at(cache.values, source[i]), from, at(cache.values, target[i]), to);
            }
        }
    });
}

inline float element(const CacheView& cache, const uint16_t* block, int at, size_t index) {
    if (cache.q8) return static_cast<float>(bytes_of(block)[index]) * scales_of(block)[at];
    const uint32_t bits = static_cast<uint32_t>(block[index]) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// One slot as float [layers][2][kv_heads][d], or [layers][1][1][d] of latents.
inline void read_slot(const CacheView& cache, int slot, float* out) {
    const int d = cache.head_dim, kinds = cache.values ? 2 : 1, at = slot % kBlockSize;
    for (int layer = 0; layer < cache.layers; ++layer) {
        for (int head = 0; head < cache.kv_heads; ++head) {
            float* key = out + (static_cast<size_t>(layer) * kinds * cache.kv_heads + head) * d;
            float* value = key + static_cast<size_t>(cache.kv_heads) * d;
            const uint16_t* keys = block_of(cache, cache.keys, layer, head, slot);
            for (int j = 0; j < d; ++j) key[j] = element(cache, keys, at, (j / 2 * kBlockSize + at) * 2 + j % 2);
            if (!cache.values) continue;
            const uint16_t* values = block_of(cache, cache.values, layer, head, slot);
            for (int j = 0; j < d; ++j) value[j] = element(cache, values, at, value_place(cache, at) + 2 * j);
        }
    }
}

inline void clear_block(const CacheView& cache, int block) {
    const size_t bytes = cache_block(cache) * 2;
    for (int item = 0; item < cache.layers * cache.kv_heads; ++item) {
        const size_t at = cache_offset(cache, item / cache.kv_heads, block, item % cache.kv_heads);
        std::memset(cache.keys + at, 0, bytes);
        if (cache.values) std::memset(cache.values + at, 0, bytes);
    }
}

}  // namespace wager
