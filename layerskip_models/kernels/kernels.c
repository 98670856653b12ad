/* Decoder layers over a few rows on a CPU, at the speed at which their weights come from memory.
 *
 * library.py compiles this file for the processor it runs on; native_layers.py says what each argument is. Why it exists: at
 * batch 1 a pass is as fast as its weights are read, and no public kernel reads them that fast in 16 or 8 bits, or goes on
 * doing so when verification brings eight rows instead of one.
 *
 * Every row is computed by the same operations in the same order whatever rows are beside it and however many threads
 * there are. So a token that was drafted in a pass of one row gets, in a verification of many, the very same logits.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
static int omp_get_num_threads(void) { return 1; }
#endif
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

/* ---- Vectors -------------------------------------------------------------------------------------------------------- */

#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif
typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef float vf_memory __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t vh_memory __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t vb_memory __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef float v4 __attribute__((vector_size(16)));
typedef float v4_memory __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

INLINE vf load(const float *p) { return *(const vf_memory *)p; }
INLINE void store(float *p, vf v) { *(vf_memory *)p = v; }
INLINE vf all(float x) { return x - (vf){0}; }

/* A weight is 4 bytes (float32), 2 (bfloat16: the upper half of a float32) or 1 (an integer). Compilers vectorise the
 * conversions badly, hence the intrinsics. */
INLINE vf load_4(const float *p) { return load(p); }
#if defined(__AVX512F__)
INLINE vf load_2(const uint16_t *p) {
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16);
}
INLINE vf load_1(const int8_t *p) { return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p))); }
#elif defined(__AVX2__)
INLINE vf load_2(const uint16_t *p) {
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16);
}
INLINE vf load_1(const int8_t *p) { return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p))); }
#else
INLINE vf load_2(const uint16_t *p) { return (vf)(__builtin_convertvector(*(const vh_memory *)p, vu) << 16); }
INLINE vf load_1(const int8_t *p) { return __builtin_convertvector(__builtin_convertvector(*(const vb_memory *)p, vi), vf); }
#endif

