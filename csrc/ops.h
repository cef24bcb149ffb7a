// What a tape records: one plain struct per op, the step they run over, and the table of kernels of one instruction set.
// Shapes are in kernels/tape.py. bf16 is carried as uint16_t. No struct here owns memory.
//
// Data only, no functions: this header is compiled with the flags of every instruction set. A function that is inline or a
// template, a member of a struct included, is emitted by each file that uses it, and the linker keeps any one of the copies:
// it could be the AVX-512 one on a machine without AVX-512. So what kernels_*.cpp includes has its code in namespace
// wager::WAGER_NS (sizes.h, and what table.h gathers), and uses of std only what the compiler always inlines (memcpy, the
// operations of std::atomic). csrc/check_symbols.cmake verifies that on the object files.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace wager {

constexpr int kBlockSize = 16;  // tokens per block of the cache
constexpr int kKeyTile = 64;    // keys whose scores are compared at once with the reference of the softmax
constexpr int kSegment = 256;   // keys whose softmax is a unit of work; segments are combined in order
// Numbers nearer to zero are zero in bf16: then no sum of products of bf16 is below 2^-126, where processors differ
// (docs/arithmetic.md).
constexpr float kLeastBf16 = 0x1p-56f;
constexpr float kSmallestScaled = 1e-30f;  // an int8 key or value whose largest element is smaller is zero
constexpr int kPanel = 32;      // outputs per packed panel of weights
constexpr int kMaxExperts = 1024;
constexpr int kRowHeads = 24;  // (row, query head) pairs that share the loads of a block of keys

enum class RowSet { rows, logits };  // all rows of the step, or the logits rows

// Of the gate of a gated layer. gelu: the approximation by tanh; clamped: gpt-oss's, see exp.h. relu2, max(x, 0)^2, is of a
// layer of experts without gates.
enum class Activation { silu, gelu, clamped, relu2 };

// How the weights of a matrix are stored (see weight_layout.h).
enum class WeightFormat {
    bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k, q2_k, q3_k, iq4_nl, iq4_xs, iq3_s, iq3_xxs, iq2_s, iq2_xxs, iq1, q4_z, q4_z128, mxfp4,
    e4m3, e4m3_128
};
constexpr bool is_e4m3(WeightFormat format) { return format == WeightFormat::e4m3 || format == WeightFormat::e4m3_128; }
// Whether products take activations in bf16, and not as blocks of int8.
constexpr bool takes_bf16(WeightFormat format) { return format == WeightFormat::bf16 || is_e4m3(format); }

// Packed weights: panels of 32 outputs, k inputs each, one after the other.
struct Matrix {
    const uint8_t* panels;
    WeightFormat format;
    int k;
};

// 32 activations of a row as int8 with their scale, the block in which a quantised product takes them. `start` is minus the
// format's offset times the sum of each half (the whole sum in the first where a format has one scale per block), or the sum of each
// half in q2_k, whose minima belong to halves.
constexpr int kBlockInputs = 32;
constexpr int kOwnRows = 16;  // up to here each thread quantises all rows itself: sharing costs more than the work
constexpr int kRowBlock = 192;  // rows whose activations stay in the second-level cache beside a panel
struct ActivationBlock {
    int8_t values[kBlockInputs];
    float scale, scaled_sum;  // scaled_sum: scale times the sum of the values
    int32_t start[2];
};

// Keys of a block and kv head: [d/2][16 keys][2]; values: [16/2][d][2]; so both products pair along their sum. In bf16, or
// (q8) in int8 behind the 16 keys' float scales. A latent cache has no values: those are the first value_dim dimensions of
// its keys, transposed when a block is read.
struct CacheView {
    uint16_t* keys;
    uint16_t* values;
    int layers, num_blocks, kv_heads, head_dim, value_dim;
    bool q8;
};

// What a step does to the recurrent states of a sequence. It begins with the states in slot `source` (-1: zeros), advances them
// by `replays` rows that the step before computed as guesses, then by the first `known` rows of its span, and keeps them in slot
// `state`. After so many positions as `save_at` says (-1: never) they are also copied to `save_slot`. Guesses change none.
constexpr int kSaves = 2;
struct StateUse {
    int32_t state, source, known, replays, save_at[kSaves], save_slot[kSaves];
};
constexpr int kStateInts = sizeof(StateUse) / sizeof(int32_t);

