// A table: a map from any 64-bit id to a row of value, optimizer state and counters, that many threads use at once.
//
// It has shards by hash, each with a lock, an index (table_index.h) and rows (table_rows.h). A request is sorted by
// shard, then a shard is locked once, and its slots and rows are fetched ahead (table_shard.cpp): what a large table
// costs is cache misses, and only many at a time make it fast. Where a pull has found its rows is kept for the push of
// the same ids (table_trails.h). A request that is alone in the table goes its own way (table_alone.h).
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "pages.h"
#include "table_request.h"
#include "table_trails.h"
#include "updater.h"

namespace argosy {

class Applier;
class Shard;

class Table {
 public:
  // Throws std::invalid_argument.
  explicit Table(const TableConfig& config, std::optional<std::string_view> isa = {});
  ~Table();
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  // Writes count x dim values. Ids may repeat. An id without a row has its initial value, and gets no row.
  void pull(const std::int64_t* ids, std::size_t count, float* out) const;

  // Applies gradients. Rows are made of ids that are admitted.
  Pushed push(const Push& push);

  // Sets values; rows are made, whether admitted or not. The state of rows that are there stays, and so
  // does the number of their updates.
  void set(const std::int64_t* ids, std::size_t count, const float* values);

  std::uint64_t rows() const;
  std::uint64_t waiting() const;        // ids that are counted, but not admitted yet
  std::uint64_t bytes() const;          // of all memory
  std::uint64_t payload_bytes() const;  // of ids, counters, values and state of all rows

  std::uint64_t followed() const { return followed_; }  // pushes that went where a pull had found the rows

  // Multiplies shows and clicks by `decay`, and counts a day for each row (a push of it begins its count anew).
  void end_day(float decay);

  // Removes rows with show + click_weight * click < score_below, and those without a push for `unseen_days` (0: however
  // long); of ids that wait, the latter. Returns how many rows.
  std::uint64_t shrink(float score_below, std::uint32_t unseen_days, float click_weight);

  // Reads up to `room` rows, in no particular order, from a cursor (0 to begin); returns the next one, 0 at the end.
  // Arrays may be null; counters are (show, click). Rows that are made or removed meanwhile may be seen or not.
  std::uint64_t scan(std::uint64_t cursor, std::size_t room, std::int64_t* ids, float* values, float* state,
                     float* counters, std::size_t* found) const;

  const TableConfig& config() const { return config_; }

 private:
  class Alone;

  template <class Work>
  void in_pieces(std::size_t count, Work work) const;
  template <class Work>
  void at_each_shard(const SortedIds& piece, std::size_t first, Work work) const;
  void pull_alone(const SortedIds& piece, const std::int64_t* ids, std::size_t begin, std::size_t end, float* out,
                  RowHead** rows) const;
  void push_alone(RowHead* const* rows, std::size_t begin, std::size_t end, Applier& applier);
  std::size_t most_trail_ids(std::size_t count) const;

  const TableConfig config_;
  const Updater updater_;
  Pages pages_;
  std::vector<std::unique_ptr<Shard>> shards_;
  mutable std::atomic<std::size_t> turn_ = 0, visitors_ = 0;
  mutable Trails trails_;
  std::atomic<std::uint64_t> followed_ = 0;
};

}  // namespace argosy
