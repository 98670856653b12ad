/* Attention for all rows of a pass on a team of threads. */
#ifndef SELFSPEC_SHARED_ATTENTION_H
#define SELFSPEC_SHARED_ATTENTION_H
#include "pass.h"

#define ITEM_BYTES (512 << 10) /* fewest bytes of keys and values in an item that are worth a second phase */

/* How a layer's attention is divided. The queries of a text and a KV head are cut into chunks of at most QUERIES, which read keys
 * and values together. A chunk is normally one item of work. Where a text is long relative to each thread's share and its queries
 * fit one chunk, the chunk becomes several items of a few sections each: their partial results go to shared memory, and a second
 * phase joins them. None of this changes a result, because sections are always joined in order. */
typedef struct {
  int64_t group, window;
  int64_t spread; /* most chunks to cut one chunk into, where there would be fewer items than threads */
  int64_t each;   /* sections of an item, where a chunk is several items */
  int64_t all;    /* units, the sections of all chunks; pieces are ranges of these */
  int64_t pieces;
  int64_t split_queries;  /* queries whose sections are spread over several items */
  int64_t results; /* most floats that a piece produces */
} Division;

INLINE int64_t number_bytes(const Span *s) { return s->kind == FLOAT32 ? 4 : 2; } /* bytes per number of a key or value */
INLINE int64_t queries_of(const Division *d, const Span *s) { return s->rows * d->group; } /* of one KV head */
INLINE int64_t chunks_of(const Division *d, const Span *s) {
  int64_t queries = queries_of(d, s);
  return queries <= QUERIES ? min(queries, d->spread) : (queries + QUERIES - 1) / QUERIES;
}
INLINE int64_t first_section(const Division *d, const Span *s) { return max(0, s->position + 1 - d->window) / SECTION; }
INLINE int64_t sections_of(const Division *d, const Span *s) {
  return (s->position + s->rows - 1) / SECTION + 1 - first_section(d, s);
}
INLINE int64_t items_of_chunk(const Division *d, const Span *s) {
  int64_t sections = sections_of(d, s);
  return queries_of(d, s) <= QUERIES && sections > d->each ? (sections + d->each - 1) / d->each : 1;
}

/* Set d->all and d->split_queries. Returns the number of items. */
static int64_t count_items(const Pass *a, Division *d) {
  int64_t items = 0, before = 0;
  d->all = d->split_queries = 0;
  for (const Span *span = spans_of(a); before < a->rows; before += span++->rows) {
    int64_t chunks = a->shape.kv_heads * chunks_of(d, span), each = items_of_chunk(d, span);
    d->all += chunks * sections_of(d, span);
    items += chunks * each;
    if (each > 1) d->split_queries += span->rows * a->shape.heads;
  }
  return items;
}

/* Bytes of keys and values that all chunks read, each its own. */
static int64_t bytes_attended(const Pass *a, const Division *d) {
  const Shape *s = &a->shape;
  int64_t numbers = 0, before = 0;
  for (const Span *span = spans_of(a); before < a->rows; before += span++->rows)
    numbers += s->kv_heads * chunks_of(d, span) * (min(span->position, d->window) + span->rows) * s->head_dim * 2;
  return numbers * (int64_t)sizeof(float);
}

static Division divide(const Pass *a, const Layer *l, int64_t team) {
  const Shape *s = &a->shape;
  Division d = {.group = s->heads / s->kv_heads, .window = l->window, .spread = 1, .each = INT64_MAX};
  int64_t items = count_items(a, &d), section = SECTION * s->head_dim * 2 * (int64_t)sizeof(float);
  team = worth_sharing(team, bytes_attended(a, &d), 1);
  if (team > 1 && a->parts) {
    d.each = max((ITEM_BYTES + section - 1) / section, d.all / (4 * team));
    items = count_items(a, &d);
  }
  if (items < team) {
    d.spread = (team + items - 1) / items;
    items = count_items(a, &d);
  }
  int64_t largest = 0, before = 0;
  for (const Span *span = spans_of(a); before < a->rows; before += span++->rows)
    largest = max(largest, min(QUERIES, queries_of(&d, span)));
  d.pieces = min(items, max(team, min(team * POOL_PIECES, bytes_attended(a, &d) / PIECE_BYTES)));
  int64_t sections = (d.all + d.pieces - 1) / d.pieces;
  d.results = min(sections, items) * largest * s->head_dim;
  if (d.split_queries) d.results += (sections + d.each) * PART(largest, s->head_dim);
  return d;
}

/* A cursor over the items, ordered by span, head, chunk and section. */
typedef struct {
  const Span *span;
  int64_t units, rows, parts; /* of all earlier spans: units, rows, and floats of parts */
  int64_t head, start, count; /* KV head, and its queries start .. start + count - 1, ordered by row */
  int64_t sections, first, last; /* sections of the chunk; the item's are [first, last) of these */
  int64_t unit;                  /* the item's first unit */
  int is_part;
} Item;

static Item first_item(const Pass *a) { return (Item){.span = spans_of(a)}; }

