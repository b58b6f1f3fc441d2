#include "table_trails.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "hash.h"

namespace argosy {
namespace {

std::uint64_t digest_of(const std::int64_t* ids, std::size_t count) {
  std::uint64_t digest =
      0;  // terms that do not depend on each other: one behind the other would take five times as long
  for (std::size_t i = 0; i < count; ++i) digest += mix(static_cast<std::uint64_t>(ids[i]) + i * 0x9e3779b97f4a7c15);
  return digest;
}

}  // namespace

std::unique_ptr<SortedIds> Trails::borrow() {
  const std::lock_guard lock(mutex_);
  if (spare_.empty()) return std::make_unique_for_overwrite<SortedIds>();
  auto piece = std::move(spare_.back());
  spare_.pop_back();
  return piece;
}

void Trails::give_back(std::unique_ptr<SortedIds> piece) {
  const std::lock_guard lock(mutex_);
  spare_.push_back(std::move(piece));
}

void Trails::keep(Trail trail, const std::int64_t* ids, std::size_t most_ids) {
  const std::size_t count = trail.count;
  trail.digest = digest_of(ids, count);
  const std::lock_guard lock(mutex_);
  kept_.push_back(std::move(trail));
  kept_ids_ += count;
  while (kept_ids_ > most_ids || kept_.size() > kMost) {
    kept_ids_ -= kept_.front().count;
    kept_.pop_front();
  }
}

std::optional<Trail> Trails::take(const std::int64_t* ids, std::size_t count) {
  const std::uint64_t digest = digest_of(ids, count);
  const std::lock_guard lock(mutex_);
  const auto is_it = [&](const Trail& trail) { return trail.count == count && trail.digest == digest; };
  const auto found = std::find_if(kept_.rbegin(), kept_.rend(), is_it);
  if (found == kept_.rend()) return {};
  Trail trail = std::move(*found);
  kept_.erase(std::next(found).base());
  kept_ids_ -= count;
  return trail;
}

std::size_t Trails::bytes() const {
  const std::lock_guard lock(mutex_);
  return spare_.size() * sizeof(SortedIds) + kept_ids_ * Trail::kBytes;
}

}  // namespace argosy
