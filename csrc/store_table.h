// A static store of continuations, as draft/store_file.py lays it out in a file. Knows no Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace wager {

// Slots of 64 bits: 36 bits of the context's hash, 20 of the token, 8 of its probability in 255ths; 0 is a free slot. The
// continuations of a context follow each other from its home on, the likeliest first.
class StoreTable {
  public:
    static constexpr int kLongest = 5;  // tokens of a context

    struct Continuation {
        int32_t token;
        int probability;  // in 255ths
    };

    // `slots` must stay valid, and the last one must be free.
    StoreTable(const uint64_t* slots, uint64_t homes) : slots_(slots), homes_(homes) {}

    // The continuations of the longest known context of `text`, at most `most`; their number of tokens, 0 if none is known.
    int find(const int32_t* end, size_t size, size_t most, std::vector<Continuation>& out) const {
        out.clear();
        uint64_t hashes[kLongest + 1] = {0};
        const int longest = hash(end, size, hashes);
        for (int m = longest; m > 0; --m) {
            of_context(hashes[m], most, [&](int32_t token, int probability) { out.push_back({token, probability}); });
            if (!out.empty()) return m;
        }
        return 0;
    }

    // Calls `use` with the token and the probability of the continuations of every known context of `text`, at most `most` of each.
    template <class Use> void each(const int32_t* end, size_t size, size_t most, Use use) const {
        uint64_t hashes[kLongest + 1] = {0};
        const int longest = hash(end, size, hashes);
        for (int m = longest; m > 0; --m) of_context(hashes[m], most, use);
    }

  private:
    // Of contexts of 1, 2, ... tokens; returns the number of tokens of the longest.
    int hash(const int32_t* end, size_t size, uint64_t* hashes) const {
        const int longest = size < kLongest ? static_cast<int>(size) : kLongest;
        for (int m = 1; m <= longest; ++m) {
            hashes[m] = mix(hashes[m - 1] + static_cast<uint32_t>(end[-m]) + 1);
            __builtin_prefetch(slots_ + home(hashes[m]));
        }
        return longest;
    }

    template <class Use> void of_context(uint64_t hash, size_t most, Use use) const {
        const uint64_t check = hash << 28;
        for (const uint64_t* slot = slots_ + home(hash); *slot != 0 && most > 0; ++slot) {
            if ((*slot ^ check) >> 28 != 0) continue;
            use(static_cast<int32_t>(*slot >> 8 & 0xFFFFF), static_cast<int>(*slot & 0xFF));
            --most;
        }
    }

    static uint64_t mix(uint64_t value) {  // splitmix64
        value += 0x9E3779B97F4A7C15u;
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9u;
        value = (value ^ value >> 27) * 0x94D049BB133111EBu;
        return value ^ value >> 31;
    }

    uint64_t home(uint64_t hash) const { return (hash >> 32) * homes_ >> 32; }

    const uint64_t* slots_;
    uint64_t homes_;
};

}  // namespace wager