struct Inputs {
    const int32_t *tokens, *positions, *parents, *slot_mapping, *seq_ids, *logits_indices, *query_start_loc,
        *num_computed_tokens, *block_tables;
    const int32_t *state_uses;  // [sequences, kStateInts], StateUse
    const int32_t *replays;     // the rows of the step before that are replayed, sequence after sequence
    int max_rows, max_sequences, max_blocks;
};

// The memory of recurrent layers. In a layer each slot has the last taps - 1 inputs of a convolution [taps - 1][channels], and
// `heads` states: 32 columns (16 where value_dim is not their multiple) [key_dim][columns], and behind them the next. `saved` has,
// by layer, the guesses of the last step as they went into the convolution [max_rows][width]: `channels` and what gates are of.
struct StateView {
    float *tails, *heads, *saved;
    int layers, slots, max_rows, taps, channels, width, num_heads, key_dim, value_dim;
};
constexpr int kMaxTaps = 8;
constexpr int kStateRows = 16;  // rows of a head that are prepared at a time

// How attention cuts the rows of a set: tiles of consecutive rows of one sequence, and for rows of a tree the block from
// which their keys must be gathered into path order (kDirect: their keys already lie in position order).
struct AttentionPlan {
    static constexpr int32_t kDirect = INT32_MAX;
    const int32_t* tile_rows;   // [tiles] first row
    const int32_t* tile_sizes;  // [tiles]
    const int32_t* tile_outs;   // [tiles] the row of the output that is the first one's
    const int32_t* tails;       // [rows]
    const int32_t* ends;        // [rows] the position behind the last that a row sees
    int tiles;
    int tail_blocks;  // room in the scratch memory per row
    // Where threads share out segments: how many a tile has at most (0: they take whole items), room for states, and how many
    // threads are done with an item.
    int segments;
    float* parts;            // [threads, segments + 1, state]
    std::atomic<int>* done;  // [tiles * kv_heads]
};

struct Step {
    Inputs in;
    int rows, sequences, logits_rows, threads;
    const AttentionPlan* plans;  // of each shape of heads two: over all rows, and over the logits rows
    uint8_t* scratch;  // threads * scratch_bytes
    size_t scratch_bytes;
    // Quantised activations: of few rows each thread makes its own copy (own_blocks apart), of many they share one. Behind
    // the own copy is room for Table::regrouped_rows rows in another order.
    ActivationBlock *own, *shared;
    size_t own_blocks;
    // Recurrent layers: the first replayed row of each sequence [sequences + 1], and room for rows and states of a sequence.
    const int32_t* replay_starts;
    float* state_room;
    size_t state_room_floats;  // of each thread
};

struct Embed {
    Matrix table;
    const int32_t* tokens;  // those that another op wrote (below zero: the first one's row); or null: the step's
    float* out;
    int vocab;
    float scale;  // of the embeddings
};

struct RmsNorm {
    const float *x, *weight;
    uint16_t* out;
    int n;
    float eps;
    RowSet row_set;
};

// As RmsNorm, to floats: in place of them, or added to `out`, and times `scale`. Strides are in elements from one row to the
// next; `per_row` rows of x belong to a row of the step.
struct FloatNorm {
    const float *x, *weight;
    float* out;
    int n, stride, out_stride, per_row;
    float eps, scale;
    bool add;
    RowSet row_set;
};

// Rows of floats, or with `squared_relu` max(x, 0)^2 of them, rounded to bf16.
struct Narrow {
    const float* x;
    uint16_t* out;
    int n;
    bool squared_relu;
    RowSet row_set;
};

// x = cap * tanh(x / cap)
struct SoftCap {
    float* x;
    int n;
    float cap;
    RowSet row_set;
};

// Quantises the rows that the op after it reads, where they are too many for each thread to do so itself.
struct QuantiseRows {
    const uint16_t* x;
    int k;         // inputs of a row
    int per_row;   // rows of x per row of the step
    RowSet row_set;
    WeightFormat format;  // of the weights
};

struct Linear {
    const uint16_t* x;
    Matrix weight;
    const float* bias;  // in the order of the panels, padded; or null
    void* out;          // float, or bf16 when gated
    int n, stride;      // outputs (of one half when gated), and elements from one row of `out` to the next
    int panels;
    bool gated, add;
    Activation activation;  // when gated
    float scale;            // of the outputs, of the gate when gated
    RowSet row_set;
    Matrix next;  // weights of the linear op after this one, for prefetching; panels null if there is none
    int next_panels;
};

struct PerHead {
    const uint16_t* x;
    Matrix weight;
    uint16_t* out;
    int heads, n, step;  // of each head's `step` elements of out, n are written
};

