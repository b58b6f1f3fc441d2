// The Python face of quantisation and of matrices of low rank. Buffers arrive as addresses, as everywhere.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "codec_quant.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Isa = std::optional<std::string_view>;
using Shape = std::tuple<std::int64_t, std::int64_t, std::int64_t>;

float* floats(std::uintptr_t address) { return reinterpret_cast<float*>(address); }

void check(std::int64_t count, std::initializer_list<std::uintptr_t> addresses) {
  if (count < 0) throw std::invalid_argument("count is " + std::to_string(count) + ": it must be 0 or more");
  for (const std::uintptr_t address : addresses) {
    if (address == 0 && count > 0) {
      throw std::invalid_argument("an address is a null pointer (count is " + std::to_string(count) + ")");
    }
  }
}

std::tuple<std::size_t, std::size_t> record(int bits) {
  const argosy::QuantKernels& kernels = argosy::find_quant_kernels(bits);
  return {kernels.block, kernels.record_bytes};
}

void quantise(int bits, std::uintptr_t records, std::uintptr_t values, std::uintptr_t residual, std::int64_t count,
              Isa isa) {
  const argosy::QuantKernels& kernels = argosy::find_quant_kernels(bits, isa);
  check(count, {records, values, residual});
  const nb::gil_scoped_release release;
  kernels.encode(reinterpret_cast<std::byte*>(records), floats(values), floats(residual),
                 static_cast<std::size_t>(count));
}

void dequantise(int bits, std::uintptr_t out, const std::vector<std::uintptr_t>& sources, std::int64_t count, bool add,
                Isa isa) {
  const argosy::QuantKernels& kernels = argosy::find_quant_kernels(bits, isa);
  if (sources.empty()) throw std::invalid_argument("sources is empty: there is nothing to add up");
  check(count, {out});
  std::vector<const std::byte*> addresses;
  addresses.reserve(sources.size());
  for (const std::uintptr_t source : sources) {
    check(count, {source});
    addresses.push_back(reinterpret_cast<const std::byte*>(source));
  }
  const nb::gil_scoped_release release;
  kernels.decode(floats(out), addresses.data(), addresses.size(), static_cast<std::size_t>(count), add);
}

argosy::LowRank checked(const Shape& shape, std::initializer_list<std::uintptr_t> addresses) {
  const auto [rows, columns, rank] = shape;
  if (rows < 1 || columns < 1 || rank < 1) {
    throw std::invalid_argument("shape is " + std::to_string(rows) + " x " + std::to_string(columns) + " of rank " +
                                std::to_string(rank) + ": each must be 1 or more");
  }
  check(rows * columns, addresses);
  return {static_cast<std::size_t>(rows), static_cast<std::size_t>(columns), static_cast<std::size_t>(rank)};
}

void project(std::uintptr_t p, std::uintptr_t matrix, std::uintptr_t sent_p, std::uintptr_t sent_q,
             std::uintptr_t values, float weight, std::uintptr_t q, const Shape& shape, Isa isa) {
  const argosy::LowRankKernels& kernels = argosy::find_low_rank_kernels(isa);
  const argosy::LowRank size = checked(shape, {p, matrix, sent_p, sent_q, values, q});
  const nb::gil_scoped_release release;
  kernels.project(floats(p), floats(matrix), {floats(sent_p), floats(sent_q)}, floats(values), weight, floats(q), size);
}

void settle(std::uintptr_t matrix, std::uintptr_t sent_p, std::uintptr_t sent_q, const Shape& shape, Isa isa) {
  const argosy::LowRankKernels& kernels = argosy::find_low_rank_kernels(isa);
  const argosy::LowRank size = checked(shape, {matrix, sent_p, sent_q});
  const nb::gil_scoped_release release;
  kernels.settle(floats(matrix), {floats(sent_p), floats(sent_q)}, size);
}

void project_back(std::uintptr_t q, std::uintptr_t matrix, std::uintptr_t p, const Shape& shape, Isa isa) {
  const argosy::LowRankKernels& kernels = argosy::find_low_rank_kernels(isa);
  const argosy::LowRank size = checked(shape, {q, matrix, p});
  const nb::gil_scoped_release release;
  kernels.orthogonalise(floats(p), size.rows, size.rank);
  kernels.project_back(floats(q), floats(matrix), floats(p), size);
}

void expand(std::uintptr_t out, std::uintptr_t p, std::uintptr_t q, const Shape& shape, Isa isa) {
  const argosy::LowRankKernels& kernels = argosy::find_low_rank_kernels(isa);
  const argosy::LowRank size = checked(shape, {out, p, q});
  const nb::gil_scoped_release release;
  kernels.expand(floats(out), floats(p), floats(q), size);
}

void restart(std::uintptr_t start, std::uintptr_t q, const Shape& shape) {
  const argosy::LowRank size = checked(shape, {start, q});
  const nb::gil_scoped_release release;
  argosy::find_low_rank_kernels().restart(floats(start), floats(q), size.columns, size.rank);
}

}  // namespace

void bind_codecs_quant(nb::module_& m) {
  m.def("quantised_record", &record, "bits"_a, "The numbers in a block, and the bytes of its record.");
  m.def("quantise", &quantise, "bits"_a, "records"_a, "values"_a, "residual"_a, "count"_a, "isa"_a = nb::none(),
        "Add `values` to `residual`, write the records of the sums, and leave in `residual` what they do not say.");
  m.def("dequantise", &dequantise, "bits"_a, "out"_a, "sources"_a, "count"_a, "add"_a = false, "isa"_a = nb::none(),
        "Set `out` to what the records of all sources say, added up in order, and to what it holds with `add`.");
  m.def("low_rank_project", &project, "p"_a, "matrix"_a, "sent_p"_a, "sent_q"_a, "values"_a, "weight"_a, "q"_a,
        "shape"_a, "isa"_a = nb::none(),
        "matrix += weight * values - sent_p sent_q^T, and p = matrix q. `shape` is (rows, columns, rank).");
  m.def("low_rank_settle", &settle, "matrix"_a, "sent_p"_a, "sent_q"_a, "shape"_a, "isa"_a = nb::none(),
        "matrix -= sent_p sent_q^T, with the bits that `low_rank_project` makes of it.");
  m.def("low_rank_project_back", &project_back, "q"_a, "matrix"_a, "p"_a, "shape"_a, "isa"_a = nb::none(),
        "Make the rows of p orthonormal, and q = matrix^T p.");
  m.def("low_rank_expand", &expand, "out"_a, "p"_a, "q"_a, "shape"_a, "isa"_a = nb::none(), "out = p q^T.");
  m.def("low_rank_restart", &restart, "start"_a, "q"_a, "shape"_a,
        "Rows of q that are not all zeros replace those of `start`, brought to a largest magnitude of one.");
}
