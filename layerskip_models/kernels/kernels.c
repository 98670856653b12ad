/* Decoder layers over a few rows on a CPU, as fast as their weights can be read from memory.
 *
 * setup.py compiles this file once per kind of processor, with VARIANT as its name ("baseline", "avx2", ..), and library.py
 * chooses among them; native_layers.py explains the arguments. Why it exists: at batch 1 a pass is limited by reading the weights.
 * No public kernel reads 16- or 8-bit weights at full speed, or still does when verification brings eight rows instead of one.
 *
 * Every row is computed by the same operations in the same order, whatever other rows are in the batch and however many threads
 * there are. So a token drafted in a pass of one row gets exactly the same logits when it is verified among many.
 */
#include "four_bit_rounding.h"
#include "layers.h"
#include "head.h"
#include "row_of.h"
#include "sampling.h"

#define JOINED(name, variant) name##_##variant
#define JOIN(name, variant) JOINED(name, variant)
#define EXPORT(name) JOIN(name, VARIANT) /* step_avx2 */
#define PUBLIC __attribute__((visibility("default")))

/* ---- Called from Python --------------------------------------------------------------------------------------------- */

typedef struct {
  Matrix matrix;
  Input input;
  const float *residual;
  float *y;
} Product;

static void product(const void *arguments, Worker *worker) {
  const Product *a = arguments;
  multiply(worker, &a->matrix, &a->input, 0, a->residual, a->y);
  leave_tiles();
}

/* y = residual + x W^T, for any number of rows. Returns what `pool_run` returns. */
PUBLIC int64_t EXPORT(linear)(const Matrix *m, const float *x, int64_t rows, const float *residual, float *y, int threads) {
  Product a = {*m, {x, NULL, 0, rows}, residual, y};
  return pool_run(product, &a, sizeof a, threads, bytes_read(m));
}

/* y = norm(x) W^T. */
PUBLIC int64_t EXPORT(normalised_linear)(const Matrix *m, const float *norm, float eps, const float *x, int64_t rows,
                                         float *y, int threads) {
  Product a = {*m, {x, norm, eps, rows}, NULL, y};
  return pool_run(product, &a, sizeof a, threads, bytes_read(m));
}

/* See matrix.h. */
PUBLIC int EXPORT(interleaves)(int64_t kind, int64_t out, int64_t in) { return interleaves(kind, out, in); }

/* These outputs' own numbers as float32: y, [count, in]. On the caller's thread. */
PUBLIC void EXPORT(rows)(const Matrix *m, const int64_t *outputs, int64_t count, float *y) {
  for (int64_t r = 0; r < count; r++) row_of(m, outputs[r], y + r * m->in);
}

/* Floats of scratch that a pass over `rows` rows needs. */
PUBLIC int64_t EXPORT(scratch_size)(const Shape *s, const Layer *layer, int64_t rows) {
  return rows * (layer->qkv.out + s->heads * s->head_dim + layer->down.in + 3 * s->hidden);
}

/* ---- Reading and rounding weights ------------------------------------------------------------------------------------ */

