// Texts of earlier requests on disk: what followed the longest run of tokens that stands before a place.
// draft/corpus/files.py lays a segment out in a file; tests/oracle/corpus.py has the lookup in Python. Knows no Python.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "suffix_tree.h"
#include "token_numbers.h"

namespace wager {

// Texts, each after a token of -1, and the places in them that have a token before them in the same text, in the order of
// the tokens before them, read backwards: then of the place. So the places behind equal runs of tokens stand together.
struct CorpusSegment {
    static constexpr int kDepth = 32;      // tokens before a place that are compared
    static constexpr size_t kStride = 64;  // of the places whose two tokens before them are among the keys
    static constexpr size_t kSamples = 32;  // places behind a run that are looked at
    static constexpr int kUsedShift = 12;   // a block of tokens, of which is noted that something was found there

    const int32_t* tokens = nullptr;
    const uint32_t* order = nullptr;
    size_t size = 0;  // places in the order
    const uint64_t* keys = nullptr;
    uint8_t* used = nullptr;

    // Places in the order: from `first` to before `last`.
    struct Run {
        size_t first = 0, last = 0;
    };

    // Where a text would be in the order, and how many of its tokens the places before and after that are behind.
    struct Spot {
        size_t at = 0;
        int below = 0, above = 0;
    };

    // The two tokens before a place.
    static uint64_t key(const int32_t* end) {
        return static_cast<uint64_t>(static_cast<uint32_t>(end[-1] + 1)) << 32 | static_cast<uint32_t>(end[-2] + 1);
    }

    static bool before(const int32_t* tokens, uint32_t a, uint32_t b) {
        for (int back = 1; back <= kDepth; ++back) {
            const int32_t left = tokens[a - back], right = tokens[b - back];
            if (left != right) return left < right;
            if (left < 0) break;  // both texts begin here
        }
        return a < b;
    }

    // The places behind the `length` tokens before `end`, 1 or 2, among those behind fewer.
    Run find(const Run& among, const int32_t* end, int length) const {
        const uint64_t least = length > 1 ? key(end) : static_cast<uint64_t>(static_cast<uint32_t>(end[-1] + 1)) << 32;
        const uint64_t most = length > 1 ? least : least | UINT32_MAX;
        const uint64_t* const start = keys + (among.first + kStride - 1) / kStride;
        const uint64_t* const stop = keys + (among.last + kStride - 1) / kStride;
        const uint64_t* const low = std::lower_bound(start, stop, least);
        const Run before{low == start ? among.first : (low - keys - 1) * kStride, low == stop ? among.last : (low - keys) * kStride};
        const size_t first = first_without(before, [&](size_t at) { return compare(at, end, length).second; });
        if (first == among.last || compare(first, end, length).first < length) return {first, first};
        const uint64_t* const high = std::upper_bound(low, stop, most);
        return {first, edge(high == low ? first : (high - keys - 1) * kStride, among.last - 1, end, length, 1) + 1};
    }

    // Where the `most` tokens before `end` would be among the places behind fewer of them.
    Spot locate(const Run& among, const int32_t* end, int most) const {
        const size_t at = first_without(among, [&](size_t place) { return compare(place, end, most).second; });
        return {at, at > among.first ? compare(at - 1, end, most).first : 0, at < among.last ? compare(at, end, most).first : 0};
    }

    // The places behind the `length` tokens before `end`, around `spot`.
    Run narrow(const Run& among, const Spot& spot, const int32_t* end, int length) const {
        return {spot.below >= length ? edge(spot.at - 1, among.first, end, length, -1) : spot.at,
                spot.above >= length ? edge(spot.at, among.last - 1, end, length, 1) + 1 : spot.at};
    }

    // How many places of a run are looked at, and the one of that number; they are evenly spaced.
    static size_t samples(const Run& run) { return std::min(run.last - run.first, kSamples); }
    uint32_t place(const Run& run, size_t sample) const {
        const size_t places = run.last - run.first;
        return order[run.first + (places > kSamples ? sample * places / kSamples : sample)];
    }

  private:
    // How many tokens before a place are those before `end`, and whether it comes before them in the order.
    std::pair<int, bool> compare(size_t at, const int32_t* end, int most) const {
        const int32_t* const place = tokens + order[at];
        for (int back = 1; back <= most; ++back)
            if (place[-back] != end[-back]) return {back - 1, place[-back] < end[-back]};
        return {most, false};
    }

    // The first of some places at which it does not hold; it does at those before. The end of them if there is none.
    template <class Holds> static size_t first_without(Run among, Holds holds) {
        while (among.first < among.last) {
            const size_t middle = (among.first + among.last) / 2;
            if (holds(middle))
                among.first = middle + 1;
            else
                among.last = middle;
        }
        return among.first;
    }

