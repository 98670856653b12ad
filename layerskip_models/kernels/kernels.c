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
  void *keys, *values; /* of layer 0, [kv_heads, positions, head_dim] */
  int64_t layer_stride, head_stride, position, rows;
  int64_t kind; /* of keys and values, FLOAT32 or BFLOAT16 */
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
  float *parts;                       /* see `Division`; NULL where there is no room for any */
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

/* Numbers from `place` on of keys or values, in the kind that they are kept in. */
INLINE void keep(const float *x, int64_t kind, void *numbers, int64_t place, int64_t dim) {
  if (kind == FLOAT32) memcpy((float *)numbers + place, x, dim * sizeof(float));
  else
    for (int64_t i = 0; i < dim; i++) ((uint16_t *)numbers)[place + i] = to_bfloat16(x[i]);
}

/* Rotated keys, and values, of the rows go into the caches. So little work that it is done where the result belongs.
 * room: for 2 * head_dim numbers. */
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
      float *rotated = span->kind == FLOAT32 ? (float *)span->keys + place : room + dim;
      rotate(key, rotary_at(a, l, position), 1.0f, dim, rotated);
      if (span->kind != FLOAT32) keep(rotated, span->kind, span->keys, place, dim);
      keep(value, span->kind, span->values, place, dim);
    }
    pool_done(&phase, piece);
  }
}

#define ITEM_BYTES (512 << 10) /* of keys and values, at least, that are worth a second phase */

/* How a layer's attention is divided. The queries of a text and of a head are cut into chunks of at most QUERIES, which share
 * their reading of keys and values. What a chunk does is one item; where a text is long beside what each thread has to do, and
 * its queries are a single chunk, it is several items of some sections each. Their parts then go to memory that all threads
 * see, and a second phase joins them. Nothing of this changes a result: sections are joined in order anyway. */
typedef struct {
  int64_t group, window;
  int64_t spread; /* chunks instead of one, where there would be fewer items than threads */
  int64_t each;   /* sections of an item, where a chunk is several items */
  int64_t all;    /* sections of all chunks: pieces are cut from these */
  int64_t pieces;
  int64_t parted;  /* queries whose sections are several items' */
  int64_t results; /* numbers that come out of a piece, at most */
} Division;

INLINE int64_t number_bytes(const Span *s) { return s->kind == FLOAT32 ? 4 : 2; } /* of a key or a value */
INLINE int64_t queries_of(const Division *d, const Span *s) { return s->rows * d->group; } /* and of one KV head */
INLINE int64_t chunks_of(const Division *d, const Span *s) {
  int64_t queries = queries_of(d, s);
  return queries <= QUERIES ? least(queries, d->spread) : (queries + QUERIES - 1) / QUERIES;
}
INLINE int64_t first_section(const Division *d, const Span *s) { return most(0, s->position + 1 - d->window) / SECTION; }
INLINE int64_t sections_of(const Division *d, const Span *s) {
  return (s->position + s->rows - 1) / SECTION + 1 - first_section(d, s);
}
INLINE int64_t items_of_chunk(const Division *d, const Span *s) {
  int64_t sections = sections_of(d, s);
  return queries_of(d, s) <= QUERIES && sections > d->each ? (sections + d->each - 1) / d->each : 1;
}

/* Count what there is to divide. Returns the number of items. */
static int64_t count_items(const Pass *a, Division *d) {
  int64_t items = 0, before = 0;
  d->all = d->parted = 0;
  for (const Span *span = spans_of(a); before < a->rows; before += span++->rows) {
    int64_t chunks = a->shape.kv_heads * chunks_of(d, span), each = items_of_chunk(d, span);
    d->all += chunks * sections_of(d, span);
    items += chunks * each;
    if (each > 1) d->parted += span->rows * a->shape.heads;
  }
  return items;
}

