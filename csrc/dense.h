// A flat range of parameters with an optimizer: what a server keeps of a model's dense part.
#pragma once

#include <cstddef>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

#include "updater.h"

namespace argosy {

class DenseRange {  // thread-safe
 public:
  // Zeros, until they are set. Throws std::invalid_argument; a rule with one number for a row has no meaning here.
  DenseRange(const Rule& rule, std::size_t count, std::optional<std::string_view> isa = {});

  void set(const float* values);  // the state is initial then
  void pull(float* out) const;
  // Delay compensation as in table.h; `pulled` may be null. False if something is not finite: nothing is applied then.
  bool push(const float* gradients, const float* pulled, float compensation, float scale, float lr_factor);
  std::size_t count() const { return count_; }

 private:
  const Updater updater_;
  const std::size_t count_;
  mutable std::mutex mutex_;
  std::vector<float> numbers_;  // values, then state
  std::vector<float> compensated_;
  std::uint32_t steps_ = 0;
};

}  // namespace argosy
