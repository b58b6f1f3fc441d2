// Initial values, and moving rows between a request's order and its distinct ids. Written once, built for each
// instruction set: plain loops, which the compiler turns into vectors.
#pragma once

#include "lanes.h"
#include "rule_types.h"

namespace argosy::ARGOSY_ISA {
namespace {

// Calls `work` with the dim, as a constant where it is a common one: loops over a row then have no counter at all.
template <std::size_t kDim>
struct Dim {
  static constexpr std::size_t value = kDim;
  ARGOSY_INLINE constexpr operator std::size_t() const { return kDim; }
};

template <class Work>
ARGOSY_INLINE auto with_dim(std::size_t dim, Work work) {
  switch (dim) {
    case 8:
      return work(Dim<8>{});
    case 16:
      return work(Dim<16>{});
    case 32:
      return work(Dim<32>{});
    case 64:
      return work(Dim<64>{});
    default:
      return work(dim);
  }
}

ARGOSY_INLINE std::uint32_t mix32(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// 32 random bits for a column, the same on every CPU.
ARGOSY_INLINE std::uint32_t random_bits(std::uint64_t key, std::uint32_t column) {
  const auto low = static_cast<std::uint32_t>(key), high = static_cast<std::uint32_t>(key >> 32);
  return mix32(mix32(low + column * 0x9e3779b9u) + high);
}

// The natural logarithm of what is in (0, 1), to 1e-13, by arithmetic alone: libm's last bits differ between machines.
double log_of(double x) {
  int exponent = 0;
  for (; x < 0.70710678118654752; x *= 2) --exponent;
  const double s = (x - 1) / (x + 1), square = s * s;
  double sum = 0;
  for (int power = 17; power >= 1; power -= 2) sum = sum * square + 1.0 / power;
  return exponent * 0.69314718055994531 + 2 * s * sum;
}

// Where a normal distribution has a share of `p` below: Acklam's approximation, to 1.2e-9.
double normal_quantile(double p) {
  constexpr double kTail = 0.02425;
  if (p > 0.5) return -normal_quantile(1 - p);
  if (p < kTail) {
    const double q = __builtin_sqrt(-2 * log_of(p));
    return (((((-7.784894002430293e-03 * q - 3.223964580411365e-01) * q - 2.400758277161838e+00) * q -
              2.549732539343734e+00) *
                 q +
             4.374664141464968e+00) *
                q +
            2.938163982698783e+00) /
           ((((7.784695709041462e-03 * q + 3.224671290700398e-01) * q + 2.445134137142996e+00) * q +
             3.754408661907416e+00) *
                q +
            1);
  }
  const double q = p - 0.5, r = q * q;
  return (((((-3.969683028665376e+01 * r + 2.209460984245205e+02) * r - 2.759285104469687e+02) * r +
            1.383577518672690e+02) *
               r -
           3.066479806614716e+01) *
              r +
          2.506628277459239e+00) *
         q /
         (((((-5.447609879822406e+01 * r + 1.615858368580409e+02) * r - 1.556989798598866e+02) * r +
            6.680131188771972e+01) *
               r -
           1.328068155288572e+01) *
              r +
          1);
}

void initialise(const Initializer& given, std::uint64_t key, std::size_t dim, float* __restrict out) {
  const Initializer initializer = given;
  const float low = initializer.low_or_mean, high = initializer.high_or_std;
  switch (initializer.kind) {
    case Initializer::Kind::zeros:
      for (std::size_t i = 0; i < dim; ++i) out[i] = 0;
      return;
    case Initializer::Kind::constant:
      for (std::size_t i = 0; i < dim; ++i) out[i] = low;
      return;
    case Initializer::Kind::uniform: {
      const float step = (high - low) * 0x1p-24f;
      for (std::size_t i = 0; i < dim; ++i) {
        const auto bits = static_cast<std::int32_t>(random_bits(key, static_cast<std::uint32_t>(i)) >> 8);
        out[i] = low + step * static_cast<float>(bits);
      }
      return;
    }
    case Initializer::Kind::normal:
      for (std::size_t i = 0; i < dim; ++i) {
        const double share = (random_bits(key, static_cast<std::uint32_t>(i)) + 0.5) * 0x1p-32;
        out[i] = static_cast<float>(low + high * normal_quantile(share));
      }
      return;
  }
}

constexpr std::size_t kAhead = 16;  // rows that are fetched ahead

ARGOSY_INLINE void prefetch_row(const float* row, std::size_t dim) {
  for (std::size_t i = 0; i < dim; i += 16) __builtin_prefetch(row + i);
}

void expand(const float* rows, const std::uint32_t* places, std::size_t count, std::size_t dim, float* out) {
  with_dim(dim, [=](auto width) {
    for (std::size_t i = 0; i < count; ++i) {
      if (i + kAhead < count) prefetch_row(rows + places[i + kAhead] * std::size_t{width}, width);
      const float* row = rows + places[i] * std::size_t{width};
      float* __restrict to = out + i * width;
      for (std::size_t j = 0; j < width; ++j) to[j] = row[j];
    }
  });
}

void add_up(const float* gradients, std::size_t in_a_row, std::size_t pitch, const std::uint32_t* places,
            std::size_t count, std::size_t dim, float* rows) {
  with_dim(dim, [=](auto width) {
    const float* line = gradients;
    for (std::size_t begin = 0; begin < count; begin += in_a_row, line += pitch) {
      const std::size_t end = count - begin < in_a_row ? count : begin + in_a_row;
      const float* gradient = line;
      for (std::size_t i = begin; i < end; ++i, gradient += width) {
        if (i + kAhead < count) prefetch_row(rows + places[i + kAhead] * std::size_t{width}, width);
        float* __restrict row = rows + places[i] * std::size_t{width};
        for (std::size_t j = 0; j < width; ++j) row[j] += gradient[j];
      }
    }
  });
}

std::uint32_t largest(const std::uint32_t* numbers, std::size_t count) {
  std::uint32_t most = 0;
  for (std::size_t i = 0; i < count; ++i) most = numbers[i] > most ? numbers[i] : most;
  return most;
}

ARGOSY_INLINE float share_of(std::int64_t length, bool mean) {
  return mean && length > 0 ? 1.0f / static_cast<float>(length) : 1.0f;
}

void expand_bags(const float* rows, const std::uint32_t* places, const std::int64_t* offsets, std::size_t bags,
                 std::size_t dim, bool mean, float* out) {
  with_dim(dim, [=](auto width) {
    const std::int64_t count = offsets[bags], ahead = kAhead;
    for (std::size_t bag = 0; bag < bags; ++bag) {
      float* __restrict to = out + bag * width;
      for (std::size_t j = 0; j < width; ++j) to[j] = 0;
      for (std::int64_t i = offsets[bag]; i < offsets[bag + 1]; ++i) {
        if (i + ahead < count) prefetch_row(rows + places[i + ahead] * std::size_t{width}, width);
        const float* row = rows + places[i] * std::size_t{width};
        for (std::size_t j = 0; j < width; ++j) to[j] += row[j];
      }
      const float share = share_of(offsets[bag + 1] - offsets[bag], mean);
      for (std::size_t j = 0; j < width; ++j) to[j] *= share;
    }
  });
}

void add_up_bags(const float* gradients, const std::uint32_t* places, const std::int64_t* offsets, std::size_t bags,
                 std::size_t dim, bool mean, float* rows) {
  with_dim(dim, [=](auto width) {
    const std::int64_t count = offsets[bags], ahead = kAhead;
    for (std::size_t bag = 0; bag < bags; ++bag) {
      const float* gradient = gradients + bag * width;
      const float share = share_of(offsets[bag + 1] - offsets[bag], mean);
      for (std::int64_t i = offsets[bag]; i < offsets[bag + 1]; ++i) {
        if (i + ahead < count) prefetch_row(rows + places[i + ahead] * std::size_t{width}, width);
        float* __restrict row = rows + places[i] * std::size_t{width};
        for (std::size_t j = 0; j < width; ++j) row[j] += share * gradient[j];
      }
    }
  });
}

}  // namespace
}  // namespace argosy::ARGOSY_ISA
