// The endings of texts, to a depth, and what followed each of them how often: tests/oracle/suffix_tree.py has the same in Python.
// Knows no Python.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace wager {

// A node stands for a run of at most `longest` + 1 tokens. Its followers are its children: the tokens that came after it,
// in the order in which they came last.
class SuffixTree {
  public:
    static constexpr uint32_t kRoot = 0, kNone = UINT32_MAX;

    struct Follower {
        int32_t token;
        uint32_t count;
    };

    // The longest run of tokens before a place that the tree knows.
    struct Match {
        uint32_t node = kRoot;
        int length = 0;
    };

    explicit SuffixTree(int longest) : longest_(longest), nodes_(1), slots_(256, kNone) {}

    uint64_t version() const { return version_; }  // changes with the tree: a Match of before may be out of date, or gone

    // Adds `token` after the text whose endings of 0, 1, ... tokens are `endings`, which become those of the longer text.
    void append(std::vector<uint32_t>& endings, int32_t token) {
        next_.assign(1, kRoot);
        for (const uint32_t context : endings) {
            uint32_t child = find(context, token);
            if (child == kNone) child = create(context, token, next_.back());
            touch(context, child);
            next_.push_back(child);
        }
        if (static_cast<int>(next_.size()) > longest_ + 1) next_.resize(longest_ + 1);
        endings.swap(next_);
        ++version_;
    }

    // Takes out a text that was appended to an empty list of endings.
    void remove(const std::vector<int32_t>& text) {
        std::vector<uint32_t> endings{kRoot}, empty;
        for (const int32_t token : text) {
            next_.assign(1, kRoot);
            for (const uint32_t context : endings) {
                const uint32_t child = find(context, token);
                Node& parent = nodes_[context];
                parent.followers -= 1;
                if (parent.best == child) parent.best = kNone;
                if (--nodes_[child].count == 0) empty.push_back(child);
                next_.push_back(child);
            }
            if (static_cast<int>(next_.size()) > longest_ + 1) next_.resize(longest_ + 1);
            endings.swap(next_);
        }
        for (const uint32_t node : empty) unlink(node);  // whose children are all among them
        for (const uint32_t node : empty) erase(node);
        free_.insert(free_.end(), empty.begin(), empty.end());
        ++version_;
    }

    // The match after one more token.
    Match after(Match match, int32_t token) const {
        for (;;) {
            const uint32_t child = find(match.node, token);
            if (child != kNone) {
                match = {child, match.length + 1};
                return match.length > longest_ ? shorter(match) : match;
            }
            if (match.length == 0) return match;
            match = shorter(match);
        }
    }

    // The match without its first token.
    Match shorter(Match match) const { return {nodes_[match.node].link, match.length - 1}; }

    bool has_followers(uint32_t node) const { return nodes_[node].followers != 0; }
    uint32_t followers(uint32_t node) const { return nodes_[node].followers; }  // how often anything followed

    // What followed most often, of equals the latest. There must be followers.
    Follower best(uint32_t node) {
        uint32_t& best = nodes_[node].best;
        if (best == kNone)
            for (uint32_t child = nodes_[node].first; child != kNone; child = nodes_[child].next)
                if (best == kNone || nodes_[child].count > nodes_[best].count) best = child;
        return {nodes_[best].token, nodes_[best].count};
    }

    // The followers that came last, at most `most`, the latest first.
    void latest(uint32_t node, int most, std::vector<Follower>& out) const {
        out.clear();
        for (uint32_t child = nodes_[node].first; child != kNone && most-- > 0; child = nodes_[child].next)
            out.push_back({nodes_[child].token, nodes_[child].count});
    }

    // Of the `latest` followers that came last the `most` most frequent ones, of equals the latest first.
    void frequent(uint32_t node, int latest, size_t most, std::vector<Follower>& out) const {
        this->latest(node, latest, out);
        std::stable_sort(out.begin(), out.end(), [](const Follower& a, const Follower& b) { return a.count > b.count; });
        if (out.size() > most) out.resize(most);
    }

