/* Decoder layers over a few rows on a CPU, at the speed at which their weights come from memory.
 *
 * setup.py compiles this file once for each kind of processor, VARIANT being its name ("baseline", "avx2", ..), and library.py
 * chooses among them; native_layers.py says what each argument is. Why it exists: at batch 1 a pass is as fast as its weights
 * are read, and no public kernel reads them that fast in 16 or 8 bits, or goes on doing so when verification brings eight rows
 * instead of one.
 *
 * Every row is computed by the same operations in the same order whatever rows are beside it and however many threads
 * there are. So a token that was drafted in a pass of one row gets, in a verification of many, the very same logits.
 */
#include "attention.h"
#include "head.h"
#include "matrices.h"
#include "pool.h"

#define JOINED(name, variant) name##_##variant
#define JOIN(name, variant) JOINED(name, variant)
#define EXPORT(name) JOIN(name, VARIANT) /* step_avx2 */
#define PUBLIC __attribute__((visibility("default")))

/* ---- Matrices on a team of threads ---------------------------------------------------------------------------------- */

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

/* The rows as `outputs` wants them; room: of `rows_room`. Every member prepares them for itself: that is cheaper than waiting
 * for one that does. */
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

#define FETCHED_BYTES (1 << 20) /* of a matrix that is surely not all in a cache */
#define WIDE_ROWS 32          /* from which on converting a group's weights first is worth it, with few registers or of 4 bits */
#define WIDE_BYTES (24 << 10) /* of converted weights, that rows and they stay in the nearest cache */

/* Whether weights are converted once for all rows; that rounds nothing. */
INLINE int widens(const Matrix *m, int64_t rows) {
  return m->kind != FLOAT32 && rows >= WIDE_ROWS && as_it_is(m) && (!MANY_REGISTERS || m->kind == INT4);
}

