#include "table_types.h"

#include <cmath>
#include <stdexcept>
#include <string>

namespace argosy {
namespace {

// Comparisons are written so that a NaN fails them.
void expect(bool holds, const char* field, double value, const char* allowed) {
  if (!holds)
    throw std::invalid_argument(std::string(field) + " is " + std::to_string(value) + ": it must be " + allowed);
}

void expect_not_negative(const char* field, float value) {
  expect(value >= 0 && std::isfinite(value), field, value, "0 or more, and finite");
}

void check(const Initializer& initializer) {
  const auto kind = static_cast<unsigned>(initializer.kind);
  expect(kind <= 3, "initializer kind", kind, "zeros (0), constant (1), uniform (2) or normal (3)");
  expect(std::isfinite(initializer.low_or_mean), "low_or_mean", initializer.low_or_mean, "finite");
  expect(std::isfinite(initializer.high_or_std), "high_or_std", initializer.high_or_std, "finite");
  if (initializer.kind == Initializer::Kind::uniform) {
    expect(initializer.low_or_mean <= initializer.high_or_std, "low_or_mean", initializer.low_or_mean,
           "no larger than high_or_std: a uniform initializer has a low and a high end");
  }
  if (initializer.kind == Initializer::Kind::normal) expect_not_negative("high_or_std", initializer.high_or_std);
}

void check(const Admission& admission) {
  const auto kind = static_cast<unsigned>(admission.kind);
  expect(kind <= 2, "admission kind", kind, "always (0), count (1) or probability (2)");
  if (admission.kind == Admission::Kind::count) {
    expect(admission.count >= 1 && admission.count <= kMostCount, "admission count", admission.count,
           "from 1 to 16777215");
  }
  if (admission.kind == Admission::Kind::probability) {
    expect(admission.probability > 0 && admission.probability <= 1, "admission probability", admission.probability,
           "above 0 and at most 1");
  }
}

}  // namespace

void check(const Rule& rule) {
  const auto kind = static_cast<unsigned>(rule.kind);
  expect(kind < kRuleKinds, "rule kind", kind, "below 9, the number of rules");
  expect(rule.nesterov <= 1, "nesterov", rule.nesterov, "0 or 1");
  expect_not_negative("lr", rule.lr);
  expect_not_negative("momentum", rule.momentum);
  expect(rule.beta2 >= 0 && rule.beta2 < 1, "beta2", rule.beta2, "from 0 to 1, without 1");
  if (rule.kind == RuleKind::ftrl) {
    expect_not_negative("beta", rule.beta1);
    expect(rule.lr > 0, "lr", rule.lr, "above 0 for FTRL, which divides by it");
    expect(rule.lr_power <= 0 && rule.lr_power >= -1, "lr_power", rule.lr_power, "from -1 to 0");
  } else {
    expect(rule.beta1 >= 0 && rule.beta1 < 1, "beta1", rule.beta1, "from 0 to 1, without 1");
  }
  expect(rule.alpha >= 0 && rule.alpha <= 1, "alpha", rule.alpha, "from 0 to 1");
  expect_not_negative("eps", rule.eps);
  expect_not_negative("weight_decay", rule.weight_decay);
  expect_not_negative("l1", rule.l1);
  expect_not_negative("l2", rule.l2);
  expect_not_negative("initial_accumulator", rule.initial_accumulator);
}

void check(const TableConfig& config) {
  expect(config.dim >= 1 && config.dim <= kMostDim, "dim", config.dim, "from 1 to 65536");
  check(config.rule);
  check(config.initializer);
  check(config.admission);
}

std::size_t state_floats(RuleKind kind, std::size_t dim) {
  switch (kind) {
    case RuleKind::sgd:
    case RuleKind::add:
      return 0;
    case RuleKind::adagrad_row:
      return 1;
    case RuleKind::momentum:
    case RuleKind::adagrad:
    case RuleKind::rmsprop:
      return dim;
    case RuleKind::adam:
    case RuleKind::adamw:
    case RuleKind::ftrl:
      break;
  }
  return 2 * dim;
}

}  // namespace argosy
