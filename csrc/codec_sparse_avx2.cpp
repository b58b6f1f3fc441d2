// The passes of the sparse codecs for x86-64 CPUs with AVX2 and F16C.
#define ARGOSY_ISA avx2
#include "codec_sparse_kernels.h"
