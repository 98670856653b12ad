/* Rows as integers, for 8-bit and 4-bit weights: integer sums of products are exact, so their order does not matter.
 *
 * A row becomes fixed-point numbers q * unit, where `unit` is a power of two chosen for the row's largest number. Each q is cut
 * into signed bytes, its digits: three for 8-bit weights, two for 4-bit weights. One instruction multiplies 64 digits by 64
 * weights and adds the products up. Only small numbers of a row are rounded: to within 2^-23 of its largest, about as float32
 * rounds a sum of them, or with two digits to within 2^-15. Where most of a row is much smaller than its largest number, two
 * digits are too coarse. Such a row gets two more digits for the remainder, and is multiplied twice.
 */
#ifndef SELFSPEC_DIGITS_H
#define SELFSPEC_DIGITS_H
#include "matrix.h"

#if defined(__AVX512VNNI__)
#define VNNI 1
#else
#define VNNI 0
#endif
#define INTEGERS (VNNI || TILES)

/* Whether this matrix multiplies rows as integers. */
INLINE int as_integers(const Matrix *m) {
  return (VNNI && (m->kind == INT4 || (m->kind == INT8 && sums_fit(m)))) || (m->kind == INT8 && on_tiles(m));
}

#define DIGITS 3        /* bytes per number of a row, for 8-bit weights */
#define NIBBLE_DIGITS 2 /* the same for 4-bit weights: the error is a hundred-thousandth of that of the weights */
#define FINER 64        /* 4-bit weights: a row gets more digits if its largest magnitude exceeds the mean this many times */
#define FINER_BITS 15   /* bits by which the finer digits' unit is below the first digits' */
#define CHUNK_INPUTS 64 /* inputs that one instruction multiplies */
#define INTEGER_ROWS 2  /* rows multiplied at once by 8-bit weights, with an accumulator per digit */
#define NIBBLE_ROWS 4   /* and by 4-bit weights, with one accumulator */

/* Whether this matrix multiplies this many rows on the matrix unit. Where vectors can multiply bytes, one or two rows are faster
 * there, with the same bits. */
INLINE int by_tiles(const Matrix *m, int64_t rows) {
  return on_tiles(m) && !(VNNI && m->kind == INT8 && rows <= INTEGER_ROWS);
}

INLINE int digits_for(const Matrix *m) { return m->kind == INT4 ? NIBBLE_DIGITS : DIGITS; }

/* The factor of a row's digits, and the sum of its q. */
typedef struct {
  double unit;
  int64_t sum;
} Fixed;

INLINE int64_t chunks_of_inputs(int64_t in) { return (in + CHUNK_INPUTS - 1) / CHUNK_INPUTS; }

/* Bytes of a row's chunk: its digits, and for 4-bit weights the correction added to every four products
 * (`to_nibble_digits`). */
INLINE int64_t chunk_bytes(const Matrix *m) { return (digits_for(m) + (m->kind == INT4)) * CHUNK_INPUTS; }

/* Size of a row's digits in 4-byte words: its chunks, `Fixed`, and for 4-bit weights the sum of every 32 q. */
INLINE int64_t digits_size(const Matrix *m) {
  return chunks_of_inputs(m->in) * (chunk_bytes(m) / 4 + (m->kind == INT4 ? 2 : 0)) + sizeof(Fixed) / 4;
}

/* Follows the digits of rows that 4-bit weights multiply together: which rows have finer digits. Those digits come next. */
typedef struct {
  int32_t count, rows[NIBBLE_ROWS], unused[3];
} Finer;

/* Words to reserve for a row: its digits, and for 4-bit weights as much again for finer digits, which few rows have. */
INLINE int64_t digits_capacity(const Matrix *m) {
  return m->kind == INT4 ? 2 * digits_size(m) + (int64_t)(sizeof(Finer) / 4) : digits_size(m);
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

/* Multiply 64 unsigned by 64 signed bytes and add each four products to a lane of `sums`. In assembler, because with the
 * intrinsic GCC 12 copies the accumulators around and runs out of registers. */
INLINE __m512i add_products(__m512i sums, __m512i plain, __m512i signs) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(plain), "vm"(signs));
  return sums;
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

