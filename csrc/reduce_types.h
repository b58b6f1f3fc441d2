// The vocabulary that the reduction's dispatcher and its kernels share.
//
// Every build of the kernels includes this file, so it stays free of standard templates: see
// [Note: one build per instruction set] in lanes.h.
#pragma once

#include <cstddef>

namespace argosy {

enum class Op { sum, avg, min, max, prod, band, bor, bxor };

// Those from `boolean` on are only moved, never reduced; a `raw` one is that many bytes of whatever has no name here.
enum class DType { f32, f64, bf16, f16, i32, i64, i8, u8, i16, boolean, c64, c128, raw1, raw2, raw4, raw8 };

// Reduces `count` elements of `source_count` (>= 1) sources into `out`. Pointers need no alignment; `out` may be
// one of the sources, but may not overlap one otherwise.
using ReduceKernel = void (*)(std::byte* out, const std::byte* const* sources, std::size_t source_count,
                              std::size_t count);

// A build's kernel, or null if elements of that type cannot be reduced by that operation.
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
