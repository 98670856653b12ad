/* A pass: rows of some texts, and the layers that they go through. */
#ifndef SELFSPEC_PASS_H
#define SELFSPEC_PASS_H
#include "attention.h"
#include "matrices.h"
#include "pool.h"

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
#endif
