/* What a decoder layer does besides its matrices: norms, rotary embedding, attention. */
#ifndef SELFSPEC_ATTENTION_H
#define SELFSPEC_ATTENTION_H
#include "vectors.h"

INLINE float dot(const float *a, const float *b, int64_t n) {
  vf total = {0};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) total = multiply_add(load(a + i), load(b + i), total);
  float result = sum(total);
  for (; i < n; i++) result = multiply_add_1(a[i], b[i], result);
  return result;
}

/* y[0 .. 3] = query . keys[0 .. 3]. */
INLINE void dots(const float *query, const float *keys, int64_t dim, float *y) {
  vf total[4] = {{0}};
  int64_t i = 0;
  for (; i + LANES <= dim; i += LANES) {
    vf x = load(query + i);
    UNROLL for (int k = 0; k < 4; k++) total[k] = multiply_add(x, load(keys + k * dim + i), total[k]);
  }
  sum_4(total[0], total[1], total[2], total[3], y);
  for (; i < dim; i++)
    for (int k = 0; k < 4; k++) y[k] = multiply_add_1(query[i], keys[k * dim + i], y[k]);
}

/* Memory that will soon be read; it may end before that. */
INLINE void fetch(const float *p, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(p + i);
}

/* What a norm multiplies its numbers by before their weights, which are times sqrt(size). */
INLINE float norm_factor(const float *x, float eps, int64_t size) { return 1.0f / sqrtf(dot(x, x, size) + size * eps); }

static void normalise(const float *x, const float *weight, float eps, int64_t rows, int64_t size, float *y) {
  for (int64_t r = 0; r < rows; r++, x += size, y += size) {
    float factor = norm_factor(x, eps, size);
    for (int64_t i = 0; i < size; i++) y[i] = x[i] * factor * weight[i];
  }
}

/* Rotate pairs (a, b) of one head by pairs (cosine, sine), unless there are none, and multiply by scale.
 * `restrict`, or a compiler decides by the addresses at run time which of two versions it takes, and they may round otherwise. */
INLINE void rotate(const float *restrict x, const float *restrict rotary, float scale, int64_t size, float *restrict y) {
  if (!rotary) {
    for (int64_t i = 0; i < size; i++) y[i] = x[i] * scale;
    return;
  }
  for (int64_t i = 0; i < size; i += 2) {
    float a = x[i], b = x[i + 1], c = rotary[i], s = rotary[i + 1];
    y[i] = (a * c - b * s) * scale;
    y[i + 1] = (a * s + b * c) * scale;
  }
}

#define QUERIES 8    /* of one head, that are attended together */
#define POSITIONS 64 /* whose keys or values they take turns with while these are in the cache */

/* softmax(query . keys) . values for `count` <= QUERIES queries [count, dim], query q over positions begins[q] .. ends[q] - 1,
 * both ascending, into y[q], which has room for dim numbers. scores: [count, room], room at least LANES more than the largest of
 * ends. */
static void attend(const float *queries, int64_t count, const int64_t *begins, const int64_t *ends, const float *keys,
                   const float *values, int64_t dim, int64_t room, float *scores, float **y) {
  float norms[QUERIES];
  /* Turns begin at the same positions for every query, whatever is attended with it. Within them a query's steps depend on its
   * own begin and end: so a score does not depend on its company. */
  int64_t begin = begins[0] / POSITIONS * POSITIONS, end = ends[count - 1];
  for (int64_t first = begin; first < end; first += POSITIONS)
    for (int64_t q = 0; q < count; q++) {
      int64_t last = least(first + POSITIONS, ends[q]), p = most(first, begins[q]);
      for (; p + 4 <= last; p += 4) {
        if (!q) fetch(keys + (p + POSITIONS) * dim, 4 * dim);
        dots(queries + q * dim, keys + p * dim, dim, scores + q * room + p);
      }
      for (; p < last; p++) scores[q * room + p] = dot(queries + q * dim, keys + p * dim, dim);
    }
  for (int64_t q = 0; q < count; q++) {
    float *own = scores + q * room, peak = -INFINITY;
    for (int64_t p = ends[q]; p < ends[q] + LANES; p++) own[p] = -INFINITY; /* nothing comes of these */
    vf most = all(-INFINITY);
    for (int64_t p = begins[q]; p < ends[q]; p += LANES) {
      vf v = load(own + p);
      most = choose(v > most, v, most);
    }
    for (int i = 0; i < LANES; i++) peak = most[i] > peak ? most[i] : peak;
    vf total = {0};
    for (int64_t p = begins[q]; p < ends[q]; p += LANES) {
      vf e = exponential(load(own + p) - peak);
      store(own + p, e);
      total += e;
    }
    norms[q] = 1.0f / sum(total);
    memset(y[q], 0, dim * sizeof(float));
  }
  for (int64_t first = begin; first < end; first += POSITIONS)
    for (int64_t q = 0; q < count; q++) {
      const float *own = scores + q * room;
      int64_t from = most(first, begins[q]), last = least(first + POSITIONS, ends[q]), d = 0;
      for (; d + 4 * LANES <= dim; d += 4 * LANES) {
        vf out[4];
        UNROLL for (int k = 0; k < 4; k++) out[k] = load(y[q] + d + k * LANES);
        for (int64_t p = from; p < last; p++) {
          if (!q) fetch(values + (p + POSITIONS) * dim + d, 4 * LANES);
          UNROLL for (int k = 0; k < 4; k++) out[k] = multiply_add(all(own[p]), load(values + p * dim + d + k * LANES), out[k]);
        }
        UNROLL for (int k = 0; k < 4; k++) store(y[q] + d + k * LANES, out[k]);
      }
      for (; d < dim; d++) {
        float out = y[q][d];
        for (int64_t p = from; p < last; p++) out = multiply_add_1(own[p], values[p * dim + d], out);
        y[q][d] = out;
      }
    }
  for (int64_t q = 0; q < count; q++)
    for (int64_t d = 0; d < dim; d++) y[q][d] *= norms[q];
}

#endif
