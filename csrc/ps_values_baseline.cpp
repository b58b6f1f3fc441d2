// The encodings of values on the wire, for any CPU.
#define ARGOSY_ISA baseline
#include "ps_values_kernels.h"