/* y[0 .. 3] = the sums of four vectors' elements. */
INLINE void sum_4(vf a, vf b, vf c, vf d, float *y) {
#if defined(__AVX512F__)
  __m512 ab = _mm512_unpacklo_ps((__m512)a, (__m512)b) + _mm512_unpackhi_ps((__m512)a, (__m512)b);
  __m512 cd = _mm512_unpacklo_ps((__m512)c, (__m512)d) + _mm512_unpackhi_ps((__m512)c, (__m512)d);
  __m512d low = _mm512_unpacklo_pd((__m512d)ab, (__m512d)cd), high = _mm512_unpackhi_pd((__m512d)ab, (__m512d)cd);
  __m512 all = (__m512)low + (__m512)high;
  __m256 half = _mm512_castps512_ps256(all) + (__m256)_mm512_extractf64x4_pd((__m512d)all, 1);
  _mm_storeu_ps(y, _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
#elif defined(__AVX2__)
  __m256 all = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
  _mm_storeu_ps(y, _mm256_castps256_ps128(all) + _mm256_extractf128_ps(all, 1));
#else
  y[0] = y[1] = y[2] = y[3] = 0;
  for (int i = 0; i < LANES; i++) y[0] += a[i], y[1] += b[i], y[2] += c[i], y[3] += d[i];
#endif
}
INLINE float sum(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
#endif
}

INLINE float one_4(const float *p) { return *p; }
INLINE float one_2(const uint16_t *p) {
  uint32_t bits = (uint32_t)*p << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
INLINE float one_1(const int8_t *p) { return *p; }

/* e^x to 2 units in the last place; 0 below -87, and no further than 88; NaN stays NaN. */
INLINE vf exponential(vf x) {
  vi small = x < -87.0f, large = x > 88.0f;
  x = (vf)(((vi)x & ~large) | ((vi)all(88.0f) & large));
  vf magic = all(12582912.0f), n = (x * 1.44269504f + magic) - magic;
  vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vf p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  vi power = (__builtin_convertvector(n, vi) + 127) << 23;
  return (vf)((vi)(p * (vf)power) & ~small);
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- Matrices ------------------------------------------------------------------------------------------------------- */

typedef struct {
  const void *weight; /* [out, in] of 4, 2 or 1 bytes each */
  const float *scale; /* [out], factors of 1-byte weights, or NULL */
  const float *bias;  /* [out] or NULL */
  int64_t bytes, in, out;
} Matrix;

#define BLOCK 4  /* outputs that are computed side by side, so that an input is loaded once for them */
#define GROUP 32 /* outputs for all of which some rows are computed before the next: their weights then come from the cache */
#define AHEAD 4096 /* bytes; what memory delivers while it is waited for */
#if LANES == 16
#define ROWS 6 /* rows that a weight serves at once: with BLOCK sums for each, that is what 32 registers hold */
#else
#define ROWS 3 /* of 16 registers */
#endif

/* y[r * BLOCK + o] = weight[o] . x[r] for BLOCK outputs and R rows. x is packed (see `pack`). Meanwhile the weights of the next
 * outputs are fetched: left alone, processors do that too late, at every row of the matrix anew. */
#define DOTS(T, BYTES, R) \
  INLINE void dots_##BYTES##_##R(const T *w, const float *x, int64_t in, int fetch, float *y) { \
    vf total[BLOCK][R]; \
    UNROLL for (int o = 0; o < BLOCK; o++) UNROLL for (int r = 0; r < R; r++) total[o][r] = (vf){0}; \
    int64_t i = 0; \
    for (; i + LANES <= in; i += LANES) { \
      vf rows[R]; \
      UNROLL for (int r = 0; r < R; r++) rows[r] = load(x + i * R + r * LANES); \
      if (fetch && !(i * BYTES & 63)) UNROLL for (int o = 0; o < BLOCK; o++) __builtin_prefetch(w + (o + fetch) * in + i); \
      UNROLL for (int o = 0; o < BLOCK; o++) { \
        vf v = load_##BYTES(w + o * in + i); \
        UNROLL for (int r = 0; r < R; r++) total[o][r] += v * rows[r]; \
      } \
    } \
    UNROLL for (int r = 0; r < R; r++) sum_4(total[0][r], total[1][r], total[2][r], total[3][r], y + r * BLOCK); \
    for (int64_t j = i; j < in; j++) \
      for (int r = 0; r < R; r++) \
        for (int o = 0; o < BLOCK; o++) y[r * BLOCK + o] += one_##BYTES(w + o * in + j) * x[i * R + r * (in - i) + j - i]; \
  }
#define DOTS_OF(T, BYTES) \
  DOTS(T, BYTES, 1) DOTS(T, BYTES, 2) DOTS(T, BYTES, 3) DOTS(T, BYTES, 4) DOTS(T, BYTES, 5) DOTS(T, BYTES, 6) \
  static void dots_##BYTES(const T *w, const float *x, int64_t rows, int64_t in, int fetch, float *y) { \
    switch (rows) { \
    case 1: dots_##BYTES##_1(w, x, in, fetch, y); break; \
    case 2: dots_##BYTES##_2(w, x, in, fetch, y); break; \
    case 3: dots_##BYTES##_3(w, x, in, fetch, y); break; \
    case 4: dots_##BYTES##_4(w, x, in, fetch, y); break; \
    case 5: dots_##BYTES##_5(w, x, in, fetch, y); break; \
    default: dots_##BYTES##_6(w, x, in, fetch, y); \
    } \
  }
DOTS_OF(float, 4)
DOTS_OF(uint16_t, 2)
DOTS_OF(int8_t, 1)

/* Rows one behind the other become steps of LANES inputs of all rows: read in order, and not, as rows a power of two apart
 * would be, from the same few places of the cache. Inputs that fill no step come last, row by row. */
INLINE int64_t packed_place(int64_t r, int64_t i, int64_t rows, int64_t in) {
  int64_t whole = in / LANES * LANES;
  return i < whole ? i / LANES * LANES * rows + r * LANES + i % LANES : whole * rows + r * (in - whole) + i - whole;
}

static void pack(const float *x, int64_t rows, int64_t in, float *packed) {
  int64_t i = 0;
  for (; i + LANES <= in; i += LANES)
    for (int64_t r = 0; r < rows; r++, packed += LANES) store(packed, load(x + r * in + i));
  for (int64_t r = 0; r < rows; r++)
    for (int64_t j = i; j < in; j++) *packed++ = x[r * in + j];
}

/* How many rows from `r` on go through a weight together: few, and about equally many each time. */
INLINE int64_t together(int64_t r, int64_t rows) {
  int64_t turns = (rows + ROWS - 1) / ROWS, size = (rows + turns - 1) / turns;
  return least(size, rows - r);
}

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

/* y[r * BLOCK + o] of outputs first .. first + BLOCK - 1 and at most ROWS rows; outputs behind the matrix's last are not
 * touched. Scaled, with bias. */
static void outputs(const Matrix *m, int64_t first, const float *x, int64_t rows, int fetch, float *y) {
  const char *w = (const char *)m->weight + first * m->in * m->bytes;
  int64_t count = m->out - first < BLOCK ? m->out - first : BLOCK;
  if (count == BLOCK) {
    if (m->bytes == 4) dots_4((const float *)w, x, rows, m->in, fetch, y);
    else if (m->bytes == 2) dots_2((const uint16_t *)w, x, rows, m->in, fetch, y);
    else dots_1((const int8_t *)w, x, rows, m->in, fetch, y);
  } else {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t o = 0; o < count; o++) {
        float result = 0;
        for (int64_t i = 0; i < m->in; i++) {
          int64_t at = o * m->in + i;
          float v = m->bytes == 4   ? one_4((const float *)w + at)
                    : m->bytes == 2 ? one_2((const uint16_t *)w + at)
                                    : one_1((const int8_t *)w + at);
          result += v * x[packed_place(r, i, rows, m->in)];
        }
        y[r * BLOCK + o] = result;
      }
  }
  if (!m->scale && !m->bias) return;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t o = 0; o < count; o++) {
      if (m->scale) y[r * BLOCK + o] *= m->scale[first + o];
      if (m->bias) y[r * BLOCK + o] += m->bias[first + o];
    }
}

