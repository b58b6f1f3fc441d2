// What several clients pushed in one step, made one push for each table: sum(weight x gradient) / sum(weight).
//
// Sums are taken in the order of clients and of their pushes, so the result has the same bits whoever came first.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ps_tables.h"

namespace argosy {

// A push that waits for its step. Of `table` and `range` one is set.
struct PsGathered {
  PsTable* table = nullptr;
  PsRange* range = nullptr;
  std::size_t count = 0;  // rows, or numbers of a range
  std::unique_ptr<std::int64_t[]> ids;
  std::unique_ptr<float[]> gradients;
  std::unique_ptr<std::uint32_t[]> shows;  // may be null: 1 each
  std::unique_ptr<float[]> clicks;         // may be null: 0
  float lr_factor = 1;
  std::uint64_t sequence = 0, basis = 0;
};

// What one client did in a step.
struct PsContribution {
  std::uint32_t client = 0;
  double weight = 0;
  std::vector<PsGathered> pushes;
};

// Rows and ranges with numbers that are not finite are left out, and counted.
void merge_and_apply(std::vector<PsContribution>& parts);

}  // namespace argosy
