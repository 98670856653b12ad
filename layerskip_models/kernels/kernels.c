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
#define EXPORT(name) JOIN(name, VARIANT) /* run_avx2 */
#define PUBLIC __attribute__((visibility("default")))

/* ---- Matrices on a team of threads ---------------------------------------------------------------------------------- */

#define PIECE_BYTES (24 << 10) /* of weights, at least; a microsecond or two */

INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

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

/* The rows as `outputs` wants them; room: for 2 * rows * in numbers. Every member prepares them for itself: that is cheaper
 * than waiting for one that does. */
static const float *prepared(const Input *input, int64_t in, float *room) {
  const float *x = input->x;
  int64_t rows = input->rows;
  if (input->norm) {
    normalise(x, input->norm, input->eps, rows, in, room);
    x = room;
    room += rows * in;
  }
  if (rows == 1) return x;
  for (int64_t r = 0; r < rows; r += together(r, rows)) pack(x + r * in, together(r, rows), in, room + r * in);
  return room;
}

/* y[..] = residual[..] + block, `count` <= BLOCK numbers. */
INLINE void put(const float *block, const float *residual, int64_t count, float *y) {
  if (count == BLOCK) {
    v4 v = *(const v4_memory *)block;
    if (residual) v += *(const v4_memory *)residual;
    *(v4_memory *)y = v;
  } else {
    for (int64_t j = 0; j < count; j++) y[j] = residual ? residual[j] + block[j] : block[j];
  }
}

#define WIDE_ROWS 32          /* from which on converting a group's weights first is worth it */
#define WIDE_BYTES (24 << 10) /* of converted weights, that rows and they stay in the nearest cache */

/* Whether weights are converted once for all rows; that rounds nothing. */
INLINE int widens(const Matrix *m, int64_t rows) { return m->kind != FLOAT32 && rows >= WIDE_ROWS; }