/* Where a thread's part of `size` begins, in steps of BLOCK. */
INLINE int64_t part(int64_t size, int thread, int threads) {
  return least((size + BLOCK - 1) / BLOCK * thread / threads * BLOCK, size);
}

/* How many outputs before their use weights are fetched. */
INLINE int64_t outputs_ahead(const Matrix *m) {
  int64_t bytes = BLOCK * m->in * m->bytes;
  return (AHEAD + bytes - 1) / bytes * BLOCK;
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

/* ---- The rest of a layer -------------------------------------------------------------------------------------------- */

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

INLINE float dot(const float *a, const float *b, int64_t n) {
  vf total = {0};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) total += load(a + i) * load(b + i);
  float result = sum(total);
  for (; i < n; i++) result += a[i] * b[i];
  return result;
}

/* y[0 .. 3] = query . keys[0 .. 3]. */
INLINE void dots(const float *query, const float *keys, int64_t dim, float *y) {
  vf total[4] = {{0}};
  int64_t i = 0;
  for (; i + LANES <= dim; i += LANES) {
    vf x = load(query + i);
    UNROLL for (int k = 0; k < 4; k++) total[k] += x * load(keys + k * dim + i);
  }
  sum_4(total[0], total[1], total[2], total[3], y);
  for (; i < dim; i++)
    for (int k = 0; k < 4; k++) y[k] += query[i] * keys[k * dim + i];
}

/* Memory that will soon be read; it may end before that. */
INLINE void fetch(const float *p, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(p + i);
}

static void normalise(const float *x, const float *weight, float eps, int64_t rows, int64_t size, float *y) {
  for (int64_t r = 0; r < rows; r++, x += size, y += size) {
    float factor = 1.0f / sqrtf(dot(x, x, size) + size * eps);
    for (int64_t i = 0; i < size; i++) y[i] = x[i] * factor * weight[i];
  }
}

/* Rotate pairs (a, b) of one head by pairs (cosine, sine), and multiply by scale. */
INLINE void rotate(const float *x, const float *rotary, float scale, int64_t size, float *y) {
  for (int64_t i = 0; i < size; i += 2) {
    float a = x[i], b = x[i + 1], c = rotary[i], s = rotary[i + 1];
    y[i] = (a * c - b * s) * scale;
    y[i + 1] = (a * s + b * c) * scale;
  }
}

#define QUERIES 8    /* of one head, that are attended together */
#define POSITIONS 64 /* whose keys or values they take turns with while these are in the cache */

/* softmax(query . keys) . values for `count` <= QUERIES queries [count, dim], query q over ends[q] positions, ascending, into
 * y[q], which has room for dim numbers. scores: [count, room], room at least LANES more than the largest of ends. */
