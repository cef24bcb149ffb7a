// Reads Python's values and makes the engine's own (frozen dataclasses with slots) without running Python code.
#pragma once

#include "conversions.h"
#include <structmember.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace wager {

// An int of Python; false if it is none, or too large.
inline bool as_int(PyObject* value, int64_t& out) {
    if (value == nullptr || !PyLong_Check(value)) return false;
    int overflow = 0;
    out = PyLong_AsLongLongAndOverflow(value, &overflow);
    return overflow == 0;
}

inline bool as_int32(PyObject* value, int32_t& out) {
    int64_t wide = 0;
    if (!as_int(value, wide) || wide < std::numeric_limits<int32_t>::min() || wide > std::numeric_limits<int32_t>::max())
        return false;
    out = static_cast<int32_t>(wide);
    return true;
}

// The items of a list or a tuple.
struct Items {
    PyObject** items = nullptr;
    Py_ssize_t size = 0;

    bool read(PyObject* value) {
        if (value == nullptr || !(PyList_Check(value) || PyTuple_Check(value))) return false;
        items = PySequence_Fast_ITEMS(value);
        size = PySequence_Fast_GET_SIZE(value);
        return true;
    }
};

inline Items items_of(nanobind::handle value, const char* error) {
    Items items;
    if (!items.read(value.ptr())) throw std::invalid_argument(error);
    return items;
}

// A tuple; `make` gives a new reference to the value of an index.
template <class Make>
nanobind::object tuple_of(size_t size, Make make) {
    const nanobind::object made = nanobind::steal(PyTuple_New(static_cast<Py_ssize_t>(size)));
    for (size_t i = 0; i < size; ++i) PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i), make(i));
    return made;
}

template <class Int>
nanobind::object tuple_of(const std::vector<Int>& ints) {
    return tuple_of(ints.size(), [&](size_t i) { return PyLong_FromLongLong(ints[i]); });
}

// The ints of a list or a tuple.
template <class Int>
void read_ints(nanobind::handle from, std::vector<Int>& to) {
    const Items items = items_of(from, "guesses, tokens and parents must be lists or tuples");
    to.clear(), to.reserve(items.size);
    for (Py_ssize_t i = 0; i < items.size; ++i) {
        int64_t number = 0;
        if (!as_int(items.items[i], number)) throw std::invalid_argument("a guess, token or parent must be an int");
        to.push_back(number);
    }
}

// A list or a tuple of the items of a sequence.
inline nanobind::object listed(nanobind::handle values, const char* error) {
    nanobind::object sequence = nanobind::steal(PySequence_Fast(values.ptr(), error));
    if (!sequence.is_valid()) throw nanobind::python_error();
    return sequence;
}

// The ids of a sequence of tokens.
inline std::vector<int32_t> read_tokens(nanobind::handle tokens) {
    const nanobind::object sequence = listed(tokens, "tokens must be a sequence");
    const Items items = items_of(sequence, "");
    std::vector<int32_t> ids(items.size);
    for (Py_ssize_t i = 0; i < items.size; ++i)
        if (!as_int32(items.items[i], ids[i])) throw std::invalid_argument("a token is no int of 32 bits");
    return ids;
}

// The elements of an array, by the buffer protocol: nanobind's ndarray takes ten times as long.
class Elements {
  public:
    // `formats`: letters of the struct module, of which one has to be the elements'; they take `bytes` each.
    Elements(nanobind::handle array, int dimensions, const std::string& formats, Py_ssize_t bytes, int flags = 0) {
        if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | flags) < 0) throw nanobind::python_error();
        if (view_.ndim == dimensions && view_.itemsize == bytes && std::strlen(view_.format) == 1 &&
            formats.find(view_.format[0]) != std::string::npos)
            return;
        PyBuffer_Release(&view_);
        throw std::invalid_argument("an array of another type or shape is needed");
    }
    ~Elements() { PyBuffer_Release(&view_); }
    Elements(const Elements&) = delete;
    Elements& operator=(const Elements&) = delete;

    template <class T>
    T* data() const {
        return static_cast<T*>(view_.buf);
    }
    size_t size(int dimension) const { return static_cast<size_t>(view_.shape[dimension]); }

  private:
    Py_buffer view_;
};

