/* See pool.h. A thread spins only briefly. After that it sleeps (between jobs) or does the missing work itself (within a job).
 *
 * Why this is correct. Every piece of a phase has a word that only grows: 4 * phase + TAKEN, WRITING or DONE. Only the worker
 * whose compare-and-swap set WRITING writes the results. A phase ends when all its words are DONE.
 *
 * - A worker that leaves a phase has read DONE or a later value from every word, with acquire. DONE is stored with release after
 *   the results. A later value comes from a compare-and-swap (which continues the release sequence) by a worker that has itself
 *   left the phase. So the results of all earlier phases happen before anything that a worker does in this one.
 * - A compare-and-swap to WRITING succeeds only while the word is lower, so while the phase has not ended and nobody has begun
 *   the next. The winner's inputs can therefore not have been overwritten: a phase does not write what it reads.
 * - A worker that was left behind loses every compare-and-swap, since words never decrease. It has only read memory, possibly
 *   garbage, and its result is dropped. Formally that is a data race; on the machines this runs on, reading mapped memory has no
 *   effect other than its value.
 * - A job ends for its owner when its last phase does. Other workers may still be inside. `epoch` tells them that the job is over,
 *   and `inside` tells the owner that they are there. Both are sequentially consistent, so either the worker sees the epoch closed
 *   or the owner sees the worker inside.
 * - The description of a job (`pool.job` and so on) is written while no epoch is open, and read like a seqlock. Opening one
 *   is a release, so a worker that has seen it open sees that job's description or a later one. A late worker may read words of
 *   a later job. The release fence before those writes and the acquire fence after the reads then guarantee that it sees that the
 *   epoch was closed in between, and it does not take part. So the description must not change while the epoch is open, nor after
 *   it closes without that fence. That is why the last phase of a job is kept in `pool.reached`, which only owners read.
 */
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#define PUBLIC __attribute__((visibility("default")))

#define LINE 64
#define ALIGNED __attribute__((aligned(LINE)))
enum { TAKEN = 1, WRITING = 2, DONE = 3 };
#define ASIDE -1

#ifndef SPIN_QUIET
#define SPIN_QUIET 2000 /* microseconds that a helper spins for the next job; the Python code of a round takes a tenth of this */
#endif
#ifndef SPIN_BUSY
#define SPIN_BUSY 50    /* the same while other processes want the cores */
#endif
/* Microseconds between two reads of the clock from which on the core counts as lost. More than the gaps of a host that takes a
 * virtual processor away for a moment: such a machine is not busy, and a sleeping helper is slow to wake there. A busy process
 * keeps a core for longer. */
#ifndef GAP
#define GAP 1500
#endif
#ifndef CROWDED
#define CROWDED 200000   /* microseconds for which a lost core is remembered */
#endif
#ifndef PATIENCE
#define PATIENCE 3       /* microseconds to wait for a late piece, at least */
#endif
#ifndef IDLE_PATIENCE
#define IDLE_PATIENCE 30 /* the same for a helper that has no piece of its own, because the phase is small: somebody is at it */
#endif
#ifndef NAP
#define NAP 1000         /* microseconds that a helper sleeps when it cannot leave the owner's core */
#endif
#ifndef NAPS
#define NAPS 20          /* naps, after which it sleeps until it is woken */
#endif
#ifndef STEP_ASIDE
#define STEP_ASIDE 1     /* whether helpers that have no core to themselves leave the team */
#endif
#define SETTLED 1000     /* microseconds after which a helper looks again who else is on its core */
#ifndef SHORT_SLICE
#define SHORT_SLICE 100  /* microseconds: time slice that helpers ask for */
#endif
#ifndef WORTH_WAKING
#define WORTH_WAKING (256 << 10) /* bytes: smallest job that wakes sleeping helpers */
#endif
#ifndef WAKES
#define WAKES 4          /* helpers that a worker wakes. Waking takes the caller microseconds each, so that 63 would take it 0.1 ms */
#endif
#define LOOKS 8          /* a waiting worker looks at all others in every LOOKS-th turn, in the rest at the first that is not done */

