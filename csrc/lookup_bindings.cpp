// The bindings of the lookup drafters: the texts of all sequences, and the drafts of all requests in one call.
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>

#include "lookup.h"
#include "noise_reader.h"
#include "step_bindings.h"
#include "values.h"

namespace nb = nanobind;
using wager::Coupling, wager::Drafts, wager::LookupText, wager::Name, wager::read_tokens;

namespace {

using Slots = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using Learned = std::tuple<double, double, double, double, double, int>;  // draft/lookup.py: LearnedRules

wager::LearnedRules learned_rules(const Learned& given) {
    const auto& [prior_weight, remembered, first_gain, least_gain, gain_weight, rest] = given;
    return {prior_weight, remembered, first_gain, least_gain, gain_weight, rest};
}

wager::LookupRules checked(wager::LookupRules rules) {
    if (rules.longest < 0 || rules.longest > 64) throw std::invalid_argument("contexts of 0 to 64 tokens");
    if (rules.longest == 0) rules.shared_tokens = 0;
    if (rules.learned.rest < 1) throw std::invalid_argument("one of 1 or more places");
    if (rules.prior.size() != wager::kCells) throw std::invalid_argument("one prior for each cell");
    if (rules.weights.size() != wager::kSources) throw std::invalid_argument("one weight for each source");
    return rules;
}

using Tokens = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Order = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Places = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Used = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Segments, and what Python holds of them.
class LearnedCorpus {
  public:
    using Arrays = std::tuple<Tokens, Order, Slots, Used>;

    void set(std::vector<Arrays> arrays) {
        std::vector<wager::CorpusSegment> segments;
        for (const auto& [tokens, order, keys, used] : arrays) {
            const size_t size = order.shape(0), blocks = (tokens.shape(0) >> wager::CorpusSegment::kUsedShift) + 1;
            if (keys.shape(0) != (size + wager::CorpusSegment::kStride - 1) / wager::CorpusSegment::kStride || used.shape(0) != blocks)
                throw std::invalid_argument("keys or blocks are not those of the order and the tokens");
            segments.push_back({tokens.data(), order.data(), size, keys.data(), used.data()});
        }
        corpus.set(std::move(segments));
        arrays_ = std::move(arrays);
    }

    std::pair<int, std::vector<std::pair<int32_t, uint32_t>>> find(const std::vector<int32_t>& text, int least) {
        std::vector<wager::SuffixTree::Follower> followers;
        std::vector<std::pair<int32_t, uint32_t>> found;
        const int length = corpus.look_up(text.data() + text.size(), text.size());
        if (length < std::max(least, wager::kShortest)) return {0, found};
        corpus.followers(followers);
        for (const auto& each : followers) found.push_back({each.token, each.count});
        return {length, found};
    }

    wager::Corpus corpus;

  private:
    std::vector<Arrays> arrays_;
};

void corpus_order(const Tokens& tokens, const nb::ndarray<uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& out) {
    nb::gil_scoped_release others_run;
    const std::vector<uint32_t> order = wager::corpus_order(tokens.data(), tokens.shape(0));
    if (order.size() != out.shape(0)) throw std::invalid_argument("another number of places");
    std::copy(order.begin(), order.end(), out.data());
}

void corpus_merge(const Tokens& tokens, const std::vector<std::tuple<Order, Places, Places>>& orders,
                  const nb::ndarray<uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& out) {
    std::vector<wager::MovedOrder> moved;
    for (const auto& [order, begins, by] : orders) {
        if (begins.shape(0) == 0 || begins.shape(0) != by.shape(0)) throw std::invalid_argument("a shift for each text");
        moved.push_back({order.data(), order.shape(0), begins.data(), by.data(), begins.shape(0)});
    }
    nb::gil_scoped_release others_run;
    if (wager::corpus_merge(tokens.data(), std::move(moved), out.data(), out.shape(0)) != out.shape(0))
        throw std::invalid_argument("another number of places");
}

class LookupTable {
  public:
    LookupTable(nb::handle draft, const std::string& drafter, int longest, size_t shared_tokens, std::vector<double> prior,
                double weight, double min_survival, double most_certain, const Learned& learned,
                std::vector<double> weights, const Coupling& coupling,
                std::optional<Slots> slots, uint64_t homes, bool trees)
        : drafts_(draft, drafter),
          rules_(checked({longest, shared_tokens, std::move(prior), weight, min_survival, most_certain, learned_rules(learned), std::move(weights), wager::coupling_rules(coupling)})),
          slots_(std::move(slots)),
          shared_(rules_),
          trees_(trees) {
        if (!slots_) return;
        const size_t size = slots_->shape(0);
        if (size == 0 || homes >= size || homes > UINT32_MAX || slots_->data()[size - 1] != 0)
            throw std::invalid_argument("the last slot must be free, and no home");
        store_.emplace(slots_->data(), homes);
    }

    LookupTable(const LookupTable&) = delete;  // texts refer to it

    void begin(const std::string& seq_id, nb::handle tokens, nb::handle prediction) {
        const wager::StoreTable* const store = store_ ? &*store_ : nullptr;
        texts_.insert_or_assign(seq_id, std::make_unique<LookupText>(rules_, shared_, store, read_tokens(tokens),
                                                                       read_tokens(prediction)));
    }

