/* See pool.h. What a thread waits for, it waits for actively for a moment only; then it sleeps (between jobs) or does the
 * missing work itself (within one).
 *
 * Why this is right. Every piece of a phase has a word that only grows: 4 * phase + TAKEN, WRITING or DONE. Results are
 * written by the member whose compare-and-swap set WRITING, and by nobody else; a phase ends when all its words are DONE.
 *
 * - Who leaves a phase has read DONE, or a later value, from each word with acquire. DONE is stored with release behind the
 *   results; what replaces it later is set by a compare-and-swap (which continues the release sequence) of a member that
 *   left the phase itself. So the results of all earlier phases happen before whatever a member does in this one.
 * - A compare-and-swap to WRITING succeeds only while the word is below it, so while the phase has not ended, so before
 *   anybody began the next. What the winner computed from can therefore not have been overwritten yet: phases do not
 *   write what they read.
 * - A member that was left behind loses every compare-and-swap, since words never fall. It only read memory: the numbers it
 *   read meanwhile may be any, and are dropped. Formally that is a data race; on the machines this runs on, a read of
 *   memory that is mapped has no other effect than its value.
 * - A job ends for its owner when its last phase has. Others may still be inside; `door` tells them, and `inside` the owner:
 *   both are sequentially consistent, so either the member sees the door closed or the owner sees the member inside.
 * - What describes a job (`pool.job` and so on) is written behind a closed door and read like a seqlock. Opening the door is a
 *   release, so whoever has seen it open sees at least that job's description. A member that is late may read words of a later
 *   job. The release fence before they are written and the acquire fence behind its reading make it then see the door that was
 *   closed before, and it takes no part. Hence nothing of the description may change between the opening and the closing, nor
 *   behind the closing without that fence: the phase that a job came to is kept in `pool.reached`, which owners alone read.
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

#ifndef SPIN_QUIET
#define SPIN_QUIET 2000 /* microseconds that a helper waits actively for the next job; a round's Python takes a tenth */
#endif
#ifndef SPIN_BUSY
#define SPIN_BUSY 50    /* the same while others want the cores */
#endif
/* Microseconds between two looks at the clock that mean that the core was lost. A host that takes a virtual processor away for
 * a moment is no busy machine, and there a helper that sleeps is slow to wake; a busy process keeps a core for longer. */
#ifndef GAP
#define GAP 1500
#endif
#ifndef CROWDED
#define CROWDED 200000   /* microseconds for which a lost core is remembered */
#endif
#ifndef PATIENCE
#define PATIENCE 3       /* microseconds that a late piece is waited for, at least */
#endif
#ifndef NAP
#define NAP 1000         /* microseconds that a helper sleeps when it finds itself on the owner's core */
#endif
#ifndef NAPS
#define NAPS 20          /* after which it sleeps until it is woken */
#endif
#ifndef SHORT_TURN
#define SHORT_TURN 100   /* microseconds */
#endif
#ifndef WORTH_WAKING
#define WORTH_WAKING (256 << 10) /* bytes of a job for which sleepers are woken */
#endif

typedef struct {
  _Atomic uint64_t seen; /* the last phase that the member came to */
  _Atomic uint64_t words[POOL_PIECES];
} ALIGNED Place;

struct Member {
  Place *places; /* of the whole team; NULL for one that works alone */
  int index, team;
  uint32_t door;
  int starved; /* it got no memory in this job */
  uint64_t phase;
  void *memory;
  size_t held;  /* bytes of it */
  size_t guard; /* where the guard begins behind them; 0 without one */
  void *common; /* memory of the team in this job */
  size_t common_held;
  _Atomic int64_t inside; /* the job's number, or a lower one; 0 outside */
  char arguments[POOL_ARGUMENTS] ALIGNED;
} ALIGNED;

