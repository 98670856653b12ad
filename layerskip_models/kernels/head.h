/* The head without its logits: of every row the token that wins, and how sure the row is of it.
 *
 * Logits are computed as `normalised_linear` computes them, bit for bit, and looked at while they are in the cache. The
 * vocabulary is cut into chunks in the same way for any number of threads, and the chunks' summaries are put together in
 * order: so these numbers depend on the row alone, like everything else here.
 */
#ifndef SELFSPEC_HEAD_H
#define SELFSPEC_HEAD_H
#include "matrices.h"

#define CHUNK 256  /* fewest outputs that are summed up together */
#define CHUNKS 256 /* and most chunks of a vocabulary */

typedef struct {
  float best, second; /* of the logits */
  float sum, moment;  /* of e^(logit - best), and of that times (logit - best) */
  int64_t token;      /* the first one whose logit is `best` */
} Summary;

INLINE int64_t chunk_size(int64_t out) {
  int64_t size = (out + CHUNKS - 1) / CHUNKS;
  return size <= CHUNK ? CHUNK : (size + GROUP - 1) / GROUP * GROUP;
}

INLINE int64_t chunk_count(int64_t out) { return (out + chunk_size(out) - 1) / chunk_size(out); }

/* Of `count` logits, behind which there is room for LANES more; a NaN among them makes `best` NaN. */
static Summary summarise(float *logits, int64_t count, int64_t first, int spread) {
  for (int64_t i = count; i < count + LANES; i++) logits[i] = -INFINITY;
  vf most = all(-INFINITY), next = most;
  vi odd = {0}, at = {0}, here; /* where each lane's largest one is */
  for (int i = 0; i < LANES; i++) here[i] = i;
  for (int64_t i = 0; i < count; i += LANES, here += LANES) {
    vf v = load(logits + i);
    vi larger = v > most;
    vf lower = choose(larger, most, v);
    odd |= v != v;
    at = (here & larger) | (at & ~larger);
    most = choose(larger, v, most);
    next = choose(lower > next, lower, next);
  }
  float peaks[LANES], nexts[LANES];
  int32_t places[LANES], odds[LANES], any = 0;
  store(peaks, most);
  store(nexts, next);
  memcpy(places, &at, sizeof places);
  memcpy(odds, &odd, sizeof odds);
  Summary s = {-INFINITY, -INFINITY, 0, 0, first};
  int64_t place = 0;
  for (int i = 0; i < LANES; i++) {
    any |= odds[i];
    if (peaks[i] > s.best) {
      s.second = s.best > nexts[i] ? s.best : nexts[i];
      s.best = peaks[i], place = places[i];
    } else {
      if (peaks[i] == s.best && places[i] < place) place = places[i];
      if (peaks[i] > s.second) s.second = peaks[i];
    }
  }
  s.token = first + place;
  if (any) {
    s.best = NAN;
    return s;
  }
  if (!spread || s.best == -INFINITY) return s;
  vf sums = {0}, moments = {0};
  for (int64_t i = 0; i < count; i += LANES) {
    vf below = load(logits + i) - s.best;
    below = choose(below < -1000.0f, all(-1000.0f), below); /* times e^-infinity = 0 it must be 0 */
    vf e = exponential(below);
    sums += e;
    moments += below * e;
  }
  s.sum = sum(sums);
  s.moment = sum(moments);
  return s;
}

/* Everything about a row from its chunks' summaries. */
static Summary joined(const Summary *chunks, int64_t count, int spread) {
  Summary s = chunks[0];
  for (int64_t c = 1; c < count; c++) {
    const Summary *other = chunks + c;
    if (other->best != other->best) s.best = NAN;
    if (other->best > s.best) {
      s.second = s.best > other->second ? s.best : other->second;
      s.best = other->best, s.token = other->token;
    } else if (other->best > s.second) s.second = other->best;
  }
  if (!spread) return s;
  s.sum = s.moment = s.best != s.best ? NAN : 0;
  for (int64_t c = 0; c < count; c++) {
    if (chunks[c].sum == 0) continue; /* of masked tokens alone */
    float below = chunks[c].best - s.best, factor = expf(below);
    s.sum += factor * chunks[c].sum;
    if (factor > 0) s.moment += factor * (chunks[c].moment + below * chunks[c].sum);
  }
  return s;
}
#endif
