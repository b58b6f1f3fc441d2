// Which steps of a program wait for which: see [Note: hazards] in hazards.cpp.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "program.h"

namespace argosy {

class Hazards {
 public:
  // O(n log n) for n steps whose ranges cover few of each other's boundaries, as those of schedules do.
  explicit Hazards(std::span<const Step> steps);

  // The earlier steps that step `number` must follow, byte by byte. They may be removed by the caller when they are
  // done: `drop` takes the one at `index` out, and puts the last one there.
  std::span<const std::uint32_t> of(std::size_t number) const {
    return {list_.data() + first_[number], first_[number + 1] - first_[number] - dropped_[number]};
  }
  void drop(std::size_t number, std::size_t index) {
    list_[first_[number] + index] = list_[first_[number + 1] - ++dropped_[number]];
  }

 private:
  std::vector<std::uint32_t> list_, first_, dropped_;
};

}  // namespace argosy
