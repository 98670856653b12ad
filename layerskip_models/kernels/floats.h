/* Rows as floats: products with weights of any kind, four outputs and a few rows at a time. */
#ifndef SELFSPEC_FLOATS_H
#define SELFSPEC_FLOATS_H
#include "matrix.h"

/* Multiply-add LANES inputs for R rows and SIDE(R) outputs. */
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
      vf total[4][R]; \
      UNROLL for (int o = 0; o < 4; o++) UNROLL for (int r = 0; r < R; r++) total[o][r] = (vf){0}; \
      int64_t i = 0, line = LINE / sizeof(T), place = 0; \
      for (; i + line <= in; place += LINE) { \
        if (fetch.ahead && (place & fetch.mask) == fetch.place) \
          UNROLL for (int o = 0; o < SIDE(R); o++) FETCH(w + (o + fetch.ahead) * in + i); \
        UNROLL for (int k = 0; k < (int)(LINE / sizeof(T) / LANES); k++, i += LANES) STEP(KIND, R); \
      } \
      for (; i + LANES <= in; i += LANES) STEP(KIND, R); \
      UNROLL for (int r = 0; r < R; r++) { \
        float sums[4]; \
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

/* Scale and offset that decode 4-bit weights, for one output and 32 inputs. */
typedef struct {
  float scale, offset;
} Group;

/* i: first input, a multiple of 32. */
INLINE Group group_of_inputs(const Matrix *m, int64_t output, int64_t i) {
  int64_t at = output * (m->in / m->group) + i / m->group;
  float scale = one_float16(m->groups + at);
  return (Group){scale, m->offsets ? m->offsets[at] : -8 * scale};
}

/* LANES weights of one output from input i on; they must not cross a multiple of 32 inputs. w: the output's weights. */
INLINE vf load_int4(const uint8_t *w, int64_t i, Group group) {
  vi q = load_bytes(w + i / 64 * 32 + i % 32) >> (i & 32 ? 4 : 0) & 15;
  return multiply_add(splat(group.scale), __builtin_convertvector(q, vf), splat(group.offset));
}

/* DOTS for 4-bit weights. The number of inputs must be a multiple of 64. */
#define DOTS_INT4(R) \
  INLINE void dots_int4_##R(const Matrix *m, int64_t first, const float *x, Fetch fetch, float *y) { \
    const uint8_t *w = (const uint8_t *)m->weight + first * (m->in / 2); \
    for (int side = 0; side < BLOCK; side += SIDE(R), w += SIDE(R) * (m->in / 2), y += SIDE(R)) { \
      vf total[4][R]; \
      UNROLL for (int o = 0; o < 4; o++) UNROLL for (int r = 0; r < R; r++) total[o][r] = (vf){0}; \
      for (int64_t i = 0; i < m->in;) { \
        Group groups[SIDE(R)]; \
        if (fetch.ahead && !(i & 64) && (i / 2 & fetch.mask) == fetch.place) \
          UNROLL for (int o = 0; o < SIDE(R); o++) FETCH(w + ((o + fetch.ahead) * m->in + i) / 2); \
        UNROLL for (int o = 0; o < SIDE(R); o++) groups[o] = group_of_inputs(m, first + side + o, i); \
        for (int k = 0; k < 32 / LANES; k++, i += LANES) { \
          vf weights[SIDE(R)]; \
          UNROLL for (int o = 0; o < SIDE(R); o++) weights[o] = load_int4(w + o * (m->in / 2), i, groups[o]); \
          UNROLL for (int r = 0; r < R; r++) { \
            vf row = load(x + i * R + r * LANES); \
            UNROLL for (int o = 0; o < SIDE(R); o++) total[o][r] = multiply_add(weights[o], row, total[o][r]); \
          } \
        } \
      } \
      UNROLL for (int r = 0; r < R; r++) { \
        float sums[4]; \
        sum_4(total[0][r], total[1][r], total[2][r], total[3][r], sums); \
        UNROLL for (int o = 0; o < SIDE(R); o++) y[r * BLOCK + o] = sums[o]; \
      } \
    } \
  }
DOTS_INT4(1) DOTS_INT4(2) DOTS_INT4(3) DOTS_INT4(4) DOTS_INT4(5) DOTS_INT4(6)
static void dots_int4(const Matrix *m, int64_t first, const float *x, int64_t rows, Fetch fetch, float *y) {
  switch (rows) {
  case 1: dots_int4_1(m, first, x, fetch, y); break;
  case 2: dots_int4_2(m, first, x, fetch, y); break;
  case 3: dots_int4_3(m, first, x, fetch, y); break;
  case 4: dots_int4_4(m, first, x, fetch, y); break;
  case 5: dots_int4_5(m, first, x, fetch, y); break;
  default: dots_int4_6(m, first, x, fetch, y);
  }
}

/* One weight as float32. */
INLINE float weight_at(const Matrix *m, int64_t output, int64_t i) {
  int64_t at = output * m->in + i;
  switch (m->kind) {
  case FLOAT32: return one_float32((const float *)m->weight + at);
  case BFLOAT16: return one_bfloat16((const uint16_t *)m->weight + at);
  case FLOAT16: return one_float16((const uint16_t *)m->weight + at);
  case INT8: return one_int8((const int8_t *)m->weight + at);
  default: {
    Group group = group_of_inputs(m, output, i / 32 * 32);
    uint8_t pair = ((const uint8_t *)m->weight)[output * (m->in / 2) + i / 64 * 32 + i % 32];
    return multiply_add_1(group.scale, pair >> (i & 32 ? 4 : 0) & 15, group.offset);
  }
  }
}

/* Packing interleaves the rows: LANES inputs of row 0, the same inputs of row 1, and so on, then the next LANES inputs. The
 * kernels then read in order, and rows that are a power of two apart do not compete for the same cache sets. Inputs that do not
 * fill LANES come last, row by row. */
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

#define WIDEN(T, KIND) \
  static void widen_##KIND(const T *w, int64_t count, float *y) { \
    int64_t i = 0; \
    for (; i + LANES <= count; i += LANES) store(y + i, load_##KIND(w + i)); \
    for (; i < count; i++) y[i] = one_##KIND(w + i); \
  }
WIDEN(uint16_t, bfloat16)
WIDEN(uint16_t, float16)
WIDEN(int8_t, int8)

static void widen_int4(const Matrix *m, float *y) {
  for (int64_t o = 0; o < m->out; o++)
    for (int64_t i = 0; i < m->in;) {
      Group group = group_of_inputs(m, o, i);
      for (int k = 0; k < 32 / LANES; k++, i += LANES)
        store(y + o * m->in + i, load_int4((const uint8_t *)m->weight + o * (m->in / 2), i, group));
    }
}

/* A copy of a 16-, 8- or 4-bit matrix with its weights converted to float32, in `scratch`. */
static Matrix widened(const Matrix *m, float *scratch) {
  Matrix wide = *m;
  int64_t count = m->out * m->in;
  switch (m->kind) {
  case BFLOAT16: widen_bfloat16(m->weight, count, scratch); break;
  case FLOAT16: widen_float16(m->weight, count, scratch); break;
  case INT8: widen_int8(m->weight, count, scratch); break;
  default: widen_int4(m, scratch);
  }
  wide.weight = scratch;
  wide.kind = FLOAT32;
  return wide;
}
#endif
