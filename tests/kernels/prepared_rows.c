/* Cuts drawn rows into limbs, or for pairs whole numbers, and into bfloat16 splits, number by number, and compares that with what the kernels' vectors make of
 * them. Ends with status 1 at the first byte that differs. */
#include <stdio.h>
#include <stdlib.h>
#include "prepare.h"

static uint32_t state = 1;
static float drawn(void) {
  state = state * 1664525u + 1013904223u;
  return (int32_t)state / 2147483648.0f;
}

static int expect(const char *what, int64_t rows, int64_t in, const void *expected, const void *found, int64_t bytes) {
  if (!memcmp(expected, found, bytes)) return 0;
  fprintf(stderr, "%s differ for %d rows of %d numbers\n", what, (int)rows, (int)in);
  return 1;
}

/* The limbs of one number, highest first. */
static void cut_number(double x, double unit, int limbs, int8_t *cut, int64_t *q) {
  *q = (int64_t)rint(x / unit);
  int64_t left = *q;
  for (int d = limbs - 1; d >= 0; d--) {
    cut[d] = (int8_t)left;
    left = (left - cut[d]) / 256;
  }
}

static double unit_of(const float *x, int64_t in, int limbs) {
  const double most = limbs == 3 ? 8355711 : 32639; /* 127, 127, .. */
  double largest = 0, unit = 1;
  for (int64_t i = 0; i < in; i++) {
    if (!isfinite(x[i])) return NAN;
    largest = fmax(largest, fabs(x[i]));
  }
  if (largest == 0) return 1;
  while (largest / unit > most) unit *= 2;
  while (largest / (unit / 2) <= most) unit /= 2;
  return unit;
}

/* Limbs of rows as they are expected at some place. */
typedef struct {
  char *limbs;
  Fixed *fixed;
  int64_t rows;
} Expected;

static Expected expected_at(char *place, int64_t rows, const Matrix *m) {
  return (Expected){place, (Fixed *)(place + rows * (m->in / 64) * chunk_bytes(m)), rows};
}

/* Where a limb of input `at` of a chunk is. */
static int64_t limb_place(const Matrix *m, int64_t rows, int64_t r, int64_t at, int d) {
  if (!is_grouped(m))
    return by_tiles(m, rows) ? (d * rows + r) * 64 + at : ((at / 4 * rows + r) * LIMBS + d) * 4 + at % 4;
  if (!by_tiles(m, rows)) return ((at / 4 * rows + r) * 2 + d) * 4 + at % 4;
  const int64_t width = m->group == 16 ? 16 : 32;
  return ((at / width * 2 + d) * rows + r) * width + at % width;
}

/* Input i of a row is q times the row's unit. */
static void put_number(const Expected *to, const Matrix *m, int64_t r, int64_t i, double number) {
  const int limbs = limbs_for(m);
  int8_t cut[LIMBS];
  int64_t q, at = i % 64;
  cut_number(number, 1, limbs, cut, &q);
  const int64_t whole_place = (at / 4 * to->rows + r) * 4 + (at % 4 == 1 ? 2 : at % 4 == 2 ? 1 : at % 4);
  char *chunk = to->limbs + i / 64 * to->rows * chunk_bytes(m);
  if (PAIRS) ((int16_t *)chunk)[whole_place] = (int16_t)q;
  for (int d = 0; !PAIRS && d < limbs; d++) chunk[limb_place(m, to->rows, r, at, d)] = cut[d];
  if (!is_grouped(m)) {
    to->fixed[r].sum += q;
    return;
  }
  char *word = chunk + to->rows * 128 + 4 * (at / (m->group == 16 ? 16 : 32) * to->rows + r);
  if (m->offsets) *(float *)word += q;
  else *(int32_t *)word -= m->zero * q;
}

static int is_finer(const float *x, int64_t in, double unit) {
  double largest = 0, total = 0;
  for (int64_t i = 0; i < in; i++) largest = fmax(largest, fabs(x[i])), total += fabs(x[i]);
  return isfinite(unit) && largest * (in - 1) > 64 * (total - largest);
}

