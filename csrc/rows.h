// Ops that work on one row at a time: embedding, RMS norm, rotation with the write of keys and values, selection of rows and
// the largest logit. Rows (or heads of rows) are split among threads; no row reads another one.
#pragma once

#include <cmath>
#include <cstring>

#include "weight_layout.h"

namespace wager::WAGER_NS {

// One row of packed weights as float32: what the embedding reads of its table.

inline float half_at(const uint8_t* p) {
    alignas(64) uint8_t lanes[32] = {};
    alignas(64) float values[16];
    std::memcpy(lanes, p, 2);
    store(values, load_halves(lanes));
    return values[0];
}

inline float power_at(const uint8_t* p) {
    alignas(64) uint8_t lanes[16] = {};
    alignas(64) float values[16];
    lanes[0] = *p;
    store(values, load_powers(lanes));
    return values[0];
}

// Output `lane` of one block of a panel.
inline int code_at(const BlockLayout& layout, const uint8_t* block, int lane, int i) {
    const int column = lane / 16, quad = i / 4, byte = lane % 16 * 4 + i % 4;
    const uint8_t *low = block + layout.low_at(), *high = block + layout.high_at();
    if (layout.bits == 8) return low[64 * (8 * column + quad) + byte];
    if (layout.bits <= 3) {
        const int two = low[64 * (2 * column + quad / 4) + byte] >> (quad % 4 * 2) & 3;
        return layout.bits == 2 ? two : two | (high[64 * column + byte] >> quad & 1) << 2;
    }
    const int nibble = low[64 * (4 * column + quad / 2) + byte] >> (quad % 2 * 4) & 15;
    if (layout.bits == 5) return nibble | (high[64 * column + byte] >> quad & 1) << 4;
    if (layout.bits == 6) return nibble | (high[64 * (2 * column + quad / 4) + byte] >> (quad % 4 * 2) & 3) << 4;
    return nibble;
}
inline float scale_at(const BlockLayout& layout, const uint8_t* floats, const uint8_t* own, int lane, int half) {
    if (layout.own == Own::powers) return 0.5f * power_at(own + lane);
    const float all = half_at(floats + 2 * lane);
    switch (layout.own) {
        case Own::none:
        case Own::powers: break;
        case Own::whole: return all * static_cast<float>(own[lane]);
        case Own::integers: return all * static_cast<float>(static_cast<int8_t>(own[half * kPanel + lane]));
        case Own::nibbles: return all * static_cast<float>(own[half * kPanel + lane] & 15);
        case Own::steps: return all * layout.unit * (static_cast<float>(own[lane] >> (4 * half) & 15) + 0.5f);
    }
    return all;
}
inline float minimum_at(const BlockLayout& layout, const uint8_t* floats, const uint8_t* own, int lane, int half) {
    if (layout.zero) return half_at(floats + 2 * lane) * -static_cast<float>(floats[2 * kPanel + lane]);
    const float all = half_at(floats + 2 * kPanel + 2 * lane);
    if (layout.own == Own::whole) return all * static_cast<float>(own[kPanel + lane]);
    return layout.own == Own::nibbles ? all * static_cast<float>(own[half * kPanel + lane] >> 4) : all;
}
inline void read_block(const BlockLayout& layout, const uint8_t* group, const uint8_t* block, int lane, float* out) {
    const uint8_t* floats = layout.grouped() ? group : block;
    float scale[2] = {}, minimum[2] = {};
    for (int half = 0; half < layout.halves; ++half) {
        scale[half] = scale_at(layout, floats, block, lane, half);
        if (layout.minimum) minimum[half] = minimum_at(layout, floats, block, lane, half);
    }
    for (int i = 0; i < kBlockInputs; ++i) {
        int code = code_at(layout, block, lane, i);
        if (layout.codebook != Codebook::none) code = kCodebooks[static_cast<int>(layout.codebook)][code];
        const int half = layout.halves == 2 ? i / 16 : 0;
        out[i] = scale[half] * static_cast<float>(code - layout.offset);
        if (layout.minimum) out[i] += minimum[half];
    }
}

// Of a code whose nibbles are exchanged.
inline float e4m3_value(uint8_t code) {
    const int exponent = (code & 7) << 1 | code >> 7, fraction = code >> 4 & 7;
    const uint32_t bits = static_cast<uint32_t>((exponent + 120) << 3 | fraction) << 20;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    if (exponent == 0) value = static_cast<float>(fraction) * 0x1p-9f;
    return code & 8 ? -value : value;
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
    if (is_e4m3(matrix.format)) {
        const int inputs = scaled_inputs(matrix.format, matrix.k);
        for (int first = 0; first < matrix.k; first += inputs, panel += scaled_bytes(inputs)) {
            float scale;
            std::memcpy(&scale, panel + sizeof scale * lane, sizeof scale);
            for (int i = 0; i < inputs; ++i) out[first + i] = scale * e4m3_value(panel[kScaleBytes + e4m3_at(i, lane)]);
        }
        return;
    }
    const BlockLayout layout = layout_of(matrix.format);
    for (int block = 0; block < matrix.k / kBlockInputs; ++block)
        read_block(layout, panel + layout.group_at(block), panel + layout.block_at(block), lane, out + block * kBlockInputs);
}

inline void embed(const Embed& op, const Step& step, int thread) {
    const auto [first, last] = own_part(step.rows, step, thread);
    for (int row = first; row < last; ++row) {
        float* out = op.out + static_cast<size_t>(row) * op.table.k;
        const int token = op.tokens == nullptr ? step.in.tokens[row] : op.tokens[row];
        read_row(op.table, token < 0 ? 0 : token, out);
        if (op.scale == 1.0f) continue;
        for (int i = 0; i < op.table.k; i += 16) {
            const int n = op.table.k - i;
            store_part(out + i, mul(load_part(out + i, n), splat(op.scale)), n);
        }
    }
}

// Sum of squares with one reduction tree: four lane-wise accumulators, then the lanes.
inline float sum_of_squares(const float* x, int n) {
    F acc[4] = {zero(), zero(), zero(), zero()};
    int i = 0;
    for (; i + 64 <= n; i += 64) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const F v = load(x + i + 16 * j);
            acc[j] = fma(v, v, acc[j]);
        }
    }
    for (; i < n; i += 16) {
        const F v = load_part(x + i, n - i);
        acc[0] = fma(v, v, acc[0]);
    }
    return sum(add(add(acc[0], acc[1]), add(acc[2], acc[3])));
}