/* See stored.h and four_bit_rounding.h. These run on the caller's thread: who calls them has a thread for every part. */
PUBLIC int EXPORT(eight_bit_rows)(int kind, const uint8_t *from, int64_t rows, int64_t in, int64_t row_bytes, float *row,
                                  int8_t *to, float *scales) {
  return eight_bit_rows(kind, from, rows, in, row_bytes, row, to, scales);
}
PUBLIC int EXPORT(float_rows)(int kind, const uint8_t *const *from, int64_t rows, int64_t in, int to_kind, float *row, void *to) {
  return float_rows(kind, from, rows, in, to_kind, row, to);
}
/* See interleaved.h. */
static void interleave(void *numbers, int64_t rows, int64_t words, int size, uint32_t flip, void *scratch) {
  if (size == 1) interleave_1(numbers, rows, words, (uint8_t)flip, scratch);
  else if (size == 2) interleave_2(numbers, rows, words, (uint16_t)flip, scratch);
  else interleave_4(numbers, rows, words, flip, scratch);
}
PUBLIC void EXPORT(interleave)(void *numbers, int64_t rows, int64_t words, int size, uint32_t flip, void *scratch) {
  interleave(numbers, rows, words, size, flip, scratch);
}
/* See side_by_side.h. */
PUBLIC void EXPORT(lay_side_by_side)(int64_t kind, const void *from, int64_t rows, int64_t in, void *to) {
  lay_side_by_side(kind, from, rows, in, to);
}
PUBLIC int EXPORT(finite_numbers)(int kind, const void *p, int64_t count) { return finite_numbers(kind, p, count); }
/* Rows of a file to a matrix in groups, whose rows of numbers have `width` bytes. With scratch for 16 of these, 16 outputs come side by
 * side, block by block while they are in a cache. Returns 0 if a scale or an offset is NaN or infinite. */
PUBLIC int EXPORT(block_rows)(int kind, const uint8_t *const *from, int64_t rows, int64_t in, const Blocks *to, int64_t width,
                              void *scratch) {
  const int64_t groups = in / (kind == Q6_K ? 16 : 32), blocks = in / 256 * (kind == Q6_K ? 1 : 2);
  const int scale = in_k(kind) ? 1 : 2, offset = in_k(kind) ? 1 : 4; /* bytes of one */
  int finite = 1;
  for (int64_t r = 0; r < rows; r++) {
    finite &= block_row(kind, from[r], in, to, r);
    if (!scratch || r % 16 != 15) continue;
    const int64_t first = r - 15;
    interleave(to->numbers + first * width, 16, width / 4, 4, 0, scratch);
    interleave((char *)to->groups + first * groups * scale, 16, groups, scale, 0, scratch);
    if (to->offsets) interleave((char *)to->offsets + first * groups * offset, 16, groups, offset, 0, scratch);
    if (to->blocks) interleave(to->blocks + first * blocks, 16, blocks, 2, 0, scratch);
  }
  return finite;
}
PUBLIC int EXPORT(four_bit_rows)(int kind, const uint8_t *from, int64_t rows, int64_t in, int64_t row_bytes,
                                 const Grouping *by, float *row, uint8_t *values, uint8_t *packed, uint16_t *groups,
                                 float *factors) {
  return four_bit_rows(kind, from, rows, in, row_bytes, by, row, values, packed, groups, factors);
}

/* ---- Sampling -------------------------------------------------------------------------------------------------------- */

/* See sampling.h. On the caller's thread. */
PUBLIC void EXPORT(distribute)(const float *logits, int64_t n, float temperature, int64_t top_k, double top_p, float *p,
                               void *candidates) {
  distribute(logits, n, temperature, top_k, top_p, p, candidates);
}
PUBLIC int64_t EXPORT(draw)(const float *weights, int64_t n, double uniform) { return draw(weights, n, uniform); }
PUBLIC int64_t EXPORT(accept)(const float *logits, int64_t stride, int64_t n, float temperature, int64_t top_k, double top_p,
                              const Drafts *drafts, double uniform, float *p, void *candidates, float *left, int64_t *accepted) {
  return accept_drafts(logits, stride, n, temperature, top_k, top_p, drafts, uniform, p, candidates, left, accepted);
}

/* ---- Exit adapters -------------------------------------------------------------------------------------------------- */

/* A narrow MLP between an early exit and the head: y = x + D (silu(gate) * up), where gate and up are of norm(x). */
typedef struct {
  Matrix gate_up, down;
  const float *norm; /* [hidden] */
} Adapter;

