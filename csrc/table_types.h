// What a table is made of: its optimizer, initial values and admission, as plain data that crosses the wire as bytes.
//
// Little-endian, with every byte named, so that two configurations are the same if their bytes are. What comes from a
// wire is not trusted before `check` has seen it: an enum may hold any number until then.
//
// Every build of the kernels includes this file, so it stays free of standard templates: see
// [Note: one build per instruction set] in lanes.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace argosy {

enum class RuleKind : std::uint8_t { sgd, momentum, adagrad, adagrad_row, rmsprop, adam, adamw, ftrl, add };
constexpr std::size_t kRuleKinds = 9;

// One optimizer; fields that a kind does not use are ignored. Formulas are in rule_kernels.h.
struct Rule {
  RuleKind kind = RuleKind::sgd;
  std::uint8_t nesterov = 0;  // 0 or 1; no bool, as a bool of any other value would be undefined behaviour
  std::uint8_t unused[2] = {};
  float lr = 0, momentum = 0;
  float beta1 = 0, beta2 = 0;  // of Adam; FTRL's beta is in beta1
  float alpha = 0;             // of RMSProp
  float eps = 0, weight_decay = 0, l1 = 0, l2 = 0;
  float lr_power = -0.5f;         // of FTRL
  float initial_accumulator = 0;  // of Adagrad, and FTRL's n
};

struct Initializer {
  enum class Kind : std::uint8_t { zeros, constant, uniform, normal };
  std::uint64_t seed = 0;
  float low_or_mean = 0, high_or_std = 0;  // a constant is in low_or_mean
  Kind kind = Kind::zeros;
  std::uint8_t unused[7] = {};
};

// Which ids get a row.
struct Admission {
  enum class Kind : std::uint8_t { always, count, probability };
  std::uint32_t count = 0;  // with the push that makes it seen this often (`shows`)
  float probability = 0;    // drawn at each push, from (seed, id, sequence)
  Kind kind = Kind::always;
  std::uint8_t unused[3] = {};
};

struct TableConfig {
  std::uint32_t dim = 1;
  Rule rule;
  std::uint8_t unused[4] = {};
  Initializer initializer;
  Admission admission;
  std::uint8_t unused_too[4] = {};
};

static_assert(sizeof(Rule) == 48 && sizeof(Initializer) == 24 && sizeof(Admission) == 12);
static_assert(sizeof(TableConfig) == 96 && offsetof(TableConfig, initializer) == 56);
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

constexpr std::uint32_t kMostDim = 65536;
constexpr std::uint32_t kMostCount = (1u << 24) - 1;  // counts of ids that wait have 24 bits

// Throw std::invalid_argument, saying what is wrong and what is allowed.
void check(const Rule& rule);
void check(const TableConfig& config);

// How many floats of state a row of `dim` values has.
std::size_t state_floats(RuleKind kind, std::size_t dim);

}  // namespace argosy
