#include "table_trails.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace argosy {

Piece Trails::borrow() {
  const std::lock_guard lock(mutex_);
  if (spare_.empty()) return std::make_unique_for_overwrite<SortedIds>();
  Piece piece = std::move(spare_.back());
  spare_.pop_back();
  return piece;
}

void Trails::give_back(Piece piece) {
  const std::lock_guard lock(mutex_);
  spare_.push_back(std::move(piece));
}

void Trails::give_back(Trail trail) {
  const std::lock_guard lock(mutex_);
  std::ranges::move(trail.pieces, std::back_inserter(spare_));
}

void Trails::keep(Trail trail, std::size_t most_pieces) {
  const std::lock_guard lock(mutex_);
  pieces_ += trail.pieces.size();
  kept_.push_back(std::move(trail));
  while (pieces_ > most_pieces) {
    pieces_ -= kept_.front().pieces.size();
    std::ranges::move(kept_.front().pieces, std::back_inserter(spare_));
    kept_.pop_front();
  }
}

Trail Trails::take(const std::int64_t* ids, std::size_t count) {
  if (count == 0) return {};
  const std::lock_guard lock(mutex_);
  const auto is_it = [&](const Trail& trail) {
    return trail.count == count && trail.first_id == ids[0] && trail.last_id == ids[count - 1];
  };
  const auto found = std::find_if(kept_.rbegin(), kept_.rend(), is_it);
  if (found == kept_.rend()) return {};
  Trail trail = std::move(*found);
  kept_.erase(std::next(found).base());
  pieces_ -= trail.pieces.size();
  return trail;
}

std::size_t Trails::bytes() const {
  const std::lock_guard lock(mutex_);
  return (spare_.size() + pieces_) * sizeof(SortedIds);
}

}  // namespace argosy
