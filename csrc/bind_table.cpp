// The Python face of tables, dense ranges and the kernels for ids. Optional arrays are 0 where there are none.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>

#include <array>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "dense.h"
#include "ids.h"
#include "table.h"
#include "table_limit.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace argosy;
using Address = std::uintptr_t;
using Isa = std::optional<std::string_view>;

constexpr std::array<std::string_view, kRuleKinds> kRules = {"sgd",  "momentum", "adagrad", "adagrad_row", "rmsprop",
                                                             "adam", "adamw",    "ftrl",    "add"};
constexpr std::array<std::string_view, 4> kInitializers = {"zeros", "constant", "uniform", "normal"};
constexpr std::array<std::string_view, 3> kAdmissions = {"always", "count", "probability"};

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

template <class Kind, class Names>
Kind kind_of(std::string_view name, const char* what, const Names& names) {
  std::string allowed;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i] == name) return static_cast<Kind>(i);
    allowed += (i > 0 ? ", " : "") + std::string(names[i]);
  }
  throw std::invalid_argument("unknown " + std::string(what) + " '" + std::string(name) + "': choose one of " +
                              allowed);
}

TableConfig config_of(const nb::bytes& bytes) {
  TableConfig config;
  if (bytes.size() != sizeof config) {
    throw std::invalid_argument("a table's configuration has " + std::to_string(sizeof config) + " bytes, not " +
                                std::to_string(bytes.size()) + ": make it with table_config");
  }
  std::memcpy(&config, bytes.data(), sizeof config);
  return config;
}

nb::bytes table_config(std::uint32_t dim, std::string_view rule, float lr, float momentum, bool nesterov, float beta1,
                       float beta2, float alpha, float eps, float weight_decay, float l1, float l2, float lr_power,
                       float initial_accumulator, std::string_view initializer, float low_or_mean, float high_or_std,
                       std::uint64_t seed, std::string_view admission, std::uint32_t count, float probability) {
  TableConfig config;
  config.dim = dim;
  config.rule.kind = kind_of<RuleKind>(rule, "rule", kRules);
  config.rule.nesterov = nesterov ? 1 : 0;
  config.rule.lr = lr;
  config.rule.momentum = momentum;
  config.rule.beta1 = beta1;
  config.rule.beta2 = beta2;
  config.rule.alpha = alpha;
  config.rule.eps = eps;
  config.rule.weight_decay = weight_decay;
  config.rule.l1 = l1;
  config.rule.l2 = l2;
  config.rule.lr_power = lr_power;
  config.rule.initial_accumulator = initial_accumulator;
  config.initializer.kind = kind_of<Initializer::Kind>(initializer, "initializer", kInitializers);
  config.initializer.low_or_mean = low_or_mean;
  config.initializer.high_or_std = high_or_std;
  config.initializer.seed = seed;
  config.admission.kind = kind_of<Admission::Kind>(admission, "admission", kAdmissions);
  config.admission.count = count;
  config.admission.probability = probability;
  check(config);
  return nb::bytes(reinterpret_cast<const char*>(&config), sizeof config);
}

nb::dict push(Table& table, Address ids, std::size_t count, Address gradients, Address shows, Address clicks,
              Address pulled, float compensation, float scale, float lr_factor, std::uint64_t sequence) {
  Pushed pushed;
  {
    const nb::gil_scoped_release release;
    pushed = table.push({at<const std::int64_t>(ids), count, at<const float>(gradients), at<const std::uint32_t>(shows),
                         at<const float>(clicks), at<const float>(pulled), compensation, scale, lr_factor, sequence});
  }
  nb::dict counts;
  counts["updated"] = pushed.updated;
  counts["admitted"] = pushed.admitted;
  counts["waiting"] = pushed.waiting;
  counts["not_finite"] = pushed.not_finite;
  return counts;
}

