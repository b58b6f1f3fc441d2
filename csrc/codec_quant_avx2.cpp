// The gradient codecs for x86-64 CPUs with AVX2.
#define ARGOSY_ISA avx2
#include "codec_quant_kernels.h"
#include "codec_quant_lowrank.h"