inline void rms_norm(const RmsNorm& op, const Step& step, int thread) {
    const int rows = row_count(step, op.row_set);
    const auto [first, last] = own_part(rows, step, thread);
    for (int row = first; row < last; ++row) {
        const float* x = op.x + static_cast<size_t>(row) * op.n;
        uint16_t* out = op.out + static_cast<size_t>(row) * op.n;
        const F scale = splat(1.0f / sqrtf(sum_of_squares(x, op.n) / static_cast<float>(op.n) + op.eps));
        for (int i = 0; i < op.n; i += 16) {
            const int n = op.n - i;
            narrow_part(out + i, mul(mul(load_part(x + i, n), scale), load_part(op.weight + i, n)), n);
        }
    }
}

inline void float_norm(const FloatNorm& op, const Step& step, int thread) {
    const int rows = row_count(step, op.row_set) * op.per_row;
    const auto [first, last] = own_part(rows, step, thread);
    for (int row = first; row < last; ++row) {
        const float* x = op.x + static_cast<size_t>(row) * op.stride;
        float* out = op.out + static_cast<size_t>(row) * op.out_stride;
        const F scale = splat(1.0f / sqrtf(sum_of_squares(x, op.n) / static_cast<float>(op.n) + op.eps));
        for (int i = 0; i < op.n; i += 16) {
            const int n = op.n - i;
            const F value = mul(mul(load_part(x + i, n), scale), load_part(op.weight + i, n));
            store_part(out + i, mul(op.add ? add(load_part(out + i, n), value) : value, splat(op.scale)), n);
        }
    }
}