/* 64 4-bit weights, 0 to 15: the 32 bytes twice, the second copy shifted right by 4 bits. */
INLINE __m512i weights_4(const uint8_t *p) {
  __m512i pairs = _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)p));
  __m512i down = _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0);
  return _mm512_and_si512(_mm512_srlv_epi64(pairs, down), _mm512_set1_epi8(15));
}

/* Add an output's offsets to the lanes of R totals: each offset times the sum of its group's inputs. sums: of every 32 inputs,
 * for each row. */
#define ADD_OFFSETS(R) \
  INLINE void add_offsets_##R(const Matrix *m, int64_t output, const float *sums, vf *totals) { \
    const int64_t each = m->group / 32, count = m->in / 32, apart = 2 * chunks_of_inputs(m->in); \
    const float *offsets = m->offsets + output * (m->in / m->group); \
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); \
    const __m512i place = _mm512_srli_epi32(lanes, each == 1 ? 0 : each == 2 ? 1 : 2); \
    for (int64_t i = 0; i < count; i += 16) { \
      const int64_t left = min(16, count - i); \
      const __mmask16 here = (1u << left) - 1, groups = (1u << (left + each - 1) / each) - 1; \
      const __m512 offset = _mm512_permutexvar_ps(place, _mm512_maskz_loadu_ps(groups, offsets + i / each)); \
      UNROLL for (int r = 0; r < R; r++) \
        totals[r] = (vf)_mm512_fmadd_ps(offset, _mm512_maskz_loadu_ps(here, sums + r * apart + i), (__m512)totals[r]); \
    } \
  }
ADD_OFFSETS(1) ADD_OFFSETS(2) ADD_OFFSETS(3) ADD_OFFSETS(4)

#define SCALES 16 /* group scales converted to float32 at once */

/* DOTS_8 for 4-bit weights: sums are exact within a group, and groups are added in order. Weights with offsets are 0 to 15 as they
 * are, and need no correction. */
#define DOTS_4(R, NAME, OFFSETS) \
  static void NAME##_##R(const Matrix *m, int64_t first, int64_t stride, const char *x, Fetch fetch, float *y) { \
    vf total[4][R]; \
    const uint8_t *w = (const uint8_t *)m->weight + first * (m->in / 2); \
    const int64_t chunks = m->in / CHUNK_INPUTS, num_groups = m->in / m->group, apart = stride ? num_groups : 0; \
    const int level = m->group == 32 ? 0 : m->group == 64 ? 1 : 2; \
    const int64_t period = (SCALES / 2) << level; /* chunks covered by SCALES scales */ \
    const __m512i half = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0); \
    UNROLL for (int o = 0; o < 4; o++) UNROLL for (int r = 0; r < R; r++) total[o][r] = (vf){0}; \
    for (int64_t start = 0; start < chunks; start += period) { \
      const int64_t end = min(chunks, start + period), from = start * 2 >> level; \
      const __mmask16 there = (1u << min(SCALES, num_groups - from)) - 1; \
      __m512 scales[4]; \
      if (fetch.ahead) \
        UNROLL for (int o = 0; o < 4; o++) { \
          FETCH(m->groups + (first + o + fetch.ahead) * num_groups + from); \
          if (OFFSETS) FETCH(m->offsets + (first + o + fetch.ahead) * num_groups + from); \
        } \
      UNROLL for (int o = 0; o < 4; o++) \
        scales[o] = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, m->groups + first * num_groups + o * apart + from)); \
      for (int64_t c = start; c < end; c++) { \
        const __m512i place = _mm512_srli_epi32(_mm512_add_epi32(_mm512_set1_epi32(2 * (c - start)), half), level); \
        if (fetch.ahead && !(c & 1) && (c * 32 & fetch.mask) == fetch.place) \
          UNROLL for (int o = 0; o < 4; o++) FETCH(w + (o + fetch.ahead) * (m->in / 2) + c * 32); \
        UNROLL for (int o = 0; o < 4; o++) { \
          const __m512i weights = weights_4(w + o * stride + c * 32); \
          const __m512 scale = _mm512_permutexvar_ps(place, scales[o]); \
          UNROLL for (int r = 0; r < R; r++) { \
            const char *digits = x + r * (NIBBLE_DIGITS + 1) * CHUNK_INPUTS; \
            __m512i sums = add_products(_mm512_setzero_si512(), weights, _mm512_loadu_si512(digits)); \
            sums = _mm512_slli_epi32(sums, 8); \
            if (!OFFSETS) sums = _mm512_add_epi32(sums, _mm512_loadu_si512(digits + 2 * CHUNK_INPUTS)); \
            sums = add_products(sums, weights, _mm512_loadu_si512(digits + CHUNK_INPUTS)); \
            total[o][r] = (vf)_mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), scale, (__m512)total[o][r]); \
          } \
        } \
        x += R * (NIBBLE_DIGITS + 1) * CHUNK_INPUTS; \
      } \
    } \
    const Fixed *fixed = (const Fixed *)x; \
    if (OFFSETS) UNROLL for (int o = 0; o < 4; o++) \
      add_offsets_##R(m, first + (stride ? o : 0), (const float *)(fixed + R), total[o]); \
    UNROLL for (int r = 0; r < R; r++) { \
      float parts[4]; \
      sum_4(total[0][r], total[1][r], total[2][r], total[3][r], parts); \
      UNROLL for (int o = 0; o < 4; o++) y[r * BLOCK + o] = parts[o] * fixed[r].unit; \
    } \
  }
