// One attention tile at work: scores, softmax and values of a few rows against one segment of their keys.
//
// A tile is a few consecutive rows of one sequence; with the query heads of one kv head they share each load of a page.
// Rows of a tree whose ancestors lie scattered see, from a page on, copies gathered in path order, so that every row
// meets the very blocks plain decoding would. Keys a row may not see enter with probability exactly zero and leave its
// sums as they are, whatever stands in them; so which rows share a tile cannot show in any of them.
#pragma once

#include <cmath>

#include "attention_page.h"

namespace wager::WAGER_NS {

// What a softmax over some keys has come to, for each row-head: weighted values, lane-wise sums and the maximum.
struct State {
    float *o, *sum, *top;  // [row-heads, d], [.., 16], [..]

    State(float* memory, int group, int d) {
        const size_t height = tile_height(group);
        o = memory;
        sum = o + height * d;
        top = sum + height * 16;
    }
    void clear(int n, int d) {
        std::memset(o, 0, static_cast<size_t>(n) * d * 4);
        std::memset(sum, 0, static_cast<size_t>(n) * 16 * 4);
        for (int i = 0; i < n; ++i) top[i] = -1e30f;
    }
    // Takes in what later keys came to. Nothing seen (top -1e30) leaves every bit as it was.
    void fold(const State& later, int n, int d) {
        for (int i = 0; i < n; ++i) {
            const float now = later.top[i] > top[i] ? later.top[i] : top[i];
            const F mine = exp2(splat(top[i] - now)), theirs = exp2(splat(later.top[i] - now));
            float *s = sum + 16 * i, *at = o + static_cast<size_t>(i) * d;
            const float* from = later.o + static_cast<size_t>(i) * d;
            store(s, add(mul(load(s), mine), mul(load(later.sum + 16 * i), theirs)));
            for (int j = 0; j < d; j += 16) store(at + j, add(mul(load(at + j), mine), mul(load(from + j), theirs)));
            top[i] = now;
        }
    }
};

// One (tile, kv head) at work: its buffers in this thread's scratch memory, and where each row's keys are.
struct Work {
    const Attention& op;
    const Step& step;
    int row, rows, head, d, values_d, group;
    int shared;       // pages below this one are the same for all rows
    int whole_from, whole_to;  // pages in [from, to) are visible to every row from end to end
    uint16_t *q, *p;  // [row-heads, d], [row-heads, 64]
    float* s;         // [row-heads, 64]
    State now, whole;
    uint16_t *tail_keys, *tail_values;  // [rows, tail_pages, 16 * d]
    uint16_t* fit_values;               // [rows, 16 * d]
    uint16_t* turned;                   // [16 * d]: the cached page at hand as values, where the cache is latent
    uint32_t refitted;                  // rows whose values of the page at hand are in fit_values, as bits
    const int32_t* table;

    Work(const Attention& op_, const Step& step_, uint8_t* scratch)
        : op(op_),
          step(step_),
          d(op.cache.head_dim),
          values_d(op.cache.value_dim),
          group(op.heads / op.cache.kv_heads),
          s(reinterpret_cast<float*>(scratch)),
          now(s + tile_height(group) * kKeyBlock, group, d),
          whole(now.o + state_floats(group, d), group, d) {
        const size_t height = tile_height(group);
        q = reinterpret_cast<uint16_t*>(whole.o + state_floats(group, d));
        p = q + height * d;
        tail_keys = p + height * kKeyBlock;
        tail_values = tail_keys + tail_offset(tile_rows(group), 0);
        fit_values = tail_values + tail_offset(tile_rows(group), 0);
        turned = fit_values + static_cast<size_t>(tile_rows(group)) * kPage * d;
    }

    int position(int t) const { return step.in.positions[row + t]; }
    int first_key(int t) const {
        const int low = position(t) - op.window + 1;
        return op.window && low > 0 ? low : 0;
    }
    size_t tail_offset(int t, int page) const {
        return (static_cast<size_t>(t) * step.plan.tail_pages + page) * kPage * d;
    }
    bool gathered(int t, int page) const { return page >= step.plan.tails[row + t]; }
    const uint16_t* cached(const uint16_t* all, int page) const { return all + op.cache.offset(op.layer, table[page], head); }
    const uint16_t* keys_of(int t, int page) const {
        return gathered(t, page) ? tail_keys + tail_offset(t, page - step.plan.tails[row + t]) : cached(op.cache.keys, page);
    }
    const uint16_t* values_of(int t, int page) const {
        if (refitted >> t & 1u) return fit_values + static_cast<size_t>(t) * kPage * d;
        if (gathered(t, page)) return tail_values + tail_offset(t, page - step.plan.tails[row + t]);
        return op.cache.values ? cached(op.cache.values, page) : turned;
    }
    bool sees(int t, int page) const { return page * kPage <= position(t) && first_key(t) < (page + 1) * kPage; }

