// The rows of a shard: in chunks that never move, each row's id, counters, value and optimizer state in one piece.
//
// What an update touches lies in neighbouring cache lines, and rows are packed: at 16 columns with a sum of squares
// each, a row has 148 bytes, and rounding it up to whole lines would add 30 %. A row that is freed is the next to be
// used.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pages.h"

namespace argosy {

// Sends for the cache lines of some memory.
inline void prefetch(const void* memory, std::size_t bytes) {
  constexpr std::uintptr_t kLine = 64;
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  for (std::uintptr_t line = begin / kLine * kLine; line < begin + bytes; line += kLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(line));
    asm volatile("");  // else gcc takes this for a function without effect, and drops calls of it
  }
}

// How often something happened, up to 2^24 - 1, and for how many days it was not seen, up to 254; in 4 bytes.
class [[gnu::packed, gnu::aligned(4)]] Age {
 public:
  static constexpr std::uint32_t kMost = (1u << 24) - 1;

  bool free() const { return bits_ >> 24 == 255; }
  void set_free() { bits_ = 255u << 24; }
  std::uint32_t count() const { return bits_ & kMost; }
  std::uint32_t unseen_days() const { return bits_ >> 24; }
  void see(std::uint32_t times) { bits_ = count() + std::min(times, kMost - count()); }  // today
  void end_day() { bits_ += unseen_days() < 254 ? 1u << 24 : 0; }

 private:
  std::uint32_t bits_ = 0;
};

// What is before the value of a row. The id comes last: a pull reads from there on.
struct [[gnu::packed, gnu::aligned(4)]] RowHead {
  Age age;  // updates, and days without one
  float show, click;
  std::int64_t id;  // of a free row: the next free one

  float* value() { return reinterpret_cast<float*>(this + 1); }
  const float* value() const { return reinterpret_cast<const float*>(this + 1); }
  void copy_value(std::size_t dim, float* out) const {
    if (dim == 16) {  // a size that is known is copied in place
      __builtin_memcpy(out, value(), 16 * sizeof(float));
    } else {
      __builtin_memcpy(out, value(), dim * sizeof(float));
    }
  }
};
static_assert(sizeof(RowHead) == 20);

// An id that waits to be admitted: it has no value yet.
struct [[gnu::packed, gnu::aligned(4)]] Waiting {
  std::int64_t id;
  Age age;  // how often it was shown
};
static_assert(sizeof(Waiting) == 12);

// Records of one size, which begin with a Head: a RowHead or a Waiting.
template <class Head>
class Rows {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  Rows(Pages& pages, std::size_t record_bytes)
      : pages_(&pages),
        record_bytes_(record_bytes),
        chunk_bits_(static_cast<unsigned>(std::bit_width(std::max(kChunkBytes / record_bytes, std::size_t{1})) - 1)) {}

  Head* at(std::uint32_t row) const {
    return reinterpret_cast<Head*>(chunks_[row >> chunk_bits_] + (row & ((1u << chunk_bits_) - 1)) * record_bytes_);
  }

  // A row that was not used. Throws std::bad_alloc; there is an end at 2^32 - 1 rows.
  std::uint32_t take() {
    std::uint32_t row = free_;
    if (row != kNone) {
      free_ = static_cast<std::uint32_t>(at(row)->id);
    } else {
      if (reached_ == kNone) throw std::bad_alloc();
      if (reached_ >> chunk_bits_ == chunks_.size()) {
        chunks_.push_back(nullptr);
        try {
          chunks_.back() = pages_->take(record_bytes_ << chunk_bits_);
        } catch (...) {
          chunks_.pop_back();
          throw;
        }
      }
      row = reached_++;
    }
    ++used_;
    at(row)->age = Age();
    return row;
  }

  void give_back(std::uint32_t row) {
    at(row)->id = free_;
    at(row)->age.set_free();
    free_ = row;
    --used_;
  }

  // Rows have numbers below this; some of them may be free.
  std::uint32_t reached() const { return reached_; }
  std::uint64_t used() const { return used_; }
  std::size_t record_bytes() const { return record_bytes_; }
  std::size_t list_bytes() const { return chunks_.capacity() * sizeof chunks_[0]; }

 private:
  static constexpr std::size_t kChunkBytes = std::size_t{16} << 10;

  Pages* pages_;
  std::size_t record_bytes_;
  unsigned chunk_bits_;
  std::vector<std::byte*> chunks_;
  std::uint32_t reached_ = 0, free_ = kNone;
  std::uint64_t used_ = 0;
};

}  // namespace argosy
