#include "ps_values.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "ps_values_types.h"
#include "reduce.h"

namespace argosy {
namespace {

const ValuesKernels& kernels() {
#if defined(__x86_64__)
  static const bool wide = instruction_sets().front() != "baseline";
  if (wide) return avx2::kValuesKernels;
#endif
  return baseline::kValuesKernels;
}

std::uint64_t rows_of(std::uint64_t count, std::size_t width) { return (count + width - 1) / width; }

}  // namespace

PsValues parse_values(std::string_view name) {
  if (name == "fp32") return PsValues::fp32;
  if (name == "fp16") return PsValues::fp16;
  if (name == "int8") return PsValues::int8;
  throw std::invalid_argument("values '" + std::string(name) + "' do not travel: choose fp32, fp16 or int8");
}

std::uint64_t encoded_bytes(PsValues values, std::uint64_t count, std::size_t width) {
  if (values == PsValues::fp32) return count * sizeof(float);
  if (values == PsValues::fp16) return count * 2;
  return rows_of(count, width) * sizeof(float) + count;
}

void encode(PsValues values, const float* from, std::size_t count, std::size_t width, std::byte* to) {
  if (values == PsValues::fp32) {
    std::memcpy(to, from, count * sizeof(float));
  } else if (values == PsValues::fp16) {
    kernels().to_fp16(from, count, to);
  } else {
    auto* const codes = reinterpret_cast<signed char*>(to + rows_of(count, width) * sizeof(float));
    for (std::size_t begin = 0; begin < count; begin += width, to += sizeof(float)) {
      const float scale = kernels().to_int8(from + begin, std::min(width, count - begin), codes + begin);
      std::memcpy(to, &scale, sizeof scale);
    }
  }
}

void decode(PsValues values, const std::byte* from, std::size_t count, std::size_t width, float* to) {
  if (values == PsValues::fp32) {
    std::memcpy(to, from, count * sizeof(float));
  } else if (values == PsValues::fp16) {
    kernels().from_fp16(from, count, to);
  } else {
    const auto* const codes = reinterpret_cast<const signed char*>(from + rows_of(count, width) * sizeof(float));
    for (std::size_t begin = 0; begin < count; begin += width, from += sizeof(float)) {
      float scale;
      std::memcpy(&scale, from, sizeof scale);
      kernels().from_int8(codes + begin, std::min(width, count - begin), scale, to + begin);
    }
  }
}

std::size_t first_not_finite(const float* numbers, std::size_t count, std::size_t width) {
  const std::size_t rows = rows_of(count, width);
  if (kernels().finite(numbers, count)) return rows;
  for (std::size_t row = 0; row < rows; ++row) {
    if (!kernels().finite(numbers + row * width, std::min(width, count - row * width))) return row;
  }
  return rows;
}

}  // namespace argosy
