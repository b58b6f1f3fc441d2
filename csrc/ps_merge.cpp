#include "ps_merge.h"

#include <algorithm>
#include <map>
#include <vector>

#include "ids.h"
#include "ps_values.h"

namespace argosy {
namespace {

struct Weighted {
  const PsGathered* push;
  float weight;
};

// One number at a time from each: what the compiler makes of it does not change its bits.
void add_weighted(float* sum, const float* gradient, float weight, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) sum[i] += weight * gradient[i];
}

void apply_rows(PsTable& to, const std::vector<Weighted>& pushes, float scale) {
  std::size_t total = 0;
  for (const Weighted& part : pushes) total += part.push->count;
  std::vector<std::int64_t> ids;
  ids.reserve(total);
  for (const Weighted& part : pushes)
    ids.insert(ids.end(), part.push->ids.get(), part.push->ids.get() + part.push->count);
  Distinct distinct;
  const std::size_t count = distinct.find(ids.data(), total);
  const std::uint32_t dim = to.table.config().dim;
  std::vector<float> sums(count * dim), clicks(count);
  std::vector<std::uint32_t> shows(count);
  std::vector<bool> pushed(count);
  const std::uint32_t* place = distinct.places();
  for (const auto& [push, weight] : pushes) {
    for (std::size_t i = 0; i < push->count; ++i, ++place) {
      const float* const gradient = push->gradients.get() + i * dim;
      if (first_not_finite(gradient, dim, dim) == 0) {
        ++to.not_finite;
        continue;
      }
      pushed[*place] = true;
      add_weighted(sums.data() + std::size_t{*place} * dim, gradient, weight, dim);
      shows[*place] += push->shows ? push->shows[i] : 1;
      clicks[*place] += push->clicks ? push->clicks[i] : 0.0f;
    }
  }
  // What nobody pushed a number for must not look like a push of zeros, which some optimizers do not ignore.
  ids.assign(distinct.ids(), distinct.ids() + count);
  std::size_t kept = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (!pushed[i]) continue;
    if (kept != i) {
      std::copy_n(sums.data() + i * dim, dim, sums.data() + kept * dim);
      ids[kept] = ids[i], shows[kept] = shows[i], clicks[kept] = clicks[i];
    }
    ++kept;
  }
  const PsGathered& first = *pushes.front().push;
  Push push = {};
  push.ids = ids.data(), push.count = kept, push.gradients = sums.data();
  push.shows = shows.data(), push.clicks = clicks.data();
  push.scale = scale, push.lr_factor = first.lr_factor, push.sequence = first.sequence;
  apply(to, push);
}

void apply_range(PsRange& to, const std::vector<Weighted>& pushes, float scale) {
  const std::size_t count = to.range.count();
  std::vector<float> sums(count);
  bool any = false;
  for (const auto& [push, weight] : pushes) {
    if (first_not_finite(push->gradients.get(), count, count) == 0) {
      ++to.not_finite;
      continue;
    }
    any = true;
    add_weighted(sums.data(), push->gradients.get(), weight, count);
  }
  if (any) apply(to, sums.data(), nullptr, 0, scale, pushes.front().push->lr_factor);
}

}  // namespace

void merge_and_apply(std::vector<PsContribution>& parts) {
  std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.client < b.client; });
  std::map<std::uint32_t, std::vector<Weighted>> tables, ranges;
  double weights = 0;
  for (const PsContribution& part : parts) {
    weights += part.weight;
    if (part.weight == 0) continue;  // a batch without samples says nothing, whatever its gradients are
    for (const PsGathered& push : part.pushes) {
      const std::uint32_t number = push.table != nullptr ? push.table->number : push.range->number;
      (push.table != nullptr ? tables : ranges)[number].push_back({&push, static_cast<float>(part.weight)});
    }
  }
  if (weights == 0) return;
  const auto scale = static_cast<float>(1.0 / weights);
  for (const auto& [number, pushes] : tables) apply_rows(*pushes.front().push->table, pushes, scale);
  for (const auto& [number, pushes] : ranges) apply_range(*pushes.front().push->range, pushes, scale);
}

}  // namespace argosy
