// What a client does to the ids and rows of a request: servers see each id once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "hash.h"

namespace argosy {

// Makes ids distinct. For one thread; its memory is used again.
//
// [Note: few slots]
// How many of a batch's ids are distinct is not known before, but it is about the same share in batches of one kind. So
// there are slots for as many as in the last one, and some more; were they too few, twice as many are taken. Slots for
// all ids of a batch, of which a third are distinct, would not fit into the second cache.
class Distinct {
 public:
  // Returns how many distinct ones there are. Throws std::length_error if there are 2^31 or more.
  std::size_t find(const std::int64_t* ids, std::size_t count);

  const std::int64_t* ids() const { return ids_.get(); }         // the distinct ones, in order of first appearance
  const std::uint32_t* places() const { return places_.get(); }  // for each given id, its place among them
  const std::uint32_t* counts() const { return counts_.get(); }  // for each distinct one, how often it was given

 private:
  void make_room(std::size_t count);
  void make_slots(std::size_t wanted, std::size_t found);
  std::size_t find_some(const std::int64_t* ids, std::size_t begin, std::size_t count, std::size_t room,
                        std::size_t& found_so_far);
  std::size_t slot_of(std::uint64_t hash) const { return static_cast<std::size_t>(hash >> (64 - bits_)); }

  std::unique_ptr<std::int64_t[]> ids_;
  std::unique_ptr<std::uint32_t[]> places_, counts_;
  std::size_t room_ = 0;
  std::unique_ptr<std::uint64_t[]> slots_;  // 32 bits of hash, 32 of place
  unsigned room_bits_ = 0, bits_ = 0;       // of slots that there is memory for, and that are used
  double share_ = 1;                        // of the last batch's ids that were distinct
};

// out[i] = rows[places[i]]
void expand(const float* rows, const std::uint32_t* places, std::size_t count, std::uint32_t dim, float* out,
            std::optional<std::string_view> isa = {});

// rows[places[i]] += gradients[i]. The caller zeroes the rows. Gradients stand `in_a_row`, and then there may be a gap:
// from one line to the next it is `pitch` numbers, as where gradients of embeddings are some columns of a larger
// matrix.
void add_up(const float* gradients, std::size_t in_a_row, std::size_t pitch, const std::uint32_t* places,
            std::size_t count, std::uint32_t dim, float* rows, std::optional<std::string_view> isa = {});

// The same for bags: bag b has the ids from offsets[b] to offsets[b + 1], and there are bags + 1 offsets. Its value is
// the sum or the mean of their rows, and zeros if it is empty.
void expand_bags(const float* rows, const std::uint32_t* places, const std::int64_t* offsets, std::size_t bags,
                 std::uint32_t dim, bool mean, float* out, std::optional<std::string_view> isa = {});
void add_up_bags(const float* gradients, const std::uint32_t* places, const std::int64_t* offsets, std::size_t bags,
                 std::uint32_t dim, bool mean, float* rows, std::optional<std::string_view> isa = {});

}  // namespace argosy
