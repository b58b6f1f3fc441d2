// A push at work: gradients applied to rows, a few at a time, so that the kernels of a rule have several at once.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "table_request.h"
#include "table_rows.h"
#include "updater.h"

namespace argosy {

class Applier {
 public:
  static constexpr std::size_t kMostRows = 8;  // of a call

  Applier(const Push& push, const TableConfig& config, const Updater& updater, Pushed& pushed)
      : push_(push),
        updater_(updater),
        pushed_(pushed),
        dim_(config.dim),
        compensates_(push.pulled != nullptr && push.compensation != 0),
        compensated_(std::make_unique_for_overwrite<float[]>(compensates_ ? kMostRows * dim_ : 0)) {}

  // Applies the gradients of some ids to the rows that were found for them. If such a row is not the id's, or there is
  // none, `other` is asked for one, and may change how often the id was shown; null: it has none.
  template <class Other>
  void apply(std::span<const SortedIds::Entry> entries, RowHead* const* found, Other other);

  const Push& push() const { return push_; }
  Pushed& pushed() { return pushed_; }
  bool compensates() const { return compensates_; }

 private:
  // Makes up for the delay of a gradient; null if what comes out is not finite.
  const float* compensate(const float* gradient, const RowHead* row, std::uint32_t place, std::size_t number);

  const Push& push_;
  const Updater& updater_;
  Pushed& pushed_;
  const std::size_t dim_;
  const bool compensates_;
  const std::unique_ptr<float[]> compensated_;
};

template <class Other>
void Applier::apply(std::span<const SortedIds::Entry> entries, RowHead* const* found, Other other) {
  std::array<const float*, kMostRows> given, gradients;
  for (std::size_t i = 0; i < entries.size(); ++i) given[i] = push_.gradients + entries[i].place * dim_;
  const RowKernels& kernels = updater_.kernels();
  const std::uint64_t broken = push_.finite ? 0 : kernels.not_finite(given.data(), entries.size(), dim_, push_.scale);
  pushed_.not_finite += static_cast<std::uint64_t>(std::popcount(broken));
  std::array<float*, kMostRows> values;
  std::array<std::uint32_t, kMostRows> steps;
  std::size_t count = 0;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if ((broken >> i & 1) != 0) continue;
    const auto [id, hash, place] = entries[i];
    std::uint32_t shows = push_.shows != nullptr ? push_.shows[place] : 1;
    RowHead* row = found[i];
    // A row that was known may be free now: its id is then a number of another row.
    if (row == nullptr || row->id != id || row->age.free()) [[unlikely]] {
      row = other(entries[i], shows);
      if (row == nullptr) continue;
    }
    const float* gradient = compensates_ ? compensate(given[i], row, place, i) : given[i];
    if (gradient == nullptr) continue;
    row->age.see(1);
    row->show += static_cast<float>(shows);
    if (push_.clicks != nullptr) row->click += push_.clicks[place];
    values[count] = row->value();
    gradients[count] = gradient;
    steps[count++] = row->age.count();
  }
  const float scale = compensates_ ? 1.0f : push_.scale;  // what is compensated, is scaled
  updater_.apply(values.data(), gradients.data(), steps.data(), count, dim_, scale, push_.lr_factor);
  pushed_.updated += count;
}

inline const float* Applier::compensate(const float* gradient, const RowHead* row, std::uint32_t place,
                                        std::size_t number) {
  const float* out = compensated_.get() + number * dim_;
  const RowKernels& kernels = updater_.kernels();
  kernels.compensate(gradient, row->value(), push_.pulled + place * dim_, dim_, push_.scale, push_.compensation,
                     compensated_.get() + number * dim_);
  if (kernels.not_finite(&out, 1, dim_, 1) == 0) return out;
  ++pushed_.not_finite;
  return nullptr;
}

}  // namespace argosy
