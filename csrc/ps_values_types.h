// The kernels of ps_values.h, one build for each instruction set: see [Note: one build per instruction set] in lanes.h.
#pragma once

#include <cstddef>

namespace argosy {

struct ValuesKernels {
  void (*to_fp16)(const float* from, std::size_t count, std::byte* to);
  void (*from_fp16)(const std::byte* from, std::size_t count, float* to);
  // One row; the scale is returned, or given.
  float (*to_int8)(const float* from, std::size_t count, signed char* to);
  void (*from_int8)(const signed char* from, std::size_t count, float scale, float* to);
  bool (*finite)(const float* numbers, std::size_t count);
};

namespace baseline {
extern const ValuesKernels kValuesKernels;
}
namespace avx2 {
extern const ValuesKernels kValuesKernels;
}

}  // namespace argosy
