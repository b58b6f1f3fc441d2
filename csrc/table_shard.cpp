#include "table_shard.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <limits>

namespace argosy {
namespace {

// [Note: fetched ahead]
// Work on a shard goes in small blocks. While one block is worked on, the rows of the next few are on their way, whose
// numbers were read from index slots that had been sent for a few blocks earlier. Small blocks, as a CPU has few dozen
// reads under way: sent for in a burst, they would wait for each other, and then the CPU for work.
constexpr std::size_t kBlock = 4, kAheadBlocks = 4;
static_assert(kBlock <= Applier::kMostRows);

// How many rows are gone through without giving up the lock: a millisecond or so.
constexpr std::uint32_t kTurn = 16384;

// How full an index may be, in eighths, for all memory to stay within 1.3 times that of the rows, from 4 columns on.
std::uint32_t most_load(std::size_t record_bytes) { return record_bytes >= 84 ? 5 : record_bytes >= 64 ? 6 : 7; }

// The part of an id's hash that an index goes by.
std::uint32_t hash_of(std::int64_t id) { return static_cast<std::uint32_t>(mix(static_cast<std::uint64_t>(id))); }

}  // namespace

Shard::Shard(const TableConfig& config, const Updater& updater, Pages& pages)
    : config_(config),
      updater_(updater),
      rows_(pages, sizeof(RowHead) + (config.dim + state_floats(config.rule.kind, config.dim)) * sizeof(float)),
      index_(most_load(rows_.record_bytes())),
      waiting_(pages, sizeof(Waiting)),
      waiting_index_(most_load(sizeof(Waiting))) {}

// Calls `send` for each entry, to send for what `find` will read; `find` some blocks later, which tells its row or
// null; and then `consume` for each block, with these rows: the ids are to be compared yet. Of a row, what begins at
// `skip` is fetched.
template <class Send, class Find, class Consume>
void Shard::walk(Entries entries, std::size_t skip, std::size_t row_bytes, Send send, Find find,
                 Consume consume) const {
  std::array<std::array<RowHead*, kBlock>, kAheadBlocks + 1> found;
  const std::size_t count = entries.size(), blocks = (count + kBlock - 1) / kBlock;
  const auto end_of = [&](std::size_t block) { return std::min((block + 1) * kBlock, count); };
  for (std::size_t turn = 0; turn < blocks + 2 * kAheadBlocks; ++turn) {
    if (turn < blocks) {
      for (std::size_t i = turn * kBlock; i < end_of(turn); ++i) send(entries[i]);
    }
    if (const std::size_t block = turn - kAheadBlocks; block < blocks) {  // before the first, it is very large
      RowHead** row = found[block % found.size()].data();
      for (std::size_t i = block * kBlock; i < end_of(block); ++i) {
        *row = find(entries[i]);
        if (*row != nullptr) prefetch(reinterpret_cast<const std::byte*>(*row) + skip, row_bytes - skip);
        ++row;
      }
    }
    if (const std::size_t block = turn - 2 * kAheadBlocks; block < blocks) {
      const std::size_t begin = block * kBlock;
      consume(entries.subspan(begin, end_of(block) - begin), found[block % found.size()].data());
    }
  }
}

// The first row with such a hash.
RowHead* Shard::candidate(std::uint32_t hash) const {
  const std::uint32_t row = index_.find(hash, [](std::uint32_t) { return true; });
  return row == Index::kNone ? nullptr : rows_.at(row);
}

RowHead* Shard::find(std::uint32_t hash, std::int64_t id) const {
  const std::uint32_t row = index_.find(hash, [&](std::uint32_t number) { return rows_.at(number)->id == id; });
  return row == Index::kNone ? nullptr : rows_.at(row);
}

void Shard::initial_value(std::int64_t id, float* out) const {
  const std::uint64_t key = mix(static_cast<std::uint64_t>(id) ^ mix(config_.initializer.seed));
  updater_.kernels().initialise(config_.initializer, key, config_.dim, out);
}

void Shard::read(std::int64_t id, std::uint32_t hash, float* out) const {
  const RowHead* row = find(hash, id);
  row == nullptr ? initial_value(id, out) : row->copy_value(config_.dim, out);
}

void Shard::pull(Entries entries, float* out, RowHead** told) const {
  const std::size_t dim = config_.dim, bytes = dim * sizeof(float);
  const auto look = [&](const SortedIds::Entry& entry) {
    prefetch(out + entry.place * dim, bytes);
    RowHead* row = candidate(entry.hash);
    if (told != nullptr) told[entry.place] = row;
    return row;
  };
  walk(
      entries, offsetof(RowHead, id), sizeof(RowHead) + bytes,
      [&](const SortedIds::Entry& entry) { __builtin_prefetch(index_.start(entry.hash)); }, look,
      [&](Entries block, RowHead* const* found) {
        for (std::size_t i = 0; i < block.size(); ++i) {
          const auto [id, hash, place] = block[i];
          const bool is_it = found[i] != nullptr && found[i]->id == id;
          is_it ? found[i]->copy_value(dim, out + place * dim) : read(id, hash, out + place * dim);
        }
      });
}

void Shard::look_up(Entries entries, RowHead** told) const {
  constexpr std::size_t kAhead = kBlock * kAheadBlocks;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (i + kAhead < entries.size()) __builtin_prefetch(index_.start(entries[i + kAhead].hash));
    told[entries[i].place] = candidate(entries[i].hash);
  }
}

