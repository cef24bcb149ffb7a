// Weights into panels (weight_layout.h) from rows as they are stored: bf16, or GGUF's blocks. Runs once per matrix.
#pragma once

#include <cstring>

#include "gguf_blocks.h"
#include "ops.h"
#include "pool.h"
#include "weight_layout.h"

namespace wager {

// Copies one block of output `lane` into its panel; memory comes zeroed.
inline void place_block(const BlockLayout& layout, const StoredBlock& from, int lane, uint8_t* group, uint8_t* block) {
    const int column = lane / 16, at = lane % 16 * 4;
    uint8_t* floats = layout.grouped ? group : block;
    std::memcpy(floats + 2 * lane, &from.scale, 2);
    if (layout.minimum) std::memcpy(floats + 2 * kPanel + 2 * lane, &from.minimum, 2);
    for (int half = 0; layout.grouped && half < layout.halves; ++half) block[half * kPanel + lane] = from.own_scale[half];
    if (layout.grouped && layout.minimum) block[kPanel + lane] = from.own_minimum;
    uint8_t *low = block + layout.low_at(), *high = block + layout.high_at();
    for (int i = 0; i < kBlockInputs; ++i) {
        const int quad = i / 4, byte = at + i % 4, value = from.values[i];
        if (layout.bits == 8) low[(8 * column + quad) * 64 + byte] = static_cast<uint8_t>(value);
        else low[(4 * column + quad / 2) * 64 + byte] |= static_cast<uint8_t>((value & 15) << quad % 2 * 4);
        if (layout.bits == 5) high[64 * column + byte] |= static_cast<uint8_t>(value >> 4 << quad);
        if (layout.bits == 6) high[64 * (2 * column + quad / 4) + byte] |= static_cast<uint8_t>(value >> 4 << quad % 4 * 2);
    }
}

inline void pack_bf16_row(const uint8_t* row, int k, int lane, uint8_t* panel) {
    for (int i = 0; i < k; i += 2) std::memcpy(panel + (static_cast<size_t>(i / 2) * kPanel + lane) * 4, row + 2 * i, 4);
}
inline void pack_quantised_row(WeightFormat format, const uint8_t* row, int k, int lane, uint8_t* panel) {
    const BlockLayout layout = layout_of(format);
    for (int i = 0; i < k / kBlockInputs; ++i)
        place_block(layout, read_stored(format, row, i), lane, panel + layout.group_at(i), panel + layout.block_at(i));
}

// rows [panels * 32]: where each output's row is stored; null: an output that is zero.
inline void pack_rows(Pool& pool, WeightFormat format, const uint8_t* const* rows, int panels, int k, uint8_t* to) {
    const size_t bytes = panel_bytes(format, k);
    pool.run(1, [&](int, int thread, int threads) {
        const int first = static_cast<int>(part(panels, thread, threads));
        const int last = static_cast<int>(part(panels, thread + 1, threads));
        for (int panel = first; panel < last; ++panel) {
            for (int lane = 0; lane < kPanel; ++lane) {
                const uint8_t* row = rows[static_cast<size_t>(panel) * kPanel + lane];
                if (row == nullptr) continue;  // memory comes zeroed
                if (format == WeightFormat::bf16) pack_bf16_row(row, k, lane, to + panel * bytes);
                else pack_quantised_row(format, row, k, lane, to + panel * bytes);
            }
        }
    });
}

}  // namespace wager
