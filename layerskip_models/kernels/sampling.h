/* Sampling: a row of logits becomes probabilities, of all tokens or of the likeliest, and a token is drawn from such weights.
 *
 * The warpers are transformers' in its order: temperature, top-k, top-p. What they leave out gets a probability of 0. A row is
 * computed alone and by one thread, so its numbers depend on nothing else.
 */
#ifndef SELFSPEC_SAMPLING_H
#define SELFSPEC_SAMPLING_H
#include "vectors.h"
#include <stdlib.h>

#define SUMMED 256 /* weights that are added up together: in float32 by `distribute`, in float64 by `draw` */

typedef struct {
  float weight;
  int32_t token;
} Candidate;

/* The k-th largest of n finite or infinite numbers. heap: scratch, [k]; its first number is the smallest of the k largest so far. */
static float kth_largest(const float *x, int64_t n, int64_t k, float *heap) {
  int64_t held = 0;
  for (int64_t i = 0; i < n; i++) {
    if (held == k) { /* usually nothing comes in any more */
      vf root = splat(heap[0]);
      for (; i + LANES <= n; i += LANES) {
        vi larger = load(x + i) > root;
        int32_t lanes[LANES], any = 0;
        memcpy(lanes, &larger, sizeof lanes);
        for (int l = 0; l < LANES; l++) any |= lanes[l];
        if (any) break;
      }
      if (i >= n) break;
      if (!(x[i] > heap[0])) continue;
    }
    int64_t at;
    if (held < k) { /* up from the last place */
      for (at = held++; at && heap[(at - 1) / 2] > x[i]; at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    } else { /* down from the first, whose number leaves */
      for (at = 0;;) {
        int64_t child = 2 * at + 1;
        if (child >= k) break;
        if (child + 1 < k && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= x[i]) break;
        heap[at] = heap[child], at = child;
      }
    }
    heap[at] = x[i];
  }
  return heap[0];
}

static int by_weight(const void *a, const void *b) {
  const Candidate *x = a, *y = b;
  if (x->weight != y->weight) return x->weight < y->weight ? -1 : 1;
  return x->token < y->token ? -1 : 1;
}

/* The sum of weights[0..count), by which `draw` finds a part again. */
static double part_sum(const float *weights, int64_t count) {
  double sums[8] = {0}, sum = 0;
  int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    for (int lane = 0; lane < 8; lane++) sums[lane] += weights[i + lane];
  for (; i < count; i++) sum += weights[i];
  for (int lane = 0; lane < 8; lane++) sum += sums[lane];
  return sum;
}

static double whole_sum(const float *weights, int64_t n) {
  double sum = 0;
  for (int64_t first = 0; first < n; first += SUMMED) sum += part_sum(weights + first, min(n - first, SUMMED));
  return sum;
}

#define CLASSES 2048 /* of weights that agree in their exponent and the first three bits after the point */

INLINE int64_t class_of(float weight) {
  uint32_t bits;
  memcpy(&bits, &weight, sizeof bits);
  return bits >> 20;
}

/* Set the unlikeliest weights to 0 as long as all of these together are at most 1 - top_p of the whole; the likeliest stays. Among
 * equal ones the first go first. Weights up to 1 are put into classes, which go whole; only those in which the bound lies are put
 * in order. Returns the sum of what stays. candidates: scratch, [n]. */
static double keep_nucleus(float *weights, int64_t n, double whole, double top_p, Candidate *candidates) {
  double most = (1 - top_p) * whole, removed = 0, sums[CLASSES] = {0};
  float surely = (float)(most / (double)n * 0.999); /* n such weights together are less than `most` */
  int64_t edge = 0, last = 0, count = 0;
  for (int64_t i = 0; i < n; i++) {
    if (weights[i] >= surely && weights[i] > 0) {
      int64_t own = class_of(weights[i]);
      sums[own] += weights[i];
      if (own > last) last = own;
    } else removed += weights[i], weights[i] = 0;
  }
  while (edge < last && removed + sums[edge] <= most) removed += sums[edge++];
  for (int64_t i = 0; i < n; i++) {
    int64_t own = class_of(weights[i]);
    if (own < edge) weights[i] = 0;
    else if (own == edge && weights[i] > 0) candidates[count++] = (Candidate){weights[i], (int32_t)i};
  }
  qsort(candidates, count, sizeof *candidates, by_weight);
  for (int64_t c = 0; c < count - (edge == last) && removed + candidates[c].weight <= most; c++) {
    removed += candidates[c].weight;
    weights[candidates[c].token] = 0;
  }
  return whole_sum(weights, n);
}

/* p [n]: the probabilities. top_k: at least 1; every token as likely as the k-th stays; n or more for all. top_p: 1 or more for all.
 * candidates: scratch, [n], or NULL without top-p. NaN everywhere if a logit is NaN, or if none or an infinite one is the largest. */
static void distribute(const float *logits, int64_t n, float temperature, int64_t top_k, double top_p, float *p,
                       Candidate *candidates) {
  vf best = splat(-INFINITY);
  vi nans = {0};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    vf v = load(logits + i);
    nans |= v != v;
    best = choose(v > best, v, best);
  }
  float peaks[LANES], peak = -INFINITY;
  int32_t lanes[LANES], unusable = 0;
  store(peaks, best);
  memcpy(lanes, &nans, sizeof lanes);
  for (int l = 0; l < LANES; l++) {
    unusable |= lanes[l];
    if (peaks[l] > peak) peak = peaks[l];
  }
  for (; i < n; i++) {
    unusable |= logits[i] != logits[i];
    if (logits[i] > peak) peak = logits[i];
  }
  peak /= temperature;
  if (unusable || !(peak > -INFINITY && peak < INFINITY)) {
    for (i = 0; i < n; i++) p[i] = NAN;
    return;
  }
  float least = top_k < n ? kth_largest(logits, n, top_k, p) / temperature : -INFINITY;
  double whole = 0;
  for (int64_t first = 0; first < n; first += SUMMED) {
    int64_t end = min(first + SUMMED, n);
    vf sums = {0};
    for (i = first; i < end; i += LANES) {
      float padded[LANES];
      int64_t count = min(end - i, LANES);
      for (int l = 0; count < LANES && l < LANES; l++) padded[l] = l < count ? logits[i + l] : -INFINITY;
      vf v = (count < LANES ? load(padded) : load(logits + i)) / temperature;
      vf e = choose(v >= least, exponential(v - peak), splat(0));
      sums += e;
      if (count == LANES) store(p + i, e);
      else for (int l = 0; l < count; l++) p[i + l] = e[l];
    }
    whole += sum(sums);
  }
  if (top_p < 1) whole = keep_nucleus(p, n, whole, top_p, candidates);
  float factor = (float)(1 / whole);
  for (i = 0; i + LANES <= n; i += LANES) store(p + i, load(p + i) * factor);
  for (; i < n; i++) p[i] *= factor;
}