static Division divide(const Pass *a, const Layer *l, int64_t team) {
  const Shape *s = &a->shape;
  Division d = {.group = s->heads / s->kv_heads, .window = l->window, .spread = 1, .each = INT64_MAX};
  int64_t items = count_items(a, &d), section = SECTION * s->head_dim * 2 * (int64_t)sizeof(float);
  if (team > 1 && a->parts) {
    d.each = most((ITEM_BYTES + section - 1) / section, d.all / (4 * team));
    items = count_items(a, &d);
  }
  if (items < team) {
    d.spread = (team + items - 1) / items;
    items = count_items(a, &d);
  }
  int64_t reads = 0, largest = 0, before = 0;
  for (const Span *span = spans_of(a); before < a->rows; before += span++->rows) {
    int64_t positions = least(span->position, l->window) + span->rows;
    reads += s->kv_heads * chunks_of(&d, span) * positions * (section / SECTION);
    largest = most(largest, least(QUERIES, queries_of(&d, span)));
  }
  d.pieces = least(items, most(team, least(team * POOL_PIECES, reads / PIECE_BYTES)));
  int64_t sections = (d.all + d.pieces - 1) / d.pieces;
  d.results = least(sections, items) * largest * s->head_dim;
  if (d.parted) d.results += (sections + d.each) * PART(largest, s->head_dim);
  return d;
}

/* Where one is among the items, in the order of spans, heads, chunks and sections. */
typedef struct {
  const Span *span;
  int64_t units, rows, parts; /* sections of all chunks, rows, and numbers of parts, of earlier spans */
  int64_t head, start, count; /* queries start .. start + count - 1 of a head, which come row by row */
  int64_t sections, first, last; /* of a chunk; of the item, counted from the chunk's first */
  int64_t unit;                  /* where the item begins */
  int is_part;
} Item;

static Item no_item(const Pass *a) { return (Item){.span = spans_of(a)}; }

/* Go to the first item that begins at `unit` or behind it, and before `stop`. Returns whether there is one. */
static int find_item(const Pass *a, const Division *d, Item *at, int64_t unit, int64_t stop) {
  int64_t kv_heads = a->shape.kv_heads, heads = a->shape.heads;
  if (unit < at->units) *at = no_item(a); /* pieces may come in any order */
  for (; unit < stop; unit = most(unit, at->units)) {
    const Span *s = at->span;
    int64_t chunks = chunks_of(d, s), sections = sections_of(d, s), items = items_of_chunk(d, s);
    int64_t all = kv_heads * chunks * sections, in = unit - at->units;
    int64_t number = in / sections, item = (in % sections * items + sections - 1) / sections;
    if (item == items) number++, item = 0;
    if (in >= all || number >= kv_heads * chunks) { /* of the span */
      if (items > 1) at->parts += s->rows * heads * sections * (a->shape.head_dim + 2);
      at->units += all, at->rows += s->rows, at->span++;
      continue;
    }
    int64_t queries = queries_of(d, s), chunk = number % chunks;
    at->head = number / chunks;
    at->start = queries * chunk / chunks, at->count = queries * (chunk + 1) / chunks - at->start;
    at->sections = sections, at->first = sections * item / items, at->last = sections * (item + 1) / items;
    at->unit = at->units + number * sections + at->first;
    at->is_part = items > 1;
    return at->unit < stop;
  }
  return 0;
}

/* Of an item's chunk: where the parts of its sections are, one behind the other. */
INLINE float *parts_of_chunk(const Pass *a, const Division *d, const Item *at) {
  int64_t earlier = at->head * queries_of(d, at->span) + at->start;
  return a->parts + at->parts + earlier * at->sections * (a->shape.head_dim + 2);
}

/* Where the result of an item's query belongs. */
INLINE float *place_of(const Pass *a, const Division *d, const Item *at, int64_t query, float *attended) {
  int64_t row = at->rows + query / d->group, head = at->head * d->group + query % d->group;
  return attended + (row * a->shape.heads + head) * a->shape.head_dim;
}

