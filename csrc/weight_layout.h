// Where the parts of packed weights lie. A panel holds 32 outputs; bf16 is [k / 2][32][2]. A quantised panel is a row of
// blocks of 32 inputs, or of groups of four (q4_z128) or eight of them behind a header with their float scales:
//
//   header  of groups: f16 [32] scales, then f16 [32] negated scales of the minima, where there are minima; q4_z128 u8 [32] zeros
//   scales  formats without groups: f16 [32], then f16 [32] minima, where there are any; q4_z u8 [32] zeros; mxfp4 see Own
//           groups: the block's own whole numbers, see Own
//   high    bits above those in `low`: q5 and three-bit codes [2 columns][64] with one bit of each of eight inputs;
//           q6_k [2][2 halves][64] with two of four
//   low     four bits of a code: [2 columns][4 pairs][64], of sixteen outputs four inputs in the low nibbles, the next four in
//           the high ones; two bits: [2 columns][2][64], sixteen inputs; q8_0 [2 columns][8][64], the weight plus 128
//
// e4m3 (OCP's floats of eight bits: a sign, four bits of an exponent, three of a fraction) is groups of inputs that share a scale, k of
// them or 128: f32 [32] scales, then the codes [inputs / 4][2 columns][4 fours of outputs][2 pairs of inputs][4 outputs][2], the
// nibbles of each exchanged.
//
// Inputs 4 i to 4 i + 3 are "quad" i; a column is sixteen outputs, four adjacent bytes each.
#pragma once

#include "sizes.h"

namespace wager::WAGER_NS {

// Raise it whenever packing gives other bytes than before, be it the layout or the values: packed weights are kept in files,
// and those of another version are never read (tests/kernels/test_packed_parts.py has a digest of each format).
constexpr int kWeightLayoutVersion = 4;

constexpr int kGroupBlocks = 8, kColumns = kPanel / 16;

// The whole numbers that a block has of its own: factors of its group's scale, or exponents.
enum class Own {
    none,
    whole,     // u8 [32], and u8 [32] factors of the minimum
    integers,  // i8 [halves][32]
    nibbles,   // u8 [halves][32]: the factor in the low four bits, that of the minimum in the high ones
    steps,     // u8 [32]: four bits of each half, the factor is what they say plus one half
    powers,    // u8 [32]: the exponents of powers of two, in place of scales
};

// What codes stand for, where it is not code - offset: bytes, the number plus the format's offset.
enum class Codebook { none, iq4, iq3_s, iq3_xxs, iq2, iq1, e2m1 };

// The tables of ggml-common.h. The high bit of a code of iq3, iq2 is the sign, the others are the index of a magnitude; in iq1
// it is the sign of a shift of an eighth and the others are -1, 0 and 1, all in eighths. e2m1: twice each of the sixteen floats
// of one sign, two exponent and one fraction bits.
alignas(16) constexpr uint8_t kCodebooks[][16] = {
    {},
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    {16, 18, 20, 22, 24, 26, 28, 30, 14, 12, 10, 8, 6, 4, 2, 0},
    {66, 74, 82, 90, 98, 106, 114, 124, 58, 50, 42, 34, 26, 18, 10, 0},
    {51, 68, 86, 43, 35, 18, 0, 43, 51, 68, 86, 43, 35, 18, 0, 43},
    {2, 10, 18, 9, 0, 8, 16, 9, 2, 10, 18, 9, 0, 8, 16, 9},
    {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0},
};

struct BlockLayout {
    int bits, offset;  // a weight is scale * (bits - offset) [+ minimum]
    Own own;
    bool minimum;
    int halves;  // scales per block
    int header, scales, high, low;  // bytes
    int blocks = 1;                 // of a group
    Codebook codebook = Codebook::none;
    bool zero = false;   // the minimum is minus scale times a whole number
    float unit = 1.0f;   // times the scale

