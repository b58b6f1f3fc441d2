// The Python face of the sparse codecs. Optional arrays are 0 where there are none.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>

#include <optional>
#include <stdexcept>
#include <string_view>

#include "codec_sparse.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace argosy;
using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

Share share_of(Address gradient, Address velocity, Address kept, Address parameter, std::size_t count, float scale,
               float decay, float momentum, bool nesterov) {
  return {at<float>(gradient),
          at<float>(velocity),
          at<float>(kept),
          at<const float>(parameter),
          count,
          scale,
          decay,
          momentum,
          nesterov};
}

}  // namespace

void bind_codecs_sparse(nb::module_& m) {
  m.def("sparse_entries", &sparse_entries, "count"_a, "k"_a);

  m.def(
      "sparse_compress",
      [](Address gradient, Address velocity, Address kept, Address parameter, std::size_t count, float scale,
         float decay, float momentum, bool nesterov, std::size_t k, Address values, Address gaps,
         std::optional<std::string_view> isa) {
        const nb::gil_scoped_release release;
        const Share share = share_of(gradient, velocity, kept, parameter, count, scale, decay, momentum, nesterov);
        return sparse_compress(share, k, at<float>(values), at<std::uint16_t>(gaps), isa);
      },
      "gradient"_a, "velocity"_a, "kept"_a, "parameter"_a, "count"_a, "scale"_a, "decay"_a, "momentum"_a, "nesterov"_a,
      "k"_a, "values"_a, "gaps"_a, "isa"_a = nb::none());

  m.def(
      "sparse_drain",
      [](Address gradient, Address velocity, Address kept, Address parameter, std::size_t count, float scale,
         float decay, float momentum, bool nesterov, std::optional<std::string_view> isa) {
        const nb::gil_scoped_release release;
        sparse_drain(share_of(gradient, velocity, kept, parameter, count, scale, decay, momentum, nesterov), isa);
      },
      "gradient"_a, "velocity"_a, "kept"_a, "parameter"_a, "count"_a, "scale"_a, "decay"_a, "momentum"_a, "nesterov"_a,
      "isa"_a = nb::none());

  m.def(
      "sparse_add",
      [](Address out, std::size_t count, Address values, Address gaps, std::size_t entries) {
        const nb::gil_scoped_release release;
        sparse_add(at<float>(out), count, at<const float>(values), at<const std::uint16_t>(gaps), entries);
      },
      "out"_a, "count"_a, "values"_a, "gaps"_a, "entries"_a);

  m.def(
      "sparse_descend",
      [](Address parameter, Address gradient, std::size_t count, float rate, Address gaps, std::size_t entries,
         std::size_t messages) {
        const nb::gil_scoped_release release;
        return sparse_descend(at<float>(parameter), at<const float>(gradient), count, rate,
                              at<const std::uint16_t>(gaps), entries, messages);
      },
      "parameter"_a, "gradient"_a, "count"_a, "rate"_a, "gaps"_a, "entries"_a, "messages"_a);
}
