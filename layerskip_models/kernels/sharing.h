/* Among how many threads a phase, or a job of several phases, is worth dividing. docs/kernels.md has the measurements. */
#ifndef SELFSPEC_SHARING_H
#define SELFSPEC_SHARING_H
#include "pool.h"
#include "vectors.h"

/* What a thread reads, in bytes, while a phase waits for one thread more: 40 ns, at 10 GB/s. A phase of `bytes` that k threads
 * share takes bytes / k at their speed, and k times this wait. The sum is smallest where k * k * MEMBER_BYTES = bytes. */
#define MEMBER_BYTES 400
#define ROWS_AS_ONE 8 /* rows that take about twice the time of one: memory's limit is then arithmetic's, too */

/* The number of threads, at most `team`, for a phase whose weights have `bytes` bytes and meet `rows` rows. Never fewer than two
 * of a team: with two there is nothing to save. */
INLINE int64_t worth_sharing(int64_t team, int64_t bytes, int64_t rows) {
  if (team <= 2) return team;
  int64_t work = bytes + bytes / ROWS_AS_ONE * (rows - 1);
  return max(2, min(team, (int64_t)sqrtf((float)(work / MEMBER_BYTES))));
}
#endif