// How a row's experts are selected from its logits; see arch/layers.py.
struct RoutingParams {
    int experts, top_k, groups, top_groups, group_best;
    bool sigmoid, normalised;
    float scale;
};

struct Router {
    const uint16_t* x;
    const float *weight, *bias;  // [experts, k], [experts]; bias null: none
    float* logits;
    int experts, k;
};

struct TopExperts {
    const float *logits, *bias, *scales;  // [experts], of the choice and of the shares; null: none
    int32_t* ids;
    float* shares;
    RoutingParams params;
};

// Pairs of row and expert (row * top_k + j) in the order of their experts, the experts that some row selected (hits), and
// where in that order each one's pairs begin: `starts` has one more entry than there are `hits`.
struct Groups {
    int32_t *order, *hits, *starts, *count;
};

struct Gather {
    const uint16_t* x;
    const int32_t* ids;
    uint16_t* out;  // [pairs, k]
    Groups groups;
    int experts, top_k, k;
};

struct ExpertsIn {
    const uint16_t* x;
    Matrix weight;  // gate and up of each expert, or up alone (relu2), panels of one after those of another
    const float* bias;  // [experts, panels * 32] in the order of the panels; or null
    uint16_t* out;  // [pairs, n]
    Groups groups;
    int top_k, n;
    Activation activation;
};

struct ExpertsOut {
    const uint16_t* x;
    Matrix weight;
    const float *shares, *bias;  // bias [experts, panels * 32]; or null
    float* out;  // [rows, n]
    Groups groups;
    int top_k, n;
};

// out += sigmoid(x . weight) * y: what shared experts behind a gate of their own add.
struct AddGated {
    const uint16_t* x;
    const float *weight, *y;  // [k], [rows, n]
    float* out;
    int k, n;
};

struct LatentWrite {
    const float *q, *kv, *table, *norm;
    float eps;
    CacheView cache;
    int layer, heads, positions, nope;
    uint16_t *q_nope, *query;
};

struct Rotary {
    const float *qkv, *table, *q_norm, *k_norm;  // norms null when absent
    float eps;
    CacheView cache;
    int layer, heads, positions;
    int rope_dim;  // the first dimensions of a head, which are rotated; 0: none, and no table
    int value_at;  // the head of a row at which values begin: behind the keys, or with them; -1: rows are queries alone
    bool norm_values;
    uint16_t* q;  // [max_rows, heads, d], also where the rows of qkv are those with logits
    RowSet row_set;
};

struct Attention {
    const uint16_t* q;
    CacheView cache;
    int layer, heads, window;  // window 0: none
    float scale;               // 0: by the head's size
    float soft_cap;            // scores become cap * tanh(score / cap); 0: they stay
    const float* sinks;        // [heads]: scores of a key without a value; or null
    uint16_t* out;
    RowSet row_set;
    std::atomic<int>* next;  // next work item
    int shape;               // which of the tape's shapes of heads it has
};

// Rows of a recurrent layer stand in buffers of 2 max_rows rows: replayed rows from the first on, those of the step from
// max_rows on. Replay copies the first from `saved`.
struct Replay {
    StateView states;
    int layer;
    float* x;  // [2 max_rows, width]
};

// How the columns of x behind the channels become the two gates of a head: `delta`, columns b and a: the step is sigmoid(b), the
// decay exp(rate * softplus(a + bias)); else, column a: the step is softplus(a + bias), the decay exp(rate * step).
struct GateRule {
    const float *rates, *bias;  // [heads]
    int heads;
    bool delta;
};

// A causal convolution of each channel over the last `taps` rows of a path, to out [2 max_rows, channels + 2 heads]; gates behind
// it, steps first. Keeps the tails, and saves what guesses were.
struct Convolve {
    StateView states;
    int layer;
    const float *x, *weight, *bias;  // weight [taps, channels]; bias [channels] or null
    float* out;
    GateRule gates;
    bool silu;
};

// The recurrence of a head over the rows of a path: S = decay S + k u^T and o = S^T q + skip v, with u = step (v - decay S^T k) if
// `delta`, else step v. With `delta` q and k are divided by their length, and q by the root of its size. S [key_dim][value_dim].
struct Recur {
    StateView states;
    int layer;
    const float* x;     // the out of Convolve
    const float* skip;  // [heads] or null
    float* out;         // [max_rows, heads * value_dim]
    int key_heads, q_at, k_at, v_at;  // columns of x at which they begin
    bool tiled;  // heads share every key_heads-th a key head; else neighbours do
    bool delta;
};

