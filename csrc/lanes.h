// Vectors of the widest kind that one build of the kernels may use, and how elements get in and out of them.
//
// A kernel is written once, over the compiler's vector types: `a + b` adds all lanes, on any instruction set. An
// element type (`Native<float>` here, the 16-bit floats in half.h) names the type that its arithmetic is done in
// (`Wide`), and moves `kStep` elements at a time between memory, at any alignment, and two vectors: two, because one
// vector of 16-bit elements widens to two of 32 bits.
//
// [Note: one build per instruction set]
// Whatever includes this file is compiled several times, each time with other -m flags and another ARGOSY_ISA. Were
// an inline function to have the same name in two of these builds, the linker would keep one of the two, perhaps
// the one with instructions that this CPU lacks. So everything here has internal linkage, in a namespace of its own,
// and the standard library gives only types and compile-time constants.
#pragma once

#include <cstddef>
#include <type_traits>

#ifndef ARGOSY_ISA
#error "define ARGOSY_ISA, the namespace of this build, before including lanes.h"
#endif
#define ARGOSY_INLINE [[gnu::always_inline]] inline

namespace argosy::ARGOSY_ISA {
namespace {

// With AVX-512 too, vectors are 256 bits: what that build gains is its instructions (masks, 64-bit multiplication) and
// registers. On a Zen 4, 512 bits made streams from memory a fifth slower, and sped up only 16-bit floats in the cache,
// by a tenth.
#if defined(__AVX2__)
constexpr std::size_t kVectorBytes = 32;
#else
constexpr std::size_t kVectorBytes = 16;
#endif

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
  typedef T unaligned __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));
};
template <class T>
using Vector = typename VectorOf<T>::type;

template <class T>
struct Pair {
  Vector<T> first, second;
};

template <class T>
ARGOSY_INLINE Vector<T> load_vector(const std::byte* address) {
  return *reinterpret_cast<const typename VectorOf<T>::unaligned*>(address);
}

template <class T>
ARGOSY_INLINE void store_vector(std::byte* address, Vector<T> value) {
  *reinterpret_cast<typename VectorOf<T>::unaligned*>(address) = value;
}

// A type that the CPU computes in.
template <class T>
struct Native {
  using Wide = T;
  static constexpr std::size_t kBytes = sizeof(T);
  static constexpr std::size_t kStep = 2 * kVectorBytes / sizeof(Wide);

  ARGOSY_INLINE static Pair<T> load(const std::byte* address) {
    return {load_vector<T>(address), load_vector<T>(address + kVectorBytes)};
  }
  ARGOSY_INLINE static void store(std::byte* address, Pair<T> value) {
    store_vector<T>(address, value.first);
    store_vector<T>(address + kVectorBytes, value.second);
  }
};

}  // namespace
}  // namespace argosy::ARGOSY_ISA
