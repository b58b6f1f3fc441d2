// The passes of the sparse codecs over all elements, written once and built for each instruction set.
//
// They are bound by memory: each element is read and written once in each array, whatever is done to it. So updating,
// looking for what is large and zeroing the gradient for the sum to come are one pass. Once training has warmed up, few
// strips hold anything large.
#pragma once

#include "codec_sparse_types.h"
#include "lanes.h"

#if defined(__AVX512VL__)
#include <immintrin.h>
#endif

namespace argosy::ARGOSY_ISA {
namespace {

using Floats = Vector<float>;
using Words = Vector<std::int32_t>;
constexpr std::size_t kLanes = kVectorBytes / sizeof(float);
constexpr std::size_t kVectors = 4, kStrip = kVectors * kLanes;

enum class Momentum { none, plain, nesterov };

// A vector of floats, or one float.
template <class V>
ARGOSY_INLINE V load(const float* address) {
  V value;
  __builtin_memcpy(&value, address, sizeof value);
  return value;
}

template <class V>
ARGOSY_INLINE void store(float* address, V value) {
  __builtin_memcpy(address, &value, sizeof value);
}

ARGOSY_INLINE std::uint32_t magnitude(float value) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits & kMagnitude;
}

ARGOSY_INLINE bool any(Words mask) {
  const auto wide = (Vector<long long>)mask;
  long long all = 0;
  for (std::size_t i = 0; i < kVectorBytes / sizeof(long long); ++i) all |= wide[i];
  return all != 0;
}

// What `kept` becomes at element `i`, and `velocity`, if there is one.
template <Momentum kMomentum, class V>
ARGOSY_INLINE V updated(const Share& share, std::size_t i, V& velocity) {
  V gradient = load<V>(share.gradient + i) * share.scale;
  if (share.parameter != nullptr) gradient = gradient + load<V>(share.parameter + i) * share.decay;
  const V kept = share.kept != nullptr ? load<V>(share.kept + i) : V{};
  if constexpr (kMomentum == Momentum::none) {
    return kept + gradient;
  } else if constexpr (kMomentum == Momentum::plain) {
    velocity = load<V>(share.velocity + i) * share.momentum + gradient;
    return kept + velocity;
  } else {
    velocity = (load<V>(share.velocity + i) + gradient) * share.momentum;
    return kept + velocity + gradient;
  }
}

// [Note: not finite]
// A NaN or an infinity must reach all workers, and must not stay: kept, it would spoil every later step. The passes
// take it out of what is kept where they find it.
[[gnu::noinline]] void expel(const Share& share, std::size_t begin, float* fresh, std::size_t count,
                             Candidates& found) {
  for (std::size_t i = 0; i < count; ++i) {
    if (magnitude(fresh[i]) < kInfinite) continue;
    fresh[i] = 0;
    if (share.kept != nullptr) share.kept[begin + i] = 0;
    if (share.velocity != nullptr) share.velocity[begin + i] = 0;
    if (found.broken == Candidates::kNone) found.broken = begin + i;
  }
}

// Appends the elements that are large enough, without branches: it writes all of them, and keeps what counts.
template <std::size_t kCount>
ARGOSY_INLINE void append(std::size_t begin, const float* fresh, std::uint32_t least, Candidates& found) {
  std::size_t end = found.count;
#if defined(__AVX512VL__)
  if constexpr (kCount > 1) {  // packed in registers: on a Zen 4, packing straight to memory takes a hundred cycles
    static_assert(kLanes == 8);
    const __m256i bound = _mm256_set1_epi32(static_cast<int>(least)), sign = _mm256_set1_epi32(kMagnitude);
    __m256i index =
        _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(begin)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    for (std::size_t i = 0; i < kCount; i += kLanes, index = _mm256_add_epi32(index, _mm256_set1_epi32(kLanes))) {
      const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(fresh + i));
      const __mmask8 large = _mm256_cmpge_epu32_mask(_mm256_and_si256(value, sign), bound);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(found.values + end), _mm256_maskz_compress_epi32(large, value));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(found.indices + end), _mm256_maskz_compress_epi32(large, index));
      end += static_cast<std::size_t>(__builtin_popcount(large));
    }
    found.count = end;
    return;
  }
#endif
  for (std::size_t i = 0; i < kCount; ++i) {
    found.values[end] = fresh[i];
    found.indices[end] = static_cast<std::uint32_t>(begin + i);
    end += magnitude(fresh[i]) >= least;
  }
  found.count = end;
}

template <std::size_t kCount>
[[gnu::noinline]] void append_strip(const Share& share, std::size_t begin, float* fresh, std::uint32_t least,
                                    Candidates& found) {
  bool finite = true;
  for (std::size_t i = 0; i < kCount; ++i) finite &= magnitude(fresh[i]) < kInfinite;
  if (!finite) expel(share, begin, fresh, kCount, found);
  append<kCount>(begin, fresh, least, found);
}

