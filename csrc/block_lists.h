// The lists of the block pool (kv/blocks.py), for what a step nearly always does to them. What is unusual is left to Python.
#pragma once

#include "values.h"

namespace wager {

constexpr int64_t kBlockTokens = 16;  // of a block of the cache, as kBlockSize of ops.h

inline int64_t blocks_for(int64_t length) { return (length + kBlockTokens - 1) / kBlockTokens; }

class BlockLists {
  public:
    // `lists` has kv/blocks.py's BlockLists.
    explicit BlockLists(nanobind::handle lists)
        : tables_(lists.attr("tables")),
          committed_(lists.attr("committed")),
          free_(lists.attr("free")),
          ref_counts_(lists.attr("ref_counts")),
          keys_(lists.attr("keys")),
          prefix_index_(lists.attr("prefix_index")) {}

    int64_t num_free() const { return PyList_GET_SIZE(free_.ptr()); }

    // The block table of a sequence; not valid if it has none.
    nanobind::object table(PyObject* seq_id) const {
        return nanobind::borrow(PyDict_GetItemWithError(tables_.ptr(), seq_id));
    }

    bool knows(PyObject* seq_id) const {
        int64_t full = 0;
        return table(seq_id).is_valid() && as_int(PyDict_GetItemWithError(committed_.ptr(), seq_id), full);
    }

    // Adds a free block to a table; there must be one.
    void take(nanobind::handle table) const {
        const nanobind::object block = pop(free_.ptr());
        set(ref_counts_.ptr(), block.ptr(), 1);
        append(table.ptr(), block.ptr());
    }

    // BlockPool.commit and then trim for a sequence of `length` computed tokens; false, with nothing done, where a block that
    // is full now was computed by another sequence before.
    bool settle(PyObject* seq_id, PyObject* tokens, int64_t length) const {
        const nanobind::object blocks = table(seq_id);
        int64_t committed = 0;
        if (!as_int(PyDict_GetItemWithError(committed_.ptr(), seq_id), committed)) return false;
        const int64_t full = length / kBlockTokens;
        if (full < committed || full > PyList_GET_SIZE(blocks.ptr())) return false;
        if (full > committed && !commit(seq_id, blocks.ptr(), tokens, committed, full)) return false;
        while (PyList_GET_SIZE(blocks.ptr()) > blocks_for(length)) {  // no other sequence has these: they are not committed
            const nanobind::object block = pop(blocks.ptr());
            set(ref_counts_.ptr(), block.ptr(), 0);
            append(free_.ptr(), block.ptr());
        }
        return true;
    }

  private:
    static void check(int result) {
        if (result < 0) throw nanobind::python_error();
    }
    static void append(PyObject* list, PyObject* item) { check(PyList_Append(list, item)); }
    static nanobind::object pop(PyObject* list) {
        const Py_ssize_t last = PyList_GET_SIZE(list) - 1;
        const nanobind::object item = nanobind::borrow(PyList_GET_ITEM(list, last));
        check(PyList_SetSlice(list, last, last + 1, nullptr));
        return item;
    }
    static void set(PyObject* list, PyObject* index, int64_t value) {
        check(PyObject_SetItem(list, index, nanobind::int_(value).ptr()));
    }

    // Of one more full block; of several, as after a long draft, and of the first one, which lies under its tenant's root,
    // Python does it.
    bool commit(PyObject* seq_id, PyObject* blocks, PyObject* tokens, int64_t committed, int64_t full) const {
        if (!prefix_index_.is_none()) {
            if (full != committed + 1 || committed == 0) return false;
            const nanobind::object own = nanobind::borrow(PyList_GET_ITEM(blocks, committed));
            const nanobind::object before = nanobind::borrow(PyList_GET_ITEM(blocks, committed - 1));
            const nanobind::object part = nanobind::steal(PyList_GetSlice(tokens, committed * kBlockTokens, full * kBlockTokens));
            const nanobind::tuple key = nanobind::make_tuple(before, nanobind::steal(PyList_AsTuple(part.ptr())));
            PyObject* const registered = PyDict_GetItemWithError(prefix_index_.ptr(), key.ptr());
            if (registered != nullptr) return false;
            check(PyDict_SetItem(prefix_index_.ptr(), key.ptr(), own.ptr()));
            check(PyObject_SetItem(keys_.ptr(), own.ptr(), key.ptr()));
        }
        check(PyDict_SetItem(committed_.ptr(), seq_id, nanobind::int_(full).ptr()));
        return true;
    }

    const nanobind::object tables_, committed_, free_, ref_counts_, keys_, prefix_index_;
};

}  // namespace wager