    // From a place behind `length` tokens towards `limit` (`step`: 1 or -1), the last one that is behind them too.
    size_t edge(size_t inside, size_t limit, const int32_t* end, int length, int step) const {
        size_t reach = 1;
        const auto left = [&] { return step > 0 ? limit - inside : inside - limit; };
        const auto shares = [&](size_t away) { return compare(step > 0 ? inside + away : inside - away, end, length).first == length; };
        while (reach <= left() && shares(reach)) inside = step > 0 ? inside + reach : inside - reach, reach *= 2;
        size_t good = 0, bad = std::min(reach, left() + 1);
        while (bad - good > 1) {
            const size_t middle = (good + bad) / 2;
            (shares(middle) ? good : bad) = middle;
        }
        return step > 0 ? inside + good : inside - good;
    }
};

// What followed in several segments, the newest first. What is said is of the text that was looked up last, whose tokens must
// be there still.
class Corpus {
  public:
    static constexpr int kLongest = CorpusSegment::kDepth;
    static constexpr int kUseful = 4;  // length of a run from which on finding it counts as a use

    uint64_t version() const { return version_; }
    bool empty() const { return segments_.empty(); }

    // Of what is kept beside the segments.
    size_t bytes() const {
        size_t sum = 0;
        for (const std::vector<Context>& contexts : known_)
            for (const Context& each : contexts)
                sum += sizeof(Context) + each.runs.capacity() * sizeof(CorpusSegment::Run) + each.followers.capacity() * sizeof(Sample);
        return sum;
    }

    void set(std::vector<CorpusSegment> segments) {
        segments_ = std::move(segments);
        for (std::vector<Context>& contexts : known_) contexts.clear();
        ++version_;
    }

    // The length of the longest known run of tokens before `end`, or 1 if there is none.
    int look_up(const int32_t* end, size_t size) {
        int most = 0;
        while (most < kLongest && static_cast<size_t>(most) < size && end[-most - 1] >= 0) ++most;
        end_ = end, longest_ = segments_.empty() ? 0 : std::min(most, 1);
        for (int length = 1; length <= 2 && length <= most && longest_ > 0; ++length) context_[length] = &context(length);
        spots_.clear();
        for (size_t i = 0; i < segments_.size() && most > 1; ++i) {
            spots_.push_back(segments_[i].locate(context_[2]->runs[i], end, most));
            longest_ = std::max({longest_, spots_.back().below, spots_.back().above});
        }
        return longest_;
    }

