// The reduction: out[i] = op(source_0[i], source_1[i], ...), written once and built for each instruction set.
//
// [Note: the same bits everywhere]
// Ranks that reduce the same sources must end with the same bits, whatever their CPUs, or replicas drift apart. So:
//  - sources are combined one after the other, in their order, and no multiplication is fused with an addition;
//  - the last few elements go through the same vector code as the rest;
//  - of two equal values, such as 0 and -0, min and max keep the earlier;
//  - a NaN leaves as the one canonical NaN, since which of two NaNs an addition returns is up to CPU and compiler.
#pragma once

#include <cstdint>

#include "half.h"
#include "lanes.h"
#include "reduce_types.h"

namespace argosy::ARGOSY_ISA {
namespace {

// An operation combines two vectors, and in the end finishes the combination of all `source_count` sources.

struct Plain {
  explicit Plain(std::size_t /*source_count*/) {}
  template <class V>
  ARGOSY_INLINE V finish(V value) const {
    return value;
  }
};

struct Sum : Plain {
  using Plain::Plain;
  template <class V>
  ARGOSY_INLINE static V combine(V a, V b) {
    return a + b;
  }
};

struct Prod : Plain {
  using Plain::Plain;
  template <class V>
  ARGOSY_INLINE static V combine(V a, V b) {
    return a * b;
  }
};

// A NaN in `a` stays, as every comparison with it is false. One in `b` comes in by its own: all ones, which is what a
// true comparison gives, is a NaN too.
template <class V>
ARGOSY_INLINE V with_nan_of(V b, V value) {
  auto is_nan = b != b;
  return V(decltype(is_nan)(value) | is_nan);
}

struct Min : Plain {
  using Plain::Plain;
  template <class V>
  ARGOSY_INLINE static V combine(V a, V b) {
    return with_nan_of(b, b < a ? b : a);
  }
};

struct Max : Plain {
  using Plain::Plain;
  template <class V>
  ARGOSY_INLINE static V combine(V a, V b) {
    return with_nan_of(b, b > a ? b : a);
  }
};

// The bitwise ones, of integers only.
struct And : Plain {
  using Plain::Plain;
  template <class V>
  ARGOSY_INLINE static V combine(V a, V b) {
    return a & b;
  }
};

struct Or : Plain {
  using Plain::Plain;
  template <class V>
  ARGOSY_INLINE static V combine(V a, V b) {
    return a | b;
  }
};

struct Xor : Plain {
  using Plain::Plain;
  template <class V>
  ARGOSY_INLINE static V combine(V a, V b) {
    return a ^ b;
  }
};

template <class Float>
struct Average : Sum {
  explicit Average(std::size_t source_count) : Sum(source_count), divisor(static_cast<Float>(source_count)) {}
  ARGOSY_INLINE Vector<Float> finish(Vector<Float> sum) const { return sum / divisor; }

  Float divisor;
};

// Divides vectors of unsigned integers up to 2^(w-1), where w is their number of bits, by `n` >= 2.
//
// No CPU divides vectors of integers, so this multiplies by the reciprocal (Granlund and Montgomery, 1994). With
// 2^(l-1) < n <= 2^l and m = ceil(2^(w-1+l) / n), floor(u * m / 2^(w-1+l)) is floor(u / n) for every u <= 2^(w-1): the
// error u * (m * n - 2^(w-1+l)) is below 2^(w-1) * 2^l, too little to reach the next integer. For m to have w bits and
// for lanes to be shifted by less than w, l stops at w: u * m stays below 2^(2w-1) for an n beyond that, and the
// quotient is 0 as it should.
template <class Unsigned>
struct Divider {
  using V = Vector<Unsigned>;
  __extension__ using Wide = unsigned __int128;
  static constexpr int kBits = 8 * sizeof(Unsigned);

  explicit Divider(std::size_t n) {
    int log = 1;
    while (log < kBits && (std::size_t{1} << log) < n) ++log;
    shift = static_cast<Unsigned>(log - 1);
    multiplier = static_cast<Unsigned>(((Wide{1} << (kBits + log - 1)) + n - 1) / n);
  }

