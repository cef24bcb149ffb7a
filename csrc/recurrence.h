// Recurrent layers: a short convolution and a state of fixed size per head, advanced row by row. A row's arithmetic is the same
// whether it is known, a guess, or an accepted guess that is replayed, so that the bits are.
#pragma once

namespace wager::WAGER_NS {

// The rows of a sequence in a recurrent layer: `replays` and `known` ones, one after the other, then guesses.
struct StateRun {
    StateUse use;
    int replay_row, first, guesses, max_rows;
    int64_t covered;  // positions before the first replayed row
    int chain() const { return use.replays + use.known; }
    // Where row i of the chain, or a row of the step, stands in the buffers.
    size_t chain_row(int i) const { return static_cast<size_t>(i < use.replays ? replay_row + i : max_rows + first + i - use.replays); }
    size_t step_row(int row) const { return static_cast<size_t>(max_rows) + row; }
    int first_guess() const { return first + use.known; }
};

inline StateRun run_of(const StateView& states, const Step& step, int sequence) {
    const StateUse use = state_uses(step)[sequence];
    const int first = step.in.query_start_loc[sequence], rows = step.in.query_start_loc[sequence + 1] - first;
    return {use, step.replay_starts[sequence], first, rows - use.known, states.max_rows,
            int64_t{step.in.num_computed_tokens[sequence]} - use.replays};
}

inline void replay(const Replay& op, const Step& step, int thread) {
    const int total = step.replay_starts[step.sequences];
    const size_t width = op.states.width;
    for (int i = static_cast<int>(part(total, thread, step.threads)); i < part(total, thread + 1, step.threads); ++i)
        std::memcpy(op.x + i * width, saved_row(op.states, op.layer, step.in.replays[i]), width * sizeof(float));
}

// Of a row: the convolution's inputs at its taps, the oldest first; null: zeros.
struct Taps {
    const float* at[kMaxTaps];
};

// The taps - 1 inputs up to row i of the chain, from slot `source` where they are older, and at[taps - 1] that row.
inline Taps chain_taps(const Convolve& op, const StateRun& run, int i) {
    const StateView& states = op.states;
    const int taps = states.taps;
    const float* tail = run.use.source < 0 ? nullptr : tail_of(states, op.layer, run.use.source);
    Taps found;
    for (int j = 0; j < taps; ++j) {
        const int at = i - (taps - 1) + j;
        if (at >= 0) found.at[j] = op.x + run.chain_row(at) * states.width;
        else found.at[j] = tail ? tail + static_cast<size_t>(i + j) * states.channels : nullptr;
    }
    return found;
}

inline Taps guess_taps(const Convolve& op, const Step& step, const StateRun& run, int row) {
    const int taps = op.states.taps;
    Taps found;
    int j = taps - 1;
    for (; j >= 0 && row >= run.first_guess(); row = step.in.parents[row], --j)
        found.at[j] = op.x + run.step_row(row) * op.states.width;
    const Taps before = chain_taps(op, run, run.chain() - 1);
    for (int i = taps - 1; j >= 0; --i, --j) found.at[j] = before.at[i];
    return found;
}

inline void convolve_row(const Convolve& op, const Taps& taps, int from, int to, float* out) {
    const int n = op.states.taps, channels = op.states.channels;
    for (int c = from; c < to; c += 16) {
        F y = op.bias ? load(op.bias + c) : zero();
        for (int j = 0; j < n; ++j)
            if (taps.at[j]) y = fma(load(op.weight + static_cast<size_t>(j) * channels + c), load(taps.at[j] + c), y);
        store(out + c, op.silu ? silu(y) : y);
    }
}

// The last taps - 1 inputs up to row i of the chain, to a slot: perhaps to the one that they are read from.
inline void keep_tail(const Convolve& op, const StateRun& run, int i, int slot, int from, int to) {
    const Taps taps = chain_taps(op, run, i);
    float* tail = tail_of(op.states, op.layer, slot);
    const size_t bytes = static_cast<size_t>(to - from) * sizeof(float);
    for (int j = 1; j < op.states.taps; ++j, tail += op.states.channels) {
        if (taps.at[j] == nullptr) std::memset(tail + from, 0, bytes);
        else std::memmove(tail + from, taps.at[j] + from, bytes);
    }
}

inline void convolve_channels(const Convolve& op, const Step& step, const StateRun& run, int from, int to) {
    const StateView& states = op.states;
    const size_t out_width = states.channels + 2 * op.gates.heads;
    for (int i = 0; i < run.chain(); ++i)
        convolve_row(op, chain_taps(op, run, i), from, to, op.out + run.chain_row(i) * out_width);
    for (int row = run.first_guess(); row < run.first_guess() + run.guesses; ++row) {
        convolve_row(op, guess_taps(op, step, run, row), from, to, op.out + run.step_row(row) * out_width);
        std::memcpy(saved_row(states, op.layer, row) + from, op.x + run.step_row(row) * states.width + from,
                    static_cast<size_t>(to - from) * sizeof(float));
    }
    for (int save = 0; save < kSaves; ++save)
        if (const int64_t i = run.use.save_at[save] - run.covered - 1; run.use.save_at[save] >= 0 && i >= 0 && i < run.chain())
            keep_tail(op, run, static_cast<int>(i), run.use.save_slot[save], from, to);
    keep_tail(op, run, run.chain() - 1, run.use.state, from, to);
}

// x: a row's columns behind the channels.
inline void make_gates(const GateRule& gates, const float* x, float* out) {
    const int heads = gates.heads;
    for (int h = 0; h < heads; h += 16) {
        const int n = heads - h;
        const F raw = load_part(x + (gates.delta ? heads : 0) + h, n), size = softplus(add(raw, load_part(gates.bias + h, n)));
        store_part(out + h, gates.delta ? sigmoid(load_part(x + h, n)) : size, n);
        store_part(out + heads + h, exp2(mul(mul(load_part(gates.rates + h, n), size), splat(kLog2e))), n);
    }
}

inline void convolve_gates(const Convolve& op, const StateRun& run) {
    const StateView& states = op.states;
    const size_t out_width = states.channels + 2 * op.gates.heads;
    const auto row = [&](size_t at) {
        make_gates(op.gates, op.x + at * states.width + states.channels, op.out + at * out_width + states.channels);
    };
    for (int i = 0; i < run.chain(); ++i) row(run.chain_row(i));
    for (int guess = run.first_guess(); guess < run.first_guess() + run.guesses; ++guess) {
        row(run.step_row(guess));
        std::memcpy(saved_row(states, op.layer, guess) + states.channels, op.x + run.step_row(guess) * states.width + states.channels,
                    static_cast<size_t>(states.width - states.channels) * sizeof(float));
    }
}

// A unit of work is some channels of a sequence, or its gates.
inline void convolve(const Convolve& op, const Step& step, int thread) {
    constexpr int kChannels = 256;
    const int channels = op.states.channels, groups = (channels + kChannels - 1) / kChannels;
    const int parts = groups + (op.gates.heads > 0);
    const int64_t items = static_cast<int64_t>(step.sequences) * parts;
    for (int64_t item = part(items, thread, step.threads); item < part(items, thread + 1, step.threads); ++item) {
        const StateRun run = run_of(op.states, step, static_cast<int>(item / parts));
        const int from = static_cast<int>(item % parts) * kChannels, to = from + kChannels < channels ? from + kChannels : channels;
        if (from < channels) convolve_channels(op, step, run, from, to);
        else convolve_gates(op, run);
    }
}

// q and k of a head in a row, as the recurrence takes them.
struct HeadRow {
    const float *row, *q, *k;
};
inline HeadRow head_row(const Recur& op, size_t place, int head, float* room) {
    const StateView& states = op.states;
    const float* row = op.x + place * (states.channels + 2 * states.num_heads);
    const int n = states.key_dim, key_head = op.tiled ? head % op.key_heads : head / (states.num_heads / op.key_heads);
    const float *q = row + op.q_at + static_cast<size_t>(key_head) * n, *k = row + op.k_at + static_cast<size_t>(key_head) * n;
    if (!op.delta) return {row, q, k};
    const F q_scale = splat(1.0f / (sqrtf(sum_of_squares(q, n) + 1e-6f) * sqrtf(static_cast<float>(n))));
    const F k_scale = splat(1.0f / sqrtf(sum_of_squares(k, n) + 1e-6f));
    for (int i = 0; i < n; i += 16) {
        store(room + i, mul(load(q + i), q_scale));
        store(room + n + i, mul(load(k + i), k_scale));
    }
    return {row, room, room + n};
}

// One row of a head: T sixteens of its columns. `from` null: zeros; it may be `to`. `out` null: nobody reads it.
template <int T>
WAGER_INLINE void advance(const Recur& op, const HeadRow& at, int head, int lane, const float* from, float* to, float* out) {
    constexpr int kStride = 16 * T;
    const StateView& states = op.states;
    const int n = states.key_dim;
    const float *v = at.row + op.v_at + static_cast<size_t>(head) * states.value_dim + lane, *gates = at.row + states.channels;
    const float *q = at.q, *k = at.k;
    const F step = splat(gates[head]), decay = splat(gates[states.num_heads + head]);
    F u[T], o[2][T];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) u[t] = load(v + 16 * t), o[0][t] = o[1][t] = zero();
    if (op.delta && from != nullptr) {
        F sums[2][T];
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) sums[0][t] = sums[1][t] = zero();
        for (int i = 0; i < n; i += 2)
#pragma GCC unroll 4
            for (int half = 0; half < 2; ++half)
#pragma GCC unroll 4
                for (int t = 0; t < T; ++t)
                    sums[half][t] = fma(splat(k[i + half]), load(from + (i + half) * kStride + 16 * t), sums[half][t]);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) u[t] = sub(u[t], mul(decay, add(sums[0][t], sums[1][t])));
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) u[t] = mul(step, u[t]);
    for (int i = 0; i < n; i += 2)
