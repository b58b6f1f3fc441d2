// The kernels of table rows for x86-64 CPUs with AVX2 and F16C.
#define ARGOSY_ISA avx2
#include "rule_kernels.h"
