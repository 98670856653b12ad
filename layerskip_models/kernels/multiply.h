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

/* The first output of a piece, a multiple of BLOCK. size: outputs of all pieces. */
INLINE int64_t piece_start(int64_t size, int64_t piece, int64_t pieces) {
  return min((size + BLOCK - 1) / BLOCK * piece / pieces * BLOCK, size);
}

/* An upper bound on the outputs of a piece. */
INLINE int64_t most_outputs(int64_t size, int64_t pieces) { return ((size + BLOCK - 1) / BLOCK / pieces + 1) * BLOCK; }

/* What a matrix is multiplied by: rows [rows, in], normalised first if there is a norm. */
typedef struct {
  const float *x, *norm;
  float eps;
  int64_t rows;
} Input;

INLINE int64_t whole_lines(int64_t floats) { return (floats + 15) / 16 * 16; }

/* Floats of scratch for preparing rows: for the normalised rows, and for their form that `outputs` takes. */
INLINE int64_t rows_scratch(const Matrix *m, int64_t rows) { return whole_lines(rows * m->in) + whole_lines(rows * row_size(m)); }

#define COMMON_NUMBERS (1 << 15) /* input numbers from which on preparing rows together is worth a phase, some 10 microseconds */

/* The rows in the form that `outputs` takes, prepared by the whole team in a phase of its own and written in place, being little
 * work. NULL if each worker is to prepare them for itself. */
static const float *prepared_together(Worker *worker, const Input *input, const Matrix *m) {
  int64_t rows = input->rows, in = m->in, row_groups = row_groups_of(m, rows), size = together(m, 0, rows);
  if (row_groups == 1 || rows * in < COMMON_NUMBERS) return NULL;
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
      if (normed) normalise(x, input->norm, input->eps, count, in, normed);
      arrange(m, normed ? normed : x, count, common + r * row_size(m));
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
  if (rows == 1 && as_floats(m)) return x;
  for (int64_t r = 0; r < rows; r += together(m, r, rows))
    arrange(m, x + r * in, together(m, r, rows), scratch + r * row_size(m));
  return scratch;
}

/* y = residual + block, for `count` <= BLOCK numbers. residual: may be NULL. */
INLINE void store_block(const float *block, const float *residual, int64_t count, float *y) {
  if (count == BLOCK) {
    UNROLL for (int j = 0; j < BLOCK; j += 4) {
      v4 v = *(const v4_memory *)(block + j);
      if (residual) v += *(const v4_memory *)(residual + j);
      *(v4_memory *)(y + j) = v;
    }
  } else {
    for (int64_t j = 0; j < count; j++) y[j] = residual ? residual[j] + block[j] : block[j];
  }
}

#define BATCH_BYTES (TILES ? 1 << 20 : 512 << 10) /* of a batch's prepared rows: half the L2 cache (2 MB with tiles) */
#define FETCHED_BYTES (1 << 20) /* from this size on, a matrix is surely not all in a cache */
#define WIDE_ROWS 32          /* from here on converting a group's weights first pays, with few registers or weights in groups */
#define WIDE_BYTES (24 << 10) /* most bytes of converted weights: they stay in the L1 cache */

/* Whether weights are converted to float32 once for all rows. The conversion is exact. */
INLINE int widens(const Matrix *m, int64_t rows) {
  return m->kind != FLOAT32 && rows >= WIDE_ROWS && as_floats(m) && (!MANY_REGISTERS || is_grouped(m));
}

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

/* Outputs in a group: a batch's rows pass one group before the next. As many as the cache holds. */
INLINE int64_t group_of(const Matrix *m, int64_t rows) {
  if (!widens(m, rows)) {
    int64_t row = bytes_of(m->kind, m->in);
    return row_groups_of(m, rows) == 1 || GROUP * row <= GROUP_BYTES ? GROUP : max(BLOCK, GROUP_BYTES / row / BLOCK * BLOCK);
  }
  return max(BLOCK, min(GROUP, WIDE_BYTES / 4 / m->in / BLOCK * BLOCK));
}

/* Floats of scratch for a group's converted weights. */
INLINE int64_t wide_scratch(const Matrix *m, int64_t rows) {
  return widens(m, rows) ? group_of(m, rows) * m->in : 0;
}

/* Outputs first .. first + count - 1, converted to float32 if `widens`. */
INLINE Matrix group_at(const Matrix *m, int64_t first, int64_t count, int64_t rows, float *scratch) {
  Matrix group = slice_of(m, first, count);
  return widens(m, rows) ? widened(&group, scratch) : group;
}

/* Outputs first .. end - 1 of residual + x W^T. residual: [rows, out], may be NULL. y: rows are `stride` apart and begin with
 * output `first`. Prefetching runs on past `end`, where this worker's next piece usually begins. */
