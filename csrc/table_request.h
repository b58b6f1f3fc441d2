// What is asked of a table, and the order in which it is done.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

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

// Where a pull has found its rows: see [Note: trails] in table_trails.h.
struct Trail {
  using Begins = std::array<std::uint16_t, kShards + 1>;

  explicit Trail(std::size_t count);
  static constexpr std::size_t kBytes = sizeof(std::uint32_t) + sizeof(std::uint16_t);  // of an id, about

  std::size_t count;
  std::int64_t first_id = 0, last_id = 0;
  std::unique_ptr<std::uint32_t[]> rows;    // of all ids, in the order of their pieces and shards
  std::unique_ptr<std::uint16_t[]> places;  // of the same ids, in their piece
  std::vector<Begins> begins;               // of each piece's shards
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

  // Those of one shard, and for each the number of its row: a pull tells these, and a push may know them.
  struct Part {
    std::span<const Entry> entries;
    std::uint32_t* rows;
  };

  // Takes up to kPiece ids, from number `begin` on. `beside` are the `width` numbers that belong to each id: fetched
  // here, where they are in order, as later they will not be.
  void sort(const std::int64_t* ids, std::size_t begin, std::size_t count, const float* beside, std::size_t width);
  // The same in the order of a trail of as many ids; false if these are not sorted by it.
  bool follow(const Trail& trail, const std::int64_t* ids, std::size_t begin, const float* beside, std::size_t width);
  // Tells a trail its order.
  void leave(Trail& trail) const;

  Part of_shard(std::size_t shard, std::uint32_t* rows) const {
    const std::size_t begin = begins_[shard];
    return {{entries_.data() + begin, begins_[shard + 1] - begin}, rows + begin};
  }
  std::uint32_t* rows() { return rows_.data(); }  // for a request without a trail

 private:
  std::array<Entry, kPiece> entries_;
  std::array<std::uint32_t, kPiece> rows_;
  Trail::Begins begins_;
  std::size_t begin_ = 0;
};

}  // namespace argosy
