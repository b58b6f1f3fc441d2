#include "dense.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace argosy {

DenseRange::DenseRange(const Rule& rule, std::size_t count, std::optional<std::string_view> isa)
    : updater_(rule, isa), count_(count) {
  if (rule.kind == RuleKind::adagrad_row) {
    throw std::invalid_argument("row-wise Adagrad is for tables: a range of dense parameters has no rows; use Adagrad");
  }
  numbers_.resize(count + state_floats(rule.kind, count));
  updater_.reset_state(numbers_.data() + count, count);
}

void DenseRange::set(const float* values) {
  const std::lock_guard lock(mutex_);
  std::copy_n(values, count_, numbers_.data());
  updater_.reset_state(numbers_.data() + count_, count_);
  steps_ = 0;
}

void DenseRange::pull(float* out) const {
  const std::lock_guard lock(mutex_);
  std::copy_n(numbers_.data(), count_, out);
}

bool DenseRange::push(const float* gradients, const float* pulled, float compensation, float scale, float lr_factor) {
  const std::lock_guard lock(mutex_);
  const RowKernels& kernels = updater_.kernels();
  if (pulled != nullptr && compensation != 0) {
    compensated_.resize(count_);
    kernels.compensate(gradients, numbers_.data(), pulled, count_, scale, compensation, compensated_.data());
    gradients = compensated_.data();
    scale = 1;
  }
  if (kernels.not_finite(&gradients, 1, count_, scale) != 0) return false;
  if (steps_ < std::numeric_limits<std::uint32_t>::max()) ++steps_;
  float* const values = numbers_.data();
  updater_.apply(&values, &gradients, &steps_, 1, count_, scale, lr_factor);
  return true;
}

}  // namespace argosy