// out = rms_norm(x) * weight * silu(gate), by head of n elements; with `gate_first` rms_norm(x * silu(gate)) * weight; without a
// weight x * silu(gate).
struct GatedNorm {
    const float *x, *gate, *weight;  // [rows, heads * n], the same, [n], [heads * n] or null
    uint16_t* out;
    int heads, n, weight_stride;  // from head to head
    float eps;
    bool gate_first;
};

// out = x * y, or gelu(x) * y, by element, as floats or rounded to bf16. Strides are in elements from one row to the next. Of
// logits rows, x and out have these, y all.
struct Multiply {
    const float *x, *y;
    void* out;
    int n, stride, y_stride, out_stride;
    bool gelu, narrow;
    RowSet row_set;
};

// out = x + silu(y), rounded. Rows of `out` are `stride` elements apart.
struct AddSilu {
    const uint16_t* x;
    const float* y;
    uint16_t* out;
    int n, stride;
};

// x *= sigmoid(gate)
struct SigmoidGate {
    uint16_t* x;
    const float* gate;
    int n;
};

struct Select {
    const float* x;
    float* out;
    int n;
};

// Copies rows to floats, one row `stride` elements after the other; nothing while `out` is null (see Tape::redirect).
struct Copy {
    const void* x;  // float, or bf16 if `wide`
    float* out;
    int n, stride;
    bool wide;
};

struct Argmax {
    const float* logits;
    int32_t* out;
    int n;
};

// The noise that a request samples with, argmax(z / temperature + g), at a position; see Draw. Temperature 0: greedy, there is
// none.
struct RequestNoise {
    double temperature;
    uint64_t seed;
    uint32_t position, choice;
};

// The token of each row of logits [n], and its probability under their softmax. -1 and 0 if some logit is not finite.
struct Guess {
    const float* logits;
    const int32_t *ids, *halves;  // [n]: the target's id of each logit, and that by two; or null: they are the same
    RequestNoise* keys;           // [rows]
    int32_t* tokens;
    float* probabilities;
    int n, stride;  // elements from one row of logits to the next
    int ahead;      // added to the position
    RowSet row_set;
};

// A logit that penalties or biases of a request have changed.
struct Edit {
    int32_t id;
    double logit;
};

// One row of logits to be sampled from; `choice` is the index of the sequence among the n of its request. `edits` ascend by
// id; `logits` hold them rounded up. `excluded` are ids that are not drawn, the likeliest not among them. See sample.h.
struct Draw {
    const float* logits;
    int vocab;
    double temperature;
    uint64_t seed;
    uint32_t position, choice;
    const Edit* edits;
    const int32_t* excluded;
    int num_edits, num_excluded;
};

struct MaxLogit {
    float value;
    int32_t id;  // -1: some logit is not finite
};

struct ScoredToken {
    double score;
    int32_t id;
};

// Sums of exp((z - peak) / T): over all logits, and over those of at least a limit.
struct Masses {
    double all, least;
};

// What computes the rows of an op in a step that belong to a thread.
template <class Op>
struct Kernel {
    void (*run)(const Op&, const Step&, int thread);
};

template <class... Ops>
struct Kernels : Kernel<Ops>... {};

struct Table : Kernels<Embed, RmsNorm, FloatNorm, Narrow, SoftCap, QuantiseRows, Linear, PerHead, Router, TopExperts, Gather, ExpertsIn,
                       ExpertsOut, AddGated, LatentWrite, Rotary, Attention, Replay, Convolve, Recur, GatedNorm, Multiply, AddSilu,
                       SigmoidGate, Select, Copy, Argmax, Guess> {
    const char* name;
    MaxLogit (*max_logit)(const float* logits, int first, int last);
    ScoredToken (*draw)(const Draw&, MaxLogit top, int first, int last);
    ScoredToken (*draw_among)(const Draw&, const ScoredToken* ranked, int n);
    int (*at_least)(const float* logits, int first, int last, float limit, int32_t* ids);
    Masses (*masses)(const float* logits, int n, double peak, double temperature, double least);
    float (*sweep)(const float* data, int64_t first, int64_t last);
    int regrouped_rows;  // of quantised activations, for which each thread needs room
};

// Null when the build or the machine lacks the instruction set.
const Table* table_avx512();
const Table* table_avxvnni();
const Table* table_avx2();
const Table* table_i8mm();
const Table* table_neon();
const Table* table_portable();

}  // namespace wager
