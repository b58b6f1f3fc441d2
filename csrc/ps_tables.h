// The tables and ranges of a server, by number, with what is counted of each.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <shared_mutex>
#include <string>

#include "dense.h"
#include "table.h"

namespace argosy {

struct PsTable {
  PsTable(std::uint32_t number, const TableConfig& config) : number(number), table(config) {}
  const std::uint32_t number;
  Table table;
  std::atomic<std::uint64_t> pushes = 0, updates = 0, waiting = 0, not_finite = 0, pulled_rows = 0;
};

struct PsRange {
  PsRange(std::uint32_t number, const Rule& rule, std::size_t count) : number(number), rule(rule), range(rule, count) {}
  const std::uint32_t number;
  const Rule rule;
  DenseRange range;
  std::atomic<std::uint64_t> pushes = 0, not_finite = 0;
};

// Pushes to a table or range, and counts what came of it.
void apply(PsTable& to, const Push& push);
void apply(PsRange& to, const float* gradients, const float* pulled, float compensation, float scale, float lr_factor);

class PsTables {
 public:
  static constexpr std::size_t kMost = 65536;

  // Made by the first who asks; the others must ask for the same. Throw PsRefusal.
  void create_table(std::uint32_t number, const TableConfig& config);
  void create_range(std::uint32_t number, const TableConfig& config, std::size_t count);

  // Throw PsRefusal(unknown_table). What is returned lives as long as this does.
  PsTable& table(std::uint32_t number) const;
  PsRange& range(std::uint32_t number) const;

  std::string json() const;  // the fields of stats, without braces

 private:
  mutable std::shared_mutex mutex_;
  std::map<std::uint32_t, std::unique_ptr<PsTable>> tables_;
  std::map<std::uint32_t, std::unique_ptr<PsRange>> ranges_;
};

}  // namespace argosy
