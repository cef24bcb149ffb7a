// The bindings of token recycling.
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "noise_reader.h"
#include "step_bindings.h"
#include "successors.h"

namespace nb = nanobind;
using wager::Successors;

namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Tree = std::tuple<std::vector<int32_t>, std::vector<int32_t>, std::vector<double>>;

void update(Successors& self, const std::vector<int32_t>& tokens, const Logits& logits) {
    if (tokens.size() != logits.shape(0) || logits.shape(1) != static_cast<size_t>(self.vocab()))
        throw std::invalid_argument("one row of logits of the vocabulary for each token");
    for (size_t row = 0; row < tokens.size(); ++row) self.update(tokens[row], logits.data() + row * logits.shape(1));
}

// `request`: whose noise the guesses follow; None: of none.
Tree draft(Successors& self, int32_t last, int most, nb::handle request) {
    static const wager::NoiseReader reader;
    const wager::RequestNoise noise = request.is_none() ? wager::RequestNoise() : reader.of(request);
    Tree tree;
    if (noise.greedy())
        self.draft(last, most, std::get<0>(tree), std::get<1>(tree), std::get<2>(tree));
    else
        self.draft_sampled(last, most, noise, std::get<0>(tree), std::get<1>(tree), std::get<2>(tree));
    return tree;
}

}  // namespace

void bind_recycling(nb::module_& m) {
    nb::class_<Successors>(m, "Successors")
        .def("__init__", [](Successors* self, int vocab, std::vector<double> rates, double prior_weight, double min_survival,
                           double weight, double min_sampled, const wager::Coupling& coupling) {
            if (vocab < 1 || rates.size() != Successors::kRanks) throw std::invalid_argument("a vocabulary, and a rate for each rank");
            new (self) Successors(vocab, std::move(rates), prior_weight, min_survival, weight, min_sampled, wager::coupling_rules(coupling));
        }, nb::arg("vocab"), nb::arg("rates"), nb::arg("prior_weight"), nb::arg("min_survival"), nb::arg("weight"), nb::arg("min_sampled"), nb::arg("coupling"))
        .def("update", &update)
        .def("draft", &draft, nb::arg("last"), nb::arg("most"), nb::arg("request").none() = nb::none());
}
