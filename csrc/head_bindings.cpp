// The bindings of heads on the target's states: what they keep of sequences, and their rounds.
#include <memory>

#include "head_rounds.h"
#include "noise_reader.h"
#include "step_bindings.h"
#include "values.h"

namespace nb = nanobind;
using namespace nb::literals;
using wager::BlockPool, wager::Elements, wager::HeadRounds, wager::HeadSequence, wager::Name, wager::Tape;

namespace {

// `taps` are arrays f32 [rows of the pass, width] of which a state has one row of each; `rows` those of the positions from `start`.
int64_t read_states(HeadSequence& self, nb::list taps, int64_t start, nb::handle rows) {
    std::vector<int64_t> picked;
    wager::read_ints(wager::listed(rows, "rows must be a sequence"), picked);
    std::vector<std::unique_ptr<Elements>> held;
    std::vector<const float*> from;
    const size_t parts = nb::len(taps), width = parts > 0 ? self.width() / parts : 0;
    if (width * parts != static_cast<size_t>(self.width())) throw std::invalid_argument("a state has another width");
    for (nb::handle tap : taps) {
        held.push_back(std::make_unique<Elements>(tap, 2, "f", 4));
        if (held.back()->size(1) != width) throw std::invalid_argument("a tap has another width");
        for (const int64_t row : picked)
            if (row < 0 || row >= static_cast<int64_t>(held.back()->size(0))) throw std::out_of_range("a row outside the pass");
        from.push_back(held.back()->data<const float>());
    }
    return self.read(from, start, picked);
}

std::vector<int32_t> tokens_between(const HeadSequence& self, int64_t first, int64_t end) {
    const auto size = static_cast<int64_t>(self.tokens.size());
    first = std::clamp<int64_t>(first, 0, size);
    return {self.tokens.begin() + first, self.tokens.begin() + std::clamp(end, first, size)};
}

void take_states(HeadSequence& self, nb::handle into) {
    const Elements rows(into, 2, "f", 4, PyBUF_WRITABLE);
    if (rows.size(1) != static_cast<size_t>(self.width()) || static_cast<int64_t>(rows.size(0)) > self.count())
        throw std::invalid_argument("states of another width, or more than wait");
    self.take(rows.data<float>(), static_cast<int64_t>(rows.size(0)));
}

class HeadDrafts {
  public:
    HeadDrafts(nb::handle draft, const std::string& drafter, std::shared_ptr<Tape> tape, std::shared_ptr<BlockPool> pool,
               Address states, int width, std::tuple<int, int, int64_t> limits)
        : drafts_(draft, drafter), rounds_(std::move(tape), std::move(pool), at<float>(states), width, limits_of(limits)) {}

    // None where a request is not drawn in the head's pass: with processors, or with a q that is to be told.
    nb::object propose(nb::list requests, nb::dict sequences) {
        std::vector<wager::AskedChain> asked;
        std::vector<nb::object> names;
        for (nb::handle request : requests) {
            names.push_back(drafts_.seq_id(request));
            HeadSequence& sequence = nb::cast<HeadSequence&>(sequences[names.back()]);
            const double temperature = sequence.temperature.value_or(0.0);
            if (!sequence.temperature || (temperature != 0 && noise_.needs_draft_probs(request))) return nb::none();
            asked.push_back({nb::cast<std::string>(names.back()), &sequence, drafts_.depth(request),
                             nb::cast<double>(min_survival_.require(request.ptr())), noise_.with(temperature, request)});
        }
        std::vector<wager::Chain> chains;
        {
            nb::gil_scoped_release release;
            chains = rounds_.guess(asked);
        }
        nb::list drafts;
        for (size_t i = 0; i < chains.size(); ++i)
            drafts.append(drafts_.make(names[i], chains[i].survival, [&](size_t node) { return chains[i].tokens[node]; },
                                       [](size_t node) { return static_cast<long>(node) - 1; }));
        return drafts;
    }

  private:
    static wager::HeadLimits limits_of(const std::tuple<int, int, int64_t>& given) {
        return {std::get<0>(given), std::get<1>(given), std::get<2>(given)};
    }

    const wager::Drafts drafts_;
    HeadRounds rounds_;
    const wager::NoiseReader noise_;
    const Name min_survival_{"min_survival"};
};

}  // namespace

void bind_heads(nb::module_& m) {
    nb::class_<HeadSequence>(m, "HeadSequence")
        .def("__init__",
             [](HeadSequence* self, nb::handle tokens, int width, int64_t most, std::string tenant,
                std::optional<double> temperature) {
                 if (width < 1 || most < 1) throw std::invalid_argument("no states, or states of no elements");
                 new (self) HeadSequence(wager::read_tokens(tokens), width, most, std::move(tenant), temperature);
             },
             "tokens"_a, nb::kw_only(), "width"_a, "most"_a, "tenant"_a, "temperature"_a.none())
        .def_rw("origin", &HeadSequence::origin)
        .def_rw("num_entries", &HeadSequence::entries)
        .def_ro("temperature", &HeadSequence::temperature)
        .def_prop_ro("num_tokens", [](const HeadSequence& self) { return self.tokens.size(); })
        .def_prop_ro("last_token", [](const HeadSequence& self) { return self.tokens.empty() ? -1 : self.tokens.back(); })
        .def_prop_ro("num_known", &HeadSequence::known)
        .def_prop_ro("num_states", &HeadSequence::count)
        .def("tokens_between", &tokens_between)
        .def("accept",
             [](HeadSequence& self, nb::handle tokens) {
                 const std::vector<int32_t> more = wager::read_tokens(tokens);
                 self.tokens.insert(self.tokens.end(), more.begin(), more.end());
             })
        .def("read", &read_states)
        .def("take", &take_states)
        .def("keep", [](HeadSequence& self, int64_t states) { self.drop(self.end() - states); })
        .def("join", &HeadSequence::join)
        .def("commit", &HeadSequence::commit);
    nb::class_<HeadDrafts>(m, "HeadDrafts")
        .def(nb::init<nb::handle, std::string, std::shared_ptr<Tape>, std::shared_ptr<BlockPool>, Address, int,
                      std::tuple<int, int, int64_t>>())
        .def("propose", &HeadDrafts::propose);
}
