// Linear and gated layers over packed weights. A thread has a contiguous range of panels; it loops over blocks of rows, then
// its panels, then tiles of rows, so that a panel is read from memory once per block while what follows it is prefetched.
#pragma once

#include "cpu_features.h"
#include "panel_products.h"
#include "quantise_rows.h"

namespace wager::WAGER_NS {

constexpr int kFloatRows = kTileRows < 10 ? kTileRows : 10;  // of e4m3, whose unpacking needs registers too
constexpr size_t kFirstLevel = 32768;     // larger panels do not stay in the first-level cache for another tile of rows
constexpr int kQuickRows = 2;             // rows with which a panel is read so quickly that it is prefetched from farther ahead
constexpr ptrdiff_t kNearPrefetchBytes = 2048;  // as kPrefetchBytes, of e4m3, whose reading takes longer

// Fills out[rows, 32] with rows of activations, `stride` bytes apart, times one panel.
using PanelKernel = void (*)(const uint8_t* x, size_t stride, int rows, int k, const uint8_t* panel, float* out,
                             const Prefetch& prefetch);

// Aligned: else the address of its loops depends on other code, which changes their speed by a few per cent.
template <int M>
__attribute__((aligned(64))) void bf16_panel(const uint8_t* x, size_t stride, int, int k, const uint8_t* panel, float* out,
                                            const Prefetch& prefetch) {
    constexpr int kCols = tile_columns(M);
    for (int column = 0; column < kColumns; column += kCols) {
        Tile<M, kCols> tile;
        tile.clear();
        tile.run_panel(reinterpret_cast<const uint16_t*>(x), stride / 2, reinterpret_cast<const uint16_t*>(panel) + 32 * column,
                       k / 2, prefetch);
        tile.write(out + 16 * column, kPanel);
    }
}

// The kernels of a format for 1 to `rows` rows, and for up to `many` that read a panel once if it is larger than `large` bytes.
// `regrouped`: more than kOwnRows rows are.
struct PanelKernels {
    const PanelKernel* of;
    int rows, many;
    size_t large;
    bool regrouped;
};
template <WeightFormat format, int M>
constexpr PanelKernel panel_kernel() {
    if constexpr (format == WeightFormat::bf16) return bf16_panel<M>;
    else if constexpr (is_e4m3(format)) return e4m3_panel<format, M>;
    else if constexpr (M <= kBlockRows || layout_of(format).bits == 8) return block_panel<format, M>;
    else return block_rows<format>;
}
template <WeightFormat format, int... M>
struct KernelList {
    static constexpr PanelKernel of[] = {nullptr, panel_kernel<format, M>()...};
};
template <WeightFormat format, int Last, int... M>
struct KernelsUpTo : KernelsUpTo<format, Last - 1, Last, M...> {};
template <WeightFormat format, int... M>
struct KernelsUpTo<format, 0, M...> : KernelList<format, M...> {};

template <WeightFormat format>
PanelKernels kernels_for() {
    constexpr bool kFloats = takes_bf16(format), kBytes = layout_of(format).bits == 8;
    constexpr int kRows = is_e4m3(format) ? kFloatRows : kFloats ? kTileRows : kHeldRows > 1 && !kBytes ? kManyRows : kBlockRows;
    constexpr int kMany = kFloats ? kRows : kBytes ? kManyByteRows : kManyRows;
    return {KernelsUpTo<format, kMany>::of, kRows, kMany, kBytes ? 0 : kFirstLevel, kHeldRows > 1 && !kFloats && !kBytes};
}
inline PanelKernels kernels_of(WeightFormat format) {
    switch (format) {
        case WeightFormat::bf16: return kernels_for<WeightFormat::bf16>();
        case WeightFormat::q8_0: return kernels_for<WeightFormat::q8_0>();
        case WeightFormat::q4_0: return kernels_for<WeightFormat::q4_0>();
        case WeightFormat::q4_1: return kernels_for<WeightFormat::q4_1>();
        case WeightFormat::q5_0: return kernels_for<WeightFormat::q5_0>();
        case WeightFormat::q5_1: return kernels_for<WeightFormat::q5_1>();
        case WeightFormat::q4_k: return kernels_for<WeightFormat::q4_k>();
        case WeightFormat::q5_k: return kernels_for<WeightFormat::q5_k>();
        case WeightFormat::q6_k: return kernels_for<WeightFormat::q6_k>();
        case WeightFormat::q2_k: return kernels_for<WeightFormat::q2_k>();
        case WeightFormat::q3_k: return kernels_for<WeightFormat::q3_k>();
        case WeightFormat::iq4_nl: return kernels_for<WeightFormat::iq4_nl>();
        case WeightFormat::iq4_xs: return kernels_for<WeightFormat::iq4_xs>();
        case WeightFormat::iq3_s: return kernels_for<WeightFormat::iq3_s>();
        case WeightFormat::iq3_xxs: return kernels_for<WeightFormat::iq3_xxs>();
        case WeightFormat::iq2_s: return kernels_for<WeightFormat::iq2_s>();
        case WeightFormat::iq2_xxs: return kernels_for<WeightFormat::iq2_xxs>();
        case WeightFormat::iq1: return kernels_for<WeightFormat::iq1>();
        case WeightFormat::q4_z: return kernels_for<WeightFormat::q4_z>();
        case WeightFormat::q4_z128: return kernels_for<WeightFormat::q4_z128>();
        case WeightFormat::mxfp4: return kernels_for<WeightFormat::mxfp4>();
        case WeightFormat::e4m3: return kernels_for<WeightFormat::e4m3>();
        case WeightFormat::e4m3_128: return kernels_for<WeightFormat::e4m3_128>();
    }
    return {};
}

WAGER_INLINE F load_part(const float* p, int n) {
    if (n >= 16) return load(p);
    alignas(64) float lanes[16] = {};
    for (int i = 0; i < n; ++i) lanes[i] = p[i];
    return load(lanes);
}
WAGER_INLINE void store_part(float* p, F a, int n) {
    if (n >= 16) return store(p, a);
    alignas(64) float lanes[16];
    store(lanes, a);
    for (int i = 0; i < n; ++i) p[i] = lanes[i];
}
WAGER_INLINE void narrow_part(uint16_t* p, F a, int n) {
    if (n >= 16) return narrow(p, a);
    uint16_t lanes[16];
    narrow(lanes, a);
    for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

inline void finish_linear(const Linear& op, int panel, int row, int rows, const float* sums) {
    const int first = panel * kPanel;
    for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < kPanel; c += 16) {
            const int n = op.n - first - c;
            if (n <= 0) break;
            F value = load(sums + r * kPanel + c);
            if (op.bias) value = add(value, load(op.bias + first + c));
            float* out = static_cast<float*>(op.out) + static_cast<size_t>(row + r) * op.stride + first + c;
            if (op.add) value = fma(value, splat(op.scale), load_part(out, n));
            else if (op.scale != 1.0f) value = mul(value, splat(op.scale));
            store_part(out, value, n);
        }
    }
}

