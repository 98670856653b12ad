/* Matrices on a team of threads: a phase of work for each product. */
#ifndef SELFSPEC_MULTIPLY_H
#define SELFSPEC_MULTIPLY_H
#include "attention.h"
#include "matrices.h"
#include "pool.h"

#define PIECE_BYTES (24 << 10) /* of weights, at least; a microsecond or two */

/* Into how many pieces the team divides so many units whose weights have so many bytes. */
static int64_t pieces_of(int64_t team, int64_t units, int64_t bytes) {
  int64_t each = most(1, least(POOL_PIECES, bytes / PIECE_BYTES / team));
  return least(units, team * each);
}

/* Where piece number `piece` of `size` outputs begins, in steps of BLOCK. */
INLINE int64_t piece_start(int64_t size, int64_t piece, int64_t pieces) {
  return least((size + BLOCK - 1) / BLOCK * piece / pieces * BLOCK, size);
}

/* The most outputs of a piece. */
INLINE int64_t widest(int64_t size, int64_t pieces) { return ((size + BLOCK - 1) / BLOCK / pieces + 1) * BLOCK; }

/* What a matrix is multiplied by: rows [rows, in], normalised first if there is a norm. */
typedef struct {
  const float *x, *norm;
  float eps;
  int64_t rows;
} Input;

INLINE int64_t whole_lines(int64_t floats) { return (floats + 15) / 16 * 16; }

/* Numbers of room that so many rows take while they are prepared: normalised, and as `outputs` wants them. */
INLINE int64_t rows_room(const Matrix *m, int64_t rows) { return whole_lines(rows * m->in) + whole_lines(rows * row_room(m)); }

#define COMMON_NUMBERS (1 << 15) /* of the rows, from which on preparing them together is worth a phase: some 10 microseconds */

/* The rows as `outputs` wants them, prepared by the whole team in a phase of its own; NULL where each member does that for itself. So
 * little work that it is done where the result belongs. */
static const float *prepared_together(Member *member, const Input *input, const Matrix *m) {
  int64_t rows = input->rows, in = m->in, turns = turns_of(m, rows), size = together(m, 0, rows);
  if (turns == 1 || rows * in < COMMON_NUMBERS) return NULL;
  float *common = pool_common(member, rows * row_room(m) * sizeof(float));
  if (!common) return NULL;
  float *normed = input->norm ? pool_memory(member, size * in * sizeof(float)) : NULL;
  int64_t pieces = least(turns, pool_team(member) * POOL_PIECES);
  Phase phase = pool_phase(member, pieces);
  for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
    if (!pool_win(&phase, piece)) continue;
    int64_t end = least(rows, turns * (piece + 1) / pieces * size);
    for (int64_t r = turns * piece / pieces * size; r < end; r += size) {
      const float *x = input->x + r * in;
      int64_t count = together(m, r, rows);
      if (normed) normalise(x, input->norm, input->eps, count, in, normed);
      arrange(m, normed ? normed : x, count, common + r * row_room(m));
    }
    pool_done(&phase, piece);
  }
  return common;
}

/* The same, prepared by this member. room: of `rows_room`. */
static const float *prepared(const Input *input, const Matrix *m, float *room) {
  const float *x = input->x;
  int64_t rows = input->rows, in = m->in;
  if (input->norm) {
    normalise(x, input->norm, input->eps, rows, in, room);
    x = room;
    room += whole_lines(rows * in);
  }
  if (rows == 1 && as_it_is(m)) return x;
  for (int64_t r = 0; r < rows; r += together(m, r, rows)) arrange(m, x + r * in, together(m, r, rows), room + r * row_room(m));
  return room;
}

