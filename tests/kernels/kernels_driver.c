/* Runs the kernels of one variant on drawn numbers, without Python: for processors that are only emulated here.
 *
 *     driver                    the functions that are compiled with this one; VARIANT is as for kernels.c
 *     driver LIBRARY            print the variants in a built library that this processor runs
 *     driver LIBRARY VARIANT    that library's functions
 *
 * Every row is computed alone on one thread, then with others on several. Prints the results, and ends with status 1 if a bit
 * differs, with 2 if the library lacks something.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include "kernels.c"

static void *library; /* or NULL: the functions here */
static const char *chosen;
static void *symbol(const char *prefix, const char *variant) {
  char name[64];
  snprintf(name, sizeof name, "%s_%s", prefix, variant);
  return dlsym(library, name);
}
static void *function(const char *name, void *own) {
  if (!library) return own;
  void *found = symbol(name, chosen);
  if (found) return found;
  fprintf(stderr, "the library has no %s_%s\n", name, chosen);
  exit(2);
}
#define CALL(name) ((__typeof__(&EXPORT(name)))function(#name, (void *)EXPORT(name)))

static int print_variants(void) {
  static const char *const variants[] = {"amx", "vnni", "avx512", "avxvnni", "avx2", "dotprod", "neon", "baseline"};
  for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) {
    int (*runs)(void) = (int (*)(void))symbol("runs", variants[i]);
    if (runs && symbol("step", variants[i]) && runs()) puts(variants[i]);
  }
  return 0;
}

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
  void *laid = malloc((out + BLOCK) * (in + 1) * sizeof(float));
  CALL(lay_side_by_side)(kind, x, out, in, laid);
  m.weight = laid;
  return m;
}
/* Numbers of 4, 8 and 6 bits in groups, with offsets or without. What fills the last 16 outputs may be anything. */
static Matrix grouped(int64_t kind, int64_t out, int64_t in, int64_t group, int offset) {
  int64_t count = (out + 15) / 16 * 16 * in, groups = count / group, bytes = bytes_of(kind, count);
  uint8_t *numbers = malloc(bytes);
  uint16_t *scales = malloc(groups * sizeof(uint16_t));
  for (int64_t i = 0; i < bytes; i++) numbers[i] = (uint8_t)((drawn() + 1) * 127);
  for (int64_t i = 0; i < groups; i++) scales[i] = half(drawn());
  Matrix m = {.weight = numbers, .kind = kind, .in = in, .out = out, .groups = scales, .group = group, .scales = HALVES};
  m.interleaved = 1;
  m.zero = kind == INT4 ? 8 : kind == SIXES ? 32 : 128;
  if (offset) m.offsets = floats(groups);
  return m;
}
static int differ(const char *what, const float *a, const float *b, int64_t count) {
  if (!memcmp(a, b, count * sizeof(float))) return 0;
  fprintf(stderr, "%s: a row depends on its company\n", what);
  return 1;
}

enum { MOST = 20 };
static int products(const Matrix *m) {
  int wrong = 0;
  float *x = floats(MOST * m->in), *residual = floats(MOST * m->out), *alone = floats(MOST * m->out), *many = floats(MOST * m->out);
  for (int64_t r = 0; r < MOST; r++) CALL(linear)(m, x + r * m->in, 1, residual + r * m->out, alone + r * m->out, 1);
  for (int threads = 1; threads < 4; threads++)
    for (int64_t rows = 1; rows <= MOST; rows++) {
      CALL(linear)(m, x, rows, residual, many, threads);
      wrong |= differ("linear", alone, many, rows * m->out);
    }
  for (int64_t i = 0; i < MOST * m->out; i++) printf("%.9g\n", alone[i]);
  return wrong;
}

