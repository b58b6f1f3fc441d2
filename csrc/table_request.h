// What is asked of a table, and the order in which it is done.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "hash.h"

namespace argosy {

struct Push {
  const std::int64_t* ids;  // distinct
  std::size_t count;
  const float* gradients;      // count x dim
  const std::uint32_t* shows;  // null: 1 each
  const float* clicks;         // null: 0 each
  const float* pulled;         // what the gradients were computed from, count x dim; null: no delay compensation
  float compensation;          // g += compensation * g * g * (value now - pulled), at most g
  float scale;                 // gradients are multiplied by this
  float lr_factor;             // of the learning-rate schedule
  std::uint64_t sequence;
  bool finite = false;  // gradients are known to be finite, also when scaled: nobody looks again
};

struct Pushed {
  std::uint64_t updated = 0;     // rows that a gradient was applied to
  std::uint64_t admitted = 0;    // those of them that were made
  std::uint64_t waiting = 0;     // ids that are not admitted: their gradients are lost
  std::uint64_t not_finite = 0;  // rows with a gradient that is not finite: nothing is done with them
};

struct RowHead;

// Where a pull has found its rows: see [Note: trails] in table_trails.h.
struct Trail {
  explicit Trail(std::size_t count);
  static constexpr std::size_t kBytes = sizeof(RowHead*);  // of an id

  std::size_t count;
  std::uint64_t digest = 0;          // of the ids and their order
  std::unique_ptr<RowHead*[]> rows;  // of all ids, in their order; null for those without a row
};

// A piece of a request's ids, sorted by shard; in a shard, they stay in their order.
//
// [Note: pieces]
// Sorted as a whole, the ids of a shard would be spread over all of a request, and so would its gradients: each would
// be a miss of the cache and of the TLB. A piece's part of the request is small enough to stay in the second cache, and
// large enough that a lock is taken for hundreds of ids.
class SortedIds {
 public:
  static constexpr std::size_t kPiece = 16384;

  struct Entry {
    std::int64_t id;
    std::uint32_t hash;   // its low half
    std::uint32_t place;  // in the request
  };

  // Takes the ids from number `begin` to `end`, at most kPiece. `beside` are the `width` numbers that belong to each
  // id: fetched here, where they are in order, as later they will not be.
  void sort(const std::int64_t* ids, std::size_t begin, std::size_t end, const float* beside, std::size_t width);

  std::span<const Entry> of_shard(std::size_t shard) const {
    return {entries_.data() + begins_[shard], entries_.data() + begins_[shard + 1]};
  }

 private:
  std::array<Entry, kPiece> entries_;
  std::array<std::uint16_t, kShards + 1> begins_;
};

}  // namespace argosy