// The name of an attribute; it lives as long as the process. A slot of a class, or a field of a named tuple, is found once and then
// read in its place: behind a pass, looking a name up reads half a dozen lines from memory.
class Name {
  public:
    explicit Name(const char* name) : name_(PyUnicode_InternFromString(name)) {}
    // Not valid, with Python's error set, if the value has no such attribute.
    nanobind::object of(PyObject* value) const {
        if (Py_TYPE(value) != type_ && looked_up_ < kMostClasses) find(Py_TYPE(value));
        if (Py_TYPE(value) == type_) {
            PyObject* const found = offset_ < 0 ? PyTuple_GET_ITEM(value, field_) : *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(value) + offset_);
            if (found != nullptr) return nanobind::borrow(found);
        }
        return nanobind::steal(PyObject_GetAttr(value, name_));
    }
    nanobind::object require(PyObject* value) const {
        nanobind::object found = of(value);
        if (!found.is_valid()) throw nanobind::python_error();
        return found;
    }
    PyObject* ptr() const { return name_; }

  private:
    static constexpr int kMostClasses = 8;  // that are looked at; each lives as long as the process

    void find(PyTypeObject* type) const {
        ++looked_up_;
        const nanobind::object slot = nanobind::steal(PyObject_GetAttr(reinterpret_cast<PyObject*>(type), name_));
        if (!slot.is_valid()) return PyErr_Clear();
        if (Py_TYPE(slot.ptr()) == &PyMemberDescr_Type) {
            const PyMemberDef& member = *reinterpret_cast<PyMemberDescrObject*>(slot.ptr())->d_member;
            if (member.type != T_OBJECT_EX) return;
            offset_ = member.offset;
        } else if (std::strcmp(Py_TYPE(slot.ptr())->tp_name, "_collections._tuplegetter") == 0) {
            const nanobind::object fields = nanobind::steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "_fields"));
            const Py_ssize_t field = fields.is_valid() ? PySequence_Index(fields.ptr(), name_) : -1;
            if (field < 0) return PyErr_Clear();
            offset_ = -1, field_ = field;
        } else {
            return;
        }
        Py_INCREF(type);
        type_ = type;
    }

    PyObject* name_;
    mutable PyTypeObject* type_ = nullptr;  // the class whose attribute is known: the last one that was found
    mutable Py_ssize_t offset_ = -1, field_ = 0;
    mutable int looked_up_ = 0;
};

// A class of named tuples; `make` gets the values of all fields.
class TupleType {
  public:
    explicit TupleType(nanobind::handle type) : type_(nanobind::borrow(type)) {
        if (!PyType_Check(type.ptr()) || !PyType_FastSubclass(reinterpret_cast<PyTypeObject*>(type.ptr()), Py_TPFLAGS_TUPLE_SUBCLASS))
            throw std::invalid_argument("not a class of tuples");
    }

    nanobind::object make(std::initializer_list<nanobind::handle> values) const {
        auto* const type = reinterpret_cast<PyTypeObject*>(type_.ptr());
        const nanobind::object made = nanobind::steal(type->tp_alloc(type, static_cast<Py_ssize_t>(values.size())));
        if (!made.is_valid()) throw nanobind::python_error();
        Py_ssize_t field = 0;
        for (nanobind::handle value : values) PyTuple_SET_ITEM(made.ptr(), field++, Py_NewRef(value.ptr()));
        return made;
    }

  private:
    nanobind::object type_;
};

// The fields of a tuple, of which there are `least` at least.
inline PyObject** fields_of(nanobind::handle value, Py_ssize_t least, const char* what) {
    if (!PyTuple_Check(value.ptr()) || PyTuple_GET_SIZE(value.ptr()) < least) throw std::invalid_argument(what);
    return PySequence_Fast_ITEMS(value.ptr());
}

