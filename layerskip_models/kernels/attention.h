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

/* What a norm multiplies its numbers by before their weights, which are times sqrt(size). */
INLINE float norm_factor(const float *x, float eps, int64_t size) { return 1.0f / sqrtf(dot(x, x, size) + size * eps); }

static void normalise(const float *x, const float *weight, float eps, int64_t rows, int64_t size, float *y) {
  for (int64_t r = 0; r < rows; r++, x += size, y += size) {
    float factor = norm_factor(x, eps, size);
    for (int64_t i = 0; i < size; i++) y[i] = x[i] * factor * weight[i];
  }
}

/* Rotate pairs (a, b) of one head by pairs (cosine, sine), unless there are none, and multiply by scale. Fused operations are
 * written out: GCC 12 fuses these by itself when it optimises for speed (-O3), in spite of -ffp-contract=off.
 * `restrict`, or a compiler decides by the addresses at run time which of two versions it takes, and they may round otherwise. */
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
 * Positions are divided into sections, which begin at multiples of SECTION. Softmax is computed in each section by itself,
 * from the section's own largest score, and sections are joined in order. So whoever computes them, beside whatever else, a
 * query's result comes of the same operations in the same order. Keys and values are kept as float32 or bfloat16, and
 * computed with in float32 either way.
 */
#define QUERIES 32  /* of one head, at most, that keys and values serve while they are in a cache */
#define SECTION 512 /* positions; a multiple of TILE */
#define TILE 32     /* positions whose values all queries add up before the next; a multiple of LANES */
#define SMALL_TILE 16 /* the same of keys; a multiple of KEYS */
#define STRIDE (SECTION + 16) /* between two queries' scores, which then are not all in the same few places of the cache */
#define KEYS 4      /* that queries are multiplied by side by side */
#define COLUMNS 4   /* vectors of a value that are summed up side by side */
#define GROUPED (MANY_REGISTERS ? 4 : 2) /* queries that use a key or a value while it is in a register */

/* Memory that is read next, fetched step by step: `share` lines of 64 bytes at each. It may end before that. */
typedef struct {
  const char *at, *end;
  int64_t share;
} Ahead;

/* steps: in which `bytes` are fetched. p: NULL fetches nothing. */
INLINE Ahead ahead_of(const char *p, int64_t bytes, int64_t steps) {
  return (Ahead){p, p ? p + bytes : p, (bytes / 64 + steps - 1) / steps};
}

INLINE void fetch_share(Ahead *a) {
  if (a->at >= a->end) return;
  for (int64_t i = 0; i < a->share; i++) __builtin_prefetch(a->at + 64 * i, 0, 2);
  a->at += 64 * a->share;
}

/* scores[q * STRIDE + p] = query q . key p for Q queries and keys first .. last - 1, KEYS at a time: what comes behind the last
 * one is any number. Over the lanes of a query in order, then across them, whatever Q is. */
