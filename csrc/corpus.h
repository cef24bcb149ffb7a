// Texts of earlier requests on disk: what followed the longest run of tokens that stands before a place.
// draft/corpus/files.py lays a segment out in a file; tests/oracle/corpus.py has the lookup in Python. Knows no Python.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "suffix_tree.h"

namespace wager {

// Texts, each after a token of -1, and the places in them that have a token before them in the same text, in the order of
// the tokens before them, read backwards: then of the place. So the places behind equal runs of tokens stand together.
struct CorpusSegment {
    static constexpr int kDepth = 32;      // tokens before a place that are compared
    static constexpr size_t kStride = 64;  // of the places whose two tokens before them are among the keys
    static constexpr int kUsedShift = 12;   // a block of tokens, of which is noted that something was found there

    const int32_t* tokens = nullptr;
    const uint32_t* order = nullptr;
    size_t size = 0;  // places in the order
    const uint64_t* keys = nullptr;
    uint8_t* used = nullptr;

    struct Range {
        size_t first = 0, last = 0;  // in the order
        int length = 0;              // of the run
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

    // The places behind the longest run that ends at `end`, of `most` tokens at most, all of them ids; length 0 if none has
    // `least` tokens, which are 2 or more.
    Range find(const int32_t* end, int most, int least) const {
        if (size == 0 || most < least) return {};
        const auto [from, to] = between_keys(key(end), key(end));
        size_t first = from, last = to;
        while (first < last) {
            const size_t middle = (first + last) / 2;
            const auto [common, less] = compare(middle, end, most);
            (less ? first : last) = less ? middle + 1 : middle;
        }
        const size_t at = first;
        const int below = at > 0 ? compare(at - 1, end, most).first : 0, above = at < size ? compare(at, end, most).first : 0;
        const int length = std::max(below, above);
        if (length < least) return {};
        Range range{at, at, length};
        if (below == length) range.first = edge(at - 1, 0, end, length, -1);
        if (above == length) range.last = edge(at, size - 1, end, length, 1) + 1;
        return range;
    }

    // Of the places in `range`, which are behind the same length - 1 tokens as `end`, those that are behind `length`.
    Range narrow(Range range, const int32_t* end, int length) const {
        if (length <= 2) {
            const uint64_t low = length == 2 ? key(end) : static_cast<uint64_t>(static_cast<uint32_t>(end[-1] + 1)) << 32;
            const auto [from, to] = between_keys(low, length == 2 ? low : low | UINT32_MAX);
            range.first = std::max(range.first, from), range.last = std::max(range.first, std::min(range.last, to));
        }
        const auto first_without = [&](auto holds) {
            size_t first = range.first, last = range.last;
            while (first < last) {
                const size_t middle = (first + last) / 2;
                if (holds(middle))
                    first = middle + 1;
                else
                    last = middle;
            }
            return first;
        };
        range.first = first_without([&](size_t at) { return compare(at, end, length).second; });
        range.last = first_without([&](size_t at) { return compare(at, end, length).first == length; });
        range.length = length;
        return range;
    }

  private:
    // How many tokens before a place are those before `end`, and whether it comes before them in the order.
    std::pair<int, bool> compare(size_t at, const int32_t* end, int most) const {
        const int32_t* const place = tokens + order[at];
        for (int back = 1; back <= most; ++back)
            if (place[-back] != end[-back]) return {back - 1, place[-back] < end[-back]};
        return {most, false};
    }

    // The places between which those with keys from `least` to `most` are.
    std::pair<size_t, size_t> between_keys(uint64_t least, uint64_t most) const {
        const uint64_t* const last = keys + (size + kStride - 1) / kStride;
        const uint64_t* const low = std::lower_bound(keys, last, least);
        const uint64_t* const high = std::upper_bound(low, last, most);
        return {low == keys ? 0 : (low - keys - 1) * kStride, std::min<size_t>(size, (high - keys) * kStride)};
    }

    // From a place behind the run towards `limit` (`step`: 1 or -1), the last one that is behind it too.
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

// What followed in several segments, the newest first.
class Corpus {
  public:
    static constexpr int kLongest = CorpusSegment::kDepth;
    static constexpr int kShortest = 2;       // a run of one token says little, and many places are behind it
    static constexpr size_t kSamples = 32;    // places behind a run that are looked at, in each segment
    static constexpr int kUseful = 4;         // length of a run from which on finding it counts as a use

    void set(std::vector<CorpusSegment> segments) { segments_ = std::move(segments); }

    // The length of the longest known run before `end`, at least `least`, else 0; what followed it, the most frequent
    // first, of equals the latest, and how often anything did, among the places looked at.
    int find(const int32_t* end, size_t size, int least, std::vector<SuffixTree::Follower>& out, uint32_t& all) {
        out.clear(), all = 0;
        int most = 0, length = std::max(least, kShortest);
        while (most < kLongest && static_cast<size_t>(most) < size && end[-most - 1] >= 0) ++most;
        ranges_.clear();
        for (const CorpusSegment& segment : segments_) {
            const CorpusSegment::Range range = segment.find(end, most, length);
            if (range.length == 0) continue;
            if (range.length > length) ranges_.clear();
            length = range.length;
            ranges_.push_back({&segment, range});
        }
        if (ranges_.empty()) return 0;
        for (const auto& [segment, range] : ranges_) count(*segment, range, out, all);
        std::stable_sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return a.count > b.count; });
        return length;
    }

    // Calls `use` with every token that followed the `length` tokens before `end`, and how often: the places looked at
    // stand for all of them. To be called with a length of 1, 2, ... in turn.
    template <class Use> void each_follower(const int32_t* end, int length, Use use) {
        if (length == 1) {
            narrowed_.clear();
            for (const CorpusSegment& segment : segments_) narrowed_.push_back({0, segment.size, 0});
        }
        for (size_t i = 0; i < segments_.size(); ++i) {
            const CorpusSegment& segment = segments_[i];
            const CorpusSegment::Range range = narrowed_[i] = segment.narrow(narrowed_[i], end, length);
            const size_t places = range.last - range.first, samples = std::min(places, kSamples);
            for (size_t sample = samples; sample-- > 0;)
                use(segment.tokens[segment.order[range.first + sample * places / samples]], double(places) / samples);
        }
    }

  private:
    static void count(const CorpusSegment& segment, const CorpusSegment::Range& range, std::vector<SuffixTree::Follower>& out,
                      uint32_t& all) {
        const size_t places = range.last - range.first, samples = std::min(places, kSamples);
        for (size_t sample = samples; sample-- > 0; ++all) {
            const uint32_t place = segment.order[range.first + sample * places / samples];
            const int32_t token = segment.tokens[place];
            const auto found = std::find_if(out.begin(), out.end(), [&](const auto& each) { return each.token == token; });
            if (found != out.end())
                ++found->count;
            else
                out.push_back({token, 1});
            if (range.length >= kUseful && sample + 1 == samples) segment.used[place >> CorpusSegment::kUsedShift] = 1;
        }
    }

    std::vector<CorpusSegment> segments_;
    std::vector<CorpusSegment::Range> narrowed_;
    std::vector<std::pair<const CorpusSegment*, CorpusSegment::Range>> ranges_;
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
