// What a table keeps of its requests: where the last pulls have found their rows, and memory to use again.
//
// [Note: trails]
// What is pulled is pushed soon after: the same ids in the same order. So a table keeps the trails of its last pulls,
// and a push that finds its own goes to the rows at once: without the index, which costs a miss of the cache for each
// id. Rows do not move. What may have happened since is that one was made, or that one was removed and its place taken
// by another id: the rows tell.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "table_request.h"

namespace argosy {

// Thread-safe.
class Trails {
 public:
  std::unique_ptr<SortedIds> borrow();
  void give_back(std::unique_ptr<SortedIds> piece);

  // Keeps the trail of a pull of these ids. The oldest ones are given up for it: all have `most_ids` ids at most.
  void keep(Trail trail, const std::int64_t* ids, std::size_t most_ids);
  // That of the last pull of these ids, in this order. Only then is each row in the shard of its id, which is locked
  // when the row is looked at.
  std::optional<Trail> take(const std::int64_t* ids, std::size_t count);

  std::size_t bytes() const;

 private:
  static constexpr std::size_t kMost = 64;  // trails: for the batches of so many workers, where all are pushed

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<SortedIds>> spare_;
  std::deque<Trail> kept_;    // the newest last
  std::size_t kept_ids_ = 0;  // of all of them
};

}  // namespace argosy