/* Move to the first item that begins in units [unit, stop). Returns whether there is one. */
static int find_item(const Pass *a, const Division *d, Item *at, int64_t unit, int64_t stop) {
  int64_t kv_heads = a->shape.kv_heads, heads = a->shape.heads;
  if (unit < at->units) *at = first_item(a); /* pieces may come in any order */
  for (; unit < stop; unit = max(unit, at->units)) {
    const Span *s = at->span;
    int64_t chunks = chunks_of(d, s), sections = sections_of(d, s), items = items_of_chunk(d, s);
    int64_t all = kv_heads * chunks * sections, in = unit - at->units;
    int64_t number = in / sections, item = (in % sections * items + sections - 1) / sections;
    if (item == items) number++, item = 0;
    if (in >= all || number >= kv_heads * chunks) { /* past this span */
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

/* The parts of an item's chunk, one per section, in order. */
INLINE float *parts_of_chunk(const Pass *a, const Division *d, const Item *at) {
  int64_t earlier = at->head * queries_of(d, at->span) + at->start;
  return a->parts + at->parts + earlier * at->sections * (a->shape.head_dim + 2);
}

/* Where a query's result goes. query: number among its KV head's queries. */
INLINE float *place_of(const Pass *a, const Division *d, const Item *at, int64_t query, float *attended) {
  int64_t row = at->rows + query / d->group, head = at->head * d->group + query % d->group;
  return attended + (row * a->shape.heads + head) * a->shape.head_dim;
}

/* Floats that an item produces. */
INLINE int64_t results_of(const Pass *a, const Item *at) {
  return at->is_part ? (at->last - at->first) * PART(at->count, a->shape.head_dim) : at->count * a->shape.head_dim;
}

/* An item's keys, values and queries, the latter normalised and rotated into `queries`, count * dim floats. normed: dim floats. */
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
    h.begins[q] = max(0, position + 1 - l->window);
    h.ends[q] = position + 1;
  }
  return h;
}

/* The second phase: join the parts. */
static void join_all(Worker *worker, const Pass *a, const Division *d, float *attended) {
  int64_t dim = a->shape.head_dim, pieces = min(d->pieces, d->split_queries), each = (d->split_queries + pieces - 1) / pieces;
  float *scratch = pool_memory(worker, each * dim * sizeof(float)); /* the results of a piece's queries */
  Phase phase = pool_phase(worker, pieces);
  for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
    /* Walk the split chunks twice: compute this piece's queries, then copy the results if this worker claims the piece. */
    for (int writes = 0; writes < 2; writes++) {
      Item at = first_item(a);
      float *y = scratch;
      if (writes && !pool_claim(&phase, piece)) break;
      for (int64_t unit = 0, before = 0; find_item(a, d, &at, unit, d->all); unit = at.unit - at.first + at.sections) {
        if (!at.is_part) continue;
        const float *parts = parts_of_chunk(a, d, &at);
        int64_t first = d->split_queries * piece / pieces - before, last = d->split_queries * (piece + 1) / pieces - before;
        for (int64_t q = max(0, first); q < min(at.count, last); q++, y += dim) {
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

static void attend_all(Worker *worker, const Pass *a, int64_t layer, const float *qkv, float *attended) {
  Division d = divide(a, a->layers + layer, pool_team(worker));
  int64_t dim = a->shape.head_dim, before = dim + QUERIES * dim + ATTEND_SCRATCH(dim);
  float *scratch = pool_memory(worker, (before + d.results) * sizeof(float));
  if (!scratch) return;
  float *normed = scratch, *queries = normed + dim, *attend_scratch = queries + QUERIES * dim, *own = scratch + before;
  Item at = first_item(a);
  Phase phase = pool_phase(worker, d.pieces);
  for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
    int64_t start = d.all * piece / d.pieces, stop = d.all * (piece + 1) / d.pieces;
    float *y = own;
    for (int64_t unit = start; find_item(a, &d, &at, unit, stop); unit = at.unit + at.last - at.first, y += results_of(a, &at)) {
      Head h = head_of(a, &d, layer, &at, qkv, normed, queries);
      if (!at.is_part) {
        attend(&h, attend_scratch, y);
        continue;
      }
      int64_t section = (first_section(&d, at.span) + at.first) * SECTION;
      for (int64_t i = 0; i < at.last - at.first; i++, section += SECTION)
        attend_section(&h, section, next_keys(&h, section), attend_scratch, part_at(y + i * PART(at.count, dim), at.count, dim));
    }
    if (!pool_claim(&phase, piece)) continue;
    y = own;
    for (int64_t unit = start; find_item(a, &d, &at, unit, stop); unit = at.unit + at.last - at.first, y += results_of(a, &at)) {
      if (at.is_part) memcpy(parts_of_chunk(a, &d, &at) + at.first * PART(at.count, dim), y, results_of(a, &at) * sizeof(float));
      else
        for (int64_t q = 0; q < at.count; q++)
          memcpy(place_of(a, &d, &at, at.start + q, attended), y + q * dim, dim * sizeof(float));
    }
    pool_done(&phase, piece);
  }
  if (d.split_queries) join_all(worker, a, &d, attended);
}
#endif