  ARGOSY_INLINE V divide(V u) const { return high_product(u, multiplier) >> shift; }

  // The upper half of a product of two w-bit numbers, from products of their halves.
  ARGOSY_INLINE static V high_product(V a, Unsigned b) {
    constexpr Unsigned kHalf = kBits / 2;
    constexpr Unsigned kLow = static_cast<Unsigned>((Unsigned{1} << kHalf) - 1);
    const Unsigned b_low = b & kLow, b_high = static_cast<Unsigned>(b >> kHalf);
    const V a_low = a & kLow, a_high = a >> kHalf;
    const V middle = a_high * b_low + ((a_low * b_low) >> kHalf);
    return a_high * b_high + (middle >> kHalf) + ((a_low * b_high + (middle & kLow)) >> kHalf);
  }

  Unsigned multiplier, shift;  // m and l - 1
};

// The average of signed integers, held as `Unsigned` so that sums wrap, truncated toward zero. A single source is never
// divided.
template <class Unsigned>
struct TruncatedAverage : Sum {
  using V = Vector<Unsigned>;
  using Signed = Vector<std::make_signed_t<Unsigned>>;

  explicit TruncatedAverage(std::size_t source_count) : Sum(source_count), divider(source_count) {}

  ARGOSY_INLINE V finish(V sum) const {
    const V negative = V(Signed(sum) < 0);  // all ones there, so (x ^ negative) - negative is -x there
    return (divider.divide((sum ^ negative) - negative) ^ negative) - negative;
  }

  Divider<Unsigned> divider;
};

// The average of unsigned integers. They may exceed what a Divider takes, so it gets half of each: twice its quotient
// is the right one, or one less.
template <class Unsigned>
struct FlooredAverage : Sum {
  using V = Vector<Unsigned>;
  static constexpr Unsigned kMost = static_cast<Unsigned>(-1);

  explicit FlooredAverage(std::size_t n)
      : Sum(n),
        divider(n),
        divisor(static_cast<Unsigned>(n)),  // if it is cut short, the quotient that it is multiplied with is 0
        greatest_rest(n - 1 < kMost ? static_cast<Unsigned>(n - 1) : kMost) {}

  ARGOSY_INLINE V finish(V sum) const {
    const V quotient = divider.divide(sum >> 1) << 1;
    return quotient - V(sum - quotient * divisor > greatest_rest);  // true is -1
  }