/* How many outputs all rows are multiplied by before the next: as many as the cache holds. */
INLINE int64_t group_of(const Matrix *m, int64_t rows) {
  if (!widens(m, rows)) return GROUP;
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
  int64_t ahead = widens(m, rows) ? 0 : outputs_ahead(m), step = group_of(m, rows);
  for (int64_t at = first; at < end; at += step) {
    int64_t size = least(step, end - at);
    Matrix group = group_at(m, at, size, rows, room);
    for (int64_t r = 0; r < rows; r += together(r, rows)) {
      int64_t count = together(r, rows);
      for (int64_t o = 0; o < size; o += BLOCK) {
        float block[ROWS * BLOCK];
        int64_t fetch = r == 0 && at + o + ahead + BLOCK <= m->out ? ahead : 0;
        outputs(&group, o, x + r * m->in, count, fetch, block);
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
  int64_t half = m->out / 2, ahead = widens(m, rows) ? 0 : outputs_ahead(m), step = group_of(m, rows);
  for (int64_t at = first; at < end; at += step) {
    int64_t size = least(step, end - at);
    Matrix gate = group_at(m, at, size, rows, room), up = group_at(m, half + at, size, rows, room + wide_room(m, rows));
    for (int64_t r = 0; r < rows; r += together(r, rows)) {
      int64_t count = together(r, rows);
      for (int64_t o = 0; o < size; o += BLOCK) {
        float gates[ROWS * BLOCK + LANES] = {0}, ups[ROWS * BLOCK + LANES] = {0};
        int64_t fetch = r == 0 && at + o + ahead + BLOCK <= half ? ahead : 0;
        outputs(&gate, o, x + r * m->in, count, fetch, gates);
        outputs(&up, o, x + r * m->in, count, fetch, ups);
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
 * room: the member's own, for 2 * rows * in numbers and the rows of a piece. */
static void multiply(Member *member, const Matrix *m, const Input *input, int gated, const float *residual, float *y,
                     float *room) {
  int64_t rows = input->rows, size = gated ? m->out / 2 : m->out, units = (size + BLOCK - 1) / BLOCK;
  int64_t pieces = pieces_of(pool_team(member), units, m->out * m->in * bytes_of(m->kind));
  int alone = pool_alone(member);
  const float *x = NULL;
  Phase phase = pool_phase(member, pieces);
  for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
    int64_t first = piece_start(size, piece, pieces), end = piece_start(size, piece + 1, pieces), width = end - first;
    if (!x) x = prepared(input, m->in, room);
    float *wide = room + 2 * rows * m->in, *own = wide + 2 * wide_room(m, rows), *to = alone ? y + first : own;
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
  int64_t widest_piece = widest(m->out, pieces_of(team, units, m->out * m->in * bytes_of(m->kind)));
  return rows * (2 * m->in + widest_piece) + 2 * wide_room(m, rows);
}

/* ---- Layers --------------------------------------------------------------------------------------------------------- */

typedef struct {
  Matrix qkv, output, gate_up, down;
  const float *input_norm, *post_attention_norm; /* [hidden], weights times sqrt(hidden) */
} Layer;

typedef struct {
  int64_t hidden, heads, kv_heads, head_dim;
  float eps, scale;
} Shape;

typedef struct {
  float *keys, *values; /* of the first layer to run, [kv_heads, positions, head_dim] */
  int64_t layer_stride, head_stride;
} Cache;

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
  return 0;
}

static int64_t bytes_read(const Matrix *m) { return m->out * m->in * bytes_of(m->kind); }

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

/* Numbers of scratch that `run` wants for so many rows. */
PUBLIC int64_t EXPORT(scratch_size)(const Shape *s, const Layer *layer, int64_t rows) {
  return rows * (layer->qkv.out + s->heads * s->head_dim + layer->down.in + 2 * s->hidden);
}

typedef struct {
  Shape shape;
  const Layer *layers;
  Cache cache;
  const float *x, *rotary;
  float *outputs, *scratch;
  int64_t count, rows, position, stride;
} Pass;

/* Rotated keys, and values, of the rows go into the cache. So little work that it is done where the result belongs. */
static void write_cache(Member *member, const Pass *a, const float *qkv, float *keys, float *values) {
  const Shape *s = &a->shape;
  int64_t dim = s->head_dim, width = (s->heads + 2 * s->kv_heads) * dim, units = a->rows * s->kv_heads;
  int64_t pieces = least(units, pool_team(member));
  Phase phase = pool_phase(member, pieces);
  for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
    if (!pool_win(&phase, piece)) continue;
    for (int64_t unit = units * piece / pieces; unit < units * (piece + 1) / pieces; unit++) {
      int64_t r = unit / s->kv_heads, head = unit % s->kv_heads;
      const float *key = qkv + r * width + (s->heads + head) * dim, *value = key + s->kv_heads * dim;
      int64_t place = head * a->cache.head_stride + (a->position + r) * dim;
      rotate(key, a->rotary + r * dim, 1.0f, dim, keys + place);
      memcpy(values + place, value, dim * sizeof(float));
    }
    pool_done(&phase, piece);
  }
}

/* Into how many pieces the queries of all rows and heads are divided: neighbours, counted head by head, share their keys. */
static int64_t query_pieces(int64_t team, int64_t queries) {
  return least(queries, most(team, least(team * POOL_PIECES, queries / QUERIES)));
}

/* room: for QUERIES * (dim + end + 2 * LANES) numbers, and as many times dim as a piece has queries. */
static void attend_all(Member *member, const Pass *a, const float *qkv, const float *keys, const float *values,
                       float *attended, float *room) {
  const Shape *s = &a->shape;
  int64_t dim = s->head_dim, group = s->heads / s->kv_heads, width = (s->heads + 2 * s->kv_heads) * dim;
  int64_t per_head = a->rows * group, all = a->rows * s->heads, longest = a->position + a->rows + 2 * LANES;
  int64_t pieces = query_pieces(pool_team(member), all);
  float *queries = room, *scores = queries + QUERIES * dim, *own = scores + QUERIES * longest;
  int alone = pool_alone(member);
  Phase phase = pool_phase(member, pieces);
  for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
    int64_t start = all * piece / pieces, stop = all * (piece + 1) / pieces;
#define PLACE(unit) (attended + ((unit) % per_head / group * s->heads + (unit) / per_head * group + (unit) % group) * dim)
    for (int64_t unit = start; unit < stop;) {
      int64_t head = unit / per_head, chosen = least(least(QUERIES, stop - unit), (head + 1) * per_head - unit);
      int64_t ends[QUERIES], offset = head * a->cache.head_stride;
      float *places[QUERIES];
      for (int64_t q = 0; q < chosen; q++, unit++) {
        int64_t r = unit % per_head / group, at = head * group + unit % group;
        rotate(qkv + r * width + at * dim, a->rotary + r * dim, s->scale, dim, queries + q * dim);
        ends[q] = a->position + r + 1;
        places[q] = alone ? PLACE(unit) : own + (unit - start) * dim;
      }
      attend(queries, chosen, ends, keys + offset, values + offset, dim, longest, scores, places);
    }
    if (alone || !pool_win(&phase, piece)) continue;
    for (int64_t unit = start; unit < stop; unit++)
      memcpy(PLACE(unit), own + (unit - start) * dim, dim * sizeof(float));
    pool_done(&phase, piece);
#undef PLACE
  }
}

/* Numbers of `room` that `walk_layers` needs. */
static int64_t room_of_pass(int64_t team, const Pass *a) {
  int64_t rows = a->rows, dim = a->shape.head_dim, all = rows * a->shape.heads;
  int64_t need = QUERIES * (dim + a->position + rows + 2 * LANES) + (all / query_pieces(team, all) + 1) * dim;
  const Matrix *matrices[] = {&a->layers->qkv, &a->layers->output, &a->layers->gate_up, &a->layers->down};
  for (int i = 0; i < 4; i++) need = most(need, room_of(team, matrices[i], rows));
  return need;
}

static void walk_layers(Member *member, const Pass *a, float *room) {
  const Shape *s = &a->shape;
  int64_t rows = a->rows, dim = s->head_dim, size = s->hidden;
  float *qkv = a->scratch, *attended = qkv + rows * (s->heads + 2 * s->kv_heads) * dim;
  float *gated = attended + rows * s->heads * dim, *middle = gated + rows * a->layers->down.in;
  float *between = middle + rows * size;
  const float *input = a->x;
  for (int64_t l = 0; l < a->count && !pool_left(member); l++) {
    const Layer *layer = a->layers + l;
    float *keys = a->cache.keys + l * a->cache.layer_stride, *values = a->cache.values + l * a->cache.layer_stride;
    float *result = a->stride ? a->outputs + l * a->stride : l + 1 < a->count ? between : a->outputs;
    multiply(member, &layer->qkv, &(Input){input, layer->input_norm, s->eps, rows}, 0, NULL, qkv, room);
    write_cache(member, a, qkv, keys, values);
    attend_all(member, a, qkv, keys, values, attended, room);
    multiply(member, &layer->output, &(Input){attended, NULL, 0, rows}, 0, input, middle, room);
    multiply(member, &layer->gate_up, &(Input){middle, layer->post_attention_norm, s->eps, rows}, 1, NULL, gated, room);
    multiply(member, &layer->down, &(Input){gated, NULL, 0, rows}, 0, middle, result, room);
    input = result;
  }
}

static int pass(const void *arguments, Member *member) {
  const Pass *a = arguments;
  float *room = pool_memory(member, room_of_pass(pool_team(member), a) * sizeof(float));
  if (!room) return -1;
  walk_layers(member, a, room);
  return 0;
}

static int64_t layer_bytes(const Layer *l) {
  return bytes_read(&l->qkv) + bytes_read(&l->output) + bytes_read(&l->gate_up) + bytes_read(&l->down);
}

/* Layers over consecutive rows, the first of which is at `position`. Layer i writes its output to outputs + i * stride,
 * [rows, hidden]; a stride of 0 keeps the last one's only. x: [rows, hidden]. rotary: [rows, head_dim]. Returns as `pool_run`. */
PUBLIC int64_t EXPORT(run)(const Shape *s, const Layer *layers, int64_t count, const Cache *cache, const float *x,
                           int64_t rows, int64_t position, const float *rotary, float *outputs, int64_t stride,
                           float *scratch, int threads) {
  Pass a = {*s, layers, *cache, x, rotary, outputs, scratch, count, rows, position, stride};
  return pool_run(pass, &a, sizeof a, threads, count * layer_bytes(layers));
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
  return pieces_of(team, chunk_count(m->out), m->out * m->in * bytes_of(m->kind));
}

/* A phase: logits, chunk by chunk, and what they come to. room: see `room_of_picking`. */
static void summarise_all(Member *member, const Picking *a, float *room) {
  const Matrix *m = &a->matrix;
  int64_t rows = a->input.rows, size = chunk_size(m->out), chunks = chunk_count(m->out), width = size + LANES;
  int64_t pieces = chunk_pieces(pool_team(member), m);
  float *wide = room + 2 * rows * m->in, *logits = wide + wide_room(m, rows);
  Summary *own = (Summary *)(logits + (rows * width + 1) / 2 * 2);
  const float *x = NULL;
  Phase phase = pool_phase(member, pieces);
  for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
    int64_t first = chunks * piece / pieces, count = chunks * (piece + 1) / pieces - first;
    if (!x) x = prepared(&a->input, m->in, room);
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
  int64_t row = 2 * m->in + chunk_size(m->out) + LANES + chunks * (int64_t)(sizeof(Summary) / sizeof(float));
  return a->input.rows * row + wide_room(m, a->input.rows) + 2;
}

static int picking(const void *arguments, Member *member) {
  const Picking *a = arguments;
  float *room = pool_memory(member, room_of_picking(pool_team(member), a) * sizeof(float));
  if (!room) return -1;
  summarise_all(member, a, room);
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

/* What a step of decoding does, in one call: embed a token, or take rows as they are; run layers; look at the head.
 * `Step` of native_steps.py. */
typedef struct {
  const Shape *shape;
  const Layer *layers; /* the first one to run */
  Cache cache;         /* of that layer */
  const void *embedding; /* [vocab, hidden] of `kind`, of which row `token` is the one row; or NULL */
  int64_t kind, token;
  float *x; /* [rows, hidden]; with an embedding, room for it */
  const float *rotary;
  float *outputs, *last; /* as for `run`; with a stride, the last layer's output is also copied to `last` if that is not NULL */
  int64_t count, rows, position, stride;
  float *scratch;
  const Matrix *head; /* or NULL */
  const float *norm;
  float eps;
  int32_t spread;
  void *summaries;
  int64_t *tokens;
  float *numbers;
} Step;

typedef struct {
  Pass pass;
  Picking picking;
  int looks;
} Stepping;

static int stepping(const void *arguments, Member *member) {
  const Stepping *a = arguments;
  int64_t team = pool_team(member), need = room_of_pass(team, &a->pass);
  if (a->looks) need = most(need, room_of_picking(team, &a->picking));
  float *room = pool_memory(member, need * sizeof(float));
  if (!room) return -1;
  walk_layers(member, &a->pass, room);
  if (a->looks && !pool_left(member)) summarise_all(member, &a->picking, room);
  return 0;
}

_Static_assert(sizeof(Stepping) <= POOL_ARGUMENTS, "the arguments of a step are too large for the team");

PUBLIC int64_t EXPORT(step)(const Step *s, int threads) {
  int64_t hidden = s->shape->hidden;
  if (s->embedding)
    for (int64_t i = 0; i < hidden; i++) {
      int64_t at = s->token * hidden + i;
      s->x[i] = s->kind == FLOAT32    ? one_float32((const float *)s->embedding + at)
                : s->kind == BFLOAT16 ? one_bfloat16((const uint16_t *)s->embedding + at)
                                      : one_float16((const uint16_t *)s->embedding + at);
    }
  Stepping a = {
    .pass = {*s->shape, s->layers, s->cache, s->x, s->rotary, s->outputs, s->scratch, s->count, s->rows, s->position, s->stride},
  };
  const float *result = s->stride ? s->outputs + (s->count - 1) * s->stride : s->outputs;
  int64_t bytes = s->count * layer_bytes(s->layers);
  if (s->head) {
    a.picking = (Picking){*s->head, {result, s->norm, s->eps, s->rows}, s->summaries, s->spread};
    a.looks = 1;
    bytes += bytes_read(s->head);
  }
  int64_t job = pool_run(stepping, &a, sizeof a, threads, bytes);
  if (job < 0) return job;
  if (s->stride && s->last) memcpy(s->last, result, s->rows * hidden * sizeof(float));
  if (s->head) conclude(&a.picking, s->tokens, s->numbers);
  return job;
}
