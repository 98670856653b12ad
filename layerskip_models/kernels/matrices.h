/* A matrix of weights, and four of its outputs for a few rows: the loop in which nearly all time goes. */
#ifndef SELFSPEC_MATRICES_H
#define SELFSPEC_MATRICES_H
#include "vectors.h"

enum Kind { FLOAT32, BFLOAT16, FLOAT16, INT8 }; /* of a weight's numbers; `KINDS` in library.py */

typedef struct {
  const void *weight; /* [out, in] */
  const float *scale; /* [out], factors of 8-bit weights, or NULL */
  const float *bias;  /* [out] or NULL */
  int64_t kind, in, out;
} Matrix;

INLINE int64_t bytes_of(int64_t kind) { return kind == FLOAT32 ? 4 : kind == INT8 ? 1 : 2; }

#define BLOCK 4  /* outputs that are computed side by side, so that an input is loaded once for them */
#define GROUP 32 /* outputs for all of which some rows are computed before the next: their weights then come from the cache */
#define GROUP_BYTES (64 << 10) /* of their weights, at most: these and the next group's stay in the second cache */
#define LINE 64 /* bytes that memory delivers together */
#define AHEAD 4096 /* bytes; what memory delivers while it is waited for */
#define ROWS 6   /* that a weight serves at once, with sums in registers */
#define SIDE(R) (MANY_REGISTERS || R <= 3 ? BLOCK : BLOCK / 2) /* outputs whose sums are in registers together */
#define PROMPT_ROWS 32 /* from which on, with few registers, three rows at once are faster: they stay in the nearest cache */

/* Weights that are fetched while others are computed with: left alone, processors do that too late, at every row of the matrix
 * anew. Where rows take turns with a group's weights, each turn fetches its share of the next group's lines of 64 bytes, so that
 * memory is never idle. Small enough for a register. */
typedef struct {
  int32_t ahead;       /* outputs further on; 0: nothing is fetched */
  int16_t mask, place; /* lines whose place in bytes, modulo a power of two, is `place` */
} Fetch;

INLINE Fetch fetch_of_turn(int64_t turn, int64_t turns, int64_t ahead) {
  static const int16_t of_two[] = {0, 64}, of_three[] = {0, 128, 64}, of_four[] = {0, 128, 64, 192};
  if (turns == 1) return (Fetch){turn ? 0 : (int32_t)ahead, 63, 0};
  if (turns == 2) return (Fetch){(int32_t)ahead, 127, of_two[turn]};
  if (turns == 3) return (Fetch){(int32_t)ahead, turn == 2 ? 127 : 255, of_three[turn]};
  int64_t part = 4 * turn / turns;
  return (Fetch){part == 4 * (turn + 1) / turns ? 0 : (int32_t)ahead, 255, of_four[part]};
}

/* LANES inputs of R rows and SIDE(R) outputs. */
#define STEP(KIND, R) \
  do { \
    vf weights[SIDE(R)]; \
    UNROLL for (int o = 0; o < SIDE(R); o++) weights[o] = load_##KIND(w + o * in + i); \
    UNROLL for (int r = 0; r < R; r++) { \
      vf row = load(x + i * R + r * LANES); \
      UNROLL for (int o = 0; o < SIDE(R); o++) total[o][r] = multiply_add(weights[o], row, total[o][r]); \
    } \
  } while (0)

/* y[r * BLOCK + o] = weight[o] . x[r] for BLOCK outputs and R rows. x is packed (see `pack`). */
#define DOTS(T, KIND, R) \
  INLINE void dots_##KIND##_##R(const T *w, const float *x, int64_t in, Fetch fetch, float *y) { \
    for (int side = 0; side < BLOCK; side += SIDE(R), w += SIDE(R) * in, y += SIDE(R)) { \
      vf total[BLOCK][R]; \
      UNROLL for (int o = 0; o < BLOCK; o++) UNROLL for (int r = 0; r < R; r++) total[o][r] = (vf){0}; \
      int64_t i = 0, line = LINE / sizeof(T), place = 0; \
      for (; i + line <= in; place += LINE) { \
        if (fetch.ahead && (place & fetch.mask) == fetch.place) \
          UNROLL for (int o = 0; o < SIDE(R); o++) __builtin_prefetch(w + (o + fetch.ahead) * in + i); \
        UNROLL for (int k = 0; k < (int)(LINE / sizeof(T) / LANES); k++, i += LANES) STEP(KIND, R); \
      } \
      for (; i + LANES <= in; i += LANES) STEP(KIND, R); \
      UNROLL for (int r = 0; r < R; r++) { \
        float sums[BLOCK]; \
        sum_4(total[0][r], total[1][r], total[2][r], total[3][r], sums); \
        UNROLL for (int o = 0; o < SIDE(R); o++) y[r * BLOCK + o] = sums[o]; \
      } \
      for (int64_t j = i; j < in; j++) \
        for (int r = 0; r < R; r++) \
          for (int o = 0; o < SIDE(R); o++) { \
            float *sum = y + r * BLOCK + o; \
            *sum = multiply_add_1(one_##KIND(w + o * in + j), x[i * R + r * (in - i) + j - i], *sum); \
          } \
    } \
  }
