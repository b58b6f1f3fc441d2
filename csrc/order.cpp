#include "order.h"

#include <stdexcept>
#include <string>

#include "hash.h"

namespace argosy {

void samples_at(const Order& order, std::span<const std::int64_t> positions, std::int64_t* samples) {
  const std::uint64_t low = (std::uint64_t{1} << order.half) - 1;
  for (std::size_t i = 0; i < positions.size(); ++i) {
    auto value = static_cast<std::uint64_t>(positions[i]);
    if (value >= order.size) {
      throw std::out_of_range("position " + std::to_string(positions[i]) + " of " + std::to_string(order.size));
    }
    do {
      std::uint64_t left = value >> order.half, right = value & low;
      for (const std::uint64_t key : order.keys) {
        const std::uint64_t mixed = left ^ (mix(right ^ key) & low);
        left = right;
        right = mixed;
      }
      value = left << order.half | right;
    } while (value >= order.size);
    samples[i] = static_cast<std::int64_t>(value);
  }
}

}  // namespace argosy
