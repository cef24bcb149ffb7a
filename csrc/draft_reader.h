// Reads the drafts of Python, and numbers.
#pragma once

#include "judging.h"
#include "values.h"

namespace wager {

inline void read_floats(PyObject* value, std::vector<double>& out, Py_ssize_t first = 0, Py_ssize_t most = PY_SSIZE_T_MAX) {
    const Items items = items_of(value, "numbers must be a list or a tuple");
    out.clear();
    for (Py_ssize_t i = first; i < items.size && i - first < most; ++i) {
        const double number = PyFloat_AsDouble(items.items[i]);
        if (number == -1.0 && PyErr_Occurred()) throw nanobind::python_error();
        out.push_back(number);
    }
}

// The fields of a draft.
inline JudgedDraft read_draft(PyObject* draft, bool tokens = false) {
    static const Name of_scores("scores"), of_parents("parents"), of_tokens("tokens");
    const nanobind::object scores = of_scores.require(draft), parents = of_parents.require(draft), guesses = of_tokens.require(draft);
    JudgedDraft read;
    read_floats(scores.ptr(), read.scores);
    read_ints(parents, read.parents);
    if (tokens) read_ints(guesses, read.tokens);
    for (size_t node = 0; node < read.parents.size(); ++node)
        if (read.parents[node] < -1 || read.parents[node] >= static_cast<long>(node))
            throw std::invalid_argument("a draft whose parents do not precede their children");
    if (tokens && read.tokens.size() != read.parents.size()) throw std::invalid_argument("a parent for each guess");
    if (!read.scores.empty() && read.scores.size() != read.parents.size()) throw std::invalid_argument("a score for each guess");
    return read;
}

}  // namespace wager
