/* A team of threads that keeps going on a busy machine.
 *
 * Work is a sequence of phases, the same for every worker of the team; a phase is a number of pieces, and it ends when all of
 * them are done. Each worker has its own pieces. A worker that has finished them does the pieces of workers that have not
 * arrived, and redoes those of a worker that takes too long: a thread that lost its core delays nobody. So a piece may be
 * computed more than once, and must come out the same every time. A worker computes it into its own memory. Only the one worker
 * for which `pool_claim` returns 1 may then copy the result to shared memory, and it calls `pool_done` afterwards.
 *
 *   static void work(const void *arguments, Worker *worker) {
 *     for each phase {
 *       float *buffer = pool_memory(worker, bytes);
 *       Phase phase = pool_phase(worker, pieces);
 *       for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
 *         ... compute it into the buffer ...
 *         if (pool_claim(&phase, piece)) { ... copy the result ...; pool_done(&phase, piece); }
 *       }
 *       if (pool_left(worker)) break;
 *     }
 *   }
 *
 * A worker that gets no memory gets no more pieces either: the others do them. If it is the calling thread, the job fails.
 *
 * Once the others have gone on without a worker, what it reads may be older or newer than it assumes. It must not crash then,
 * but its result may be wrong, and will be refused. Hence everything a job reads must stay in memory until `pool_oldest` says
 * that no thread is left inside the job, even long after `pool_run` has returned.
 */
#ifndef SELFSPEC_POOL_H
#define SELFSPEC_POOL_H
#include <stddef.h>
#include <stdint.h>

typedef struct Worker Worker;
typedef void (*Work)(const void *arguments, Worker *worker);

#define POOL_ARGUMENTS 512 /* bytes of a job's arguments, which are copied to every worker */
#define POOL_WORKERS 256   /* most threads of a team */
#define POOL_PIECES 7      /* most pieces of one worker in a phase */

typedef struct {
  Worker *worker;
  uint64_t done;   /* the value of a piece's word once the piece is done in this phase */
  int64_t pieces;
  int64_t workers; /* number of workers that have pieces: 0 .. workers - 1 */
  int64_t own, end, at; /* this worker's pieces [own, end), and the next one */
  int64_t looked;  /* workers in turn, from the next one on, whose pieces are known to be done */
  uint64_t began, waiting, patience; /* ticks */
} Phase;

/* Run a job with at most `threads` threads, including the caller. bytes: roughly how much it reads, which decides whether sleeping
 * threads are woken. Returns the job's number if a thread is still inside it, otherwise 0. Returns -1 if there was no memory; then
 * no thread is inside, and what the job wrote must not be used. */
int64_t pool_run(Work work, const void *arguments, size_t size, int threads, int64_t bytes);

/* The lowest number of a job that still has a thread inside; INT64_MAX if no job has. */
int64_t pool_oldest(void);

/* End all threads and wait for them; from then on every job runs on its caller's thread alone. */
void pool_stop(void);

/* pieces: at most POOL_PIECES for each worker of the team. */
Phase pool_phase(Worker *worker, int64_t pieces);
int64_t pool_next(Phase *phase);
int pool_claim(Phase *phase, int64_t piece);
void pool_done(Phase *phase, int64_t piece);

/* Whether the job ended without this worker, or the worker got no memory. */
int pool_left(const Worker *worker);

/* Whether this worker works alone, so that it may write results in place. */
int pool_alone(const Worker *worker);

/* Number of workers of the team. */
int pool_team(const Worker *worker);

/* The worker's own memory, 64-byte aligned, valid until it asks again or the job ends. Every phase asks for what it needs. NULL if
 * there is none; then `pool_next` returns no more pieces in this job. */
void *pool_memory(Worker *worker, size_t bytes);

/* Memory shared by the team, for what one phase writes and a later one reads; all workers get the same answer. NULL if this job
 * has less of it; the next job will have more. */
void *pool_common(Worker *worker, size_t bytes);

/* For tests: whether every request gets memory of exactly its size, followed by a guard (AddressSanitizer's own, if the
 * library is built with it); returns the previous setting. `pool_overruns`: how often a guard was found overwritten. */
int pool_exact_rooms(int on);
int64_t pool_overruns(void);
#endif
