#include "table_request.h"

#include <algorithm>

namespace argosy {

constexpr std::size_t kFetched = 64;  // numbers: longer rows are fetched well enough when they are used

std::size_t SortedIds::sort(const std::int64_t* ids, std::size_t begin, std::size_t count, const float* beside,
                            std::size_t width) {
  const std::size_t end = begin + std::min(count - begin, kPiece);
  std::array<std::size_t, kShards> counts{}, next;
  for (std::size_t i = begin; i < end; ++i) ++counts[shard_of(mix(static_cast<std::uint64_t>(ids[i])))];
  begins_[0] = 0;
  for (std::size_t shard = 0; shard < kShards; ++shard) {
    next[shard] = begins_[shard];
    begins_[shard + 1] = begins_[shard] + counts[shard];
  }
  for (std::size_t i = begin; i < end; ++i) {
    if (beside != nullptr && width <= kFetched) {
      for (std::size_t j = 0; j < width; j += 16) __builtin_prefetch(beside + i * width + j);
    }
    const std::uint64_t hash = mix(static_cast<std::uint64_t>(ids[i]));
    entries_[next[shard_of(hash)]++] = {ids[i], static_cast<std::uint32_t>(hash), static_cast<std::uint32_t>(i)};
  }
  return end;
}

}  // namespace argosy
