#include "table.h"

#include <algorithm>
#include <array>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "table_alone.h"
#include "table_shard.h"

namespace argosy {
namespace {

constexpr std::size_t kMostIds = std::numeric_limits<std::uint32_t>::max();  // of a request

// Counts a request while it is in a table, so that another one does not keep all locks.
class Visit {
 public:
  explicit Visit(std::atomic<std::size_t>& visitors) : visitors_(visitors) { ++visitors_; }
  ~Visit() { --visitors_; }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

 private:
  std::atomic<std::size_t>& visitors_;
};

const TableConfig& checked(const TableConfig& config) {
  check(config);
  return config;
}

}  // namespace

Table::Table(const TableConfig& config, std::optional<std::string_view> isa)
    : config_(checked(config)), updater_(config.rule, isa) {
  for (std::size_t i = 0; i < kShards; ++i) shards_.push_back(std::make_unique<Shard>(config_, updater_, pages_));
}

Table::~Table() = default;

// How many ids all trails may have, or 0 if a pull is to leave none: memory for several like it is within a sixteenth
// of the rows', and rows are large enough that such a part is left (see `most_load` in table_shard.cpp).
std::size_t Table::most_trail_ids(std::size_t count) const {
  constexpr std::size_t kLeastRecord = 64, kLeastIds = 256, kSeveral = 4;
  if (shards_[0]->rows().record_bytes() < kLeastRecord || count < kLeastIds) return 0;
  const std::size_t most = pages_.taken() / 16 / Trail::kBytes;
  return most / kSeveral >= count ? most : 0;
}

// Calls `work` with each shard that has some of the ids, and these, while it is locked. Requests begin at different
// shards, and come back later to those that are in use.
template <class Work>
void Table::at_each_shard(const SortedIds& piece, std::size_t first, Work work) const {
  std::array<std::size_t, kShards> busy;
  std::size_t left = 0;
  for (std::size_t i = 0; i < kShards; ++i) {
    const std::size_t number = (first + i) % kShards;
    if (piece.of_shard(number).empty()) continue;
    const std::unique_lock lock(shards_[number]->mutex, std::try_to_lock);
    if (lock.owns_lock()) {
      work(*shards_[number], piece.of_shard(number));
    } else {
      busy[left++] = number;
    }
  }
  for (std::size_t i = 0; i < left; ++i) {
    const std::lock_guard lock(shards_[busy[i]]->mutex);
    work(*shards_[busy[i]], piece.of_shard(busy[i]));
  }
}

// Calls `work` for each piece of a request, with room to sort it, where it begins and ends, and the shard to begin at.
template <class Work>
void Table::in_pieces(std::size_t count, Work work) const {
  if (count > kMostIds) {
    throw std::length_error("a request has " + std::to_string(count) + " ids: at most 2^32 - 1 fit");
  }
  if (count == 0) return;
  const Visit visit(visitors_);
  auto piece = trails_.borrow();
  const std::size_t first = turn_.fetch_add(11, std::memory_order_relaxed);  // far apart, and in the end at every one
  for (std::size_t begin = 0; begin < count; begin += SortedIds::kPiece) {
    work(*piece, begin, std::min(count, begin + SortedIds::kPiece), first);
  }
  trails_.give_back(std::move(piece));
}

void Table::pull(const std::int64_t* ids, std::size_t count, float* out) const {
  const std::size_t most_ids = most_trail_ids(count);
  std::optional<Trail> trail;
  if (most_ids != 0) trail.emplace(count);
  RowHead** const told = trail ? trail->rows.get() : nullptr;
  in_pieces(count, [&](SortedIds& piece, std::size_t begin, std::size_t end, std::size_t first) {
    const bool may_be_alone = told != nullptr && visitors_ == 1;
    piece.sort(ids, begin, end, out, may_be_alone ? 0 : config_.dim);
    if (may_be_alone) {
      if (const Alone alone(*this); alone) return pull_alone(piece, ids, begin, end, out, told);
    }
    at_each_shard(piece, first, [&](const Shard& shard, Shard::Entries entries) { shard.pull(entries, out, told); });
  });
  if (trail) trails_.keep(std::move(*trail), ids, most_ids);
}

Pushed Table::push(const Push& push) {
  Pushed pushed;
  Applier applier(push, config_, updater_, pushed);
  const std::optional<Trail> trail = trails_.take(push.ids, push.count);
  followed_ += trail.has_value();
  RowHead* const* const known = trail ? trail->rows.get() : nullptr;
  in_pieces(push.count, [&](SortedIds& piece, std::size_t begin, std::size_t end, std::size_t first) {
    if (known != nullptr) {
      if (const Alone alone(*this); alone) return push_alone(known, begin, end, applier);
    }
    piece.sort(push.ids, begin, end, push.gradients, config_.dim);
    at_each_shard(piece, first, [&](Shard& shard, Shard::Entries entries) { shard.push(entries, known, applier); });
  });
  return pushed;
}

void Table::set(const std::int64_t* ids, std::size_t count, const float* values) {
  in_pieces(count, [&](SortedIds& piece, std::size_t begin, std::size_t end, std::size_t first) {
    piece.sort(ids, begin, end, values, config_.dim);
    at_each_shard(piece, first, [&](Shard& shard, Shard::Entries entries) { shard.set(entries, values); });
  });
}

std::uint64_t Table::rows() const {
  const Visit visit(visitors_);
  std::uint64_t all = 0;
  for (const auto& shard : shards_) {
    const std::lock_guard lock(shard->mutex);
    all += shard->rows().used();
  }
  return all;
}

std::uint64_t Table::waiting() const {
  const Visit visit(visitors_);
  std::uint64_t all = 0;
  for (const auto& shard : shards_) {
    const std::lock_guard lock(shard->mutex);
    all += shard->waiting().used();
  }
  return all;
}

std::uint64_t Table::bytes() const {
  const Visit visit(visitors_);
  std::uint64_t all = sizeof *this + kShards * sizeof(Shard) + pages_.bytes() + trails_.bytes();
  for (const auto& shard : shards_) {
    const std::lock_guard lock(shard->mutex);
    all += shard->index_bytes();
  }
  return all;
}

std::uint64_t Table::payload_bytes() const { return rows() * shards_[0]->rows().record_bytes(); }

void Table::end_day(float decay) {
  if (!(decay >= 0 && decay <= 1)) {
    throw std::invalid_argument("decay is " + std::to_string(decay) + ": it must be from 0 to 1");
  }
  const Visit visit(visitors_);
  for (const auto& shard : shards_) {
    for (std::uint32_t row = 0, reached = 1; row < reached;) {
      const std::lock_guard lock(shard->mutex);
      row = shard->end_day(row, decay);
      reached = shard->reached();
    }
  }
}

std::uint64_t Table::shrink(float score_below, std::uint32_t unseen_days, float click_weight) {
  if (unseen_days > 254) {
    throw std::invalid_argument("unseen_days is " + std::to_string(unseen_days) + ": days are counted up to 254");
  }
  const Visit visit(visitors_);
  std::uint64_t removed = 0;
  for (const auto& shard : shards_) {
    for (std::uint32_t row = 0, reached = 1; row < reached;) {
      const std::lock_guard lock(shard->mutex);
      row = shard->shrink(row, score_below, unseen_days, click_weight, removed);
      reached = shard->reached();
    }
  }
  return removed;
}

std::uint64_t Table::scan(std::uint64_t cursor, std::size_t room, std::int64_t* ids, float* values, float* state,
                          float* counters, std::size_t* found) const {
  if (room == 0) throw std::invalid_argument("room is 0: a scan needs room for a row at least");
  const Visit visit(visitors_);
  const std::size_t dim = config_.dim, floats = state_floats(config_.rule.kind, dim);
  std::size_t count = 0;
  for (std::size_t number = cursor >> 32; number < kShards; ++number, cursor = std::uint64_t{number} << 32) {
    const std::lock_guard lock(shards_[number]->mutex);
    const Rows<RowHead>& rows = shards_[number]->rows();
    for (std::uint64_t row = cursor & 0xffffffff; row < rows.reached(); ++row) {
      if (count == room) {
        *found = count;
        return std::uint64_t{number} << 32 | row;
      }
      const RowHead* head = rows.at(static_cast<std::uint32_t>(row));
      if (head->age.free()) continue;
      if (ids != nullptr) ids[count] = head->id;
      if (values != nullptr) std::copy_n(head->value(), dim, values + count * dim);
      if (state != nullptr) std::copy_n(head->value() + dim, floats, state + count * floats);
      if (counters != nullptr) counters[2 * count] = head->show, counters[2 * count + 1] = head->click;
      ++count;
    }
  }
  *found = count;
  return 0;
}

}  // namespace argosy