/* out [n]: max(0, r p - q). Returns the sum. */
static double residual(const float *p, const float *q, float r, int64_t n, float *out) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    vf v = load(p + i) * r - load(q + i);
    store(out + i, choose(v > 0, v, splat(0)));
  }
  for (; i < n; i++) {
    float v = p[i] * r - q[i];
    out[i] = v > 0 ? v : 0;
  }
  return whole_sum(out, n);
}

/* A place i, with probability weights[i] / their sum if `uniform` is uniform in [0, 1): the first up to which the sum is above
 * `uniform` of the whole. Never one of weight 0. -1 if the sum is 0, infinite or NaN. */
static int64_t draw(const float *weights, int64_t n, double uniform) {
  double whole = whole_sum(weights, n), target = uniform * whole, before = 0;
  if (!(whole > 0 && whole < INFINITY)) return -1;
  for (int64_t first = 0; first < n; first += SUMMED) {
    int64_t count = min(n - first, SUMMED), found = -1;
    double after = before + part_sum(weights + first, count);
    if (after > target) { /* true in the last part at the latest, where `after` is the whole */
      for (int64_t i = first; i < first + count && before <= target; i++) {
        before += weights[i];
        if (weights[i] > 0) found = i; /* also where these sums, added up in another order, end a little lower */
      }
      return found;
    }
    before = after;
  }
  return -1;
}

/* What a round has drafted: `count` tokens, each drawn from its row of q, or all copied, so that no others were possible. */
typedef struct {
  int64_t count, copied;
  const int64_t *tokens;
  const float *q; /* [count, n]; not read if copied */
  const double *uniforms;
  double *reached; /* [count + 1]: receives, for each i, the chance that at least the first i of these drafts are accepted */
} Drafts;

/* Block verification (Sun et al. 2025), in the words of selfspec/engine/accept.py: `reached` are its r, and `last` is where the draft
 * ends. Row i of `logits`, `stride` numbers apart, is the target's for draft i; there is one row more. p [count + 1, n]: receives the
 * distributions, as far as the drafts can matter. The token that is returned is drawn from row `accepted` of it, or from what a
 * rejection leaves of that (`left`, scratch, [n]). -1 as from `draw`. Other arguments as of `distribute` and `draw`. */
static int64_t accept_drafts(const float *logits, int64_t stride, int64_t n, float temperature, int64_t top_k, double top_p,
                             const Drafts *drafts, double uniform, float *p, Candidate *candidates, float *left,
                             int64_t *accepted) {
  double *reached = drafts->reached;
  int64_t last = 0, found = -1;
  reached[0] = 1;
  while (last == 0 || reached[last] > 0) {
    float *own = p + last * n;
    distribute(logits + last * stride, n, temperature, top_k, top_p, own, candidates);
    if (last == drafts->count) break;
    int64_t token = drafts->tokens[last];
    double of_target = own[token];
    if (of_target != of_target) break; /* no distribution: the draft ends before it */
    if (!drafts->copied) {
      double r = reached[last] * of_target / drafts->q[last * n + token];
      reached[++last] = r < 1 ? r : 1;
    } else if (drafts->uniforms[last] < of_target) {
      reached[++last] = 1;
    } else {
      memcpy(left, own, n * sizeof *left);
      left[token] = 0;
      found = draw(left, n, uniform);
      *accepted = last;
      return found < 0 ? draw(own, n, uniform) : found;
    }
  }
  *accepted = last;
  if (last == 0 || drafts->uniforms[last - 1] < reached[last]) return draw(p + last * n, n, uniform);
  while (last-- > 0) {
    double r = reached[last], sum = residual(p + last * n, drafts->q + last * n, (float)r, n, left);
    *accepted = last;
    if (last == 0 && sum == 0) return draw(p, n, uniform);
    if (last == 0 || drafts->uniforms[last - 1] * (sum + 1 - r) < sum) break;
  }
  return draw(left, n, uniform);
}
#endif
