#include "table_alone.h"

#include <algorithm>
#include <cstddef>

namespace argosy {
namespace {

constexpr std::size_t kBlock = Applier::kMostRows, kAhead = 16;  // rows that are fetched ahead

}  // namespace

void Table::pull_alone(const SortedIds& piece, const std::int64_t* ids, std::size_t begin, std::size_t end, float* out,
                       RowHead** rows) const {
  for (std::size_t shard = 0; shard < kShards; ++shard) shards_[shard]->look_up(piece.of_shard(shard), rows);
  const std::size_t dim = config_.dim, bytes = dim * sizeof(float);
  const auto fetch = [&](std::size_t place) {
    if (place >= end || rows[place] == nullptr) return;
    prefetch(reinterpret_cast<const std::byte*>(rows[place]) + offsetof(RowHead, id), sizeof(RowHead::id) + bytes);
  };
  for (std::size_t place = begin; place < begin + kAhead; ++place) fetch(place);
  for (std::size_t place = begin; place < end; ++place) {
    fetch(place + kAhead);
    if (rows[place] != nullptr && rows[place]->id == ids[place]) [[likely]] {
      rows[place]->copy_value(dim, out + place * dim);
    } else {
      const std::uint64_t hash = mix(static_cast<std::uint64_t>(ids[place]));
      shards_[shard_of(hash)]->read(ids[place], static_cast<std::uint32_t>(hash), out + place * dim);
    }
  }
}

void Table::push_alone(RowHead* const* rows, std::size_t begin, std::size_t end, Applier& applier) {
  const std::size_t row_bytes = shards_[0]->rows().record_bytes();
  const std::int64_t* const ids = applier.push().ids;
  const auto fetch = [&](std::size_t place) {
    if (place < end && rows[place] != nullptr) prefetch(rows[place], row_bytes);
  };
  const auto other = [&](SortedIds::Entry entry, std::uint32_t& shows) {
    const std::uint64_t hash = mix(static_cast<std::uint64_t>(entry.id));
    entry.hash = static_cast<std::uint32_t>(hash);
    return shards_[shard_of(hash)]->row_for(entry, applier, shows);
  };
  std::array<SortedIds::Entry, kBlock> block;
  for (std::size_t place = begin; place < begin + kAhead; ++place) fetch(place);
  for (std::size_t at = begin; at < end; at += kBlock) {
    const std::size_t count = std::min(kBlock, end - at);
    for (std::size_t i = 0; i < count; ++i) {
      fetch(at + i + kAhead);
      block[i] = {ids[at + i], 0, static_cast<std::uint32_t>(at + i)};
    }
    applier.apply({block.data(), count}, rows + at, other);
  }
}

}  // namespace argosy