/* Numbers that come out of an item. */
INLINE int64_t results_of(const Pass *a, const Item *at) {
  return at->is_part ? (at->last - at->first) * PART(at->count, a->shape.head_dim) : at->count * a->shape.head_dim;
}

/* What an item is about, and its queries: normalised and rotated. normed, queries: room for dim and count * dim numbers. */
static Head head_of(const Pass *a, const Division *d, int64_t layer, const Item *at, const float *qkv, float *normed, float *queries) {
  const Shape *s = &a->shape;
  const Layer *l = a->layers + layer;
  const Span *span = at->span;
  int64_t dim = s->head_dim, width = (s->heads + 2 * s->kv_heads) * dim, size = number_bytes(span);
  int64_t offset = (layer * span->layer_stride + at->head * span->head_stride) * size;
  Head h = {.queries = queries, .count = at->count, .dim = dim, .small = size == 2};
  h.keys = (const char *)span->keys + offset;
  h.values = (const char *)span->values + offset;
  for (int64_t q = 0; q < at->count; q++) {
    int64_t row = (at->start + q) / d->group, head = at->head * d->group + (at->start + q) % d->group;
    int64_t position = span->position + row;
    const float *query = normed_head(a, l->query_norm, l->joint, qkv + (at->rows + row) * width, s->heads, head, normed);
    rotate(query, rotary_at(a, l, position), s->scale, dim, queries + q * dim);
    h.begins[q] = most(0, position + 1 - l->window);
    h.ends[q] = position + 1;
  }
  return h;
}

/* The second phase: parts are joined. room: for the results of a piece's queries. */
static void join_all(Member *member, const Pass *a, const Division *d, float *attended, float *room) {
  int64_t dim = a->shape.head_dim, pieces = least(d->pieces, d->parted);
  Phase phase = pool_phase(member, pieces);
  for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
    /* Chunks as in the first phase, each with what begins it. */
    for (int writes = 0; writes < 2; writes++) {
      Item at = no_item(a);
      float *y = room;
      if (writes && !pool_win(&phase, piece)) break;
      for (int64_t unit = 0, before = 0; find_item(a, d, &at, unit, d->all); unit = at.unit - at.first + at.sections) {
        if (!at.is_part) continue;
        const float *parts = parts_of_chunk(a, d, &at);
        int64_t first = d->parted * piece / pieces - before, last = d->parted * (piece + 1) / pieces - before;
        for (int64_t q = most(0, first); q < least(at.count, last); q++, y += dim) {
          float peak = 0, sum_of = 0, *place = place_of(a, d, &at, at.start + q, attended);
          if (writes) {
            memcpy(place, y, dim * sizeof(float));
            continue;
          }
          for (int64_t i = 0; i < at.sections; i++) {
            Part part = part_at((float *)parts + i * PART(at.count, dim), at.count, dim);
            join_parts(y, &peak, &sum_of, part.out + q * dim, part.peaks[q], part.sums[q], dim);
          }
          divide_by_sum(y, sum_of, dim);
        }
        before += at.count;
      }
      if (writes) pool_done(&phase, piece);
    }
  }
}

/* Numbers of `room` that `attend_all` needs. */
static int64_t room_of_attention(const Pass *a, const Division *d) {
  int64_t dim = a->shape.head_dim, pieces = least(d->pieces, d->parted);
  int64_t joined = pieces ? (d->parted / pieces + 1) * dim : 0;
  return most(joined, dim + QUERIES * dim + ATTEND_ROOM(dim) + d->results);
}