/* y[..] = residual[..] + block, `count` <= BLOCK numbers. */
INLINE void put(const float *block, const float *residual, int64_t count, float *y) {
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

#define BATCH_BYTES (TILES ? 1 << 20 : 512 << 10) /* of prepared rows: half of the second cache (processors with tiles have 2 MB) */
#define FETCHED_BYTES (1 << 20) /* of a matrix that is surely not all in a cache */
#define WIDE_ROWS 32          /* from which on converting a group's weights first is worth it, with few registers or of 4 bits */
#define WIDE_BYTES (24 << 10) /* of converted weights, that rows and they stay in the nearest cache */

/* Whether weights are converted once for all rows; that rounds nothing. */
INLINE int widens(const Matrix *m, int64_t rows) {
  return m->kind != FLOAT32 && rows >= WIDE_ROWS && as_it_is(m) && (!MANY_REGISTERS || m->kind == INT4);
}

/* How many rows meet all outputs of a piece before the next rows do: whole turns, as many as stay in the second cache. */
INLINE int64_t batch_of(const Matrix *m, int64_t rows) {
  int64_t turn = together(m, 0, rows), bytes = turn * row_bytes(m);
  return turn * most(1, BATCH_BYTES / bytes);
}

/* How many of a batch's turns fetch weights: the first alone of a small matrix, which may well be in a cache. */
INLINE int64_t fetching_turns(const Matrix *m, int64_t rows) {
  if (bytes_of(m->kind, m->out * m->in) < FETCHED_BYTES) return 1;
  return (least(rows, batch_of(m, rows)) + together(m, 0, rows) - 1) / together(m, 0, rows);
}

/* How many outputs all rows are multiplied by before the next: as many as the cache holds. */
INLINE int64_t group_of(const Matrix *m, int64_t rows) {
  if (!widens(m, rows)) {
    int64_t row = bytes_of(m->kind, m->in);
    return turns_of(m, rows) == 1 || GROUP * row <= GROUP_BYTES ? GROUP : most(BLOCK, GROUP_BYTES / row / BLOCK * BLOCK);
  }
  return most(BLOCK, least(GROUP, WIDE_BYTES / 4 / m->in / BLOCK * BLOCK));
}

/* Numbers of room that a group's converted weights take. */
INLINE int64_t wide_room(const Matrix *m, int64_t rows) {
  return widens(m, rows) ? group_of(m, rows) * m->in : 0;
}

/* A group of outputs, ready to be multiplied by that many rows. */
INLINE Matrix group_at(const Matrix *m, int64_t first, int64_t count, int64_t rows, float *room) {
  Matrix group = some_of(m, first, count);
  return widens(m, rows) ? widened(&group, room) : group;
}

/* Outputs first .. end - 1 of residual + x W^T. residual: [rows, out], may be NULL. y: its rows are `stride` apart, and begin with
 * output `first`. Weights are fetched ahead beyond `end`, too: what comes there is mostly this member's next piece. */
static void some_outputs(const Matrix *m, const float *x, int64_t rows, const float *residual, int64_t first, int64_t end,
                         float *y, int64_t stride, float *room) {
  int64_t step = group_of(m, rows), turns = fetching_turns(m, rows), ahead = widens(m, rows) ? 0 : outputs_ahead(m, rows, turns, step);
  for (int64_t begin = 0, behind; begin < rows; begin = behind) {
    behind = least(rows, begin + batch_of(m, rows));
    for (int64_t at = first; at < end; at += step) {
      int64_t size = least(step, end - at);
      Matrix group = group_at(m, at, size, rows, room);
      for (int64_t r = begin, turn = 0; r < behind; r += together(m, r, rows), turn++) {
        int64_t count = together(m, r, rows);
        const Fetch share = fetch_of_turn(turn, turns, ahead);
        for (int64_t o = 0; o < size; o += BLOCK) {
          float block[ROWS * BLOCK];
          Fetch fetch = at + o + ahead + BLOCK <= m->out ? share : (Fetch){0};
          outputs(&group, o, x + r * row_room(m), count, fetch, block);
          for (int64_t i = 0; i < count; i++)
            put(block + i * BLOCK, residual ? residual + (r + i) * m->out + at + o : NULL, least(BLOCK, size - o),
                y + (r + i) * stride + at + o - first);
        }
      }
    }
  }
}

/* The same of silu(gate) * up; the matrix holds gate above up, and has half as many outputs. */
static void some_gated(const Matrix *m, const float *x, int64_t rows, int64_t first, int64_t end, float *y, int64_t stride,
                       float *room) {
  int64_t half = m->out / 2, step = group_of(m, rows), turns = fetching_turns(m, rows);
  int64_t ahead = widens(m, rows) ? 0 : outputs_ahead(m, rows, turns, step);
  for (int64_t begin = 0, behind; begin < rows; begin = behind) {
    behind = least(rows, begin + batch_of(m, rows));
    for (int64_t at = first; at < end; at += step) {
      int64_t size = least(step, end - at);
      Matrix gate = group_at(m, at, size, rows, room), up = group_at(m, half + at, size, rows, room + wide_room(m, rows));
      for (int64_t r = begin, turn = 0; r < behind; r += together(m, r, rows), turn++) {
        int64_t count = together(m, r, rows);
        const Fetch share = fetch_of_turn(turn, turns, ahead);
        for (int64_t o = 0; o < size; o += BLOCK) {
          float gates[ROWS * BLOCK + LANES] = {0}, ups[ROWS * BLOCK + LANES] = {0};
          Fetch fetch = at + o + ahead + BLOCK <= half ? share : (Fetch){0};
          outputs(&gate, o, x + r * row_room(m), count, fetch, gates);
          outputs(&up, o, x + r * row_room(m), count, fetch, ups);
          for (int64_t i = 0; i < count * BLOCK; i += LANES) {
            vf g = load(gates + i);
            store(gates + i, g / (1.0f + exponential(-g)) * load(ups + i));
          }
          for (int64_t i = 0; i < count; i++)
            put(gates + i * BLOCK, NULL, least(BLOCK, size - o), y + (r + i) * stride + at + o - first);
        }
      }
    }
  }
}

/* A phase or two: y = residual + x W^T, or silu(gate) * up where `gated`; y: [rows, out or out / 2]. */
static void multiply(Member *member, const Matrix *m, const Input *input, int gated, const float *residual, float *y) {
  int64_t rows = input->rows, size = gated ? m->out / 2 : m->out, units = (size + BLOCK - 1) / BLOCK;
  int64_t pieces = pieces_of(pool_team(member), units, bytes_of(m->kind, m->out * m->in));
  const float *x = prepared_together(member, input, m);
  int64_t own_rows = x ? 0 : rows_room(m, rows), before = own_rows + (gated ? 2 : 1) * wide_room(m, rows); /* numbers of room */
  int alone = pool_alone(member);
  float *room = pool_memory(member, (before + (alone ? 0 : rows * widest(size, pieces))) * sizeof(float));
  Phase phase = pool_phase(member, pieces);
  for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
    int64_t first = piece_start(size, piece, pieces), end = piece_start(size, piece + 1, pieces), width = end - first;
    if (!x) x = prepared(input, m, room);
    float *wide = room + own_rows, *own = room + before, *to = alone ? y + first : own;
    int64_t stride = alone ? size : width;
    if (gated) some_gated(m, x, rows, first, end, to, stride, wide);
    else some_outputs(m, x, rows, residual, first, end, to, stride, wide);
    if (alone || !pool_win(&phase, piece)) continue;
    for (int64_t r = 0; r < rows; r++) memcpy(y + r * size + first, own + r * width, width * sizeof(float));
    pool_done(&phase, piece);
  }
}

static int64_t bytes_read(const Matrix *m) { return bytes_of(m->kind, m->out * m->in); }
#endif
