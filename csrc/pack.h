// Weights into panels (weight_layout.h) from rows as they are stored: bf16, GGUF's blocks, or codes of e4m3 behind their scales. Runs once per matrix.
#pragma once

#include <cstdint>
#include <cstring>

#include "ops.h"
#include "pool.h"
#include "weight_layout.h"

namespace wager {

// The blocks of a quantised row as GGUF stores them, read 32 inputs at a time. Types with a large codebook come as
// kernels/blocks.py writes them: f16 scale, eight bytes of steps, then codes, iq3 as nibbles, iq2 and iq1 as 256 high bits and
// 256 low pairs of bits; q4_z as f16 scale, zero and nibbles.

// 32 inputs of one output: the weights as unsigned integers, and its scales as GGUF has them. f16 are carried as uint16_t.
struct StoredBlock {
    uint8_t values[kBlockInputs];
    uint16_t scale, minimum;            // of 32 inputs, or of the group that the block belongs to
    uint8_t own_scale[2], own_minimum;  // this block's whole numbers, see Own
    uint8_t zero;
};

constexpr int kWide = 256;  // inputs of a block of the K formats

// Inputs and bytes of a stored block.
struct StoredSize {
    int inputs, bytes;
};
inline StoredSize stored_size(WeightFormat format) {
    switch (format) {
        case WeightFormat::bf16:
        case WeightFormat::e4m3:
        case WeightFormat::e4m3_128: break;
        case WeightFormat::q8_0: return {32, 34};
        case WeightFormat::q4_0: return {32, 18};
        case WeightFormat::q4_1: return {32, 20};
        case WeightFormat::q5_0: return {32, 22};
        case WeightFormat::q5_1: return {32, 24};
        case WeightFormat::q4_k: return {kWide, 144};
        case WeightFormat::q5_k: return {kWide, 176};
        case WeightFormat::q6_k: return {kWide, 210};
        case WeightFormat::q2_k: return {kWide, 84};
        case WeightFormat::q3_k: return {kWide, 110};
        case WeightFormat::iq4_nl: return {32, 18};
        case WeightFormat::iq4_xs: return {kWide, 136};
        case WeightFormat::iq3_s:
        case WeightFormat::iq3_xxs: return {kWide, 138};
        case WeightFormat::iq2_s:
        case WeightFormat::iq2_xxs:
        case WeightFormat::iq1: return {kWide, 106};
        case WeightFormat::q4_z: return {32, 19};
        case WeightFormat::q4_z128: return {128, 67};
        case WeightFormat::mxfp4: return {32, 17};
    }
    return {};
}

// Sixteen bytes, whose low nibbles are the first sixteen values and whose high ones the others.
inline void read_nibbles(const uint8_t* p, uint8_t* values) {
    for (int i = 0; i < 16; ++i) {
        values[i] = p[i] & 15;
        values[i + 16] = p[i] >> 4;
    }
}
inline void add_fifth_bits(const uint8_t* p, uint8_t* values) {
    uint32_t bits;
    std::memcpy(&bits, p, 4);
    for (int i = 0; i < 32; ++i) values[i] = static_cast<uint8_t>(values[i] | (bits >> i & 1u) << 4);
}

// The six-bit scale and minimum of block `index` of a q4_k or q5_k.
inline void read_six_bits(const uint8_t* p, int index, StoredBlock& to) {
    if (index < 4) {
        to.own_scale[0] = p[index] & 63;
        to.own_minimum = p[index + 4] & 63;
    } else {
        to.own_scale[0] = static_cast<uint8_t>((p[index + 4] & 15) | p[index - 4] >> 6 << 4);
        to.own_minimum = static_cast<uint8_t>(p[index + 4] >> 4 | p[index] >> 6 << 4);
    }
}
inline void read_k_block(const uint8_t* p, int index, bool fifth, StoredBlock& to) {
    std::memcpy(&to.scale, p, 2);
    std::memcpy(&to.minimum, p + 2, 2);
    to.minimum ^= 0x8000;  // GGUF subtracts it
    read_six_bits(p + 4, index, to);
    const uint8_t* high = p + 16;
    const uint8_t* low = p + (fifth ? 48 : 16) + index / 2 * 32;
    for (int i = 0; i < 32; ++i) {
        to.values[i] = index % 2 ? low[i] >> 4 : low[i] & 15;
        if (fifth) to.values[i] = static_cast<uint8_t>(to.values[i] | (high[i] >> index & 1) << 4);
    }
}
inline void read_q6_block(const uint8_t* p, int index, StoredBlock& to) {
    const int part = index / 4, quarter = index % 4;  // 128 inputs, and 32 of them
    const uint8_t *low = p + 64 * part + 32 * (quarter % 2), *high = p + 128 + 32 * part, *scales = p + 192 + 8 * part + 2 * quarter;
    for (int i = 0; i < 32; ++i) {
        const int nibble = quarter < 2 ? low[i] & 15 : low[i] >> 4;
        to.values[i] = static_cast<uint8_t>(nibble | (high[i] >> 2 * quarter & 3) << 4);
    }
    std::memcpy(to.own_scale, scales, 2);
    std::memcpy(&to.scale, p + 208, 2);
}

inline void read_q2_block(const uint8_t* p, int index, StoredBlock& to) {
    const uint8_t* low = p + 16 + index / 4 * 32;
    for (int i = 0; i < 32; ++i) to.values[i] = low[i] >> index % 4 * 2 & 3;
    std::memcpy(to.own_scale, p + 2 * index, 2);
    std::memcpy(&to.scale, p + 80, 2);
    std::memcpy(&to.minimum, p + 82, 2);
    to.minimum ^= 0x8000;  // GGUF subtracts it
}
inline void read_q3_block(const uint8_t* p, int index, StoredBlock& to) {
    const uint8_t *low = p + 32 + index / 4 * 32, *scales = p + 96;
    for (int i = 0; i < 32; ++i) to.values[i] = static_cast<uint8_t>((low[i] >> index % 4 * 2 & 3) | (p[i] >> index & 1) << 2);
    for (int half = 0; half < 2; ++half) {
        const int at = 2 * index + half, six = (scales[at % 8] >> at / 8 * 4 & 15) | (scales[8 + at % 4] >> at / 4 * 2 & 3) << 4;
        to.own_scale[half] = static_cast<uint8_t>(six - 32);
    }
    std::memcpy(&to.scale, p + 108, 2);
}
inline void read_iq4_block(const uint8_t* p, int index, StoredBlock& to) {
    const int six = (p[4 + index / 2] >> index % 2 * 4 & 15) | ((p[2] | p[3] << 8) >> 2 * index & 3) << 4;
    to.own_scale[0] = static_cast<uint8_t>(six - 32);
    std::memcpy(&to.scale, p, 2);
    read_nibbles(p + 8 + 16 * index, to.values);
}
inline void read_codebook_block(const uint8_t* p, int index, bool nibbles, StoredBlock& to) {
    std::memcpy(&to.scale, p, 2);
    to.own_scale[0] = p[2 + index];
    if (nibbles) return read_nibbles(p + 10 + 16 * index, to.values);
    const uint8_t *high = p + 10 + 4 * index, *low = p + 42 + 8 * index;
    for (int i = 0; i < 32; ++i) to.values[i] = static_cast<uint8_t>((low[i / 4] >> i % 4 * 2 & 3) | (high[i / 8] >> i % 8 & 1) << 2);
}

// Inputs 32 * index to 32 * index + 31 of a row.
inline StoredBlock read_stored(WeightFormat format, const uint8_t* row, int index) {
    StoredBlock to{};
    const StoredSize size = stored_size(format);
    const int per_block = size.inputs / kBlockInputs;
    const uint8_t* p = row + static_cast<size_t>(index / per_block) * size.bytes;
    if (format == WeightFormat::q4_k || format == WeightFormat::q5_k) {
        read_k_block(p, index % per_block, format == WeightFormat::q5_k, to);
        return to;
    }
    const BlockLayout layout = layout_of(format);
    const int within = index % per_block;
    if (layout.own == Own::steps) return read_codebook_block(p, within, layout.bits == 4, to), to;
    if (format == WeightFormat::q6_k) return read_q6_block(p, within, to), to;
    if (format == WeightFormat::q2_k) return read_q2_block(p, within, to), to;
    if (format == WeightFormat::q3_k) return read_q3_block(p, within, to), to;
    if (format == WeightFormat::iq4_xs) return read_iq4_block(p, within, to), to;
    if (layout.zero) {
        std::memcpy(&to.scale, p, 2);
        to.zero = p[2];
        read_nibbles(p + 3 + 16 * within, to.values);
        return to;
    }
    if (format == WeightFormat::mxfp4) {
        to.own_scale[0] = p[0];
        read_nibbles(p + 1, to.values);
        return to;
    }
    const bool minimum = format == WeightFormat::q4_1 || format == WeightFormat::q5_1;
    std::memcpy(&to.scale, p, 2);
    if (minimum) std::memcpy(&to.minimum, p + 2, 2);
    p += minimum ? 4 : 2;
    if (format == WeightFormat::q8_0) {
        for (int i = 0; i < 32; ++i) to.values[i] = static_cast<uint8_t>(p[i] ^ 0x80);
        return to;
    }
    const bool fifth = format == WeightFormat::q5_0 || format == WeightFormat::q5_1;
    read_nibbles(p + (fifth ? 4 : 0), to.values);
    if (fifth) add_fifth_bits(p, to.values);
    return to;
}

// Copies one block of output `lane` into its panel; memory comes zeroed.
inline void place_block(const BlockLayout& layout, const StoredBlock& from, int lane, uint8_t* group, uint8_t* block) {
    const int column = lane / 16, at = lane % 16 * 4;
    uint8_t* floats = layout.grouped() ? group : block;
    if (layout.own == Own::powers) block[lane] = from.own_scale[0];
    else std::memcpy(floats + 2 * lane, &from.scale, 2);
    if (layout.zero) floats[2 * kPanel + lane] = from.zero;
    else if (layout.minimum) std::memcpy(floats + 2 * kPanel + 2 * lane, &from.minimum, 2);
    const int own = layout.own == Own::none || layout.own == Own::powers ? 0 : layout.own == Own::steps ? 1 : layout.halves;
    for (int half = 0; half < own; ++half) block[half * kPanel + lane] = from.own_scale[half];
    if (layout.own == Own::whole) block[kPanel + lane] = from.own_minimum;
    uint8_t *low = block + layout.low_at(), *high = block + layout.high_at();
    for (int i = 0; i < kBlockInputs; ++i) {
        const int quad = i / 4, byte = at + i % 4, value = from.values[i];
        if (layout.bits == 8) low[(8 * column + quad) * 64 + byte] = static_cast<uint8_t>(value);
        else if (layout.bits <= 3) low[(2 * column + quad / 4) * 64 + byte] |= static_cast<uint8_t>((value & 3) << quad % 4 * 2);
        else low[(4 * column + quad / 2) * 64 + byte] |= static_cast<uint8_t>((value & 15) << quad % 2 * 4);
        if (layout.bits == 3) high[64 * column + byte] |= static_cast<uint8_t>(value >> 2 << quad);
        if (layout.bits == 5) high[64 * column + byte] |= static_cast<uint8_t>(value >> 4 << quad);
        if (layout.bits == 6) high[64 * (2 * column + quad / 4) + byte] |= static_cast<uint8_t>(value >> 4 << quad % 4 * 2);
    }
}

inline void pack_bf16_row(const uint8_t* row, int k, int lane, uint8_t* panel) {
    constexpr uint32_t kLeast = (127 - 56) << 7;  // kLeastBf16
    for (int i = 0; i < k; i += 2) {
        uint16_t pair[2];
        std::memcpy(pair, row + 2 * i, 4);
        for (uint16_t& weight : pair)
            if ((weight & 0x7FFFu) < kLeast) weight = 0;
        std::memcpy(panel + (static_cast<size_t>(i / 2) * kPanel + lane) * 4, pair, 4);
    }
}
inline void pack_quantised_row(WeightFormat format, const uint8_t* row, int k, int lane, uint8_t* panel) {
    const BlockLayout layout = layout_of(format);
    for (int i = 0; i < k / kBlockInputs; ++i)
        place_block(layout, read_stored(format, row, i), lane, panel + layout.group_at(i), panel + layout.block_at(i));
}

// A group with a code that is no number gets a scale that is none.
inline void pack_e4m3_row(WeightFormat format, const uint8_t* row, int k, int lane, uint8_t* panel) {
    const int inputs = scaled_inputs(format, k);
    for (int first = 0; first < k; first += inputs, row += inputs, panel += scaled_bytes(inputs)) {
        float scale;
        std::memcpy(&scale, row, sizeof scale);
        row += sizeof scale;
        for (int i = 0; i < inputs; ++i) {
            if ((row[i] & 0x7F) == 0x7F) scale = __builtin_nanf("");
            panel[kScaleBytes + e4m3_at(i, lane)] = static_cast<uint8_t>(row[i] << 4 | row[i] >> 4);
        }
        std::memcpy(panel + sizeof scale * lane, &scale, sizeof scale);
    }
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
                else if (is_e4m3(format)) pack_e4m3_row(format, row, k, lane, to + panel * bytes);
                else pack_quantised_row(format, row, k, lane, to + panel * bytes);
            }
        }
    });
}

}  // namespace wager
