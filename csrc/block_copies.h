// Copies of the keys or values of one key tile, where a product cannot read them in the cache: widened from int8, latents
// transposed into values, or values without those that are not finite.
#pragma once

namespace wager::WAGER_NS {

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

}  // namespace wager::WAGER_NS
