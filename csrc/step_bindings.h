// Declares the bindings beside those of the kernels, each in the file of its name, for the module in bindings.cpp.
#pragma once

#include <cstdint>

#include "conversions.h"

namespace wager {
struct Table;
}

// Memory of Python's side, which comes in as an integer.
using Address = uintptr_t;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

// The instruction set that was chosen, as Python holds it.
struct Isa {
    const wager::Table* table;
};

void bind_step(nanobind::module_& m);
void bind_match(nanobind::module_& m);
void bind_sample(nanobind::module_& m);
void bind_state(nanobind::module_& m);
void bind_stages(nanobind::module_& m);
void bind_ngrams(nanobind::module_& m);
void bind_policy(nanobind::module_& m);
void bind_lookup(nanobind::module_& m);
void bind_recycling(nanobind::module_& m);
void bind_heads(nanobind::module_& m);
void bind_drafts(nanobind::module_& m);
