/* A decoder layer without its matrix products: norms, rotary embedding, attention. */
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

/* A norm's factor, applied before its weights, which are premultiplied by sqrt(size). */
INLINE float norm_factor(const float *x, float eps, int64_t size) { return 1.0f / sqrtf(dot(x, x, size) + size * eps); }

static void normalise(const float *x, const float *weight, float eps, int64_t rows, int64_t size, float *y) {
  for (int64_t r = 0; r < rows; r++, x += size, y += size) {
    float factor = norm_factor(x, eps, size);
    for (int64_t i = 0; i < size; i++) y[i] = x[i] * factor * weight[i];
  }
}

/* Rotate one head's pairs (a, b) by pairs (cosine, sine), if given, and multiply by scale. The fused operations are explicit,
 * because GCC 12 fuses them itself at -O3 in spite of -ffp-contract=off. `restrict`, because a compiler may otherwise emit two
 * versions that round differently and choose one at run time by the addresses. */
INLINE void rotate(const float *restrict x, const float *restrict rotary, float scale, int64_t size, float *restrict y) {
  if (!rotary) {
    for (int64_t i = 0; i < size; i++) y[i] = x[i] * scale;
    return;
  }
  for (int64_t i = 0; i < size; i += 2) {
    float a = x[i], b = x[i + 1], c = rotary[i], s = rotary[i + 1];
    y[i] = multiply_add_1(-b, s, a * c) * scale;
    y[i + 1] = multiply_add_1(b, c, a * s) * scale;
  }
}

/* ---- Attention ------------------------------------------------------------------------------------------------------
 *
 * Positions are divided into sections that begin at multiples of SECTION. Each section's softmax is computed relative to its own
 * largest score, and sections are joined in order. So a query's result is the same operations in the same order, whichever
 * threads compute it and whatever else they compute. Keys and values are stored as float32 or bfloat16; arithmetic is in float32.
 */
#define QUERIES 32  /* most queries of one KV head that share keys and values while these are in a cache */
#define SECTION 512 /* positions; a multiple of TILE */
#define TILE 32     /* positions: all queries add up a tile's values before the next tile; a multiple of LANES */
#define SMALL_TILE 16 /* the same for keys; a multiple of KEYS */
#define STRIDE (SECTION + 16) /* between two queries' scores; no power of two, so that they do not share the same cache sets */
#define KEYS 4      /* keys multiplied side by side */
#define COLUMNS 4   /* vectors of a value summed side by side */
#define GROUPED (MANY_REGISTERS ? 4 : 2) /* queries that share a key or a value while it is in a register */

/* Memory to prefetch, `share` cache lines (64 bytes) per step. It may end before the steps do. */
typedef struct {
  const char *at, *end;
  int64_t share;
} Ahead;

/* Fetch `bytes` from p in `steps` steps; nothing if p is NULL. */
INLINE Ahead ahead_of(const char *p, int64_t bytes, int64_t steps) {
  return (Ahead){p, p ? p + bytes : p, (bytes / 64 + steps - 1) / steps};
}

INLINE void fetch_share(Ahead *a) {
  if (a->at >= a->end) return;
  for (int64_t i = 0; i < a->share; i++) __builtin_prefetch(a->at + 64 * i, 0, 2);
  a->at += 64 * a->share;
}

/* scores[q * STRIDE + p] = query q . key p for Q queries and keys first .. last - 1, KEYS at a time, so up to KEYS - 1 scores past
 * the last are garbage. Sums run along each lane in order, then across lanes, whatever Q is. */