inline void narrow_rows(const Narrow& op, const Step& step, int thread) {
    const int rows = row_count(step, op.row_set);
    const auto [first, last] = own_part(rows, step, thread);
    for (int row = first; row < last; ++row) {
        const size_t at = static_cast<size_t>(row) * op.n;
        for (int i = 0; i < op.n; i += 16) {
            F value = load_part(op.x + at + i, op.n - i);
            if (op.squared_relu) value = max(zero(), value), value = mul(value, value);
            narrow_part(op.out + at + i, value, op.n - i);
        }
    }
}

// Sixteens of all rows are split among threads: a row of logits is long.
inline void soft_cap(const SoftCap& op, const Step& step, int thread) {
    const int groups = (op.n + 15) / 16;
    const int64_t items = static_cast<int64_t>(row_count(step, op.row_set)) * groups;
    for (int64_t item = part(items, thread, step.threads); item < part(items, thread + 1, step.threads); ++item) {
        const int i = static_cast<int>(item % groups) * 16;
        float* x = op.x + item / groups * op.n + i;
        store_part(x, soft_capped(load_part(x, op.n - i), 1.0f, op.cap), op.n - i);
    }
}

// One head: x f32 [d] to out f32 [d], normed if `weight`, then its first `rope` dimensions rotated (i with i + rope/2).
// d <= kMaxHeadDim.
constexpr int kMaxHeadDim = 512, kMaxLatent = 1024;

inline void rotate(const float* x, const float* weight, float eps, const float* table, int d, int rope, float* out) {
    alignas(64) float in[kMaxHeadDim];
    const int half = rope / 2;
    if (weight) {
        const F scale = splat(1.0f / sqrtf(sum_of_squares(x, d) / static_cast<float>(d) + eps));
        for (int i = 0; i < d; i += 16) store(in + i, mul(mul(load(x + i), scale), load(weight + i)));
        x = in;
    }
    const float *cosine = table, *sine = table + half;
    for (int i = 0; i < half; ++i) {
        out[i] = x[i] * cosine[i] - x[i + half] * sine[i];
        out[i + half] = x[i + half] * cosine[i] + x[i] * sine[i];
    }
    if (rope < d) std::memcpy(out + rope, x + rope, static_cast<size_t>(d - rope) * sizeof(float));
}
inline void narrow_all(const float* x, int d, uint16_t* out) {
    for (int i = 0; i < d; i += 16) narrow(out + i, load(x + i));
}
inline void rotate_to_bf16(const float* x, const float* weight, float eps, const float* table, int d, int rope, uint16_t* out) {
    alignas(64) float rotated[kMaxHeadDim];
    rotate(x, weight, eps, table, d, rope, rotated);
    narrow_all(rotated, d, out);
}

// x [d] to whole numbers of -127 to 127 times a scale, which is returned: that of the largest, 0 for zeros. The scale is NaN
// if some x is not finite: then a score with the key, or an output with the value, is NaN whatever the numbers.
inline float round_to_bytes(const float* x, int d, int8_t* out) {
    F most = zero();
    uint32_t odd = 0;
    for (int i = 0; i < d; i += 16) {
        const F v = load(x + i);
        most = max(most, magnitude(v));
        odd |= not_finite(v);
    }
    const float largest = max_lane(most);
    const bool usable = odd == 0 && largest >= kSmallestScaled;
    const F factor = splat(usable ? 127.0f / largest : 0.0f);
    for (int i = 0; i < d; i += 16) store_rounded(out + i, usable ? mul(load(x + i), factor) : zero());
    return odd ? __builtin_nanf("") : usable ? largest / 127.0f : 0.0f;
}

