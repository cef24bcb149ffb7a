// The blocks of a KV cache: which sequence holds which, which are free, which can be shared. Integers only; knows no Python.
//
// A block holds the keys and values of kBlockTokens tokens. Only a block that is full and committed (all of its tokens are
// known, their keys and values computed) is shared, and it is never written again; so there is no copy-on-write. Shareable
// blocks form a trie for each tenant: a block is registered under (block before it, its tokens), an exact key on which no two
// prompts collide, and the first one of a prompt under its tenant's root.
//
// Invariant of the trie: while a block is registered, so is the block before it. It holds because a sequence holds all blocks
// of its prefix, and because blocks that no sequence holds are evicted least recently released first, children first.
#pragma once

#include <cstdint>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "state_slots.h"

namespace wager {

constexpr int64_t kBlockTokens = 16;  // of a block of the cache, as kBlockSize of ops.h

inline int64_t blocks_for(int64_t length) { return (length + kBlockTokens - 1) / kBlockTokens; }

// What Python raises as CacheIntegrityError or UsageError, with its hint.
struct CacheError : std::runtime_error {
    CacheError(const std::string& message, std::string what_to_do) : std::runtime_error(message), hint(std::move(what_to_do)) {}
    std::string hint;
};
struct CallError : CacheError {
    using CacheError::CacheError;
};

// Tokens of a sequence from its `first` on, as far as they are needed.
struct TokenSlice {
    const int32_t* data;
    int64_t first;
    const int32_t* from(int64_t position) const { return data + (position - first); }
};

// The blocks of one sequence in the order of its positions; the first `committed` are full and committed.
struct BlockTable {
    std::string name;
    std::vector<int32_t> blocks;
    int64_t committed = 0;
    int32_t root = -1;  // what is before its first block: a tenant's root
    TableStates states;

    int32_t slot(int64_t position) const {
        return static_cast<int32_t>(blocks[position / kBlockTokens] * kBlockTokens + position % kBlockTokens);
    }
};

// Accounts for `num_blocks` blocks. Each is free, or evictable (registered, held by no sequence), or held.
//
// A sequence that computed a block that was registered already gives its own copy back and holds the registered one: their
// contents are equal bit for bit, because every row is computed in one fixed order of operations. `lead` (0 for a target):
// tokens before the first entry's, on which every entry of a draft head depends. They are part of the first block's key.
//
// With `states` every sequence has a slot of recurrent states, of that many, and blocks may have one of `snapshots`.
class BlockPool {
  public:
    BlockPool(int64_t num_blocks, bool prefix_cache, int64_t lead, int64_t states, int64_t snapshots)
        : num_blocks_(num_blocks), prefix_cache_(prefix_cache), lead_(lead), slots_(states, states > 0 ? snapshots : 0, num_blocks) {
        if (num_blocks < 1)
            throw CallError("A cache of " + std::to_string(num_blocks) + " blocks holds nothing.", "Give it at least one block.");
        for (int64_t block = num_blocks; block > 0; --block) free_.push_back(static_cast<int32_t>(block - 1));
        ref_counts_.assign(num_blocks, 0);
        keys_.assign(num_blocks, nullptr);
        links_.assign(num_blocks + 1, {static_cast<int32_t>(num_blocks), static_cast<int32_t>(num_blocks)});
    }

    int64_t num_blocks() const { return num_blocks_; }
    int64_t num_free() const { return static_cast<int64_t>(free_.size()) + num_evictable_; }
    int64_t lead() const { return lead_; }
    bool is_held(int64_t block) const { return ref_counts_.at(block) > 0; }
    const std::unordered_map<std::string, std::shared_ptr<BlockTable>>& tables() const { return tables_; }

    // The table of a sequence, or null.
    std::shared_ptr<BlockTable> find(const std::string& name) const {
        const auto found = tables_.find(name);
        return found == tables_.end() ? nullptr : found->second;
    }

