// One of the shards of a table: those rows whose ids have certain bits in their hash. The table locks it.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <span>

#include "table_apply.h"
#include "table_index.h"
#include "table_request.h"
#include "table_rows.h"
#include "updater.h"

namespace argosy {

class Shard {
 public:
  Shard(const TableConfig& config, const Updater& updater, Pages& pages);

  using Entries = std::span<const SortedIds::Entry>;
  // `told`, if not null, is told the rows that were found, by the places of their ids.
  void pull(Entries entries, float* out, RowHead** told) const;
  // Tells the rows alone: those that have the hashes of the ids, which are to be compared yet.
  void look_up(Entries entries, RowHead** told) const;
  // Copies the value of an id, or what it would begin with.
  void read(std::int64_t id, std::uint32_t hash, float* out) const;
  // `known`, if not null, has what a pull was told.
  void push(Entries entries, RowHead* const* known, Applier& applier);
  void set(Entries entries, const float* values);

  // The row of an id that gets a gradient, made if there is none and the id is admitted: `shows` is then how often it
  // was shown in all. Null if it must wait.
  RowHead* row_for(const SortedIds::Entry& entry, Applier& applier, std::uint32_t& shows);

  // These do a part of the rows, from number `row` on, and return where to go on, so that others get the lock in
  // between.
  std::uint32_t end_day(std::uint32_t row, float decay);
  std::uint32_t shrink(std::uint32_t row, float score_below, std::uint32_t unseen_days, float click_weight,
                       std::uint64_t& removed);

  const Rows<RowHead>& rows() const { return rows_; }
  const Rows<Waiting>& waiting() const { return waiting_; }
  std::uint32_t reached() const { return std::max(rows_.reached(), waiting_.reached()); }
  std::size_t index_bytes() const;

  mutable std::mutex mutex;

 private:
  template <class Send, class Find, class Consume>
  void walk(Entries entries, std::size_t skip, std::size_t row_bytes, Send send, Find find, Consume consume) const;
  RowHead* candidate(std::uint32_t hash) const;
  RowHead* find(std::uint32_t hash, std::int64_t id) const;
  RowHead* make(std::uint32_t hash, std::int64_t id);
  std::optional<std::uint32_t> admit(std::uint32_t hash, std::int64_t id, std::uint32_t shows, std::uint64_t sequence);
  void initial_value(std::int64_t id, float* out) const;
  void forget_waiting(std::uint32_t hash, std::uint32_t row);

  const TableConfig& config_;
  const Updater& updater_;
  Rows<RowHead> rows_;
  Index index_;
  Rows<Waiting> waiting_;  // ids that are counted, but not admitted yet
  Index waiting_index_;
};

}  // namespace argosy
