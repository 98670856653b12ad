/* A block of a matrix's outputs for a few rows: the loop where nearly all the time goes. */
#ifndef SELFSPEC_MATRICES_H
#define SELFSPEC_MATRICES_H
#include "prepare.h"

/* Rows are multiplied by a weight a few at a time, in groups of about equal size. `together`: how many from row `r` on. */
INLINE int64_t row_groups_of(const Matrix *m, int64_t rows) {
  int64_t most = side_by_side(m) ? SIDE_ROWS : in_splits(m) || has_tiles(m) ? ROWS : rows_at_once(m);
  return (rows + most - 1) / most;
}
INLINE int64_t together(const Matrix *m, int64_t r, int64_t rows) {
  int64_t row_groups = row_groups_of(m, rows), size = (rows + row_groups - 1) / row_groups;
  return min(side_by_side(m) ? SIDE_ROWS : size, rows - r); /* eight rows are faster as six and two than as four and four */
}

/* How many outputs are computed at once for `rows` rows of a group, where `left` are still to be computed. */
INLINE int64_t outputs_at_once(const Matrix *m, int64_t rows, int64_t left) { return side_by_side(m) ? side_width(m->kind, rows, left) : BLOCK; }

/* Apply scale and bias to what `outputs` computes. */
INLINE void finish_outputs(const Matrix *m, int64_t first, int64_t width, int64_t rows, float *y) {
  const int64_t count = min(width, m->out - first);
  for (int64_t r = 0; r < rows; r++, y += width) {
    for (int64_t o = 0; m->scale && o < count; o++) y[o] *= m->scale[first + o];
    for (int64_t o = 0; m->bias && o < count; o++) y[o] += m->bias[first + o];
  }
}

/* y[r * width + o] for `width` outputs from `first` on (`outputs_at_once`) and the rows of one such group (`together`), with scale and
 * bias applied. Entries past the matrix's last output mean nothing. */
static void outputs(const Matrix *m, int64_t first, int64_t width, const float *x, int64_t rows, Prefetch fetch, float *y) {
#if TILES
  if (in_splits(m)) split_outputs(m, first, x, rows, fetch, y);
  else
#endif
    if (m->interleaved) integer_outputs(m, first, x, rows, fetch, y);
    else side_outputs(m, first, width, x, rows, fetch, y);
  finish_outputs(m, first, width, rows, y);
}

/* The same share where what it fetches is in the matrix. Weights side by side look for themselves (`side_dots`). */
INLINE Prefetch share_within(const Matrix *m, Prefetch share, int64_t first, int64_t out) {
  return side_by_side(m) || first + share.ahead + BLOCK <= out ? share : (Prefetch){0};
}

/* How many outputs ahead weights are fetched, where `row_groups` groups of rows meet a group of `group` outputs. */
INLINE int64_t outputs_ahead(const Matrix *m, int64_t row_groups, int64_t group) {
  int64_t bytes = bytes_of(m->kind, BLOCK * m->in);
  return row_groups > 1 ? group : (AHEAD + bytes - 1) / bytes * BLOCK;
}
#endif
