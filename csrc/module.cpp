#include <nanobind/nanobind.h>

NB_MODULE(_native, m) { m.doc() = "Argosy's native core."; }
