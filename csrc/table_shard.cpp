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
static_assert(kBlock <= Updater::kMostRows);
constexpr std::size_t kLine = 64;

// How many rows are gone through without giving up the lock: a millisecond or so.
constexpr std::uint32_t kTurn = 16384;

// How full an index may be, in eighths, for all memory to stay within 1.3 times that of the rows, from 4 columns on.
std::uint32_t most_load(std::size_t record_bytes) { return record_bytes >= 84 ? 5 : record_bytes >= 64 ? 6 : 7; }

// The part of an id's hash that an index goes by.
std::uint32_t hash_of(std::int64_t id) { return static_cast<std::uint32_t>(mix(static_cast<std::uint64_t>(id))); }

void prefetch(const void* memory, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  for (std::uintptr_t line = begin / kLine * kLine; line < begin + bytes; line += kLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(line));
    asm volatile("");  // else gcc takes this for a function without effect, and drops calls of it
  }
}

}  // namespace

// Rows that are updated together.
struct Shard::Updates {
  std::array<float*, kBlock> values;
  std::array<const float*, kBlock> gradients;
  std::array<std::uint32_t, kBlock> steps;
  std::size_t count = 0;
};

Shard::Shard(const TableConfig& config, const Updater& updater, Pages& pages)
    : config_(config),
      updater_(updater),
      rows_(pages, sizeof(RowHead) + (config.dim + state_floats(config.rule.kind, config.dim)) * sizeof(float)),
      index_(most_load(rows_.record_bytes())),
      waiting_(pages, sizeof(Waiting)),
      waiting_index_(most_load(sizeof(Waiting))) {}

// Calls `ahead` for each entry some blocks early, then `consume` for each block, with the rows that a trail has if they
// are `known`, or else those that have their hashes, which are told to it: the ids are to be compared yet. Of a row,
// what begins at `skip` is fetched.
template <class Ahead, class Consume>
void Shard::walk(SortedIds::Part part, bool known, std::size_t skip, std::size_t row_bytes, Ahead ahead,
                 Consume consume) const {
  std::array<std::array<RowHead*, kBlock>, kAheadBlocks + 1> found;
  const std::size_t count = part.entries.size(), blocks = (count + kBlock - 1) / kBlock;
  const auto end_of = [&](std::size_t block) { return std::min((block + 1) * kBlock, count); };
  for (std::size_t turn = 0; turn < blocks + 2 * kAheadBlocks; ++turn) {
    if (turn < blocks) {
      for (std::size_t i = turn * kBlock; i < end_of(turn); ++i) {
        if (!known || part.rows[i] == Index::kNone) __builtin_prefetch(index_.start(part.entries[i].hash));
      }
    }
    if (const std::size_t block = turn - kAheadBlocks; block < blocks) {  // before the first, it is very large
      RowHead** row = found[block % found.size()].data();
      for (std::size_t i = block * kBlock; i < end_of(block); ++i) {
        const auto& entry = part.entries[i];
        ahead(entry.place);
        if (!known) part.rows[i] = index_.find(entry.hash, [](std::uint32_t) { return true; });
        *row = part.rows[i] == Index::kNone ? nullptr : rows_.at(part.rows[i]);
        if (*row != nullptr) prefetch(reinterpret_cast<const std::byte*>(*row) + skip, row_bytes - skip);
        ++row;
      }
    }
    if (const std::size_t block = turn - 2 * kAheadBlocks; block < blocks) {
      const std::size_t begin = block * kBlock;
      consume(part.entries.subspan(begin, end_of(block) - begin), found[block % found.size()].data());
    }
  }
}

RowHead* Shard::find(std::uint32_t hash, std::int64_t id) const {
  const std::uint32_t row = index_.find(hash, [&](std::uint32_t number) { return rows_.at(number)->id == id; });
  return row == Index::kNone ? nullptr : rows_.at(row);
}