#pragma GCC unroll 4
        for (int half = 0; half < 2; ++half)
#pragma GCC unroll 4
            for (int t = 0; t < T; ++t) {
                F s = mul(splat(k[i + half]), u[t]);
                if (from != nullptr) s = fma(decay, load(from + (i + half) * kStride + 16 * t), s);
                store(to + (i + half) * kStride + 16 * t, s);
                o[half][t] = fma(splat(q[i + half]), s, o[half][t]);
            }
    if (out == nullptr) return;
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
        F y = add(o[0][t], o[1][t]);
        if (op.skip) y = fma(splat(op.skip[head]), load(v + 16 * t), y);
        store(out + 16 * t, y);
    }
}

// A head over all rows of a sequence: some rows at a time, of these 16 T columns at a time, whose state stays in the first-level
// cache. `room` has q and k of these rows, or of all guesses, then the states of guesses: a guess reads that of its parent.
template <int T>
inline void recur_head(const Recur& op, const Step& step, const StateRun& run, int head, float* room) {
    const StateView& states = op.states;
    const int chain = run.chain(), keys = 2 * states.key_dim;
    const size_t tile = size_t{16} * T * states.key_dim;
    const auto tile_of = [&](int slot, int lane) {
        return head_of(states, op.layer, slot, head) + static_cast<size_t>(lane) * states.key_dim;
    };
    const auto out_of = [&](int row, int lane) {
        const size_t at = (static_cast<size_t>(row) * states.num_heads + head) * states.value_dim;
        return op.out + at + lane;
    };
    HeadRow rows[kStateRows];
    for (int first = 0; first < chain; first += kStateRows) {
        const int last = first + kStateRows < chain ? first + kStateRows : chain;
        for (int i = first; i < last; ++i) rows[i - first] = head_row(op, run.chain_row(i), head, room + (i - first) * keys);
        for (int lane = 0; lane < states.value_dim; lane += 16 * T) {
            float* const state = tile_of(run.use.state, lane);
            for (int i = first; i < last; ++i) {
                const float* const from = i > 0 ? state : run.use.source < 0 ? nullptr : tile_of(run.use.source, lane);
                float* const out = i < run.use.replays ? nullptr : out_of(run.first + i - run.use.replays, lane);
                advance<T>(op, rows[i - first], head, lane, from, state, out);
                for (int save = 0; save < kSaves; ++save)
                    if (run.use.save_at[save] >= 0 && run.use.save_at[save] == run.covered + i + 1)
                        std::memcpy(tile_of(run.use.save_slot[save], lane), state, tile * sizeof(float));
            }
        }
    }
    float* const guesses = room + static_cast<size_t>(run.guesses) * keys;
    for (int lane = 0; lane < states.value_dim && run.guesses > 0; lane += 16 * T)
        for (int guess = 0; guess < run.guesses; ++guess) {
            const int row = run.first_guess() + guess, parent = step.in.parents[row] - run.first_guess();
            float* const own = room + guess * keys;
            const HeadRow at = lane == 0 || !op.delta ? head_row(op, run.step_row(row), head, own)
                                                      : HeadRow{op.x + run.step_row(row) * (states.channels + 2 * states.num_heads),
                                                                own, own + states.key_dim};
            const float* const before = parent < 0 ? tile_of(run.use.state, lane) : guesses + parent * tile;
            advance<T>(op, at, head, lane, before, guesses + guess * tile, out_of(row, lane));
        }
}