static int compare_limbs(const float *x, int64_t rows, const Matrix *m, int *finer_rows) {
  const int64_t in = m->in, size = rows * row_size(m) * 4;
  char *found = aligned_alloc(64, (size + 63) / 64 * 64), *expected = calloc(size, 1);
  memset(found, 0, size);
  if (is_grouped(m)) to_grouped_limbs(x, rows, m, (float *)found);
  else to_limbs(x, rows, m, (float *)found);
  Expected to = expected_at(expected, rows, m), rest = {0};
  Finer *finer = (Finer *)(expected + rows * limbs_size(m) * 4);
  double units[ROWS];
  for (int64_t r = 0; r < rows; r++) {
    units[r] = to.fixed[r].unit = unit_of(x + r * in, in, limbs_for(m));
    if (is_grouped(m) && is_finer(x + r * in, in, units[r])) finer->rows[finer->count++] = r;
  }
  if (is_grouped(m)) rest = expected_at((char *)(finer + 1), finer->count, m), *finer_rows += finer->count;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < in && isfinite(units[r]); i++) put_number(&to, m, r, i, x[r * in + i] / units[r]);
  for (int64_t k = 0; k < rest.rows; k++) {
    int64_t r = finer->rows[k];
    rest.fixed[k].unit = units[r] / 32768;
    for (int64_t i = 0; i < in; i++) {
      double number = x[r * in + i] / units[r];
      put_number(&rest, m, k, i, (number - rint(number)) * 32768);
    }
  }
  for (int64_t r = 0; r < rows; r++) /* NaN has many forms */
    if (isnan(units[r]) && isnan(((Fixed *)(found + ((char *)to.fixed - expected)))[r].unit))
      to.fixed[r].unit = ((Fixed *)(found + ((char *)to.fixed - expected)))[r].unit;
  int wrong = expect("limbs", rows, in, expected, found, size);
  free(found), free(expected);
  return wrong;
}

#if TILES
static int compare_splits(const float *x, int64_t rows, const Matrix *m) {
  const int64_t in = m->in, size = rows * row_size(m) * 4;
  char *found = calloc((size + 63) / 64, 64), *expected = calloc(size, 1);
  to_splits(x, rows, in, (float *)found);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < in; i++) {
      float left = x[r * in + i];
      for (int64_t p = 0; p < SPLITS; p++) {
        uint16_t part = to_bfloat16(left);
        ((uint16_t *)expected)[((i / 32 * SPLITS + p) * rows + r) * 32 + i % 32] = part;
        left -= one_bfloat16(&part);
      }
    }
  int wrong = expect("splits", rows, in, expected, found, size);
  free(found), free(expected);
  return wrong;
}
#endif

int main(void) {
  const int64_t widths[] = {64, 128, 3, 100, 320, 1088};
  int wrong = 0, finer = 0;
  for (int width = 0; width < 6; width++)
    for (int64_t rows = 1; rows <= ROWS; rows++) {
      int64_t in = widths[width];
      float *x = malloc(rows * in * 4), scales[] = {1, 1e-30f, 1e30f, 3e-42f, 0};
      for (int64_t i = 0; i < rows * in; i++) x[i] = drawn() * scales[(i / in + width) % 5];
      x[0] *= 1e6f; /* an outlier */
      x[in - 1] = 0x1p-23f * x[0];
      if (rows > 2) x[2 * in] = -INFINITY;
      if (rows > 3) x[4 * in - 1] = NAN;
      float offset = 0;
      Matrix bytes = {.kind = INT8, .in = in, .out = 64, .interleaved = VNNI || TILES}, nibbles = {.kind = INT4, .in = in, .out = 64, .group = 32, .zero = 8, .interleaved = 1};
      Matrix small = {.kind = BYTES, .in = in, .out = 64, .group = 16, .zero = 32, .interleaved = 1}, small_shifted = small;
      Matrix shifted = nibbles, halves = {.kind = BFLOAT16, .in = in, .out = 64, .interleaved = TILES};
      shifted.offsets = small_shifted.offsets = &offset;
      if ((VNNI || TILES) && in % 64 == 0 && (TILES || rows <= BYTE_ROWS)) wrong |= compare_limbs(x, rows, &bytes, &finer);
      const Matrix *grouped[] = {&nibbles, &shifted, &small, &small_shifted};
      for (int k = 0; (VNNI || PAIRS) && in % 64 == 0 && k < 4; k++)
        if (rows <= GROUPED_ROWS || TILES) wrong |= compare_limbs(x, rows, grouped[k], &finer);
#if TILES
      if (in % 64 == 0) wrong |= compare_splits(x, rows, &halves);
#else
      (void)halves;
#endif
      free(x);
    }
  return wrong | ((VNNI || PAIRS) && !finer);
}