// Runs over strips and then over single elements. `next<V>(i)` gives and stores the elements from `i` on.
template <class Next>
ARGOSY_INLINE std::size_t scan(const Share& share, std::size_t begin, std::uint32_t least, Candidates& found,
                               Next next) {
  const Words bound = Words{} + static_cast<std::int32_t>(least),
              sign = Words{} + static_cast<std::int32_t>(kMagnitude);
  std::size_t i = begin;
  for (; share.count - i >= kStrip; i += kStrip) {
    if (found.room - found.count < kStrip) return i;
    Floats fresh[kVectors];
    Words hits{};
    for (std::size_t j = 0; j < kVectors; ++j) {
      fresh[j] = next.template operator()<Floats>(i + j * kLanes);
      hits |= ((Words)fresh[j] & sign) >= bound;
    }
    if (any(hits)) [[unlikely]] {
      append_strip<kStrip>(share, i, reinterpret_cast<float*>(fresh), least, found);
    }
  }
  for (; i < share.count; ++i) {
    if (found.room == found.count) return i;
    float fresh = next.template operator()<float>(i);
    append_strip<1>(share, i, &fresh, least, found);
  }
  return i;
}

template <Momentum kMomentum>
std::size_t gather_as(const Share& given, std::size_t begin, std::uint32_t least, Candidates& found) {
  const Share share = given;  // a copy that no store can change: what it says about null pointers stays in registers
  return scan(share, begin, least, found, [&share]<class V>(std::size_t i) {
    V velocity;
    const V fresh = updated<kMomentum, V>(share, i, velocity);
    if constexpr (kMomentum != Momentum::none) store(share.velocity + i, velocity);
    store(share.kept + i, fresh);
    store(share.gradient + i, V{});
    return fresh;
  });
}

std::size_t collect(const Share& share, std::size_t begin, std::uint32_t least, Candidates& found) {
  return scan(share, begin, least, found, [&share]<class V>(std::size_t i) { return load<V>(share.kept + i); });
}

template <Momentum kMomentum, class V>
ARGOSY_INLINE V drain_at(const Share& share, std::size_t i) {
  V velocity;
  const V fresh = updated<kMomentum, V>(share, i, velocity);
  if constexpr (kMomentum != Momentum::none) store(share.velocity + i, velocity);
  if (share.kept != nullptr) store(share.kept + i, V{});
  store(share.gradient + i, fresh);
  return fresh;
}

template <Momentum kMomentum>
void drain_as(const Share& given) {
  const Share share = given;
  Candidates none{};
  const Words infinite = Words{} + static_cast<std::int32_t>(kInfinite);
  std::size_t i = 0;
  for (; share.count - i >= kLanes; i += kLanes) {
    Floats fresh = drain_at<kMomentum, Floats>(share, i);
    if (any(((Words)fresh & static_cast<std::int32_t>(kMagnitude)) >= infinite)) [[unlikely]] {
      expel(share, i, reinterpret_cast<float*>(&fresh), kLanes, none);
    }
  }
  for (; i < share.count; ++i) {
    float fresh = drain_at<kMomentum, float>(share, i);
    expel(share, i, &fresh, 1, none);
  }
}

template <Momentum kMomentum>
void sample_as(const Share& share, std::size_t stride, float* values, std::size_t runs) {
  typedef float Run __attribute__((vector_size(kSampleRun * sizeof(float))));
  constexpr std::size_t kAhead = 24;  // runs: the CPU's own prefetchers do not follow such strides
  for (std::size_t r = 0; r < runs; ++r) {
    const std::size_t i = r * kSampleRun * stride, later = r + kAhead < runs ? i + kAhead * kSampleRun * stride : i;
    __builtin_prefetch(share.gradient + later);
    __builtin_prefetch(share.kept + later);
    if (share.velocity != nullptr) __builtin_prefetch(share.velocity + later);
    if (share.parameter != nullptr) __builtin_prefetch(share.parameter + later);
    Run velocity;
    store(values + r * kSampleRun, updated<kMomentum, Run>(share, i, velocity));
  }
}

Momentum momentum_of(const Share& share) {
  if (share.velocity == nullptr) return Momentum::none;
  return share.nesterov ? Momentum::nesterov : Momentum::plain;
}

void sample(const Share& share, std::size_t stride, float* values, std::size_t runs) {
  switch (momentum_of(share)) {
    case Momentum::none:
      return sample_as<Momentum::none>(share, stride, values, runs);
    case Momentum::plain:
      return sample_as<Momentum::plain>(share, stride, values, runs);
    case Momentum::nesterov:
      return sample_as<Momentum::nesterov>(share, stride, values, runs);
  }
}

std::size_t gather(const Share& share, std::size_t begin, std::uint32_t least, Candidates& found) {
  switch (momentum_of(share)) {
    case Momentum::none:
      return gather_as<Momentum::none>(share, begin, least, found);
    case Momentum::plain:
      return gather_as<Momentum::plain>(share, begin, least, found);
    case Momentum::nesterov:
      break;
  }
  return gather_as<Momentum::nesterov>(share, begin, least, found);
}

void drain(const Share& share) {
  switch (momentum_of(share)) {
    case Momentum::none:
      return drain_as<Momentum::none>(share);
    case Momentum::plain:
      return drain_as<Momentum::plain>(share);
    case Momentum::nesterov:
      return drain_as<Momentum::nesterov>(share);
  }
}

}  // namespace

const SparseKernels sparse_kernels = {sample, gather, collect, drain};

}  // namespace argosy::ARGOSY_ISA
