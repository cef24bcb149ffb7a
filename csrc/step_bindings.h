// Declares the bindings beside those of the kernels, each in the file of its name, for the module in bindings.cpp.
#pragma once

#include <nanobind/nanobind.h>

void bind_step(nanobind::module_& m);
void bind_commit(nanobind::module_& m);
void bind_ngrams(nanobind::module_& m);
void bind_policy(nanobind::module_& m);
void bind_lookup(nanobind::module_& m);