    size_t size() const { return nodes_.size() - free_.size() - 1; }
    size_t bytes() const { return nodes_.capacity() * sizeof(Node) + slots_.capacity() * sizeof(uint32_t); }

  private:
    struct Node {
        int32_t token = 0;
        uint32_t parent = kNone, link = kRoot;  // link: the node of the run without its first token
        uint32_t count = 0, followers = 0;
        uint32_t first = kNone, previous = kNone, next = kNone;  // first child; neighbours among the parent's children
        uint32_t best = kNone;                                   // child; none if it is not known
    };

    uint32_t create(uint32_t parent, int32_t token, uint32_t link) {
        uint32_t node = static_cast<uint32_t>(nodes_.size());
        if (free_.empty()) {
            nodes_.emplace_back();
        } else {
            node = free_.back();
            free_.pop_back();
            nodes_[node] = Node();
        }
        nodes_[node].token = token, nodes_[node].parent = parent, nodes_[node].link = link;
        if (2 * (size() + 1) > slots_.size()) grow();
        slots_[slot_of(parent, token)] = node;
        return node;
    }

    // Counts a follower and makes it the latest. The children of the root are in no order: nobody asks for them.
    void touch(uint32_t parent, uint32_t child) {
        Node &above = nodes_[parent], &node = nodes_[child];
        above.followers += 1;
        node.count += 1;
        if (parent == kRoot) return;
        if (above.best != kNone ? node.count >= nodes_[above.best].count : above.followers == 1) above.best = child;
        if (above.first == child) return;
        unlink(child);
        node.previous = kNone, node.next = above.first;
        if (above.first != kNone) nodes_[above.first].previous = child;
        above.first = child;
    }

    void unlink(uint32_t child) {
        Node& node = nodes_[child];
        if (node.previous != kNone) nodes_[node.previous].next = node.next;
        if (node.next != kNone) nodes_[node.next].previous = node.previous;
        if (nodes_[node.parent].first == child) nodes_[node.parent].first = node.next;
        node.previous = node.next = kNone;
    }

    uint32_t find(uint32_t parent, int32_t token) const { return slots_[slot_of(parent, token)]; }

    size_t home(uint32_t parent, int32_t token) const {
        const uint64_t key = (static_cast<uint64_t>(parent) << 32 | static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15u;
        return (key ^ key >> 32) * 0xD6E8FEB86659FD93u >> 32 & (slots_.size() - 1);
    }

    // The slot of a child, or the free one where it belongs.
    size_t slot_of(uint32_t parent, int32_t token) const {
        const size_t mask = slots_.size() - 1;
        for (size_t at = home(parent, token);; at = (at + 1) & mask) {
            const uint32_t node = slots_[at];
            if (node == kNone || (nodes_[node].parent == parent && nodes_[node].token == token)) return at;
        }
    }

    void erase(uint32_t node) {  // and moves back what had to give way to it
        const size_t mask = slots_.size() - 1;
        size_t hole = slot_of(nodes_[node].parent, nodes_[node].token);
        slots_[hole] = kNone;
        for (size_t at = (hole + 1) & mask; slots_[at] != kNone; at = (at + 1) & mask) {
            const Node& other = nodes_[slots_[at]];
            if (((at - home(other.parent, other.token)) & mask) < ((at - hole) & mask)) continue;
            slots_[hole] = slots_[at];
            slots_[at] = kNone;
            hole = at;
        }
    }

    void grow() {
        std::vector<uint32_t> before(2 * slots_.size(), kNone);
        before.swap(slots_);
        for (const uint32_t node : before)
            if (node != kNone) slots_[slot_of(nodes_[node].parent, nodes_[node].token)] = node;
    }

    int longest_;
    std::vector<Node> nodes_;
    std::vector<uint32_t> slots_, free_, next_;
    uint64_t version_ = 0;
};

}  // namespace wager
