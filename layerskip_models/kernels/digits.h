/* Rows as integers, for 8-bit weights and (interleaved.h) weights in groups: integer sums of products are exact, so their order does not matter.
 *
 * A row becomes fixed-point numbers q * unit, where `unit` is a power of two chosen for the row's largest number. Each q is cut
 * into signed bytes, its digits: three for 8-bit weights, two for weights in groups. One instruction multiplies 64 digits by 64
 * weights and adds the products up. Only small numbers of a row are rounded: to within 2^-23 of its largest, about as float32
 * rounds a sum of them, or with two digits to within 2^-15. Where most of a row is much smaller than its largest number, two
 * digits are too coarse. Such a row gets two more digits for the remainder, and is multiplied twice.
 */
#ifndef SELFSPEC_DIGITS_H
#define SELFSPEC_DIGITS_H
#include "matrix.h"

#define INTEGERS (VNNI || TILES)

/* Whether this matrix multiplies rows as integers. */
INLINE int as_integers(const Matrix *m) {
  return m->kind == INT8 ? (VNNI && sums_fit(m)) || on_tiles(m) : m->interleaved != 0;
}

#define DIGITS 3        /* bytes per number of a row, for 8-bit weights */
#define GROUPED_DIGITS 2 /* the same for weights in groups: beside that of 4-bit weights the error is a hundred-thousandth */
#define FINER 64        /* weights in groups: a row gets more digits if its largest magnitude exceeds the mean this many times */
#define FINER_BITS 15   /* bits by which the finer digits' unit is below the first digits' */
#define CHUNK_INPUTS 64 /* inputs that one instruction multiplies */
#define INTEGER_ROWS 2  /* rows multiplied at once by 8-bit weights, with an accumulator per digit */
#define GROUPED_ROWS 5   /* and by weights in groups, with an accumulator per digit of two spans */

/* Whether this matrix multiplies this many rows on the matrix unit. Where vectors can multiply bytes, a few rows are faster there,
 * with the same bits. */
INLINE int by_tiles(const Matrix *m, int64_t rows) {
  if (is_grouped(m)) return on_tiles(m) && rows > GROUPED_ROWS;
  return on_tiles(m) && !(VNNI && m->kind == INT8 && rows <= INTEGER_ROWS);
}

INLINE int digits_for(const Matrix *m) { return is_grouped(m) ? GROUPED_DIGITS : DIGITS; }

/* The factor of a row's digits, and the sum of its q. */
typedef struct {
  double unit;
  int64_t sum;
} Fixed;

INLINE int64_t chunks_of_inputs(int64_t in) { return (in + CHUNK_INPUTS - 1) / CHUNK_INPUTS; }

/* Sums that a chunk's products with weights in groups are added up to: of 32 inputs each, or of 16. */
INLINE int spans_of_chunk(const Matrix *m) { return m->group == 16 ? 4 : 2; }

/* Bytes of a row's chunk: its digits, and for weights in groups a word for each span (`to_grouped_digits`). */
INLINE int64_t chunk_bytes(const Matrix *m) {
  return digits_for(m) * CHUNK_INPUTS + (is_grouped(m) ? 4 * spans_of_chunk(m) : 0);
}

/* Size of a row's digits in 4-byte words: its chunks and `Fixed`. */
INLINE int64_t digits_size(const Matrix *m) {
  return chunks_of_inputs(m->in) * (chunk_bytes(m) / 4) + (int64_t)(sizeof(Fixed) / 4);
}

/* Follows the digits of rows that weights in groups multiply together: which rows have finer digits. Those digits come next. */
typedef struct {
  int32_t count, rows[ROWS], unused;
} Finer;

/* Words to reserve for a row: its digits, and for weights in groups as much again for finer digits, which few rows have. */
INLINE int64_t digits_capacity(const Matrix *m) {
  return is_grouped(m) ? 2 * digits_size(m) + (int64_t)(sizeof(Finer) / 4) : digits_size(m);
}

#if VNNI
typedef int32_t v4i __attribute__((vector_size(16)));
typedef int64_t v4l __attribute__((vector_size(32)));
typedef double v4d __attribute__((vector_size(32)));

