#include "ps_tables.h"

#include <cstring>
#include <mutex>

#include "ps_wire.h"

namespace argosy {
namespace {

std::string known(const auto& map) {
  if (map.empty()) return "none was created";
  std::string text = "there are ";
  std::size_t told = 0;
  for (const auto& [number, unused] : map) {
    if (told == 20) return text + ", ...";
    text += (told++ > 0 ? ", " : "") + std::to_string(number);
  }
  return text;
}

template <class Map, class... Given>
void add(Map& map, std::uint32_t number, const Given&... given) {
  if (map.size() >= PsTables::kMost) {
    throw PsRefusal(PsWrong::too_large, "a server has at most " + std::to_string(PsTables::kMost) + " of them");
  }
  try {
    map[number] = std::make_unique<typename Map::mapped_type::element_type>(number, given...);
  } catch (const std::invalid_argument& error) {
    map.erase(number);
    throw PsRefusal(PsWrong::malformed, error.what());
  } catch (...) {
    map.erase(number);
    throw;
  }
}

[[noreturn]] void disagree(const char* what, std::uint32_t number) {
  throw PsRefusal(PsWrong::mismatch, std::string(what) + " " + std::to_string(number) +
                                         " exists with another configuration: all workers must create it alike");
}

std::string field(const char* name, std::uint64_t value) {
  return std::string("\"").append(name).append("\":").append(std::to_string(value));
}

}  // namespace

void apply(PsTable& to, const Push& push) {
  const Pushed pushed = to.table.push(push);
  ++to.pushes;
  to.updates += pushed.updated;
  to.waiting += pushed.waiting;
  to.not_finite += pushed.not_finite;
}

void apply(PsRange& to, const float* gradients, const float* pulled, float compensation, float scale, float lr_factor) {
  const bool applied = to.range.push(gradients, pulled, compensation, scale, lr_factor);
  ++to.pushes;
  to.not_finite += !applied;
}

void PsTables::create_table(std::uint32_t number, const TableConfig& config) {
  const std::unique_lock lock(mutex_);
  const auto found = tables_.find(number);
  if (found == tables_.end()) return add(tables_, number, config);
  if (std::memcmp(&found->second->table.config(), &config, sizeof config) != 0) disagree("table", number);
}

void PsTables::create_range(std::uint32_t number, const TableConfig& config, std::size_t count) {
  const std::unique_lock lock(mutex_);
  const auto found = ranges_.find(number);
  if (found == ranges_.end()) return add(ranges_, number, config.rule, count);
  const PsRange& there = *found->second;
  if (there.range.count() != count || std::memcmp(&there.rule, &config.rule, sizeof(Rule)) != 0) {
    disagree("range", number);
  }
}

PsTable& PsTables::table(std::uint32_t number) const {
  const std::shared_lock lock(mutex_);
  const auto found = tables_.find(number);
  if (found != tables_.end()) return *found->second;
  throw PsRefusal(PsWrong::unknown_table, "table " + std::to_string(number) + " is unknown: " + known(tables_));
}

PsRange& PsTables::range(std::uint32_t number) const {
  const std::shared_lock lock(mutex_);
  const auto found = ranges_.find(number);
  if (found != ranges_.end()) return *found->second;
  throw PsRefusal(PsWrong::unknown_table, "range " + std::to_string(number) + " is unknown: " + known(ranges_));
}

std::string PsTables::json() const {
  const std::shared_lock lock(mutex_);
  std::string tables, ranges;
  std::uint64_t not_finite = 0;
  for (const auto& [number, one] : tables_) {
    tables += std::string(tables.empty() ? "" : ",") + "{" + field("number", number) + "," +
              field("rows", one->table.rows()) + "," + field("bytes", one->table.bytes()) + "," +
              field("payload_bytes", one->table.payload_bytes()) + "," + field("pushes", one->pushes) + "," +
              field("updates", one->updates) + "," + field("waiting", one->waiting) + "," +
              field("not_finite", one->not_finite) + "," + field("pulled_rows", one->pulled_rows) + "}";
    not_finite += one->not_finite;
  }
  for (const auto& [number, one] : ranges_) {
    ranges += std::string(ranges.empty() ? "" : ",") + "{" + field("number", number) + "," +
              field("count", one->range.count()) + "," + field("pushes", one->pushes) + "," +
              field("not_finite", one->not_finite) + "}";
    not_finite += one->not_finite;
  }
  return "\"tables\":[" + tables + "],\"ranges\":[" + ranges + "]," + field("not_finite", not_finite);
}

}  // namespace argosy
