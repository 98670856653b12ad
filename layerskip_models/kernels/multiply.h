/* Matrix products on a team of threads, one phase each. */
#ifndef SELFSPEC_MULTIPLY_H
#define SELFSPEC_MULTIPLY_H
#include "attention.h"
#include "matrices.h"
#include "sharing.h"

#define PIECE_BYTES (24 << 10) /* fewest bytes of weights in a piece: a microsecond or two */

/* The number of pieces for `units` units of work whose weights have `bytes` bytes and meet `rows` rows. */
static int64_t pieces_of(int64_t team, int64_t units, int64_t bytes, int64_t rows) {
  int64_t workers = worth_sharing(team, bytes, rows), each = max(1, min(POOL_PIECES, bytes / PIECE_BYTES / workers));
  return min(units, workers * each);
}

/* Outputs that stay in one piece: those computed at once, unless too few workers would then have a piece. */
INLINE int64_t unit_of(const Matrix *m, int64_t team, int64_t rows, int64_t size) {
  int64_t unit = outputs_at_once(m, together(m, 0, rows), WIDEST);
  while (unit > BLOCK && size < 2 * team * unit) unit /= 2;
  return unit;
}

/* The first output of a piece, a multiple of `unit`. size: outputs of all pieces. */
INLINE int64_t piece_start(int64_t size, int64_t unit, int64_t piece, int64_t pieces) {
  return min((size + unit - 1) / unit * piece / pieces * unit, size);
}

/* An upper bound on the outputs of a piece. */
INLINE int64_t most_outputs(int64_t size, int64_t unit, int64_t pieces) { return ((size + unit - 1) / unit / pieces + 1) * unit; }

/* What a matrix is multiplied by: rows [rows, in], normalised first if there is a norm. */
typedef struct {
  const float *x, *norm;
  float eps;
  int64_t rows;
} Input;

INLINE int64_t whole_lines(int64_t floats) { return (floats + 15) / 16 * 16; }

/* Floats of scratch for preparing rows: for the normalised rows, and for their form that `outputs` takes. */
INLINE int64_t rows_scratch(const Matrix *m, int64_t rows) {
  return whole_lines(rows * m->in) + (side_by_side(m) ? 0 : whole_lines(rows * row_size(m)));
}

#define COMMON_NUMBERS (1 << 15) /* input numbers from which on preparing rows together is worth a phase, some 10 microseconds */

/* The rows in the form that `outputs` takes, prepared by the whole team in a phase of its own and written in place, being little
 * work. NULL if each worker is to prepare them for itself. */
static const float *prepared_together(Worker *worker, const Input *input, const Matrix *m) {
  int64_t rows = input->rows, in = m->in, row_groups = row_groups_of(m, rows), size = together(m, 0, rows);
  if (row_groups == 1 || rows * in < COMMON_NUMBERS || (side_by_side(m) && !input->norm)) return NULL;
  float *common = pool_common(worker, rows * row_size(m) * sizeof(float));
  if (!common) return NULL;
  float *normed = input->norm ? pool_memory(worker, size * in * sizeof(float)) : NULL;
  int64_t pieces = min(row_groups, worth_sharing(pool_team(worker), rows * in * (int64_t)sizeof(float), 1) * POOL_PIECES);
  Phase phase = pool_phase(worker, pieces);
  for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
    if (!pool_claim(&phase, piece)) continue;
    int64_t end = min(rows, row_groups * (piece + 1) / pieces * size);
    for (int64_t r = row_groups * piece / pieces * size; r < end; r += size) {
      const float *x = input->x + r * in;
      int64_t count = together(m, r, rows);
      float *to = side_by_side(m) ? common + r * in : normed;
      if (normed) normalise(x, input->norm, input->eps, count, in, to);
      if (!side_by_side(m)) arrange(m, normed ? normed : x, count, common + r * row_size(m));
    }
    pool_done(&phase, piece);
  }
  return common;
}

