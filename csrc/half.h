// The two 16-bit floats as element types: computed in float, and rounded to nearest even when stored.
#pragma once

#include <cstdint>

#include "lanes.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace argosy::ARGOSY_ISA {
namespace {

using Floats = Vector<float>;
using Bits = Vector<std::uint32_t>;

struct Half {
  using Wide = float;
  static constexpr std::size_t kBytes = 2;
  static constexpr std::size_t kStep = 2 * kVectorBytes / sizeof(Wide);
};

// Seen as 32-bit lanes, a vector of 16-bit elements holds one in the lower and one in the upper half of each lane, so
// a shift or a mask parts them, and nothing has to move between lanes.
constexpr std::uint32_t kLower = 0xffff, kUpper = 0xffff0000;

// A bfloat16 is the upper half of a float. The CPU's own conversion (AVX512_BF16) would flush denormals to zero.
struct BFloat16 : Half {
  ARGOSY_INLINE static Pair<float> load(const std::byte* address) {
    const Bits both = load_vector<std::uint32_t>(address);
    return {Floats(both << 16), Floats(both & kUpper)};
  }
  ARGOSY_INLINE static void store(std::byte* address, Pair<float> value) {
    store_vector<std::uint32_t>(address, (round(value.first) >> 16) | (round(value.second) & kUpper));
  }

  // Adding just under half of the last kept bit, and one more if that bit is odd, rounds to nearest even. A NaN must
  // be the canonical one, which stays itself: another might carry over into a number.
  ARGOSY_INLINE static Bits round(Floats value) {
    const Bits bits = Bits(value);
    return bits + 0x7fff + ((bits >> 16) & 1);
  }
};

#if defined(__AVX2__)

struct Float16 : Half {
  ARGOSY_INLINE static Pair<float> load(const std::byte* address) {
    const auto* halves = reinterpret_cast<const __m128i*>(address);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
  }
  ARGOSY_INLINE static void store(std::byte* address, Pair<float> value) {
    auto* halves = reinterpret_cast<__m128i*>(address);
    _mm_storeu_si128(halves, _mm256_cvtps_ph(value.first, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(value.second, _MM_FROUND_TO_NEAREST_INT));
  }
};

#elif defined(__aarch64__)

struct Float16 : Half {
  ARGOSY_INLINE static Pair<float> load(const std::byte* address) {
    const float16x8_t halves = load_vector<__fp16>(address);
    return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
  }
  ARGOSY_INLINE static void store(std::byte* address, Pair<float> value) {
    store_vector<__fp16>(address, vcvt_high_f16_f32(vcvt_f16_f32(value.first), value.second));
  }
};

#else

// Without hardware for it. A float has 8 bits of exponent and 23 of mantissa, a half 5 and 10: between normal numbers
// a shift by 13 and another exponent bias are all it takes. Halves below 2^-14 are denormal: there, adding a power of
// two puts the mantissa in place (and rounds it), and subtracting it normalises.
constexpr std::int32_t power_of_two(int exponent) { return (127 + exponent) << 23; }  // the bits of a float

struct Float16 : Half {
  ARGOSY_INLINE static Pair<float> load(const std::byte* address) {
    const Bits both = load_vector<std::uint32_t>(address);
    return {widen(both & kLower), widen(both >> 16)};
  }
  ARGOSY_INLINE static void store(std::byte* address, Pair<float> value) {
    store_vector<std::uint32_t>(address, narrow(value.first) | (narrow(value.second) << 16));
  }

  using Signed = Vector<std::int32_t>;  // only signed lanes can be compared on every CPU

  static constexpr std::int32_t kRebias = (127 - 15) << 23;
  static constexpr std::int32_t kInfinity = power_of_two(128), kHalfInfinity = 0x7c00, kHalfNan = 0x7e00;

  ARGOSY_INLINE static Floats widen(Bits half) {
    const Signed exponent = Signed(half) & kHalfInfinity;
    const Signed normal = ((Signed(half) & 0x7fff) << 13) + kRebias;
    const Floats smallest_normal = Floats(Signed{} + power_of_two(-14));
    const Signed denormal = Signed(Floats(normal + (1 << 23)) - smallest_normal);
    const Signed finite = exponent == 0 ? denormal : normal;
    const Signed magnitude = exponent == kHalfInfinity ? normal + kRebias : finite;
    return Floats(Bits(magnitude) | ((half & 0x8000) << 16));
  }

  ARGOSY_INLINE static Bits narrow(Floats value) {
    const Bits sign = Bits(value) & 0x80000000;
    const Signed bits = Signed(Bits(value) ^ sign);
    const Signed normal = (bits - kRebias + 0xfff + ((bits >> 13) & 1)) >> 13;
    const Signed half = Signed{} + power_of_two(-1);  // its last mantissa bit is worth 2^-24: a denormal half's
    const Signed denormal = Signed(Floats(bits) + Floats(half)) - half;
    const Signed finite = bits < power_of_two(-14) ? denormal : normal;
    const Signed special = bits > kInfinity ? Signed{} + kHalfNan : Signed{} + kHalfInfinity;
    return Bits(bits < power_of_two(16) ? finite : special) | (sign >> 16);
  }
};

#endif

}  // namespace
}  // namespace argosy::ARGOSY_ISA
