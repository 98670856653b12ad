/* A team of threads that a busy machine cannot hold up.
 *
 * Work is a sequence of phases, the same for every member of the team; a phase is a number of pieces, and it ends when all of
 * them are done. Each member has pieces of its own. Who is through with them does those of a member that has not come, and
 * redoes those of one that takes too long: a thread that lost its core delays nobody. So a piece may be computed more than once,
 * and must come out the same every time. It is computed into memory of the member's own; only the one member to which
 * `pool_win` says yes may then write the result to memory that others see, and says `pool_done` behind it.
 *
 *   static void work(const void *arguments, Member *member) {
 *     for each phase {
 *       float *room = pool_memory(member, bytes);
 *       Phase phase = pool_phase(member, pieces);
 *       for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
 *         ... compute it into the room ...
 *         if (pool_win(&phase, piece)) { ... copy the result ...; pool_done(&phase, piece); }
 *       }
 *       if (pool_left(member)) break;
 *     }
 *   }
 *
 * A member that gets no memory gets no more pieces either: the others do them. If it is the calling thread, the job fails.
 *
 * What a member reads may be older or newer than it believes, once the others have gone on without it. It must not crash
 * on that, need not be right, and its result is then refused. Hence whatever a job reads must stay in memory until
 * `pool_oldest` says that nobody is left inside that job, though `pool_run` came back long ago.
 */
#ifndef SELFSPEC_POOL_H
#define SELFSPEC_POOL_H
#include <stddef.h>
#include <stdint.h>

typedef struct Member Member;
typedef void (*Work)(const void *arguments, Member *member);

#define POOL_ARGUMENTS 512 /* bytes of a job's arguments, which are copied to every member */
#define POOL_MEMBERS 256   /* most threads of a team */
#define POOL_PIECES 7      /* most pieces of one member in a phase */

typedef struct {
  Member *member;
  uint64_t done;   /* what a piece's word holds when the piece is done in this phase */
  int64_t pieces;
  int64_t own, end, at; /* this member's pieces, and where it is */
  uint64_t began, waiting, patience; /* ticks */
} Phase;

/* Run a job with at most so many threads, this one among them. bytes: roughly what it reads, which decides whether sleeping
 * threads are woken for it. Returns the job's number if a thread is still inside it, 0 if not. Returns -1 if there was no memory;
 * then no thread is inside, and what the job wrote is of no use. */
int64_t pool_run(Work work, const void *arguments, size_t size, int threads, int64_t bytes);

/* The lowest number of a job that a thread is inside of; INT64_MAX if there is none. */
int64_t pool_oldest(void);

/* End all threads and wait for them; from then on every job runs on its caller's thread alone. */
void pool_stop(void);

Phase pool_phase(Member *member, int64_t pieces);
int64_t pool_next(Phase *phase);
int pool_win(Phase *phase, int64_t piece);
void pool_done(Phase *phase, int64_t piece);

/* Whether the job ended without this member, or the member has got no memory. */
int pool_left(const Member *member);

/* Whether this member works alone, so that it may write results where they belong at once. */
int pool_alone(const Member *member);

/* How many members the team has. */
int pool_team(const Member *member);

/* Memory of the member's own, 64-byte aligned, until it asks again or the job ends. Every phase asks for what it uses itself: only
 * it knows how much that is. NULL if there is none, and then `pool_next` returns no more pieces in this job. */
void *pool_memory(Member *member, size_t bytes);

/* Memory that all of the team see, for what one phase makes and a later one reads; all members get the same answer. NULL where
 * there is less of it in this job; the next job then has more. */
void *pool_common(Member *member, size_t bytes);

/* For tests: whether every request gets memory of exactly its size, with a guard behind it (AddressSanitizer's own, where the
 * library is built with it); returns whether they did before. And how often a guard was found overwritten. */
int pool_exact_rooms(int on);
int64_t pool_overruns(void);
#endif
