// Where the last pulls of a table have found their rows.
//
// [Note: trails]
// What is pulled is pushed soon after: the same ids in the same order. So a table keeps the trails of its last pulls,
// and a push that finds its own goes to the rows at once: without sorting, and without the index, which costs a miss of
// the cache for each id. Rows do not move. What may have happened since is that one was made, or that one was removed
// and its place taken by another id: the rows tell.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "table_request.h"

namespace argosy {

using Piece = std::unique_ptr<SortedIds>;

// The pieces of a request, with the rows that it has found.
struct Trail {
  std::int64_t first_id = 0, last_id = 0;
  std::size_t count = 0;
  std::vector<Piece> pieces;
};

// The trails of a table, and the memory of requests that are over. Thread-safe.
class Trails {
 public:
  Piece borrow();
  void give_back(Piece piece);
  void give_back(Trail trail);

  // The oldest ones are given up for the memory of others: all have `most_pieces` at most.
  void keep(Trail trail, std::size_t most_pieces);
  // That of the last pull of these ids, as its ends tell; without pieces, if there is none.
  Trail take(const std::int64_t* ids, std::size_t count);

  std::size_t bytes() const;

 private:
  mutable std::mutex mutex_;
  std::vector<Piece> spare_;
  std::deque<Trail> kept_;  // the newest last
  std::size_t pieces_ = 0;  // of those that are kept
};

}  // namespace argosy
