// How fast this machine reads and writes rows at random places of an array: the limit of any table.
#pragma once

#include <cstddef>
#include <cstdint>

namespace argosy {

struct RandomAccess {
  double gather_seconds, scatter_seconds;
};

// An array of `rows` rows, each with a head of `head_floats`, `dim` values and `state_floats` behind them, in huge
// pages. Reads the values of `count` rows at random places into an array in order; then reads and writes all of as many
// rows, adding to them from an array in order. Rows are fetched ahead. The least time of `repeats`, each with new
// places.
RandomAccess random_access_limit(std::size_t rows, std::size_t head_floats, std::size_t dim, std::size_t state_floats,
                                 std::size_t count, std::size_t repeats);

}  // namespace argosy
