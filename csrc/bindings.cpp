// The Python bindings: addresses of tensors come in as integers, checked for type and shape by kernels/tape.py.
#include <nanobind/ndarray.h>

#include "memory.h"
#include "ops.h"
#include "pack.h"
#include "pool.h"
#include "sizes.h"
#include "slots.h"
#include "step_bindings.h"
#include "tape.h"

namespace nb = nanobind;
using namespace nb::literals;
using wager::Buffer, wager::CacheView, wager::Pool, wager::StateView, wager::Tape;

namespace {

wager::RowSet row_set(bool logits) { return logits ? wager::RowSet::logits : wager::RowSet::rows; }

const wager::Table* find_table(const std::string& name) {
    if (name == "avx512") return wager::table_avx512();
    if (name == "avxvnni") return wager::table_avxvnni();
    if (name == "avx2") return wager::table_avx2();
    if (name == "i8mm") return wager::table_i8mm();
    if (name == "neon") return wager::table_neon();
    if (name == "portable") return wager::table_portable();
    return nullptr;
}

constexpr const char* kFormatNames[] = {"bf16",   "q8_0",   "q4_0",  "q4_1",    "q5_0",  "q5_1",    "q4_k", "q5_k", "q6_k",   "q2_k",
                                        "q3_k",   "iq4_nl", "iq4_xs", "iq3_s", "iq3_xxs", "iq2_s", "iq2_xxs", "iq1",  "q4_z", "q4_z128",  "mxfp4",
                                        "e4m3",   "e4m3_128"};

wager::WeightFormat format_of(const std::string& name) {
    for (int i = 0; i < static_cast<int>(std::size(kFormatNames)); ++i)
        if (name == kFormatNames[i]) return static_cast<wager::WeightFormat>(i);
    throw std::invalid_argument("no weight format " + name);
}

// rows: the addresses of panels * 32 rows as they are stored, 0 for an output that is zero. Panels begin `from` bytes in.
void pack(Pool& pool, const std::string& format, Address rows, int panels, int k, const Buffer& to, size_t from) {
    const wager::WeightFormat kind = format_of(format);
    if (k < 1 || k % wager::input_multiple(kind)) throw std::invalid_argument("rows of " + std::to_string(k) + " inputs");
    if (to.size() < from + panels * wager::panel_bytes(kind, k)) throw std::invalid_argument("the buffer is too small");
    nb::gil_scoped_release release;
    wager::pack_rows(pool, kind, at<const uint8_t* const>(rows), panels, k, to.data() + from);
}

wager::Activation activation_of(const std::string& name) {
    if (name == "silu") return wager::Activation::silu;
    if (name == "gelu") return wager::Activation::gelu;
    if (name == "clamped") return wager::Activation::clamped;
    if (name == "relu2") return wager::Activation::relu2;
    throw std::invalid_argument("no activation " + name);
}

wager::Matrix matrix(Address panels, const std::string& format, int k) { return {at<const uint8_t>(panels), format_of(format), k}; }

// Reads a buffer once with all threads; the sum is returned so that the compiler cannot drop the reads.
double sweep(Pool& pool, const Isa& isa, const Buffer& buffer) {
    nb::gil_scoped_release release;
    std::vector<float> sums(pool.threads());
    const int64_t n = static_cast<int64_t>(buffer.size() / 4);
    pool.run(1, [&](int, int thread, int threads) {
        sums[thread] = isa.table->sweep(reinterpret_cast<const float*>(buffer.data()), wager::part(n, thread, threads),
                                        wager::part(n, thread + 1, threads));
    });
    double total = 0;
    for (const float value : sums) total += value;
    return total;
}

void bind_tape(nb::module_& m) {
    nb::class_<Tape>(m, "Tape")
        .def("__init__",
             [](Tape* self, std::shared_ptr<Pool> pool, const Isa& isa, nb::tuple inputs, int max_rows,
                int max_sequences, int max_blocks, bool whole_spans) {
                 const auto in = [&](int i) { return at<int32_t>(nb::cast<Address>(inputs[i])); };
                 const wager::BatchBuffers all{in(0), in(1), in(2), in(3), in(4), in(5), in(6), in(7), in(8),
                                         in(9), in(10), max_rows, max_sequences, max_blocks};
                 new (self) Tape(std::move(pool), isa.table, all, whole_spans);
             })
        .def("embed", [](Tape& t, Address table, const std::string& format, int vocab, int hidden, Address tokens, Address out,
                         float scale) {
            t.record(wager::Embed{matrix(table, format, hidden), at<const int32_t>(tokens), at<float>(out), vocab, scale});
        })
        .def("rms_norm", [](Tape& t, Address x, Address weight, int n, float eps, Address out, bool logits) {
            const auto rows = row_set(logits);
            t.record(wager::RmsNorm{at<const float>(x), at<const float>(weight), at<uint16_t>(out), n, eps, rows});
        })
        .def("float_norm", [](Tape& t, Address x, Address weight, int n, int stride, int per_row, float eps, Address out,
                              int out_stride, float scale, bool add, bool logits) {
            t.record(wager::FloatNorm{at<const float>(x), at<const float>(weight), at<float>(out), n, stride, out_stride, per_row,
                                      eps, scale, add, row_set(logits)});
        })
        .def("narrow", [](Tape& t, Address x, Address out, int n, bool squared_relu, bool logits) {
            t.record(wager::Narrow{at<const float>(x), at<uint16_t>(out), n, squared_relu, row_set(logits)});
        })
        .def("soft_cap", [](Tape& t, Address x, int n, float cap, bool logits) {
            t.record(wager::SoftCap{at<float>(x), n, cap, row_set(logits)});
        })
        .def("linear", [](Tape& t, Address x, Address weight, const std::string& format, Address bias, int n, int k, int panels,
                          bool gated, const std::string& activation, bool add, float scale, Address out, int stride, bool logits) {
            t.record(wager::Linear{at<const uint16_t>(x), matrix(weight, format, k), at<const float>(bias), at<void>(out), n,
                                   stride, panels, gated, add, activation_of(activation), scale, row_set(logits), {}, 0});
        })
        .def("per_head", [](Tape& t, Address x, Address weight, const std::string& format, int heads, int n, int k, int step,
                            Address out) {
            t.record(wager::PerHead{at<const uint16_t>(x), matrix(weight, format, k), at<uint16_t>(out), heads, n, step});
        })
        .def("route", [](Tape& t, Address x, Address weight, Address logit_bias, Address bias, Address scales, int hidden,
                         nb::tuple params, float scale, Address logits, Address ids, Address shares) {
            const auto of = [&](int i) { return nb::cast<int>(params[i]); };
            const wager::RoutingParams routing{of(0), of(1), of(2), of(3), of(4), of(5) != 0, of(6) != 0, scale};
            const auto scores = at<float>(logits);
            t.record(wager::Router{at<const uint16_t>(x), at<const float>(weight), at<const float>(logit_bias), scores,
                                   routing.experts, hidden});
            t.record(wager::TopExperts{scores, at<const float>(bias), at<const float>(scales), at<int32_t>(ids), at<float>(shares), routing});
        })
        .def("experts", [](Tape& t, Address x, nb::tuple into, nb::tuple down, int hidden, int width, int experts, int top_k,
                           int rows, nb::tuple routing, const std::string& activation, Address out) {
            const auto of = [&](int i) { return nb::cast<Address>(routing[i]); };
            const auto weights = [](nb::tuple of, int k) {
                return matrix(nb::cast<Address>(of[0]), nb::cast<std::string>(of[1]), k);
            };
            int32_t *const order = at<int32_t>(of(2)), *const hits = order + static_cast<size_t>(rows) * top_k;
            const wager::Groups groups{order, hits, hits + experts, hits + 2 * experts + 1};
            const auto gathered = at<uint16_t>(of(3)), inner = at<uint16_t>(of(4));
            t.record(wager::Gather{at<const uint16_t>(x), at<const int32_t>(of(0)), gathered, groups, experts, top_k, hidden});
            const auto bias = [](nb::tuple of) { return at<const float>(nb::cast<Address>(of[2])); };
            t.record(wager::ExpertsIn{gathered, weights(into, hidden), bias(into), inner, groups, top_k, width,
                                      activation_of(activation)});
            t.record(wager::ExpertsOut{inner, weights(down, width), at<const float>(of(1)), bias(down), at<float>(out), groups,
                                       top_k, hidden});
        })
        .def("add_gated", [](Tape& t, Address x, Address weight, int k, Address y, int n, Address out) {
            t.record(wager::AddGated{at<const uint16_t>(x), at<const float>(weight), at<const float>(y), at<float>(out), k, n});
        })
        .def("latent", [](Tape& t, Address q, Address kv, Address table, int positions, Address norm, float eps,
                          const CacheView& cache, int layer, int heads, int nope, Address q_nope, Address query) {
            t.record(wager::LatentWrite{at<const float>(q), at<const float>(kv), at<const float>(table),
                                        at<const float>(norm), eps, cache, layer, heads, positions, nope,
                                        at<uint16_t>(q_nope), at<uint16_t>(query)});
        })
        .def("rotary", [](Tape& t, Address qkv, Address table, int positions, Address q_norm, Address k_norm, float eps,
                          const CacheView& cache, int layer, int heads, int rope_dim, int value_at, bool norm_values, Address q,
                          bool logits) {
            t.record(wager::Rotary{at<const float>(qkv), at<const float>(table), at<const float>(q_norm),
                                   at<const float>(k_norm), eps, cache, layer, heads, positions, rope_dim,
                                   value_at, norm_values, at<uint16_t>(q), row_set(logits)});
        })
        .def("attention", [](Tape& t, Address q, const CacheView& cache, int layer, int heads, int window, float scale,
                             float soft_cap, Address sinks, Address out, bool logits) {
            t.record(wager::Attention{at<const uint16_t>(q), cache, layer, heads, window, scale, soft_cap,
                                      at<const float>(sinks), at<uint16_t>(out),
                                      row_set(logits), nullptr, 0});
        })
        .def("replay", [](Tape& t, const StateView& states, int layer, Address x) {
            t.record(wager::Replay{states, layer, at<float>(x)});
        })
        .def("convolve", [](Tape& t, const StateView& states, int layer, Address x, Address weight, Address bias, Address rates,
                            Address gate_bias, int heads, bool delta, bool silu, Address out) {
            const wager::GateRule gates{at<const float>(rates), at<const float>(gate_bias), heads, delta};
            t.record(wager::Convolve{states, layer, at<const float>(x), at<const float>(weight), at<const float>(bias),
                                     at<float>(out), gates, silu});
        })
        .def("recur", [](Tape& t, const StateView& states, int layer, Address x, Address skip, int key_heads, int q_at, int k_at,
                         int v_at, bool tiled, bool delta, Address out) {
            t.record(wager::Recur{states, layer, at<const float>(x), at<const float>(skip), at<float>(out), key_heads, q_at, k_at,
                                  v_at, tiled, delta});
        })
        .def("gated_norm", [](Tape& t, Address x, Address gate, Address weight, float eps, int heads, int n, int weight_stride,
                              bool gate_first, Address out) {
            t.record(wager::GatedNorm{at<const float>(x), at<const float>(gate), at<const float>(weight), at<uint16_t>(out), heads, n,
                                      weight_stride, eps, gate_first});
        })
        .def("multiply", [](Tape& t, Address x, int stride, Address y, int y_stride, int n, Address out, int out_stride, bool gelu,
                            bool narrow, bool logits) {
            t.record(wager::Multiply{at<const float>(x), at<const float>(y), at<void>(out), n, stride, y_stride, out_stride, gelu, narrow,
                                       row_set(logits)});
        })
        .def("add_silu", [](Tape& t, Address x, Address y, int n, Address out, int stride) {
            t.record(wager::AddSilu{at<const uint16_t>(x), at<const float>(y), at<uint16_t>(out), n, stride});
        })
        .def("sigmoid_gate", [](Tape& t, Address x, Address gate, int n) {
            t.record(wager::SigmoidGate{at<uint16_t>(x), at<const float>(gate), n});
        })
        .def("select", [](Tape& t, Address x, Address out, int n) {
            t.record(wager::Select{at<const float>(x), at<float>(out), n});
        })
        .def("copy", [](Tape& t, Address x, Address out, int n, int stride, bool wide) {
            return t.record(wager::Copy{at<const void>(x), at<float>(out), n, stride, wide});
        })
        .def("redirect", [](Tape& t, size_t copy, Address out, int stride) { t.redirect(copy, at<float>(out), stride); })
        .def("argmax", [](Tape& t, Address logits, Address out, int n) {
            t.record(wager::Argmax{at<const float>(logits), at<int32_t>(out), n});
        })
        .def("guess", [](Tape& t, Address logits, int stride, int n, Address ids, Address halves, Address keys, int ahead,
                         Address tokens, Address probabilities, bool logits_rows) {
            t.record(wager::Guess{at<const float>(logits), at<const int32_t>(ids), at<const int32_t>(halves),
                                  at<wager::RequestNoise>(keys), at<int32_t>(tokens), at<float>(probabilities), n, stride, ahead,
                                  row_set(logits_rows)});
        })
        .def("run", &Tape::run, nb::call_guard<nb::gil_scoped_release>(), "rows"_a, "sequences"_a, "logits_rows"_a, "first"_a,
             "last"_a)
        .def("feed", [](Tape& t, size_t first, Address fed, bool narrow, Address state, int n) {
            t.feed(first, at<const void>(fed), narrow, at<float>(state), n);
        })
        .def_prop_ro("ops", &Tape::ops);
}

void bind_cache(nb::module_& m) {
    nb::class_<CacheView>(m, "CacheView")
        .def("__init__", [](CacheView* self, const Buffer& keys, const Buffer& values, int layers, int num_blocks, int kv_heads,
                            int d, bool q8) {
            const CacheView view{reinterpret_cast<uint16_t*>(keys.data()), reinterpret_cast<uint16_t*>(values.data()), layers,
                                 num_blocks, kv_heads, d, d, q8};
            const size_t bytes = size_t{2} * layers * num_blocks * kv_heads * wager::cache_block(view);
            if (keys.size() < bytes || values.size() < bytes) throw std::invalid_argument("the cache's memory is too small");
            new (self) CacheView(view);
        }, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
        .def_static("latent", [](const Buffer& keys, int layers, int num_blocks, int rank, int rope) {
            const size_t bytes = size_t{2} * layers * num_blocks * wager::kBlockSize * (rank + rope);
            if (keys.size() < bytes) throw std::invalid_argument("the cache's memory is too small");
            return CacheView{reinterpret_cast<uint16_t*>(keys.data()), nullptr, layers, num_blocks, 1, rank + rope, rank, false};
        }, nb::keep_alive<0, 1>())
        .def("move", [](const CacheView& cache, Pool& pool, Address source, Address target, int n) {
            nb::gil_scoped_release release;
            wager::move_slots(pool, cache, at<const int32_t>(source), at<const int32_t>(target), n);
        })
        .def("read", [](const CacheView& cache, int slot, Address out) { wager::read_slot(cache, slot, at<float>(out)); })
        .def("clear", [](const CacheView& cache, int block) { wager::clear_block(cache, block); });
}

void bind_states(nb::module_& m) {
    nb::class_<StateView>(m, "StateView")
        .def("__init__", [](StateView* self, const Buffer& tails, const Buffer& heads, const Buffer& saved, nb::tuple sizes) {
            const auto of = [&](int i) { return nb::cast<int>(sizes[i]); };
            const StateView view{reinterpret_cast<float*>(tails.data()), reinterpret_cast<float*>(heads.data()),
                                 reinterpret_cast<float*>(saved.data()), of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7), of(8)};
            const size_t slots = sizeof(float) * view.layers * view.slots;
            const bool fits = tails.size() >= slots * (view.taps - 1) * view.channels &&
                              heads.size() >= slots * view.num_heads * view.key_dim * view.value_dim &&
                              saved.size() >= sizeof(float) * view.layers * view.max_rows * view.width;
            if (!fits) throw std::invalid_argument("the states' memory is too small");
            new (self) StateView(view);
        }, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>());
}

// Times in nanoseconds.
void bind_thread_limit(nb::module_& m) {
    using wager::Clock, wager::ThreadLimit, std::chrono::nanoseconds;
    nb::class_<ThreadLimit>(m, "ThreadLimit")
        .def(nb::init<int>(), "threads"_a)
        .def_prop_ro("limit", &ThreadLimit::limit)
        .def("begin", [](ThreadLimit& limit, int64_t now) { limit.begin(Clock::time_point(nanoseconds(now))); })
        .def("woke", &ThreadLimit::woke)
        .def("worked", [](ThreadLimit& limit, int64_t now, int team, int64_t waited) {
            limit.worked(Clock::time_point(nanoseconds(now)), team, nanoseconds(waited));
        }, "now"_a, "team"_a, "waited"_a);
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // kernels kept in a module's globals outlive the interpreter, and may
    nb::class_<Buffer>(m, "Buffer")
        .def(nb::init<size_t, bool>(), "bytes"_a, "huge_pages"_a = true)
        .def_prop_ro("address", [](const Buffer& b) { return reinterpret_cast<Address>(b.data()); })
        .def_prop_ro("nbytes", &Buffer::size);
    nb::class_<Pool>(m, "Pool")
        .def(nb::init<int, bool>(), "threads"_a, "always_all"_a = false)
        .def_prop_ro("threads", &Pool::threads)
        // How many threads share each of some stages, on which the caller alone works. For tests.
        .def("team_sizes", [](Pool& pool, int stages, int64_t nanoseconds) {
            std::vector<int> sizes(stages);
            pool.run(stages, [&](int stage, int thread, int threads) {
                if (thread != 0) return;
                sizes[stage] = threads;
                for (const auto begun = wager::Clock::now(); wager::Clock::now() - begun < std::chrono::nanoseconds(nanoseconds);) {}
            });
            return sizes;
        }, "stages"_a, "nanoseconds"_a, nb::call_guard<nb::gil_scoped_release>());
    bind_thread_limit(m);
    nb::class_<Isa>(m, "Isa")
        .def("__init__", [](Isa* self, const std::string& name) {
            const wager::Table* table = find_table(name);
            if (table == nullptr) throw std::invalid_argument(name);
            new (self) Isa{table};
        })
        .def_prop_ro("name", [](const Isa& isa) { return std::string(isa.table->name); })
        .def_static("has", [](const std::string& name) { return find_table(name) != nullptr; });
    m.attr("weight_layout_version") = wager::kWeightLayoutVersion;
    m.def("pack", &pack);
    m.def("panel_bytes", [](const std::string& format, int k) { return wager::panel_bytes(format_of(format), k); });
    m.def("input_multiple", [](const std::string& format) { return wager::input_multiple(format_of(format)); });
    m.def("sweep", &sweep);
    bind_cache(m);
    bind_states(m);
    bind_tape(m);
    bind_step(m);
    bind_match(m);
    bind_sample(m);
    bind_state(m);
    bind_stages(m);
    bind_ngrams(m);
    bind_policy(m);
    bind_lookup(m);
    bind_recycling(m);
    bind_heads(m);
    bind_drafts(m);
}
