/* Runs the kernels of one variant on drawn numbers, without Python: for processors that are only emulated here.
 *
 * VARIANT: as for kernels.c, beside which this is compiled. Every row is computed alone on one thread, then with others on
 * several. Prints the results, and ends with status 1 if a bit differs.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define JOINED(name, variant) name##_##variant
#define JOIN(name, variant) JOINED(name, variant)
#define EXPORT(name) JOIN(name, VARIANT)

typedef struct { const void *weight; const float *scale, *bias; int64_t kind, in, out; } Matrix;
typedef struct { Matrix qkv, output, gate_up, down; const float *input_norm, *post_attention_norm; } Layer;
typedef struct { int64_t hidden, heads, kv_heads, head_dim; float eps, scale; } Shape;
typedef struct { float *keys, *values; int64_t layer_stride, head_stride; } Cache;
int64_t EXPORT(linear)(const Matrix *, const float *, int64_t, const float *, float *, int);
int64_t EXPORT(scratch_size)(const Shape *, const Layer *, int64_t);
int64_t EXPORT(run)(const Shape *, const Layer *, int64_t, const Cache *, const float *, int64_t, int64_t, const float *, float *,
                    int64_t, float *, int);

static uint32_t state = 1;
static float drawn(void) { /* in [-1, 1), a multiple of 1/128: every kind of weight holds it */
  state = state * 1664525u + 1013904223u;
  return (int)(state >> 24) / 128.0f - 1.0f;
}
static float *floats(int64_t count) {
  float *x = malloc(count * sizeof(float));
  for (int64_t i = 0; i < count; i++) x[i] = drawn();
  return x;
}
static uint16_t half(float x) { /* of such a number */
  if (x == 0) return 0;
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (bits >> 16 & 0x8000) | (((bits >> 23 & 255) - 112) << 10) | (bits >> 13 & 1023);
}
static Matrix matrix(int64_t kind, int64_t out, int64_t in, int biased) {
  float *x = floats(out * in);
  Matrix m = {x, NULL, biased ? floats(out) : NULL, kind, in, out};
  for (int64_t i = 0; i < out * in; i++) {
    uint32_t bits;
    memcpy(&bits, x + i, 4);
    if (kind == 1) ((uint16_t *)x)[i] = bits >> 16;
    if (kind == 2) ((uint16_t *)x)[i] = half(x[i]);
    if (kind == 3) ((int8_t *)x)[i] = (int8_t)(x[i] * 127);
  }
  if (kind == 3) {
    float *scale = malloc(out * sizeof(float));
    for (int64_t i = 0; i < out; i++) scale[i] = 1 / 127.0f;
    m.scale = scale;
  }
  return m;
}
static int differ(const char *what, const float *a, const float *b, int64_t count) {
  if (!memcmp(a, b, count * sizeof(float))) return 0;
  fprintf(stderr, "%s: a row depends on its company\n", what);
  return 1;
}

int main(void) {
  int wrong = 0;
  enum { MOST = 20, HIDDEN = 70, HEADS = 6, KV = 2, DIM = 18, INNER = 45, LAYERS = 2 };
  for (int64_t kind = 0; kind < 4; kind++)
    for (int64_t out = 5; out < 300; out += 131)
      for (int64_t in = 3; in < 90; in += 29) {
        Matrix m = matrix(kind, out, in, kind & 1);
        float *x = floats(MOST * in), *residual = floats(MOST * out), *alone = floats(MOST * out), *many = floats(MOST * out);
        for (int64_t r = 0; r < MOST; r++) EXPORT(linear)(&m, x + r * in, 1, residual + r * out, alone + r * out, 1);
        for (int threads = 1; threads < 4; threads++)
          for (int64_t rows = 1; rows <= MOST; rows++) {
            EXPORT(linear)(&m, x, rows, residual, many, threads);
            wrong |= differ("linear", alone, many, rows * out);
          }
        for (int64_t i = 0; i < MOST * out; i++) printf("%.6f\n", alone[i]);
      }
  Layer layers[LAYERS];
  for (int l = 0; l < LAYERS; l++) {
    layers[l].qkv = matrix(1, (HEADS + 2 * KV) * DIM, HIDDEN, 1);
    layers[l].output = matrix(2, HIDDEN, HEADS * DIM, 0);
    layers[l].gate_up = matrix(0, 2 * INNER, HIDDEN, 0);
    layers[l].down = matrix(3, HIDDEN, INNER, 0);
    layers[l].input_norm = floats(HIDDEN);
    layers[l].post_attention_norm = floats(HIDDEN);
  }
  Shape shape = {HIDDEN, HEADS, KV, DIM, 1e-5f, 0.25f};
  float *x = floats(MOST * HIDDEN), *rotary = floats(MOST * DIM), *alone = floats(MOST * HIDDEN), *many = floats(MOST * HIDDEN);
  float *scratch = floats(EXPORT(scratch_size)(&shape, layers, MOST));
  int64_t layer_size = KV * MOST * DIM;
  Cache one = {floats(LAYERS * layer_size), floats(LAYERS * layer_size), layer_size, MOST * DIM};
  Cache other = {floats(LAYERS * layer_size), floats(LAYERS * layer_size), layer_size, MOST * DIM};
  for (int64_t r = 0; r < MOST; r++)
    EXPORT(run)(&shape, layers, LAYERS, &one, x + r * HIDDEN, 1, r, rotary + r * DIM, alone + r * HIDDEN, 0, scratch, 1);
  for (int threads = 1; threads < 4; threads++)
    for (int64_t step = 2; step <= MOST; step++) {
      for (int64_t r = 0; r < MOST; r += step) {
        int64_t rows = r + step < MOST ? step : MOST - r;
        EXPORT(run)(&shape, layers, LAYERS, &other, x + r * HIDDEN, rows, r, rotary + r * DIM, many + r * HIDDEN, 0, scratch, threads);
      }
      wrong |= differ("run", alone, many, MOST * HIDDEN);
      wrong |= differ("keys", one.keys, other.keys, LAYERS * layer_size);
      wrong |= differ("values", one.values, other.values, LAYERS * layer_size);
    }
  for (int64_t i = 0; i < MOST * HIDDEN; i++) printf("%.6f\n", alone[i]);
  return wrong;
}
