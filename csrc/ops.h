// What a tape records: one plain struct per op, the step they run over, and the table of kernels of one instruction set.
// Shapes are in kernels/base.py. bf16 is carried as uint16_t. Nothing here owns memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace wager {

constexpr int kPage = 16;      // tokens per cache page
constexpr int kKeyBlock = 64;  // keys that share one running maximum
constexpr int kSegment = 256;  // keys whose softmax is a unit of work; segments are folded in order
constexpr int kPanel = 32;     // outputs per packed panel of weights
constexpr int kMaxExperts = 1024;
constexpr int kRowHeads = 24;  // (row, query head) pairs that share the loads of a key page

enum class Of { rows, heads };

// Keys of a page and kv head: [d/2][16 keys][2]; values: [16/2][d][2]; so both products pair along their sum. A latent
// cache has no values: those are the first value_dim dimensions of its keys, turned as they are needed.
struct CacheView {
    uint16_t* keys;
    uint16_t* values;
    int layers, pages, kv_heads, head_dim, value_dim;

    size_t offset(int layer, int page, int head) const {
        return ((static_cast<size_t>(layer) * pages + page) * kv_heads + head) * kPage * head_dim;
    }
};

struct Inputs {
    const int32_t *tokens, *positions, *parents, *slot_mapping, *seq_ids, *logits_indices, *query_start_loc,
        *num_computed_tokens, *block_tables;
    int max_rows, max_sequences, max_pages;
};

// How attention cuts the rows of a step: tiles of consecutive rows of one sequence, and for rows of a tree the page from
// which their keys must be gathered into path order (kDirect: their keys already lie in position order).
struct AttentionPlan {
    static constexpr int32_t kDirect = INT32_MAX;
    const int32_t* tile_rows;   // [tiles] first row
    const int32_t* tile_sizes;  // [tiles]
    const int32_t* tails;       // [rows]
    int tiles;
    int tail_pages;  // room in the scratch memory per row
    // Where segments are handed out one by one: how many at most (0: they are not), their states, and how many are done.
    int segments;
    float* parts;
    std::atomic<int>* done;  // [tiles * kv_heads]
};

struct Step {
    Inputs in;
    int rows, sequences, head_rows, threads;
    AttentionPlan plan;
    uint8_t* scratch;  // threads * scratch_bytes
    size_t scratch_bytes;

    int count(Of of) const { return of == Of::rows ? rows : head_rows; }
};

struct Embed {
    const uint16_t* table;
    float* out;
    int vocab, hidden;
};

struct RmsNorm {
    const float *x, *weight;
    uint16_t* out;
    int n;
    float eps;
    Of of;
};

struct Linear {
    const uint16_t *x, *weight;
    const float* bias;  // in the order of the panels, padded; or null
    void* out;          // float, or bf16 when gated
    int n, k;           // outputs (of one half when gated), inputs
    int panels;
    bool gated, add;
    Of of;
    const uint16_t* next_weight;  // of the linear op after this one, to be fetched ahead; or null
    size_t next_panel;            // its elements per panel
    int next_panels;

    size_t panel_elements() const { return static_cast<size_t>(k) * kPanel; }
};

struct PerHead {
    const uint16_t *x, *weight;
    uint16_t* out;
    int heads, n, k, step;  // of each head's `step` elements of out, n are written
};

// How a row's experts are chosen from its logits; see models/spec.py.
struct Choice {
    int experts, chosen, groups, top_groups, group_best;
    bool sigmoid, normalised;
    float scale;
};

struct Router {
    const uint16_t* x;
    const float* weight;  // [experts, k]
    float* logits;
    int experts, k;
};

struct Choose {
    const float *logits, *bias;  // bias null: none
    int32_t* ids;
    float* shares;
    Choice how;
};

// Choices (row * chosen + j) in the order of their experts, the experts that some row chose, and where in that order
// each one's choices begin: `starts` has one more entry than there are `hits`.
struct Groups {
    int32_t *order, *hits, *starts, *count;
};

