/* Which variants of kernels.c this processor can run, and the operating system with it: it must save their registers.
 *
 * Asked of the processor itself, not of `__builtin_cpu_supports`, which needs a runtime library that not every compiler brings.
 * This file is compiled for the oldest processor, so it runs anywhere. */
#define PUBLIC __attribute__((visibility("default")))

PUBLIC int runs_baseline(void) { return 1; }

#if defined(__x86_64__)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Intel's manual, volume 2, CPUID: the registers of leaf 1, and of subleaf 0 or 1 of leaf 7. */
static const unsigned FMA = 1u << 12, OSXSAVE = 1u << 27, AVX = 1u << 28, F16C = 1u << 29; /* 1, ecx */
static const unsigned AVX2 = 1u << 5, AVX512F = 1u << 16, AVX512DQ = 1u << 17, AVX512BW = 1u << 30, AVX512VL = 1u << 31; /* 7, ebx */
static const unsigned AVX512VNNI = 1u << 11; /* 7, ecx */
static const unsigned AVX_VNNI = 1u << 4; /* 7.1, eax */
static const unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24, AMX_INT8 = 1u << 25; /* 7, edx */
/* Registers that the operating system saves: bits of XCR0. */
static const unsigned SAVES_AVX = 0x6, SAVES_AVX512 = 0xe6, SAVES_TILES = 0x60000;

typedef struct {
  unsigned a, b, c, d;
} Leaf;

/* Zeros where the processor has no such leaf. */
static Leaf subleaf(unsigned number, unsigned sub) {
  Leaf l;
  return __get_cpuid_count(number, sub, &l.a, &l.b, &l.c, &l.d) ? l : (Leaf){0, 0, 0, 0};
}
static Leaf leaf(unsigned number) { return subleaf(number, 0); }

static int has(unsigned word, unsigned bits) { return (word & bits) == bits; }

static int saves(unsigned registers) {
  unsigned low, high;
  if (!has(leaf(1).c, OSXSAVE)) return 0; /* then xgetbv is no instruction */
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return has(low, registers);
}

PUBLIC int runs_avx2(void) { return has(leaf(1).c, AVX | FMA | F16C) && has(leaf(7).b, AVX2) && saves(SAVES_AVX); }
PUBLIC int runs_avxvnni(void) { return runs_avx2() && has(subleaf(7, 1).a, AVX_VNNI); }
PUBLIC int runs_avx512(void) {
  return runs_avx2() && has(leaf(7).b, AVX512F | AVX512BW | AVX512DQ | AVX512VL) && saves(SAVES_AVX512);
}
PUBLIC int runs_vnni(void) { return runs_avx512() && has(leaf(7).c, AVX512VNNI); }
#ifdef __linux__
/* Linux (since 5.16) saves tiles only for a process that has asked for them; its threads inherit the permission. */
#define REQUEST_STATE 0x1023 /* ARCH_REQ_XCOMP_PERM of arch_prctl */
#define TILE_DATA 18
PUBLIC int runs_amx(void) {
  return runs_vnni() && has(leaf(7).d, AMX_BF16 | AMX_TILE | AMX_INT8) && saves(SAVES_TILES) &&
         syscall(SYS_arch_prctl, REQUEST_STATE, TILE_DATA) == 0;
}
#else
PUBLIC int runs_amx(void) { return 0; }
#endif
#elif defined(__aarch64__)
#ifdef __linux__
#include <sys/auxv.h>
#define DOT_PRODUCTS (1ul << 20) /* HWCAP_ASIMDDP of Linux's asm/hwcap.h */
PUBLIC int runs_dotprod(void) { return (getauxval(AT_HWCAP) & DOT_PRODUCTS) != 0; }
#elif defined(__APPLE__)
PUBLIC int runs_dotprod(void) { return 1; } /* every processor of a Mac has them, from the first on */
#endif
PUBLIC int runs_neon(void) { return 1; } /* every aarch64 processor has NEON */
#endif