    void accept(const std::string& seq_id, nb::handle tokens) {
        LookupText& text = of(seq_id);
        for (const int32_t token : read_tokens(tokens)) text.know(token);
    }

    void end(const std::string& seq_id) {
        const auto found = texts_.find(seq_id);
        if (found == texts_.end()) return;
        if (rules_.shared_tokens != 0) {
            std::vector<int32_t> generated = found->second->generated();
            if (!generated.empty()) shared_.end(std::move(generated));
        }
        texts_.erase(found);
    }

    // Texts look in this corpus, too.
    void read(nb::object corpus) {
        shared_.read(nb::cast<LearnedCorpus&>(corpus).corpus);
        corpus_ = std::move(corpus);
    }

    // What the tenant's sequences found of learned texts, to go on from: of the gain, and of each of their cells, the mean and the number of
    // its observations.
    std::vector<std::pair<double, double>> found() const {
        std::vector<std::pair<double, double>> means{{shared_.gain.value(), shared_.gain.observed()}};
        for (size_t i = wager::kLearnedCell; i < shared_.wrong.size(); ++i)
            means.emplace_back(shared_.wrong[i].value(), shared_.wrong[i].observed());
        return means;
    }

    // Whether it could go on from these.
    bool start_from(const std::vector<std::pair<double, double>>& means) {
        const bool fit = std::all_of(means.begin(), means.end(), [](const auto& each) {
            return std::abs(each.first) <= 1.0 && each.second > 0.0 && std::isfinite(each.second);
        });
        if (!fit || means.size() != wager::kCells - wager::kLearnedCell + 1) return false;
        shared_.gain = {means[0].first, means[0].second};
        for (size_t i = 1; i < means.size(); ++i) shared_.wrong[wager::kLearnedCell + i - 1] = {means[i].first, means[i].second};
        return true;
    }

    // Of all texts and trees; a store is not counted.
    size_t bytes() const {
        size_t sum = shared_.bytes();
        for (const auto& [seq_id, text] : texts_) sum += text->bytes();
        return sum;
    }

    nb::list propose(nb::handle requests) {
        nb::list drafts;
        const wager::Items all = wager::items_of(requests, "requests are a list");
        for (Py_ssize_t i = 0; i < all.size; ++i) {
            const nb::handle request = all.items[i];
            const nb::object seq_id = drafts_.seq_id(request);
            const int depth = drafts_.depth(request);
            LookupText& text = of(nb::cast<std::string>(seq_id));
            shared_.absorb();
            text.catch_up();
            const wager::RequestNoise noise = noise_.of(request);
            const std::vector<int32_t> after = read_tokens(after_.require(request.ptr()));
            if (trees_)
                text.draft_tree(depth, after, noise, tokens_, parents_, survival_);
            else
                text.draft(depth, after, noise, tokens_, survival_);
            drafts.append(drafts_.make(seq_id, survival_, [&](size_t i) { return tokens_[i]; },
                                       [&](size_t i) { return trees_ ? parents_[i] : static_cast<long>(i) - 1; }));
        }
        return drafts;
    }

  private:
    LookupText& of(const std::string& seq_id) {
        const auto found = texts_.find(seq_id);
        if (found == texts_.end()) throw nb::key_error(seq_id.c_str());
        return *found->second;
    }

    const Drafts drafts_;
    wager::LookupRules rules_;
    std::optional<Slots> slots_;  // kept while the store reads them
    std::optional<wager::StoreTable> store_;
    wager::SharedTexts shared_;
    nb::object corpus_;  // kept while texts look in it
    std::unordered_map<std::string, std::unique_ptr<LookupText>> texts_;
    bool trees_;
    std::vector<int32_t> tokens_, parents_;
    std::vector<double> survival_;
    const Name after_{"after"};
    const wager::NoiseReader noise_;
};

}  // namespace

void bind_lookup(nb::module_& m) {
    nb::class_<LookupTable>(m, "LookupTable")
        .def(nb::init<nb::handle, std::string, int, size_t, std::vector<double>, double, double, double, const Learned&, std::vector<double>, const Coupling&,
                      std::optional<Slots>, uint64_t, bool>(),
             nb::arg("draft"), nb::arg("drafter"), nb::arg("longest"), nb::arg("shared_tokens"), nb::arg("prior"),
             nb::arg("prior_weight"), nb::arg("min_survival"), nb::arg("most_certain"), nb::arg("learned"), nb::arg("weights"), nb::arg("coupling"), nb::arg("slots").none(), nb::arg("homes"), nb::arg("trees"))
        .def("begin", &LookupTable::begin)
        .def("accept", &LookupTable::accept)
        .def("end", &LookupTable::end)
        .def("read", &LookupTable::read)
        .def("found", &LookupTable::found)
        .def("start_from", &LookupTable::start_from)
        .def_prop_ro("nbytes", &LookupTable::bytes)
        .def("propose", &LookupTable::propose);
    nb::class_<LearnedCorpus>(m, "Corpus")
        .def(nb::init<>())
        .def("set", &LearnedCorpus::set)
        .def("find", &LearnedCorpus::find);
    m.def("corpus_order", &corpus_order);
    m.def("corpus_merge", &corpus_merge);
}
