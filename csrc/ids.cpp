#include "ids.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

#include "updater.h"

namespace argosy {
namespace {

constexpr std::uint64_t kEmpty = ~std::uint64_t{0};
constexpr std::size_t kAhead = 16;  // ids whose slots are fetched ahead
constexpr std::size_t kLeastSlots = 16;

}  // namespace

void Distinct::make_room(std::size_t count) {
  if (count >= std::size_t{1} << 31) {
    throw std::length_error("a batch has " + std::to_string(count) + " ids: at most 2^31 - 1 fit");
  }
  if (count <= room_) return;
  room_ = 0;
  ids_ = std::make_unique_for_overwrite<std::int64_t[]>(count);
  places_ = std::make_unique_for_overwrite<std::uint32_t[]>(count);
  counts_ = std::make_unique_for_overwrite<std::uint32_t[]>(count);
  room_ = count;
}

// Takes twice as many slots as ids are `wanted`, or more, and puts those in that are found already.
void Distinct::make_slots(std::size_t wanted, std::size_t found) {
  const auto bits = static_cast<unsigned>(std::bit_width(std::max(wanted, kLeastSlots / 2) * 2 - 1));
  if (bits > room_bits_ || slots_ == nullptr) {
    slots_ = std::make_unique_for_overwrite<std::uint64_t[]>(std::size_t{1} << bits);
    room_bits_ = bits;
  }
  bits_ = bits;
  const std::size_t last = (std::size_t{1} << bits) - 1;
  std::fill_n(slots_.get(), last + 1, kEmpty);
  for (std::size_t place = 0; place < found; ++place) {
    const std::uint64_t hash = mix(static_cast<std::uint64_t>(ids_[place]));
    std::size_t at = slot_of(hash);
    while (slots_[at] != kEmpty) at = (at + 1) & last;
    slots_[at] = hash << 32 | place;
  }
}

std::size_t Distinct::find(const std::int64_t* ids, std::size_t count) {
  make_room(count);
  // See [Note: few slots].
  make_slots(static_cast<std::size_t>(share_ * static_cast<double>(count)), 0);
  std::size_t found = 0;
  for (std::size_t begin = 0; begin < count;) {
    const std::size_t room = (std::size_t{1} << bits_) / 8 * 5;  // a quarter more than were wanted
    begin = find_some(ids, begin, count, room, found);
    if (begin < count) make_slots(room + 1, found);
  }
  if (count > 0) share_ = static_cast<double>(found) / static_cast<double>(count);
  return found;
}

// Goes on from number `begin` until all ids are done or `room` distinct ones are found; returns where it ended.
std::size_t Distinct::find_some(const std::int64_t* ids, std::size_t begin, std::size_t count, std::size_t room,
                                std::size_t& found_so_far) {
  const std::size_t last = (std::size_t{1} << bits_) - 1;
  std::uint64_t* const slots = slots_.get();
  std::size_t found = found_so_far, i = begin;
  for (; i < count && found < room; ++i) {
    if (i + kAhead < count) __builtin_prefetch(slots + slot_of(mix(static_cast<std::uint64_t>(ids[i + kAhead]))), 1);
    const std::int64_t id = ids[i];
    const std::uint64_t hash = mix(static_cast<std::uint64_t>(id));
    std::size_t at = slot_of(hash);
    while (true) {
      const std::uint64_t slot = slots[at];
      const auto place = static_cast<std::uint32_t>(slot);
      if (slot == kEmpty) {
        slots[at] = hash << 32 | found;
        ids_[found] = id;
        counts_[found] = 1;
        places_[i] = static_cast<std::uint32_t>(found++);
        break;
      }
      if (slot >> 32 == (hash & 0xffffffff) && ids_[place] == id) {
        ++counts_[place];
        places_[i] = place;
        break;
      }
      at = (at + 1) & last;
    }
  }
  found_so_far = found;
  return i;
}

void expand(const float* rows, const std::uint32_t* places, std::size_t count, std::uint32_t dim, float* out,
            std::optional<std::string_view> isa) {
  row_kernels_of(isa).expand(rows, places, count, dim, out);
}

void add_up(const float* gradients, std::size_t in_a_row, std::size_t pitch, const std::uint32_t* places,
            std::size_t count, std::uint32_t dim, float* rows, std::optional<std::string_view> isa) {
  if (in_a_row == 0) throw std::invalid_argument("in_a_row is 0: a line has a gradient at least");
  row_kernels_of(isa).add_up(gradients, in_a_row, pitch, places, count, dim, rows);
}

void expand_bags(const float* rows, const std::uint32_t* places, const std::int64_t* offsets, std::size_t bags,
                 std::uint32_t dim, bool mean, float* out, std::optional<std::string_view> isa) {
  row_kernels_of(isa).expand_bags(rows, places, offsets, bags, dim, mean, out);
}

void add_up_bags(const float* gradients, const std::uint32_t* places, const std::int64_t* offsets, std::size_t bags,
                 std::uint32_t dim, bool mean, float* rows, std::optional<std::string_view> isa) {
  row_kernels_of(isa).add_up_bags(gradients, places, offsets, bags, dim, mean, rows);
}

}  // namespace argosy
