// The kernels of table rows for x86-64 CPUs with AVX-512 F, BW, DQ and VL, besides AVX2 and F16C.
#define ARGOSY_ISA avx512
#include "rule_kernels.h"
