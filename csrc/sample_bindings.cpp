// The bindings of sampling: several rows of which nothing but the temperature is to be known, and one with all that a request
// may ask for.
#include <nanobind/ndarray.h>

#include "row_sampler.h"
#include "sampling.h"
#include "step_bindings.h"

namespace nb = nanobind;
using namespace nb::literals;
using wager::Pool, wager::RowSampler;

namespace {

template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void sample(Pool& pool, const Isa& isa, Address logits, int vocab, Address rows, Address keys, int n, double greedy, Address out) {
    std::vector<wager::Draw> draws(n);
    for (int i = 0; i < n; ++i) {
        const wager::RequestNoise& key = at<const wager::RequestNoise>(keys)[i];
        const float* const row = at<const float>(logits) + static_cast<size_t>(at<const int32_t>(rows)[i]) * vocab;
        draws[i] = {row, vocab, key.temperature, key.seed, key.position, key.choice, nullptr, nullptr, 0, 0};
    }
    nb::gil_scoped_release release;
    wager::sample_rows(pool, *isa.table, draws, greedy, at<int32_t>(out));
}

int32_t sample_row(RowSampler& self, const Isa& isa, const Vector<float>& logits, double temperature, uint64_t seed,
                   uint32_t position, uint32_t choice, int64_t top_k, double top_p, double min_p, const Vector<int64_t>& edited_ids,
                   const Vector<double>& edited_logits, const std::optional<Vector<int64_t>>& allowed, double greedy) {
    if (edited_ids.size() != edited_logits.size()) throw std::invalid_argument("one logit for each id");
    const wager::Draw draw{logits.data(), static_cast<int>(logits.size()), temperature, seed, position, choice, nullptr, nullptr, 0, 0};
    std::vector<wager::Edit> edits;
    for (size_t i = 0; i < edited_ids.size(); ++i)
        edits.push_back({static_cast<int32_t>(edited_ids.data()[i]), edited_logits.data()[i]});
    const wager::Allowed ids = allowed ? wager::Allowed{allowed->data(), static_cast<int64_t>(allowed->size())} : wager::Allowed{};
    nb::gil_scoped_release release;
    const wager::FloatModes modes;
    return self.sample(*isa.table, draw, {top_k, top_p, min_p}, edits, ids, greedy);
}

}  // namespace

void bind_sample(nb::module_& m) {
    m.def("sample", &sample);
    nb::class_<RowSampler>(m, "RowSampler").def(nb::init<>()).def(
        "sample", &sample_row, "isa"_a, "logits"_a, "temperature"_a, "seed"_a, "position"_a, "choice"_a, "top_k"_a, "top_p"_a,
        "min_p"_a, "edited_ids"_a, "edited_logits"_a, "allowed"_a, "greedy"_a);
}