    void begin(int tile, int kv_head) {
        row = step.plan.tile_rows[tile];
        rows = step.plan.tile_sizes[tile];
        head = kv_head;
        table = step.in.block_tables + static_cast<size_t>(step.in.seq_ids[row]) * step.in.max_pages;
        shared = whole_to = INT32_MAX;
        whole_from = 0;
        refitted = 0;
        for (int t = 0; t < rows; ++t) {
            const int pages = position(t) / kPage + 1, tail = step.plan.tails[row + t];
            shared = pages < shared ? pages : shared;
            shared = tail < shared ? tail : shared;
            const int low = (first_key(t) + kPage - 1) / kPage, high = (position(t) + 1) / kPage;
            whole_from = low > whole_from ? low : whole_from;
            whole_to = high < whole_to ? high : whole_to;
            const uint16_t* from = op.q + (static_cast<size_t>(row + t) * op.heads + head * group) * d;
            std::memcpy(q + t * group * d, from, static_cast<size_t>(group) * d * 2);
        }
    }
    int first_segment() const {
        int low = first_key(0);
        for (int t = 1; t < rows; ++t) low = first_key(t) < low ? first_key(t) : low;
        return low / kSegment;
    }
    int end_segment() const {
        int high = 0;
        for (int t = 0; t < rows; ++t) high = position(t) > high ? position(t) : high;
        return high / kSegment + 1;
    }

    // Attends to the keys of one segment, into `now`.
    void segment(int index, float scale) {
        constexpr int kPages = kSegment / kPage;
        now.clear(rows * group, values_d);
        int first = kPages, last = 0;  // pages of the segment that some row can see
        for (int t = 0; t < rows; ++t) {
            const int low = first_key(t) / kPage - index * kPages, high = position(t) / kPage + 1 - index * kPages;
            first = low < first ? low : first;
            last = high > last ? high : last;
            if (step.plan.tails[row + t] < (index + 1) * kPages) gather(t);
        }
        first = (first < 0 ? 0 : first) + index * kPages;
        last = (last > kPages ? kPages : last) + index * kPages;
        constexpr int kBlock = kKeyBlock / kPage;
        for (int page = first; page < last;) {
            const int end = (page / kBlock + 1) * kBlock < last ? (page / kBlock + 1) * kBlock : last;
            block(page, end, scale);
            page = end;
        }
    }

    // Copies into path order what lies scattered: the page where the row's path leaves position order, then its nodes.
    void gather(int t) {
        const int tail = step.plan.tails[row + t], base = step.in.num_computed_tokens[step.in.seq_ids[row]];
        const int pages = position(t) / kPage - tail + 1;
        const size_t page_bytes = static_cast<size_t>(kPage) * d * 2;
        uint16_t *keys = tail_keys + tail_offset(t, 0), *values = tail_values + tail_offset(t, 0);
        std::memset(keys, 0, pages * page_bytes);
        std::memcpy(keys, cached(op.cache.keys, tail), page_bytes);
        if (op.cache.values) {
            std::memset(values, 0, pages * page_bytes);
            std::memcpy(values, cached(op.cache.values, tail), page_bytes);
        }
        const int start = step.in.query_start_loc[step.in.seq_ids[row]];
        for (int a = row + t; a >= start; a = step.in.parents[a]) {
            const int at = step.in.positions[a];
            if (a - start == at - base) break;  // from here down the path lies in position order
            copy_key(step.in.slot_mapping[a], keys, values, at - tail * kPage);
        }
        for (int page = 0; page < (op.cache.values ? 0 : pages); ++page)
            turn(keys + tail_offset(0, page), values_d, values + tail_offset(0, page));
    }
    void copy_key(int slot, uint16_t* keys, uint16_t* values, int to) const {
        const size_t from = op.cache.offset(op.layer, slot / kPage, head), page = static_cast<size_t>(to / kPage) * kPage * d;
        const uint16_t* key = op.cache.keys + from + slot % kPage * 2;
        keys += page + to % kPage * 2;
        for (int i = 0; i < d / 2; ++i) std::memcpy(keys + i * 2 * kPage, key + i * 2 * kPage, 4);
        if (!op.cache.values) return;
        const uint16_t* value = op.cache.values + from + slot % kPage / 2 * (2 * d) + slot % 2;
        values += page + to % kPage / 2 * (2 * d) + to % 2;
        for (int i = 0; i < d; ++i) values[2 * i] = value[2 * i];
    }

    // The cached page of latents as values, if some row reads it where it lies. Kept out of the loops of other caches.
    [[gnu::noinline]] void turn_cached(int page) {
        for (int t = 0; t < rows; ++t) {
            if (!sees(t, page) || gathered(t, page)) continue;
            turn(cached(op.cache.keys, page), values_d, turned);
            return;
        }
    }