/* The sums over lanes of four integer vectors. */
INLINE v4i sum_4_integers(__m512i a, __m512i b, __m512i c, __m512i d) {
  __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  return (v4i)_mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

/* Multiply 64 unsigned by 64 signed bytes and add each four products to a lane of `sums`. With the intrinsic GCC 12 copies the
 * accumulators around and runs out of registers; with the assembler Clang stores every second factor to memory first. */
INLINE __m512i add_products(__m512i sums, __m512i plain, __m512i signs) {
#if defined(__clang__)
  return _mm512_dpbusd_epi32(sums, plain, signs);
#else
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(plain), "vm"(signs));
  return sums;
#endif
}

/* Load the weights at p that `here` selects, up to 64, each plus 128: the instruction needs one unsigned factor. */
INLINE __m512i weights_8(const int8_t *p, __mmask64 here) {
  return _mm512_xor_si512(_mm512_maskz_loadu_epi8(here, p), _mm512_set1_epi8(-128));
}

#define STEP_8(R, HERE) \
  do { \
    __m512i weights[4]; \
    UNROLL for (int o = 0; o < 4; o++) weights[o] = weights_8(w + o * stride + i, HERE); \
    UNROLL for (int k = 0; k < R * DIGITS; k++, x += CHUNK_INPUTS) { \
      __m512i digits = _mm512_loadu_si512(x); \
      UNROLL for (int o = 0; o < 4; o++) total[o][k] = add_products(total[o][k], weights[o], digits); \
    } \
  } while (0)

/* y[r * BLOCK + o] = w[o] . x[r] for 4 outputs whose weights are `stride` bytes apart, and R rows of digits. */
#define DOTS_8(R) \
  INLINE void dots_8_##R(const int8_t *w, int64_t stride, const char *x, int64_t in, Fetch fetch, float *y) { \
    const Fixed *fixed = (const Fixed *)(x + R * chunks_of_inputs(in) * DIGITS * CHUNK_INPUTS); \
    __m512i total[4][R * DIGITS]; \
    UNROLL for (int o = 0; o < 4; o++) UNROLL for (int k = 0; k < R * DIGITS; k++) total[o][k] = _mm512_setzero_si512(); \
    int64_t i = 0; \
    for (; i + CHUNK_INPUTS <= in; i += CHUNK_INPUTS) { \
      if (fetch.ahead && (i & fetch.mask) == fetch.place) \
        UNROLL for (int o = 0; o < 4; o++) FETCH(w + (o + fetch.ahead) * in + i); \
      STEP_8(R, ~(__mmask64)0); \
    } \
    if (i < in) STEP_8(R, ((__mmask64)1 << (in - i)) - 1); \
    UNROLL for (int r = 0; r < R; r++) { \
      v4l whole = {0}; \
      UNROLL for (int d = 0; d < DIGITS; d++) { \
        int k = r * DIGITS + d; \
        whole = whole * 256 + __builtin_convertvector(sum_4_integers(total[0][k], total[1][k], total[2][k], total[3][k]), v4l); \
      } \
      whole -= 128 * fixed[r].sum; \
      *(v4_memory *)(y + r * BLOCK) = __builtin_convertvector(__builtin_convertvector(whole, v4d) * fixed[r].unit, v4); \
    } \
  }
DOTS_8(1) DOTS_8(2)

static void dots_8(const Matrix *m, int64_t first, int64_t stride, const float *x, int64_t rows, Fetch fetch, float *y) {
  const int8_t *w = (const int8_t *)m->weight + first * m->in;
  if (rows == 1) dots_8_1(w, stride, (const char *)x, m->in, fetch, y);
  else dots_8_2(w, stride, (const char *)x, m->in, fetch, y);
}

/* `outputs` for 8-bit weights, before scale and bias. */
static void integer_outputs(const Matrix *m, int64_t first, int64_t count, const float *x, int64_t rows, Fetch fetch, float *y) {
  for (int64_t o = 0; o < count; o += 4) {
    if (count - o >= 4) {
      dots_8(m, first + o, m->in, x, rows, fetch, y + o);
      continue;
    }
    for (; o < count; o++) { /* the last outputs one by one, each computed four times over */
      float same[INTEGER_ROWS * BLOCK];
      dots_8(m, first + o, 0, x, rows, (Fetch){0}, same);
      for (int64_t r = 0; r < rows; r++) y[r * BLOCK + o] = same[r * BLOCK];
    }
  }
}
#endif
#endif
