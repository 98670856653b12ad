/* Which of the variants of kernels.c this processor can run. The operating system must save the registers, too: the compiler's
 * own test asks for both. */
#define PUBLIC __attribute__((visibility("default")))

PUBLIC int runs_baseline(void) { return 1; }

#if defined(__x86_64__)
#include <cpuid.h>
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
#elif defined(__aarch64__)
PUBLIC int runs_neon(void) { return 1; } /* every such processor has it */
#endif
