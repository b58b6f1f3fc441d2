// Included once for each instruction set, with ARGOSY_ISA defined.
#pragma once

#include "half.h"
#include "ps_values_types.h"

namespace argosy::ARGOSY_ISA {
namespace {

constexpr float kMostFp16 = 65504;

// Bit patterns, as a comparison of floats may be compiled on the promise that none of them is a NaN.
ARGOSY_INLINE bool is_finite(float number) {
  return (__builtin_bit_cast(unsigned, number) & 0x7f800000u) != 0x7f800000u;
}

ARGOSY_INLINE float saturated(float number) {
  if (!is_finite(number)) return number;
  return number > kMostFp16 ? kMostFp16 : number < -kMostFp16 ? -kMostFp16 : number;
}

void to_fp16(const float* from, std::size_t count, std::byte* to) {
  constexpr std::size_t kStep = Float16::kStep;
  float block[kStep];
  std::byte halves[kStep * 2];
  for (std::size_t i = 0; i < count; i += kStep) {
    const std::size_t there = count - i < kStep ? count - i : kStep;
    for (std::size_t j = 0; j < kStep; ++j) block[j] = j < there ? saturated(from[i + j]) : 0;
    Float16::store(halves, Native<float>::load(reinterpret_cast<const std::byte*>(block)));
    __builtin_memcpy(to + i * 2, halves, there * 2);
  }
}

void from_fp16(const std::byte* from, std::size_t count, float* to) {
  constexpr std::size_t kStep = Float16::kStep;
  std::byte halves[kStep * 2] = {};
  float block[kStep];
  for (std::size_t i = 0; i < count; i += kStep) {
    const std::size_t there = count - i < kStep ? count - i : kStep;
    __builtin_memcpy(halves, from + i * 2, there * 2);
    Native<float>::store(reinterpret_cast<std::byte*>(block), Float16::load(halves));
    __builtin_memcpy(to + i, block, there * sizeof(float));
  }
}

bool finite(const float* numbers, std::size_t count) {
  unsigned beyond = 0;
  for (std::size_t i = 0; i < count; ++i) {
    beyond |= (__builtin_bit_cast(unsigned, numbers[i]) & 0x7f800000u) == 0x7f800000u;
  }
  return beyond == 0;
}

float to_int8(const float* from, std::size_t count, signed char* to) {
  if (!finite(from, count)) {
    for (std::size_t i = 0; i < count; ++i) to[i] = 0;
    return __builtin_nanf("");
  }
  float most = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const float magnitude = __builtin_fabsf(from[i]);
    most = magnitude > most ? magnitude : most;
  }
  const float scale = most / 127.0f;
  const float inverse = scale > 1e-36f ? 1.0f / scale : 0.0f;  // of less, the inverse might be no number
  for (std::size_t i = 0; i < count; ++i) {
    const float code = from[i] * inverse;
    to[i] = static_cast<signed char>(static_cast<int>(code + (code < 0 ? -0.5f : 0.5f)));
  }
  return scale > 1e-36f ? scale : 0.0f;
}

void from_int8(const signed char* from, std::size_t count, float scale, float* to) {
  for (std::size_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]) * scale;
}

}  // namespace

extern const ValuesKernels kValuesKernels = {to_fp16, from_fp16, to_int8, from_int8, finite};

}  // namespace argosy::ARGOSY_ISA