#define SCORES(T, KIND, Q) \
  INLINE void scores_##KIND##_##Q(const float *queries, const T *keys, int64_t first, int64_t last, int64_t dim, Ahead *ahead, \
                                  float *scores) { \
    for (int64_t p = first; p < last; p += KEYS) { \
      vf total[Q][KEYS]; \
      const T *at[KEYS]; /* there may be no memory past the last key */ \
      UNROLL for (int k = 0; k < KEYS; k++) at[k] = keys + min(p + k, last - 1) * dim; \
      UNROLL for (int q = 0; q < Q; q++) UNROLL for (int k = 0; k < KEYS; k++) total[q][k] = (vf){0}; \
      fetch_share(ahead); \
      int64_t i = 0; \
      for (; i + LANES <= dim; i += LANES) { \
        vf key[KEYS]; \
        UNROLL for (int k = 0; k < KEYS; k++) key[k] = load_##KIND(at[k] + i); \
        UNROLL for (int q = 0; q < Q; q++) { \
          vf x = load(queries + q * dim + i); \
          UNROLL for (int k = 0; k < KEYS; k++) total[q][k] = multiply_add(x, key[k], total[q][k]); \
        } \
      } \
      UNROLL for (int q = 0; q < Q; q++) sum_4(total[q][0], total[q][1], total[q][2], total[q][3], scores + q * STRIDE + p); \
      for (; i < dim; i++) \
        for (int q = 0; q < Q; q++) \
          for (int k = 0; k < KEYS; k++) { \
            float *score = scores + q * STRIDE + p + k; \
            *score = multiply_add_1(queries[q * dim + i], one_##KIND(at[k] + i), *score); \
          } \
    } \
  }

/* out[q, d] += weights[q * STRIDE + p] * value p for Q queries, d in begin .. end - 1, and values first .. last - 1 in order. */
#define SUMS(T, KIND, Q) \
  INLINE void sums_##KIND##_##Q(const float *weights, const T *values, int64_t first, int64_t last, int64_t dim, int64_t begin, \
                                int64_t end, Ahead *ahead, float *out) { \
    int64_t d = begin; \
    for (; d + COLUMNS * LANES <= end; d += COLUMNS * LANES) { \
      vf total[Q][COLUMNS]; \
      UNROLL for (int q = 0; q < Q; q++) \
        UNROLL for (int k = 0; k < COLUMNS; k++) total[q][k] = load(out + q * dim + d + k * LANES); \
      for (int64_t p = first; p < last; p++) { \
        vf value[COLUMNS]; \
        fetch_share(ahead); \
        UNROLL for (int k = 0; k < COLUMNS; k++) value[k] = load_##KIND(values + p * dim + d + k * LANES); \
        UNROLL for (int q = 0; q < Q; q++) { \
          vf weight = splat(weights[q * STRIDE + p]); \
          UNROLL for (int k = 0; k < COLUMNS; k++) total[q][k] = multiply_add(weight, value[k], total[q][k]); \
        } \
      } \
      UNROLL for (int q = 0; q < Q; q++) \
        UNROLL for (int k = 0; k < COLUMNS; k++) store(out + q * dim + d + k * LANES, total[q][k]); \
    } \
    for (int q = 0; q < Q; q++) { \
      int64_t i = d; \
      for (; i + LANES <= end; i += LANES) { \
        vf total = load(out + q * dim + i); \
        for (int64_t p = first; p < last; p++) \
          total = multiply_add(splat(weights[q * STRIDE + p]), load_##KIND(values + p * dim + i), total); \
        store(out + q * dim + i, total); \
      } \
      for (; i < end; i++) \
        for (int64_t p = first; p < last; p++) { \
          float *total = out + q * dim + i; \
          *total = multiply_add_1(weights[q * STRIDE + p], one_##KIND(values + p * dim + i), *total); \
        } \
    } \
  }

/* Both of these for a group of `size` queries. Pointers are to position 0. */
#define GROUPS(T, KIND) \
  SCORES(T, KIND, 1) SCORES(T, KIND, 2) SCORES(T, KIND, 3) SCORES(T, KIND, 4) \
  SUMS(T, KIND, 1) SUMS(T, KIND, 2) SUMS(T, KIND, 3) SUMS(T, KIND, 4) \
  static void scores_##KIND(int64_t size, const float *queries, const void *keys, int64_t first, int64_t last, int64_t dim, \
                            Ahead *ahead, float *scores) { \
    switch (size) { \
    case 1: scores_##KIND##_1(queries, keys, first, last, dim, ahead, scores); break; \
    case 2: scores_##KIND##_2(queries, keys, first, last, dim, ahead, scores); break; \
    case 3: scores_##KIND##_3(queries, keys, first, last, dim, ahead, scores); break; \
    default: scores_##KIND##_4(queries, keys, first, last, dim, ahead, scores); \
    } \
  } \
  static void sums_##KIND(int64_t size, const float *weights, const void *values, int64_t first, int64_t last, int64_t dim, \
                          int64_t begin, int64_t end, Ahead *ahead, float *out) { \
    switch (size) { \
    case 1: sums_##KIND##_1(weights, values, first, last, dim, begin, end, ahead, out); break; \
    case 2: sums_##KIND##_2(weights, values, first, last, dim, begin, end, ahead, out); break; \
    case 3: sums_##KIND##_3(weights, values, first, last, dim, begin, end, ahead, out); break; \
    default: sums_##KIND##_4(weights, values, first, last, dim, begin, end, ahead, out); \
    } \
  }
GROUPS(float, float32)
GROUPS(uint16_t, bfloat16)