static struct {
  _Atomic uint32_t door ALIGNED; /* odd while a job is open */
  _Atomic int asleep;
  _Atomic int core; /* on which the owner last opened a job; -1 if the system does not tell */
  /* Of the open job; written while the door is closed. Atomic, since late members read them while they are written. */
  _Atomic(Work) work ALIGNED;
  _Atomic size_t size;
  _Atomic int team;
  _Atomic int64_t job;
  _Atomic uint64_t phase; /* the last one of all jobs before */
  _Atomic(void *) common;
  _Atomic size_t common_held;
  _Atomic uint64_t arguments[POOL_ARGUMENTS / 8];
  _Atomic int busy ALIGNED; /* somebody owns the team */
  uint64_t reached;         /* the last phase of the job before; the owner's */
  Member *holder; /* no thread: its memory is the team's; changed by the owner alone, like what follows */
  size_t wanted;  /* bytes of it, the most that a job has asked for */
  _Atomic int stopping;
  int helpers; /* threads started; changed by the owner alone */
  pthread_t threads[POOL_MEMBERS];
  Member *_Atomic members[POOL_MEMBERS]; /* from 1 on; one that is there stays until the end */
  Place places[POOL_MEMBERS];
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
/* Ticks of a microsecond, measured once; only how long something is waited for depends on it. */
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

#ifdef __linux__
static void sleep_at(uint32_t door) {
  atomic_fetch_add(&pool.asleep, 1);
  /* The kernel looks at the door again: a job that opened in between is not slept through. */
  syscall(SYS_futex, &pool.door, FUTEX_WAIT_PRIVATE, door, NULL, NULL, 0);
  atomic_fetch_sub(&pool.asleep, 1);
}
static void make_bed(void) {}
static void wake(void) { syscall(SYS_futex, &pool.door, FUTEX_WAKE_PRIVATE, POOL_MEMBERS, NULL, NULL, 0); }
#else
static pthread_mutex_t bed = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t bell = PTHREAD_COND_INITIALIZER;
/* Anew, whatever state another process's threads left them in. */
static void make_bed(void) {
  bed = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
  bell = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
}
static void sleep_at(uint32_t door) {
  pthread_mutex_lock(&bed);
  atomic_fetch_add(&pool.asleep, 1);
  while (atomic_load(&pool.door) == door && !atomic_load(&pool.stopping)) pthread_cond_wait(&bell, &bed);
  atomic_fetch_sub(&pool.asleep, 1);
  pthread_mutex_unlock(&bed);
}
static void wake(void) {
  pthread_mutex_lock(&bed);
  pthread_cond_broadcast(&bell);
  pthread_mutex_unlock(&bed);
}
#endif

/* ---- Phases --------------------------------------------------------------------------------------------------------- */

int pool_alone(const Member *m) { return m->places == NULL; }
int pool_team(const Member *m) { return m->team; }
int pool_left(const Member *m) {
  return m->starved || (m->places && atomic_load_explicit(&pool.door, memory_order_relaxed) != m->door);
}

/* ---- Memory of members ---------------------------------------------------------------------------------------------- */

#ifdef __SANITIZE_ADDRESS__
#define GUARD 0 /* what comes behind memory is guarded already */
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

static void look_at_guard(const Member *m) {
  if (!m->guard) return;
  const unsigned char *guard = (const unsigned char *)m->memory + m->guard;
  for (int i = 0; i < GUARD; i++)
    if (guard[i] != GUARD_BYTE) {
      atomic_fetch_add(&overruns, 1);
      return;
    }
}

void *pool_memory(Member *m, size_t bytes) {
  int exactly = atomic_load_explicit(&exact, memory_order_relaxed);
  if (m->held >= bytes && !exactly && !m->guard) return m->memory;
  look_at_guard(m);
  free(m->memory);
  m->guard = exactly && GUARD ? bytes : 0;
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

void *pool_common(Member *m, size_t bytes) {
  if (!m->places) return NULL;
  if (m->index == 0 && bytes > pool.wanted) pool.wanted = bytes;
  return bytes <= m->common_held ? m->common : NULL;
}

/* ---- Pieces --------------------------------------------------------------------------------------------------------- */

static int64_t first_of(const Phase *p, int64_t member) { return p->pieces * member / p->member->team; }

Phase pool_phase(Member *m, int64_t pieces) {
  m->phase++;
  Phase p = {.member = m, .pieces = pieces, .done = 4 * m->phase + DONE, .end = pieces};
  if (m->places) {
    p.own = p.at = first_of(&p, m->index);
    p.end = first_of(&p, m->index + 1);
    p.began = ticks();
    atomic_store_explicit(&m->places[m->index].seen, m->phase, memory_order_relaxed);
  }
  return p;
}

static _Atomic uint64_t *word_of(const Phase *p, int64_t member, int64_t piece) {
  return &p->member->places[member].words[piece - first_of(p, member)];
}

/* A piece that its member has not done, or -1 when all are done. First those of members that have not come to this phase,
 * at once; then, having waited, also those that somebody is at. */
static int64_t another(Phase *p) {
  const Member *m = p->member;
  uint64_t now = ticks();
  if (!p->waiting) { /* others' pieces take about as long as its own did */
    uint64_t piece = p->end > p->own ? (now - p->began) / (p->end - p->own) : 0;
    p->waiting = now;
    p->patience = piece > ticks_of(PATIENCE) ? piece : ticks_of(PATIENCE);
  }
  for (int turn = 0;; turn++, now = ticks()) {
    int patient = now - p->waiting < p->patience, all_done = 1;
    int64_t late = -1;
    for (int64_t i = 1; i <= m->team; i++) {
      int64_t member = (m->index + i) % m->team;
      Place *place = m->places + member;
      int64_t first = first_of(p, member);
      for (int64_t piece = first_of(p, member + 1) - 1; piece >= first; piece--) {
        _Atomic uint64_t *word = place->words + (piece - first);
        uint64_t value = atomic_load_explicit(word, memory_order_acquire);
        if (value >= p->done) continue;
        all_done = 0;
        if (value == p->done - DONE + WRITING) continue;
        int free = value < p->done - DONE + TAKEN;
        if (free && (!patient || atomic_load_explicit(&place->seen, memory_order_relaxed) < m->phase)) {
          if (atomic_compare_exchange_strong(word, &value, p->done - DONE + TAKEN)) return piece;
        } else if (late < 0) {
          late = piece;
        }
      }
    }
    if (all_done) return -1;
    if (!patient && late >= 0) {
      p->waiting = now; /* after this one, waits again */
      return late;
    }
    if (turn > 2000) sched_yield(); /* somebody lost its core while it wrote: nothing can be done but let it have one */
    else relax();
  }
}

int64_t pool_next(Phase *p) {
  Member *m = p->member;
  if (m->starved) return -1; /* nor in later phases: it has not waited for this one */
  if (!m->places) return p->at < p->end ? p->at++ : -1;
  while (p->at < p->end) {
    int64_t piece = p->at++;
    if (atomic_load_explicit(word_of(p, m->index, piece), memory_order_relaxed) < p->done - DONE + WRITING) return piece;
  }
  return another(p);
}

static int64_t member_of(const Phase *p, int64_t piece) {
  int64_t member = piece * p->member->team / p->pieces;
  while (first_of(p, member + 1) <= piece) member++;
  return member;
}

int pool_win(Phase *p, int64_t piece) {
  Member *m = p->member;
  if (!m->places) return 1;
  _Atomic uint64_t *word = word_of(p, piece >= p->own && piece < p->end ? m->index : member_of(p, piece), piece);
  uint64_t value = atomic_load_explicit(word, memory_order_relaxed);
  while (value < p->done - DONE + WRITING)
    if (atomic_compare_exchange_weak(word, &value, p->done - DONE + WRITING)) return 1;
  return 0;
}

void pool_done(Phase *p, int64_t piece) {
  Member *m = p->member;
  if (!m->places) return;
  _Atomic uint64_t *word = word_of(p, piece >= p->own && piece < p->end ? m->index : member_of(p, piece), piece);
  atomic_store_explicit(word, p->done, memory_order_release);
}

/* ---- Jobs ----------------------------------------------------------------------------------------------------------- */

/* Take part in the job behind this door, if it is still open. */
static void enter_job(Member *m, uint32_t door) {
  atomic_store(&m->inside, 1); /* until the job's number is known: in any, for all that others can tell */
  if (atomic_load(&pool.door) == door) {
    Work work = atomic_load_explicit(&pool.work, memory_order_relaxed);
    size_t size = atomic_load_explicit(&pool.size, memory_order_relaxed);
    int team = atomic_load_explicit(&pool.team, memory_order_relaxed);
    int64_t job = atomic_load_explicit(&pool.job, memory_order_relaxed);
    uint64_t phase = atomic_load_explicit(&pool.phase, memory_order_relaxed);
    void *common = atomic_load_explicit(&pool.common, memory_order_relaxed);
    size_t common_held = atomic_load_explicit(&pool.common_held, memory_order_relaxed);
    for (size_t i = 0; 8 * i < size; i++) {
      uint64_t word = atomic_load_explicit(pool.arguments + i, memory_order_relaxed);
      memcpy(m->arguments + 8 * i, &word, 8);
    }
    atomic_thread_fence(memory_order_acquire);
    if (atomic_load(&pool.door) == door && m->index < team) { /* so all of that belongs together */
      atomic_store(&m->inside, job);
      m->door = door;
      m->team = team;
      m->phase = phase;
      m->places = pool.places;
      m->common = common;
      m->common_held = common_held;
      m->starved = 0;
      work(m->arguments, m);
      look_at_guard(m);
    }
  }
  atomic_store(&m->inside, 0);
}

/* Tell members of a job, behind a closed door. */
static void describe(Work work, const void *arguments, size_t size, int team, int64_t job) {
  atomic_thread_fence(memory_order_release); /* see above: the door was closed before any of this */
  atomic_store_explicit(&pool.work, work, memory_order_relaxed);
  atomic_store_explicit(&pool.size, size, memory_order_relaxed);
  atomic_store_explicit(&pool.team, team, memory_order_relaxed);
  atomic_store_explicit(&pool.job, job, memory_order_relaxed);
  atomic_store_explicit(&pool.phase, pool.reached, memory_order_relaxed);
  for (size_t i = 0; 8 * i < size; i++) {
    uint64_t word = 0;
    memcpy(&word, (const char *)arguments + 8 * i, size - 8 * i < 8 ? size - 8 * i : 8);
    atomic_store_explicit(pool.arguments + i, word, memory_order_relaxed);
  }
}

/* Whether another member is inside a job. */
static int somebody_inside(void) {
  for (int i = 1; i <= pool.helpers; i++)
    if (atomic_load(&pool.members[i]->inside)) return 1;
  return 0;
}

static Member *new_member(void) {
  void *m;
  if (posix_memalign(&m, LINE, sizeof(Member))) return NULL;
  return memset(m, 0, sizeof(Member));
}

/* Have as much common memory as was last wanted, behind a closed door; later, if a late member may still read what there is. */
static void share_memory(Member *owner) {
  Member *holder = pool.holder;
  if (!holder) holder = pool.holder = new_member();
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

/* Ask for short turns: woken beside a busy process, a helper then runs at once and not some milliseconds later, for which the
 * owner has no use. It gets no more of the processor than its fair share. Linux before 6.12 takes no notice. */
static void ask_for_short_turns(void) {
#if defined(SYS_sched_getattr) && defined(SYS_sched_setattr)
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period; /* nanoseconds */
  } own = {0};
  if (syscall(SYS_sched_getattr, 0, &own, sizeof own, 0) || own.policy != SCHED_OTHER) return;
  own.runtime = SHORT_TURN * 1000;
  syscall(SYS_sched_setattr, 0, &own, 0); /* nothing depends on it */
#endif
}

static void *helper(void *argument) {
  Member *m = argument;
  ask_for_short_turns();
  uint32_t last = 0, naps = 0; /* since the last job */
  uint64_t crowded = 0, came = ticks(), before = came;
  for (;;) {
    /* The door first: pool_stop changes it last, so whoever sleeps at a door that it has seen before the stop is woken. */
    uint32_t door = atomic_load_explicit(&pool.door, memory_order_acquire);
    if (atomic_load_explicit(&pool.stopping, memory_order_acquire)) break;
    uint64_t now = ticks();
    int core = atomic_load_explicit(&pool.core, memory_order_relaxed);
    if (core >= 0 && core == own_core()) {
      /* On the owner's core it could only do what the owner then cannot. The scheduler moves one of them before long; unless
       * there is one core only, or no job for more than one thread any more. */
      if (++naps <= NAPS) nanosleep(&(struct timespec){.tv_nsec = NAP * 1000}, NULL);
      else sleep_at(door);
      came = before = ticks();
      continue;
    }
    if ((door & 1) && door != last) {
      enter_job(m, last = door);
      naps = 0;
      came = before = ticks();
      continue;
    }
    if (now - before > ticks_of(GAP)) crowded = now;
    before = now;
    int busy = crowded && now - crowded < ticks_of(CROWDED);
    if (now - came < ticks_of(busy ? SPIN_BUSY : SPIN_QUIET)) {
      relax();
    } else {
      sleep_at(door);
      came = before = ticks();
    }
  }
  return NULL;
}

/* Have as many helpers as a team of so many needs; returns the team that there is. */
static int gather(int team) {
  if (team > POOL_MEMBERS) team = POOL_MEMBERS;
  if (pool.helpers + 1 >= team) return team;
  sigset_t every, before;
  sigfillset(&every); /* signals are for the threads of whoever uses this library */
  pthread_sigmask(SIG_SETMASK, &every, &before);
  while (pool.helpers + 1 < team) {
    int index = pool.helpers + 1;
    Member *m = new_member();
    if (!m) break;
    m->index = index;
    if (pthread_create(&pool.threads[index], NULL, helper, m)) {
      free(m);
      break;
    }
    atomic_store(&pool.members[index], m);
    pool.helpers++;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return pool.helpers + 1 < team ? pool.helpers + 1 : team;
}

PUBLIC int64_t pool_oldest(void) {
  int64_t oldest = INT64_MAX;
  for (int i = 1; i < POOL_MEMBERS; i++) {
    Member *m = atomic_load(&pool.members[i]);
    if (!m) break;
    int64_t job = atomic_load(&m->inside);
    if (job && job < oldest) oldest = job;
  }
  return oldest;
}

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t lone;

static void free_member(void *argument) {
  Member *m = argument;
  free(m->memory);
  free(m);
}

/* A forked child has none of the threads: it starts with a pool of its own, and with a bed that nobody holds. */
static void forget(void) {
  memset(&pool, 0, sizeof pool);
  make_bed();
}

static void prepare(void) {
  measure_ticks();
  pthread_key_create(&lone, free_member);
  pthread_atfork(NULL, NULL, forget);
}

int64_t pool_run(Work work, const void *arguments, size_t size, int threads, int64_t bytes) {
  pthread_once(&once, prepare);
  Member *m = pthread_getspecific(lone);
  if (!m) {
    if (!(m = new_member())) return -1;
    if (pthread_setspecific(lone, m)) {
      free(m);
      return -1;
    }
  }
  int mine = 0;
  if (threads > 1 && size <= POOL_ARGUMENTS) mine = atomic_compare_exchange_strong(&pool.busy, &mine, 1);
  int team = mine && !atomic_load(&pool.stopping) ? gather(threads) : 1;
  m->team = team;
  m->starved = 0;
  if (team == 1) {
    m->places = NULL;
    work(arguments, m);
    look_at_guard(m);
    if (mine) atomic_store(&pool.busy, 0);
    return m->starved ? -1 : 0;
  }
  int64_t job = atomic_load_explicit(&pool.job, memory_order_relaxed) + 1;
  describe(work, arguments, size, team, job);
  share_memory(m);
  m->index = 0;
  m->phase = pool.reached;
  m->places = pool.places;
  atomic_store_explicit(&pool.core, own_core(), memory_order_relaxed);
  m->door = atomic_fetch_add(&pool.door, 1) + 1;
  if (bytes >= WORTH_WAKING && atomic_load(&pool.asleep)) wake();
  work(arguments, m);
  look_at_guard(m);
  if (pool.holder) look_at_guard(pool.holder);
  atomic_store(&pool.door, m->door + 1);
  pool.reached = m->phase;
  int64_t result = somebody_inside() ? job : 0;
  if (m->starved) {
    /* The others go on with the phases that this one has left, and write to what the caller then frees. They end by themselves:
     * each can do all the work of a phase, and then sees the door closed. */
    while (somebody_inside()) sched_yield();
    pool.reached += 1 << 20; /* beyond what they may have come to */
    result = -1;
  }
  atomic_store(&pool.busy, 0);
  return result;
}

PUBLIC void pool_stop(void) {
  int no = 0;
  while (!atomic_compare_exchange_weak(&pool.busy, &no, 1)) no = 0, sched_yield();
  atomic_store(&pool.stopping, 1);
  atomic_fetch_add(&pool.door, 2);
  wake();
  for (int i = 1; i <= pool.helpers; i++) pthread_join(pool.threads[i], NULL);
  for (int i = 1; i <= pool.helpers; i++) {
    Member *m = atomic_load(&pool.members[i]); /* stays: another thread may be in pool_oldest */
    free(m->memory);
    m->memory = NULL;
    m->held = m->guard = 0;
  }
  if (pool.holder) free_member(pool.holder);
  pool.holder = NULL;
  pool.helpers = 0;
  atomic_store(&pool.busy, 0);
}
