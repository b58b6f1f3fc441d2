#include "tiles.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace argosy {

bool tiles_are_hidden() {
#if defined(__x86_64__)
  constexpr unsigned int kAmxTile = 1u << 24;  // in EDX of page 7
  unsigned int a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAmxTile) == 0) return false;
  return !__get_cpuid_count(0x1D, 0, &a, &b, &c, &d) || a == 0;  // the number of palettes
#else
  return false;
#endif
}

}  // namespace argosy