inline void recur(const Recur& op, const Step& step, int thread) {
    const StateView& states = op.states;
    const int64_t items = static_cast<int64_t>(step.sequences) * states.num_heads;
    float* const room = step.state_room + thread * step.state_room_floats;
    for (int64_t item = part(items, thread, step.threads); item < part(items, thread + 1, step.threads); ++item) {
        const StateRun run = run_of(states, step, static_cast<int>(item / states.num_heads));
        const int head = static_cast<int>(item % states.num_heads);
        if (state_tile(states) == 32) recur_head<2>(op, step, run, head, room);
        else recur_head<1>(op, step, run, head, room);
    }
}

inline void gated_norm(const GatedNorm& op, const Step& step, int thread) {
    const int64_t items = static_cast<int64_t>(step.rows) * op.heads;
    for (int64_t item = part(items, thread, step.threads); item < part(items, thread + 1, step.threads); ++item) {
        const float *x = op.x + item * op.n, *gate = op.gate + item * op.n;
        if (op.weight == nullptr) {
            for (int i = 0; i < op.n; i += 16) narrow(op.out + item * op.n + i, mul(load(x + i), silu(load(gate + i))));
            continue;
        }
        const float* weight = op.weight + item % op.heads * op.weight_stride;
        float squares = 0.0f;
        if (op.gate_first) {  // twice what is cheap, so that no room is needed for a wide row
            F sums = zero();
            for (int i = 0; i < op.n; i += 16) {
                const F value = mul(load(x + i), silu(load(gate + i)));
                sums = fma(value, value, sums);
            }
            squares = sum(sums);
        } else {
            squares = sum_of_squares(x, op.n);
        }
        const F scale = splat(1.0f / sqrtf(squares / static_cast<float>(op.n) + op.eps));
        for (int i = 0; i < op.n; i += 16)
            narrow(op.out + item * op.n + i, mul(mul(mul(load(x + i), scale), load(weight + i)), silu(load(gate + i))));
    }
}

