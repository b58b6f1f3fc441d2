#include "table_trails.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace argosy {

std::unique_ptr<SortedIds> Trails::borrow() {
  const std::lock_guard lock(mutex_);
  if (spare_pieces_.empty()) return std::make_unique_for_overwrite<SortedIds>();
  auto piece = std::move(spare_pieces_.back());
  spare_pieces_.pop_back();
  return piece;
}

void Trails::give_back(std::unique_ptr<SortedIds> piece) {
  const std::lock_guard lock(mutex_);
  spare_pieces_.push_back(std::move(piece));
}

Trail Trails::begin(std::size_t count) {
  Trail trail;
  {
    const std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      trail = std::move(spare_.back());
      spare_.pop_back();
    }
  }
  trail.rows.resize(count);
  trail.places.resize(count);
  trail.begins.clear();
  return trail;
}

void Trails::give_back(Trail trail) {
  const std::lock_guard lock(mutex_);
  spare_.push_back(std::move(trail));
}

void Trails::keep(Trail trail, const std::int64_t* ids, std::size_t most_ids) {
  trail.first_id = ids[0];
  trail.last_id = ids[trail.rows.size() - 1];
  const std::lock_guard lock(mutex_);
  kept_ids_ += trail.rows.size();
  kept_.push_back(std::move(trail));
  while (kept_ids_ > most_ids) {
    kept_ids_ -= kept_.front().rows.size();
    if (spare_.empty()) spare_.push_back(std::move(kept_.front()));
    kept_.pop_front();
  }
}

Trail Trails::take(const std::int64_t* ids, std::size_t count) {
  if (count == 0) return {};
  const std::lock_guard lock(mutex_);
  const auto is_it = [&](const Trail& trail) {
    return trail.rows.size() == count && trail.first_id == ids[0] && trail.last_id == ids[count - 1];
  };
  const auto found = std::find_if(kept_.rbegin(), kept_.rend(), is_it);
  if (found == kept_.rend()) return {};
  Trail trail = std::move(*found);
  kept_.erase(std::next(found).base());
  kept_ids_ -= count;
  return trail;
}

std::size_t Trails::bytes() const {
  const auto bytes_of = [](const Trail& trail) {
    return trail.rows.capacity() * sizeof trail.rows[0] + trail.places.capacity() * sizeof trail.places[0] +
           trail.begins.capacity() * sizeof trail.begins[0];
  };
  const std::lock_guard lock(mutex_);
  std::size_t all = spare_pieces_.size() * sizeof(SortedIds);
  for (const Trail& trail : spare_) all += bytes_of(trail);
  for (const Trail& trail : kept_) all += bytes_of(trail);
  return all;
}

}  // namespace argosy
