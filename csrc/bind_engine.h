#pragma once

#include <nanobind/nanobind.h>

namespace argosy {

void bind_engine(nanobind::module_& m);

}  // namespace argosy