inline void multiply(const Multiply& op, const Step& step, int thread) {
    const int rows = row_count(step, op.row_set);
    const auto [first, last] = own_part(rows, step, thread);
    for (int row = first; row < last; ++row) {
        const int of_y = op.row_set == RowSet::rows ? row : step.in.logits_indices[row];
        const float *x = op.x + static_cast<size_t>(row) * op.stride, *y = op.y + static_cast<size_t>(of_y) * op.y_stride;
        const size_t out = static_cast<size_t>(row) * op.out_stride;
        for (int i = 0; i < op.n; i += 16) {
            const F some = load_part(x + i, op.n - i), by = load_part(y + i, op.n - i), value = mul(op.gelu ? gelu(some) : some, by);
            if (op.narrow) narrow_part(static_cast<uint16_t*>(op.out) + out + i, value, op.n - i);
            else store_part(static_cast<float*>(op.out) + out + i, value, op.n - i);
        }
    }
}

inline void add_silu(const AddSilu& op, const Step& step, int thread) {
    const auto [first, last] = own_part(step.rows, step, thread);
    for (int row = first; row < last; ++row) {
        const size_t at = static_cast<size_t>(row) * op.n;
        uint16_t* out = op.out + static_cast<size_t>(row) * op.stride;
        for (int i = 0; i < op.n; i += 16) narrow(out + i, add(widen(op.x + at + i), silu(load(op.y + at + i))));
    }
}

inline void sigmoid_gate(const SigmoidGate& op, const Step& step, int thread) {
    const auto [first, last] = own_part(step.rows, step, thread);
    for (size_t i = static_cast<size_t>(first) * op.n; i < static_cast<size_t>(last) * op.n; i += 16) {
        narrow(op.x + i, mul(widen(op.x + i), sigmoid(load(op.gate + i))));
    }
}

}  // namespace wager::WAGER_NS