#define SCORES(T, KIND, Q) \
  INLINE void scores_##KIND##_##Q(const float *queries, const T *keys, int64_t first, int64_t last, int64_t dim, Ahead *ahead, \
                                  float *scores) { \
    for (int64_t p = first; p < last; p += KEYS) { \
      vf total[Q][KEYS]; \
      const T *at[KEYS]; /* behind the last one there may be no memory */ \
      UNROLL for (int k = 0; k < KEYS; k++) at[k] = keys + least(p + k, last - 1) * dim; \
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

/* out[q, d] += weights[q * STRIDE + p] * value p, for Q queries and values first .. last - 1, in order. */
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
          vf weight = all(weights[q * STRIDE + p]); \
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
          total = multiply_add(all(weights[q * STRIDE + p]), load_##KIND(values + p * dim + i), total); \
        store(out + q * dim + i, total); \
      } \
      for (; i < end; i++) \
        for (int64_t p = first; p < last; p++) { \
          float *total = out + q * dim + i; \
          *total = multiply_add_1(weights[q * STRIDE + p], one_##KIND(values + p * dim + i), *total); \
        } \
    } \
  }

/* Both for as many queries as are grouped. Pointers are to what belongs to position 0. */
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

/* Queries of one head, and what they attend to: query q to positions begins[q] .. ends[q] - 1, both ascending. */
typedef struct {
  const float *queries;     /* [count, dim] */
  const void *keys, *values; /* of position 0, [positions, dim] */
  int64_t count, dim, small; /* at most QUERIES; whether keys and values are bfloat16 */
  int64_t begins[QUERIES], ends[QUERIES];
} Head;

/* What queries have of some sections: for each, the largest score, the sum of e^(score - largest), and the values' sum with
 * these weights. A sum of 0 is of no positions. */
typedef struct {
  float *out, *peaks, *sums; /* [count, dim], [count], [count] */
} Part;

#define PART(count, dim) ((count) * ((dim) + 2)) /* numbers of one */
INLINE Part part_at(float *p, int64_t count, int64_t dim) {
  return (Part){p, p + count * dim, p + count * dim + count};
}

INLINE const char *position_of(const Head *h, const void *numbers, int64_t position) {
  return (const char *)numbers + position * h->dim * (h->small ? 2 : 4);
}

/* Scores of a tile for all queries, those that no query asks for included where a step of KEYS takes them along. */
static void score_tile(const Head *h, int64_t first, int64_t last, Ahead *ahead, float *scores) {
  for (int64_t q = 0, size; q < h->count; q += size) {
    size = least(GROUPED, h->count - q);
    int64_t from = most(first, h->begins[q] / KEYS * KEYS), end = least(last, h->ends[q + size - 1]);
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

/* Numbers begin .. end - 1 of the values of a tile, for all queries. Where grouped ones differ in what they attend to, each takes
 * that by itself: behind its end there may be anything, and nothing times 0 is not always 0. */
static void add_tile(const Head *h, int64_t first, int64_t last, int64_t begin, int64_t end, Ahead *ahead, const float *weights,
                     float *out) {
  for (int64_t q = 0, size; q < h->count; q += size) {
    size = least(GROUPED, h->count - q);
    int64_t from = most(first, h->begins[q + size - 1]), to = least(last, h->ends[q]);
    if (from > to) from = to = last;
    for (int64_t i = q; i < q + size && (from > first || to < last); i++)
      add_values(h, i, 1, most(first, h->begins[i]), least(from, h->ends[i]), begin, end, ahead, weights, out);
    add_values(h, q, size, from, to, begin, end, ahead, weights, out);
    for (int64_t i = q; i < q + size && to < last; i++)
      add_values(h, i, 1, most(to, h->begins[i]), least(last, h->ends[i]), begin, end, ahead, weights, out);
  }
}

/* From scores of positions begin .. end - 1 of a section their weights, in place, the largest score, and the weights' sum. Vectors
 * of them begin at the same positions for every query. */
static void weigh(float *scores, int64_t begin, int64_t end, float *peak, float *sum_of) {
  int64_t from = begin / LANES * LANES, to = (end + LANES - 1) / LANES * LANES;
  for (int64_t p = from; p < begin; p++) scores[p] = -INFINITY; /* nothing comes of these */
  for (int64_t p = end; p < to; p++) scores[p] = -INFINITY;
  vf highest[2] = {all(-INFINITY), all(-INFINITY)}, total = {0};
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

/* One section, which begins at position `section`. next: what is read after it, or NULL. room: for QUERIES * STRIDE numbers. */
static void attend_section(const Head *h, int64_t section, const char *next, float *room, Part part) {
  int64_t groups = (h->count + GROUPED - 1) / GROUPED, bytes = h->dim * (h->small ? 2 : 4);
  int64_t first = most(section, h->begins[0] / TILE * TILE), last = least(section + SECTION, h->ends[h->count - 1]);
  float *scores = room - section;
  for (int64_t tile = first; tile < last; tile += SMALL_TILE) {
    const char *then = position_of(h, h->keys, tile + TILE);
    if (tile + TILE >= last) then = position_of(h, h->values, first + (tile + TILE - last) / SMALL_TILE * SMALL_TILE);
    Ahead ahead = ahead_of(then, SMALL_TILE * bytes, groups * (SMALL_TILE / KEYS));
    score_tile(h, tile, least(tile + SMALL_TILE, last), &ahead, scores);
  }
  for (int64_t q = 0; q < h->count; q++) {
    int64_t begin = most(section, h->begins[q]), end = least(section + SECTION, h->ends[q]);
    if (begin < end) weigh(room + q * STRIDE, begin - section, end - section, part.peaks + q, part.sums + q);
    else part.peaks[q] = -INFINITY, part.sums[q] = 0.0f;
  }
  memset(part.out, 0, h->count * h->dim * sizeof(float));
  for (int64_t tile = first; tile < last; tile += TILE) {
    const char *then = tile + TILE < last ? position_of(h, h->values, tile + TILE) : next;
    int64_t turns = (h->dim + COLUMNS * LANES - 1) / (COLUMNS * LANES);
    Ahead ahead = ahead_of(then, TILE * bytes, groups * turns * TILE);
    for (int64_t begin = 0; begin < h->dim; begin += COLUMNS * LANES)
      add_tile(h, tile, least(tile + TILE, last), begin, least(begin + COLUMNS * LANES, h->dim), &ahead, scores, part.out);
  }
}

/* One query's later part joins what it has so far, which is changed. */
static void join_parts(float *out, float *peak, float *sum_of, const float *later, float later_peak, float later_sum, int64_t dim) {
  if (later_sum == 0.0f) return;
  if (*sum_of == 0.0f) {
    memcpy(out, later, dim * sizeof(float));
    *peak = later_peak, *sum_of = later_sum;
    return;
  }
  float top = later_peak > *peak ? later_peak : *peak;
  float ours = exponential(all(*peak - top))[0], theirs = exponential(all(later_peak - top))[0];
  for (int64_t d = 0; d < dim; d++) out[d] = multiply_add_1(later[d], theirs, out[d] * ours);
  *sum_of = multiply_add_1(later_sum, theirs, *sum_of * ours);
  *peak = top;
}

INLINE void divide_by_sum(float *out, float sum_of, int64_t dim) {
  float factor = 1.0f / sum_of;
  for (int64_t d = 0; d < dim; d++) out[d] *= factor;
}

/* The section that a position is in, by where it begins. */
INLINE int64_t section_at(int64_t position) { return position / SECTION * SECTION; }

INLINE const char *keys_behind(const Head *h, int64_t section) {
  return section + SECTION < h->ends[h->count - 1] ? position_of(h, h->keys, section + SECTION) : NULL;
}

#define ATTEND_ROOM(dim) (QUERIES * STRIDE + PART(QUERIES, dim) + 2 * QUERIES) /* numbers that `attend` needs */

/* softmax(query . keys) . values for all queries, into y, [count, dim]. */
static void attend(const Head *h, float *room, float *y) {
  float *scores = room + PART(QUERIES, h->dim) + 2 * QUERIES;
  Part whole = {y, room, room + QUERIES}, part = part_at(room + 2 * QUERIES, h->count, h->dim);
  int64_t first = section_at(h->begins[0]);
  for (int64_t section = first; section < h->ends[h->count - 1]; section += SECTION) {
    attend_section(h, section, keys_behind(h, section), scores, section == first ? whole : part);
    for (int64_t q = 0; q < h->count && section > first; q++)
      join_parts(whole.out + q * h->dim, whole.peaks + q, whole.sums + q, part.out + q * h->dim, part.peaks[q], part.sums[q],
                 h->dim);
  }
  for (int64_t q = 0; q < h->count; q++) divide_by_sum(y + q * h->dim, whole.sums[q], h->dim);
}

#endif