int main(int count, char **arguments) {
  int wrong = 0;
  if (count > 1 && !(library = dlopen(arguments[1], RTLD_NOW))) {
    fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  if (count == 2) return print_variants();
  chosen = count > 2 ? arguments[2] : NULL;
  enum { HIDDEN = 70, HEADS = 6, KV = 2, DIM = 18, INNER = 45, LAYERS = 2 };
  for (int64_t kind = FLOAT32; kind <= INT8; kind++)
    for (int64_t out = 5; out < 300; out += 131)
      for (int64_t in = 3; in < 90; in += 29) {
        Matrix m = matrix(kind, out, in, kind & 1);
        wrong |= products(&m);
      }
  if (CALL(interleaves)(INT8, 64, 192)) {
    Matrix m = matrix(INT8, 64, 192, 1); /* whose bytes may be anything */
    m.interleaved = 1;
    wrong |= products(&m);
  }
  if (CALL(interleaves)(BFLOAT16, 1 << 20, 192)) {
    Matrix m = matrix(BFLOAT16, 64, 192, 1);
    m.interleaved = 1;
    wrong |= products(&m);
  }
  for (int64_t kind = INT4; kind <= SIXES; kind++)
    for (int offset = 0; offset < 2; offset++) {
      Matrix m = grouped(kind, 37, 192, 32, offset);
      wrong |= products(&m);
      for (int64_t group = kind == INT4 ? 32 : 16; group <= 64; group *= 2)
        for (int64_t bits = 8; bits <= 16; bits += 8) {
          m = grouped(kind, 64, 192, group, offset);
          m.row_bits = bits;
          wrong |= products(&m);
        }
    }
  Layer layers[LAYERS] = {{{0}}};
  for (int l = 0; l < LAYERS; l++) { /* the second one with all that some families' layers have besides */
    layers[l].qkv = matrix(1, (HEADS + 2 * KV) * DIM, HIDDEN, 1);
    layers[l].output = matrix(2, HIDDEN, HEADS * DIM, 0);
    layers[l].gate_up = matrix(0, 2 * INNER, HIDDEN, 0);
    layers[l].down = matrix(3, HIDDEN, INNER, 0);
    layers[l].input_norm = l ? NULL : floats(HIDDEN);
    layers[l].post_attention_norm = l ? NULL : floats(HIDDEN);
    layers[l].output_norm = l ? floats(HIDDEN) : NULL;
    layers[l].down_norm = l ? floats(HIDDEN) : NULL;
    layers[l].query_norm = l ? floats(DIM) : NULL;
    layers[l].key_norm = l ? floats(DIM) : NULL;
    layers[l].window = l ? 7 : MOST;
    layers[l].rotated = 1;
  }
  Shape shape = {HIDDEN, HEADS, KV, DIM, 1e-5f, 0.25f};
  float *x = floats(MOST * HIDDEN), *rotary = floats(MOST * DIM), *alone = floats(MOST * HIDDEN), *many = floats(MOST * HIDDEN);
  int64_t layer_size = KV * MOST * DIM;
  Span one = {floats(LAYERS * layer_size), floats(LAYERS * layer_size), layer_size, MOST * DIM, 0, 1}, other = one;
  other.keys = floats(LAYERS * layer_size), other.values = floats(LAYERS * layer_size);
  Step step = {.shape = &shape, .layers = layers, .num_spans = 1, .rotary = rotary, .count = LAYERS};
  step.scratch = floats(CALL(scratch_size)(&shape, layers, MOST));
  for (int64_t r = 0; r < MOST; r++) {
    one.position = r;
    step.spans = &one, step.x = x + r * HIDDEN, step.outputs = alone + r * HIDDEN, step.rows = 1;
    CALL(step)(&step, 1);
  }
  for (int threads = 1; threads < 4; threads++)
    for (int64_t each = 2; each <= MOST; each++) {
      for (int64_t r = 0; r < MOST; r += each) {
        other.position = r, other.rows = min(each, MOST - r);
        step.spans = &other, step.x = x + r * HIDDEN, step.outputs = many + r * HIDDEN, step.rows = other.rows;
        CALL(step)(&step, threads);
      }
      wrong |= differ("step", alone, many, MOST * HIDDEN);
      wrong |= differ("keys", one.keys, other.keys, LAYERS * layer_size);
      wrong |= differ("values", one.values, other.values, LAYERS * layer_size);
    }
  for (int64_t i = 0; i < MOST * HIDDEN; i++) printf("%.9g\n", alone[i]);

  Adapter adapter = {matrix(1, 2 * INNER, HIDDEN, 0), matrix(0, HIDDEN, INNER, 0), floats(HIDDEN)};
  float *gated = floats(MOST * INNER);
  for (int64_t r = 0; r < MOST; r++) CALL(adapt)(&adapter, 1e-5f, x + r * HIDDEN, 1, gated, alone + r * HIDDEN, 1);
  for (int threads = 1; threads < 4; threads++) {
    CALL(adapt)(&adapter, 1e-5f, x, MOST, gated, many, threads);
    wrong |= differ("adapt", alone, many, MOST * HIDDEN);
  }
  for (int64_t i = 0; i < MOST * HIDDEN; i++) printf("%.9g\n", alone[i]);
  return wrong;
}
