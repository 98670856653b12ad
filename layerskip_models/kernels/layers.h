/* Decoder layers on a team of threads, phase by phase. */
#ifndef SELFSPEC_LAYERS_H
#define SELFSPEC_LAYERS_H
#include "multiply.h"
#include "shared_attention.h"

/* Store the dim numbers of a key or value at index `place`, in the cache's own kind (float32 or bfloat16). */
INLINE void store_cached(const float *x, int64_t kind, void *numbers, int64_t place, int64_t dim) {
  if (kind == FLOAT32) memcpy((float *)numbers + place, x, dim * sizeof(float));
  else
    for (int64_t i = 0; i < dim; i++) ((uint16_t *)numbers)[place + i] = to_bfloat16(x[i]);
}

/* A phase: write the rows' rotated keys and their values to the caches. So little work that it is written in place. */
static void write_caches(Worker *worker, const Pass *a, int64_t layer, const float *qkv) {
  const Shape *s = &a->shape;
  const Layer *l = a->layers + layer;
  const Span *span = spans_of(a);
  int64_t dim = s->head_dim, width = (s->heads + 2 * s->kv_heads) * dim, before = 0; /* rows in earlier spans */
  int64_t units = a->rows * s->kv_heads, bytes = units * 2 * dim * (int64_t)sizeof(float);
  int64_t pieces = min(units, worth_sharing(pool_team(worker), bytes, 1));
  float *scratch = pool_memory(worker, 2 * dim * sizeof(float));
  Phase phase = pool_phase(worker, pieces);
  for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
    if (!pool_claim(&phase, piece)) continue;
    for (int64_t unit = units * piece / pieces; unit < units * (piece + 1) / pieces; unit++) {
      int64_t r = unit / s->kv_heads, head = unit % s->kv_heads;
      if (r < before) span = spans_of(a), before = 0; /* pieces may come in any order */
      while (r >= before + span->rows) before += span++->rows;
      const float *keys = qkv + r * width + s->heads * dim, *value = keys + (s->kv_heads + head) * dim;
      const float *key = normed_head(a, l->key_norm, l->joint, keys, s->kv_heads, head, scratch);
      int64_t position = span->position + r - before;
      int64_t place = layer * span->layer_stride + head * span->head_stride + position * dim;
      float *rotated = span->kind == FLOAT32 ? (float *)span->keys + place : scratch + dim;
      rotate(key, rotary_at(a, l, position), 1.0f, dim, rotated);
      if (span->kind != FLOAT32) store_cached(rotated, span->kind, span->keys, place, dim);
      store_cached(value, span->kind, span->values, place, dim);
    }
    pool_done(&phase, piece);
  }
}

/* A phase: y = residual + norm(x), [rows, hidden]. So little work that it is written in place. */
static void add_normalised(Worker *worker, const Pass *a, const float *x, const float *norm, const float *residual, float *y) {
  int64_t size = a->shape.hidden, bytes = a->rows * size * 3 * (int64_t)sizeof(float);
  int64_t pieces = min(a->rows, worth_sharing(pool_team(worker), bytes, 1));
  Phase phase = pool_phase(worker, pieces);
  for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
    if (!pool_claim(&phase, piece)) continue;
    for (int64_t r = a->rows * piece / pieces; r < a->rows * (piece + 1) / pieces; r++) {
      float factor = norm_factor(x + r * size, a->shape.eps, size);
      for (int64_t i = r * size; i < (r + 1) * size; i++) y[i] = residual[i] + x[i] * factor * norm[i - r * size];
    }
    pool_done(&phase, piece);
  }
}

/* y = residual + norm(x W^T): one phase without a norm, otherwise two. added: scratch, [rows, hidden]. */
static void add(Worker *worker, const Pass *a, const Matrix *m, const float *x, const float *norm, const float *residual,
                float *y, float *added) {
  multiply(worker, m, &(Input){x, NULL, 0, a->rows}, 0, norm ? NULL : residual, norm ? added : y);
  if (norm) add_normalised(worker, a, added, norm, residual, y);
}

