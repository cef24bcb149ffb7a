// Declares the bindings beside those of the kernels, each in the file of its name, for the module in bindings.cpp.
#pragma once

#include "conversions.h"

namespace wager {
struct Table;
}

// The instruction set that was chosen, as Python holds it.
struct Isa {
    const wager::Table* table;
};

void bind_step(nanobind::module_& m);
void bind_match(nanobind::module_& m);
void bind_sample(nanobind::module_& m);
void bind_state(nanobind::module_& m);
void bind_ngrams(nanobind::module_& m);
void bind_policy(nanobind::module_& m);
void bind_lookup(nanobind::module_& m);
void bind_recycling(nanobind::module_& m);
