// Where the parts of packed weights lie. A panel holds 32 outputs; bf16 is [k / 2][32][2]. A quantised panel is a row of
// blocks of 32 inputs, those of the K formats in groups of eight behind a header with their float scales:
//
//   header  K formats: f16 [32] scales of 256 inputs; then f16 [32] negated scales of the minima, where there are minima
//   scales  f16 [32], then f16 [32] minima where there are any; K formats: u8 [32] and u8 [32]; q6_k: i8 [2 halves][32];
//           mxfp4: u8 [32], the exponents of powers of two
//   high    bits above the fourth: q5 [2 columns][64] with one bit of each of eight inputs; q6_k [2][2 halves][64] with two of four
//   low     [2 columns][4 pairs][64]: of sixteen outputs four inputs in the low nibbles, the next four in the high ones;
//           q8_0 [2 columns][8][64], the weight plus 128; mxfp4: places in a table of weights
//
// Inputs 4 i to 4 i + 3 are "quad" i; a column is sixteen outputs, four adjacent bytes each.
#pragma once

#include "sizes.h"

namespace wager::WAGER_NS {

// Raise it whenever packing gives other bytes than before, be it the layout or the values: packed weights are kept in files,
// and those of another version are never read (tests/kernels/test_packed_parts.py has a digest of each format).
constexpr int kWeightLayoutVersion = 1;

constexpr int kGroupBlocks = 8, kColumns = kPanel / 16;

struct BlockLayout {
    int bits, offset;  // a weight is scale * (bits - offset) [+ minimum]
    bool grouped, minimum;
    int halves;  // scales per block
    int header, scales, high, low;  // bytes
    bool tabled = false;  // bits are kFourBitFloats[...], scales 2^(exponent - 128)

    constexpr int high_at() const { return scales; }
    constexpr int low_at() const { return scales + high; }
    constexpr int block_bytes() const { return scales + high + low; }
    constexpr int group_blocks() const { return grouped ? kGroupBlocks : 1; }
    constexpr size_t group_bytes() const { return static_cast<size_t>(header) + static_cast<size_t>(group_blocks()) * block_bytes(); }
    // Bytes from the beginning of a panel.
    constexpr size_t group_at(int block) const { return block / group_blocks() * group_bytes(); }
    constexpr size_t block_at(int block) const {
        return group_at(block) + header + static_cast<size_t>(block % group_blocks()) * block_bytes();
    }
};

// Twice each of the sixteen floats of one sign, two exponent and one fraction bits (e2m1), plus 12: whole numbers.
constexpr uint8_t kFourBitFloats[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

constexpr BlockLayout layout_of(WeightFormat format) {
    switch (format) {
        case WeightFormat::q8_0: return {8, 128, false, false, 1, 0, 64, 0, 1024};
        case WeightFormat::q4_0: return {4, 8, false, false, 1, 0, 64, 0, 512};
        case WeightFormat::q4_1: return {4, 0, false, true, 1, 0, 128, 0, 512};
        case WeightFormat::q5_0: return {5, 16, false, false, 1, 0, 64, 128, 512};
        case WeightFormat::q5_1: return {5, 0, false, true, 1, 0, 128, 128, 512};
        case WeightFormat::q4_k: return {4, 0, true, true, 1, 128, 64, 0, 512};
        case WeightFormat::q5_k: return {5, 0, true, true, 1, 128, 64, 128, 512};
        case WeightFormat::q6_k: return {6, 32, true, false, 2, 64, 64, 256, 512};
        case WeightFormat::mxfp4: return {4, 12, false, false, 1, 0, 32, 0, 512, true};
        case WeightFormat::bf16: break;
    }
    return {};
}

// Inputs of a row come in multiples of this.
inline int input_multiple(WeightFormat format) {
    return format == WeightFormat::bf16 ? 2 : kBlockInputs * layout_of(format).group_blocks();
}

inline size_t panel_bytes(WeightFormat format, int k) {
    if (format == WeightFormat::bf16) return static_cast<size_t>(k) * kPanel * 2;
    const BlockLayout layout = layout_of(format);
    return k / (kBlockInputs * layout.group_blocks()) * layout.group_bytes();
}
inline size_t panel_bytes(const Matrix& matrix) { return panel_bytes(matrix.format, matrix.k); }

}  // namespace wager::WAGER_NS