// The value of a mapping, not valid where it has none.
inline nanobind::object value_of(nanobind::handle mapping, PyObject* key) {
    if (PyDict_CheckExact(mapping.ptr())) {
        PyObject* const found = PyDict_GetItemWithError(mapping.ptr(), key);
        if (found == nullptr && PyErr_Occurred()) throw nanobind::python_error();
        return nanobind::borrow(found);
    }
    nanobind::object found = nanobind::steal(PyObject_GetItem(mapping.ptr(), key));
    if (!found.is_valid()) {
        if (!PyErr_ExceptionMatches(PyExc_KeyError)) throw nanobind::python_error();
        PyErr_Clear();
    }
    return found;
}

// A class whose instances have a slot for each field, in the order in which `make` gets the values.
class ValueType {
  public:
    ValueType(nanobind::handle type, std::initializer_list<const char*> fields) : type_(nanobind::borrow(type)) {
        if (!PyType_Check(type.ptr())) throw std::invalid_argument("not a class");
        for (const char* field : fields) {
            const nanobind::object slot = nanobind::steal(PyObject_GetAttrString(type.ptr(), field));
            if (!slot.is_valid() || Py_TYPE(slot.ptr()) != &PyMemberDescr_Type) {
                PyErr_Clear();
                throw std::invalid_argument(std::string("no slot is called ") + field);
            }
            slots_.push_back(reinterpret_cast<PyMemberDescrObject*>(slot.ptr())->d_member);
        }
    }

    // An instance; what Python's own constructor does beyond setting the fields is left out.
    nanobind::object make(std::initializer_list<nanobind::handle> values) const {
        auto* const type = reinterpret_cast<PyTypeObject*>(type_.ptr());
        const nanobind::object made = nanobind::steal(type->tp_alloc(type, 0));
        size_t field = 0;
        for (nanobind::handle value : values)
            if (!made.is_valid() || PyMember_SetOne(reinterpret_cast<char*>(made.ptr()), slots_[field++], value.ptr()) < 0)
                throw nanobind::python_error();
        return made;
    }

  private:
    nanobind::object type_;
    std::vector<PyMemberDef*> slots_;  // of the class, which is kept
};

// The class of drafts.
struct DraftType : ValueType {
    explicit DraftType(nanobind::handle type)
        : ValueType(type, {"seq_id", "tokens", "parents", "scores", "drafter", "draft_probs", "computed"}) {}
};

// Reads what is asked of a drafter, and makes its drafts.
class Drafts {
  public:
    Drafts(nanobind::handle draft, const std::string& drafter) : draft_(draft), drafter_(nanobind::str(drafter.c_str())) {}

    nanobind::object seq_id(nanobind::handle request) const { return seq_id_.require(request.ptr()); }

    // Of any type of integers: a policy of one's own may count by numpy.
    int depth(nanobind::handle request) const {
        const nanobind::object found = nanobind::steal(PyNumber_Index(depth_.require(request.ptr()).ptr()));
        if (!found.is_valid()) throw nanobind::python_error();
        int32_t depth = 0;
        if (!as_int32(found.ptr(), depth)) throw std::invalid_argument("a depth is no int of 32 bits");
        return depth;
    }

    // `token` and `parent` are of a node's index; there are as many as `scores`.
    template <class Token, class Parent>
    nanobind::object make(nanobind::handle seq_id, const std::vector<double>& scores, Token token, Parent parent,
                          nanobind::handle computed = Py_None) const {
        const size_t size = scores.size();
        return draft_.make({seq_id, tuple_of(size, [&](size_t i) { return PyLong_FromLong(token(i)); }),
                            tuple_of(size, [&](size_t i) { return PyLong_FromLong(parent(i)); }),
                            tuple_of(size, [&](size_t i) { return PyFloat_FromDouble(scores[i]); }), drafter_, nanobind::none(), computed});
    }

    // Another's draft, for which no time was taken.
    nanobind::object rename(nanobind::handle draft) const {
        static const Name of_tokens("tokens"), of_parents("parents"), of_scores("scores"), of_probs("draft_probs");
        return draft_.make({seq_id(draft), of_tokens.require(draft.ptr()), of_parents.require(draft.ptr()), of_scores.require(draft.ptr()),
                            drafter_, of_probs.require(draft.ptr()), nanobind::int_(0)});
    }

  private:
    const DraftType draft_;
    const nanobind::object drafter_;
    const Name seq_id_{"seq_id"}, depth_{"depth"};
};

}  // namespace wager
