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
        first = static_cast<int32_t>(sum(store_rounded(to.values, mul(low, inverse))));
        second = static_cast<int32_t>(sum(store_rounded(to.values + 16, mul(high, inverse))));
    } else {
        std::memset(to.values, 0, sizeof to.values);
    }
    to.scaled_sum = to.scale * static_cast<float>(first + second);
    to.start[0] = -offset * (halves == 2 ? first : first + second);
    to.start[1] = halves == 2 ? -offset * second : 0;
}

// Sixteen blocks: the largest magnitude of each. False if the blocks must be taken one by one: some value is not finite, or
// the values of some block are too small.
inline bool block_ranges(const uint16_t* x, float* ranges) {
    F most[16], odd[4] = {zero(), zero(), zero(), zero()};
#pragma GCC unroll 4
    for (int i = 0; i < 16; ++i) {
        const F low = widen(x + kBlockInputs * i), high = widen(x + kBlockInputs * i + 16);
        most[i] = max(magnitude(low), magnitude(high));
        odd[i % 2] = fma(low, zero(), odd[i % 2]);  // NaN from the first value on that is not finite
        odd[2 + i % 2] = fma(high, zero(), odd[2 + i % 2]);
    }
    const F range = lane_maxima(most);
    store(ranges, range);
    return !not_finite(add(add(odd[0], odd[1]), add(odd[2], odd[3]))) && at_most(splat(kSmallestRange), range) == 0xFFFFu;
}
// Those blocks. Their sums are of whole numbers, exact in any order.
inline void quantise_blocks(const uint16_t* x, const float* ranges, int offset, int halves, ActivationBlock* to) {
    alignas(64) float inverse[16];
    F low[16], high[16];
    store(inverse, div(splat(127.0f), load(ranges)));
#pragma GCC unroll 4
    for (int i = 0; i < 16; ++i) {
        const F factor = splat(inverse[i]);
        low[i] = store_rounded(to[i].values, mul(widen(x + kBlockInputs * i), factor));
        high[i] = store_rounded(to[i].values + 16, mul(widen(x + kBlockInputs * i + 16), factor));
        if (halves == 1) low[i] = add(low[i], high[i]);
    }
    const F scale = div(load(ranges), splat(127.0f)), minus = splat(static_cast<float>(-offset)), first = lane_sums(low);
    const F second = halves == 2 ? lane_sums(high) : zero();
    store_fours(&to[0].scale, sizeof(ActivationBlock) / sizeof(float), scale, mul(scale, add(first, second)),
                whole(mul(minus, first)), whole(mul(minus, second)));
}

// Rows [first, last) of x [rows, k]. Ranges are found for some sixteens of blocks at once: what follows must wait for them.
inline void quantise(const uint16_t* x, int k, WeightFormat format, int first, int last, ActivationBlock* to) {
    constexpr int kGroups = 4;
    const BlockLayout layout = layout_of(format);
    // Halves with minima need the sums themselves.
    const int offset = layout.minimum && layout.halves == 2 ? -1 : layout.any_byte() ? kByteOffset : layout.offset;
    const size_t begin = static_cast<size_t>(first) * (k / kBlockInputs), end = static_cast<size_t>(last) * (k / kBlockInputs);
    size_t block = begin;
    while (block + 16 <= end) {
        alignas(64) float ranges[kGroups][16];
        bool usual[kGroups];
        const int groups = (end - block) / 16 < kGroups ? static_cast<int>((end - block) / 16) : kGroups;
        for (int g = 0; g < groups; ++g) usual[g] = block_ranges(x + (block + 16 * g) * kBlockInputs, ranges[g]);
        for (int g = 0; g < groups; ++g, block += 16) {
            if (usual[g]) quantise_blocks(x + block * kBlockInputs, ranges[g], offset, layout.halves, to + block);
            else for (size_t i = block; i < block + 16; ++i) quantise_block(x + i * kBlockInputs, offset, layout.halves, to[i]);
        }
    }
    for (; block < end; ++block) quantise_block(x + block * kBlockInputs, offset, layout.halves, to[block]);
}

inline void quantise_rows(const QuantiseRows& op, const Step& step, int thread) {
    const int rows = row_count(step, op.row_set) * op.per_row;
    if (rows <= kOwnRows) return;
    const auto [first, last] = own_part(rows, step, thread);
    quantise(op.x, op.k, op.format, first, last, step.shared);
}

// Rows of activations as the kernels of a format read them.
struct Activations {
    const uint8_t* at;
    size_t stride;          // bytes
    ActivationBlock* room;  // of the thread: for Table::regrouped_rows rows of blocks

    const uint8_t* row(int index) const { return at + index * stride; }
    Activations from(int index) const { return {row(index), stride, room}; }
};

// x [rows, k] for products with weights of `format`: itself, the thread's own copy, or what `quantise_rows` made.
inline Activations activations(const uint16_t* x, int k, WeightFormat format, int rows, const Step& step, int thread) {
    if (takes_bf16(format)) return {reinterpret_cast<const uint8_t*>(x), static_cast<size_t>(k) * 2, nullptr};
    const size_t blocks = k / kBlockInputs;
    ActivationBlock* own = step.own + step.own_blocks * thread;
    if (rows <= kOwnRows) quantise(x, k, format, 0, rows, own);
    const ActivationBlock* all = rows <= kOwnRows ? own : step.shared;
    return {reinterpret_cast<const uint8_t*>(all), blocks * sizeof(ActivationBlock), own + kOwnRows * blocks};
}
// Bytes of `inputs` inputs of such a row.
inline size_t input_bytes(WeightFormat format, int inputs) {
    return takes_bf16(format) ? static_cast<size_t>(inputs) * 2 : static_cast<size_t>(inputs / kBlockInputs) * sizeof(ActivationBlock);
}

}  // namespace wager::WAGER_NS
