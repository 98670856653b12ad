/* Rows rounded to 4 bits in groups of inputs that share a scale; see four_bit_rounding.py, which has the same by PyTorch's
 * operators, bit for bit.
 *
 * A vector holds one input of LANES groups. So sums over a group are taken input by input, in the same order on every processor. */
#ifndef SELFSPEC_FOUR_BIT_ROUNDING_H
#define SELFSPEC_FOUR_BIT_ROUNDING_H
#include "stored.h"

#define MOST_IN_GROUP 128

typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

/* The nearest float16, ties to even, in each lane's lower 16 bits. For finite numbers. */
INLINE vu to_float16_lanes(vf x) {
  const vu bits = (vu)x, sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  const vu small = (vu)((vf)magnitude + splat(0.5f)) - 0x3f000000u; /* the sum has float16's least step, 2^-24 */
  vu usual = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
  const vu large = (vu)(magnitude >= 0x477ff000u), is_small = (vu)(magnitude < 0x38800000u);
  usual = (usual & ~large) | (0x7c00u & large);
  return sign | (small & is_small) | (usual & ~is_small);
}

/* The nearest of -8 to 7. */
INLINE vf nearest_of_sixteen(vf v) {
  const vf least = splat(-8), greatest = splat(7);
#if defined(__AVX512F__)
  v = (vf)_mm512_min_ps(_mm512_max_ps((__m512)v, (__m512)least), (__m512)greatest);
#elif defined(__AVX2__)
  v = (vf)_mm256_min_ps(_mm256_max_ps((__m256)v, (__m256)least), (__m256)greatest);
#else
  v = choose(v < least, least, choose(v > greatest, greatest, v));
#endif
  return __builtin_convertvector(nearest(v), vf);
}

/* Round LANES groups of `size` inputs. steps: into how many a group's largest number is divided, [trials]; the one that leaves
 * the smallest squared error is taken, the first of equals. x: column by column. Writes numbers 0 to 15 in that order, too. */
INLINE void round_groups(const vf *x, int64_t size, const float *steps, int64_t trials, vf *numbers, uint16_t *scales) {
  const vf zero = {0};
  vf most = zero, peak = zero, error = splat(INFINITY), chosen = zero, scale = zero;
  for (int64_t i = 0; i < size; i++) {
    const vf magnitude = (vf)((vi)x[i] & 0x7fffffff);
    const vi larger = magnitude > most;
    most = choose(larger, magnitude, most);
    peak = choose(larger, x[i], peak);
  }
  /* A peak below 2^-60 has a scale of 0 in float16, and its inverse could be too large. */
  const vf inverse = choose(most < splat(0x1p-60f), zero, splat(1) / peak);
  for (int64_t t = 0; t < trials; t++) {
    const vf step = splat(steps[t]) * inverse;
    vf product = zero, square = zero, off = zero;
    for (int64_t i = 0; i < size; i++) {
      const vf q = numbers[i] = nearest_of_sixteen(x[i] * step);
      product += q * x[i];
      square += q * q;
    }
    uint16_t halves[LANES];
    *(vh_memory *)halves = __builtin_convertvector(to_float16_lanes(choose(square == zero, zero, product / square)), vh);
    const vf fitted = load_float16(halves);
    for (int64_t i = 0; i < size; i++) {
      const vf left = x[i] - numbers[i] * fitted;
      off += left * left;
    }
    const vi better = off < error;
    error = choose(better, off, error);
    chosen = choose(better, step, chosen);
    scale = choose(better, fitted, scale);
  }
  for (int64_t i = 0; i < size; i++) numbers[i] = nearest_of_sixteen(x[i] * chosen) + splat(8);
  *(vh_memory *)scales = __builtin_convertvector(to_float16_lanes(scale), vh);
}

/* What rounding to 4 bits is told, apart from the numbers. A row whose largest magnitude is not from 2^(least - 1) to 2^most is
 * divided by a power of two first. */
typedef struct {
  int64_t size;       /* inputs of a group: 32, 64 or 128 */
  int64_t trials;     /* at least 1 */
  const float *steps; /* [trials] */
  int64_t least, most;
} Grouping;

/* The power of two that a row is divided by. */
INLINE float row_factor(const Grouping *by, float peak) {
  int exponent;
  frexpf(peak, &exponent);
  return exponent < by->least || exponent > by->most ? ldexpf(1, exponent) : 1;
}

/* row: float32 [in], values: uint8 [in], scratch. packed: [rows, in / 2]. groups: [rows, in / size]. factors: [rows]. Returns 0
 * if a number is NaN or infinite: what is written then means nothing. */
static int four_bit_rows(int kind, const uint8_t *from, int64_t rows, int64_t in, int64_t row_bytes, const Grouping *by,
                         float *row, uint8_t *values, uint8_t *packed, uint16_t *groups, float *factors) {
  const int64_t size = by->size, count = in / size;
  vf columns[MOST_IN_GROUP], numbers[MOST_IN_GROUP];
  for (int64_t r = 0; r < rows; r++, from += row_bytes, packed += in / 2, groups += count) {
    widen(kind, from, in, row);
    const float peak = peak_of(row, in);
    if (!(peak <= FLT_MAX)) return 0;
    factors[r] = row_factor(by, peak);
    if (factors[r] != 1)
      for (int64_t i = 0; i < in; i++) row[i] /= factors[r];
    for (int64_t first = 0; first < count; first += LANES) {
      const int64_t here = min(LANES, count - first);
      uint16_t scales[LANES];
      for (int64_t i = 0; i < size; i++) columns[i] = (vf){0};
      for (int64_t g = 0; g < here; g++)
        for (int64_t i = 0; i < size; i++) columns[i][g] = row[(first + g) * size + i];
      round_groups(columns, size, by->steps, by->trials, numbers, scales);
      memcpy(groups + first, scales, here * sizeof *scales);
      for (int64_t g = 0; g < here; g++)
        for (int64_t i = 0; i < size; i++) values[(first + g) * size + i] = (uint8_t)numbers[i][g];
    }
    for (int64_t i = 0; i < in / 2; i++) {
      const uint8_t *chunk = values + i / 32 * 64 + i % 32;
      packed[i] = (uint8_t)(chunk[0] | chunk[32] << 4);
    }
  }
  return 1;
}
#endif
