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
#include <stdlib.h>
#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
static int omp_get_num_threads(void) { return 1; }
#endif
#include "attention.h"
#include "head.h"
#include "matrices.h"

#define JOINED(name, variant) name##_##variant
#define JOIN(name, variant) JOINED(name, variant)
#define EXPORT(name) JOIN(name, VARIANT) /* run_avx2 */
#define PUBLIC __attribute__((visibility("default")))

/* ---- Matrices on threads -------------------------------------------------------------------------------------------- */

/* The same for any number of rows, some at a time; memory of this thread, until its next call. */
static const float *packed_rows(const float *x, int64_t rows, int64_t in) {
  static _Thread_local float *memory = NULL;
  static _Thread_local int64_t held = 0;
  if (rows == 1) return x;
  if (held < rows * in) {
    free(memory);
    memory = malloc((held = rows * in) * sizeof(float));
  }
  for (int64_t r = 0; r < rows; r += together(r, rows)) pack(x + r * in, together(r, rows), in, memory + r * in);
  return memory;
}

/* Where a thread's part of `size` begins, in steps of BLOCK. */
INLINE int64_t part(int64_t size, int thread, int threads) {
  return least((size + BLOCK - 1) / BLOCK * thread / threads * BLOCK, size);
}

/* y[at ..] = residual[at ..] + block, `count` <= BLOCK numbers. */
INLINE void put(const float *block, const float *residual, int64_t at, int64_t count, float *y) {
  if (count == BLOCK) {
    v4 v = *(const v4_memory *)block;
    if (residual) v += *(const v4_memory *)(residual + at);
    *(v4_memory *)(y + at) = v;
  } else {
    for (int64_t j = 0; j < count; j++) y[at + j] = residual ? residual[at + j] + block[j] : block[j];
  }
}

/* This thread's outputs of y = residual + x W^T; y, residual: [rows, out], residual may be NULL. */
static void multiply(const Matrix *m, const float *x, int64_t rows, const float *residual, float *y) {
  int t = omp_get_thread_num(), n = omp_get_num_threads();
  int64_t end = part(m->out, t + 1, n), ahead = outputs_ahead(m);
  x = packed_rows(x, rows, m->in);
  for (int64_t first = part(m->out, t, n); first < end; first += GROUP)
    for (int64_t r = 0; r < rows; r += together(r, rows)) {
      int64_t count = together(r, rows);
      for (int64_t o = first; o < least(first + GROUP, end); o += BLOCK) {
        float block[ROWS * BLOCK];
        outputs(m, o, x + r * m->in, count, r == 0 && o + ahead + BLOCK <= end ? ahead : 0, block);
        for (int64_t i = 0; i < count; i++)
          put(block + i * BLOCK, residual, (r + i) * m->out + o, least(BLOCK, m->out - o), y);
      }
    }
}

