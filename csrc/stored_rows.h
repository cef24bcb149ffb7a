// One row of packed weights as float32: what the embedding reads of its table.
#pragma once

#include <cstring>

#include "weight_layout.h"

namespace wager::WAGER_NS {

inline float half_at(const uint8_t* p) {
    alignas(64) uint8_t lanes[32] = {};
    alignas(64) float values[16];
    std::memcpy(lanes, p, 2);
    store(values, load_halves(lanes));
    return values[0];
}

// Output `lane` of one block of a panel.
inline void read_block(const BlockLayout& layout, const uint8_t* group, const uint8_t* block, int lane, float* out) {
    const int column = lane / 16;
    const uint8_t* low = block + layout.low_at() + column * (layout.bits == 8 ? 512 : 256) + lane % 16 * 4;
    const uint8_t* high = block + layout.high_at() + lane % 16 * 4;
    float scale[2] = {}, minimum = 0.0f;
    for (int half = 0; half < layout.halves; ++half) {
        scale[half] = half_at((layout.grouped ? group : block) + 2 * lane);
        const uint8_t whole = block[half * kPanel + lane];
        if (layout.grouped) scale[half] *= layout.minimum ? static_cast<float>(whole) : static_cast<float>(static_cast<int8_t>(whole));
    }
    if (layout.minimum) minimum = half_at((layout.grouped ? group : block) + 2 * kPanel + 2 * lane);
    if (layout.minimum && layout.grouped) minimum *= static_cast<float>(block[kPanel + lane]);
    for (int i = 0; i < kBlockInputs; ++i) {
        const int quad = i / 4, byte = i % 4;
        int bits = layout.bits == 8 ? low[64 * quad + byte] : low[64 * (quad / 2) + byte] >> (quad % 2 * 4) & 15;
        if (layout.bits == 5) bits |= (high[64 * column + byte] >> quad & 1) << 4;
        if (layout.bits == 6) bits |= (high[64 * (2 * column + quad / 4) + byte] >> (quad % 4 * 2) & 3) << 4;
        out[i] = scale[layout.halves == 2 ? i / 16 : 0] * static_cast<float>(bits - layout.offset);
        if (layout.minimum) out[i] += minimum;
    }
}

inline void read_row(const Matrix& matrix, int row, float* out) {
    const uint8_t* panel = matrix.panels + static_cast<size_t>(row / kPanel) * panel_bytes(matrix);
    const int lane = row % kPanel;
    if (matrix.format == WeightFormat::bf16) {
        for (int i = 0; i < matrix.k; ++i) {
            uint16_t half;
            std::memcpy(&half, panel + (static_cast<size_t>(i / 2) * kPanel + lane) * 4 + i % 2 * 2, 2);
            const uint32_t bits = static_cast<uint32_t>(half) << 16;
            std::memcpy(out + i, &bits, 4);
        }
        return;
    }
    const BlockLayout layout = layout_of(matrix.format);
    for (int block = 0; block < matrix.k / kBlockInputs; ++block)
        read_block(layout, panel + layout.group_at(block), panel + layout.block_at(block), lane, out + block * kBlockInputs);
}

}  // namespace wager::WAGER_NS