inline void write_key(const CacheView& cache, int layer, int head, int slot, const float* key) {
    const int at = slot % kBlockSize, d = cache.head_dim;
    uint16_t* block = cache.keys + cache_offset(cache, layer, slot / kBlockSize, head);
    if (cache.q8) {
        int8_t bytes[kMaxHeadDim];
        scales_of(block)[at] = round_to_bytes(key, d, bytes);
        for (int i = 0; i < d; i += 2) std::memcpy(bytes_of(block) + static_cast<size_t>(i) * kBlockSize + 2 * at, bytes + i, 2);
        return;
    }
    uint16_t narrowed[kMaxLatent];
    narrow_all(key, d, narrowed);
    for (int i = 0; i < d; i += 2) std::memcpy(block + static_cast<size_t>(i) * kBlockSize + 2 * at, narrowed + i, 4);
}

inline void write_value(const CacheView& cache, int layer, int head, int slot, const float* value) {
    const int key = slot % kBlockSize, d = cache.head_dim;
    uint16_t* block = cache.values + cache_offset(cache, layer, slot / kBlockSize, head);
    const size_t first = value_place(cache, key);
    if (cache.q8) {
        int8_t bytes[kMaxHeadDim];
        scales_of(block)[key] = round_to_bytes(value, d, bytes);
        for (int i = 0; i < d; ++i) bytes_of(block)[first + 2 * i] = bytes[i];
        return;
    }
    uint16_t narrowed[kMaxHeadDim];
    narrow_all(value, d, narrowed);
    for (int i = 0; i < d; ++i) block[first + 2 * i] = narrowed[i];
}

inline void rotary(const Rotary& op, const Step& step, int thread) {
    const CacheView& cache = op.cache;
    const int d = cache.head_dim, all = op.heads + (op.value_at < 0 ? 0 : 2 * cache.kv_heads);
    const int width = op.value_at < 0 ? op.heads : op.value_at + cache.kv_heads;  // heads of a row as they are stored
    const int64_t items = static_cast<int64_t>(row_count(step, op.row_set)) * all;
    const int64_t first = part(items, thread, step.threads), last = part(items, thread + 1, step.threads);
    alignas(64) float rotated[kMaxHeadDim];
    for (int64_t item = first; item < last; ++item) {
        const int from = static_cast<int>(item / all), head = static_cast<int>(item % all);
        const int row = op.row_set == RowSet::rows ? from : step.in.logits_indices[from];
        const int at = head < op.heads + cache.kv_heads ? head : op.value_at + head - op.heads - cache.kv_heads;
        const float* x = op.qkv + (static_cast<size_t>(from) * width + at) * d;
        const float* table = op.table + static_cast<size_t>(step.in.positions[row]) * op.rope_dim;
        const int slot = step.in.slot_mapping[row];
        if (head < op.heads) {
            rotate_to_bf16(x, op.q_norm, op.eps, table, d, op.rope_dim, op.q + (static_cast<size_t>(row) * op.heads + head) * d);
        } else if (head < op.heads + cache.kv_heads) {
            rotate(x, op.k_norm, op.eps, table, d, op.rope_dim, rotated);
            write_key(cache, op.layer, head - op.heads, slot, rotated);
        } else {
            if (op.norm_values) {
                const F scale = splat(1.0f / sqrtf(sum_of_squares(x, d) / static_cast<float>(d) + op.eps));
                for (int i = 0; i < d; i += 16) store(rotated + i, mul(load(x + i), scale));
                x = rotated;
            }
            write_value(cache, op.layer, head - op.heads - cache.kv_heads, slot, x);
        }
    }
}

