// Times the stages of a step without a Python call of its own around each: behind a pass every function and cell of Python
// comes from memory.
#include <algorithm>
#include <cstddef>
#include <vector>

#include "step_bindings.h"
#include "values.h"

namespace nb = nanobind;

namespace {

// The seconds of each stage since they were last taken, by a clock of Python.
class StageSeconds {
  public:
    explicit StageSeconds(nb::object clock) : clock_(std::move(clock)) {}

    size_t index_of(const nb::str& stage) {
        const auto found = std::find_if(names_.begin(), names_.end(), [&](const nb::str& name) { return name.equal(stage); });
        if (found != names_.end()) return static_cast<size_t>(found - names_.begin());
        names_.push_back(stage);
        seconds_.push_back(0.0);
        return names_.size() - 1;
    }

    // False, with Python's error set, if the clock fails.
    bool now(double& seconds) const {
        const nb::object read = nb::steal(PyObject_CallNoArgs(clock_.ptr()));
        seconds = read.is_valid() ? PyFloat_AsDouble(read.ptr()) : -1.0;
        return seconds != -1.0 || PyErr_Occurred() == nullptr;
    }

    void add(size_t index, double seconds) { seconds_[index] += seconds; }

    void take_into(nb::dict taken) {
        for (size_t i = 0; i < names_.size(); ++i) {
            taken[names_[i]] = nb::float_(seconds_[i]);
            seconds_[i] = 0.0;
        }
    }

  private:
    const nb::object clock_;
    std::vector<nb::str> names_;
    std::vector<double> seconds_;
};

constexpr size_t kMostArguments = 8;

// A function whose seconds are added to a stage. A type of Python's own kind, since it is called through the vectorcall
// protocol, and since the collector must see what it holds: an engine holds its stages and they hold the engine.
struct TimedStage {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *owner, *function, *last;
    StageSeconds* seconds;
    size_t index;
};

TimedStage* stage_of(PyObject* self) { return reinterpret_cast<TimedStage*>(self); }

PyObject* call_stage(PyObject* self, PyObject* const* args, size_t flags, PyObject* keywords) {
    TimedStage& stage = *stage_of(self);
    const size_t given = PyVectorcall_NARGS(flags), last = PyTuple_GET_SIZE(stage.last);
    if (keywords != nullptr || given + last > kMostArguments) {
        PyErr_SetString(PyExc_TypeError, "a timed stage takes a few arguments by position");
        return nullptr;
    }
    PyObject* all[kMostArguments + 1];  // the first is scratch space of the function that is called
    std::copy_n(args, given, all + 1);
    for (size_t i = 0; i < last; ++i) all[1 + given + i] = PyTuple_GET_ITEM(stage.last, i);
    double begin = 0.0, end = 0.0;
    if (!stage.seconds->now(begin)) return nullptr;
    nb::object result =
        nb::steal(PyObject_Vectorcall(stage.function, all + 1, (given + last) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
    if (!result.is_valid()) {
        const nb::error_scope raised;  // its seconds count, too
        if (stage.seconds->now(end)) stage.seconds->add(stage.index, end - begin);
        else PyErr_Clear();
        return nullptr;
    }
    if (!stage.seconds->now(end)) return nullptr;
    stage.seconds->add(stage.index, end - begin);
    return result.release().ptr();
}

int traverse_stage(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(stage_of(self)->owner);
    Py_VISIT(stage_of(self)->function);
    Py_VISIT(stage_of(self)->last);
    return 0;
}

int clear_stage(PyObject* self) {
    Py_CLEAR(stage_of(self)->function);
    return 0;
}

void free_stage(PyObject* self) {
    PyTypeObject* const type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_CLEAR(stage_of(self)->function);
    Py_CLEAR(stage_of(self)->owner);
    Py_CLEAR(stage_of(self)->last);
    type->tp_free(self);
    Py_DECREF(type);
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(TimedStage, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_stage)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_stage)},
    {Py_tp_dealloc, reinterpret_cast<void*>(free_stage)},
    {Py_tp_members, members},
    {0, nullptr},
};

PyType_Spec spec = {"wager.kernels._native.TimedStage", sizeof(TimedStage), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                    slots};

// `function` called with `last` after the arguments that it is given.
nb::object timed(nb::handle type, nb::handle owner, const nb::str& name, nb::handle function, const nb::tuple& last) {
    auto* const python_type = reinterpret_cast<PyTypeObject*>(type.ptr());
    const nb::object made = nb::steal(python_type->tp_alloc(python_type, 0));
    if (!made.is_valid()) throw nb::python_error();
    TimedStage& stage = *stage_of(made.ptr());
    stage.call = call_stage;
    stage.seconds = nb::inst_ptr<StageSeconds>(owner);
    stage.index = stage.seconds->index_of(name);
    stage.owner = Py_NewRef(owner.ptr());
    stage.function = Py_NewRef(function.ptr());
    stage.last = Py_NewRef(last.ptr());
    return made;
}

}  // namespace

void bind_stages(nb::module_& m) {
    PyObject* const made = PyType_FromSpec(&spec);
    if (made == nullptr) throw nb::python_error();
    const nb::object type = nb::steal(made);
    nb::class_<StageSeconds>(m, "StageSeconds")
        .def(nb::init<nb::object>())
        .def("timed",
             [type](nb::handle self, const nb::str& stage, nb::handle function, const nb::args& last) {
                 return timed(type, self, stage, function, last);
             })
        .def("take_into", &StageSeconds::take_into);
}