/* Queries of one KV head. Query q attends to positions begins[q] .. ends[q] - 1; both arrays ascend. */
typedef struct {
  const float *queries;     /* [count, dim] */
  const void *keys, *values; /* [positions, dim], from position 0 */
  int64_t count, dim, small; /* count: at most QUERIES; small: keys and values are bfloat16 */
  int64_t begins[QUERIES], ends[QUERIES];
} Head;

/* Queries' partial results over some sections: for each query the largest score, the sum of e^(score - largest), and the sum of
 * values weighted by these. A sum of 0 means no positions. */
typedef struct {
  float *out, *peaks, *sums; /* [count, dim], [count], [count] */
} Part;

#define PART(count, dim) ((count) * ((dim) + 2)) /* floats in a Part */
INLINE Part part_at(float *p, int64_t count, int64_t dim) {
  return (Part){p, p + count * dim, p + count * dim + count};
}

INLINE const char *position_of(const Head *h, const void *numbers, int64_t position) {
  return (const char *)numbers + position * h->dim * (h->small ? 2 : 4);
}

/* A tile's scores for all queries, including unneeded ones where the tile's ends or a step of KEYS bring them along. */
static void score_tile(const Head *h, int64_t first, int64_t last, Ahead *ahead, float *scores) {
  for (int64_t q = 0, size; q < h->count; q += size) {
    size = min(GROUPED, h->count - q);
    int64_t from = max(first, h->begins[q] / KEYS * KEYS), end = min(last, h->ends[q + size - 1]);
    if (h->small) scores_bfloat16(size, h->queries + q * h->dim, h->keys, from, end, h->dim, ahead, scores + q * STRIDE);
    else scores_float32(size, h->queries + q * h->dim, h->keys, from, end, h->dim, ahead, scores + q * STRIDE);
  }
}

INLINE void add_values(const Head *h, int64_t q, int64_t size, int64_t first, int64_t last, int64_t begin, int64_t end,
                       Ahead *ahead, const float *weights, float *out) {
  if (first >= last) return;
  weights += q * STRIDE, out += q * h->dim;
  if (h->small) sums_bfloat16(size, weights, h->values, first, last, h->dim, begin, end, ahead, out);
  else sums_float32(size, weights, h->values, first, last, h->dim, begin, end, ahead, out);
}

/* Add elements begin .. end - 1 of a tile's values, for all queries. Where the queries of a group attend to different positions,
 * each adds those by itself: memory past a query's end may hold anything, and NaN or infinity times 0 is not 0. */
static void add_tile(const Head *h, int64_t first, int64_t last, int64_t begin, int64_t end, Ahead *ahead, const float *weights,
                     float *out) {
  for (int64_t q = 0, size; q < h->count; q += size) {
    size = min(GROUPED, h->count - q);
    int64_t from = max(first, h->begins[q + size - 1]), to = min(last, h->ends[q]);
    if (from > to) from = to = last;
    for (int64_t i = q; i < q + size && (from > first || to < last); i++)
      add_values(h, i, 1, max(first, h->begins[i]), min(from, h->ends[i]), begin, end, ahead, weights, out);
    add_values(h, q, size, from, to, begin, end, ahead, weights, out);
    for (int64_t i = q; i < q + size && to < last; i++)
      add_values(h, i, 1, max(to, h->begins[i]), min(last, h->ends[i]), begin, end, ahead, weights, out);
  }
}

/* Turn the scores of a section's positions begin .. end - 1 into weights in place; return the largest score and the weights' sum.
 * Vectors begin at the same positions for every query. */
static void weigh(float *scores, int64_t begin, int64_t end, float *peak, float *sum_of) {
  int64_t from = begin / LANES * LANES, to = (end + LANES - 1) / LANES * LANES;
  for (int64_t p = from; p < begin; p++) scores[p] = -INFINITY; /* these get weight 0 */
  for (int64_t p = end; p < to; p++) scores[p] = -INFINITY;
  vf highest[2] = {splat(-INFINITY), splat(-INFINITY)}, total = {0};
  for (int64_t p = from; p < to; p += LANES) {
    vf v = load(scores + p), *best = highest + (p / LANES & 1);
    *best = choose(v > *best, v, *best);
  }
  *peak = -INFINITY;
  for (int i = 0; i < 2 * LANES; i++) *peak = highest[i / LANES][i % LANES] > *peak ? highest[i / LANES][i % LANES] : *peak;
  float base = *peak == -INFINITY ? 0.0f : *peak;
  for (int64_t p = from; p < to; p += LANES) {
    vf e = exponential(load(scores + p) - base);
    store(scores + p, e);
    total += e;
  }
  *sum_of = sum(total);
}

