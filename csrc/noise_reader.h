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
        static const auto greedy = nanobind::cast<double>(nanobind::module_::import_("wager.types").attr("GREEDY_TEMPERATURE"));
        const nanobind::object params = params_.require(request.ptr());
        const auto temperature = nanobind::cast<double>(temperature_.require(params.ptr()));
        if (temperature <= greedy || needs_draft_probs(request)) return {};
        return with(temperature, request);
    }
    bool needs_draft_probs(nanobind::handle request) const {
        return nanobind::cast<bool>(needs_draft_probs_.require(request.ptr()));
    }
    RequestNoise with(double temperature, nanobind::handle request) const {
        return {temperature, nanobind::cast<uint64_t>(seed_.require(request.ptr())),
                nanobind::cast<uint32_t>(position_.require(request.ptr())), nanobind::cast<uint32_t>(choice_.require(request.ptr()))};
    }

  private:
    const Name params_{"params"}, needs_draft_probs_{"needs_draft_probs"}, temperature_{"temperature"}, seed_{"seed"},
        position_{"position"}, choice_{"choice"};
};

}  // namespace wager
