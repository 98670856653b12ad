/* What the parts of a job on the team of threads cost. Prints lines of NAME THREADS NANOSECONDS, several of each.
 *
 * Compiled with pool.c. The arguments are the numbers of two processors, which the measurements of two threads use, and the
 * largest number of threads for phases.
 */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "pool.h"

#define REPEATS 5
#define LINE __attribute__((aligned(128)))

static int processors[2];
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}
static void use(int which) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(processors[which], &set);
  sched_setaffinity(0, sizeof set, &set);
}
static void use_any(void) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int i = 0; i < 2; i++) CPU_SET(processors[i], &set);
  sched_setaffinity(0, sizeof set, &set);
}
static void told(const char *name, int threads, double nanoseconds) { printf("%s %d %.1f\n", name, threads, nanoseconds); }

/* ---- Lines of memory ------------------------------------------------------------------------------------------------- */

#define INCREMENTS 1000000
static _Atomic uint64_t counter LINE;
static _Atomic uint32_t turn LINE;
static _Atomic int ready LINE;

static void increment_all(void) {
  for (int i = 0; i < INCREMENTS; i++) atomic_fetch_add(&counter, 1);
}
static void *incrementing(void *unused) {
  (void)unused;
  use(1);
  ready = 1;
  while (ready != 2) {}
  increment_all();
  return NULL;
}
static void increments(int threads) {
  pthread_t other;
  ready = 0;
  if (threads == 2) {
    pthread_create(&other, NULL, incrementing, NULL);
    while (!ready) {}
  }
  ready = 2;
  double start = now();
  increment_all();
  double taken = now() - start;
  if (threads == 2) pthread_join(other, NULL);
  told("increment", threads, taken / INCREMENTS);
}

#define TRIPS 200000
static void *answering(void *unused) {
  (void)unused;
  use(1);
  for (uint32_t i = 0; i < TRIPS; i++) {
    while (atomic_load_explicit(&turn, memory_order_acquire) != 2 * i + 1) {}
    atomic_store_explicit(&turn, 2 * i + 2, memory_order_release);
  }
  return NULL;
}
/* From a store until another core has read it. */
static void transfers(void) {
  pthread_t other;
  turn = 0;
  pthread_create(&other, NULL, answering, NULL);
  double start = 0;
  for (uint32_t i = 0; i < TRIPS; i++) {
    if (i == TRIPS / 10) start = now();
    atomic_store_explicit(&turn, 2 * i + 1, memory_order_release);
    while (atomic_load_explicit(&turn, memory_order_acquire) != 2 * i + 2) {}
  }
  told("transfer", 2, (now() - start) / (TRIPS - TRIPS / 10) / 2);
  pthread_join(other, NULL);
}

/* ---- Waking ---------------------------------------------------------------------------------------------------------- */

#define WAKES 300
static _Atomic uint32_t asleep LINE;
static _Atomic double woken LINE;
static void *sleeping(void *unused) {
  (void)unused;
  use(1);
  for (int i = 0; i < WAKES; i++) {
    atomic_store(&asleep, 1);
    while (atomic_load(&asleep)) syscall(SYS_futex, &asleep, FUTEX_WAIT_PRIVATE, 1, NULL, NULL, 0);
    atomic_store(&woken, now());
  }
  return NULL;
}
/* What waking a thread that sleeps takes the caller, and when that thread runs. */
static void wakes(void) {
  pthread_t other;
  double call = 0, until = 0;
  asleep = 0;
  pthread_create(&other, NULL, sleeping, NULL);
  for (int i = 0; i < WAKES; i++) {
    while (!atomic_load(&asleep)) {}
    for (double start = now(); now() - start < 100000;) {} /* it sleeps soundly */
    atomic_store(&woken, 0);
    double start = now();
    atomic_store(&asleep, 0);
    syscall(SYS_futex, &asleep, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    call += now() - start;
    double then;
    while ((then = atomic_load(&woken)) == 0) {}
    until += then - start;
  }
  pthread_join(other, NULL);
  told("wake_call", 2, call / WAKES);
  told("wake", 2, until / WAKES);
}

/* ---- The team ---------------------------------------------------------------------------------------------------------- */

typedef struct {
  int64_t phases;
} Empty;

static void empty(const void *arguments, Member *member) {
  const Empty *a = arguments;
  for (int64_t i = 0; i < a->phases && !pool_left(member); i++) {
    Phase phase = pool_phase(member, pool_team(member));
    for (int64_t piece; (piece = pool_next(&phase)) >= 0;)
      if (pool_win(&phase, piece)) pool_done(&phase, piece);
  }
}

static double jobs(int threads, int64_t phases, int count) {
  Empty a = {phases};
  for (int i = 0; i < 20; i++) pool_run(empty, &a, sizeof a, threads, 1 << 20);
  double start = now();
  for (int i = 0; i < count; i++) pool_run(empty, &a, sizeof a, threads, 1 << 20);
  return (now() - start) / count;
}

int main(int count, char **arguments) {
  if (count != 4) return 2;
  processors[0] = atoi(arguments[1]);
  processors[1] = atoi(arguments[2]);
  use(0);
  for (int i = 0; i < REPEATS; i++) {
    increments(1);
    increments(2);
    transfers();
    wakes();
  }
  use_any();
  for (int threads = 1; threads <= atoi(arguments[3]); threads *= 2)
    for (int i = 0; i < REPEATS; i++) {
      double start = jobs(threads, 0, 2000), phases = jobs(threads, 1000, 20);
      told("job", threads, start);
      told("phase", threads, (phases - start) / 1000);
    }
  pool_stop();
  return 0;
}
