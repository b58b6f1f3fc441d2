// The Python face of the native core. Buffers arrive as addresses (`tensor.data_ptr()`) and element counts: making
// an ndarray of each tensor would cost more than a small reduction does.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "bind_engine.h"
#include "giver.h"
#include "guard.h"
#include "order.h"
#include "reduce.h"
#include "tiles.h"

namespace nb = nanobind;
using namespace nb::literals;

void bind_codecs_quant(nb::module_& m);   // bind_codecs_quant.cpp
void bind_codecs_sparse(nb::module_& m);  // bind_codecs_sparse.cpp
void bind_links(nb::module_& m);          // bind_links.cpp
void bind_ps(nb::module_& m);             // bind_ps.cpp
void bind_table(nb::module_& m);          // bind_table.cpp

namespace {

void reduce(std::string_view op, std::string_view dtype, std::uintptr_t out, const std::vector<std::uintptr_t>& sources,
            std::int64_t count, std::optional<std::string_view> isa) {
  if (count < 0) throw std::invalid_argument("count is " + std::to_string(count) + ": it must be 0 or more");
  const argosy::DType element = argosy::parse_dtype(dtype);
  const argosy::ReduceKernel kernel = argosy::find_reduce_kernel(argosy::parse_op(op), element, isa);
  auto* const out_address = reinterpret_cast<std::byte*>(out);
  std::vector<const std::byte*> addresses;
  addresses.reserve(sources.size());
  for (const std::uintptr_t source : sources) addresses.push_back(reinterpret_cast<const std::byte*>(source));
  argosy::check_reduce_buffers(element, out_address, addresses, static_cast<std::size_t>(count));

  const nb::gil_scoped_release release;
  kernel(out_address, addresses.data(), addresses.size(), static_cast<std::size_t>(count));
}

// What the operating system refuses becomes the OSError subclass of its errno, as from Python's own os module.
void raise_os_error(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const std::system_error& error) {
    const nb::object value = nb::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, value.ptr());
  }
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Argosy's native core.";
  nb::set_leak_warnings(false);  // a script may end with groups that torch still holds: that is nothing to warn of
  nb::register_exception_translator(raise_os_error);
  bind_codecs_quant(m);
  bind_links(m);
  bind_codecs_sparse(m);
  bind_ps(m);
  bind_table(m);

  argosy::bind_engine(m);

  m.def("reduce", &reduce, "op"_a, "dtype"_a, "out"_a, "sources"_a, "count"_a, "isa"_a = nb::none(),
        R"(Reduce the buffers at the addresses `sources`, element by element, into the one at `out`.

`op` is sum, avg, min, max, prod, or for integers band, bor or bxor; `dtype` is f32, f64, bf16, f16, i32, i64, i8, u8 or
i16; `count` is in elements. Sources are combined in their order, 16-bit floats in f32 and rounded once, so the result
has the same bits on every CPU. Integers wrap, and their average truncates. A NaN in any source makes the result NaN.
`out` may be one of the sources.

Runs without the GIL. `isa` names the instruction set to use, for tests; the default is the best of this CPU.)");

  m.def("instruction_sets", &argosy::instruction_sets,
        "The instruction sets that `reduce` can use on this CPU, best first. All give the same bits.");

  m.def("tiles_are_hidden", &argosy::tiles_are_hidden,
        "Whether this CPU has tiles (AMX) whose shape it does not tell, as in some virtual machines.");

  m.def(
      "copy_around",
      [](std::uintptr_t to, std::uintptr_t source, std::size_t bytes) {
        argosy::Giver giver;
        giver.force(true);
        giver.copy(reinterpret_cast<std::byte*>(to), reinterpret_cast<const std::byte*>(source), bytes);
        giver.settle();
      },
      "to"_a, "source"_a, "bytes"_a, nb::call_guard<nb::gil_scoped_release>(),
      "Copy bytes around the caches, without the GIL: what is copied is not read soon.");

  m.def(
      "samples_at",
      [](std::uint64_t size, unsigned half, const std::vector<std::uint64_t>& keys, std::uintptr_t positions,
         std::size_t count, std::uintptr_t samples) {
        const argosy::Order order{size, half, keys};
        argosy::samples_at(order, {reinterpret_cast<const std::int64_t*>(positions), count},
                           reinterpret_cast<std::int64_t*>(samples));
      },
      "size"_a, "half"_a, "keys"_a, "positions"_a, "count"_a, "samples"_a, nb::call_guard<nb::gil_scoped_release>(),
      "The samples at some positions of an epoch, by a Feistel network; without the GIL.");

  m.def("guard", &argosy::guard, "fd"_a,
        R"(Kill this process's whole group when the other end of `fd`, a pipe or stream socket, is closed.

The other end belongs to the launcher: however it dies, the kernel closes that end, so no worker outlives it. A native
thread waits for it, whatever Python is doing. It reads nothing from `fd`, which can still carry messages.)");
}
