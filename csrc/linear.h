// Linear and gated layers over packed weights. A thread owns a contiguous range of panels; it walks blocks of rows, then
// its panels, then tiles of rows, so that a panel is read from memory once per block while the next one is on its way.
#pragma once

namespace wager::WAGER_NS {

constexpr int kRowBlock = 192;  // rows whose activations stay in the second-level cache beside a panel

// Fills out[rows, 32] with x times one panel.
using PanelKernel = void (*)(const uint16_t* x, size_t k, const uint16_t* w, float* out, Ahead ahead);

// Aligned, or where the linker puts its loops would depend on code elsewhere: a matter of a few per cent.
template <int M>
__attribute__((aligned(64))) void panel_tile(const uint16_t* x, size_t k, const uint16_t* w, float* out, Ahead ahead) {
    for (int column = 0; column < kPanel / 16; column += kTileCols) {
        Tile<M, kTileCols> tile;
        tile.clear();
        tile.run(x, k, w + 32 * column, 2 * kPanel, static_cast<int>(k / 2), ahead);
        tile.write(out + 16 * column, kPanel);
        ahead.at = ahead.end;
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

// The next panel this thread will read: of this op, or the first of its share of the next linear op.
inline Ahead next_panel(const Linear& op, const Step& step, int thread, int panel, int last) {
    const char* at = nullptr;
    size_t bytes = op.panel_elements() * 2;
    if (panel + 1 < last) {
        at = reinterpret_cast<const char*>(op.weight + (panel + 1) * op.panel_elements());
    } else if (op.next_weight) {
        const int64_t first = part(op.next_panels, thread, step.threads);
        at = reinterpret_cast<const char*>(op.next_weight + first * op.next_panel);
        if (op.next_panel * 2 < bytes) bytes = op.next_panel * 2;
    } else {
        bytes = 0;
    }
    return {at, at + bytes, 0, 0};
}

inline void linear(const Linear& op, const Step& step, int thread) {
    const int rows = step.count(op.of);
    const int first = static_cast<int>(part(op.panels, thread, step.threads));
    const int last = static_cast<int>(part(op.panels, thread + 1, step.threads));
    alignas(64) float sums[kTileRows * kPanel];
    for (int block = 0; block < rows; block += kRowBlock) {
        const int size = rows - block < kRowBlock ? rows - block : kRowBlock;
        const int tiles = (size + kTileRows - 1) / kTileRows;
        const int lines = (2 * kAhead + tiles - 1) / tiles;  // a panel has two per pair
        for (int panel = first; panel < last; ++panel) {
            Ahead ahead = next_panel(op, step, thread, panel, last);
            ahead.pace(lines);
            const uint16_t* weight = op.weight + panel * op.panel_elements();
            for (int tile = 0; tile < tiles; ++tile) {
                const int row = block + static_cast<int>(part(size, tile, tiles));
                const int height = block + static_cast<int>(part(size, tile + 1, tiles)) - row;
                const uint16_t* x = op.x + static_cast<size_t>(row) * op.k;
                PanelUpTo<kTileRows>::of[height](x, op.k, weight, sums, ahead);
                ahead.at += static_cast<size_t>(lines) * 64 * (op.k / 2 / kAhead);
                if (op.gated) finish_gated(op, panel, row, height, sums);
                else finish_linear(op, panel, row, height, sums);
            }
        }
    }
}

}  // namespace wager::WAGER_NS
