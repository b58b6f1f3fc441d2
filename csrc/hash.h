// The hash of an id, and who uses which of its bits.
//
// [Note: bits of the hash]
// Three choices follow from one hash, and must not depend on each other: the server (the whole hash modulo the number
// of servers, so its lowest bits if that is a power of two), the shard of a table (the highest bits), and the place in
// the shard's index (the low half, of which the higher bits matter most). Were server and shard to share bits, a server
// would use a few of its shards only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace argosy {

// The finaliser of splitmix64: one to one, and each bit of the id changes half of the bits.
inline std::uint64_t mix(std::uint64_t id) {
  id = (id ^ (id >> 30)) * 0xbf58476d1ce4e5b9;
  id = (id ^ (id >> 27)) * 0x94d049bb133111eb;
  return id ^ (id >> 31);
}

constexpr unsigned kShardBits = 6;
constexpr std::size_t kShards = std::size_t{1} << kShardBits;

inline std::size_t shard_of(std::uint64_t hash) { return hash >> (64 - kShardBits); }

}  // namespace argosy