nb::tuple scan(const Table& table, std::uint64_t cursor, std::size_t room, Address ids, Address values, Address state,
               Address counters) {
  std::size_t found = 0;
  std::uint64_t next;
  {
    const nb::gil_scoped_release release;
    next = table.scan(cursor, room, at<std::int64_t>(ids), at<float>(values), at<float>(state), at<float>(counters),
                      &found);
  }
  return nb::make_tuple(next, found);
}

void bind_tables(nb::module_& m) {
  const TableConfig defaults;
  m.def("table_config", &table_config, "dim"_a, "rule"_a, nb::kw_only(), "lr"_a = 0.01f, "momentum"_a = 0.0f,
        "nesterov"_a = false, "beta1"_a = 0.0f, "beta2"_a = 0.0f, "alpha"_a = 0.0f, "eps"_a = 0.0f,
        "weight_decay"_a = 0.0f, "l1"_a = 0.0f, "l2"_a = 0.0f, "lr_power"_a = defaults.rule.lr_power,
        "initial_accumulator"_a = 0.0f, "initializer"_a = "zeros", "low_or_mean"_a = 0.0f, "high_or_std"_a = 0.0f,
        "seed"_a = 0, "admission"_a = "always", "count"_a = 0, "probability"_a = 0.0f);

  nb::class_<Table>(m, "Table")
      .def(
          "__init__", [](Table* self, const nb::bytes& config, Isa isa) { new (self) Table(config_of(config), isa); },
          "config"_a, "isa"_a = nb::none())
      .def(
          "pull",
          [](const Table& table, Address ids, std::size_t count, Address out) {
            const nb::gil_scoped_release release;
            table.pull(at<const std::int64_t>(ids), count, at<float>(out));
          },
          "ids_at"_a, "count"_a, "out_at"_a)
      .def("push", &push, "ids_at"_a, "count"_a, "gradients_at"_a, "shows_at"_a = 0, "clicks_at"_a = 0,
           "pulled_at"_a = 0, "compensation"_a = 0.0f, "scale"_a = 1.0f, "lr_factor"_a = 1.0f, "sequence"_a = 0)
      .def(
          "set",
          [](Table& table, Address ids, std::size_t count, Address values) {
            const nb::gil_scoped_release release;
            table.set(at<const std::int64_t>(ids), count, at<const float>(values));
          },
          "ids_at"_a, "count"_a, "values_at"_a)
      .def_prop_ro("rows", &Table::rows)
      .def_prop_ro("waiting", &Table::waiting)
      .def_prop_ro("bytes", &Table::bytes)
      .def_prop_ro("payload_bytes", &Table::payload_bytes)
      .def_prop_ro("followed", &Table::followed)
      .def_prop_ro("dim", [](const Table& table) { return table.config().dim; })
      .def_prop_ro("state_floats",
                   [](const Table& table) { return state_floats(table.config().rule.kind, table.config().dim); })
      .def("end_day", &Table::end_day, "decay"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("shrink", &Table::shrink, "score_below"_a, "unseen_days"_a = 0, "click_weight"_a = 1.0f,
           nb::call_guard<nb::gil_scoped_release>())
      .def("scan", &scan, "cursor"_a, "room"_a, "ids_at"_a, "values_at"_a = 0, "state_at"_a = 0, "counters_at"_a = 0);

  nb::class_<DenseRange>(m, "DenseRange")
      .def(
          "__init__",
          [](DenseRange* self, const nb::bytes& config, std::size_t count, Isa isa) {
            new (self) DenseRange(config_of(config).rule, count, isa);
          },
          "config"_a, "count"_a, "isa"_a = nb::none())
      .def(
          "set",
          [](DenseRange& range, Address values) {
            const nb::gil_scoped_release release;
            range.set(at<const float>(values));
          },
          "values_at"_a)
      .def(
          "pull",
          [](const DenseRange& range, Address out) {
            const nb::gil_scoped_release release;
            range.pull(at<float>(out));
          },
          "out_at"_a)
      .def(
          "push",
          [](DenseRange& range, Address gradients, Address pulled, float compensation, float scale, float lr_factor) {
            const nb::gil_scoped_release release;
            return range.push(at<const float>(gradients), at<const float>(pulled), compensation, scale, lr_factor);
          },
          "gradients_at"_a, "pulled_at"_a = 0, "compensation"_a = 0.0f, "scale"_a = 1.0f, "lr_factor"_a = 1.0f)
      .def_prop_ro("count", &DenseRange::count);
}

void bind_ids(nb::module_& m) {
  nb::class_<Distinct>(m, "Distinct")
      .def(nb::init<>())
      .def(
          "find",
          [](Distinct& distinct, Address ids, std::size_t count) {
            const nb::gil_scoped_release release;
            return distinct.find(at<const std::int64_t>(ids), count);
          },
          "ids_at"_a, "count"_a)
      .def_prop_ro("ids_at", [](const Distinct& distinct) { return reinterpret_cast<Address>(distinct.ids()); })
      .def_prop_ro("places_at", [](const Distinct& distinct) { return reinterpret_cast<Address>(distinct.places()); })
      .def_prop_ro("counts_at", [](const Distinct& distinct) { return reinterpret_cast<Address>(distinct.counts()); });

  m.def("mix", &mix, "id"_a);
  m.def(
      "expand",
      [](Address rows, Address places, std::size_t count, std::uint32_t dim, Address out, Isa isa) {
        const nb::gil_scoped_release release;
        expand(at<const float>(rows), at<const std::uint32_t>(places), count, dim, at<float>(out), isa);
      },
      "rows_at"_a, "places_at"_a, "count"_a, "dim"_a, "out_at"_a, "isa"_a = nb::none());
  m.def(
      "add_up",
      [](Address gradients, std::size_t in_a_row, std::size_t pitch, Address places, std::size_t count,
         std::uint32_t dim, Address rows, Isa isa) {
        const nb::gil_scoped_release release;
        add_up(at<const float>(gradients), in_a_row, pitch, at<const std::uint32_t>(places), count, dim,
               at<float>(rows), isa);
      },
      "gradients_at"_a, "in_a_row"_a, "pitch"_a, "places_at"_a, "count"_a, "dim"_a, "rows_at"_a, "isa"_a = nb::none());
  m.def(
      "expand_bags",
      [](Address rows, Address places, Address offsets, std::size_t bags, std::uint32_t dim, bool mean, Address out,
         Isa isa) {
        const nb::gil_scoped_release release;
        expand_bags(at<const float>(rows), at<const std::uint32_t>(places), at<const std::int64_t>(offsets), bags, dim,
                    mean, at<float>(out), isa);
      },
      "rows_at"_a, "places_at"_a, "offsets_at"_a, "bags"_a, "dim"_a, "mean"_a, "out_at"_a, "isa"_a = nb::none());
  m.def(
      "add_up_bags",
      [](Address gradients, Address places, Address offsets, std::size_t bags, std::uint32_t dim, bool mean,
         Address rows, Isa isa) {
        const nb::gil_scoped_release release;
        add_up_bags(at<const float>(gradients), at<const std::uint32_t>(places), at<const std::int64_t>(offsets), bags,
                    dim, mean, at<float>(rows), isa);
      },
      "gradients_at"_a, "places_at"_a, "offsets_at"_a, "bags"_a, "dim"_a, "mean"_a, "rows_at"_a, "isa"_a = nb::none());

  m.def(
      "random_access_limit",
      [](std::size_t rows, std::size_t head_floats, std::size_t dim, std::size_t state_floats, std::size_t count,
         std::size_t repeats) {
        RandomAccess best;
        {
          const nb::gil_scoped_release release;
          best = random_access_limit(rows, head_floats, dim, state_floats, count, repeats);
        }
        return nb::make_tuple(best.gather_seconds, best.scatter_seconds);
      },
      "rows"_a, "head_floats"_a, "dim"_a, "state_floats"_a, "count"_a, "repeats"_a);
}

}  // namespace

void bind_table(nb::module_& m) {
  bind_tables(m);
  bind_ids(m);
}