/* One section, beginning at position `section`. next: what will be read after it, or NULL. scratch: QUERIES * STRIDE floats. */
static void attend_section(const Head *h, int64_t section, const char *next, float *scratch, Part part) {
  int64_t groups = (h->count + GROUPED - 1) / GROUPED, bytes = h->dim * (h->small ? 2 : 4);
  int64_t first = max(section, h->begins[0] / TILE * TILE), last = min(section + SECTION, h->ends[h->count - 1]);
  float *scores = scratch - section;
  for (int64_t tile = first; tile < last; tile += SMALL_TILE) {
    const char *then = position_of(h, h->keys, tile + TILE);
    if (tile + TILE >= last) then = position_of(h, h->values, first + (tile + TILE - last) / SMALL_TILE * SMALL_TILE);
    Ahead ahead = ahead_of(then, SMALL_TILE * bytes, groups * (SMALL_TILE / KEYS));
    score_tile(h, tile, min(tile + SMALL_TILE, last), &ahead, scores);
  }
  for (int64_t q = 0; q < h->count; q++) {
    int64_t begin = max(section, h->begins[q]), end = min(section + SECTION, h->ends[q]);
    if (begin < end) weigh(scratch + q * STRIDE, begin - section, end - section, part.peaks + q, part.sums + q);
    else part.peaks[q] = -INFINITY, part.sums[q] = 0.0f;
  }
  memset(part.out, 0, h->count * h->dim * sizeof(float));
  for (int64_t tile = first; tile < last; tile += TILE) {
    const char *then = tile + TILE < last ? position_of(h, h->values, tile + TILE) : next;
    int64_t turns = (h->dim + COLUMNS * LANES - 1) / (COLUMNS * LANES);
    Ahead ahead = ahead_of(then, TILE * bytes, groups * turns * TILE);
    for (int64_t begin = 0; begin < h->dim; begin += COLUMNS * LANES)
      add_tile(h, tile, min(tile + TILE, last), begin, min(begin + COLUMNS * LANES, h->dim), &ahead, scores, part.out);
  }
}

/* Merge a query's later part into its running result. */
static void join_parts(float *out, float *peak, float *sum_of, const float *later, float later_peak, float later_sum, int64_t dim) {
  if (later_sum == 0.0f) return;
  if (*sum_of == 0.0f) {
    memcpy(out, later, dim * sizeof(float));
    *peak = later_peak, *sum_of = later_sum;
    return;
  }
  float top = later_peak > *peak ? later_peak : *peak;
  float ours = exponential(splat(*peak - top))[0], theirs = exponential(splat(later_peak - top))[0];
  for (int64_t d = 0; d < dim; d++) out[d] = multiply_add_1(later[d], theirs, out[d] * ours);
  *sum_of = multiply_add_1(later_sum, theirs, *sum_of * ours);
  *peak = top;
}

INLINE void divide_by_sum(float *out, float sum_of, int64_t dim) {
  float factor = 1.0f / sum_of;
  for (int64_t d = 0; d < dim; d++) out[d] *= factor;
}

/* The first position of the section that contains `position`. */
INLINE int64_t section_at(int64_t position) { return position / SECTION * SECTION; }

INLINE const char *next_keys(const Head *h, int64_t section) {
  return section + SECTION < h->ends[h->count - 1] ? position_of(h, h->keys, section + SECTION) : NULL;
}

#define ATTEND_SCRATCH(dim) (QUERIES * STRIDE + PART(QUERIES, dim) + 2 * QUERIES) /* floats of scratch that `attend` needs */

/* y = softmax(query . keys) . values for all queries, [count, dim]. */
static void attend(const Head *h, float *scratch, float *y) {
  float *scores = scratch + PART(QUERIES, h->dim) + 2 * QUERIES;
  Part whole = {y, scratch, scratch + QUERIES}, part = part_at(scratch + 2 * QUERIES, h->count, h->dim);
  int64_t first = section_at(h->begins[0]);
  for (int64_t section = first; section < h->ends[h->count - 1]; section += SECTION) {
    attend_section(h, section, next_keys(h, section), scores, section == first ? whole : part);
    for (int64_t q = 0; q < h->count && section > first; q++)
      join_parts(whole.out + q * h->dim, whole.peaks + q, whole.sums + q, part.out + q * h->dim, part.peaks[q], part.sums[q],
                 h->dim);
  }
  for (int64_t q = 0; q < h->count; q++) divide_by_sum(y + q * h->dim, whole.sums[q], h->dim);
}

#endif
