// The gradient codecs for x86-64 CPUs with AVX-512 F, BW, DQ and VL.
#define ARGOSY_ISA avx512
#include "codec_quant_kernels.h"
#include "codec_quant_lowrank.h"
