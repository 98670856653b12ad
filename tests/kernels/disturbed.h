/* Included before pool.c: now and then a thread loses some microseconds before it reads what other threads write, so that what
 * seldom comes between two reads comes often. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

static inline void disturb(void) {
  static __thread uint32_t state;
  struct timespec start, now;
  if (!state) state = (uint32_t)(uintptr_t)&state | 1;
  state = state * 1664525u + 1013904223u;
  if (state >> 30) return;
  clock_gettime(CLOCK_MONOTONIC, &start);
  do clock_gettime(CLOCK_MONOTONIC, &now);
  while ((now.tv_sec - start.tv_sec) * 1000000000 + now.tv_nsec - start.tv_nsec < (long)(state >> 16 & 0xfff) * 4);
}
#undef atomic_load_explicit
#define atomic_load_explicit(from, order) \
  __extension__({ \
    disturb(); \
    __auto_type place = (from); \
    __typeof__((void)0, *place) value_there; \
    __atomic_load(place, &value_there, (order)); \
    value_there; \
  })
