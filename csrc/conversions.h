// nanobind, with all of its conversions that the bindings use. Every file of bindings has the same: without a header a cast
// compiles as well, to one that fails, and the linker keeps either for all files.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
