// What stands at a position of an epoch: see [Note: why a Feistel network] in argosy/data/order.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace argosy {

// A permutation of 0 .. size - 1, by rounds over halves of `half` bits; 4^half is not less than `size`.
struct Order {
  std::uint64_t size;
  unsigned half;
  std::span<const std::uint64_t> keys;  // of the rounds
};

// Throws std::out_of_range for a position that is not below the size.
void samples_at(const Order& order, std::span<const std::int64_t> positions, std::int64_t* samples);

}  // namespace argosy