/* The same, prepared by this worker alone. scratch: `rows_scratch` floats. */
static const float *prepared(const Input *input, const Matrix *m, float *scratch) {
  const float *x = input->x;
  int64_t rows = input->rows, in = m->in;
  if (input->norm) {
    normalise(x, input->norm, input->eps, rows, in, scratch);
    x = scratch;
    scratch += whole_lines(rows * in);
  }
  if (side_by_side(m)) return x;
  for (int64_t r = 0; r < rows; r += together(m, r, rows))
    arrange(m, x + r * in, together(m, r, rows), scratch + r * row_size(m));
  return scratch;
}

/* y = residual + block, for `count` numbers. residual: may be NULL. */
INLINE void store_block(const float *block, const float *residual, int64_t count, float *y) {
  int64_t j = 0;
  for (; j + LANES <= count; j += LANES) store(y + j, residual ? load(residual + j) + load(block + j) : load(block + j));
  for (; j < count; j++) y[j] = residual ? residual[j] + block[j] : block[j];
}

#define BATCH_BYTES (TILES ? 1 << 20 : 512 << 10) /* of a batch's prepared rows: half the L2 cache (2 MB with tiles) */
#define FETCHED_BYTES (1 << 20) /* from this size on, a matrix is surely not all in a cache */

/* Rows in a batch: a batch passes all outputs of a piece before the next batch. Whole groups of rows, as many as stay in the L2 cache. */
INLINE int64_t batch_of(const Matrix *m, int64_t rows) {
  int64_t row_group = together(m, 0, rows), bytes = row_group * hot_row_bytes(m);
  return row_group * max(1, BATCH_BYTES / bytes);
}

/* How many of a batch's groups of rows prefetch weights. Only the first for a small matrix, which may well be in a cache. */
INLINE int64_t fetching_row_groups(const Matrix *m, int64_t rows) {
  if (bytes_of(m->kind, m->out * m->in) < FETCHED_BYTES) return 1;
  return (min(rows, batch_of(m, rows)) + together(m, 0, rows) - 1) / together(m, 0, rows);
}

/* Outputs in a group: a batch's rows pass one group before the next. As many as the cache holds, in whole widths. */
INLINE int64_t group_of(const Matrix *m, int64_t rows) {
  int64_t row = bytes_of(m->kind, m->in), width = outputs_at_once(m, together(m, 0, rows), WIDEST);
  return max(width, row_groups_of(m, rows) == 1 ? WIDEST : min(GROUP, GROUP_BYTES / row / BLOCK * BLOCK));
}

/* Outputs first .. end - 1 of residual + x W^T. residual: [rows, out], may be NULL. y: rows are `stride` apart and begin with
 * output `first`. Prefetching runs on past `end`, where this worker's next piece usually begins. */
static void some_outputs(const Matrix *m, const float *x, int64_t rows, const float *residual, int64_t first, int64_t end,
                         float *y, int64_t stride) {
  int64_t step = group_of(m, rows), row_groups = fetching_row_groups(m, rows), ahead = outputs_ahead(m, row_groups, step);
  for (int64_t begin = 0, batch_end; begin < rows; begin = batch_end) {
    batch_end = min(rows, begin + batch_of(m, rows));
    for (int64_t at = first; at < end; at += step) {
      int64_t last = min(end, at + step);
      for (int64_t r = begin, row_group = 0; r < batch_end; r += together(m, r, rows), row_group++) {
        int64_t count = together(m, r, rows);
        const Prefetch share = share_of_row_group(row_group, row_groups, ahead);
        for (int64_t o = at, width; o < last; o += width) {
          width = outputs_at_once(m, count, last - o);
          float block[ROWS * WIDEST];
          outputs(m, o, width, x + r * row_size(m), count, share_within(m, share, o, m->out), block);
          for (int64_t i = 0; i < count; i++)
            store_block(block + i * width, residual ? residual + (r + i) * m->out + o : NULL, min(width, last - o),
                        y + (r + i) * stride + o - first);
        }
      }
    }
  }
}

