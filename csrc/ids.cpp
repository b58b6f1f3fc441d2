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

}  // namespace

void Distinct::make_room(std::size_t count) {
  if (count >= std::size_t{1} << 31) {
    throw std::length_error("a batch has " + std::to_string(count) + " ids: at most 2^31 - 1 fit");
  }
  if (count > room_) {
    room_ = 0;
    ids_ = std::make_unique_for_overwrite<std::int64_t[]>(count);
    places_ = std::make_unique_for_overwrite<std::uint32_t[]>(count);
    counts_ = std::make_unique_for_overwrite<std::uint32_t[]>(count);
    room_ = count;
  }
  const auto bits = static_cast<unsigned>(std::bit_width(std::max<std::size_t>(count, 8) * 2 - 1));
  if (bits > slot_bits_ || slots_ == nullptr) {
    slots_ = std::make_unique_for_overwrite<std::uint64_t[]>(std::size_t{1} << bits);
    slot_bits_ = bits;
  }
}

std::size_t Distinct::find(const std::int64_t* ids, std::size_t count) {
  make_room(count);
  // As many slots as these ids want: the room of a larger batch would only be more to clear and to miss.
  const auto bits = static_cast<unsigned>(std::bit_width(std::max<std::size_t>(count, 8) * 2 - 1));
  const std::size_t last = (std::size_t{1} << bits) - 1;
  std::uint64_t* const slots = slots_.get();
  std::fill_n(slots, last + 1, kEmpty);
  const auto slot_of = [&](std::uint64_t hash) { return static_cast<std::size_t>(hash >> (64 - bits)); };
  std::size_t found = 0;
  for (std::size_t i = 0; i < count; ++i) {
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
  return found;
}

void expand(const float* rows, const std::uint32_t* places, std::size_t count, std::uint32_t dim, float* out,
            std::optional<std::string_view> isa) {
  row_kernels_of(isa).expand(rows, places, count, dim, out);
}

void add_up(const float* gradients, const std::uint32_t* places, std::size_t count, std::uint32_t dim, float* rows,
            std::optional<std::string_view> isa) {
  row_kernels_of(isa).add_up(gradients, places, count, dim, rows);
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
