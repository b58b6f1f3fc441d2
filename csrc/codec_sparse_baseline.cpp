// The passes of the sparse codecs for every CPU of the architecture: SSE2 on x86-64, NEON on arm64.
#define ARGOSY_ISA baseline
#include "codec_sparse_kernels.h"