RowHead* Shard::make(std::uint32_t hash, std::int64_t id) {
  const std::uint32_t number = rows_.take();
  try {
    index_.insert(hash, number);
  } catch (...) {
    rows_.give_back(number);
    throw;
  }
  RowHead* row = rows_.at(number);
  row->id = id;
  row->show = row->click = 0;
  initial_value(id, row->value());
  updater_.reset_state(row->value() + config_.dim, config_.dim);
  return row;
}

void Shard::forget_waiting(std::uint32_t hash, std::uint32_t row) {
  waiting_index_.erase(hash, row);
  waiting_.give_back(row);
}

// How often an id was shown that may have a row now, or nothing if it must wait.
std::optional<std::uint32_t> Shard::admit(std::uint32_t hash, std::int64_t id, std::uint32_t shows,
                                          std::uint64_t sequence) {
  const Admission& admission = config_.admission;
  if (admission.kind == Admission::Kind::always) return shows;
  if (admission.kind == Admission::Kind::probability) {
    const std::uint64_t key = mix(static_cast<std::uint64_t>(id) ^ mix(config_.initializer.seed + 1));
    const auto drawn = static_cast<float>(mix(key + sequence * 0x9e3779b97f4a7c15) >> 40) * 0x1p-24f;
    if (drawn < admission.probability) return shows;
    return {};
  }
  std::uint32_t row = waiting_index_.find(hash, [&](std::uint32_t number) { return waiting_.at(number)->id == id; });
  const std::uint32_t before = row == Index::kNone ? 0 : waiting_.at(row)->age.count();
  const std::uint32_t seen = before + std::min(shows, std::numeric_limits<std::uint32_t>::max() - before);
  if (seen >= admission.count) {
    if (row != Index::kNone) forget_waiting(hash, row);
    return seen;
  }
  if (row == Index::kNone) {
    row = waiting_.take();
    try {
      waiting_index_.insert(hash, row);
    } catch (...) {
      waiting_.give_back(row);
      throw;
    }
    waiting_.at(row)->id = id;
  }
  waiting_.at(row)->age.see(shows);
  return {};
}

RowHead* Shard::row_for(const SortedIds::Entry& entry, Applier& applier, std::uint32_t& shows) {
  RowHead* row = find(entry.hash, entry.id);
  if (row != nullptr) return row;
  const auto seen = admit(entry.hash, entry.id, shows, applier.push().sequence);
  if (!seen) {
    ++applier.pushed().waiting;
    return nullptr;
  }
  shows = *seen;
  row = make(entry.hash, entry.id);
  ++applier.pushed().admitted;
  return row;
}

void Shard::push(Entries entries, RowHead* const* known, Applier& applier) {
  const Push& push = applier.push();
  const std::size_t dim = config_.dim, bytes = dim * sizeof(float);
  const auto send = [&](const SortedIds::Entry& entry) {
    if (known == nullptr || known[entry.place] == nullptr) __builtin_prefetch(index_.start(entry.hash));
  };
  const auto look = [&](const SortedIds::Entry& entry) {
    prefetch(push.gradients + entry.place * dim, bytes);
    if (applier.compensates()) prefetch(push.pulled + entry.place * dim, bytes);
    return known != nullptr ? known[entry.place] : candidate(entry.hash);
  };
  const auto other = [&](const SortedIds::Entry& entry, std::uint32_t& shows) {
    return row_for(entry, applier, shows);
  };
  walk(entries, 0, rows_.record_bytes(), send, look,
       [&](Entries block, RowHead* const* found) { applier.apply(block, found, other); });
}

void Shard::set(Entries entries, const float* values) {
  const std::size_t dim = config_.dim;
  for (const auto& entry : entries) {
    RowHead* row = find(entry.hash, entry.id);
    if (row == nullptr) row = make(entry.hash, entry.id);
    row->age.see(0);
    std::copy_n(values + entry.place * dim, dim, row->value());
  }
}

std::uint32_t Shard::end_day(std::uint32_t row, float decay) {
  const std::uint32_t end = std::min(row + std::min(kTurn, Rows<RowHead>::kNone - row), reached());
  for (std::uint32_t i = row; i < std::min(end, rows_.reached()); ++i) {
    RowHead* head = rows_.at(i);
    if (head->age.free()) continue;
    head->show *= decay;
    head->click *= decay;
    head->age.end_day();
  }
  for (std::uint32_t i = row; i < std::min(end, waiting_.reached()); ++i) {
    if (!waiting_.at(i)->age.free()) waiting_.at(i)->age.end_day();
  }
  return end;
}

std::uint32_t Shard::shrink(std::uint32_t row, float score_below, std::uint32_t unseen_days, float click_weight,
                            std::uint64_t& removed) {
  const std::uint32_t end = std::min(row + std::min(kTurn, Rows<RowHead>::kNone - row), reached());
  const auto unseen = [&](const Age& age) { return unseen_days != 0 && age.unseen_days() >= unseen_days; };
  for (std::uint32_t i = row; i < std::min(end, rows_.reached()); ++i) {
    const RowHead* head = rows_.at(i);
    if (head->age.free() || !(unseen(head->age) || head->show + click_weight * head->click < score_below)) continue;
    index_.erase(hash_of(head->id), i);
    rows_.give_back(i);
    ++removed;
  }
  for (std::uint32_t i = row; i < std::min(end, waiting_.reached()); ++i) {
    const Waiting* head = waiting_.at(i);
    if (!head->age.free() && unseen(head->age)) forget_waiting(hash_of(head->id), i);
  }
  return end;
}

std::size_t Shard::index_bytes() const {
  return index_.bytes() + waiting_index_.bytes() + rows_.list_bytes() + waiting_.list_bytes();
}

}  // namespace argosy