inline void finish_gated(const Linear& op, int panel, int row, int rows, const float* sums) {
    const int first = panel * 16;
    for (int r = 0; r < rows; ++r) {
        F gate = load(sums + r * kPanel), up = load(sums + r * kPanel + 16);
        if (op.bias) {
            gate = add(gate, load(op.bias + panel * kPanel));
            up = add(up, load(op.bias + panel * kPanel + 16));
        }
        const F value = gated(op.activation, mul(gate, splat(op.scale)), up);
        uint16_t* out = static_cast<uint16_t*>(op.out) + static_cast<size_t>(row + r) * op.stride + first;
        narrow_part(out, value, op.n - first);
    }
}

// Where the results of a tile of rows and a panel will be written: prefetched before they are computed, since the outputs of
// many rows do not stay in the second-level cache from one panel to the next.
struct Results {
    const uint8_t* at;  // null: not known
    size_t row, panel;  // bytes from one to the next

    WAGER_INLINE void fetch_tile(int index, int first_row, int rows) const {
        const uint8_t* to = at + index * panel + first_row * row;
        for (int r = 0; r < rows; ++r, to += row)
            for (size_t byte = 0; byte < panel; byte += 64) fetch(to + byte);
    }
};

// Some consecutive panels and the rows they are multiplied with; `after` is what will be read next, prefetched.
struct Panels {
    Matrix weight;
    int first, last;
    Activations x;
    int rows;
    const uint8_t* after;
    Results results;
};

// Rows of activation blocks as `to` [blocks][rows]: one tile after the other reads memory in order. As they are, a block of each
// row lies in few sets of the first-level cache, which hold fewer rows than a tile has.
inline void regroup(const Activations& x, int rows, int blocks, ActivationBlock* to) {
    for (int row = 0; row < rows; ++row) {
        const ActivationBlock* from = reinterpret_cast<const ActivationBlock*>(x.row(row));
        for (int block = 0; block < blocks; ++block) to[static_cast<size_t>(block) * rows + row] = from[block];
    }
}