DOTS_4(1, dots_4, 0) DOTS_4(2, dots_4, 0) DOTS_4(3, dots_4, 0) DOTS_4(4, dots_4, 0)
DOTS_4(1, offset_dots_4, 1) DOTS_4(2, offset_dots_4, 1) DOTS_4(3, offset_dots_4, 1) DOTS_4(4, offset_dots_4, 1)

static void dots_4(const Matrix *m, int64_t first, int64_t stride, const float *x, int64_t rows, Fetch fetch, float *y) {
  const char *from = (const char *)x;
  switch (4 * !!m->offsets + min(rows, 4)) {
  case 1: dots_4_1(m, first, stride, from, fetch, y); break;
  case 2: dots_4_2(m, first, stride, from, fetch, y); break;
  case 3: dots_4_3(m, first, stride, from, fetch, y); break;
  case 4: dots_4_4(m, first, stride, from, fetch, y); break;
  case 5: offset_dots_4_1(m, first, stride, from, fetch, y); break;
  case 6: offset_dots_4_2(m, first, stride, from, fetch, y); break;
  case 7: offset_dots_4_3(m, first, stride, from, fetch, y); break;
  default: offset_dots_4_4(m, first, stride, from, fetch, y);
  }
}

/* `dots_4` where some of the rows may have finer digits. */
static void finer_dots_4(const Matrix *m, int64_t first, int64_t stride, const float *x, int64_t rows, Fetch fetch, float *y) {
  dots_4(m, first, stride, x, rows, fetch, y);
  const Finer *finer = (const Finer *)(x + rows * digits_size(m));
  int64_t count = min(finer->count, rows); /* a late member may read any number here, and must stay within its memory */
  if (count <= 0) return;
  float more[NIBBLE_ROWS * BLOCK];
  dots_4(m, first, stride, (const float *)(finer + 1), count, (Fetch){0}, more);
  for (int64_t k = 0; k < count; k++) {
    int64_t r = finer->rows[k];
    if (r < 0 || r >= rows) continue;
    for (int o = 0; o < 4; o++) y[r * BLOCK + o] += more[k * BLOCK + o];
  }
}

/* `outputs` for rows as integers, before scale and bias. */
static void integer_outputs(const Matrix *m, int64_t first, int64_t count, const float *x, int64_t rows, Fetch fetch, float *y) {
  int64_t stride = m->kind == INT4 ? m->in / 2 : m->in;
  for (int64_t o = 0; o < count; o += 4) {
    if (count - o >= 4) {
      if (m->kind == INT8) dots_8(m, first + o, stride, x, rows, fetch, y + o);
      else finer_dots_4(m, first + o, stride, x, rows, fetch, y + o);
      continue;
    }
    for (; o < count; o++) { /* the last outputs one by one, each computed four times over */
      float same[ROWS * BLOCK];
      if (m->kind == INT8) dots_8(m, first + o, 0, x, rows, (Fetch){0}, same);
      else finer_dots_4(m, first + o, 0, x, rows, (Fetch){0}, same);
      for (int64_t r = 0; r < rows; r++) y[r * BLOCK + o] = same[r * BLOCK];
    }
  }
}
#endif
#endif