struct Gather {
    const uint16_t* x;
    const int32_t* ids;
    uint16_t* out;  // [choices, k]
    Groups groups;
    int experts, chosen, k;
};

struct ExpertsIn {
    const uint16_t *x, *weight;  // weight: gate and up of each expert, panels of one after those of another
    uint16_t* out;               // [choices, n]
    Groups groups;
    int n, k;
};

struct ExpertsOut {
    const uint16_t *x, *weight;
    const float* shares;
    float* out;  // [rows, n]
    Groups groups;
    int chosen, n, k;
};

struct LatentWrite {
    const float *q, *kv, *table, *norm;
    float eps;
    CacheView cache;
    int layer, heads, positions, nope;
    uint16_t *plain, *query;
};

struct Rotary {
    const float *qkv, *table, *q_norm, *k_norm;  // norms null when absent
    float eps;
    CacheView cache;
    int layer, heads, positions;
    uint16_t* q;
};

struct Attention {
    const uint16_t* q;
    CacheView cache;
    int layer, heads, window;  // window 0: none
    float scale;               // 0: by the head's size
    uint16_t* out;
    std::atomic<int>* next;  // work items handed out
};

struct Select {
    const float* x;
    float* out;
    int n;
};

struct Argmax {
    const float* logits;
    int32_t* out;
    int n;
};

// One part of the vocabulary of one row to be sampled from; see philox.h and sample.h.
struct Draw {
    const float* logits;
    int vocab;
    double temperature;
    uint64_t seed;
    uint32_t position, choice;
};

struct Peak {
    float value;
    int32_t id;  // -1: some logit is not finite
};

struct Winner {
    double score;
    int32_t id;
};

struct Table {
    const char* name;
    void (*embed)(const Embed&, const Step&, int thread);
    void (*rms_norm)(const RmsNorm&, const Step&, int thread);
    void (*linear)(const Linear&, const Step&, int thread);
    void (*per_head)(const PerHead&, const Step&, int thread);
    void (*router)(const Router&, const Step&, int thread);
    void (*choose)(const Choose&, const Step&, int thread);
    void (*gather)(const Gather&, const Step&, int thread);
    void (*experts_in)(const ExpertsIn&, const Step&, int thread);
    void (*experts_out)(const ExpertsOut&, const Step&, int thread);
    void (*latent)(const LatentWrite&, const Step&, int thread);
    void (*rotary)(const Rotary&, const Step&, int thread);
    void (*attention)(const Attention&, const Step&, int thread);
    void (*select)(const Select&, const Step&, int thread);
    void (*argmax)(const Argmax&, const Step&, int thread);
    Peak (*peak)(const float* logits, int first, int last);
    Winner (*draw)(const Draw&, Peak top, int first, int last);
    float (*sweep)(const float* data, int64_t first, int64_t last);
};

// Null when the build or the machine lacks the instruction set.
const Table* table_avx512();
const Table* table_avx2();
const Table* table_portable();

// Rows of a sequence that one attention tile holds, its row-heads, the floats of its state, and a thread's scratch bytes.
inline int tile_rows(int group) { return group > kRowHeads ? 1 : kRowHeads / group; }
inline size_t tile_height(int group) { return group > kRowHeads ? group : kRowHeads; }
inline size_t state_floats(int group, int head_dim) {
    const size_t height = tile_height(group);
    return height * (static_cast<size_t>(head_dim) + 16) + (height + 15) / 16 * 16;
}
inline size_t attention_scratch(int group, int head_dim, int tail_pages) {
    const size_t height = tile_height(group), d = head_dim;
    const size_t floats = height * kKeyBlock + 2 * state_floats(group, head_dim);
    // Per row: keys and values of its tail, values fit to be read; and one page of latents turned into values.
    const size_t pages = tile_rows(group) * (size_t{2} * tail_pages + 1) + 1;
    const size_t halves = height * (d + kKeyBlock) + pages * kPage * d;
    return (floats * 4 + halves * 2 + 4095) / 4096 * 4096;
}

inline int64_t part(int64_t total, int index, int parts) { return total * index / parts; }

}  // namespace wager
