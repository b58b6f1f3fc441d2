// The vocabulary that the reduction's dispatcher and its kernels share.
//
// Every build of the kernels includes this file, so it stays free of standard templates: see
// [Note: one build per instruction set] in lanes.h.
#pragma once

#include <cstddef>

namespace argosy {

enum class Op { sum, avg, min, max, prod };
enum class DType { f32, f64, bf16, f16, i32, i64 };

// Reduces `count` elements of `source_count` (>= 1) sources into `out`. Pointers need no alignment; `out` may be
// one of the sources, but may not overlap one otherwise.
using ReduceKernel = void (*)(std::byte* out, const std::byte* const* sources, std::size_t source_count,
                              std::size_t count);

namespace baseline {
ReduceKernel find_kernel(Op op, DType dtype);
}
namespace avx2 {
ReduceKernel find_kernel(Op op, DType dtype);
}
namespace avx512 {
ReduceKernel find_kernel(Op op, DType dtype);
}

}  // namespace argosy