// One row's queries and latent; item `heads` of a row is the latent.
inline void latent(const LatentWrite& op, const Step& step, int thread) {
    const int d = op.cache.head_dim, rank = op.cache.value_dim, rope = d - rank, wide = op.nope + rope;
    const int64_t items = static_cast<int64_t>(step.rows) * (op.heads + 1);
    const int64_t first = part(items, thread, step.threads), last = part(items, thread + 1, step.threads);
    for (int64_t item = first; item < last; ++item) {
        const int row = static_cast<int>(item / (op.heads + 1)), head = static_cast<int>(item % (op.heads + 1));
        const float* table = op.table + static_cast<size_t>(step.in.positions[row]) * rope;
        if (head < op.heads) {
            const size_t at = static_cast<size_t>(row) * op.heads + head;
            const float* x = op.q + at * wide;
            uint16_t* q_nope = op.q_nope + at * op.nope;
            for (int i = 0; i < op.nope; i += 16) narrow_part(q_nope + i, load_part(x + i, op.nope - i), op.nope - i);
            rotate_to_bf16(x + op.nope, nullptr, 0.0f, table, rope, rope, op.query + at * d + rank);
            continue;
        }
        alignas(64) float key[kMaxLatent];
        const float* x = op.kv + static_cast<size_t>(row) * d;
        const F scale = splat(1.0f / sqrtf(sum_of_squares(x, rank) / static_cast<float>(rank) + op.eps));
        for (int i = 0; i < rank; i += 16) store(key + i, mul(mul(load(x + i), scale), load(op.norm + i)));
        rotate(x + rank, nullptr, 0.0f, table, rope, rope, key + rank);
        write_key(op.cache, op.layer, 0, step.in.slot_mapping[row], key);
    }
}

inline void select(const Select& op, const Step& step, int thread) {
    const auto [first, last] = own_part(step.logits_rows, step, thread);
    for (int head = first; head < last; ++head) {
        const float* from = op.x + static_cast<size_t>(step.in.logits_indices[head]) * op.n;
        std::memcpy(op.out + static_cast<size_t>(head) * op.n, from, static_cast<size_t>(op.n) * sizeof(float));
    }
}

inline void copy(const Copy& op, const Step& step, int thread) {
    const auto [first, last] = own_part(step.rows, step, thread);
    for (int row = first; row < last; ++row) {
        const size_t at = static_cast<size_t>(row) * op.n;
        float* out = op.out + static_cast<size_t>(row) * op.stride;
        if (!op.wide) {
            std::memcpy(out, static_cast<const float*>(op.x) + at, static_cast<size_t>(op.n) * sizeof(float));
            continue;
        }
        const uint16_t* x = static_cast<const uint16_t*>(op.x) + at;
        for (int i = 0; i < op.n; ++i) {
            const uint32_t bits = static_cast<uint32_t>(x[i]) << 16;
            __builtin_memcpy(out + i, &bits, 4);
        }
    }
}

// The largest logit among ids [first, last) and its lowest id.
inline MaxLogit max_logit(const float* logits, int first, int last) {
    const F low = splat(-__builtin_inff());
    F best = low;
    uint32_t odd = 0;
    int i = first;
    for (; i + 16 <= last; i += 16) {
        const F v = load(logits + i);
        odd |= not_finite(v);
        best = max(best, v);
    }
    if (i < last) {
        alignas(64) float rest[16] = {};
        for (int j = i; j < last; ++j) rest[j - i] = logits[j];
        odd |= not_finite(load(rest));
        best = max(best, keep(load(rest), low, 0, last - i));
    }
    const float value = max_lane(best);
    if (odd) return {value, -1};
    for (i = first; i + 16 <= last && !at_most(splat(value), load(logits + i)); i += 16) {}
    while (i < last && logits[i] < value) ++i;
    return {value, i};
}

inline void argmax(const Argmax& op, const Step& step, int thread) {
    const auto [first, last] = own_part(step.logits_rows, step, thread);
    for (int head = first; head < last; ++head)
        op.out[head] = max_logit(op.logits + static_cast<size_t>(head) * op.n, 0, op.n).id;
}

// Reads data[first, last) once and sums it: how fast memory can be read. A remainder below 64 is left out.
inline float sweep(const float* data, int64_t first, int64_t last) {
    F acc[4] = {zero(), zero(), zero(), zero()};
    for (int64_t i = first; i + 64 <= last; i += 64) {
        fetch(data + i + 2048);
        fetch(data + i + 2048 + 16);
        fetch(data + i + 2048 + 32);
        fetch(data + i + 2048 + 48);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) acc[j] = add(acc[j], load(data + i + 16 * j));
    }
    return sum(add(add(acc[0], acc[1]), add(acc[2], acc[3])));
}

}  // namespace wager::WAGER_NS