    // 0 x NaN is NaN: where values a row may not see are not finite, it reads the page from a copy without them.
    void refit(int page) {
        refitted = 0;
        if (page >= whole_from && page < whole_to) return;
        const uint16_t* scanned = nullptr;
        uint32_t unfit = 0, found = 0;
        for (int t = 0; t < rows; ++t) {
            if (!sees(t, page)) continue;
            const uint16_t* at = values_of(t, page);
            if (at != scanned) unfit = unfit_keys(at, values_d);
            scanned = at;
            const uint32_t hidden = ~key_range(first_key(t) - page * kPage, position(t) + 1 - page * kPage);
            if ((unfit & hidden) == 0) continue;
            copy_without(unfit & hidden, at, values_d, fit_values + static_cast<size_t>(t) * kPage * d);
            found |= 1u << t;
        }
        refitted = found;
    }

    // Calls kernel(first row-head, row-heads, page pointer) for each run of rows that see the page at the same place.
    template <class Place, class Kernel>
    void each_run(int page, int limit, Place place, Kernel kernel) {
        const bool alike = page >= whole_from && page < whole_to && page < shared;
        for (int t = 0; t < rows;) {
            if (!sees(t, page)) {  // its gathered pages may not reach so far
                ++t;
                continue;
            }
            const uint16_t* at = place(t, page);
            int end = alike ? rows : t + 1;
            while (end < rows && sees(end, page) && place(end, page) == at) ++end;
            const int total = (end - t) * group, parts = (total + limit - 1) / limit;
            for (int i = 0; i < parts; ++i) {
                const int first = static_cast<int>(part(total, i, parts)), last = static_cast<int>(part(total, i + 1, parts));
                kernel(t * group + first, last - first, at);
            }
            t = end;
        }
    }

    // Asks for a page that all rows read from the cache; gathered pages are at hand.
    void fetch_page(const uint16_t* all, int page) const {
        if (page >= shared) return;
        const uint16_t* at = cached(all, page);
        for (int i = 0; i < kPage * d; i += 32) fetch(at + i);
    }

    void block(int first_page, int last_page, float scale) {
        for (int page = first_page; page < last_page; ++page) {
            if (op.cache.values) fetch_page(op.cache.values, page);  // wanted after the scores; keys a block from now
            fetch_page(op.cache.keys, page + kKeyBlock / kPage);
            float* out = s + page % 4 * kPage;
            const auto place = [this](int t, int at) { return keys_of(t, at); };
            each_run(page, kQkRows, place, [&](int i, int n, const uint16_t* keys) {
                PageUpTo<kQkRows>::score[n](q + i * d, d, keys, d, out + i * kKeyBlock, kKeyBlock);
            });
        }
        for (int i = 0; i < rows * group; ++i) soften(i, first_page, last_page, scale);
        for (int page = first_page; page < last_page; ++page) {
            const uint16_t* in = p + page % 4 * kPage;
            const auto place = [this](int t, int at) { return values_of(t, at); };
            if (!op.cache.values) turn_cached(page);
            refit(page);
            each_run(page, kPvRows, place, [&](int i, int n, const uint16_t* values) {
                PageUpTo<kPvRows>::value[n](in + i * kKeyBlock, kKeyBlock, values, values_d, now.o + i * values_d, 0);
            });
            refitted = 0;
        }
    }

    // Scores of one row-head to probabilities; its maximum, sum and output are brought to the new maximum.
    void soften(int i, int first_page, int last_page, float scale) {
        const int t = i / group, low = first_key(t), high = position(t) + 1;
        const F hidden = splat(-__builtin_inff());
        float* scores = s + i * kKeyBlock;
        F best = hidden;
        for (int page = first_page; page < last_page; ++page) {
            float* at = scores + page % 4 * kPage;
            const F score = keep(mul(load(at), splat(scale)), hidden, low - page * kPage, high - page * kPage);
            store(at, score);
            best = max(best, score);
        }
        const float found = peak_of(best), before = now.top[i], highest = found > before ? found : before;
        F total = load(now.sum + 16 * i);
        if (highest != before) {
            const F factor = exp2(splat(before - highest));
            float* o = now.o + static_cast<size_t>(i) * values_d;
            total = mul(total, factor);
            for (int j = 0; j < values_d; j += 16) store(o + j, mul(load(o + j), factor));
            now.top[i] = highest;
        }
        for (int page = first_page; page < last_page; ++page) {
            const F probability = exp2(sub(load(scores + page % 4 * kPage), splat(highest)));
            narrow(p + i * kKeyBlock + page % 4 * kPage, probability);
            total = add(total, probability);
        }
        store(now.sum + 16 * i, total);
    }

    void finish() {
        for (int i = 0; i < rows * group; ++i) {
            const int t = i / group;
            uint16_t* out = op.out + (static_cast<size_t>(row + t) * op.heads + head * group + i % group) * values_d;
            const F total = splat(sum(load(whole.sum + 16 * i)));
            const float* o = whole.o + static_cast<size_t>(i) * values_d;
            for (int j = 0; j < values_d; j += 16) narrow(out + j, add(div(load(o + j), total), zero()));  // no minus zero
        }
    }
};

}  // namespace wager::WAGER_NS
