#include "table_index.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>

namespace argosy {
namespace {

constexpr std::uint32_t kLeast = 64, kMost = 65536;  // slots of a segment
constexpr std::uint32_t kTail = 64;                  // at a load of 7/8, hardly ever as many are moved behind the end
constexpr unsigned kMostDepth = 24;                  // a segment tells its slots apart by 8 bits at least

// The most slots that may be used.
std::uint32_t limit(std::uint32_t capacity, std::uint32_t most_load) { return capacity / 8 * most_load; }

// Sizes are eighths of a power of two: 64, 72, ..., 120, 128, 144, ...
std::uint32_t next_capacity(std::uint32_t capacity) { return capacity + std::bit_floor(capacity) / 8; }

std::uint32_t capacity_for(std::size_t count, std::uint32_t most_load) {
  std::uint32_t capacity = kLeast;
  while (limit(capacity, most_load) < count + 1) capacity = next_capacity(capacity);
  return capacity;
}

}  // namespace

Index::Segment::Segment(unsigned depth, std::uint32_t capacity, std::uint32_t tail)
    : depth(depth),
      capacity(capacity),
      tail(tail),
      slots(std::make_unique_for_overwrite<std::uint64_t[]>(std::size_t{capacity} + tail)) {}

bool Index::Segment::full(std::uint32_t most_load) const {
  // The last slot stays empty; the one before it is used only if too many were moved behind the end.
  return used >= limit(capacity, most_load) || slots[slots_in_all() - 2] != kEmpty;
}

bool Index::Segment::append(std::uint64_t slot) {
  const std::size_t at = std::max(end, place(static_cast<std::uint32_t>(slot >> 32)));
  if (at + 2 >= slots_in_all()) return false;
  std::fill(slots.get() + end, slots.get() + at, kEmpty);
  slots[at] = slot;
  end = at + 1;
  ++used;
  return true;
}

Index::Index(std::uint32_t most_load) : most_load_(most_load) {
  segments_.push_back(std::make_unique<Segment>(0, kLeast, kTail));
  std::fill_n(segments_[0]->slots.get(), segments_[0]->slots_in_all(), kEmpty);
  directory_.push_back(segments_[0].get());
  bytes_ = segments_[0]->slots_in_all() * sizeof(std::uint64_t);
}

// A segment with what is in `begin` to `end` of another one, `count` slots, and room for more.
std::unique_ptr<Index::Segment> Index::copy(const Segment& from, std::size_t begin, std::size_t end, unsigned depth,
                                            std::size_t count) const {
  std::uint32_t capacity = capacity_for(count, most_load_), tail = kTail;
  if (depth == from.depth) capacity = std::max(capacity, next_capacity(from.capacity));
  while (true) {
    auto segment = std::make_unique<Segment>(depth, capacity, tail);
    bool fits = true;
    for (std::size_t i = begin; i < end && fits; ++i) {
      if (from.slots[i] != kEmpty) fits = segment->append(from.slots[i]);
    }
    if (fits) {
      std::fill(segment->slots.get() + segment->end, segment->slots.get() + segment->slots_in_all(), kEmpty);
      return segment;
    }
    // Many with nearly the same hash, at the end: more places would not help, more slots behind them do.
    tail *= 2;
  }
}

void Index::replace(std::size_t first, std::size_t entries, Segment* segment) {
  std::fill_n(directory_.begin() + static_cast<std::ptrdiff_t>(first), entries, segment);
}

void Index::grow(std::uint32_t hash) {
  Segment& old = segment_of(hash);
  if (old.capacity >= kMost && old.depth < kMostDepth) return split(hash);
  auto segment = copy(old, 0, old.slots_in_all(), old.depth, old.used);
  const std::size_t entries = std::size_t{1} << (depth_ - old.depth);
  const std::size_t first = static_cast<std::size_t>((std::uint64_t{hash} << depth_) >> 32) / entries * entries;
  bytes_ += segment->slots_in_all() * sizeof(std::uint64_t) - old.slots_in_all() * sizeof(std::uint64_t);
  replace(first, entries, segment.get());
  for (auto& owned : segments_) {
    if (owned.get() == &old) return owned.swap(segment);
  }
}

void Index::split(std::uint32_t hash) {
  Segment& old = segment_of(hash);
  const unsigned depth = old.depth + 1;
  const std::uint32_t bit = std::uint32_t{1} << (32 - depth);
  const std::size_t all = old.slots_in_all();
  std::size_t middle = 0, low_count = 0;
  for (std::size_t i = 0; i < all; ++i) {  // in order: first those without the bit
    if (old.slots[i] == kEmpty || (old.slots[i] >> 32 & bit) != 0) continue;
    middle = i + 1;
    ++low_count;
  }
  auto low = copy(old, 0, middle, depth, low_count), high = copy(old, middle, all, depth, old.used - low_count);
  if (depth > depth_) {
    std::vector<Segment*> wider(directory_.size() * 2);
    for (std::size_t i = 0; i < wider.size(); ++i) wider[i] = directory_[i / 2];
    directory_.swap(wider);
    ++depth_;
  }
  segments_.reserve(segments_.size() + 1);
  const std::size_t entries = std::size_t{1} << (depth_ - depth);
  const std::size_t first =
      static_cast<std::size_t>((std::uint64_t{hash} << depth_) >> 32) / (2 * entries) * 2 * entries;
  bytes_ += (low->slots_in_all() + high->slots_in_all() - all) * sizeof(std::uint64_t);
  replace(first, entries, low.get());
  replace(first + entries, entries, high.get());
  segments_.push_back(std::move(high));
  for (auto& owned : segments_) {
    if (owned.get() == &old) return owned.swap(low);
  }
}

void Index::insert(std::uint32_t hash, std::uint32_t row) {
  for (unsigned attempt = 0; segment_of(hash).full(most_load_); ++attempt) {
    if (attempt == 64) throw std::length_error("an index of a table cannot grow any more: too many ids have one hash");
    grow(hash);
  }
  Segment& segment = segment_of(hash);
  const std::uint64_t slot = std::uint64_t{hash} << 32 | row;
  std::uint64_t* at = segment.slots.get() + segment.place(hash);
  while (*at < slot) ++at;
  std::uint64_t* gap = at;
  while (*gap != kEmpty) ++gap;
  std::memmove(at + 1, at, static_cast<std::size_t>(gap - at) * sizeof *at);
  *at = slot;
  ++segment.used;
}

void Index::erase(std::uint32_t hash, std::uint32_t row) {
  Segment& segment = segment_of(hash);
  const std::uint64_t slot = std::uint64_t{hash} << 32 | row;
  std::size_t at = segment.place(hash);
  while (segment.slots[at] < slot) ++at;
  for (; segment.slots[at + 1] != kEmpty; ++at) {
    if (segment.place(static_cast<std::uint32_t>(segment.slots[at + 1] >> 32)) > at)
      break;  // it stands at its own place
    segment.slots[at] = segment.slots[at + 1];
  }
  segment.slots[at] = kEmpty;
  --segment.used;
}

}  // namespace argosy
