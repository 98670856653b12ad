/* Attention of all rows of a pass on a team of threads. */
#ifndef SELFSPEC_SHARED_ATTENTION_H
#define SELFSPEC_SHARED_ATTENTION_H
#include "pass.h"

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

/* The second phase: parts are joined. */
static void join_all(Member *member, const Pass *a, const Division *d, float *attended) {
  int64_t dim = a->shape.head_dim, pieces = least(d->pieces, d->parted), each = (d->parted + pieces - 1) / pieces;
  float *room = pool_memory(member, each * dim * sizeof(float)); /* for the results of a piece's queries */
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

static void attend_all(Member *member, const Pass *a, int64_t layer, const float *qkv, float *attended) {
  Division d = divide(a, a->layers + layer, pool_team(member));
  int64_t dim = a->shape.head_dim, before = dim + QUERIES * dim + ATTEND_ROOM(dim);
  float *room = pool_memory(member, (before + d.results) * sizeof(float));
  if (!room) return;
  float *normed = room, *queries = normed + dim, *inside = queries + QUERIES * dim, *own = room + before;
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
  if (d.parted) join_all(member, a, &d, attended);
}
#endif
