// Products with matrices of low rank (PowerSGD), written once and built for each instruction set.
//
// A gradient is read from memory once by each kernel, several rows at a time, so that what is read of P and Q, which
// stay in the nearest caches, serves all of these rows.
//
// What is computed alone and then summed over all workers (`project`, `project_back`) may have any bits. What every
// worker computes for itself (`orthogonalise`, `expand`) has the same on all, as no sum depends on a vector's width: a
// BLAS would not promise that.
#pragma once

#include "codec_quant_kernels.h"

namespace argosy::ARGOSY_ISA {
namespace {

// Calls `body` for all rows, four at a time as long as there are four: body(first row, constant number of rows).
template <std::size_t n>
struct Count {
  static constexpr std::size_t value = n;
};

template <class Body>
ARGOSY_INLINE void in_fours(std::size_t count, Body body) {
  std::size_t i = 0;
  for (; i + 4 <= count; i += 4) body(i, Count<4>{});
  for (; i < count; ++i) body(i, Count<1>{});
}

// Calls `body` for the columns, as lanes or, for the last few, as single numbers: body(column, type of the numbers).
template <class Body>
ARGOSY_INLINE void in_lanes(std::size_t count, Body body) {
  std::size_t j = 0;
  for (; j + kLanes <= count; j += kLanes) body(j, Floats{});
  for (; j < count; ++j) body(j, float{});
}

template <class V>
ARGOSY_INLINE V get(const float* address) {
  if constexpr (sizeof(V) == sizeof(float)) {
    return *address;
  } else {
    return load_floats(address);
  }
}

template <class V>
ARGOSY_INLINE void put(float* address, V value) {
  if constexpr (sizeof(V) == sizeof(float)) {
    *address = value;
  } else {
    store_floats(address, value);
  }
}

// The numbers of p q^T in column `j` of some rows, from the sum over the columns of p in order.
template <class V, std::size_t kRows>
ARGOSY_INLINE void multiply(V (&sums)[kRows], const float* p, const float* q, std::size_t first, std::size_t j,
                            LowRank shape) {
  for (std::size_t i = 0; i < kRows; ++i) sums[i] = V{};
  for (std::size_t k = 0; k < shape.rank; ++k) {
    const V value = get<V>(q + k * shape.columns + j);
    for (std::size_t i = 0; i < kRows; ++i) sums[i] += value * p[k * shape.rows + first + i];
  }
}

// p[k][i] = row i . q[k], for some rows and as many of q's.
template <std::size_t kRows, std::size_t kRanks>
ARGOSY_INLINE void dot_rows(float* p, const float* rows, const float* q, LowRank shape) {
  const std::size_t columns = shape.columns;
  Floats sums[kRows][kRanks] = {};
  float rest[kRows][kRanks] = {};
  std::size_t j = 0;
  for (; j + kLanes <= columns; j += kLanes) {
    Floats values[kRows];
    for (std::size_t i = 0; i < kRows; ++i) values[i] = load_floats(rows + i * columns + j);
    for (std::size_t k = 0; k < kRanks; ++k) {
      const Floats other = load_floats(q + k * columns + j);
      for (std::size_t i = 0; i < kRows; ++i) sums[i][k] += values[i] * other;
    }
  }
  for (; j < columns; ++j) {
    for (std::size_t i = 0; i < kRows; ++i) {
      for (std::size_t k = 0; k < kRanks; ++k) rest[i][k] += rows[i * columns + j] * q[k * columns + j];
    }
  }
  for (std::size_t i = 0; i < kRows; ++i) {
    for (std::size_t k = 0; k < kRanks; ++k) {
      float total = rest[i][k];
      for (std::size_t lane = 0; lane < kLanes; ++lane) total += sums[i][k][lane];
      p[k * shape.rows + i] = total;
    }
  }
}

// What was sent of some rows is taken out, and what has come since is added.
template <std::size_t kRows>
ARGOSY_INLINE void renew_rows(float* matrix, Product sent, const float* values, float weight, std::size_t first,
                              LowRank shape) {
  in_lanes(shape.columns, [&](std::size_t j, auto kind) {
    using V = decltype(kind);
    V gone[kRows];
    multiply(gone, sent.p, sent.q, first, j, shape);
    for (std::size_t i = 0; i < kRows; ++i) {
      const std::size_t at = (first + i) * shape.columns + j;
      const V left = get<V>(matrix + at) - gone[i];
      put<V>(matrix + at, values != nullptr ? left + weight * get<V>(values + at) : left);
    }
  });
}

void project(float* p, float* matrix, Product sent, const float* values, float weight, const float* q, LowRank shape) {
  in_fours(shape.rows, [&](std::size_t first, auto count) {
    constexpr std::size_t kRows = decltype(count)::value;
    renew_rows<kRows>(matrix, sent, values, weight, first, shape);
    in_fours(shape.rank, [&](std::size_t k, auto ranks) {
      dot_rows<kRows, decltype(ranks)::value>(p + k * shape.rows + first, matrix + first * shape.columns,
                                              q + k * shape.columns, shape);
    });
  });
}

void settle(float* matrix, Product sent, LowRank shape) {
  in_fours(shape.rows, [&](std::size_t first, auto count) {
    renew_rows<decltype(count)::value>(matrix, sent, nullptr, 0, first, shape);
  });
}

// In double: squares of floats neither overflow nor vanish in it.
double dot(const float* a, const float* b, std::size_t count) {
  constexpr std::size_t kSums = 8;
  double sums[kSums] = {};
  std::size_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (std::size_t k = 0; k < kSums; ++k) sums[k] += static_cast<double>(a[i + k]) * static_cast<double>(b[i + k]);
  }
  double total = 0;
  for (; i < count; ++i) total += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  for (std::size_t k = 0; k < kSums; ++k) total += sums[k];
  return total;
}

// The square of what, of a vector's length, is left by rounding alone when others have been taken out of it.
constexpr double kNoise = 1e-12;

void orthogonalise(float* p, std::size_t rows, std::size_t rank) {
  for (std::size_t k = 0; k < rank; ++k) {
    float* const own = p + k * rows;
    const double before = dot(own, own, rows);
    for (int turn = 0; turn < 2; ++turn) {  // the second takes out what rounding left in the first
      for (std::size_t other = 0; other < k; ++other) {
        const float* const taken = p + other * rows;
        const double part = dot(own, taken, rows);
        for (std::size_t i = 0; i < rows; ++i) own[i] = static_cast<float>(own[i] - part * taken[i]);
      }
    }
    const double after = dot(own, own, rows);
    const double factor = after > before * kNoise ? 1 / __builtin_sqrt(after) : 0;
    for (std::size_t i = 0; i < rows; ++i) own[i] = static_cast<float>(own[i] * factor);
  }
}

void project_back(float* q, const float* matrix, const float* p, LowRank shape) {
  const std::size_t rows = shape.rows, columns = shape.columns, rank = shape.rank;
  __builtin_memset(q, 0, rank * columns * sizeof(float));
  in_fours(rows, [&](std::size_t first, auto count) {
    constexpr std::size_t kRows = decltype(count)::value;
    in_lanes(columns, [&](std::size_t j, auto kind) {
      using V = decltype(kind);
      V values[kRows];
      for (std::size_t i = 0; i < kRows; ++i) values[i] = get<V>(matrix + (first + i) * columns + j);
      for (std::size_t k = 0; k < rank; ++k) {
        V sum = get<V>(q + k * columns + j);
        for (std::size_t i = 0; i < kRows; ++i) sum += values[i] * p[k * rows + first + i];
        put<V>(q + k * columns + j, sum);
      }
    });
  });
}

void expand(float* out, const float* p, const float* q, LowRank shape) {
  in_fours(shape.rows, [&](std::size_t first, auto count) {
    constexpr std::size_t kRows = decltype(count)::value;
    in_lanes(shape.columns, [&](std::size_t j, auto kind) {
      using V = decltype(kind);
      V sums[kRows];
      multiply(sums, p, q, first, j, shape);
      for (std::size_t i = 0; i < kRows; ++i) put<V>(out + (first + i) * shape.columns + j, sums[i]);
    });
  });
}

void restart(float* start, const float* q, std::size_t columns, std::size_t rank) {
  for (std::size_t k = 0; k < rank; ++k, start += columns, q += columns) {
    float peak = 0;
    for (std::size_t j = 0; j < columns; ++j) {
      const float magnitude = __builtin_fabsf(q[j]);
      peak = magnitude > peak ? magnitude : peak;
    }
    if (peak == 0) continue;
    for (std::size_t j = 0; j < columns; ++j) start[j] = q[j] / peak;
  }
}

}  // namespace

const LowRankKernels kLowRankKernels = {project, settle, orthogonalise, project_back, expand, restart};

}  // namespace argosy::ARGOSY_ISA
