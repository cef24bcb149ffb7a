// Linear and gated layers over packed weights. A thread has a contiguous range of panels; it loops over blocks of rows, then
// its panels, then tiles of rows, so that a panel is read from memory once per block while the next one is prefetched.
#pragma once

namespace wager::WAGER_NS {

constexpr int kRowBlock = 192;  // rows whose activations stay in the second-level cache beside a panel

// Fills out[rows, 32] with x [rows, stride] times one panel.
using PanelKernel = void (*)(const uint16_t* x, size_t stride, size_t k, const uint16_t* w, float* out, Prefetch prefetch);

// Aligned: else the address of its loops depends on other code, which changes their speed by a few per cent.
template <int M>
__attribute__((aligned(64))) void panel_tile(const uint16_t* x, size_t stride, size_t k, const uint16_t* w, float* out,
                                            Prefetch prefetch) {
    for (int column = 0; column < kPanel / 16; column += kTileCols) {
        Tile<M, kTileCols> tile;
        tile.clear();
        tile.run(x, stride, w + 32 * column, 2 * kPanel, static_cast<int>(k / 2), prefetch);
        tile.write(out + 16 * column, kPanel);
        prefetch.at = prefetch.end;
    }
}

template <int... M>
struct PanelKernels {
    static constexpr PanelKernel of[] = {nullptr, panel_tile<M>...};
};
template <int Last, int... M>
struct PanelUpTo : PanelUpTo<Last - 1, Last, M...> {};
template <int... M>
struct PanelUpTo<0, M...> : PanelKernels<M...> {};

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
            float* out = static_cast<float*>(op.out) + static_cast<size_t>(row + r) * op.n + first + c;
            if (op.add) value = add(load_part(out, n), value);
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
        const F value = mul(silu(gate), up);
        uint16_t* out = static_cast<uint16_t*>(op.out) + static_cast<size_t>(row + r) * op.n + first;
        narrow_part(out, value, op.n - first);
    }
}

// Some consecutive panels and the rows they are multiplied with; `after` is what will be read next, prefetched.
struct Panels {
    const uint16_t* weight;
    int first, last, k;
    const uint16_t* x;
    size_t stride;
    int rows;
    const uint16_t* after;
    size_t after_elements;

    Prefetch next(int panel) const {
        const size_t elements = panel_elements(k);
        const uint16_t* at = panel + 1 < last ? weight + (panel + 1) * elements : after;
        const size_t most = panel + 1 < last || after_elements > elements ? elements : after_elements;
        const char* from = reinterpret_cast<const char*>(at);
        return {from, from + (at ? most * 2 : 0), 0, 0};
    }
};

// Calls finish(panel, row, height, sums) for each tile of rows and each panel.
template <class Finish>
WAGER_INLINE void multiply_panels(const Panels& all, Finish finish) {
    alignas(64) float sums[kTileRows * kPanel];
    for (int block = 0; block < all.rows; block += kRowBlock) {
        const int size = all.rows - block < kRowBlock ? all.rows - block : kRowBlock;
        const int tiles = (size + kTileRows - 1) / kTileRows;
        const int lines = (2 * kPrefetchPairs + tiles - 1) / tiles;  // a panel has two per pair
        for (int panel = all.first; panel < all.last; ++panel) {
            Prefetch prefetch = all.next(panel);
            prefetch.pace(lines);
            const uint16_t* weight = all.weight + panel * panel_elements(all.k);
            for (int tile = 0; tile < tiles; ++tile) {
                const int row = block + static_cast<int>(part(size, tile, tiles));
                const int height = block + static_cast<int>(part(size, tile + 1, tiles)) - row;
                PanelUpTo<kTileRows>::of[height](all.x + row * all.stride, all.stride, all.k, weight, sums, prefetch);
                prefetch.at += static_cast<size_t>(lines) * 64 * (all.k / 2 / kPrefetchPairs);
                finish(panel, row, height, sums);
            }
        }
    }
}

inline void linear(const Linear& op, const Step& step, int thread) {
    Panels panels{op.weight, 0, 0, op.k, op.x, static_cast<size_t>(op.k), row_count(step, op.row_set), nullptr, op.next_panel};
    panels.first = static_cast<int>(part(op.panels, thread, step.threads));
    panels.last = static_cast<int>(part(op.panels, thread + 1, step.threads));
    if (op.next_weight) panels.after = op.next_weight + part(op.next_panels, thread, step.threads) * op.next_panel;
    multiply_panels(panels, [&](int panel, int row, int height, const float* sums) {
        if (op.gated) finish_gated(op, panel, row, height, sums);
        else finish_linear(op, panel, row, height, sums);
    });
}

// One matrix per head: the panels of all heads are split among threads in order, like those of one matrix.
inline void per_head(const PerHead& op, const Step& step, int thread) {
    const int panels = (op.n + kPanel - 1) / kPanel;
    const int first = static_cast<int>(part(static_cast<int64_t>(op.heads) * panels, thread, step.threads));
    const int last = static_cast<int>(part(static_cast<int64_t>(op.heads) * panels, thread + 1, step.threads));
    const size_t in = static_cast<size_t>(op.heads) * op.k, out = static_cast<size_t>(op.heads) * op.step;
    for (int item = first; item < last;) {
        const int head = item / panels, from = item % panels;
        const int to = last - head * panels < panels ? last - head * panels : panels;
        const size_t elements = static_cast<size_t>(op.k) * kPanel;
        const uint16_t* weight = op.weight + static_cast<size_t>(head) * panels * elements;
        const uint16_t* after = head * panels + to < last ? weight + panels * elements : nullptr;
        multiply_panels(Panels{weight, from, to, op.k, op.x + static_cast<size_t>(head) * op.k, in, step.rows, after, elements},
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
