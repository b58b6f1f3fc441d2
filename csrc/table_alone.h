// A request that is alone in its table.
//
// [Note: alone]
// Requests that meet in a table go from shard to shard, so that none waits for all of another one; the price is that
// they read and write their own numbers in the order of shards. One that is alone takes all locks for a piece of its
// ids, and goes through them in their own order. The index is looked at by shards even then: that of one is in the
// cache, that of all is not. Where rows are, is kept for a push of the same ids, which needs no index, and no sorting.
#pragma once

#include <array>
#include <mutex>

#include "table.h"
#include "table_shard.h"

namespace argosy {

// All locks of a table, unless another request is in it.
class Table::Alone {
 public:
  explicit Alone(const Table& table) {
    if (table.visitors_.load(std::memory_order_relaxed) > 1) return;
    for (std::size_t i = 0; i < kShards; ++i) {
      locks_[i] = std::unique_lock(table.shards_[i]->mutex, std::try_to_lock);
      if (!locks_[i].owns_lock()) return;
    }
    all_ = true;
  }
  operator bool() const { return all_; }

 private:
  std::array<std::unique_lock<std::mutex>, kShards> locks_;
  bool all_ = false;
};

}  // namespace argosy