typedef struct {
  _Atomic uint64_t seen; /* the last phase that the worker has reached */
  _Atomic uint64_t words[POOL_PIECES];
} ALIGNED Slot;

struct Worker {
  Slot *slots; /* of the whole team; NULL if the worker works alone */
  int index, team;
  uint32_t epoch;
  int starved; /* a request for memory has failed in this job */
  uint64_t phase;
  void *memory;
  size_t held;  /* bytes of memory */
  size_t guard; /* offset of the guard after the memory; 0 if there is none */
  void *common; /* the team's memory in this job */
  size_t common_held;
  _Atomic int64_t inside; /* the job's number, or a lower number; 0 outside any job */
  char arguments[POOL_ARGUMENTS] ALIGNED;
} ALIGNED;

static struct {
  _Atomic uint32_t epoch ALIGNED; /* one more when a job opens and when it closes: odd while one is open */
  _Atomic int core; /* core on which the owner last opened a job; -1 if unknown */
  /* The open job, written while the epoch is closed. Atomic, since late workers may read these while they are written. */
  _Atomic(Work) work ALIGNED;
  _Atomic size_t size;
  _Atomic int team;
  _Atomic int waking; /* whether the job is worth waking sleeping helpers */
  _Atomic int64_t job;
  _Atomic uint64_t phase; /* the last phase of all earlier jobs */
  _Atomic(void *) common;
  _Atomic size_t common_held;
  _Atomic uint64_t arguments[POOL_ARGUMENTS / 8];
  _Atomic int busy ALIGNED; /* some caller owns the team */
  uint64_t reached;         /* the last phase of the previous job; used by the owner only */
  Worker *holder; /* not a thread: its memory is the team's. Only the owner changes this and what follows */
  size_t wanted;  /* most bytes of common memory that a job has asked for */
  _Atomic int stopping;
  int helpers; /* threads started; changed by the owner only */
  _Atomic uint32_t asleep[POOL_WORKERS] ALIGNED; /* 1 while a helper sleeps, or is about to */
  _Atomic int cores[POOL_WORKERS] ALIGNED; /* where a helper works: core + 1, 0 while it sleeps, or ASIDE */
  pthread_t threads[POOL_WORKERS];
  Worker *_Atomic workers[POOL_WORKERS]; /* from index 1 on; entries are never removed */
  Slot slots[POOL_WORKERS];
} pool;

/* ---- Clock ---------------------------------------------------------------------------------------------------------- */

static __attribute__((unused)) uint64_t microseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