    // Attaches the tenant's registered blocks that hold a prefix of the first `count` tokens; how many entries they hold. At
    // least the last token is left to compute, since its logits are needed. With states, those up to a block with a snapshot.
    int64_t match_prefix(const std::string& name, const int32_t* tokens, int64_t count, const std::string& tenant) {
        if (const auto held = find(name); held && !held->blocks.empty())
            throw CacheError("Sequence '" + name + "' already holds blocks.", "Match before reserving.");
        BlockTable& table = *make(name);
        table.root = root_of(tenant);
        const TokenSlice all{tokens, 0};
        for (int64_t index = 0; (index + 1) * kBlockTokens < count - lead_; ++index) {
            const auto found = index_.find(key_of(table, index, all));
            if (found == index_.end()) break;
            table.blocks.push_back(found->second);
        }
        if (slots_.any()) {
            const auto shared = static_cast<int64_t>(table.blocks.size()) * kBlockTokens;
            begin_at_snapshot(table);
            if (shared > table.states.covered) table.states.branch = shared;
        }
        for (const int32_t block : table.blocks) reference(block);
        table.committed = static_cast<int64_t>(table.blocks.size());
        return table.committed * kBlockTokens;
    }

    // Which snapshots of its states the next pass takes of a sequence, over its tokens from `start` to `end`, and whose prompt has
    // so many.
    void plan_snapshots(BlockTable& table, int64_t start, int64_t end, int64_t prompt_tokens) {
        if (!slots_.any()) return;
        require(table.states.covered + static_cast<int64_t>(table.states.replays.size()) == start,
                "The states of '" + table.name + "' are not those before its position " + std::to_string(start) + ".");
        slots_.plan(table.states, end, (prompt_tokens - 1) / kBlockTokens * kBlockTokens, prefix_cache_);
    }

    // After a pass over the tokens up to `known`: what becomes of the states. `accepted` are the guesses that were right.
    void commit_states(BlockTable& table, int64_t known, const std::vector<int32_t>& accepted, int64_t count) {
        if (!slots_.any()) return;
        std::vector<int32_t> replays(accepted.begin(), accepted.begin() + count);
        for (int32_t& row : replays) row += table.states.first_guess;
        slots_.commit(table.states, known, table.blocks, kBlockTokens, std::move(replays));
    }

    // Makes the sequence's blocks cover `length` positions: all or nothing, false if there are too few blocks.
    bool reserve(const std::string& name, int64_t length) {
        std::shared_ptr<BlockTable> table = find(name);
        if (!table && blocks_for(length) <= num_free()) table = make(name);
        return table && reserve(*table, length);
    }

    bool reserve(BlockTable& table, int64_t length) {
        const int64_t missing = blocks_for(length) - static_cast<int64_t>(table.blocks.size());
        if (missing > num_free()) return false;
        for (int64_t taken = 0; taken < missing; ++taken) {
            if (free_.empty()) free_.push_back(evict());
            ref_counts_[free_.back()] = 1;
            table.blocks.push_back(free_.back());
            free_.pop_back();
        }
        return true;
    }

    // Gives back the blocks beyond `length` positions. A committed block may be shared, so it is not cut.
    void trim(BlockTable& table, int64_t length) {
        if (length < table.committed * kBlockTokens && length % kBlockTokens)
            throw CacheError("Sequence '" + table.name + "' cannot be cut to " + std::to_string(length) + " positions: " +
                                 std::to_string(table.committed * kBlockTokens) + " are committed.",
                             "Cut at a block boundary, or release the sequence and start it again.");
        const int64_t keep = blocks_for(length);
        while (static_cast<int64_t>(table.blocks.size()) > keep) {
            const int32_t block = table.blocks.back();
            table.blocks.pop_back();
            dereference(block);
        }
        if (keep < table.committed) table.committed = keep;
    }

    // Declares the first `length` entries known and computed; full blocks become shareable. `tokens` has at least those of the
    // blocks that were not committed before.
    void commit(BlockTable& table, const TokenSlice& tokens, int64_t length) {
        const int64_t full = length / kBlockTokens;
        if (full <= table.committed) return;
        if (full > static_cast<int64_t>(table.blocks.size()))
            throw CacheError("Sequence '" + table.name + "' commits " + std::to_string(full) + " blocks but holds " +
                                 std::to_string(table.blocks.size()) + ".",
                             "Reserve them first.");
        for (; table.committed < full; ++table.committed)
            if (prefix_cache_) add_to_index(table, table.committed, tokens);
    }

