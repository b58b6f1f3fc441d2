// Eight lanes in every build, whatever the width of its registers: sums over lanes are then made in the same order on
// every CPU. See [Note: the same bits everywhere] in reduce_kernels.h. Vectors that are wider than the registers are
// passed to inlined functions only, so it matters to nobody how they would be passed (-Wno-psabi).
#pragma once

#include <cstddef>
#include <cstdint>

#ifndef ARGOSY_ISA
#error "define ARGOSY_ISA, the namespace of this build, before including codec_quant_lanes.h"
#endif
#ifndef ARGOSY_INLINE
#define ARGOSY_INLINE [[gnu::always_inline]] inline
#endif

namespace argosy::ARGOSY_ISA {
namespace {

constexpr std::size_t kLanes = 8;

template <class T>
struct LanesOf {
  typedef T type __attribute__((vector_size(kLanes * sizeof(T))));
  typedef T unaligned __attribute__((vector_size(kLanes * sizeof(T)), aligned(1), may_alias));
};
template <class T>
using Lanes = typename LanesOf<T>::type;

template <class T, class Address>
ARGOSY_INLINE Lanes<T> load_lanes(const Address* address) {
  return *reinterpret_cast<const typename LanesOf<T>::unaligned*>(address);
}

template <class T, class Address>
ARGOSY_INLINE void store_lanes(Address* address, Lanes<T> value) {
  *reinterpret_cast<typename LanesOf<T>::unaligned*>(address) = value;
}

ARGOSY_INLINE Lanes<float> spread(float value) { return Lanes<float>{} + value; }

}  // namespace
}  // namespace argosy::ARGOSY_ISA
