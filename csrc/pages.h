// Memory for the rows of a table, in huge pages.
//
// Rows are read at random places. With pages of 4 KiB, most reads would miss the TLB as well as the cache; pages of 2
// MiB cover a table of gigabytes. Memory is taken from the system in regions that grow from 256 KiB to 64 MiB. A huge
// page that is just begun would be much of a small table: so regions below 32 MiB get theirs when they are full.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <vector>

namespace argosy {

class Pages {
 public:
  Pages() = default;
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  // Zeros, aligned to 8 bytes, until the end of this object. `bytes` is at most 1 MiB or so. Thread-safe.
  // Throws std::bad_alloc.
  std::byte* take(std::size_t bytes);

  // What the system has given for what was taken, and what was taken; the latter waits for nobody.
  std::size_t bytes() const;
  std::size_t taken() const { return taken_.load(std::memory_order_relaxed); }

 private:
  struct Region {
    std::byte* base;
    std::size_t bytes, used;
  };

  void add_region(std::size_t at_least);

  mutable std::mutex mutex_;
  std::vector<Region> regions_;
  std::size_t full_bytes_ = 0;  // of all regions but the last
  std::atomic<std::size_t> taken_ = 0;
};

}  // namespace argosy