    // Lets a new sequence share the source's full blocks below `length` positions, with states those up to a block with a snapshot;
    // the rest it computes itself.
    void fork(const std::string& source, const std::string& target, int64_t length) {
        const std::shared_ptr<BlockTable> from = find(source);
        const int64_t count = length / kBlockTokens, committed = from ? from->committed : 0;
        if (const auto held = find(target); held && !held->blocks.empty())
            throw CacheError("Sequence '" + target + "' already holds blocks.", "Fork into a new sequence.");
        if (count > committed)
            throw CacheError("Sequence '" + source + "' has " + std::to_string(committed) + " committed blocks; " +
                                 std::to_string(count) + " were to be shared.",
                             "Commit first.");
        BlockTable& table = *make(target);
        if (from) {
            table.root = from->root;
            table.blocks.assign(from->blocks.begin(), from->blocks.begin() + count);
        }
        if (slots_.any()) begin_at_snapshot(table);
        table.committed = static_cast<int64_t>(table.blocks.size());
        for (const int32_t block : table.blocks) reference(block);
    }

    // Frees a sequence's blocks; registered ones stay attachable until evicted. Unknown sequences are ignored.
    void release(const std::string& name) {
        const auto found = tables_.find(name);
        if (found == tables_.end()) return;
        std::vector<int32_t> blocks;
        blocks.swap(found->second->blocks);  // who still has the table finds it empty
        slots_.end(found->second->states);
        found->second->committed = 0;
        tables_.erase(found);
        for (size_t i = blocks.size(); i > 0; --i) dereference(blocks[i - 1]);  // the last blocks are evicted first
    }

    // Frees every evictable block, so that nothing computed before can be attached any more.
    void reset_prefix_cache() {
        while (num_evictable_ > 0) free_.push_back(evict());
    }

    // Throws on any contradiction; O(blocks), meant for idle moments and tests.
    void check() const {
        std::vector<int64_t> held(num_blocks_, 0), states(num_blocks_, 0), rank(num_blocks_, -1);
        for (const auto& [name, table] : tables_)
            for (const int32_t block : table->blocks) ++held[block];
        for (const int32_t block : free_) ++states[block];
        int64_t order = 0;
        for (int32_t block = links_[num_blocks_].next; block != num_blocks_; block = links_[block].next) {
            ++states[block];
            rank[block] = order++;
        }
        int64_t registered = 0;
        for (int32_t block = 0; block < num_blocks_; ++block) {
            const std::string name = "Block " + std::to_string(block);
            const Key* key = keys_[block];
            registered += key != nullptr;
            require(states[block] + (held[block] > 0) == 1, name + " is not in one state.");
            require(ref_counts_[block] == held[block], name + " is counted wrong.");
            require(!key || index_.at(*key) == block, name + " is not what the trie has under its key.");
            require(rank[block] < 0 || key, name + " is evictable but not registered.");
            require(!key || held[block] > 0 || rank[block] >= 0, name + " is free but registered.");
            if (key && key->before >= 0) {
                require(keys_[key->before], name + " is registered but the block before it is not.");
                require(rank[key->before] < 0 || (rank[block] >= 0 && rank[block] < rank[key->before]),
                        name + " would be evicted after the block before it.");
            }
        }
        require(order == num_evictable_ && registered == static_cast<int64_t>(index_.size()), "The trie names unknown blocks.");
        for (const auto& [name, table] : tables_) check_table(*table, held);
        require(slots_.consistent(), "A snapshot belongs to another block.");
    }

  private:
    struct Key {
        int32_t before;
        std::vector<int32_t> tokens;
        bool operator==(const Key& other) const { return before == other.before && tokens == other.tokens; }
    };
    struct Hash {
        size_t operator()(const Key& key) const {
            uint64_t hash = static_cast<uint32_t>(key.before) + 0x9e3779b97f4a7c15u;
            for (const int32_t token : key.tokens) {
                hash = (hash ^ static_cast<uint32_t>(token)) * 0xff51afd7ed558ccdu;
                hash ^= hash >> 32;
            }
            return static_cast<size_t>(hash);
        }
    };
    struct Link {
        int32_t before, next;
    };

    static void require(bool condition, const std::string& message) {
        if (!condition) throw CacheError(message, "This is a defect in wager: please report it, with the command that led here.");
    }