static void attend(const float *queries, int64_t count, const int64_t *ends, const float *keys, const float *values,
                   int64_t dim, int64_t room, float *scores, float **y) {
  float norms[QUERIES];
  int64_t end = ends[count - 1];
  for (int64_t first = 0; first < end; first += POSITIONS)
    for (int64_t q = 0; q < count; q++) {
      int64_t last = least(first + POSITIONS, ends[q]);
      int64_t p = first; /* steps start at the same positions for every query, so a score does not depend on its company */
      for (; p + 4 <= last; p += 4) {
        if (!q) fetch(keys + (p + POSITIONS) * dim, 4 * dim);
        dots(queries + q * dim, keys + p * dim, dim, scores + q * room + p);
      }
      for (; p < last; p++) scores[q * room + p] = dot(queries + q * dim, keys + p * dim, dim);
    }
  for (int64_t q = 0; q < count; q++) {
    float *own = scores + q * room, peak = -INFINITY;
    for (int64_t p = ends[q]; p < ends[q] + LANES; p++) own[p] = -INFINITY; /* nothing comes of these */
    vf most = all(-INFINITY);
    for (int64_t p = 0; p < ends[q]; p += LANES) {
      vf v = load(own + p);
      vi larger = v > most;
      most = (vf)(((vi)v & larger) | ((vi)most & ~larger));
    }
    for (int i = 0; i < LANES; i++) peak = most[i] > peak ? most[i] : peak;
    vf total = {0};
    for (int64_t p = 0; p < ends[q]; p += LANES) {
      vf e = exponential(load(own + p) - peak);
      store(own + p, e);
      total += e;
    }
    norms[q] = 1.0f / sum(total);
    memset(y[q], 0, dim * sizeof(float));
  }
  for (int64_t first = 0; first < end; first += POSITIONS)
    for (int64_t q = 0; q < count; q++) {
      const float *own = scores + q * room;
      int64_t last = least(first + POSITIONS, ends[q]), d = 0;
      for (; d + 4 * LANES <= dim; d += 4 * LANES) {
        vf out[4];
        UNROLL for (int k = 0; k < 4; k++) out[k] = load(y[q] + d + k * LANES);
        for (int64_t p = first; p < last; p++) {
          if (!q) fetch(values + (p + POSITIONS) * dim + d, 4 * LANES);
          UNROLL for (int k = 0; k < 4; k++) out[k] += own[p] * load(values + p * dim + d + k * LANES);
        }
        UNROLL for (int k = 0; k < 4; k++) store(y[q] + d + k * LANES, out[k]);
      }
      for (; d < dim; d++) {
        float out = y[q][d];
        for (int64_t p = first; p < last; p++) out += own[p] * values[p * dim + d];
        y[q][d] = out;
      }
    }
  for (int64_t q = 0; q < count; q++)
    for (int64_t d = 0; d < dim; d++) y[q][d] *= norms[q];
}

/* ---- What Python calls ---------------------------------------------------------------------------------------------- */

/* y = residual + x W^T, for any number of rows. */
void linear(const Matrix *m, const float *x, int64_t rows, const float *residual, float *y, int threads) {
#pragma omp parallel num_threads(threads)
  multiply(m, x, rows, residual, y);
}

/* The same of normalised rows: y = norm(x) W^T. normed: room for threads * rows * in numbers. */
void normalised_linear(const Matrix *m, const float *norm, float eps, const float *x, int64_t rows, float *normed, float *y,
                       int threads) {
#pragma omp parallel num_threads(threads)
  {
    float *own = normed + omp_get_thread_num() * rows * m->in;
    normalise(x, norm, eps, rows, m->in, own);
    multiply(m, own, rows, NULL, y);
  }
}

/* Numbers of scratch that `run` wants for so many rows, positions and threads. */
int64_t scratch_size(const Shape *s, const Layer *layer, int64_t rows, int64_t end, int64_t threads) {
  int64_t shared = rows * (layer->qkv.out + s->heads * s->head_dim + layer->down.in + 2 * s->hidden);
  return shared + threads * (rows * s->hidden + QUERIES * (s->head_dim + end + 2 * LANES));
}

/* Layers over consecutive rows, the first of which is at `position`. Layer i writes its output to outputs + i * stride,
 * [rows, hidden]; a stride of 0 keeps the last one's only. x: [rows, hidden]. rotary: [rows, head_dim]. */
void run(const Shape *s, const Layer *layers, int64_t count, const Cache *cache, const float *x, int64_t rows,
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

#include "head.c"
