// The encodings of values on the wire, for x86-64 CPUs with AVX2.
#define ARGOSY_ISA avx2
#include "ps_values_kernels.h"
