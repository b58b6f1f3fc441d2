// Where the row of an id is: an open-addressing index of 8 bytes a slot, 32 bits of hash and 32 of row number.
//
// [Note: a sorted index]
// Slots stand in the order of their hashes, each at or behind its own place, which rises with the hash too. So a search
// ends at the first slot that is not smaller, whether the id is there or not: even at a load of 7/8, 4 slots on average
// are looked at, half a cache line; at 5/8, not 2. A slot is taken out by moving back those behind it; there are no
// tombstones. And a copy into more slots is one pass in order, with no search, as is a cut in two.
//
// [Note: growth by segments]
// An index is a row of segments, found by the first bits of the hash. A segment that is full grows by an eighth of its
// least size; at 65,536 slots it is cut into two of half that size. So whoever inserts waits for one segment at most,
// 0.5 MB, whatever the size of the table, and memory is never more than an eighth above what the load asks for:
// doubling a whole index would hold three times as much while it lasts.
//
// An index holds no ids: they stand in the rows, and the caller compares them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace argosy {

class Index {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};  // no row: row numbers are smaller

  // Slots are used up to `most_load`, in eighths. The fuller, the less memory, and the more lines a search reads.
  explicit Index(std::uint32_t most_load);

  // Where the search for a hash begins, to be fetched ahead.
  const std::uint64_t* start(std::uint32_t hash) const {
    const Segment& segment = segment_of(hash);
    return segment.slots.get() + segment.place(hash);
  }

  // The first row with this hash whose id is the one, as the caller says, or kNone.
  template <class IsIt>
  std::uint32_t find(std::uint32_t hash, IsIt is_it) const {
    const std::uint64_t key = std::uint64_t{hash} << 32;
    const std::uint64_t* slot = start(hash);
    while (*slot < key) ++slot;
    for (; *slot >> 32 == hash && *slot != kEmpty; ++slot) {
      if (is_it(static_cast<std::uint32_t>(*slot))) return static_cast<std::uint32_t>(*slot);
    }
    return kNone;
  }

  // Puts a row in. Throws std::bad_alloc or std::length_error, and has then changed nothing that a search would see.
  void insert(std::uint32_t hash, std::uint32_t row);

  // Takes a row out that is there.
  void erase(std::uint32_t hash, std::uint32_t row);

  std::size_t bytes() const { return bytes_ + directory_.capacity() * sizeof directory_[0]; }

 private:
  static constexpr std::uint64_t kEmpty = ~std::uint64_t{0};  // larger than any key: a search ends here

  struct Segment {
    Segment(unsigned depth, std::uint32_t capacity, std::uint32_t tail);
    // The slot that a hash would have if it were alone.
    std::size_t place(std::uint32_t hash) const {
      return static_cast<std::size_t>((std::uint64_t{hash << depth} * capacity) >> 32);
    }
    std::size_t slots_in_all() const { return std::size_t{capacity} + tail; }
    bool full(std::uint32_t most_load) const;
    bool append(std::uint64_t slot);  // in rising order only; false: there is no room behind

    unsigned depth;          // how many bits of the hash all slots here have in common
    std::uint32_t capacity;  // places
    std::uint32_t tail;      // slots behind the last place, for those that are moved on
    std::uint32_t used = 0;
    std::size_t end = 0;                     // while slots are appended: behind the last
    std::unique_ptr<std::uint64_t[]> slots;  // the last one is always empty: searches end there
  };

  Segment& segment_of(std::uint32_t hash) const {
    return *directory_[static_cast<std::size_t>((std::uint64_t{hash} << depth_) >> 32)];
  }
  std::unique_ptr<Segment> copy(const Segment& from, std::size_t begin, std::size_t end, unsigned depth,
                                std::size_t count) const;
  void grow(std::uint32_t hash);
  void split(std::uint32_t hash);
  void replace(std::size_t first, std::size_t entries, Segment* segment);

  std::uint32_t most_load_;
  unsigned depth_ = 0;               // the directory has 2^depth_ entries
  std::vector<Segment*> directory_;  // a segment of less depth has several entries
  std::vector<std::unique_ptr<Segment>> segments_;
  std::size_t bytes_ = 0;
};

}  // namespace argosy