void Shard::initial_value(std::int64_t id, float* out) const {
  const std::uint64_t key = mix(static_cast<std::uint64_t>(id) ^ mix(config_.initializer.seed));
  updater_.kernels().initialise(config_.initializer, key, config_.dim, out);
}

void Shard::pull(SortedIds::Part part, float* out) const {
  const std::size_t dim = config_.dim, bytes = dim * sizeof(float);
  walk(
      part, false, offsetof(RowHead, id), sizeof(RowHead) + bytes,
      [&](std::uint32_t place) { prefetch(out + place * dim, bytes); },
      [&](Entries block, RowHead* const* found) {
        for (std::size_t i = 0; i < block.size(); ++i) {
          const auto [id, hash, place] = block[i];
          const RowHead* row = found[i];
          if (row != nullptr && row->id != id) [[unlikely]]
            row = find(hash, id);
          if (row == nullptr) {
            initial_value(id, out + place * dim);
          } else if (dim == 16) {  // a size that is known is copied in place
            __builtin_memcpy(out + place * 16ul, row->value(), 16 * sizeof(float));
          } else {
            __builtin_memcpy(out + place * dim, row->value(), bytes);
          }
        }
      });
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

void Shard::push(SortedIds::Part part, bool known, const Push& push, Pushed& pushed) {
  const std::size_t dim = config_.dim, bytes = dim * sizeof(float);
  const bool compensates = push.pulled != nullptr && push.compensation != 0;
  const float scale = compensates ? 1.0f : push.scale;  // what is compensated, is scaled
  const auto compensated = std::make_unique_for_overwrite<float[]>(compensates ? kBlock * dim : 0);
  const RowKernels& kernels = updater_.kernels();
  const auto ahead = [&](std::uint32_t place) {
    prefetch(push.gradients + place * dim, bytes);
    if (compensates) prefetch(push.pulled + place * dim, bytes);
  };
  walk(part, known, 0, rows_.record_bytes(), ahead, [&](Entries block, RowHead* const* found) {
    std::array<const float*, kBlock> gradients;
    for (std::size_t i = 0; i < block.size(); ++i) gradients[i] = push.gradients + block[i].place * dim;
    const std::uint64_t broken = push.finite ? 0 : kernels.not_finite(gradients.data(), block.size(), dim, push.scale);
    pushed.not_finite += static_cast<std::uint64_t>(std::popcount(broken));
    Updates updates;
    for (std::size_t i = 0; i < block.size(); ++i) {
      if ((broken >> i & 1) != 0) continue;
      const auto [id, hash, place] = block[i];
      std::uint32_t shows = push.shows != nullptr ? push.shows[place] : 1;
      RowHead* row = found[i];
      // A row that was known may be free now: its id is then a number of another row.
      if (row == nullptr || row->id != id || row->age.free()) row = find(hash, id);
      if (row == nullptr) {
        const auto seen = admit(hash, id, shows, push.sequence);
        if (!seen) {
          ++pushed.waiting;
          continue;
        }
        shows = *seen;
        row = make(hash, id);
        ++pushed.admitted;
      }
      const float* gradient = gradients[i];
      if (compensates) {
        float* out = compensated.get() + i * dim;
        kernels.compensate(gradient, row->value(), push.pulled + place * dim, dim, push.scale, push.compensation, out);
        gradient = out;
        if (kernels.not_finite(&gradient, 1, dim, 1) != 0) {
          ++pushed.not_finite;
          continue;
        }
      }
      row->age.see(1);
      row->show += static_cast<float>(shows);
      if (push.clicks != nullptr) row->click += push.clicks[place];
      updates.values[updates.count] = row->value();
      updates.gradients[updates.count] = gradient;
      updates.steps[updates.count++] = row->age.count();
    }
    updater_.apply(updates.values.data(), updates.gradients.data(), updates.steps.data(), updates.count, dim, scale,
                   push.lr_factor);
    pushed.updated += updates.count;
  });
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
