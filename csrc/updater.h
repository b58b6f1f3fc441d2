// An optimizer at work: a rule, the kernels of this CPU, and what the rule needs besides a row's own numbers.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "rule_types.h"

namespace argosy {

// The kernels of the best instruction set, or of the named one. Throws std::invalid_argument if this CPU lacks it.
const RowKernels& row_kernels_of(std::optional<std::string_view> isa = {});

class Updater {
 public:
  explicit Updater(const Rule& rule, std::optional<std::string_view> isa = {});

  // Updates rows, each for the time that `steps` says, counted from 1. At most kMostRows.
  static constexpr std::size_t kMostRows = 64;
  void apply(float* const* values, const float* const* gradients, const std::uint32_t* steps, std::size_t rows,
             std::size_t dim, float scale, float lr_factor) const;

  // The state of a row that was never updated.
  void reset_state(float* state, std::size_t dim) const;

  const Rule& rule() const { return rule_; }
  const RowKernels& kernels() const { return *kernels_; }

 private:
  struct Correction {
    double first, root_second;  // 1 - beta1^t, sqrt(1 - beta2^t)
  };
  Correction correction(std::uint32_t step) const;

  Rule rule_;
  const RowKernels* kernels_;
  std::vector<Correction> corrections_;  // of the first steps: a power each would take as long as the rest of an update
};

}  // namespace argosy
