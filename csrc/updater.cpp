#include "updater.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "reduce.h"

namespace argosy {

const RowKernels& row_kernels_of(std::optional<std::string_view> isa) {
  for (const std::string_view name : instruction_sets()) {
    if (isa.value_or(name) != name) continue;
#if defined(__x86_64__)
    if (name == "avx512") return avx512::row_kernels;
    if (name == "avx2") return avx2::row_kernels;
#endif
    return baseline::row_kernels;
  }
  throw std::invalid_argument("this CPU cannot run isa '" + std::string(*isa) + "'");
}

Updater::Updater(const Rule& rule, std::optional<std::string_view> isa) : rule_(rule), kernels_(&row_kernels_of(isa)) {
  check(rule);
  if (rule.kind != RuleKind::adam && rule.kind != RuleKind::adamw) return;
  constexpr std::uint32_t kKept = 1024;
  std::vector<Correction> corrections;
  for (std::uint32_t step = 0; step < kKept; ++step) corrections.push_back(correction(step));
  corrections_ = std::move(corrections);
}

Updater::Correction Updater::correction(std::uint32_t step) const {
  if (step < corrections_.size()) return corrections_[step];
  // Beyond these, the powers are below the last bit of a float.
  constexpr double kVanishes = 1e-9;
  const double first = std::pow(static_cast<double>(rule_.beta1), step);
  const double second = std::pow(static_cast<double>(rule_.beta2), step);
  return {first < kVanishes ? 1 : 1 - first, second < kVanishes ? 1 : std::sqrt(1 - second)};
}

void Updater::apply(float* const* values, const float* const* gradients, const std::uint32_t* steps, std::size_t rows,
                    std::size_t dim, float scale, float lr_factor) const {
  float step_sizes[kMostRows], root_corrections[kMostRows];
  const float lr = rule_.lr * lr_factor;
  if (rule_.kind == RuleKind::adam || rule_.kind == RuleKind::adamw) {
    for (std::size_t row = 0; row < rows; ++row) {
      const Correction now = correction(steps[row]);
      step_sizes[row] = static_cast<float>(static_cast<double>(lr) / now.first);
      root_corrections[row] = static_cast<float>(now.root_second);
    }
  }
  const RowBatch batch{values, gradients, rows, dim, scale, lr, step_sizes, root_corrections};
  kernels_->update[static_cast<std::size_t>(rule_.kind)](rule_, batch);
}

void Updater::reset_state(float* state, std::size_t dim) const {
  const std::size_t floats = state_floats(rule_.kind, dim);
  std::fill_n(state, floats, 0.0f);
  if (rule_.kind == RuleKind::adagrad || rule_.kind == RuleKind::adagrad_row) {
    std::fill_n(state, floats, rule_.initial_accumulator);
  } else if (rule_.kind == RuleKind::ftrl) {
    std::fill_n(state + dim, dim, rule_.initial_accumulator);
  }
}

}  // namespace argosy
