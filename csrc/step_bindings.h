// Declares the bindings of step_bindings.cpp and commit_bindings.cpp for the module in bindings.cpp.
#pragma once

#include <nanobind/nanobind.h>

void bind_step(nanobind::module_& m);
void bind_commit(nanobind::module_& m);