/* How many of the rows' turns fetch weights: the first alone of a small matrix, which may well be in a cache. */
INLINE int64_t fetching_turns(const Matrix *m, int64_t rows) {
  return bytes_of(m->kind, m->out * m->in) < FETCHED_BYTES ? 1 : turns_of(m, rows);
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
  int64_t step = group_of(m, rows), turns = fetching_turns(m, rows), ahead = widens(m, rows) ? 0 : outputs_ahead(m, turns, step);
  for (int64_t at = first; at < end; at += step) {
    int64_t size = least(step, end - at);
    Matrix group = group_at(m, at, size, rows, room);
    for (int64_t r = 0, turn = 0; r < rows; r += together(m, r, rows), turn++) {
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

/* The same of silu(gate) * up; the matrix holds gate above up, and has half as many outputs. */
static void some_gated(const Matrix *m, const float *x, int64_t rows, int64_t first, int64_t end, float *y, int64_t stride,
                       float *room) {
  int64_t half = m->out / 2, step = group_of(m, rows), turns = fetching_turns(m, rows);
  int64_t ahead = widens(m, rows) ? 0 : outputs_ahead(m, turns, step);
  for (int64_t at = first; at < end; at += step) {
    int64_t size = least(step, end - at);
    Matrix gate = group_at(m, at, size, rows, room), up = group_at(m, half + at, size, rows, room + wide_room(m, rows));
    for (int64_t r = 0, turn = 0; r < rows; r += together(m, r, rows), turn++) {
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

/* A phase: y = residual + x W^T, or silu(gate) * up where `gated`; y: [rows, out or out / 2].
 * room: the member's own, of `room_of`. */
static void multiply(Member *member, const Matrix *m, const Input *input, int gated, const float *residual, float *y,
                     float *room) {
  int64_t rows = input->rows, size = gated ? m->out / 2 : m->out, units = (size + BLOCK - 1) / BLOCK;
  int64_t pieces = pieces_of(pool_team(member), units, bytes_of(m->kind, m->out * m->in));
  int alone = pool_alone(member);
  const float *x = NULL;
  Phase phase = pool_phase(member, pieces);
  for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
    int64_t first = piece_start(size, piece, pieces), end = piece_start(size, piece + 1, pieces), width = end - first;
    if (!x) x = prepared(input, m, room);
    float *wide = room + rows_room(m, rows), *own = wide + 2 * wide_room(m, rows), *to = alone ? y + first : own;
    int64_t stride = alone ? size : width;
    if (gated) some_gated(m, x, rows, first, end, to, stride, wide);
    else some_outputs(m, x, rows, residual, first, end, to, stride, wide);
    if (alone || !pool_win(&phase, piece)) continue;
    for (int64_t r = 0; r < rows; r++) memcpy(y + r * size + first, own + r * width, width * sizeof(float));
    pool_done(&phase, piece);
  }
}

/* Numbers of `room` that `multiply` needs. */
static int64_t room_of(int64_t team, const Matrix *m, int64_t rows) {
  int64_t units = (m->out + BLOCK - 1) / BLOCK;
  int64_t widest_piece = widest(m->out, pieces_of(team, units, bytes_of(m->kind, m->out * m->in)));
  return rows_room(m, rows) + rows * widest_piece + 2 * wide_room(m, rows);
}

/* ---- Layers --------------------------------------------------------------------------------------------------------- */

/* Norms are NULL where a layer has none; their weights are times the root of what they are over. */
typedef struct {
  Matrix qkv, output, gate_up, down;
  const float *input_norm, *post_attention_norm; /* [hidden], of what goes into attention and the MLP */
  const float *output_norm, *down_norm;          /* [hidden], of what these two add */
  const float *query_norm, *key_norm; /* of every head alone, [head_dim], or of all of a row together, [heads * head_dim] */
  int64_t window;                     /* positions that a row attends to, its own among them */
  int32_t joint, rotated;             /* whether heads are normalised together; whether they are rotated */
} Layer;

typedef struct {
  int64_t hidden, heads, kv_heads, head_dim;
  float eps, scale;
} Shape;

/* Rows of one text: `rows` neighbours, the first of which is at `position`, and the text's own KV cache. */
typedef struct {
  float *keys, *values; /* of layer 0, [kv_heads, positions, head_dim] */
  int64_t layer_stride, head_stride, position, rows;
} Span;

/* ---- What Python calls ---------------------------------------------------------------------------------------------- */

typedef struct {
  Matrix matrix;
  Input input;
  const float *residual;
  float *y;
} Product;

static int product(const void *arguments, Member *member) {
  const Product *a = arguments;
  float *room = pool_memory(member, room_of(pool_team(member), &a->matrix, a->input.rows) * sizeof(float));
  if (!room) return -1;
  multiply(member, &a->matrix, &a->input, 0, a->residual, a->y, room);
  leave_tiles();
  return 0;
}

static int64_t bytes_read(const Matrix *m) { return bytes_of(m->kind, m->out * m->in); }

/* y = residual + x W^T, for any number of rows. Returns as `pool_run`. */
PUBLIC int64_t EXPORT(linear)(const Matrix *m, const float *x, int64_t rows, const float *residual, float *y, int threads) {
  Product a = {*m, {x, NULL, 0, rows}, residual, y};
  return pool_run(product, &a, sizeof a, threads, bytes_read(m));
}

/* The same of normalised rows: y = norm(x) W^T. */
PUBLIC int64_t EXPORT(normalised_linear)(const Matrix *m, const float *norm, float eps, const float *x, int64_t rows,
                                         float *y, int threads) {
  Product a = {*m, {x, norm, eps, rows}, NULL, y};
  return pool_run(product, &a, sizeof a, threads, bytes_read(m));
}

/* Numbers of scratch that a pass wants for so many rows. */
PUBLIC int64_t EXPORT(scratch_size)(const Shape *s, const Layer *layer, int64_t rows) {
  return rows * (layer->qkv.out + s->heads * s->head_dim + layer->down.in + 3 * s->hidden);
}

/* Matrices see all rows of a pass at once; attention sees each span's own cache. */
typedef struct {
  Shape shape;
  const Layer *layers; /* of the whole model */
  Span only;           /* used where `spans` is NULL: then nothing has to outlive the call */
  const Span *spans;
  const float *x, *rotary; /* of all positions */
  float *outputs, *scratch;
  int64_t first, count, rows, stride; /* layers first .. first + count - 1 */
  int64_t furthest;                   /* positions that the longest text will have */
} Pass;

INLINE const Span *spans_of(const Pass *a) { return a->spans ? a->spans : &a->only; }

/* Number `head` of a row's `heads`, x: [heads, head_dim], behind its norm, if there is one. y: for head_dim numbers. */
INLINE const float *normed_head(const Pass *a, const float *norm, int joint, const float *x, int64_t heads, int64_t head, float *y) {
  int64_t dim = a->shape.head_dim, at = head * dim;
  if (!norm) return x + at;
  /* All heads' sum anew for each of them: a row's is so little that sharing it would cost more. */
  float factor = joint ? norm_factor(x, a->shape.eps, heads * dim) : norm_factor(x + at, a->shape.eps, dim);
  for (int64_t i = 0; i < dim; i++) y[i] = x[at + i] * factor * norm[joint ? at + i : i];
  return y;
}

/* The factors of a position's rotation; NULL where the layer does not rotate. */
INLINE const float *rotary_at(const Pass *a, const Layer *l, int64_t position) {
  return l->rotated ? a->rotary + position * a->shape.head_dim : NULL;
}

/* Rotated keys, and values, of the rows go into the caches. So little work that it is done where the result belongs.
 * room: for head_dim numbers. */
static void write_caches(Member *member, const Pass *a, int64_t layer, const float *qkv, float *room) {
  const Shape *s = &a->shape;
  const Layer *l = a->layers + layer;
  const Span *span = spans_of(a);
  int64_t dim = s->head_dim, width = (s->heads + 2 * s->kv_heads) * dim, before = 0; /* rows of earlier spans */
  int64_t units = a->rows * s->kv_heads, pieces = least(units, pool_team(member));
  Phase phase = pool_phase(member, pieces);
  for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
    if (!pool_win(&phase, piece)) continue;
    for (int64_t unit = units * piece / pieces; unit < units * (piece + 1) / pieces; unit++) {
      int64_t r = unit / s->kv_heads, head = unit % s->kv_heads;
      if (r < before) span = spans_of(a), before = 0; /* pieces may come in any order */
      while (r >= before + span->rows) before += span++->rows;
      const float *keys = qkv + r * width + s->heads * dim, *value = keys + (s->kv_heads + head) * dim;
      const float *key = normed_head(a, l->key_norm, l->joint, keys, s->kv_heads, head, room);
      int64_t position = span->position + r - before;
      int64_t place = layer * span->layer_stride + head * span->head_stride + position * dim;
      rotate(key, rotary_at(a, l, position), 1.0f, dim, span->keys + place);
      memcpy(span->values + place, value, dim * sizeof(float));
    }
    pool_done(&phase, piece);
  }
}

/* Into how many pieces the queries of all rows and heads are divided: neighbours, counted head by head, share their keys. */
static int64_t query_pieces(int64_t team, int64_t queries) {
  return least(queries, most(team, least(team * POOL_PIECES, queries / QUERIES)));
}

/* Queries are counted span by span, in a span head by head, and for a head row by row.
 * room: for QUERIES * (dim + furthest + 2 * LANES) + dim numbers, and as many times dim as a piece has queries. */
static void attend_all(Member *member, const Pass *a, int64_t layer, const float *qkv, float *attended, float *room) {
  const Shape *s = &a->shape;
  const Layer *l = a->layers + layer;
  const Span *span = spans_of(a);
  int64_t dim = s->head_dim, group = s->heads / s->kv_heads, width = (s->heads + 2 * s->kv_heads) * dim;
  int64_t all = a->rows * s->heads, longest = a->furthest + 2 * LANES, before = 0;
  int64_t pieces = query_pieces(pool_team(member), all);
  float *normed = room, *queries = normed + dim, *scores = queries + QUERIES * dim, *own = scores + QUERIES * longest;
  int alone = pool_alone(member);
  Phase phase = pool_phase(member, pieces);
  for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
    int64_t start = all * piece / pieces, stop = all * (piece + 1) / pieces;
    if (start < before * s->heads) span = spans_of(a), before = 0;
    /* Where a query's result belongs: `in` is its number within the span. */
#define PER_HEAD (span->rows * group)
#define ROW(in) (before + (in) % PER_HEAD / group)
#define PLACE(in) (attended + (ROW(in) * s->heads + (in) / PER_HEAD * group + (in) % group) * dim)
    for (int64_t unit = start; unit < stop;) {
      while (unit >= (before + span->rows) * s->heads) before += span++->rows;
      int64_t in = unit - before * s->heads, head = in / PER_HEAD;
      int64_t chosen = least(least(QUERIES, stop - unit), (head + 1) * PER_HEAD - in);
      int64_t begins[QUERIES], ends[QUERIES], offset = layer * span->layer_stride + head * span->head_stride;
      float *places[QUERIES];
      for (int64_t q = 0; q < chosen; q++, unit++, in++) {
        int64_t at = head * group + in % group, position = span->position + ROW(in) - before;
        const float *query = normed_head(a, l->query_norm, l->joint, qkv + ROW(in) * width, s->heads, at, normed);
        rotate(query, rotary_at(a, l, position), s->scale, dim, queries + q * dim);
        begins[q] = most(0, position + 1 - l->window);
        ends[q] = position + 1;
        places[q] = alone ? PLACE(in) : own + (unit - start) * dim;
      }
      attend(queries, chosen, begins, ends, span->keys + offset, span->values + offset, dim, longest, scores, places);
    }
    if (alone || !pool_win(&phase, piece)) continue;
    if (start < before * s->heads) span = spans_of(a), before = 0;
    for (int64_t unit = start; unit < stop; unit++) {
      while (unit >= (before + span->rows) * s->heads) before += span++->rows;
      memcpy(PLACE(unit - before * s->heads), own + (unit - start) * dim, dim * sizeof(float));
    }
    pool_done(&phase, piece);
#undef PLACE
#undef ROW
#undef PER_HEAD
  }
}

/* A phase: y = residual + norm(x), [rows, hidden]. So little work that it is done where the result belongs. */
static void add_normalised(Member *member, const Pass *a, const float *x, const float *norm, const float *residual, float *y) {
  int64_t size = a->shape.hidden, pieces = least(a->rows, pool_team(member));
  Phase phase = pool_phase(member, pieces);
  for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
    if (!pool_win(&phase, piece)) continue;
    for (int64_t r = a->rows * piece / pieces; r < a->rows * (piece + 1) / pieces; r++) {
      float factor = norm_factor(x + r * size, a->shape.eps, size);
      for (int64_t i = r * size; i < (r + 1) * size; i++) y[i] = residual[i] + x[i] * factor * norm[i - r * size];
    }
    pool_done(&phase, piece);
  }
}

/* y = residual + norm(x W^T), without a norm in one phase, else in two. added: room for [rows, hidden]. */
static void add(Member *member, const Pass *a, const Matrix *m, const float *x, const float *norm, const float *residual,
                float *y, float *added, float *room) {
  multiply(member, m, &(Input){x, NULL, 0, a->rows}, 0, norm ? NULL : residual, norm ? added : y, room);
  if (norm) add_normalised(member, a, added, norm, residual, y);
}

/* Numbers of `room` that `walk_layers` needs. */
static int64_t room_of_pass(int64_t team, const Pass *a) {
  int64_t rows = a->rows, dim = a->shape.head_dim, all = rows * a->shape.heads;
  int64_t need = QUERIES * (dim + a->furthest + 2 * LANES) + (all / query_pieces(team, all) + 2) * dim;
  const Matrix *matrices[] = {&a->layers->qkv, &a->layers->output, &a->layers->gate_up, &a->layers->down};
  for (int i = 0; i < 4; i++) need = most(need, room_of(team, matrices[i], rows));
  return need;
}

static void walk_layers(Member *member, const Pass *a, float *room) {
  const Shape *s = &a->shape;
  int64_t rows = a->rows, dim = s->head_dim, size = s->hidden;
  float *qkv = a->scratch, *attended = qkv + rows * (s->heads + 2 * s->kv_heads) * dim;
  float *gated = attended + rows * s->heads * dim, *middle = gated + rows * a->layers->down.in;
  float *between = middle + rows * size, *added = between + rows * size;
  const float *input = a->x;
  for (int64_t l = 0; l < a->count && !pool_left(member); l++) {
    const Layer *layer = a->layers + a->first + l;
    float *result = a->stride ? a->outputs + l * a->stride : l + 1 < a->count ? between : a->outputs;
    multiply(member, &layer->qkv, &(Input){input, layer->input_norm, s->eps, rows}, 0, NULL, qkv, room);
    write_caches(member, a, a->first + l, qkv, room);
    attend_all(member, a, a->first + l, qkv, attended, room);
    add(member, a, &layer->output, attended, layer->output_norm, input, middle, added, room);
    multiply(member, &layer->gate_up, &(Input){middle, layer->post_attention_norm, s->eps, rows}, 1, NULL, gated, room);
    add(member, a, &layer->down, gated, layer->down_norm, middle, result, added, room);
    input = result;
  }
}

/* ---- Exit adapters -------------------------------------------------------------------------------------------------- */

/* What an early exit's rows pass before the head: y = x + D (silu(gate) * up), of normalised rows. An MLP, but narrow. */
typedef struct {
  Matrix gate_up, down;
  const float *norm; /* [hidden] */
} Adapter;

static int64_t room_of_adapter(int64_t team, const Adapter *a, int64_t rows) {
  return most(room_of(team, &a->gate_up, rows), room_of(team, &a->down, rows));
}

/* x, y: [rows, hidden]. gated: [rows, rank]. */
static void adapt_rows(Member *member, const Adapter *a, float eps, const float *x, int64_t rows, float *gated, float *y,
                       float *room) {
  multiply(member, &a->gate_up, &(Input){x, a->norm, eps, rows}, 1, NULL, gated, room);
  multiply(member, &a->down, &(Input){gated, NULL, 0, rows}, 0, x, y, room);
}

typedef struct {
  Adapter adapter;
  float eps;
  const float *x;
  int64_t rows;
  float *gated, *y;
} Adapting;

static int adapting(const void *arguments, Member *member) {
  const Adapting *a = arguments;
  float *room = pool_memory(member, room_of_adapter(pool_team(member), &a->adapter, a->rows) * sizeof(float));
  if (!room) return -1;
  adapt_rows(member, &a->adapter, a->eps, a->x, a->rows, a->gated, a->y, room);
  leave_tiles();
  return 0;
}

/* An adapter alone. gated: scratch for [rows, rank]. Returns as `pool_run`. */
PUBLIC int64_t EXPORT(adapt)(const Adapter *adapter, float eps, const float *x, int64_t rows, float *gated, float *y,
                             int threads) {
  Adapting a = {*adapter, eps, x, rows, gated, y};
  return pool_run(adapting, &a, sizeof a, threads, bytes_read(&adapter->gate_up) + bytes_read(&adapter->down));
}

static int64_t layer_bytes(const Layer *l) {
  return bytes_read(&l->qkv) + bytes_read(&l->output) + bytes_read(&l->gate_up) + bytes_read(&l->down);
}

/* Numbers of bytes of scratch that `pick` wants. */
PUBLIC int64_t EXPORT(pick_scratch)(const Matrix *m, int64_t rows) {
  return rows * chunk_count(m->out) * (int64_t)sizeof(Summary);
}

typedef struct {
  Matrix matrix;
  Input input;
  Summary *summaries; /* [rows, chunks] */
  int spread;
} Picking;

/* Into how many pieces the chunks of a vocabulary are divided. */
static int64_t chunk_pieces(int64_t team, const Matrix *m) {
  return pieces_of(team, chunk_count(m->out), bytes_of(m->kind, m->out * m->in));
}

/* A phase: logits, chunk by chunk, and what they come to. room: see `room_of_picking`. */
static void summarise_all(Member *member, const Picking *a, float *room) {
  const Matrix *m = &a->matrix;
  int64_t rows = a->input.rows, size = chunk_size(m->out), chunks = chunk_count(m->out), width = size + LANES;
  int64_t pieces = chunk_pieces(pool_team(member), m);
  float *wide = room + rows_room(m, rows), *logits = wide + wide_room(m, rows);
  Summary *own = (Summary *)(logits + (rows * width + 1) / 2 * 2);
  const float *x = NULL;
  Phase phase = pool_phase(member, pieces);
  for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
    int64_t first = chunks * piece / pieces, count = chunks * (piece + 1) / pieces - first;
    if (!x) x = prepared(&a->input, m, room);
    for (int64_t c = 0; c < count; c++) {
      int64_t begin = (first + c) * size, end = least(begin + size, m->out);
      some_outputs(m, x, rows, NULL, begin, end, logits, width, wide);
      for (int64_t r = 0; r < rows; r++)
        own[r * count + c] = summarise(logits + r * width, end - begin, begin, a->spread);
    }
    if (!pool_win(&phase, piece)) continue;
    for (int64_t r = 0; r < rows; r++)
      memcpy(a->summaries + r * chunks + first, own + r * count, count * sizeof(Summary));
    pool_done(&phase, piece);
  }
}

/* Numbers of `room` that `summarise_all` needs. */
static int64_t room_of_picking(int64_t team, const Picking *a) {
  const Matrix *m = &a->matrix;
  int64_t chunks = chunk_count(m->out) / chunk_pieces(team, m) + 1;
  int64_t row = chunk_size(m->out) + LANES + chunks * (int64_t)(sizeof(Summary) / sizeof(float));
  return rows_room(m, a->input.rows) + a->input.rows * row + wide_room(m, a->input.rows) + 2;
}

static int picking(const void *arguments, Member *member) {
  const Picking *a = arguments;
  float *room = pool_memory(member, room_of_picking(pool_team(member), a) * sizeof(float));
  if (!room) return -1;
  summarise_all(member, a, room);
  leave_tiles();
  return 0;
}

/* What the summaries say of each row; see `pick`. */
static void conclude(const Picking *a, int64_t *tokens, float *numbers) {
  int64_t rows = a->input.rows, chunks = chunk_count(a->matrix.out);
  for (int64_t r = 0; r < rows; r++) {
    Summary s = joined(a->summaries + r * chunks, chunks, a->spread);
    tokens[r] = s.token;
    numbers[r] = s.best;
    if (a->spread) {
      numbers[rows + r] = 1.0f / s.sum;
      numbers[2 * rows + r] = s.best - s.second;
      numbers[3 * rows + r] = logf(s.sum) - s.moment / s.sum;
    }
  }
}

/* For rows [rows, in], normalised first: tokens[r], the argmax of its logits (the first of equal ones), and numbers[r], its logit,
 * NaN if any logit of the row is. With `spread` also, rows numbers each: the probability of the token, its logit less the
 * second largest, and the entropy in nats. No logit is stored. scratch: aligned to 8 bytes. Returns as `pool_run`. */
PUBLIC int64_t EXPORT(pick)(const Matrix *m, const float *norm, float eps, const float *x, int64_t rows, void *scratch,
                            int spread, int64_t *tokens, float *numbers, int threads) {
  Picking a = {*m, {x, norm, eps, rows}, scratch, spread};
  int64_t job = pool_run(picking, &a, sizeof a, threads, bytes_read(m));
  if (job >= 0) conclude(&a, tokens, numbers);
  return job;
}

/* A pass in one call: embed tokens, or take rows as they are; run layers; look at the head. `Step` of library.py. */
typedef struct {
  const Shape *shape;
  const Layer *layers;
  const Span *spans; /* as many as have `rows` rows together; of more than one, the memory must outlive the call (`pool_oldest`) */
  int64_t num_spans;
  const void *embedding; /* [vocab, hidden] of `kind`, of which the rows `embedded` are taken; or NULL */
  int64_t kind;
  const int64_t *embedded;
  float *x; /* [rows, hidden]; with an embedding, room for it */
  const float *rotary;
  float *outputs, *last; /* layer i writes [rows, hidden] to outputs + i * stride, and the last one is copied to `last` if that
                            is not NULL; a stride of 0 keeps the last one's only */
  int64_t first, count, rows, stride;
  float *scratch;
  const Matrix *head; /* or NULL */
  const float *norm;
  float eps;
  int32_t spread;
  void *summaries;
  int64_t *tokens;
  float *numbers;
  const Adapter *adapter; /* that the rows pass before the head, or NULL */
  float *adapted;         /* [rows, rank + hidden], with an adapter */
} Step;

typedef struct {
  Pass pass;
  Picking picking;
  const Adapter *adapter; /* in memory as long as the model */
  const float *exit;      /* what it adapts */
  float *gated;
  int looks;
} Stepping;

static int stepping(const void *arguments, Member *member) {
  const Stepping *a = arguments;
  int64_t team = pool_team(member), need = room_of_pass(team, &a->pass);
  const Picking *look = &a->picking;
  if (a->looks) need = most(need, room_of_picking(team, look));
  if (a->adapter) need = most(need, room_of_adapter(team, a->adapter, look->input.rows));
  float *room = pool_memory(member, need * sizeof(float));
  if (!room) return -1;
  walk_layers(member, &a->pass, room);
  if (a->adapter && !pool_left(member))
    adapt_rows(member, a->adapter, look->input.eps, a->exit, look->input.rows, a->gated, (float *)look->input.x, room);
  if (a->looks && !pool_left(member)) summarise_all(member, &a->picking, room);
  leave_tiles();
  return 0;
}

_Static_assert(sizeof(Stepping) <= POOL_ARGUMENTS, "the arguments of a step are too large for the team");

PUBLIC int64_t EXPORT(step)(const Step *s, int threads) {
  int64_t hidden = s->shape->hidden, furthest = 0;
  if (s->embedding)
    for (int64_t i = 0; i < s->rows * hidden; i++) {
      int64_t at = s->embedded[i / hidden] * hidden + i % hidden;
      s->x[i] = s->kind == FLOAT32    ? one_float32((const float *)s->embedding + at)
                : s->kind == BFLOAT16 ? one_bfloat16((const uint16_t *)s->embedding + at)
                                      : one_float16((const uint16_t *)s->embedding + at);
    }
  for (int64_t i = 0; i < s->num_spans; i++) furthest = most(furthest, s->spans[i].position + s->spans[i].rows);
  Stepping a = {
    .pass = {*s->shape, s->layers, *s->spans, s->num_spans > 1 ? s->spans : NULL, s->x, s->rotary, s->outputs, s->scratch,
             s->first, s->count, s->rows, s->stride, furthest},
  };
  const float *result = s->stride ? s->outputs + (s->count - 1) * s->stride : s->outputs;
  int64_t bytes = s->count * layer_bytes(s->layers);
  if (s->head) {
    a.picking = (Picking){*s->head, {result, s->norm, s->eps, s->rows}, s->summaries, s->spread};
    a.looks = 1;
    bytes += bytes_read(s->head);
    if (s->adapter) {
      a.adapter = s->adapter, a.exit = result, a.gated = s->adapted;
      a.picking.input.x = s->adapted + s->rows * s->adapter->down.in;
      bytes += bytes_read(&s->adapter->gate_up) + bytes_read(&s->adapter->down);
    }
  }
  int64_t job = pool_run(stepping, &a, sizeof a, threads, bytes);
  if (job < 0) return job;
  if (s->stride && s->last) memcpy(s->last, result, s->rows * hidden * sizeof(float));
  if (s->head) conclude(&a.picking, s->tokens, s->numbers);
  return job;
}
