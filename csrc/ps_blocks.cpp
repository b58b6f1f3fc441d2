#include "ps_blocks.h"

#include <algorithm>
#include <bit>
#include <new>

namespace argosy {
namespace {

constexpr std::size_t kLeastBytes = 4096;
constexpr std::align_val_t kAlignment{4096};
constexpr std::size_t kReserved = 4096;  // the heap's first page has its nonce

}  // namespace

PsBlocks::PsBlocks(bool shared) : heap_(shared ? std::make_unique<Heap>(kReserved) : nullptr) {}

PsBlocks::~PsBlocks() {
  if (heap_ != nullptr) return;  // it goes as a whole
  for (auto& [bytes, blocks] : free_) {
    for (std::byte* block : blocks) ::operator delete(block, kAlignment);
  }
}

PsBlocks::Block PsBlocks::take(const std::shared_ptr<PsBlocks>& from, std::size_t bytes) {
  const std::size_t wanted = std::bit_ceil(std::max(bytes, kLeastBytes));
  {
    const std::lock_guard lock(from->mutex_);
    std::vector<std::byte*>& blocks = from->free_[wanted];
    if (!blocks.empty()) {
      std::byte* const data = blocks.back();
      blocks.pop_back();
      return {from, data, wanted};
    }
  }
  if (from->heap_ != nullptr) return {from, from->heap_->allocate(wanted), wanted};
  return {from, static_cast<std::byte*>(::operator new(wanted, kAlignment)), wanted};
}

void PsBlocks::give_back(std::byte* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  free_[bytes].push_back(data);
}

void PsBlocks::Block::reset() {
  if (owner_ != nullptr) owner_->give_back(data_, bytes_);
  owner_.reset();
  data_ = nullptr;
  bytes_ = 0;
}

std::size_t PsBlocks::Block::offset() const { return static_cast<std::size_t>(data_ - owner_->heap_->base()); }

}  // namespace argosy
