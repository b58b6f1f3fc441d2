// Memory that the ranks of one host share: each rank has a heap, and maps the heaps of the others.
//
// A heap is a memfd as large as the machine's memory, of which only touched pages exist. So a peer maps it once,
// whatever is allocated in it later, and an allocation is known to all by its offset. It has no name in any file
// system: nothing can be left behind, however a process ends. Peers open it as /proc/<pid>/fd/<fd>, which the kernel
// allows to the same user only (mode 0600), and know it by a random number at its beginning that they have learnt over
// an authenticated way.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

namespace argosy {

using Nonce = std::array<std::uint8_t, 16>;

// Mapped memory; unmapped at the end.
class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, std::size_t bytes);  // throws std::system_error
  ~Mapping();
  Mapping(Mapping&& other) noexcept : base_(std::exchange(other.base_, nullptr)), bytes_(other.bytes_) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  std::byte* base() const { return base_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
};

class Heap {
 public:
  explicit Heap(std::size_t reserved_bytes);  // the first `reserved_bytes`, the nonce included, are never allocated
  ~Heap();
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  // Page-aligned zeros. Throws std::bad_alloc when no gap is large enough.
  std::byte* allocate(std::size_t bytes);
  // Gives the memory back to the system. Throws std::invalid_argument if it is not what `allocate` returned.
  void release(std::byte* memory);

  // After a failure: gives what is allocated pages of this process's own, with what they hold. A peer that was stopped
  // in the middle of an operation, and goes on, would write into tensors that their owner uses for something else.
  void detach();
  // In a forked child: lets go of the descriptor.
  void forsake() { close(fd_); }

  // Whether `bytes` at `address` are in this heap.
  bool holds(const std::byte* address, std::size_t bytes) const {
    return !detached_ && address >= map_.base() && address < map_.base() + map_.bytes() &&
           bytes <= static_cast<std::size_t>(map_.base() + map_.bytes() - address);
  }
  std::byte* base() const { return map_.base(); }
  std::size_t bytes() const { return map_.bytes(); }
  int fd() const { return fd_; }
  const Nonce& nonce() const { return nonce_; }

 private:
  const pid_t owner_ = getpid();
  int fd_;
  Nonce nonce_;
  Mapping map_;
  std::mutex mutex_;
  std::map<std::size_t, std::size_t> used_;  // offset -> bytes
  std::atomic<bool> detached_ = false;
};

// Maps a peer's heap. The result is empty if it cannot be opened, or is not the heap with this nonce.
Mapping map_peer(pid_t pid, int fd, std::size_t bytes, const Nonce& nonce);

}  // namespace argosy
