// Memory for what a client sends and receives, used again and again; shared with servers of the same host, if wanted.
//
// Shared memory is a heap that the servers map (see heap.h). Its pages cost a page fault at each end when they are
// first touched, so blocks are kept, by powers of two.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "heap.h"

namespace argosy {

class PsBlocks {
 public:
  // Some bytes, given back at its end. Whoever holds one keeps the PsBlocks alive.
  class Block {
   public:
    Block() = default;
    Block(std::shared_ptr<PsBlocks> owner, std::byte* data, std::size_t bytes)
        : owner_(std::move(owner)), data_(data), bytes_(bytes) {}
    ~Block() { reset(); }
    Block(Block&& other) noexcept { *this = std::move(other); }
    Block& operator=(Block&& other) noexcept {
      std::swap(owner_, other.owner_);
      std::swap(data_, other.data_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    void reset();

    std::byte* data() const { return data_; }
    std::size_t offset() const;  // in shared memory

   private:
    std::shared_ptr<PsBlocks> owner_;
    std::byte* data_ = nullptr;
    std::size_t bytes_ = 0;
  };

  static std::shared_ptr<PsBlocks> make(bool shared) { return std::shared_ptr<PsBlocks>(new PsBlocks(shared)); }
  ~PsBlocks();
  PsBlocks(const PsBlocks&) = delete;
  PsBlocks& operator=(const PsBlocks&) = delete;

  static Block take(const std::shared_ptr<PsBlocks>& from, std::size_t bytes);
  const Heap* heap() const { return heap_.get(); }  // null if it is not shared

 private:
  explicit PsBlocks(bool shared);
  void give_back(std::byte* data, std::size_t bytes);

  std::unique_ptr<Heap> heap_;
  std::mutex mutex_;
  std::map<std::size_t, std::vector<std::byte*>> free_;
};

}  // namespace argosy