// Calls finish(panel, row, height, sums) for each tile of rows and each panel.
template <class Finish>
WAGER_INLINE void multiply_panels(const Panels& all, Finish finish) {
    alignas(64) float sums[(kTileRows > kManyRows ? kTileRows : kManyRows) * kPanel];
    const PanelKernels kernels = kernels_of(all.weight.format);
    const size_t bytes = panel_bytes(all.weight);
    const uint8_t* end = all.weight.panels + all.last * bytes;
    for (int block = 0; block < all.rows; block += kRowBlock) {
        const int size = all.rows - block < kRowBlock ? all.rows - block : kRowBlock;
        const int most = size <= kernels.many && bytes > kernels.large ? kernels.many : kernels.rows;
        const int tiles = (size + most - 1) / most;
        const ptrdiff_t near = is_e4m3(all.weight.format) ? kNearPrefetchBytes : size <= kQuickRows ? kPrefetchBytes * 3 / 2 : kPrefetchBytes;
        const ptrdiff_t distance = tiles == 1 ? near : static_cast<ptrdiff_t>(bytes);
        // Beside the activations of many rows the first-level cache would not keep what no other level has.
        const bool once = tiles == 1 && kCpuFeatures.amd && (kHeldRows == 1 || size <= kBlockRows);
        Prefetch prefetch{distance, end, all.after ? all.after : end, 0, tiles, once};
        const auto first_row = [&](int tile) { return static_cast<int>(part(size, tile, tiles)); };
        const bool regrouped = kernels.regrouped && size > kOwnRows;
        const int blocks = all.weight.k / kBlockInputs;
        for (int tile = 0; regrouped && tile < tiles; ++tile)
            regroup(all.x.from(block + first_row(tile)), first_row(tile + 1) - first_row(tile), blocks, all.x.room + first_row(tile) * blocks);
        for (int panel = all.first; panel < all.last; ++panel) {
            const uint8_t* weight = all.weight.panels + panel * bytes;
            for (int tile = 0; tile < tiles; ++tile) {
                const int row = block + first_row(tile), height = first_row(tile + 1) - first_row(tile);
                const uint8_t* own = reinterpret_cast<const uint8_t*>(all.x.room + first_row(tile) * blocks);
                const uint8_t* x = regrouped ? own : all.x.row(row);
                const size_t stride = regrouped ? sizeof(ActivationBlock) : all.x.stride;
                prefetch.turn = tile;
                if (size > kernels.rows && all.results.at) all.results.fetch_tile(panel, row, height);
                kernels.of[height](x, stride, height, all.weight.k, weight, sums, prefetch);
                finish(panel, row, height, sums);
            }
        }
    }
}

inline void linear(const Linear& op, const Step& step, int thread) {
    const int rows = row_count(step, op.row_set);
    Panels panels{op.weight, 0, 0, activations(op.x, op.weight.k, op.weight.format, rows, step, thread), rows, nullptr, {}};
    const size_t element = op.gated ? sizeof(uint16_t) : sizeof(float);
    panels.results = {static_cast<const uint8_t*>(op.out), op.stride * element, (op.gated ? kPanel / 2 : kPanel) * element};
    panels.first = static_cast<int>(part(op.panels, thread, step.threads));
    panels.last = static_cast<int>(part(op.panels, thread + 1, step.threads));
    if (op.next.panels) panels.after = op.next.panels + part(op.next_panels, thread, step.threads) * panel_bytes(op.next);
    multiply_panels(panels, [&](int panel, int row, int height, const float* sums) {
        if (op.gated) finish_gated(op, panel, row, height, sums);
        else finish_linear(op, panel, row, height, sums);
    });
}

// One matrix per head: the panels of all heads are split among threads in order, like those of one matrix.
inline void per_head(const PerHead& op, const Step& step, int thread) {
    const int panels = (op.n + kPanel - 1) / kPanel, k = op.weight.k;
    const auto [first, last] = own_part(static_cast<int64_t>(op.heads) * panels, step, thread);
    const size_t out = static_cast<size_t>(op.heads) * op.step, bytes = panel_bytes(op.weight);
    const Activations all = activations(op.x, op.heads * k, op.weight.format, step.rows, step, thread);
    for (int item = first; item < last;) {
        const int head = item / panels, from = item % panels;
        const int to = last - head * panels < panels ? last - head * panels : panels;
        const uint8_t* weight = op.weight.panels + static_cast<size_t>(head) * panels * bytes;
        const uint8_t* after = head * panels + to < last ? weight + panels * bytes : nullptr;
        const Activations x{all.at + head * input_bytes(op.weight.format, k), all.stride, all.room};
        multiply_panels(Panels{{weight, op.weight.format, k}, from, to, x, step.rows, after, {}},
             [&](int panel, int row, int height, const float* sums) {
                 for (int r = 0; r < height; ++r) {
                     uint16_t* at = op.out + (row + r) * out + static_cast<size_t>(head) * op.step + panel * kPanel;
                     for (int c = 0; c < kPanel && panel * kPanel + c < op.n; c += 16)
                         narrow_part(at + c, load(sums + r * kPanel + c), op.n - panel * kPanel - c);
                 }
             });
        item = head * panels + to;
    }
}

}  // namespace wager::WAGER_NS
