// Tells a process the shape of AMX's tiles where a hypervisor has AMX and leaves that page of CPUID out, so that what
// the CPU can do is measured. To be preloaded (see tiles.py); it is for measuring only.
//
// CPUID is made to fault in this process; the fault's handler asks the CPU and adds what is missing. The numbers are
// those of palette 1, the only one there is.
#define _GNU_SOURCE  // the names of registers
#include <cpuid.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { kSetCpuid = 0x1012, kTiles = 0x1d, kProducts = 0x1e };

static struct sigaction before;

static void answer(int number, siginfo_t* info, void* context) {
  greg_t* const registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  const uint8_t* const at = (const uint8_t*)registers[REG_RIP];
  if (info->si_code != SI_KERNEL || at[0] != 0x0f || at[1] != 0xa2) {  // not by CPUID: whoever was to handle it
    sigaction(number, &before, NULL);
    return;
  }
  const unsigned page = (unsigned)registers[REG_RAX], part = (unsigned)registers[REG_RCX];
  unsigned a, b, c, d;
  syscall(SYS_arch_prctl, kSetCpuid, 1);
  __cpuid_count(page, part, a, b, c, d);
  syscall(SYS_arch_prctl, kSetCpuid, 0);
  if (page == 0 && a < kProducts) a = kProducts;
  if (page == kTiles && part == 0) a = 1;                                                 // palettes
  if (page == kTiles && part == 1) a = 8192 | 1024 << 16, b = 64 | 8 << 16, c = 16, d = 0;  // 8 of 16 rows of 64 bytes
  if (page == kProducts && part == 0) b = 16 | 64 << 8;
  registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
  registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void begin(void) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = answer;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &before);
  syscall(SYS_arch_prctl, kSetCpuid, 0);
}
