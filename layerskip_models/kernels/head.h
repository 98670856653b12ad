/* The head without storing logits: each row's winning token, and how confident the row is in it.
 *
 * Logits have the same bits as from `normalised_linear`, and are summarised while they are in the cache. The vocabulary is cut
 * into the same chunks for any number of threads, and the chunks' summaries are combined in order. So these numbers depend on
 * the row alone, like everything else here.
 */
#ifndef SELFSPEC_HEAD_H
#define SELFSPEC_HEAD_H
#include "matrices.h"

#define CHUNK 256  /* smallest chunk, in outputs */
#define CHUNKS 256 /* most chunks of a vocabulary */

typedef struct {
  float best, second; /* the two largest logits */
  float sum, moment;  /* sums of e^(logit - best), and of that times (logit - best) */
  int64_t token;      /* the first token whose logit is `best` */
} Summary;

INLINE int64_t chunk_size(int64_t out) {
  int64_t size = (out + CHUNKS - 1) / CHUNKS;
  return size <= CHUNK ? CHUNK : (size + WIDEST - 1) / WIDEST * WIDEST;
}

INLINE int64_t chunk_count(int64_t out) { return (out + chunk_size(out) - 1) / chunk_size(out); }

/* Summarise `count` logits, followed by space for LANES more. first: their first token. Any NaN makes `best` NaN. */
static Summary summarise(float *logits, int64_t count, int64_t first, int spread) {
  for (int64_t i = count; i < count + LANES; i++) logits[i] = -INFINITY;
  vf best = splat(-INFINITY), second = best;
  vi nans = {0}, where = {0}, here; /* where each lane's largest logit is */
  for (int i = 0; i < LANES; i++) here[i] = i;
  for (int64_t i = 0; i < count; i += LANES, here += LANES) {
    vf v = load(logits + i);
    vi larger = v > best;
    vf lower = choose(larger, best, v);
    nans |= v != v;
    where = (here & larger) | (where & ~larger);
    best = choose(larger, v, best);
    second = choose(lower > second, lower, second);
  }
  float peaks[LANES], seconds[LANES];
  int32_t places[LANES], any_nan[LANES], has_nan = 0;
  store(peaks, best);
  store(seconds, second);
  memcpy(places, &where, sizeof places);
  memcpy(any_nan, &nans, sizeof any_nan);
  Summary s = {-INFINITY, -INFINITY, 0, 0, first};
  int64_t place = 0;
  for (int i = 0; i < LANES; i++) {
    has_nan |= any_nan[i];
    if (peaks[i] > s.best) {
      s.second = s.best > seconds[i] ? s.best : seconds[i];
      s.best = peaks[i], place = places[i];
    } else {
      if (peaks[i] == s.best && places[i] < place) place = places[i];
      if (peaks[i] > s.second) s.second = peaks[i];
    }
  }
  s.token = first + place;
  if (has_nan) {
    s.best = NAN;
    return s;
  }
  if (!spread || s.best == -INFINITY) return s;
  vf sums = {0}, moments = {0};
  for (int64_t i = 0; i < count; i += LANES) {
    vf below = load(logits + i) - s.best;
    below = choose(below < -1000.0f, splat(-1000.0f), below); /* finite, so that its product with e^-infinity = 0 is 0 */
    vf e = exponential(below);
    sums += e;
    moments += below * e;
  }
  s.sum = sum(sums);
  s.moment = sum(moments);
  return s;
}

/* Combine a row's chunk summaries. */
static Summary combined(const Summary *chunks, int64_t count, int spread) {
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
    if (chunks[c].sum == 0) continue; /* all its tokens are masked */
    float below = chunks[c].best - s.best, factor = expf(below);
    s.sum += factor * chunks[c].sum;
    if (factor > 0) s.moment += factor * (chunks[c].moment + below * chunks[c].sum);
  }
  return s;
}
#endif
