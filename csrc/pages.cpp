#include "pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <new>

namespace argosy {
namespace {

constexpr std::size_t kPage = 4096, kHugePage = std::size_t{2} << 20;
constexpr std::size_t kFirstRegion = std::size_t{256} << 10, kLargestRegion = std::size_t{64} << 20;
constexpr std::size_t kHugeFromTheStart = std::size_t{32} << 20;

std::size_t rounded_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Where a kernel has no huge pages, or cannot move memory into them at once, all is as well, only slower.
void prefer_huge_pages(void* base, std::size_t bytes) { (void)madvise(base, bytes, MADV_HUGEPAGE); }

void move_into_huge_pages(void* base, std::size_t bytes) {
#if !defined(MADV_COLLAPSE)
  constexpr int MADV_COLLAPSE = 25;
#endif
  (void)madvise(base, bytes, MADV_COLLAPSE);
}

}  // namespace

Pages::~Pages() {
  for (const Region& region : regions_) munmap(region.base, region.bytes);
}

void Pages::add_region(std::size_t at_least) {
  std::size_t bytes = regions_.empty() ? kFirstRegion : std::min(regions_.back().bytes * 2, kLargestRegion);
  bytes = rounded_up(std::max(bytes, at_least), kPage);
  const std::size_t slack = bytes >= kHugePage ? kHugePage : 0;
  regions_.reserve(regions_.size() + 1);
  void* mapped =
      mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  auto* base = static_cast<std::byte*>(mapped);
  if (slack > 0) {  // what is before and behind whole huge pages goes back
    const std::size_t before =
        rounded_up(reinterpret_cast<std::uintptr_t>(base), kHugePage) - reinterpret_cast<std::uintptr_t>(base);
    if (before > 0) munmap(base, before);
    if (before < slack) munmap(base + before + bytes, slack - before);
    base += before;
  }
  if (!regions_.empty()) {
    const Region& last = regions_.back();
    full_bytes_ += last.bytes;
    if (last.bytes >= kHugePage && last.bytes < kHugeFromTheStart) {
      prefer_huge_pages(last.base, last.bytes);
      move_into_huge_pages(last.base, last.bytes);
    }
  }
  if (bytes >= kHugeFromTheStart) prefer_huge_pages(base, bytes);
  regions_.push_back({base, bytes, 0});
}

std::byte* Pages::take(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  bytes = rounded_up(bytes, 8);
  if (regions_.empty() || regions_.back().bytes - regions_.back().used < bytes) add_region(bytes);
  Region& region = regions_.back();
  std::byte* memory = region.base + region.used;
  region.used += bytes;
  taken_.fetch_add(bytes, std::memory_order_relaxed);
  return memory;
}

std::size_t Pages::bytes() const {
  const std::lock_guard lock(mutex_);
  if (regions_.empty()) return 0;
  const Region& last = regions_.back();
  return full_bytes_ + rounded_up(last.used, last.bytes >= kHugeFromTheStart ? kHugePage : kPage);
}

}  // namespace argosy