  Divider<Unsigned> divider;
  Unsigned divisor, greatest_rest;
};

// See [Note: the same bits everywhere].
template <class V>
ARGOSY_INLINE V canonical(V value) {
  using T = std::remove_cvref_t<decltype(V{}[0])>;
  if constexpr (std::is_floating_point_v<T>) {
    return value == value ? value : V{} + static_cast<T>(__builtin_nan(""));
  } else {
    return value;
  }
}

// A strip is what is read of one source before the next one is turned to; its result stays in registers meanwhile. As
// long as a strip is short, the CPU's prefetchers follow all sources at once: blocks of 8 KiB, with partial results in
// the L1 cache, took nearly twice the time for 8 sources from memory (on a Zen 4).
constexpr std::size_t kStripBytes = 8 * kVectorBytes;

// `source(k)` is the address of source k's strip.
template <class Element, class Operation, class Source>
ARGOSY_INLINE void reduce_strip(const Operation& operation, std::byte* out, std::size_t source_count, Source source) {
  constexpr std::size_t kStepBytes = Element::kStep * Element::kBytes, kSteps = kStripBytes / kStepBytes;
  Pair<typename Element::Wide> result[kSteps];
  const std::byte* const first = source(0);
  for (std::size_t i = 0; i < kSteps; ++i) result[i] = Element::load(first + i * kStepBytes);
  for (std::size_t k = 1; k < source_count; ++k) {
    const std::byte* const next = source(k);
    for (std::size_t i = 0; i < kSteps; ++i) {
      const auto [a, b] = Element::load(next + i * kStepBytes);
      result[i] = {Operation::combine(result[i].first, a), Operation::combine(result[i].second, b)};
    }
  }
  for (std::size_t i = 0; i < kSteps; ++i) {
    auto [a, b] = result[i];
    if (source_count > 1) a = operation.finish(a), b = operation.finish(b);
    Element::store(out + i * kStepBytes, {canonical(a), canonical(b)});
  }
}

template <class Element, class Operation>
void reduce(std::byte* out, const std::byte* const* sources, std::size_t source_count, std::size_t count) {
  const Operation operation(source_count);
  const std::size_t size = count * Element::kBytes;
  std::size_t start = 0;
  for (; size - start >= kStripBytes; start += kStripBytes) {
    reduce_strip<Element>(operation, out + start, source_count, [&](std::size_t k) { return sources[k] + start; });
  }
  if (const std::size_t rest = size - start; rest > 0) {  // padded to a strip
    std::byte strip[kStripBytes] = {};
    reduce_strip<Element>(operation, strip, source_count, [&](std::size_t k) {
      __builtin_memcpy(strip, sources[k] + start, rest);
      return strip;
    });
    __builtin_memcpy(out + start, strip, rest);
  }
}

template <class Element>
ReduceKernel find_float_kernel(Op op) {
  switch (op) {
    case Op::sum:
      return reduce<Element, Sum>;
    case Op::avg:
      return reduce<Element, Average<typename Element::Wide>>;
    case Op::min:
      return reduce<Element, Min>;
    case Op::max:
      return reduce<Element, Max>;
    case Op::prod:
      return reduce<Element, Prod>;
    case Op::band:
    case Op::bor:
    case Op::bxor:
      return nullptr;
  }
  return nullptr;
}

// Unsigned arithmetic wraps where signed arithmetic would be undefined; only an order needs the sign.
template <class Integer>
ReduceKernel find_integer_kernel(Op op) {
  using Unsigned = std::make_unsigned_t<Integer>;
  using IntegerAverage =
      std::conditional_t<std::is_signed_v<Integer>, TruncatedAverage<Unsigned>, FlooredAverage<Unsigned>>;
  switch (op) {
    case Op::sum:
      return reduce<Native<Unsigned>, Sum>;
    case Op::avg:
      return reduce<Native<Unsigned>, IntegerAverage>;
    case Op::min:
      return reduce<Native<Integer>, Min>;
    case Op::max:
      return reduce<Native<Integer>, Max>;
    case Op::prod:
      return reduce<Native<Unsigned>, Prod>;
    case Op::band:
      return reduce<Native<Unsigned>, And>;
    case Op::bor:
      return reduce<Native<Unsigned>, Or>;
    case Op::bxor:
      return reduce<Native<Unsigned>, Xor>;
  }
  return nullptr;
}

}  // namespace

ReduceKernel find_kernel(Op op, DType dtype) {
  switch (dtype) {
    case DType::f32:
      return find_float_kernel<Native<float>>(op);
    case DType::f64:
      return find_float_kernel<Native<double>>(op);
    case DType::bf16:
      return find_float_kernel<BFloat16>(op);
    case DType::f16:
      return find_float_kernel<Float16>(op);
    case DType::i32:
      return find_integer_kernel<std::int32_t>(op);
    case DType::i64:
      return find_integer_kernel<std::int64_t>(op);
    case DType::i8:
      return find_integer_kernel<std::int8_t>(op);
    case DType::u8:
      return find_integer_kernel<std::uint8_t>(op);
    case DType::i16:
      return find_integer_kernel<std::int16_t>(op);
    case DType::boolean:
    case DType::c64:
    case DType::c128:
    case DType::raw1:
    case DType::raw2:
    case DType::raw4:
    case DType::raw8:
      return nullptr;
  }
  return nullptr;
}

}  // namespace argosy::ARGOSY_ISA
