/* Rows as floats: products with weights in groups, four outputs and a few rows at a time. */
#ifndef SELFSPEC_FLOATS_H
#define SELFSPEC_FLOATS_H
#include "matrix.h"

#define FLOAT_ROWS 6 /* most rows multiplied by a weight at once, with the sums in registers */
#define SIDE(R) (MANY_REGISTERS || R <= 3 ? 4 : 2) /* outputs whose sums are in registers at the same time */

/* Scale and offset of a group of inputs of one output. */
typedef struct {
  float scale, offset;
} Group;

/* i: first input, a multiple of 16. */
INLINE Group group_of_inputs(const Matrix *m, int64_t output, int64_t i) {
  const int64_t at = output * (m->in / m->group) + i / m->group;
  float scale;
  if (m->scales == HALVES) scale = one_float16((const uint16_t *)m->groups + at);
  else if (m->scales == FLOATS) scale = ((const float *)m->groups)[at];
  else {
    const uint16_t *block = m->blocks + (output * (m->in / BLOCK_INPUTS) + i / BLOCK_INPUTS) * (m->offsets ? 2 : 1);
    scale = m->scales == UNSIGNED ? ((const uint8_t *)m->groups)[at] : ((const int8_t *)m->groups)[at];
    scale *= one_float16(block);
    if (m->offsets) return (Group){scale, -(one_float16(block + 1) * ((const uint8_t *)m->offsets)[at])};
  }
  return (Group){scale, m->offsets ? ((const float *)m->offsets)[at] : -(float)m->zero * scale};
}

/* LANES numbers of one output from input i on; they must not cross a multiple of 32 inputs. w: the output's numbers. */
INLINE vi load_nibbles(const uint8_t *w, int64_t i) { return load_bytes(w + i / 64 * 32 + i % 32) >> (i & 32 ? 4 : 0) & 15; }
INLINE vi load_numbers(const uint8_t *w, int64_t i) { return load_bytes(w + i); }
INLINE vi load_sixes(const uint8_t *w, int64_t i) {
  const uint8_t *chunk = w + i / 64 * 48;
  const vi low = load_bytes(chunk + i % 32) >> (i & 32 ? 4 : 0) & 15;
  return low | (load_bytes(chunk + 32 + i % 16) >> 2 * (int)(i % 64 / 16) & 3) << 4;
}
INLINE vf decoded(vi q, Group group) {
  return multiply_add(splat(group.scale), __builtin_convertvector(q, vf), splat(group.offset));
}

/* y[r * BLOCK + o] for BLOCK outputs and R rows. x is packed (see `pack`). LOAD: LANES numbers. WIDTH: bytes of 64. STEP: inputs that
 * surely share a group. The number of inputs must be a multiple of 64. */
#define DOTS_GROUPED(NAME, LOAD, WIDTH, STEP, R) \
  INLINE void dots_##NAME##_##R(const Matrix *m, int64_t first, const float *x, Prefetch fetch, float *y) { \
    const int64_t row = m->in / 64 * WIDTH; \
    const uint8_t *w = (const uint8_t *)m->weight + first * row; \
    for (int side = 0; side < BLOCK; side += SIDE(R), w += SIDE(R) * row, y += SIDE(R)) { \
      vf total[4][R]; \
      UNROLL for (int o = 0; o < 4; o++) UNROLL for (int r = 0; r < R; r++) total[o][r] = (vf){0}; \
      for (int64_t i = 0; i < m->in;) { \
        Group groups[SIDE(R)]; \
        if (fetch.ahead && i % 64 == 0 && (i / 64 * WIDTH & fetch.mask & -64) == fetch.place) \
          UNROLL for (int o = 0; o < SIDE(R); o++) PREFETCH(w + (o + fetch.ahead) * row + i / 64 * WIDTH); \
        UNROLL for (int o = 0; o < SIDE(R); o++) groups[o] = group_of_inputs(m, first + side + o, i); \
        UNROLL for (int k = 0; k < STEP / LANES; k++, i += LANES) { \
          vf weights[SIDE(R)]; \
          UNROLL for (int o = 0; o < SIDE(R); o++) weights[o] = decoded(LOAD(w + o * row, i), groups[o]); \
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
#define DOTS_GROUPED_OF(NAME, LOAD, WIDTH, STEP) \
  DOTS_GROUPED(NAME, LOAD, WIDTH, STEP, 1) DOTS_GROUPED(NAME, LOAD, WIDTH, STEP, 2) DOTS_GROUPED(NAME, LOAD, WIDTH, STEP, 3) \
  DOTS_GROUPED(NAME, LOAD, WIDTH, STEP, 4) DOTS_GROUPED(NAME, LOAD, WIDTH, STEP, 5) DOTS_GROUPED(NAME, LOAD, WIDTH, STEP, 6) \
  static void dots_##NAME(const Matrix *m, int64_t first, const float *x, int64_t rows, Prefetch fetch, float *y) { \
    switch (rows) { \
    case 1: dots_##NAME##_1(m, first, x, fetch, y); break; \
    case 2: dots_##NAME##_2(m, first, x, fetch, y); break; \
    case 3: dots_##NAME##_3(m, first, x, fetch, y); break; \
    case 4: dots_##NAME##_4(m, first, x, fetch, y); break; \
    case 5: dots_##NAME##_5(m, first, x, fetch, y); break; \
    default: dots_##NAME##_6(m, first, x, fetch, y); \
    } \
  }
DOTS_GROUPED_OF(int4, load_nibbles, 32, 32)
DOTS_GROUPED_OF(bytes, load_numbers, 64, 16)
DOTS_GROUPED_OF(sixes, load_sixes, 48, 16)

/* One of them. w: the output's numbers. */
INLINE int number_at(int64_t kind, const uint8_t *w, int64_t i) {
  if (kind == BYTES) return w[i];
  const uint8_t *chunk = w + i / 64 * (kind == INT4 ? 32 : 48);
  const int low = chunk[i % 32] >> (i & 32 ? 4 : 0) & 15;
  return kind == INT4 ? low : low | (chunk[32 + i % 16] >> 2 * (i % 64 / 16) & 3) << 4;
}

/* One weight as float32. */
INLINE float weight_at(const Matrix *m, int64_t output, int64_t i) {
  const Group group = group_of_inputs(m, output, i / 16 * 16);
  return multiply_add_1(group.scale, number_at(m->kind, (const uint8_t *)m->weight + bytes_of(m->kind, output * m->in), i), group.offset);
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
#endif
