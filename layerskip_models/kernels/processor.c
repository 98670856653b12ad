/* Which variants of kernels.c this processor can run. The operating system must save the registers, too;
 * __builtin_cpu_supports checks both. */
#define PUBLIC __attribute__((visibility("default")))

PUBLIC int runs_baseline(void) { return 1; }

#if defined(__x86_64__)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
PUBLIC int runs_avx2(void) {
  unsigned a, b, c = 0, d;
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
PUBLIC int runs_avx512(void) {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
PUBLIC int runs_vnni(void) { return runs_avx512() && __builtin_cpu_supports("avx512vnni"); }
#ifdef __linux__
/* Linux (since 5.16) saves tiles only for a process that has asked for them; its threads inherit the permission. */
#define REQUEST_STATE 0x1023 /* ARCH_REQ_XCOMP_PERM of arch_prctl */
#define TILE_DATA 18
PUBLIC int runs_amx(void) {
  unsigned a, b, c, d = 0, low, high;
  if (!runs_vnni() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  if (!(d >> 22 & 1) || !(d >> 24 & 1) || !(d >> 25 & 1)) return 0; /* amx-bf16, amx-tile, amx-int8 */
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low >> 17 & 3) == 3 && syscall(SYS_arch_prctl, REQUEST_STATE, TILE_DATA) == 0;
}
#else
PUBLIC int runs_amx(void) { return 0; }
#endif
#elif defined(__aarch64__)
PUBLIC int runs_neon(void) { return 1; } /* every aarch64 processor has NEON */
#endif
