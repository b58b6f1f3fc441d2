#include "codec_quant.h"

#include <stdexcept>
#include <string>

#include "reduce.h"

namespace argosy {
namespace {

struct Build {
  std::string_view isa;
  const QuantKernels* (*find_quant_kernels)(int bits);
  const LowRankKernels* low_rank;
};

constexpr Build kBuilds[] = {
#if defined(__x86_64__)
    {"avx512", avx512::find_quant_kernels, &avx512::kLowRankKernels},
    {"avx2", avx2::find_quant_kernels, &avx2::kLowRankKernels},
#endif
    {"baseline", baseline::find_quant_kernels, &baseline::kLowRankKernels},
};

const Build& named(std::string_view isa) {
  for (const Build& build : kBuilds) {
    if (build.isa == isa) return build;
  }
  throw std::logic_error("the codecs are not built for " + std::string(isa));
}

const Build& find_build(std::optional<std::string_view> isa) {
  static const Build& best = named(instruction_sets().front());
  if (!isa) return best;
  std::string names;
  for (const std::string_view name : instruction_sets()) {
    if (name == *isa) return named(name);
    names += (names.empty() ? "" : ", ") + std::string(name);
  }
  throw std::invalid_argument("this CPU cannot run isa '" + std::string(*isa) + "': choose one of " + names);
}

}  // namespace

const QuantKernels& find_quant_kernels(int bits, std::optional<std::string_view> isa) {
  const QuantKernels* const kernels = find_build(isa).find_quant_kernels(bits);
  if (kernels == nullptr) {
    throw std::invalid_argument("there are no codes of " + std::to_string(bits) + " bits: choose 8, 4 or 1");
  }
  return *kernels;
}

const LowRankKernels& find_low_rank_kernels(std::optional<std::string_view> isa) { return *find_build(isa).low_rank; }

}  // namespace argosy