    void check_table(const BlockTable& table, const std::vector<int64_t>& held) const {
        const std::string of = " of '" + table.name + "' ";
        require(table.committed <= static_cast<int64_t>(table.blocks.size()), "Too many blocks" + of + "are committed.");
        int32_t before = table.root;
        for (int64_t index = 0; index < static_cast<int64_t>(table.blocks.size()); ++index) {
            const int32_t block = table.blocks[index];
            if (index >= table.committed) {
                require(held[block] == 1, "A block" + of + "is shared but not committed.");
                require(!keys_[block], "A block" + of + "is registered but not committed.");
            } else if (prefix_cache_) {
                require(keys_[block] && keys_[block]->before == before, "A block" + of + "is registered out of order.");
            }
            before = block;
        }
    }

    std::shared_ptr<BlockTable> make(const std::string& name) {
        auto& table = tables_[name];
        if (table) slots_.end(table->states);
        table = std::make_shared<BlockTable>();
        table->name = name;
        if (slots_.any()) slots_.begin(table->states);
        return table;
    }

    // Leaves of the table's blocks those up to the last with a snapshot, with which the sequence begins.
    void begin_at_snapshot(BlockTable& table) {
        while (!table.blocks.empty() && !slots_.has(table.blocks.back())) table.blocks.pop_back();
        if (table.blocks.empty()) return;
        slots_.read(table.states, table.blocks.back(), static_cast<int64_t>(table.blocks.size()) * kBlockTokens);
    }

    // Tenants that have neither blocks nor a sequence are forgotten when they are as many as all others can be.
    int32_t root_of(const std::string& tenant) {
        if (tenant.empty()) return -1;
        if (roots_.size() >= 2 * (keys_.size() + tables_.size())) {
            std::unordered_set<int32_t> used;
            for (const Key* key : keys_)
                if (key != nullptr) used.insert(key->before);
            for (const auto& [name, table] : tables_) used.insert(table->root);
            for (auto each = roots_.begin(); each != roots_.end();) each = used.count(each->second) ? std::next(each) : roots_.erase(each);
        }
        const auto [found, added] = roots_.try_emplace(tenant, last_root_ - 1);
        last_root_ -= added;
        return found->second;
    }

    Key key_of(const BlockTable& table, int64_t index, const TokenSlice& tokens) const {
        const int32_t* first = tokens.from(index == 0 ? 0 : lead_ + index * kBlockTokens);
        return {index == 0 ? table.root : table.blocks[index - 1],
                std::vector<int32_t>(first, tokens.from(lead_ + (index + 1) * kBlockTokens))};
    }

    void add_to_index(BlockTable& table, int64_t index, const TokenSlice& tokens) {
        const int32_t own = table.blocks[index];
        const auto [found, added] = index_.emplace(key_of(table, index, tokens), own);
        if (added) {
            keys_[own] = &found->first;
        } else if (found->second != own) {
            reference(found->second);
            dereference(own);
            table.blocks[index] = found->second;
        }
    }

    void reference(int32_t block) {
        if (ref_counts_[block]++ == 0) unlink(block);
    }

    void dereference(int32_t block) {
        if (--ref_counts_[block] > 0) return;
        if (keys_[block] == nullptr) {
            slots_.drop(block);
            free_.push_back(block);
            return;
        }
        const auto end = static_cast<int32_t>(num_blocks_);  // the list is a ring; its last is the latest released
        links_[block] = {links_[end].before, end};
        links_[links_[end].before].next = block;
        links_[end].before = block;
        ++num_evictable_;
    }

    void unlink(int32_t block) {
        links_[links_[block].before].next = links_[block].next;
        links_[links_[block].next].before = links_[block].before;
        --num_evictable_;
    }

    int32_t evict() {
        const int32_t block = links_[num_blocks_].next;
        unlink(block);
        index_.erase(index_.find(*keys_[block]));
        keys_[block] = nullptr;
        slots_.drop(block);
        return block;
    }

    const int64_t num_blocks_;
    const bool prefix_cache_;
    const int64_t lead_;
    StateSlots slots_;
    std::vector<int32_t> free_;
    std::vector<Link> links_;  // of evictable blocks, the least recently released first; at num_blocks_ the ring's end
    int64_t num_evictable_ = 0;
    std::vector<int64_t> ref_counts_;
    std::vector<const Key*> keys_;  // under which a block is registered, or null
    std::unordered_map<Key, int32_t, Hash> index_;
    std::unordered_map<std::string, std::shared_ptr<BlockTable>> tables_;
    std::unordered_map<std::string, int32_t> roots_;  // of tenants; -1 is that of no tenant
    int32_t last_root_ = -1;
};

}  // namespace wager
