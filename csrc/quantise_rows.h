// Activations as int8 in blocks of 32 with one float scale each, row by row: scale max|x| / 127, values rounded to nearest.
#pragma once

#include "weight_layout.h"

namespace wager::WAGER_NS {

constexpr float kSmallestRange = 1e-30f;  // a block of smaller values is zero

// A value that is not finite makes the scale NaN, and so every output of its row.
inline void quantise_block(const uint16_t* x, int offset, int halves, ActivationBlock& to) {
    const F low = widen(x), high = widen(x + 16);
    const float range = max_lane(max(magnitude(low), magnitude(high)));
    const bool finite = !(not_finite(low) | not_finite(high));
    const F inverse = splat(finite && range >= kSmallestRange ? 127.0f / range : 0.0f);
    to.scale = !finite ? __builtin_nanf("") : range >= kSmallestRange ? range / 127.0f : 0.0f;
    int32_t first = 0, second = 0;
    if (finite) {
        first = store_rounded(to.values, mul(low, inverse));
        second = store_rounded(to.values + 16, mul(high, inverse));
    } else {
        std::memset(to.values, 0, sizeof to.values);
    }
    to.scaled_sum = to.scale * static_cast<float>(first + second);
    to.start[0] = -offset * (halves == 2 ? first : first + second);
    to.start[1] = -offset * second;
}

// Rows [first, last) of x [rows, k].
inline void quantise(const uint16_t* x, int k, WeightFormat format, int first, int last, ActivationBlock* to) {
    const BlockLayout layout = layout_of(format);
    const int offset = layout.bits == 8 ? kByteOffset : layout.offset;
    const size_t begin = static_cast<size_t>(first) * (k / kBlockInputs), end = static_cast<size_t>(last) * (k / kBlockInputs);
    for (size_t block = begin; block < end; ++block) quantise_block(x + block * kBlockInputs, offset, layout.halves, to[block]);
}

inline void quantise_rows(const QuantiseRows& op, const Step& step, int thread) {
    const int rows = row_count(step, op.row_set) * op.per_row;
    if (rows <= kOwnRows) return;
    const int first = static_cast<int>(part(rows, thread, step.threads));
    const int last = static_cast<int>(part(rows, thread + 1, step.threads));
    quantise(op.x, op.k, op.format, first, last, step.shared);
}

// Rows of activations as the kernels of a format read them.
struct Activations {
    const uint8_t* at;
    size_t stride;  // bytes

    const uint8_t* row(int index) const { return at + index * stride; }
    Activations from(int index) const { return {row(index), stride}; }
};

// x [rows, k] for products with weights of `format`: itself, the thread's own copy, or what `quantise_rows` made.
inline Activations activations(const uint16_t* x, int k, WeightFormat format, int rows, const Step& step, int thread) {
    if (format == WeightFormat::bf16) return {reinterpret_cast<const uint8_t*>(x), static_cast<size_t>(k) * 2};
    ActivationBlock* own = step.own + step.own_blocks * thread;
    if (rows <= kOwnRows) quantise(x, k, format, 0, rows, own);
    const ActivationBlock* all = rows <= kOwnRows ? own : step.shared;
    return {reinterpret_cast<const uint8_t*>(all), static_cast<size_t>(k / kBlockInputs) * sizeof(ActivationBlock)};
}
// Bytes of `inputs` inputs of such a row.
inline size_t input_bytes(WeightFormat format, int inputs) {
    return format == WeightFormat::bf16 ? static_cast<size_t>(inputs) * 2
                                        : static_cast<size_t>(inputs / kBlockInputs) * sizeof(ActivationBlock);
}

}  // namespace wager::WAGER_NS