#define DOTS_OF(T, KIND) \
  DOTS(T, KIND, 1) DOTS(T, KIND, 2) DOTS(T, KIND, 3) DOTS(T, KIND, 4) DOTS(T, KIND, 5) DOTS(T, KIND, 6) \
  static void dots_##KIND(const T *w, const float *x, int64_t rows, int64_t in, Fetch fetch, float *y) { \
    switch (rows) { \
    case 1: dots_##KIND##_1(w, x, in, fetch, y); break; \
    case 2: dots_##KIND##_2(w, x, in, fetch, y); break; \
    case 3: dots_##KIND##_3(w, x, in, fetch, y); break; \
    case 4: dots_##KIND##_4(w, x, in, fetch, y); break; \
    case 5: dots_##KIND##_5(w, x, in, fetch, y); break; \
    default: dots_##KIND##_6(w, x, in, fetch, y); \
    } \
  }
DOTS_OF(float, float32)
DOTS_OF(uint16_t, bfloat16)
DOTS_OF(uint16_t, float16)
DOTS_OF(int8_t, int8)

/* The weight of one output and one input. */
INLINE float one(const Matrix *m, int64_t at) {
  switch (m->kind) {
  case FLOAT32: return one_float32((const float *)m->weight + at);
  case BFLOAT16: return one_bfloat16((const uint16_t *)m->weight + at);
  case FLOAT16: return one_float16((const uint16_t *)m->weight + at);
  default: return one_int8((const int8_t *)m->weight + at);
  }
}

/* Rows one behind the other become steps of LANES inputs of all rows: read in order, and not, as rows a power of two apart
 * would be, from the same few places of the cache. Inputs that fill no step come last, row by row. */
INLINE int64_t packed_place(int64_t r, int64_t i, int64_t rows, int64_t in) {
  int64_t whole = in / LANES * LANES;
  return i < whole ? i / LANES * LANES * rows + r * LANES + i % LANES : whole * rows + r * (in - whole) + i - whole;
}

static void pack(const float *x, int64_t rows, int64_t in, float *packed) {
  int64_t i = 0;
  for (; i + LANES <= in; i += LANES)
    for (int64_t r = 0; r < rows; r++, packed += LANES) store(packed, load(x + r * in + i));
  for (int64_t r = 0; r < rows; r++)
    for (int64_t j = i; j < in; j++) *packed++ = x[r * in + j];
}

/* How many rows from `r` on go through a weight together: few, and about equally many each time. */
INLINE int64_t turns_of(int64_t rows) {
  int64_t most = MANY_REGISTERS || rows < PROMPT_ROWS ? ROWS : ROWS / 2;
  return (rows + most - 1) / most;
}
INLINE int64_t together(int64_t r, int64_t rows) {
  int64_t turns = turns_of(rows), size = (rows + turns - 1) / turns;
  return least(size, rows - r);
}

/* y[r * BLOCK + o] of outputs first .. first + BLOCK - 1 and at most ROWS rows; outputs behind the matrix's last are not
 * touched. Scaled, with bias. */
static void outputs(const Matrix *m, int64_t first, const float *x, int64_t rows, Fetch fetch, float *y) {
  const char *w = (const char *)m->weight + first * m->in * bytes_of(m->kind);
  int64_t count = least(BLOCK, m->out - first);
  if (count == BLOCK) {
    switch (m->kind) {
    case FLOAT32: dots_float32((const float *)w, x, rows, m->in, fetch, y); break;
    case BFLOAT16: dots_bfloat16((const uint16_t *)w, x, rows, m->in, fetch, y); break;
    case FLOAT16: dots_float16((const uint16_t *)w, x, rows, m->in, fetch, y); break;
    default: dots_int8((const int8_t *)w, x, rows, m->in, fetch, y);
    }
  } else {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t o = 0; o < count; o++) {
        float result = 0;
        for (int64_t i = 0; i < m->in; i++)
          result = multiply_add_1(one(m, (first + o) * m->in + i), x[packed_place(r, i, rows, m->in)], result);
        y[r * BLOCK + o] = result;
      }
  }
  if (!m->scale && !m->bias) return;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t o = 0; o < count; o++) {
      if (m->scale) y[r * BLOCK + o] *= m->scale[first + o];
      if (m->bias) y[r * BLOCK + o] += m->bias[first + o];
    }
}

/* Outputs first .. first + count - 1 of a matrix. */
INLINE Matrix some_of(const Matrix *m, int64_t first, int64_t count) {
  const char *weight = (const char *)m->weight + first * m->in * bytes_of(m->kind);
  return (Matrix){weight, m->scale ? m->scale + first : NULL, m->bias ? m->bias + first : NULL, m->kind, m->in, count};
}

#define WIDEN(T, KIND) \
  static void widen_##KIND(const T *w, int64_t count, float *y) { \
    int64_t i = 0; \
    for (; i + LANES <= count; i += LANES) store(y + i, load_##KIND(w + i)); \
    for (; i < count; i++) y[i] = one_##KIND(w + i); \
  }
WIDEN(uint16_t, bfloat16)
WIDEN(uint16_t, float16)
WIDEN(int8_t, int8)

/* The same matrix of 16- or 8-bit weights with these as float32, in `room`. */
static Matrix widened(const Matrix *m, float *room) {
  Matrix wide = *m;
  int64_t count = m->out * m->in;
  switch (m->kind) {
  case BFLOAT16: widen_bfloat16(m->weight, count, room); break;
  case FLOAT16: widen_float16(m->weight, count, room); break;
  default: widen_int8(m->weight, count, room);
  }
  wide.weight = room;
  wide.kind = FLOAT32;
  return wide;
}

/* How many outputs before their use weights are fetched where rows take so many turns with a group of `group` outputs. */
INLINE int64_t outputs_ahead(const Matrix *m, int64_t turns, int64_t group) {
  int64_t bytes = BLOCK * m->in * bytes_of(m->kind);
  return turns > 1 ? group : (AHEAD + bytes - 1) / bytes * BLOCK;
}
#endif
