// The noise of a draft request, and the rules of coupling, as Python gives them.
#pragma once

#include <tuple>

#include "coupling.h"
#include "values.h"

namespace wager {

using Coupling = std::tuple<double, double, double, double>;  // draft/coupling.py: Coupling

inline CouplingRules coupling_rules(const Coupling& given) {
    return {std::get<0>(given), std::get<1>(given), std::get<2>(given), std::get<3>(given)};
}

// Greedy too where the rule needs what a guess was drawn from: it accepts the likeliest token most often.
class NoiseReader {
  public:
    RequestNoise of(nanobind::handle request) const {
        const nanobind::object params = read(params_, request);
        if (nanobind::cast<bool>(read(greedy_, params)) || nanobind::cast<bool>(read(needs_draft_probs_, request))) return {};
        return {nanobind::cast<double>(read(temperature_, params)), nanobind::cast<uint64_t>(read(seed_, request)),
                nanobind::cast<uint32_t>(read(position_, request)), nanobind::cast<uint32_t>(read(choice_, request))};
    }

  private:
    static nanobind::object read(const Name& name, nanobind::handle of) {
        nanobind::object value = name.of(of.ptr());
        if (!value.is_valid()) throw nanobind::python_error();
        return value;
    }

    const Name params_{"params"}, greedy_{"greedy"}, needs_draft_probs_{"needs_draft_probs"}, temperature_{"temperature"},
        seed_{"seed"}, position_{"position"}, choice_{"choice"};
};

}  // namespace wager
