/* Another processor, as the programs of a test see it: preloaded, it answers the instruction CPUID in their place.

   Libraries for arithmetic ask CPUID which vendor made the processor and what it can do, and choose kernels by that.
   Environment variables lower what a library uses, but no variable changes the vendor, and some libraries read none.
   Linux can make CPUID trap (arch_prctl, ARCH_SET_CPUID); the handler executes it, leaves out what the processor of the
   test lacks, and goes on behind it. FUSION_TEST_PROCESSOR is "VENDOR-LEVEL": intel or amd; sse, avx2 or avx512. Exits
   with 97 where the kernel or the processor can't trap. Built by `harness.levels`. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012

static int active, amd, avx2, avx512;
static struct sigaction theirs;
static int (*real_sigaction)(int, const struct sigaction *, struct sigaction *);

static long set_cpuid(int allowed) {
  long result;
  __asm__ volatile("syscall" : "=a"(result) : "a"((long)SYS_arch_prctl), "D"((long)ARCH_SET_CPUID), "S"((long)allowed) : "rcx", "r11", "memory");
  return result;
}

static void ask(uint32_t leaf, uint32_t sub, uint32_t r[4]) {
  set_cpuid(1);
  __asm__ volatile("cpuid" : "=a"(r[0]), "=b"(r[1]), "=c"(r[2]), "=d"(r[3]) : "a"(leaf), "c"(sub));
  set_cpuid(0);
  if (amd && (leaf == 0 || leaf == 0x80000000u)) { memcpy(&r[1], "Auth", 4); memcpy(&r[3], "enti", 4); memcpy(&r[2], "cAMD", 4); }
  if (amd && leaf == 0) r[0] = 0x10;
  if (amd && leaf == 0x80000000u) r[0] = 0x80000023u;
  if (leaf == 1) {
    if (amd) r[0] = avx512 ? 0x00B00F21 : 0x00A00F11;
    if (!avx2) r[2] &= ~((1u << 12) | (1u << 28) | (1u << 29));
  }
  if (leaf == 7) {
    if (!avx512) {
      if (sub == 0) {
        r[1] &= ~((1u << 16) | (1u << 17) | (1u << 21) | (1u << 26) | (1u << 27) | (1u << 28) | (1u << 30) | (1u << 31));
        r[2] &= ~((1u << 1) | (1u << 6) | (1u << 11) | (1u << 12) | (1u << 14));
        r[3] &= ~((1u << 2) | (1u << 3) | (1u << 8) | (1u << 22) | (1u << 23) | (1u << 24) | (1u << 25));
      }
      if (sub == 1) r[0] &= ~((1u << 4) | (1u << 5) | (1u << 23));
    }
    if (!avx2 && sub == 0) { r[1] &= ~((1u << 3) | (1u << 5) | (1u << 8)); r[2] &= ~((1u << 9) | (1u << 10)); }
  }
  if (leaf == 0x19 || leaf == 0x1e || leaf == 0x24) r[0] = r[1] = r[2] = r[3] = 0;
  if (amd && leaf == 4) r[0] = r[1] = r[2] = r[3] = 0;
  if (amd && leaf == 0x80000001u) r[2] |= 1u << 22;
  if (amd && leaf >= 0x80000002u && leaf <= 0x80000004u) {
    char name[48] = "AMD EPYC 7B13 64-Core Processor (emulated)";
    memcpy(r, name + 16 * (leaf - 0x80000002u), 16);
  }
  if (amd && leaf == 0x80000005u) { r[0] = r[1] = 0; r[2] = 0x20080140u; r[3] = 0x20080140u; }
  if (amd && leaf == 0x80000006u) { r[0] = r[1] = 0; r[2] = 0x02006140u; r[3] = 0x01009140u; }
  if (amd && leaf == 0x8000001du) {
    static const uint32_t kinds[4][3] = {{0x121, 7u << 22 | 63, 63}, {0x122, 7u << 22 | 63, 63}, {0x143, 7u << 22 | 63, 1023}, {0x163, 15u << 22 | 63, 32767}};
    r[0] = r[1] = r[2] = r[3] = 0;
    if (sub < 4) { r[0] = kinds[sub][0]; r[1] = kinds[sub][1]; r[2] = kinds[sub][2]; }
  }
}

static void trapped(int number, siginfo_t *info, void *context) {
  greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
  const uint8_t *at = (const uint8_t *)regs[REG_RIP];
  if (info->si_code == SI_KERNEL && at[0] == 0x0f && at[1] == 0xa2) {
    uint32_t r[4];
    ask((uint32_t)regs[REG_RAX], (uint32_t)regs[REG_RCX], r);
    regs[REG_RAX] = r[0]; regs[REG_RBX] = r[1]; regs[REG_RCX] = r[2]; regs[REG_RDX] = r[3];
    regs[REG_RIP] += 2;
    return;
  }
  if (theirs.sa_flags & SA_SIGINFO && theirs.sa_sigaction) { theirs.sa_sigaction(number, info, context); return; }
  if (theirs.sa_handler && theirs.sa_handler != SIG_DFL && theirs.sa_handler != SIG_IGN) { theirs.sa_handler(number); return; }
  struct sigaction plain = {0};
  plain.sa_handler = SIG_DFL;
  real_sigaction(number, &plain, 0);
}

int sigaction(int number, const struct sigaction *given, struct sigaction *old) {
  if (!real_sigaction) real_sigaction = dlsym(RTLD_NEXT, "sigaction");
  if (number != SIGSEGV || !active) return real_sigaction(number, given, old);
  if (old) *old = theirs;
  if (given) theirs = *given;
  return 0;
}

__attribute__((constructor)) static void begin(void) {
  const char *kind = getenv("FUSION_TEST_PROCESSOR");
  if (!kind) return;
  struct sigaction ours = {0};
  real_sigaction = dlsym(RTLD_NEXT, "sigaction");
  amd = strstr(kind, "amd") != 0;
  avx512 = strstr(kind, "avx512") != 0;
  avx2 = avx512 || strstr(kind, "avx2") != 0;
  ours.sa_sigaction = trapped;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK | SA_RESTART;
  real_sigaction(SIGSEGV, &ours, &theirs);
  active = 1;
  if (set_cpuid(0)) _exit(97);
}