/* A layer's intermediate results in the pass's scratch: qkv is [rows, (heads + 2 * kv_heads) * head_dim], and so on. */
typedef struct {
  float *qkv, *attended, *gated, *middle, *between, *added;
} Scratch;

static Scratch scratch_of(const Pass *a) {
  const Shape *s = &a->shape;
  int64_t rows = a->rows;
  Scratch in = {.qkv = a->scratch};
  in.attended = in.qkv + rows * (s->heads + 2 * s->kv_heads) * s->head_dim;
  in.gated = in.attended + rows * s->heads * s->head_dim;
  in.middle = in.gated + rows * a->layers->down.in;
  in.between = in.middle + rows * s->hidden;
  in.added = in.between + rows * s->hidden;
  return in;
}

/* The first half of a layer: y = x + norm(attention(x)), where there may be no norm. */
static void attention_half(Worker *worker, const Pass *a, int64_t layer, const float *x, float *y, const Scratch *in) {
  const Layer *l = a->layers + layer;
  multiply(worker, &l->qkv, &(Input){x, l->input_norm, a->shape.eps, a->rows}, 0, NULL, in->qkv);
  write_caches(worker, a, layer, in->qkv);
  attend_all(worker, a, layer, in->qkv, in->attended);
  add(worker, a, &l->output, in->attended, l->output_norm, x, y, in->added);
}

/* The second half: y = x + norm(MLP(x)). */
static void mlp_half(Worker *worker, const Pass *a, int64_t layer, const float *x, float *y, const Scratch *in) {
  const Layer *l = a->layers + layer;
  multiply(worker, &l->gate_up, &(Input){x, l->post_attention_norm, a->shape.eps, a->rows}, 1, NULL, in->gated);
  add(worker, a, &l->down, in->gated, l->down_norm, x, y, in->added);
}

/* A phase: y = norm(x), [rows, hidden], which may be in place; in layer 0 rows that come from the embedding are copied. */
static void enter(Worker *worker, const Pass *a, int64_t layer, const float *x, float *y) {
  const float *norm = a->layers[layer].entry_norm;
  const Span *span = spans_of(a);
  int64_t size = a->shape.hidden, before = 0; /* rows in earlier spans */
  int64_t pieces = min(a->rows, worth_sharing(pool_team(worker), a->rows * size * 2 * (int64_t)sizeof(float), 1));
  Phase phase = pool_phase(worker, pieces);
  for (int64_t piece; (piece = pool_next(&phase)) >= 0;) {
    if (!pool_claim(&phase, piece)) continue;
    for (int64_t r = a->rows * piece / pieces; r < a->rows * (piece + 1) / pieces; r++) {
      if (r < before) span = spans_of(a), before = 0; /* pieces may come in any order */
      while (r >= before + span->rows) before += span++->rows;
      const float *from = x + r * size;
      int normed = layer > 0 || span->loop > 0;
      float factor = normed ? norm_factor(from, a->shape.eps, size) : 1;
      for (int64_t i = 0; i < size; i++) y[r * size + i] = normed ? from[i] * factor * norm[i] : from[i];
    }
    pool_done(&phase, piece);
  }
}

static int has_later_rows(const Pass *a) {
  const Span *span = spans_of(a);
  for (int64_t rows = 0; rows < a->rows; rows += span++->rows)
    if (span->loop) return 1;
  return 0;
}

static void walk_layers(Worker *worker, const Pass *a) {
  const Scratch in = scratch_of(a);
  const float *input = a->x;
  for (int64_t l = 0; l < a->count && !pool_left(worker); l++) {
    int64_t layer = a->first + l;
    if (a->layers[layer].entry_norm && (layer || has_later_rows(a))) {
      enter(worker, a, layer, input, in.between);
      input = in.between;
    }
    float *result = a->stride ? a->outputs + l * a->stride : l + 1 < a->count ? in.between : a->outputs;
    attention_half(worker, a, a->first + l, input, in.middle, &in);
    mlp_half(worker, a, a->first + l, in.middle, result, &in);
    input = result;
  }
}
#endif