static void some_outputs(const Matrix *m, const float *x, int64_t rows, const float *residual, int64_t first, int64_t end,
                         float *y, int64_t stride, float *scratch) {
  int64_t step = group_of(m, rows), row_groups = fetching_row_groups(m, rows);
  int64_t ahead = widens(m, rows) ? 0 : outputs_ahead(m, row_groups, step);
  for (int64_t begin = 0, batch_end; begin < rows; begin = batch_end) {
    batch_end = min(rows, begin + batch_of(m, rows));
    for (int64_t at = first; at < end; at += step) {
      int64_t size = min(step, end - at);
      Matrix group = group_at(m, at, size, rows, scratch);
      for (int64_t r = begin, row_group = 0; r < batch_end; r += together(m, r, rows), row_group++) {
        int64_t count = together(m, r, rows);
        const Prefetch share = share_of_row_group(row_group, row_groups, ahead);
        for (int64_t o = 0; o < size; o += BLOCK) {
          float block[ROWS * BLOCK];
          Prefetch fetch = at + o + ahead + BLOCK <= m->out ? share : (Prefetch){0};
          outputs(&group, o, x + r * row_size(m), count, fetch, block);
          for (int64_t i = 0, to = at + o; i < count; i++)
            store_block(block + i * BLOCK, residual ? residual + (r + i) * m->out + to : NULL, min(BLOCK, size - o),
                y + (r + i) * stride + to - first);
        }
      }
    }
  }
}

/* The same for silu(gate) * up. The matrix holds the gates above the ups, so there are m->out / 2 outputs. */
static void some_gated(const Matrix *m, const float *x, int64_t rows, int64_t first, int64_t end, float *y, int64_t stride,
                       float *scratch) {
  int64_t half = m->out / 2, step = group_of(m, rows), row_groups = fetching_row_groups(m, rows);
  int64_t ahead = widens(m, rows) ? 0 : outputs_ahead(m, row_groups, step);
  for (int64_t begin = 0, batch_end; begin < rows; begin = batch_end) {
    batch_end = min(rows, begin + batch_of(m, rows));
    for (int64_t at = first; at < end; at += step) {
      int64_t size = min(step, end - at);
      Matrix gate = group_at(m, at, size, rows, scratch), up = group_at(m, half + at, size, rows, scratch + wide_scratch(m, rows));
      for (int64_t r = begin, row_group = 0; r < batch_end; r += together(m, r, rows), row_group++) {
        int64_t count = together(m, r, rows);
        const Prefetch share = share_of_row_group(row_group, row_groups, ahead);
        for (int64_t o = 0; o < size; o += BLOCK) {
          float gates[ROWS * BLOCK + LANES], ups[ROWS * BLOCK + LANES];
          memset(gates, 0, (count * BLOCK + LANES) * sizeof(float));
          memset(ups, 0, (count * BLOCK + LANES) * sizeof(float));
          Prefetch fetch = at + o + ahead + BLOCK <= half ? share : (Prefetch){0};
          outputs(&gate, o, x + r * row_size(m), count, fetch, gates);
          outputs(&up, o, x + r * row_size(m), count, fetch, ups);
          for (int64_t i = 0; i < count * BLOCK; i += LANES) {
            vf g = load(gates + i);
            store(gates + i, g / (1.0f + exponential(-g)) * load(ups + i));
          }
          for (int64_t i = 0; i < count; i++)
            store_block(gates + i * BLOCK, NULL, min(BLOCK, size - o), y + (r + i) * stride + at + o - first);
        }
      }
    }
  }
}

/* One or two phases: y = residual + x W^T, or silu(gate) * up if `gated`. y: [rows, out], or [rows, out / 2] if gated. */
static void multiply(Worker *worker, const Matrix *m, const Input *input, int gated, const float *residual, float *y) {
  int64_t rows = input->rows, size = gated ? m->out / 2 : m->out, units = (size + BLOCK - 1) / BLOCK;
  int64_t pieces = pieces_of(pool_team(worker), units, bytes_of(m->kind, m->out * m->in), rows);
  const float *x = prepared_together(worker, input, m);
  int64_t own_rows = x ? 0 : rows_scratch(m, rows), before = own_rows + (gated ? 2 : 1) * wide_scratch(m, rows); /* floats */
  int alone = pool_alone(worker);
  float *scratch = pool_memory(worker, (before + (alone ? 0 : rows * most_outputs(size, pieces))) * sizeof(float));
  Phase phase = pool_phase(worker, pieces);
  for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
    int64_t first = piece_start(size, piece, pieces), end = piece_start(size, piece + 1, pieces), width = end - first;
    if (!x) x = prepared(input, m, scratch);
    float *wide = scratch + own_rows, *own = scratch + before, *to = alone ? y + first : own;
    int64_t stride = alone ? size : width;
    if (gated) some_gated(m, x, rows, first, end, to, stride, wide);
    else some_outputs(m, x, rows, residual, first, end, to, stride, wide);
    if (alone || !pool_claim(&phase, piece)) continue;
    for (int64_t r = 0; r < rows; r++) memcpy(y + r * size + first, own + r * width, width * sizeof(float));
    pool_done(&phase, piece);
  }
}

static int64_t bytes_read(const Matrix *m) { return bytes_of(m->kind, m->out * m->in); }
#endif
