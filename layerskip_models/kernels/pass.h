/* A pass: rows of one or more texts, and the layers they go through. */
#ifndef SELFSPEC_PASS_H
#define SELFSPEC_PASS_H
#include "attention.h"
#include "matrices.h"
#include "sharing.h"

/* Norms are NULL where a layer has none. Their weights are premultiplied by the square root of the norm's size. */
typedef struct {
  Matrix qkv, output, gate_up, down;
  const float *input_norm, *post_attention_norm; /* [hidden], applied to the input of attention and of the MLP */
  const float *output_norm, *down_norm;          /* [hidden], applied to what these two add */
  const float *query_norm, *key_norm; /* over each head, [head_dim], or over all heads of a row, [heads * head_dim] */
  int64_t window;                     /* positions a row attends to, including its own */
  int32_t joint, rotated;             /* whether heads are normalised together, and whether they are rotated */
  const float *entry_norm; /* [hidden], applied to whole rows before the layer; in layer 0 only to those of spans in a `loop` */
} Layer;

typedef struct {
  int64_t hidden, heads, kv_heads, head_dim;
  float eps, scale;
} Shape;

/* Consecutive rows of one text, starting at `position`, and the text's own KV cache. */
typedef struct {
  void *keys, *values; /* of layer 0, [kv_heads, positions, head_dim] */
  int64_t layer_stride, head_stride, position, rows;
  int64_t kind; /* of keys and values, FLOAT32 or BFLOAT16 */
  int64_t loop; /* how often the rows have been through all layers, where the cache is that of one loop */
} Span;

/* Matrices see all rows of a pass at once; attention sees each span's own cache. */
typedef struct {
  Shape shape;
  const Layer *layers; /* of the whole model */
  Span only;           /* the only span where `spans` is NULL; nothing then has to outlive the call */
  const Span *spans;
  const float *x, *rotary; /* of all positions */
  float *outputs, *scratch;
  int64_t first, count, rows, stride; /* layers first .. first + count - 1 */
  float *parts;                       /* see `Division`; NULL if there is no memory for parts */
} Pass;

INLINE const Span *spans_of(const Pass *a) { return a->spans ? a->spans : &a->only; }

/* Head number `head` of x, [heads, head_dim], after its norm if there is one. y: buffer of head_dim numbers. */
INLINE const float *normed_head(const Pass *a, const float *norm, int joint, const float *x, int64_t heads, int64_t head, float *y) {
  int64_t dim = a->shape.head_dim, at = head * dim;
  if (!norm) return x + at;
  /* The sum over all heads is redone for each head: it is so small that sharing it would cost more. */
  float factor = joint ? norm_factor(x, a->shape.eps, heads * dim) : norm_factor(x + at, a->shape.eps, dim);
  for (int64_t i = 0; i < dim; i++) y[i] = x[at + i] * factor * norm[joint ? at + i : i];
  return y;
}

/* The rotation's factors at a position; NULL if the layer does not rotate. */
INLINE const float *rotary_at(const Pass *a, const Layer *l, int64_t position) {
  return l->rotated ? a->rotary + position * a->shape.head_dim : NULL;
}
#endif
