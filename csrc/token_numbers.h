// Numbers of tokens. Knows no Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace wager {

// Numbers tokens from 0 on, in the order in which they are first seen.
class TokenNumbers {
  public:
    void clear() {
        first_ += size_, size_ = 0;
        if (first_ > UINT32_MAX / 2) *this = {};
    }

    // The number of a token.
    uint32_t of(int32_t token) {
        for (size_t at = home(token);; at = next(at)) {
            Slot& slot = slots_[at];
            if (slot.number < first_) {
                slot = {token, first_ + size_};
                if (2 * ++size_ > slots_.size()) grow();
                return size_ - 1;
            }
            if (slot.token == token) return slot.number - first_;
        }
    }

  private:
    struct Slot {
        int32_t token;
        uint32_t number;  // and `first_`; less than that: it is free
    };

    size_t home(int32_t token) const { return static_cast<uint32_t>(token) * 0x9E3779B1u >> 12 & (slots_.size() - 1); }
    size_t next(size_t slot) const { return (slot + 1) & (slots_.size() - 1); }

    void grow() {
        std::vector<Slot> before(2 * slots_.size());
        before.swap(slots_);
        for (const Slot& slot : before) {
            if (slot.number < first_) continue;
            size_t at = home(slot.token);
            while (slots_[at].number >= first_) at = next(at);
            slots_[at] = slot;
        }
    }

    std::vector<Slot> slots_ = std::vector<Slot>(512);
    uint32_t first_ = 1, size_ = 0;
};

}  // namespace wager