/* This thread's part of silu(gate) * up, [rows, out / 2]; the matrix holds gate above up. */
static void multiply_gated(const Matrix *m, const float *x, int64_t rows, float *y) {
  int t = omp_get_thread_num(), n = omp_get_num_threads();
  int64_t size = m->out / 2, end = part(size, t + 1, n), ahead = outputs_ahead(m);
  x = packed_rows(x, rows, m->in);
  Matrix gate = *m;
  gate.out = size; /* its last outputs must not run on into up's */
  for (int64_t first = part(size, t, n); first < end; first += GROUP)
    for (int64_t r = 0; r < rows; r += together(r, rows)) {
      int64_t count = together(r, rows);
      for (int64_t o = first; o < least(first + GROUP, end); o += BLOCK) {
        float gates[ROWS * BLOCK + LANES] = {0}, ups[ROWS * BLOCK + LANES] = {0};
        int fetch = r == 0 && o + ahead + BLOCK <= end ? ahead : 0;
        outputs(&gate, o, x + r * m->in, count, fetch, gates);
        outputs(m, size + o, x + r * m->in, count, fetch, ups);
        for (int64_t i = 0; i < count * BLOCK; i += LANES) {
          vf g = load(gates + i);
          store(gates + i, g / (1.0f + exponential(-g)) * load(ups + i));
        }
        for (int64_t i = 0; i < count; i++)
          put(gates + i * BLOCK, NULL, (r + i) * size + o, least(BLOCK, size - o), y);
      }
    }
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

/* y = residual + x W^T, for any number of rows. */
PUBLIC void EXPORT(linear)(const Matrix *m, const float *x, int64_t rows, const float *residual, float *y, int threads) {
#pragma omp parallel num_threads(threads)
  multiply(m, x, rows, residual, y);
}

/* The same of normalised rows: y = norm(x) W^T. normed: room for threads * rows * in numbers. */
PUBLIC void EXPORT(normalised_linear)(const Matrix *m, const float *norm, float eps, const float *x, int64_t rows, float *normed, float *y,
                       int threads) {
#pragma omp parallel num_threads(threads)
  {
    float *own = normed + omp_get_thread_num() * rows * m->in;
    normalise(x, norm, eps, rows, m->in, own);
    multiply(m, own, rows, NULL, y);
  }
}

/* Numbers of scratch that `run` wants for so many rows, positions and threads. */
PUBLIC int64_t EXPORT(scratch_size)(const Shape *s, const Layer *layer, int64_t rows, int64_t end, int64_t threads) {
  int64_t shared = rows * (layer->qkv.out + s->heads * s->head_dim + layer->down.in + 2 * s->hidden);
  return shared + threads * (rows * s->hidden + QUERIES * (s->head_dim + end + 2 * LANES));
}

/* Layers over consecutive rows, the first of which is at `position`. Layer i writes its output to outputs + i * stride,
 * [rows, hidden]; a stride of 0 keeps the last one's only. x: [rows, hidden]. rotary: [rows, head_dim]. */
PUBLIC void EXPORT(run)(const Shape *s, const Layer *layers, int64_t count, const Cache *cache, const float *x, int64_t rows,
         int64_t position, const float *rotary, float *outputs, int64_t stride, float *scratch, int threads) {
  int64_t dim = s->head_dim, size = s->hidden, group = s->heads / s->kv_heads, width = (s->heads + 2 * s->kv_heads) * dim;
  float *qkv = scratch, *attended = qkv + rows * width, *gated = attended + rows * s->heads * dim;
  float *middle = gated + rows * layers->down.in, *between = middle + rows * size, *own = between + rows * size;
#pragma omp parallel num_threads(threads)
  {
    int t = omp_get_thread_num(), n = omp_get_num_threads();
    int64_t room = position + rows + 2 * LANES;
    float *normed = own + t * (rows * size + QUERIES * (dim + room)), *queries = normed + rows * size;
    float *scores = queries + QUERIES * dim;
    const float *input = x;
    for (int64_t l = 0; l < count; l++) {
      const Layer *layer = layers + l;
      float *keys = cache->keys + l * cache->layer_stride, *values = cache->values + l * cache->layer_stride;
      float *result = stride ? outputs + l * stride : l + 1 < count ? between : outputs;
      normalise(input, layer->input_norm, s->eps, rows, size, normed); /* every thread for itself: cheaper than waiting */
      multiply(&layer->qkv, normed, rows, NULL, qkv);
#pragma omp barrier
      for (int64_t unit = t; unit < rows * s->kv_heads; unit += n) {
        int64_t r = unit / s->kv_heads, head = unit % s->kv_heads;
        const float *key = qkv + r * width + (s->heads + head) * dim, *value = key + s->kv_heads * dim;
        int64_t place = head * cache->head_stride + (position + r) * dim;
        rotate(key, rotary + r * dim, 1.0f, dim, keys + place);
        memcpy(values + place, value, dim * sizeof(float));
      }
#pragma omp barrier
      /* Each thread takes neighbours among the queries, counted head by head: those of one head share its keys. */
      int64_t per_head = rows * group, unit = rows * s->heads * t / n, stop = rows * s->heads * (t + 1) / n;
      while (unit < stop) {
        int64_t head = unit / per_head, chosen = least(least(QUERIES, stop - unit), (head + 1) * per_head - unit);
        int64_t ends[QUERIES], offset = head * cache->head_stride;
        float *places[QUERIES];
        for (int64_t q = 0; q < chosen; q++, unit++) {
          int64_t r = unit % per_head / group, at = head * group + unit % group;
          rotate(qkv + r * width + at * dim, rotary + r * dim, s->scale, dim, queries + q * dim);
          ends[q] = position + r + 1;
          places[q] = attended + (r * s->heads + at) * dim;
        }
        attend(queries, chosen, ends, keys + offset, values + offset, dim, room, scores, places);
      }
#pragma omp barrier
      multiply(&layer->output, attended, rows, input, middle);
#pragma omp barrier
      normalise(middle, layer->post_attention_norm, s->eps, rows, size, normed);
      multiply_gated(&layer->gate_up, normed, rows, gated);
#pragma omp barrier
      multiply(&layer->down, gated, rows, middle, result);
#pragma omp barrier
      input = result;
    }
  }
}

/* Bytes of scratch that `pick` wants. */
PUBLIC int64_t EXPORT(pick_scratch)(const Matrix *m, int64_t rows, int64_t threads) {
  int64_t floats = threads * (rows * m->in + rows * (chunk_size(m->out) + LANES));
  return rows * chunk_count(m->out) * (int64_t)sizeof(Summary) + floats * (int64_t)sizeof(float);
}

/* For rows [rows, in], normalised first: tokens[r], the argmax of its logits (the first of equal ones), and numbers[r], its logit,
 * NaN if any logit of the row is. With `spread` also, rows numbers each: the probability of the token, its logit less the
 * second largest, and the entropy in nats. scratch: aligned to 8 bytes. */
PUBLIC void EXPORT(pick)(const Matrix *m, const float *norm, float eps, const float *x, int64_t rows, void *scratch, int spread,
            int64_t *tokens, float *numbers, int threads) {
  int64_t size = chunk_size(m->out), chunks = chunk_count(m->out), ahead = outputs_ahead(m);
  Summary *summaries = scratch;
  float *floats = (float *)(summaries + rows * chunks);
#pragma omp parallel num_threads(threads)
  {
    int t = omp_get_thread_num(), n = omp_get_num_threads();
    int64_t width = size + LANES, last = chunks * (t + 1) / n;
    float *own = floats + t * rows * (m->in + width), *logits = own + rows * m->in;
    normalise(x, norm, eps, rows, m->in, own);
    const float *packed = packed_rows(own, rows, m->in);
    for (int64_t c = chunks * t / n; c < last; c++) {
      int64_t begin = c * size, end = least(begin + size, m->out);
      for (int64_t first = begin; first < end; first += GROUP)
        for (int64_t r = 0; r < rows; r += together(r, rows)) {
          int64_t count = together(r, rows);
          for (int64_t o = first; o < least(first + GROUP, end); o += BLOCK) {
            float block[ROWS * BLOCK];
            outputs(m, o, packed + r * m->in, count, r == 0 && o + ahead + BLOCK <= m->out ? ahead : 0, block);
            for (int64_t i = 0; i < count; i++)
              memcpy(logits + (r + i) * width + o - begin, block + i * BLOCK, least(BLOCK, end - o) * sizeof(float));
          }
        }
      for (int64_t r = 0; r < rows; r++)
        summaries[r * chunks + c] = summarise(logits + r * width, end - begin, begin, spread);
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    Summary s = joined(summaries + r * chunks, chunks, spread);
    tokens[r] = s.token;
    numbers[r] = s.best;
    if (spread) {
      numbers[rows + r] = 1.0f / s.sum;
      numbers[2 * rows + r] = s.best - s.second;
      numbers[3 * rows + r] = logf(s.sum) - s.moment / s.sum;
    }
  }
}