/* x, y: [rows, hidden]. gated: [rows, rank]. */
static void adapt_rows(Worker *worker, const Adapter *a, float eps, const float *x, int64_t rows, float *gated, float *y) {
  multiply(worker, &a->gate_up, &(Input){x, a->norm, eps, rows}, 1, NULL, gated);
  multiply(worker, &a->down, &(Input){gated, NULL, 0, rows}, 0, x, y);
}

typedef struct {
  Adapter adapter;
  float eps;
  const float *x;
  int64_t rows;
  float *gated, *y;
} Adapting;

static void adapting(const void *arguments, Worker *worker) {
  const Adapting *a = arguments;
  adapt_rows(worker, &a->adapter, a->eps, a->x, a->rows, a->gated, a->y);
  leave_tiles();
}

/* An adapter alone. gated: scratch, [rows, rank]. Returns what `pool_run` returns. */
PUBLIC int64_t EXPORT(adapt)(const Adapter *adapter, float eps, const float *x, int64_t rows, float *gated, float *y,
                             int threads) {
  Adapting a = {*adapter, eps, x, rows, gated, y};
  return pool_run(adapting, &a, sizeof a, threads, bytes_read(&adapter->gate_up) + bytes_read(&adapter->down));
}

static int64_t layer_bytes(const Layer *l) {
  return bytes_read(&l->qkv) + bytes_read(&l->output) + bytes_read(&l->gate_up) + bytes_read(&l->down);
}

/* Bytes of scratch that `pick` needs. */
PUBLIC int64_t EXPORT(pick_scratch)(const Matrix *m, int64_t rows) {
  return rows * chunk_count(m->out) * (int64_t)sizeof(Summary);
}

typedef struct {
  Matrix matrix;
  Input input;
  Summary *summaries; /* [rows, chunks] */
  float *logits;      /* [rows, out], or NULL where nobody asks for them */
  int spread;
} Picking;

/* The number of pieces that a vocabulary's chunks are divided into. */
static int64_t chunk_pieces(int64_t team, const Matrix *m, int64_t rows) {
  return pieces_of(team, chunk_count(m->out), bytes_of(m->kind, m->out * m->in), rows);
}

/* One or two phases: compute logits chunk by chunk, and summarise each chunk. */
static void summarise_all(Worker *worker, const Picking *a) {
  const Matrix *m = &a->matrix;
  int64_t rows = a->input.rows, size = chunk_size(m->out), chunks = chunk_count(m->out);
  int64_t pieces = chunk_pieces(pool_team(worker), m, rows), most_chunks = (chunks + pieces - 1) / pieces;
  /* A piece's logits stay until the piece is claimed: only then may they be written where others read. */
  int64_t width = size * (a->logits ? most_chunks : 1) + LANES;
  const float *x = prepared_together(worker, &a->input, m);
  int64_t before = x ? 0 : rows_scratch(m, rows), summaries = before + (rows * width + 1) / 2 * 2; /* floats */
  float *scratch = pool_memory(worker, summaries * sizeof(float) + rows * most_chunks * sizeof(Summary));
  if (!scratch) return;
  float *logits = scratch + before;
  Summary *own = (Summary *)(scratch + summaries);
  Phase phase = pool_phase(worker, pieces);
  for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
    int64_t first = chunks * piece / pieces, count = chunks * (piece + 1) / pieces - first;
    if (!x) x = prepared(&a->input, m, scratch);
    for (int64_t c = 0; c < count; c++) {
      int64_t begin = (first + c) * size, end = min(begin + size, m->out);
      float *chunk = logits + (a->logits ? c * size : 0);
      some_outputs(m, x, rows, NULL, begin, end, chunk, width);
      for (int64_t r = 0; r < rows; r++)
        own[r * count + c] = summarise(chunk + r * width, end - begin, begin, a->spread);
    }
    if (!pool_claim(&phase, piece)) continue;
    for (int64_t r = 0; r < rows; r++) {
      memcpy(a->summaries + r * chunks + first, own + r * count, count * sizeof(Summary));
      if (a->logits)
        memcpy(a->logits + r * m->out + first * size, logits + r * width,
               (min((first + count) * size, m->out) - first * size) * sizeof(float));
    }
    pool_done(&phase, piece);
  }
}