    constexpr bool grouped() const { return blocks > 1; }
    // Whether weights fill all eight bits, so that they are taken with `dot_any_bytes`.
    constexpr bool any_byte() const { return bits == 8 || codebook == Codebook::iq4; }
    // The largest code, or number that one stands for; of `any_byte` the largest magnitude.
    constexpr int largest() const {
        if (any_byte()) return 128;
        if (codebook == Codebook::none) return (1 << bits) - 1;
        int most = 0;
        for (const uint8_t number : kCodebooks[static_cast<int>(codebook)]) most = number > most ? number : most;
        return most;
    }
    // Quads, a power of two of them and at most those that share a scale, whose products' sums fit 16 bits.
    constexpr int quads_in_short() const {
        int quads = kBlockInputs / 4 / halves;
        while (2 * quads * largest() * 127 > 32767) quads /= 2;
        return quads;
    }
    constexpr int high_at() const { return scales; }
    constexpr int low_at() const { return scales + high; }
    constexpr int block_bytes() const { return scales + high + low; }
    constexpr size_t group_bytes() const { return static_cast<size_t>(header) + static_cast<size_t>(blocks) * block_bytes(); }
    // Bytes from the beginning of a panel.
    constexpr size_t group_at(int block) const { return block / blocks * group_bytes(); }
    constexpr size_t block_at(int block) const { return group_at(block) + header + static_cast<size_t>(block % blocks) * block_bytes(); }
};

constexpr BlockLayout layout_of(WeightFormat format) {
    switch (format) {
        case WeightFormat::q8_0: return {8, 128, Own::none, false, 1, 0, 64, 0, 1024};
        case WeightFormat::q4_0: return {4, 8, Own::none, false, 1, 0, 64, 0, 512};
        case WeightFormat::q4_1: return {4, 0, Own::none, true, 1, 0, 128, 0, 512};
        case WeightFormat::q5_0: return {5, 16, Own::none, false, 1, 0, 64, 128, 512};
        case WeightFormat::q5_1: return {5, 0, Own::none, true, 1, 0, 128, 128, 512};
        case WeightFormat::q4_k: return {4, 0, Own::whole, true, 1, 128, 64, 0, 512, kGroupBlocks};
        case WeightFormat::q5_k: return {5, 0, Own::whole, true, 1, 128, 64, 128, 512, kGroupBlocks};
        case WeightFormat::q6_k: return {6, 32, Own::integers, false, 2, 64, 64, 256, 512, kGroupBlocks};
        case WeightFormat::q2_k: return {2, 0, Own::nibbles, true, 2, 128, 64, 0, 256, kGroupBlocks};
        case WeightFormat::q3_k: return {3, 4, Own::integers, false, 2, 64, 64, 128, 256, kGroupBlocks};
        case WeightFormat::iq4_nl: return {4, 128, Own::none, false, 1, 0, 64, 0, 512, 1, Codebook::iq4};
        case WeightFormat::iq4_xs: return {4, 128, Own::integers, false, 1, 64, 32, 0, 512, kGroupBlocks, Codebook::iq4};
        case WeightFormat::iq3_s: return {4, 15, Own::steps, false, 1, 64, 32, 0, 512, kGroupBlocks, Codebook::iq3_s, false, 2.0f};
        case WeightFormat::iq3_xxs: return {4, 62, Own::steps, false, 1, 64, 32, 0, 512, kGroupBlocks, Codebook::iq3_xxs, false, 0.5f};
        case WeightFormat::iq2_s: return {3, 43, Own::steps, false, 2, 64, 32, 128, 256, kGroupBlocks, Codebook::iq2, false, 0.25f};
        case WeightFormat::iq2_xxs: return {3, 43, Own::steps, false, 1, 64, 32, 128, 256, kGroupBlocks, Codebook::iq2, false, 0.25f};
        case WeightFormat::iq1: return {3, 9, Own::steps, false, 2, 64, 32, 128, 256, kGroupBlocks, Codebook::iq1, false, 0.25f};
        case WeightFormat::q4_z: return {4, 0, Own::none, true, 1, 0, 96, 0, 512, 1, Codebook::none, true};
        case WeightFormat::q4_z128: return {4, 0, Own::none, true, 1, 96, 0, 0, 512, 4, Codebook::none, true};
        case WeightFormat::mxfp4: return {4, 12, Own::powers, false, 1, 0, 32, 0, 512, 1, Codebook::e2m1};
        case WeightFormat::bf16:
        case WeightFormat::e4m3:
        case WeightFormat::e4m3_128: break;
    }
    return {};
}

constexpr int kScaledInputs = 128, kScaleBytes = 4 * kPanel;
// Inputs of a row of k that share a scale, and bytes of such a group in a panel.
constexpr int scaled_inputs(WeightFormat format, int k) { return format == WeightFormat::e4m3 ? k : kScaledInputs; }
constexpr size_t scaled_bytes(int inputs) { return kScaleBytes + static_cast<size_t>(inputs) * kPanel; }
// Where the code of an input of a group is, of that lane, from the codes' first byte on.
constexpr size_t e4m3_at(int input, int lane) {
    return static_cast<size_t>(input / 4 * kColumns + lane / 16) * 64 + lane % 16 / 4 * 16 + input % 4 / 2 * 8 + lane % 4 * 2 + input % 2;
}

// Inputs of a row come in multiples of this.
inline int input_multiple(WeightFormat format) {
    if (format == WeightFormat::bf16) return 2;
    return is_e4m3(format) ? scaled_inputs(format, kBlockInputs) : kBlockInputs * layout_of(format).blocks;
}

inline size_t panel_bytes(WeightFormat format, int k) {
    if (format == WeightFormat::bf16) return static_cast<size_t>(k) * kPanel * 2;
    if (is_e4m3(format)) return k / scaled_inputs(format, k) * scaled_bytes(scaled_inputs(format, k));
    const BlockLayout layout = layout_of(format);
    return k / (kBlockInputs * layout.blocks) * layout.group_bytes();
}
inline size_t panel_bytes(const Matrix& matrix) { return panel_bytes(matrix.format, matrix.k); }

}  // namespace wager::WAGER_NS
