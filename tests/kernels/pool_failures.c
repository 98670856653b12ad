/* The team of threads where something goes wrong: late helpers, a job without memory, an end while helpers fall asleep, a fork
 * beside jobs.
 *
 * pool.c is compiled with this so that helpers sleep at once (SPIN_QUIET, SPIN_BUSY) and `posix_memalign` is `scarce`. The first
 * argument says what is tried. Ends with status 1 if it went wrong, and by SIGALRM if it hangs.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "pool.h"

static _Atomic int refuse;   /* the calling thread gets no more than a little */
static _Atomic int returned; /* the job that is looked at has ended for its caller, who may free what it wrote to */
static _Atomic int late;     /* results were written behind that */
static __thread int is_owner;

int scarce(void **memory, size_t alignment, size_t size) {
  if (is_owner && refuse && size > 3 << 16) return 12;
  *memory = aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  return *memory ? 0 : 12;
}

static void pause_for(long microseconds) { nanosleep(&(struct timespec){.tv_nsec = microseconds * 1000}, NULL); }

/* Some phases, each with more memory than the one before. */
static void work(const void *arguments, Worker *worker) {
  const long slow = *(const long *)arguments;
  for (int i = 1; i < 8 && !pool_left(worker); i++) {
    char *room = pool_memory(worker, i << 16);
    Phase phase = pool_phase(worker, 4);
    for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
      room[0] = 1;
      if (slow) pause_for(slow);
      if (!pool_claim(&phase, piece)) continue;
      if (returned) late = 1;
      pool_done(&phase, piece);
    }
  }
}

static int64_t run(long slow) { return pool_run(work, &slow, sizeof slow, 3, 1 << 20); }

/* Each phase adds up what the one before it found. */
typedef struct {
  int64_t phases, pieces, *numbers; /* [phases, pieces] */
} Sums;

static void add_up(const void *arguments, Worker *worker) {
  const Sums *a = arguments;
  for (int64_t i = 1; i < a->phases && !pool_left(worker); i++) {
    Phase phase = pool_phase(worker, a->pieces);
    for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
      int64_t sum = piece;
      for (int64_t k = 0; k < a->pieces; k++) sum += a->numbers[(i - 1) * a->pieces + k];
      if (!pool_claim(&phase, piece)) continue;
      a->numbers[i * a->pieces + piece] += sum; /* twice would be seen */
      pool_done(&phase, piece);
    }
  }
}

/* Short jobs of every shape: helpers come to many of them late, when the next has begun. */
static int late_helpers(void) {
  static int64_t numbers[2][8 * 12]; /* the job before may still be read */
  for (int64_t job = 0; job < 500; job++) {
    Sums sums = {2 + job % 7, 1 + job * 5 % 12, numbers[job % 2]};
    memset(sums.numbers, 0, sizeof *numbers);
    for (int64_t k = 0; k < sums.pieces; k++) sums.numbers[k] = k;
    if (pool_run(add_up, &sums, sizeof sums, 2 + job % 3, 1 << 20) < 0) return 1;
    int64_t total = sums.pieces * (sums.pieces - 1) / 2;
    for (int64_t i = 1; i < sums.phases; i++) {
      for (int64_t k = 0; k < sums.pieces; k++)
        if (sums.numbers[i * sums.pieces + k] != k + total) return 1;
      total = sums.pieces * total + sums.pieces * (sums.pieces - 1) / 2;
    }
  }
  return 0;
}

/* The caller's thread gets no memory, while helpers are in the middle of the job. */
static int without_memory(void) {
  is_owner = 1;
  for (int turn = 0; turn < 100; turn++) {
    returned = refuse = 0;
    if (run(0) < 0) return 1;
    pause_for(200);
    refuse = 1;
    pool_exact_rooms(1);
    int64_t job = run(300);
    returned = 1;
    pool_exact_rooms(0);
    if (job != -1 || pool_oldest() != INT64_MAX) return 1;
    pause_for(1000);
    if (late) return 1;
    returned = refuse = 0;
    if (run(0) < 0) return 1; /* the next one has memory */
  }
  return 0;
}

/* In a child each, since a team that was stopped stays so. */
static int in_children(int count, void (*child)(int)) {
  for (int turn = 0; turn < count; turn++) {
    pid_t id = fork();
    if (id == 0) {
      alarm(5);
      child(turn);
      _exit(0);
    }
    int status;
    if (id < 0 || waitpid(id, &status, 0) != id || status) return 1;
  }
  return 0;
}

static void stop(int turn) {
  run(0);
  struct timespec start, now;
  clock_gettime(CLOCK_MONOTONIC, &start);
  do clock_gettime(CLOCK_MONOTONIC, &now);
  while ((now.tv_sec - start.tv_sec) * 1000000000 + now.tv_nsec - start.tv_nsec < turn % 16 * 500);
  pool_stop();
}

static void run_some(int turn) {
  (void)turn;
  for (int i = 0; i < 5; i++) run(0);
}

static _Atomic int over;
static void *jobs(void *unused) {
  (void)unused;
  while (!over) run(0);
  return NULL;
}

static int fork_beside_jobs(void) {
  pthread_t other;
  pthread_create(&other, NULL, jobs, NULL);
  int wrong = in_children(200, run_some);
  over = 1;
  pthread_join(other, NULL);
  return wrong;
}

int main(int count, char **arguments) {
  alarm(60);
  if (count == 2 && !strcmp(arguments[1], "late")) return late_helpers();
  if (count == 2 && !strcmp(arguments[1], "memory")) return without_memory();
  if (count == 2 && !strcmp(arguments[1], "stop")) return in_children(400, stop);
  if (count == 2 && !strcmp(arguments[1], "fork")) return fork_beside_jobs();
  return 2;
}
