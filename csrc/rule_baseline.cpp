// The kernels of table rows for every CPU of the architecture: SSE2 on x86-64, NEON on arm64.
#define ARGOSY_ISA baseline
#include "rule_kernels.h"
