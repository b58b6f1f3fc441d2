#include "reduce.h"

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace argosy {
namespace {

constexpr std::array<std::string_view, 8> kOpNames = {"sum", "avg", "min", "max", "prod", "band", "bor", "bxor"};
constexpr std::array<std::string_view, 16> kDTypeNames = {"f32",  "f64",  "bf16", "f16",     "i32", "i64",
                                                          "i8",   "u8",   "i16",  "boolean", "c64", "c128",
                                                          "raw1", "raw2", "raw4", "raw8"};
constexpr std::array<std::size_t, kDTypeNames.size()> kDTypeBytes = {4, 8, 2, 2, 4, 8, 1, 1, 2, 1, 8, 16, 1, 2, 4, 8};

struct InstructionSet {
  std::string_view name;
  bool (*supported)();
  ReduceKernel (*find_kernel)(Op op, DType dtype);
};

#if defined(__x86_64__)
bool supports_avx2() {
  unsigned int a, b, c, d;  // F16C is asked for by hand, as not every compiler knows its name
  return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}
#endif

// Best first. Each condition names exactly what CMakeLists.txt builds the kernels with.
constexpr InstructionSet kInstructionSets[] = {
#if defined(__x86_64__)
    {"avx512",
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && supports_avx2();
     },
     avx512::find_kernel},
    {"avx2", supports_avx2, avx2::find_kernel},
#endif
    {"baseline", [] { return true; }, baseline::find_kernel},
};

// Those that this CPU can run. Found out once: in a virtual machine, asking the CPU takes microseconds.
const std::vector<InstructionSet>& available() {
  static const std::vector<InstructionSet> sets = [] {
    std::vector<InstructionSet> found;
    for (const InstructionSet& set : kInstructionSets) {
      if (set.supported()) found.push_back(set);
    }
    return found;
  }();
  return sets;
}

std::invalid_argument wrong_name(std::string problem, std::span<const std::string_view> allowed) {
  problem += ": choose one of ";
  for (const std::string_view& choice : allowed) {
    if (&choice != &allowed.front()) problem += ", ";
    problem += choice;
  }
  return std::invalid_argument(problem);
}

std::size_t index_of(std::string_view name, const char* what, std::span<const std::string_view> allowed) {
  for (std::size_t i = 0; i < allowed.size(); ++i) {
    if (allowed[i] == name) return i;
  }
  throw wrong_name(std::string("unknown ") + what + " '" + std::string(name) + "'", allowed);
}

std::invalid_argument no_kernel(Op op, DType dtype) {
  const std::string type(dtype_name(static_cast<std::size_t>(dtype)));
  if (dtype >= DType::boolean) return std::invalid_argument(type + " cannot be reduced");
  const std::string name(op_name(static_cast<std::size_t>(op)));
  return std::invalid_argument(type + " cannot be reduced by " + name + ": it takes integers");
}

}  // namespace

Op parse_op(std::string_view name) { return static_cast<Op>(index_of(name, "op", kOpNames)); }

DType parse_dtype(std::string_view name) { return static_cast<DType>(index_of(name, "dtype", kDTypeNames)); }

std::string_view op_name(std::size_t op) { return op < kOpNames.size() ? kOpNames[op] : "unknown op"; }

std::string_view dtype_name(std::size_t dtype) {
  return dtype < kDTypeNames.size() ? kDTypeNames[dtype] : "unknown dtype";
}

std::size_t element_bytes(DType dtype) { return kDTypeBytes[static_cast<std::size_t>(dtype)]; }

std::vector<std::string_view> instruction_sets() {
  std::vector<std::string_view> names;
  for (const InstructionSet& set : available()) names.push_back(set.name);
  return names;
}

ReduceKernel find_reduce_kernel(Op op, DType dtype, std::optional<std::string_view> isa) {
  for (const InstructionSet& set : available()) {
    if (isa.value_or(set.name) != set.name) continue;
    if (const ReduceKernel kernel = set.find_kernel(op, dtype)) return kernel;
    throw no_kernel(op, dtype);
  }
  throw wrong_name("this CPU cannot run isa '" + std::string(*isa) + "'", instruction_sets());
}

void check_reduce_buffers(DType dtype, const std::byte* out, std::span<const std::byte* const> sources,
                          std::size_t count) {
  const auto wrong = [&](const std::string& which, const char* why) {
    return std::invalid_argument(which + why + " (count is " + std::to_string(count) + ")");
  };
  const auto source = [](std::size_t i) { return "sources[" + std::to_string(i) + "]"; };
  if (sources.empty()) throw std::invalid_argument("sources is empty: a reduction needs at least one");
  if (count == 0) return;
  if (out == nullptr) throw wrong("out", " is a null pointer");
  const auto begin = reinterpret_cast<std::uintptr_t>(out);
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const auto address = reinterpret_cast<std::uintptr_t>(sources[i]);
    const std::uintptr_t distance = address > begin ? address - begin : begin - address;
    if (address == 0) throw wrong(source(i), " is a null pointer");
    if (distance != 0 && distance < count * element_bytes(dtype)) {
      throw wrong(source(i), " overlaps out: it may be the same buffer or a separate one");
    }
  }
}

}  // namespace argosy
