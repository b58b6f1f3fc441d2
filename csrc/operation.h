// What is being done: the kind of operation and its particulars, in a form that peers compare.
#pragma once

#include <cstdint>
#include <string>

#include "failure.h"
#include "reduce_types.h"

namespace argosy {

enum class Collective : std::uint8_t {
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  reduce,
  gather,
  scatter,
  all_to_all,
  barrier,
  message,
};

struct Operation {
  Collective collective;
  DType dtype;
  Op op;
  std::uint8_t algorithm;  // a number that all ranks give the same algorithm
  std::uint32_t root;

  std::uint64_t packed() const {
    return static_cast<std::uint64_t>(collective) | static_cast<std::uint64_t>(dtype) << 8 |
           static_cast<std::uint64_t>(op) << 16 | static_cast<std::uint64_t>(algorithm) << 24 |
           static_cast<std::uint64_t>(root) << 32;
  }
};

// What a rank says about the operation that it is in.
struct Notice {
  static constexpr std::uint64_t kElsewhere = ~std::uint64_t{0};

  std::uint64_t sequence = 0;
  std::uint64_t operation = 0;
  std::uint64_t count = 0;
  std::uint64_t offset = kElsewhere;  // of its tensor in its heap, if it is there
};

// Such as "all_reduce (sum) of 1024 f32", from `Operation::packed`. Anything may stand there: it came from a peer.
std::string describe(std::uint64_t packed, std::uint64_t count);

// Why two ranks cannot go on together. For the message, it is `rank` that noticed.
Failure splits_differ(int rank, int peer, std::uint64_t sent, std::uint64_t expected);
Failure differ(int rank, const Notice& mine, int peer, const Notice& theirs);

}  // namespace argosy