#if defined(__x86_64__)
static _Atomic uint64_t per_microsecond = 0;
static uint64_t ticks(void) { return __builtin_ia32_rdtsc(); }
static void relax(void) { _mm_pause(); }
/* Measure the ticks per microsecond, once. Only waiting times depend on it. */
static void measure_ticks(void) {
  if (per_microsecond) return;
  uint64_t start = microseconds(), first = ticks(), now;
  while ((now = microseconds()) - start < 200) relax();
  per_microsecond = (ticks() - first) / (now - start) + 1;
}
static uint64_t ticks_of(uint64_t us) { return us * atomic_load_explicit(&per_microsecond, memory_order_relaxed); }
#else
static uint64_t ticks(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}
static void measure_ticks(void) {}
static uint64_t ticks_of(uint64_t us) { return us * 1000; }
static void relax(void) {
#if defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}
#endif

/* ---- Sleeping ------------------------------------------------------------------------------------------------------- */

/* A helper says that it sleeps, and then looks at the epoch again. Who opens an epoch looks afterwards who sleeps. Both are
 * sequentially consistent, so either the helper sees the job or it is woken. */
#ifdef __linux__
static void fall_asleep(_Atomic uint32_t *asleep) { syscall(SYS_futex, asleep, FUTEX_WAIT_PRIVATE, 1, NULL, NULL, 0); }
static void wake(_Atomic uint32_t *asleep) {
  if (atomic_exchange(asleep, 0)) syscall(SYS_futex, asleep, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}
static void reset_sleep_lock(void) {}
#else
static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t sleep_signal = PTHREAD_COND_INITIALIZER;
/* In a forked child: the parent's threads may have left these locked. */
static void reset_sleep_lock(void) {
  sleep_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
  sleep_signal = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
}
static void fall_asleep(_Atomic uint32_t *asleep) {
  pthread_mutex_lock(&sleep_lock);
  while (atomic_load(asleep)) pthread_cond_wait(&sleep_signal, &sleep_lock);
  pthread_mutex_unlock(&sleep_lock);
}
static void wake(_Atomic uint32_t *asleep) {
  pthread_mutex_lock(&sleep_lock);
  if (atomic_exchange(asleep, 0)) pthread_cond_broadcast(&sleep_signal);
  pthread_mutex_unlock(&sleep_lock);
}
#endif

static void sleep_at(int index, uint32_t epoch) {
  _Atomic uint32_t *asleep = pool.asleep + index;
  atomic_store(asleep, 1);
  if (atomic_load(&pool.epoch) == epoch && !atomic_load(&pool.stopping)) fall_asleep(asleep);
  atomic_store(asleep, 0);
}

/* Wake the helpers of the team that this worker is to wake. They wake others, in turn: WAKES, then its square, and so on. */
static void wake_some(int index, int team) {
  for (int64_t i = (int64_t)WAKES * index + 1; i <= (int64_t)WAKES * (index + 1) && i < team; i++)
    if (atomic_load(pool.asleep + i)) wake(pool.asleep + i);
}

/* ---- Phases --------------------------------------------------------------------------------------------------------- */

int pool_alone(const Worker *m) { return m->slots == NULL; }
int pool_team(const Worker *m) { return m->team; }
int pool_left(const Worker *m) {
  return m->starved || (m->slots && atomic_load_explicit(&pool.epoch, memory_order_relaxed) != m->epoch);
}

/* ---- Memory of workers ---------------------------------------------------------------------------------------------- */

#ifdef __SANITIZE_ADDRESS__
#define GUARD 0 /* AddressSanitizer guards the end already */
#else
#define GUARD 4096 /* bytes */
#endif
#define GUARD_BYTE 0x5a
#ifndef EXACT_ROOMS
#define EXACT_ROOMS 0
#endif
static _Atomic int exact = EXACT_ROOMS;
static _Atomic int64_t overruns;

PUBLIC int pool_exact_rooms(int on) { return atomic_exchange(&exact, on); }
PUBLIC int64_t pool_overruns(void) { return atomic_load(&overruns); }

static void check_guard(const Worker *m) {
  if (!m->guard) return;
  const unsigned char *guard = (const unsigned char *)m->memory + m->guard;
  for (int i = 0; i < GUARD; i++)
    if (guard[i] != GUARD_BYTE) {
      atomic_fetch_add(&overruns, 1);
      return;
    }
}

void *pool_memory(Worker *m, size_t bytes) {
  int exactly = atomic_load_explicit(&exact, memory_order_relaxed);
  if (m->held >= bytes && !exactly && !m->guard) return m->memory;
  check_guard(m);
  free(m->memory);
  m->guard = exactly && GUARD > 0 ? bytes : 0;
  m->held = exactly ? bytes : bytes + bytes / 2;
  if (posix_memalign(&m->memory, LINE, m->held + (m->guard ? GUARD : 0))) {
    m->memory = NULL;
    m->held = m->guard = 0;
    m->starved = 1;
    return NULL;
  }
  if (m->guard) memset((char *)m->memory + m->guard, GUARD_BYTE, GUARD);
  return m->memory;
}

void *pool_common(Worker *m, size_t bytes) {
  if (!m->slots) return NULL;
  if (m->index == 0 && bytes > pool.wanted) pool.wanted = bytes;
  return bytes <= m->common_held ? m->common : NULL;
}

/* ---- Pieces --------------------------------------------------------------------------------------------------------- */

/* A worker's first piece. With fewer pieces than workers the first workers have one each; the caller is the first of all, and it
 * is surely there. */
static int64_t first_of(const Phase *p, int64_t worker) {
  return p->pieces * (worker < p->workers ? worker : p->workers) / p->workers;
}

Phase pool_phase(Worker *m, int64_t pieces) {
  m->phase++;
  Phase p = {.worker = m, .pieces = pieces, .done = 4 * m->phase + DONE, .end = pieces};
  if (m->slots) {
    p.workers = pieces < m->team ? pieces : m->team;
    p.own = p.at = first_of(&p, m->index);
    p.end = first_of(&p, m->index + 1);
    p.began = ticks();
    atomic_store_explicit(&m->slots[m->index].seen, m->phase, memory_order_relaxed);
  }
  return p;
}

static _Atomic uint64_t *word_of(const Phase *p, int64_t worker, int64_t piece) {
  return &p->worker->slots[worker].words[piece - first_of(p, worker)];
}

/* An unfinished piece of another worker, or -1 when all are done. Pieces of workers that have not reached this phase are returned
 * at once; pieces that somebody is working on only after a wait. A helper without pieces of its own waits in both cases: else all
 * such helpers would race for the few pieces.
 *
 * Workers are looked at in turn, from the next one on. Those whose pieces are done stay so, and are not looked at again. */
static int64_t take_over(Phase *p) {
  const Worker *m = p->worker;
  const int idle = p->end == p->own && m->index > 0;
  uint64_t now = ticks();
  if (!p->waiting) { /* expect others' pieces to take as long as its own did */
    uint64_t piece = p->end > p->own ? (now - p->began) / (p->end - p->own) : 0, least = ticks_of(idle ? IDLE_PATIENCE : PATIENCE);
    p->waiting = now;
    p->patience = piece > least ? piece : least;
  }
  for (int turn = 0;; turn++, now = ticks()) {
    int patient = now - p->waiting < p->patience;
    int64_t late = -1, last = patient && turn % LOOKS ? p->looked + 1 : p->workers;
    for (int64_t i = p->looked; i < last; i++) {
      int64_t worker = (m->index + 1 + i) % p->workers, unfinished = 0;
      Slot *slot = m->slots + worker;
      int64_t first = first_of(p, worker);
      for (int64_t piece = first_of(p, worker + 1) - 1; piece >= first; piece--) {
        _Atomic uint64_t *word = slot->words + (piece - first);
        uint64_t value = atomic_load_explicit(word, memory_order_acquire);
        if (value >= p->done) continue;
        unfinished = 1;
        if (value == p->done - DONE + WRITING) continue;
        int free = value < p->done - DONE + TAKEN;
        int absent = !idle && atomic_load_explicit(&slot->seen, memory_order_relaxed) < m->phase;
        if (free && (!patient || absent)) {
          if (atomic_compare_exchange_strong(word, &value, p->done - DONE + TAKEN)) return piece;
        } else if (late < 0) {
          late = piece;
        }
      }
      if (unfinished || i != p->looked) continue;
      if (++p->looked == p->workers) return -1;
      if (last == p->looked) last++;
    }
    if (!patient && late >= 0) {
      p->waiting = now; /* wait again after this piece */
      return late;
    }
    if (turn > 2000) sched_yield(); /* a worker has lost its core while writing: all that helps is to yield a core to it */
    else relax();
  }
}

int64_t pool_next(Phase *p) {
  Worker *m = p->worker;
  if (m->starved) return -1; /* nor in later phases, since it has not waited for this one */
  if (!m->slots) return p->at < p->end ? p->at++ : -1;
  while (p->at < p->end) {
    int64_t piece = p->at++;
    if (atomic_load_explicit(word_of(p, m->index, piece), memory_order_relaxed) < p->done - DONE + WRITING) return piece;
  }
  return take_over(p);
}

static int64_t worker_of(const Phase *p, int64_t piece) {
  int64_t worker = piece * p->workers / p->pieces;
  while (first_of(p, worker + 1) <= piece) worker++;
  return worker;
}

int pool_claim(Phase *p, int64_t piece) {
  Worker *m = p->worker;
  if (!m->slots) return 1;
  _Atomic uint64_t *word = word_of(p, piece >= p->own && piece < p->end ? m->index : worker_of(p, piece), piece);
  uint64_t value = atomic_load_explicit(word, memory_order_relaxed);
  while (value < p->done - DONE + WRITING)
    if (atomic_compare_exchange_weak(word, &value, p->done - DONE + WRITING)) return 1;
  return 0;
}

void pool_done(Phase *p, int64_t piece) {
  Worker *m = p->worker;
  if (!m->slots) return;
  _Atomic uint64_t *word = word_of(p, piece >= p->own && piece < p->end ? m->index : worker_of(p, piece), piece);
  atomic_store_explicit(word, p->done, memory_order_release);
}

/* ---- Jobs ----------------------------------------------------------------------------------------------------------- */

/* Take part in the job that opened with this value of the epoch, if it is still open. Returns whether the job wants this worker. */
static int enter_job(Worker *m, uint32_t epoch) {
  int wanted = 0;
  atomic_store(&m->inside, 1); /* until the job's number is known: may be any job */
  if (atomic_load(&pool.epoch) == epoch) {
    Work work = atomic_load_explicit(&pool.work, memory_order_relaxed);
    size_t size = atomic_load_explicit(&pool.size, memory_order_relaxed);
    int team = atomic_load_explicit(&pool.team, memory_order_relaxed);
    int waking = atomic_load_explicit(&pool.waking, memory_order_relaxed);
    int64_t job = atomic_load_explicit(&pool.job, memory_order_relaxed);
    uint64_t phase = atomic_load_explicit(&pool.phase, memory_order_relaxed);
    void *common = atomic_load_explicit(&pool.common, memory_order_relaxed);
    size_t common_held = atomic_load_explicit(&pool.common_held, memory_order_relaxed);
    for (size_t i = 0; 8 * i < size; i++) {
      uint64_t word = atomic_load_explicit(pool.arguments + i, memory_order_relaxed);
      memcpy(m->arguments + 8 * i, &word, 8);
    }
    atomic_thread_fence(memory_order_acquire);
    if (atomic_load(&pool.epoch) == epoch && m->index < team) { /* so everything read belongs to this job */
      atomic_store(&m->inside, job);
      m->epoch = epoch;
      m->team = team;
      m->phase = phase;
      m->slots = pool.slots;
      m->common = common;
      m->common_held = common_held;
      m->starved = 0;
      wanted = 1;
      if (waking) wake_some(m->index, team);
      work(m->arguments, m);
      check_guard(m);
    }
  }
  atomic_store(&m->inside, 0);
  return wanted;
}

/* Publish a job to the workers. The epoch must be closed. */
static void publish_job(Work work, const void *arguments, size_t size, int team, int waking, int64_t job) {
  atomic_thread_fence(memory_order_release); /* orders these writes after the closing of the epoch; see above */
  atomic_store_explicit(&pool.work, work, memory_order_relaxed);
  atomic_store_explicit(&pool.size, size, memory_order_relaxed);
  atomic_store_explicit(&pool.team, team, memory_order_relaxed);
  atomic_store_explicit(&pool.waking, waking, memory_order_relaxed);
  atomic_store_explicit(&pool.job, job, memory_order_relaxed);
  atomic_store_explicit(&pool.phase, pool.reached, memory_order_relaxed);
  for (size_t i = 0; 8 * i < size; i++) {
    uint64_t word = 0;
    memcpy(&word, (const char *)arguments + 8 * i, size - 8 * i < 8 ? size - 8 * i : 8);
    atomic_store_explicit(pool.arguments + i, word, memory_order_relaxed);
  }
}

/* Whether any helper is inside a job. */
static int somebody_inside(void) {
  for (int i = 1; i <= pool.helpers; i++)
    if (atomic_load(&pool.workers[i]->inside)) return 1;
  return 0;
}

static Worker *new_worker(void) {
  void *m;
  if (posix_memalign(&m, LINE, sizeof(Worker))) return NULL;
  return memset(m, 0, sizeof(Worker));
}

/* Grow the common memory to what was last asked for, unless a late worker may still read it. The epoch must be closed. */
static void share_memory(Worker *owner) {
  Worker *holder = pool.holder;
  if (!holder) holder = pool.holder = new_worker();
  if (holder && holder->held < pool.wanted && !somebody_inside()) pool_memory(holder, pool.wanted);
  owner->common = holder ? holder->memory : NULL;
  owner->common_held = holder ? holder->held : 0;
  atomic_store_explicit(&pool.common, owner->common, memory_order_relaxed);
  atomic_store_explicit(&pool.common_held, owner->common_held, memory_order_relaxed);
}

static int own_core(void) {
#ifdef __linux__
  return sched_getcpu();
#else
  return -1;
#endif
}

/* Ask the scheduler for short time slices: a helper woken on a core with a busy process then runs at once, not some milliseconds
 * later, when the owner no longer needs it. It still gets only its fair share. Linux before 6.12 ignores this. */
static void ask_for_short_slices(void) {
#if defined(SYS_sched_getattr) && defined(SYS_sched_setattr)
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period; /* nanoseconds */
  } own = {0};
  if (syscall(SYS_sched_getattr, 0, &own, sizeof own, 0) || own.policy != SCHED_OTHER) return;
  own.runtime = SHORT_SLICE * 1000;
  syscall(SYS_sched_setattr, 0, &own, 0); /* failure does not matter */
#endif
}

/* Leave a core for another that the thread may use, where none of the team is; if there is none, for any other, or for none unless
 * `anywhere`. The scheduler does not always do it: it moves threads that wait for a core, and wakes one elsewhere only if it looks
 * for an idle core, which it does less the busier they have all been. A helper that naps is neither, so it has shared the owner's
 * core for minutes while another was idle. */
static void leave_core(int core, int anywhere) {
#ifdef __linux__
  cpu_set_t allowed, others, empty;
  if (core >= CPU_SETSIZE || sched_getaffinity(0, sizeof allowed, &allowed)) return;
  others = allowed;
  CPU_CLR(core, &others);
  empty = others;
  int owner = atomic_load_explicit(&pool.core, memory_order_relaxed);
  if (owner >= 0 && owner < CPU_SETSIZE) CPU_CLR(owner, &empty);
  for (int i = 1; i < POOL_WORKERS; i++) {
    int there = atomic_load_explicit(pool.cores + i, memory_order_relaxed) - 1;
    if (there >= 0 && there < CPU_SETSIZE) CPU_CLR(there, &empty);
  }
  if (CPU_COUNT(&empty)) others = empty;
  else if (!anywhere) return;
  if (!CPU_COUNT(&others) || sched_setaffinity(0, sizeof others, &others)) return; /* moves the thread before it returns */
  sched_setaffinity(0, sizeof allowed, &allowed);
#else
  (void)core, (void)anywhere;
#endif
}

/* Whether a helper before this one works on the same core. */
static int is_second(int index, int core) {
  for (int i = 1; i < index; i++)
    if (atomic_load_explicit(pool.cores + i, memory_order_relaxed) == core + 1) return 1;
  return 0;
}

/* Leave the team for 2^turn milliseconds, or until it stops. */
static void step_aside(int index, int turn) {
  struct timespec until = {.tv_sec = turn < 10 ? 0 : 1, .tv_nsec = turn < 10 ? 1000000L << turn : 0};
  atomic_store(pool.cores + index, ASIDE);
#ifdef __linux__
  syscall(SYS_futex, &pool.stopping, FUTEX_WAIT_PRIVATE, 0, &until, NULL, 0);
#else
  nanosleep(&until, NULL);
#endif
}

/* The size of a team without its last helpers that stand aside. */
static int at_work(int team) {
  while (team > 2 && atomic_load_explicit(pool.cores + team - 1, memory_order_relaxed) == ASIDE) team--;
  return team;
}

static void *helper(void *argument) {
  Worker *m = argument;
  ask_for_short_slices();
  uint32_t last = 0, naps = 0; /* naps since the last job */
  uint64_t core_lost = 0, idle_since = ticks(), last_look = idle_since, settled_at = 0;
  int settled = -1, turn = 0; /* the core that is its own; how often it has stood aside */
  for (;;) {
    /* Read the epoch before `stopping`: pool_stop changes the epoch last, so a helper that goes to sleep on the old value wakes. */
    uint32_t epoch = atomic_load_explicit(&pool.epoch, memory_order_acquire);
    if (atomic_load_explicit(&pool.stopping, memory_order_acquire)) break;
    uint64_t now = ticks();
    int core = atomic_load_explicit(&pool.core, memory_order_relaxed), here = own_core();
    if (core >= 0 && core == here) {
      /* On the owner's core a helper would only slow the owner down. It stays there if it may use no other. */
      leave_core(core, 1);
      if (core != own_core()) continue;
      atomic_store(pool.cores + m->index, 0);
      settled = -1;
      if (++naps <= NAPS) nanosleep(&(struct timespec){.tv_nsec = NAP * 1000}, NULL);
      else sleep_at(m->index, epoch);
      idle_since = last_look = ticks();
      continue;
    }
    if (STEP_ASIDE && here >= 0 && (here != settled || now - settled_at > ticks_of(SETTLED))) {
      /* With more helpers than cores they would take turns, and lose their core in the middle of a piece. The first stays. */
      int second = is_second(m->index, here);
      if (second) leave_core(here, 0);
      if (second && own_core() != here) continue;
      if (second || (turn && !(epoch & 1))) { /* who stands aside comes back only where there is work */
        step_aside(m->index, turn);
        if (turn < (epoch & 1 ? 6 : 10)) turn++;
        settled = -1;
        idle_since = last_look = ticks();
        continue;
      }
      atomic_store(pool.cores + m->index, here + 1);
      settled = here, settled_at = now, turn = 0;
    }
    if ((epoch & 1) && epoch != last) {
      if (enter_job(m, last = epoch)) {
        naps = 0;
        idle_since = last_look = ticks();
      }
      continue;
    }
    if (now - last_look > ticks_of(GAP)) core_lost = now;
    last_look = now;
    int busy = core_lost && now - core_lost < ticks_of(CROWDED);
    if (now - idle_since < ticks_of(busy ? SPIN_BUSY : SPIN_QUIET)) {
      relax();
    } else {
      atomic_store(pool.cores + m->index, 0);
      settled = -1;
      sleep_at(m->index, epoch);
      idle_since = last_look = ticks();
    }
  }
  return NULL;
}

/* Start missing helpers for a team of `team` workers; returns the size that the team can have. */
static int start_helpers(int team) {
  if (team > POOL_WORKERS) team = POOL_WORKERS;
  if (pool.helpers + 1 >= team) return team;
  sigset_t every, before;
  sigfillset(&every); /* signals go to the application's own threads */
  pthread_sigmask(SIG_SETMASK, &every, &before);
  while (pool.helpers + 1 < team) {
    int index = pool.helpers + 1;
    Worker *m = new_worker();
    if (!m) break;
    m->index = index;
    if (pthread_create(&pool.threads[index], NULL, helper, m)) {
      free(m);
      break;
    }
    atomic_store(&pool.workers[index], m);
    pool.helpers++;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return pool.helpers + 1 < team ? pool.helpers + 1 : team;
}

PUBLIC int64_t pool_oldest(void) {
  int64_t oldest = INT64_MAX;
  for (int i = 1; i < POOL_WORKERS; i++) {
    Worker *m = atomic_load(&pool.workers[i]);
    if (!m) break;
    int64_t job = atomic_load(&m->inside);
    if (job && job < oldest) oldest = job;
  }
  return oldest;
}

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t own_worker;

static void free_worker(void *argument) {
  Worker *m = argument;
  free(m->memory);
  free(m);
}

/* A forked child has none of the threads: it starts with an empty pool and fresh locks. */
static void reset_in_child(void) {
  memset(&pool, 0, sizeof pool);
  reset_sleep_lock();
}

static void prepare(void) {
  measure_ticks();
  pthread_key_create(&own_worker, free_worker);
  pthread_atfork(NULL, NULL, reset_in_child);
}

int64_t pool_run(Work work, const void *arguments, size_t size, int threads, int64_t bytes) {
  pthread_once(&once, prepare);
  Worker *m = pthread_getspecific(own_worker);
  if (!m) {
    if (!(m = new_worker())) return -1;
    if (pthread_setspecific(own_worker, m)) {
      free(m);
      return -1;
    }
  }
  int mine = 0;
  if (threads > 1 && size <= POOL_ARGUMENTS) mine = atomic_compare_exchange_strong(&pool.busy, &mine, 1);
  int team = mine && !atomic_load(&pool.stopping) ? at_work(start_helpers(threads)) : 1;
  m->team = team;
  m->starved = 0;
  if (team == 1) {
    m->slots = NULL;
    work(arguments, m);
    check_guard(m);
    if (mine) atomic_store(&pool.busy, 0);
    return m->starved ? -1 : 0;
  }
  int64_t job = atomic_load_explicit(&pool.job, memory_order_relaxed) + 1;
  int waking = bytes >= WORTH_WAKING;
  publish_job(work, arguments, size, team, waking, job);
  share_memory(m);
  m->index = 0;
  m->phase = pool.reached;
  m->slots = pool.slots;
  atomic_store_explicit(&pool.core, own_core(), memory_order_relaxed);
  m->epoch = atomic_fetch_add(&pool.epoch, 1) + 1;
  if (waking) wake_some(0, team);
  work(arguments, m);
  check_guard(m);
  if (pool.holder) check_guard(pool.holder);
  atomic_store(&pool.epoch, m->epoch + 1);
  pool.reached = m->phase;
  int64_t result = somebody_inside() ? job : 0;
  if (m->starved) {
    /* Helpers go on with the phases that the owner has skipped, and would write to memory that the caller then frees. They finish
     * by themselves: each can do all the work of a phase, and then sees the epoch closed. */
    while (somebody_inside()) sched_yield();
    pool.reached += 1 << 20; /* beyond any phase that they may have reached */
    result = -1;
  }
  atomic_store(&pool.busy, 0);
  return result;
}

PUBLIC void pool_stop(void) {
  int no = 0;
  while (!atomic_compare_exchange_weak(&pool.busy, &no, 1)) no = 0, sched_yield();
  atomic_store(&pool.stopping, 1);
  atomic_fetch_add(&pool.epoch, 2);
  for (int i = 1; i <= pool.helpers; i++) wake(pool.asleep + i);
#ifdef __linux__
  syscall(SYS_futex, &pool.stopping, FUTEX_WAKE_PRIVATE, POOL_WORKERS, NULL, NULL, 0);
#endif
  for (int i = 1; i <= pool.helpers; i++) pthread_join(pool.threads[i], NULL);
  for (int i = 1; i <= pool.helpers; i++) {
    Worker *m = atomic_load(&pool.workers[i]); /* not freed: another thread may be in pool_oldest */
    free(m->memory);
    m->memory = NULL;
    m->held = m->guard = 0;
  }
  if (pool.holder) free_worker(pool.holder);
  pool.holder = NULL;
  pool.helpers = 0;
  atomic_store(&pool.busy, 0);
}
