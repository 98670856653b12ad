/* A block of a matrix's outputs for a few rows: the loop where nearly all the time goes. */
#ifndef SELFSPEC_MATRICES_H
#define SELFSPEC_MATRICES_H
#include "prepare.h"

/* Rows are multiplied by a weight a few at a time, in groups of about equal size. `together`: how many from row `r` on. */
INLINE int64_t row_groups_of(const Matrix *m, int64_t rows) {
  int64_t most = TILES && m->interleaved && (VNNI || !is_grouped(m)) ? ROWS
                 : as_integers(m)                       ? rows_at_once(m)
                 : MANY_REGISTERS || rows < PROMPT_ROWS ? FLOAT_ROWS
                                                        : FLOAT_ROWS / 2;
  return (rows + most - 1) / most;
}
INLINE int64_t together(const Matrix *m, int64_t r, int64_t rows) {
  int64_t row_groups = row_groups_of(m, rows), size = (rows + row_groups - 1) / row_groups;
  return min(size, rows - r);
}

INLINE void float_outputs(const Matrix *m, int64_t first, int64_t count, const float *x, int64_t rows, Prefetch fetch, float *y) {
  const char *w = (const char *)m->weight + bytes_of(m->kind, first * m->in);
  if (count == BLOCK) {
    switch (m->kind) {
    case FLOAT32: dots_float32((const float *)w, x, rows, m->in, fetch, y); break;
    case BFLOAT16: dots_bfloat16((const uint16_t *)w, x, rows, m->in, fetch, y); break;
    case FLOAT16: dots_float16((const uint16_t *)w, x, rows, m->in, fetch, y); break;
    case INT8: dots_int8((const int8_t *)w, x, rows, m->in, fetch, y); break;
    case BYTES: dots_bytes(m, first, x, rows, fetch, y); break;
    case SIXES: dots_sixes(m, first, x, rows, fetch, y); break;
    default: dots_int4(m, first, x, rows, fetch, y);
    }
    return;
  }
  for (int64_t r = 0; r < rows; r++)
    for (int64_t o = 0; o < count; o++) {
      float result = 0;
      for (int64_t i = 0; i < m->in; i++)
        result = multiply_add_1(weight_at(m, first + o, i), x[packed_place(r, i, rows, m->in)], result);
      y[r * BLOCK + o] = result;
    }
}

/* Apply scale and bias to what `outputs` computes. */
INLINE void finish_outputs(const Matrix *m, int64_t first, int64_t rows, float *y) {
  const int64_t count = min(BLOCK, m->out - first);
  if (!m->scale && !m->bias) return;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t o = 0; o < count; o++) {
      if (m->scale) y[r * BLOCK + o] *= m->scale[first + o];
      if (m->bias) y[r * BLOCK + o] += m->bias[first + o];
    }
}

/* y[r * BLOCK + o] for outputs first .. first + BLOCK - 1 and the rows of one such group (`together`), with scale and bias applied.
 * Entries past the matrix's last output are left alone. */
static void outputs(const Matrix *m, int64_t first, const float *x, int64_t rows, Prefetch fetch, float *y) {
  int64_t count = min(BLOCK, m->out - first);
#if TILES
  if (in_splits(m)) split_outputs(m, first, x, rows, fetch, y);
  else
#endif
    if (m->interleaved) integer_outputs(m, first, x, rows, fetch, y);
    else
      float_outputs(m, first, count, x, rows, fetch, y);
  finish_outputs(m, first, rows, y);
}

/* How many outputs ahead weights are fetched, where `row_groups` groups of rows meet a group of `group` outputs. */
INLINE int64_t outputs_ahead(const Matrix *m, int64_t row_groups, int64_t group) {
  int64_t step = m->interleaved ? BLOCK : 4, bytes = bytes_of(m->kind, step * m->in);
  return row_groups > 1 ? group : (AHEAD + bytes - 1) / bytes * step;
}
#endif