/* The same for silu(gate) * up. The matrix holds the gates above the ups, so there are m->out / 2 outputs. */
static void some_gated(const Matrix *m, const float *x, int64_t rows, int64_t first, int64_t end, float *y, int64_t stride) {
  int64_t half = m->out / 2, step = group_of(m, rows), row_groups = fetching_row_groups(m, rows);
  int64_t ahead = outputs_ahead(m, row_groups, step), shift = half % BLOCK; /* ups may begin within a block */
  for (int64_t begin = 0, batch_end; begin < rows; begin = batch_end) {
    batch_end = min(rows, begin + batch_of(m, rows));
    for (int64_t at = first; at < end; at += step) {
      int64_t last = min(end, at + step);
      for (int64_t r = begin, row_group = 0; r < batch_end; r += together(m, r, rows), row_group++) {
        int64_t count = together(m, r, rows);
        const Prefetch share = share_of_row_group(row_group, row_groups, ahead);
        for (int64_t o = at, width; o < last; o += width) {
          width = outputs_at_once(m, count, last - o);
          float gates[ROWS * WIDEST], ups[ROWS * WIDEST], rest[ROWS * BLOCK];
          const float *own = x + r * row_size(m);
          const Prefetch fetch = share_within(m, share, o, half);
          const int64_t up = half + o - shift;
          outputs(m, o, width, own, count, fetch, gates);
          outputs(m, up, width, own, count, fetch, ups);
          if (shift) {
            if (up + width < m->out) outputs(m, up + width, BLOCK, own, count, (Prefetch){0}, rest);
            for (int64_t i = 0; i < count; i++) {
              memmove(ups + i * width, ups + i * width + shift, (width - shift) * sizeof(float));
              memcpy(ups + (i + 1) * width - shift, rest + i * BLOCK, shift * sizeof(float));
            }
          }
          for (int64_t i = 0; i < count * width; i += LANES) {
            vf g = load(gates + i);
            store(gates + i, g / (1.0f + exponential(-g)) * load(ups + i));
          }
          for (int64_t i = 0; i < count; i++)
            store_block(gates + i * width, NULL, min(width, last - o), y + (r + i) * stride + o - first);
        }
      }
    }
  }
}

/* One or two phases: y = residual + x W^T, or silu(gate) * up if `gated`. y: [rows, out], or [rows, out / 2] if gated. */
static void multiply(Worker *worker, const Matrix *m, const Input *input, int gated, const float *residual, float *y) {
  int64_t rows = input->rows, size = gated ? m->out / 2 : m->out, unit = unit_of(m, pool_team(worker), rows, size);
  int64_t pieces = pieces_of(pool_team(worker), (size + unit - 1) / unit, bytes_of(m->kind, m->out * m->in), rows);
  const float *x = prepared_together(worker, input, m);
  int64_t own_rows = x ? 0 : rows_scratch(m, rows); /* floats */
  int alone = pool_alone(worker);
  float *scratch = pool_memory(worker, (own_rows + (alone ? 0 : rows * most_outputs(size, unit, pieces))) * sizeof(float));
  Phase phase = pool_phase(worker, pieces);
  for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
    int64_t first = piece_start(size, unit, piece, pieces), end = piece_start(size, unit, piece + 1, pieces), width = end - first;
    if (!x) x = prepared(input, m, scratch);
    float *own = scratch + own_rows, *to = alone ? y + first : own;
    int64_t stride = alone ? size : width;
    if (gated) some_gated(m, x, rows, first, end, to, stride);
    else some_outputs(m, x, rows, residual, first, end, to, stride);
    if (alone || !pool_claim(&phase, piece)) continue;
    for (int64_t r = 0; r < rows; r++) memcpy(y + r * size + first, own + r * width, width * sizeof(float));
    pool_done(&phase, piece);
  }
}

static int64_t bytes_read(const Matrix *m) { return bytes_of(m->kind, m->out * m->in); }
#endif
