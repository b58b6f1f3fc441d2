// The vocabulary that tables and the kernels of their rows share.
//
// Every build of the kernels includes this file, so it stays free of standard templates: see
// [Note: one build per instruction set] in lanes.h.
#pragma once

#include "table_types.h"

namespace argosy {

// Rows that one rule updates. A row's state follows its value.
struct RowBatch {
  float* const* values;
  const float* const* gradients;
  std::size_t rows, dim;
  float scale;  // gradients are multiplied by it
  float lr;     // of these updates: the rule's, times the factor of the schedule
  // Of Adam, for each row: lr / (1 - beta1^t) and sqrt(1 - beta2^t), of the row's own t.
  const float* step_sizes;
  const float* root_corrections;
};

// What is done to rows, built for each instruction set. All give the same bits.
struct RowKernels {
  void (*update[kRuleKinds])(const Rule& rule, const RowBatch& batch);
  // A bit for each of up to 64 gradient rows that holds a number which is not finite, scaled.
  std::uint64_t (*not_finite)(const float* const* gradients, std::size_t rows, std::size_t dim, float scale);
  // Delay compensation: out = g + compensation * g * g * (value - pulled), with g = scale * gradient. What is added is
  // no more than g: an estimate of the curvature may take a gradient back, and never turns it round.
  void (*compensate)(const float* gradient, const float* value, const float* pulled, std::size_t dim, float scale,
                     float compensation, float* out);
  // The initial values of a row: a function of the key, which stands for seed and id, and the column.
  void (*initialise)(const Initializer& initializer, std::uint64_t key, std::size_t dim, float* out);
  // See ids.h.
  void (*expand)(const float* rows, const std::uint32_t* places, std::size_t count, std::size_t dim, float* out);
  void (*add_up)(const float* gradients, std::size_t in_a_row, std::size_t pitch, const std::uint32_t* places,
                 std::size_t count, std::size_t dim, float* rows);
  std::uint32_t (*largest)(const std::uint32_t* numbers, std::size_t count);  // 0 of none
  void (*expand_bags)(const float* rows, const std::uint32_t* places, const std::int64_t* offsets, std::size_t bags,
                      std::size_t dim, bool mean, float* out);
  void (*add_up_bags)(const float* gradients, const std::uint32_t* places, const std::int64_t* offsets,
                      std::size_t bags, std::size_t dim, bool mean, float* rows);
};

namespace baseline {
extern const RowKernels row_kernels;
}
namespace avx2 {
extern const RowKernels row_kernels;
}
namespace avx512 {
extern const RowKernels row_kernels;
}

}  // namespace argosy