static void attend_all(Member *member, const Pass *a, int64_t layer, const float *qkv, float *attended, float *room) {
  Division d = divide(a, a->layers + layer, pool_team(member));
  int64_t dim = a->shape.head_dim;
  float *normed = room, *queries = normed + dim, *inside = queries + QUERIES * dim, *own = inside + ATTEND_ROOM(dim);
  Item at = no_item(a);
  Phase phase = pool_phase(member, d.pieces);
  for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
    int64_t start = d.all * piece / d.pieces, stop = d.all * (piece + 1) / d.pieces;
    float *y = own;
    for (int64_t unit = start; find_item(a, &d, &at, unit, stop); unit = at.unit + at.last - at.first, y += results_of(a, &at)) {
      Head h = head_of(a, &d, layer, &at, qkv, normed, queries);
      if (!at.is_part) {
        attend(&h, inside, y);
        continue;
      }
      int64_t section = (first_section(&d, at.span) + at.first) * SECTION;
      for (int64_t i = 0; i < at.last - at.first; i++, section += SECTION)
        attend_section(&h, section, keys_behind(&h, section), inside, part_at(y + i * PART(at.count, dim), at.count, dim));
    }
    if (!pool_win(&phase, piece)) continue;
    y = own;
    for (int64_t unit = start; find_item(a, &d, &at, unit, stop); unit = at.unit + at.last - at.first, y += results_of(a, &at)) {
      if (at.is_part) memcpy(parts_of_chunk(a, &d, &at) + at.first * PART(at.count, dim), y, results_of(a, &at) * sizeof(float));
      else
        for (int64_t q = 0; q < at.count; q++)
          memcpy(place_of(a, &d, &at, at.start + q, attended), y + q * dim, dim * sizeof(float));
    }
    pool_done(&phase, piece);
  }
  if (d.parted) join_all(member, a, &d, attended, room);
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
  int64_t rows = a->rows, need = 2 * a->shape.head_dim;
  for (int64_t l = a->first; l < a->first + a->count; l++) {
    if (l > a->first && a->layers[l].window == a->layers[l - 1].window) continue;
    Division d = divide(a, a->layers + l, team);
    need = most(need, room_of_attention(a, &d));
  }
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
  float *parts;           /* room for `parts_size` numbers, or NULL: then no text's attention is divided among threads */
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

/* Of a layer's keys and values that a text's rows read, but for windows. */
static int64_t cache_bytes(const Shape *s, const Span *span) {
  return 2 * s->kv_heads * s->head_dim * (span->position + span->rows) * number_bytes(span);
}

/* Numbers of `parts` that a step may want. */
PUBLIC int64_t EXPORT(parts_size)(const Step *s) {
  int64_t need = 0;
  for (const Span *span = s->spans; span < s->spans + s->num_spans; span++) {
    int64_t sections = (span->position + span->rows - 1) / SECTION + 1;
    if (sections > 1 && span->rows * s->shape->heads / s->shape->kv_heads <= QUERIES)
      need += span->rows * s->shape->heads * sections * (s->shape->head_dim + 2);
  }
  return need;
}

PUBLIC int64_t EXPORT(step)(const Step *s, int threads) {
  int64_t hidden = s->shape->hidden;
  if (s->embedding)
    for (int64_t i = 0; i < s->rows * hidden; i++) {
      int64_t at = s->embedded[i / hidden] * hidden + i % hidden;
      s->x[i] = s->kind == FLOAT32    ? one_float32((const float *)s->embedding + at)
                : s->kind == BFLOAT16 ? one_bfloat16((const uint16_t *)s->embedding + at)
                                      : one_float16((const uint16_t *)s->embedding + at);
    }
  Stepping a = {
    .pass = {*s->shape, s->layers, *s->spans, s->num_spans > 1 ? s->spans : NULL, s->x, s->rotary, s->outputs, s->scratch,
             s->first, s->count, s->rows, s->stride, s->parts},
  };
  const float *result = s->stride ? s->outputs + (s->count - 1) * s->stride : s->outputs;
  int64_t bytes = s->count * layer_bytes(s->layers);
  for (int64_t i = 0; i < s->num_spans; i++) bytes += s->count * cache_bytes(s->shape, s->spans + i);
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
