// What gradient codecs compute: blockwise quantisation (8, 4 or 1 bit) and products with matrices of low rank.
//
// The arithmetic is in codec_quant_kernels.h and codec_quant_lowrank.h, built once per instruction set; here one of the
// builds is chosen at run time, as for the reduction.
#pragma once

#include <optional>
#include <string_view>

#include "codec_quant_types.h"

namespace argosy {

// The kernels of the best instruction set, or of the named one. Throw std::invalid_argument, saying what is allowed, if
// this CPU lacks it, or if there are no codes of so many bits.
const QuantKernels& find_quant_kernels(int bits, std::optional<std::string_view> isa = {});
const LowRankKernels& find_low_rank_kernels(std::optional<std::string_view> isa = {});

}  // namespace argosy
