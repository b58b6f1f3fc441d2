#include "table_request.h"

#include <algorithm>

namespace argosy {
namespace {

constexpr std::size_t kFetched = 64;  // numbers: longer rows are fetched well enough when they are used

void fetch(const float* beside, std::size_t number, std::size_t width) {
  if (width > kFetched) return;
  for (std::size_t i = 0; i < width; i += 16) __builtin_prefetch(beside + number * width + i);
}

}  // namespace

Trail::Trail(std::size_t count) : count(count), rows(std::make_unique_for_overwrite<RowHead*[]>(count)) {}

void SortedIds::sort(const std::int64_t* ids, std::size_t begin, std::size_t end, const float* beside,
                     std::size_t width) {
  std::array<std::uint16_t, kShards> counts{}, next;
  for (std::size_t i = begin; i < end; ++i) ++counts[shard_of(mix(static_cast<std::uint64_t>(ids[i])))];
  begins_[0] = 0;
  for (std::size_t shard = 0; shard < kShards; ++shard) {
    next[shard] = begins_[shard];
    begins_[shard + 1] = static_cast<std::uint16_t>(begins_[shard] + counts[shard]);
  }
  for (std::size_t i = begin; i < end; ++i) {
    fetch(beside, i, width);
    const std::uint64_t hash = mix(static_cast<std::uint64_t>(ids[i]));
    entries_[next[shard_of(hash)]++] = {ids[i], static_cast<std::uint32_t>(hash), static_cast<std::uint32_t>(i)};
  }
}

}  // namespace argosy