static void picking(const void *arguments, Worker *worker) {
  summarise_all(worker, arguments);
  leave_tiles();
}

/* Turn the summaries of a row's chunks into its results: row r of `rows`. */
static void conclude_row(const Summary *of_chunks, int64_t chunks, int spread, int64_t rows, int64_t r, int64_t *tokens,
                         float *numbers) {
  Summary s = combined(of_chunks, chunks, spread);
  tokens[r] = s.token;
  numbers[r] = s.best;
  if (!spread) return;
  numbers[rows + r] = 1.0f / s.sum;
  numbers[2 * rows + r] = s.best - s.second;
  numbers[3 * rows + r] = logf(s.sum) - s.moment / s.sum;
}

static void conclude(const Picking *a, int64_t *tokens, float *numbers) {
  int64_t rows = a->input.rows, chunks = chunk_count(a->matrix.out);
  for (int64_t r = 0; r < rows; r++) conclude_row(a->summaries + r * chunks, chunks, a->spread, rows, r, tokens, numbers);
}

/* For rows [rows, in], normalised first: tokens[r] is the argmax of row r's logits (the first if several are equal), numbers[r]
 * that logit, or NaN if any logit of the row is NaN. With `spread`, numbers continues with three arrays of [rows]: the token's
 * probability, its logit minus the second largest, and the entropy in nats. scratch: aligned to 8 bytes.
 * Returns what `pool_run` returns. */
PUBLIC int64_t EXPORT(pick)(const Matrix *m, const float *norm, float eps, const float *x, int64_t rows, void *scratch,
                            int spread, int64_t *tokens, float *numbers, int threads) {
  Picking a = {*m, {x, norm, eps, rows}, scratch, NULL, spread};
  int64_t job = pool_run(picking, &a, sizeof a, threads, bytes_read(m));
  if (job >= 0) conclude(&a, tokens, numbers);
  return job;
}

/* `pick`'s results from logits [rows, out] that are there already. room: scratch, of floats [out / CHUNKS + 2 * CHUNK]. */
PUBLIC void EXPORT(look)(const float *logits, int64_t rows, int64_t out, float *room, int spread, int64_t *tokens, float *numbers) {
  int64_t size = chunk_size(out), chunks = chunk_count(out);
  Summary summaries[CHUNKS];
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t c = 0; c < chunks; c++) {
      int64_t begin = c * size, count = min(size, out - begin);
      memcpy(room, logits + r * out + begin, count * sizeof *room);
      summaries[c] = summarise(room, count, begin, spread);
    }
    conclude_row(summaries, chunks, spread, rows, r, tokens, numbers);
  }
}

/* A whole pass in one call: embed tokens (or take hidden states), run layers, and pick tokens. `Step` of library.py. */
typedef struct {
  const Shape *shape;
  const Layer *layers;
  const Span *spans; /* `rows` rows in total; if there are several, they must outlive the call (see `pool_oldest`) */
  int64_t num_spans;
  const Matrix *embedding; /* [vocab, hidden], or NULL; `embedded` selects its rows */
  const int64_t *embedded;
  float *x; /* [rows, hidden]: the input; with an embedding, scratch for it */
  const float *rotary;
  float *outputs, *last; /* layer i writes [rows, hidden] to outputs + i * stride, and the last layer's output is copied to `last`
                            unless that is NULL; a stride of 0 keeps the last layer's output only */
  int64_t first, count, rows, stride;
  float *scratch;
  const Matrix *head; /* or NULL */
  const float *norm;
  float eps;
  int32_t spread;
  void *summaries;
  int64_t *tokens;
  float *numbers;
  float *logits;          /* [rows, vocab], receives them; or NULL */
  const Adapter *adapter; /* applied before the head, or NULL */
  float *adapted;         /* [rows, rank + hidden], with an adapter */
  float *parts;           /* `parts_size` floats of scratch, or NULL: then no chunk's attention is divided among threads */
} Step;

