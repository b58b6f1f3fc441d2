#include "table_limit.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <vector>

#include "hash.h"
#include "pages.h"

namespace argosy {
namespace {

constexpr std::size_t kAhead = 16;  // rows, as in tables

struct Array {
  float* rows;
  std::size_t row_floats, head_floats, dim;

  float* at(std::uint32_t row) const { return rows + row * row_floats; }
};

void prefetch(const float* memory, std::size_t floats) {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  for (std::uintptr_t line = begin / 64 * 64; line < begin + floats * sizeof(float); line += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(line));
    asm volatile("");  // else gcc takes this for a function without effect, and drops calls of it
  }
}

void gather(const Array& array, const std::vector<std::uint32_t>& places, float* out) {
  const std::size_t skip = array.head_floats, dim = array.dim;
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (i + kAhead < places.size()) prefetch(array.at(places[i + kAhead]) + skip, dim);
    const float* value = array.at(places[i]) + skip;
    float* __restrict to = out + i * dim;
    for (std::size_t j = 0; j < dim; ++j) to[j] = value[j];
  }
}

void scatter(const Array& array, const std::vector<std::uint32_t>& places, const float* gradients) {
  const std::size_t dim = array.dim;
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (i + kAhead < places.size()) prefetch(array.at(places[i + kAhead]), array.row_floats);
    float* __restrict row = array.at(places[i]);
    float* const end = row + array.row_floats;
    const float* gradient = gradients + i * dim;
    for (std::size_t j = 0; j < array.head_floats; ++j) row[j] += 1;
    for (row += array.head_floats; row < end; row += dim) {
      const std::size_t floats = std::min(dim, static_cast<std::size_t>(end - row));
      for (std::size_t j = 0; j < floats; ++j) row[j] += gradient[j];
    }
  }
}

template <class Work>
double seconds_of(Work work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

RandomAccess random_access_limit(std::size_t rows, std::size_t head_floats, std::size_t dim, std::size_t state_floats,
                                 std::size_t count, std::size_t repeats) {
  const std::size_t row_floats = head_floats + dim + state_floats, bytes = rows * row_floats * sizeof(float);
  Pages pages;
  const Array array{reinterpret_cast<float*>(pages.take(bytes)), row_floats, head_floats, dim};
  std::fill_n(array.rows, rows * row_floats, 0.0f);
  std::vector<float> dense(count * dim, 1.0f);
  std::vector<std::uint32_t> places(count);
  std::uint64_t drawn = 0;
  const double never = std::numeric_limits<double>::infinity();
  RandomAccess best{never, never};
  for (std::size_t repeat = 0; repeat < repeats; ++repeat) {
    for (std::uint32_t& place : places) place = static_cast<std::uint32_t>(mix(++drawn) % rows);
    best.gather_seconds = std::min(best.gather_seconds, seconds_of([&] { gather(array, places, dense.data()); }));
    for (std::uint32_t& place : places) place = static_cast<std::uint32_t>(mix(++drawn) % rows);
    best.scatter_seconds = std::min(best.scatter_seconds, seconds_of([&] { scatter(array, places, dense.data()); }));
  }
  return best;
}

}  // namespace argosy
