// The bindings of token recycling.
#include <nanobind/ndarray.h>

#include <cstring>
#include <string>
#include <utility>

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
    const wager::RequestNoise noise = request.is_none() ? wager::RequestNoise{} : reader.of(request);
    Tree tree;
    if (wager::greedy(noise))
        self.draft(last, most, std::get<0>(tree), std::get<1>(tree), std::get<2>(tree));
    else
        self.draft_sampled(last, most, noise, std::get<0>(tree), std::get<1>(tree), std::get<2>(tree));
    return tree;
}

// The table and the rates as bytes, and back: false if they are not those of this vocabulary.
nb::bytes state(const Successors& self) {
    const auto& [ids, rates, tried] = self.parts();
    std::string bytes(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(int32_t));
    bytes.append(reinterpret_cast<const char*>(rates.data()), rates.size() * sizeof(double));
    bytes.append(reinterpret_cast<const char*>(&tried), sizeof(double));
    return nb::bytes(bytes.data(), bytes.size());
}

bool restore(Successors& self, const nb::bytes& state) {
    std::vector<int32_t> ids(static_cast<size_t>(self.vocab()) * Successors::kRanks);
    std::vector<double> rates(Successors::kRanks);
    double tried = 0.0;
    const char* from = state.c_str();
    const size_t sizes[] = {ids.size() * sizeof(int32_t), rates.size() * sizeof(double), sizeof(double)};
    if (state.size() != sizes[0] + sizes[1] + sizes[2]) return false;
    std::memcpy(ids.data(), from, sizes[0]);
    std::memcpy(rates.data(), from + sizes[0], sizes[1]);
    std::memcpy(&tried, from + sizes[0] + sizes[1], sizes[2]);
    return self.set_parts(std::move(ids), std::move(rates), tried);
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
        .def("state", &state)
        .def("restore", &restore)
        .def("draft", &draft, nb::arg("last"), nb::arg("most"), nb::arg("request").none() = nb::none());
}