    // What followed the longest run, of 2 tokens or more, the most frequent first, of equals the latest; how often anything
    // did, among the places looked at.
    uint32_t followers(std::vector<SuffixTree::Follower>& out) {
        out.clear(), samples_.clear();
        for (size_t i = 0; i < segments_.size(); ++i) {
            const CorpusSegment::Run found = run(i, longest_);
            read(i, found);
            if (const size_t samples = CorpusSegment::samples(found); samples > 0 && longest_ >= kUseful)
                segments_[i].used[segments_[i].place(found, samples - 1) >> CorpusSegment::kUsedShift] = 1;
        }
        numbers_.clear();
        for (const Sample& sample : samples_) {
            const uint32_t number = numbers_.of(sample.token);
            if (number == out.size()) out.push_back({sample.token, 0});
            ++out[number].count;
        }
        std::stable_sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return a.count > b.count; });
        return static_cast<uint32_t>(samples_.size());
    }

    // Calls `use` with tokens that followed the last `length` tokens, and how often: the places looked at stand for all.
    template <class Use> void each_follower(int length, Use use) {
        if (length > longest_) return;
        if (length > 2) {
            samples_.clear();
            for (size_t i = 0; i < segments_.size(); ++i) read(i, run(i, length));
        }
        for (const Sample& each : length > 2 ? samples_ : context_[length]->followers) use(each.token, each.times);
    }

  private:
    static constexpr size_t kContexts = 1 << 11;  // of each length

    // A token that followed, and how often.
    struct Sample {
        int32_t token;
        double times;
    };

    // A run of one or two tokens: these are looked up again and again.
    struct Context {
        int32_t tokens[2] = {-1, -1};          // from the last one on; -1: none
        std::vector<CorpusSegment::Run> runs;  // by segment
        std::vector<Sample> followers;         // different ones
    };

    const Context& context(int length) {
        const int32_t last = end_[-1], before = length > 1 ? end_[-2] : -1;
        known_[length - 1].resize(kContexts);
        const uint64_t hash = (static_cast<uint64_t>(last) << 32 | static_cast<uint32_t>(before)) * 0x9E3779B97F4A7C15u;
        Context& found = known_[length - 1][(hash >> 32) % kContexts];
        if (found.tokens[0] == last && found.tokens[1] == before) return found;
        found.tokens[0] = last, found.tokens[1] = before;
        found.runs.clear(), found.followers.clear();
        samples_.clear(), numbers_.clear();
        for (size_t i = 0; i < segments_.size(); ++i) {
            const CorpusSegment::Run among = length > 1 ? context_[1]->runs[i] : CorpusSegment::Run{0, segments_[i].size};
            found.runs.push_back(segments_[i].find(among, end_, length));
            read(i, found.runs.back());
        }
        for (const Sample& sample : samples_) {
            const uint32_t number = numbers_.of(sample.token);
            if (number == found.followers.size())
                found.followers.push_back(sample);
            else
                found.followers[number].times += sample.times;
        }
        return found;
    }

    // The places behind the last `length` tokens, 2 or more.
    CorpusSegment::Run run(size_t segment, int length) const {
        const CorpusSegment::Run& pair = context_[2]->runs[segment];
        return length > 2 ? segments_[segment].narrow(pair, spots_[segment], end_, length) : pair;
    }

    // Adds what followed at the places of a run that are looked at, the last one first.
    void read(size_t segment, const CorpusSegment::Run& run) {
        const size_t samples = CorpusSegment::samples(run);
        const double times = double(run.last - run.first) / samples;
        for (size_t sample = samples; sample-- > 0;) samples_.push_back({segments_[segment].tokens[segments_[segment].place(run, sample)], times});
    }

    std::vector<CorpusSegment> segments_;
    std::vector<Context> known_[2];  // by length, less 1
    uint64_t version_ = 0;
    const int32_t* end_ = nullptr;
    int longest_ = 0;
    const Context* context_[3] = {};         // of the last 1 and 2 tokens
    std::vector<CorpusSegment::Spot> spots_;  // by segment
    std::vector<Sample> samples_;
    TokenNumbers numbers_;
};

// The places of `tokens` that a segment's order has, in that order.
inline std::vector<uint32_t> corpus_order(const int32_t* tokens, size_t size) {
    std::vector<std::pair<uint64_t, uint32_t>> places;
    for (size_t at = 2; at < size; ++at)
        if (tokens[at] >= 0 && tokens[at - 1] >= 0)
            places.push_back({CorpusSegment::key(tokens + at), static_cast<uint32_t>(at)});
    std::sort(places.begin(), places.end(), [&](const auto& a, const auto& b) {
        return a.first != b.first ? a.first < b.first : CorpusSegment::before(tokens, a.second, b.second);
    });
    std::vector<uint32_t> order;
    for (const auto& [key, at] : places) order.push_back(at);
    return order;
}

// An order whose texts were moved: text i, from `begins[i]` to the next one's beginning, by `moved[i]`, or left out.
struct MovedOrder {
    static constexpr int64_t kLeftOut = INT64_MIN;

    const uint32_t* order;
    size_t size;
    const int64_t* begins;
    const int64_t* moved;
    size_t texts;

    // The next place that is kept, where it is now; false at the end.
    bool next(const int32_t* tokens) {
        for (; at < size; ++at) {
            const size_t text = std::upper_bound(begins, begins + texts, static_cast<int64_t>(order[at])) - begins - 1;
            if (moved[text] == kLeftOut) continue;
            place = static_cast<uint32_t>(order[at++] + moved[text]);
            key = CorpusSegment::key(tokens + place);
            return true;
        }
        return false;
    }

    size_t at = 0;
    uint32_t place = 0;
    uint64_t key = 0;
};

// Merges orders into that of `tokens`, which holds their texts where these were moved to; how many places it has, of
// `room` at most.
inline size_t corpus_merge(const int32_t* tokens, std::vector<MovedOrder> orders, uint32_t* out, size_t room) {
    size_t size = 0;
    std::vector<MovedOrder*> open;
    for (MovedOrder& order : orders)
        if (order.next(tokens)) open.push_back(&order);
    while (!open.empty() && size < room) {
        size_t least = 0;
        for (size_t i = 1; i < open.size(); ++i)
            if (open[i]->key != open[least]->key ? open[i]->key < open[least]->key
                                                 : CorpusSegment::before(tokens, open[i]->place, open[least]->place))
                least = i;
        out[size++] = open[least]->place;
        if (!open[least]->next(tokens)) open.erase(open.begin() + least);
    }
    return size;
}

}  // namespace wager