typedef struct {
  Pass pass;
  Picking picking;
  const Adapter *adapter; /* lives as long as the model */
  const float *exit;      /* the adapter's input */
  float *gated;
  int looks;
} Stepping;

static void stepping(const void *arguments, Worker *worker) {
  const Stepping *a = arguments;
  const Picking *look = &a->picking;
  walk_layers(worker, &a->pass);
  if (a->adapter && !pool_left(worker))
    adapt_rows(worker, a->adapter, look->input.eps, a->exit, look->input.rows, a->gated, (float *)look->input.x);
  if (a->looks && !pool_left(worker)) summarise_all(worker, look);
  leave_tiles();
}

_Static_assert(sizeof(Stepping) <= POOL_ARGUMENTS, "the arguments of a step are too large for the team");

/* Bytes of keys and values that a text's rows read in a layer, ignoring windows. */
static int64_t cache_bytes(const Shape *s, const Span *span) {
  return 2 * s->kv_heads * s->head_dim * (span->position + span->rows) * number_bytes(span);
}

/* Floats of `parts` that a step may need. */
PUBLIC int64_t EXPORT(parts_size)(const Step *s) {
  int64_t need = 0;
  for (const Span *span = s->spans; span < s->spans + s->num_spans; span++) {
    int64_t sections = (span->position + span->rows - 1) / SECTION + 1;
    if (sections > 1 && span->rows * s->shape->heads / s->shape->kv_heads <= QUERIES)
      need += span->rows * s->shape->heads * sections * (s->shape->head_dim + 2);
  }
  return need;
}

#define LAYER_PHASES 6 /* queries, keys and values; caches; attention; its output; gates and ups; down */

/* The threads for a pass. Small models have small phases: a team that is too large for all of them would only look at itself. */
static int team_of_step(int threads, int64_t layers, int64_t bytes, int64_t rows) {
  return (int)worth_sharing(threads, bytes / (LAYER_PHASES * layers + 1), rows);
}

PUBLIC int64_t EXPORT(step)(const Step *s, int threads) {
  int64_t hidden = s->shape->hidden;
  if (s->embedding) EXPORT(rows)(s->embedding, s->embedded, s->rows, s->x);
  Stepping a = {
    .pass = {*s->shape, s->layers, *s->spans, s->num_spans > 1 ? s->spans : NULL, s->x, s->rotary, s->outputs, s->scratch,
             s->first, s->count, s->rows, s->stride, s->parts},
  };
  const float *result = s->stride ? s->outputs + (s->count - 1) * s->stride : s->outputs;
  int64_t bytes = s->count * layer_bytes(s->layers);
  for (int64_t i = 0; i < s->num_spans; i++) bytes += s->count * cache_bytes(s->shape, s->spans + i);
  if (s->head) {
    a.picking = (Picking){*s->head, {result, s->norm, s->eps, s->rows}, s->summaries, s->logits, s->spread};
    a.looks = 1;
    bytes += bytes_read(s->head);
    if (s->adapter) {
      a.adapter = s->adapter, a.exit = result, a.gated = s->adapted;
      a.picking.input.x = s->adapted + s->rows * s->adapter->down.in;
      bytes += bytes_read(&s->adapter->gate_up) + bytes_read(&s->adapter->down);
    }
  }
  int64_t job = pool_run(stepping, &a, sizeof a, team_of_step(threads, s->count, bytes, s->rows), bytes);
  if (job < 0) return job;
  if (s->stride && s->last) memcpy(s->last, result, s->rows * hidden * sizeof(float));
  if (s->head) conclude(&a.picking, s->tokens, s->numbers);
  return job;
}
