/* Rows as integers, for 8-bit weights and weights in groups: integer sums of products are exact, so their order does not matter.
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

#if defined(__AVX512VNNI__)
#define VNNI 1
#else
#define VNNI 0
#endif
#define INTEGERS (VNNI || TILES)

/* Whether this matrix multiplies rows as integers. */
INLINE int as_integers(const Matrix *m) {
  return (VNNI && (is_grouped(m) || (m->kind == INT8 && sums_fit(m)))) || (m->kind == INT8 && on_tiles(m));
}

#define DIGITS 3        /* bytes per number of a row, for 8-bit weights */
#define GROUPED_DIGITS 2 /* the same for weights in groups: beside that of 4-bit weights the error is a hundred-thousandth */
#define FINER 64        /* weights in groups: a row gets more digits if its largest magnitude exceeds the mean this many times */
#define FINER_BITS 15   /* bits by which the finer digits' unit is below the first digits' */
#define CHUNK_INPUTS 64 /* inputs that one instruction multiplies */
#define INTEGER_ROWS 2  /* rows multiplied at once by 8-bit weights, with an accumulator per digit */
#define GROUPED_ROWS 4   /* and by weights in groups, with one accumulator */

/* Whether this matrix multiplies this many rows on the matrix unit. Where vectors can multiply bytes, one or two rows are faster
 * there, with the same bits. */
INLINE int by_tiles(const Matrix *m, int64_t rows) {
  return on_tiles(m) && !(VNNI && m->kind == INT8 && rows <= INTEGER_ROWS);
}

INLINE int digits_for(const Matrix *m) { return is_grouped(m) ? GROUPED_DIGITS : DIGITS; }

/* The factor of a row's digits, and the sum of its q. */
typedef struct {
  double unit;
  int64_t sum;
} Fixed;

INLINE int64_t chunks_of_inputs(int64_t in) { return (in + CHUNK_INPUTS - 1) / CHUNK_INPUTS; }

/* Bytes of a row's chunk: its digits, and for weights in groups the correction added to every four products
 * (`to_grouped_digits`). */
INLINE int64_t chunk_bytes(const Matrix *m) { return (digits_for(m) + is_grouped(m)) * CHUNK_INPUTS; }

/* Sums of neighbouring q that a chunk has, for weights in groups: groups of 16 with offsets need those of every 16 inputs. */
INLINE int sums_of_chunk(const Matrix *m) { return m->group == 16 && m->offsets ? 4 : 2; }

/* Size of a row's digits in 4-byte words: its chunks, `Fixed`, and for weights in groups the sums of neighbouring q. */
INLINE int64_t digits_size(const Matrix *m) {
  return chunks_of_inputs(m->in) * (chunk_bytes(m) / 4 + (is_grouped(m) ? sums_of_chunk(m) : 0)) + sizeof(Fixed) / 4;
}

/* Follows the digits of rows that weights in groups multiply together: which rows have finer digits. Those digits come next. */
typedef struct {
  int32_t count, rows[GROUPED_ROWS], unused[3];
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

#define SCALES 16 /* scales of groups, or offsets, converted to float32 at once */

/* The lanes' numbers from 0 to 15, divided by 2 to the power of `level`. */
INLINE __m512i lanes_by(int level) {
  return _mm512_srli_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), level);
}

INLINE __m512 bytes_as_floats(__m128i bytes, int is_signed) {
  return _mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
}

/* Of the factors of one or two blocks, `each` of a block, that with number `which`, for each of 16 groups. */
INLINE __m512 of_blocks(const Matrix *m, __m128 factors, int which, int each) {
  __m512i place = _mm512_set1_epi32(which);
  if (m->group != 16) place = _mm512_mask_set1_epi32(place, 0xff00, which + each);
  return _mm512_permutexvar_ps(place, _mm512_castps128_ps512(factors));
}

/* The scales of 16 groups of an output from group `from` on, a multiple of 16: those that `there` selects; and their offsets, if
 * these are not NULL. */
INLINE __m512 group_scales(const Matrix *m, int64_t output, int64_t from, __mmask16 there, __m512 *offsets) {
  const int64_t at = output * (m->in / m->group) + from;
  if (m->blocks) {
    const int each = offsets ? 2 : 1;
    const int64_t count = m->in / BLOCK_INPUTS, block = from * m->group / BLOCK_INPUTS;
    const __mmask8 blocks = (1u << min(2, count - block) * each) - 1;
    const __m128 factors = _mm_cvtph_ps(_mm_maskz_loadu_epi16(blocks, m->blocks + (output * count + block) * each));
    const __m128i scales = _mm_maskz_loadu_epi8(there, (const uint8_t *)m->groups + at);
    if (offsets) {
      const __m128 negated = _mm_xor_ps(factors, _mm_set1_ps(-0.0f));
      const __m128i numbers = _mm_maskz_loadu_epi8(there, (const uint8_t *)m->offsets + at);
      *offsets = _mm512_mul_ps(bytes_as_floats(numbers, 0), of_blocks(m, negated, 1, each));
    }
    return _mm512_mul_ps(bytes_as_floats(scales, m->scales == SIGNED), of_blocks(m, factors, 0, each));
  }
  if (offsets) *offsets = _mm512_maskz_loadu_ps(there, (const float *)m->offsets + at);
  if (m->scales == FLOATS) return _mm512_maskz_loadu_ps(there, (const float *)m->groups + at);
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, (const uint16_t *)m->groups + at));
}

/* Add the offsets of 16 groups from group `from` on to the lanes of R totals: each times the sum of its group's inputs. sums: of a
 * chunk's parts, for each row. */
#define ADD_OFFSETS(R) \
  INLINE void add_offsets_##R(const Matrix *m, int64_t from, __m512 offsets, const float *sums, vf *totals) { \
    const int64_t parts = sums_of_chunk(m), each = m->group * parts / CHUNK_INPUTS, count = m->in / CHUNK_INPUTS * parts; \
    const __m512i place = lanes_by(each == 1 ? 0 : each == 2 ? 1 : 2); \
    for (int64_t part = 0, i = from * each; part < each && i < count; part++, i += 16) { \
      const __mmask16 here = (1u << min(16, count - i)) - 1; \
      const __m512i own = _mm512_add_epi32(place, _mm512_set1_epi32((int)(part * 16 / each))); \
      const __m512 offset = each == 1 ? offsets : _mm512_permutexvar_ps(own, offsets); \
      UNROLL for (int r = 0; r < R; r++) \
        totals[r] = (vf)_mm512_fmadd_ps(offset, _mm512_maskz_loadu_ps(here, sums + r * count + i), (__m512)totals[r]); \
    } \
  }
ADD_OFFSETS(1) ADD_OFFSETS(2) ADD_OFFSETS(3) ADD_OFFSETS(4)

INLINE __m512i weights_of_bytes(const uint8_t *p) { return _mm512_loadu_si512(p); }
/* 64 weights of 6 bits. */
INLINE __m512i weights_6(const uint8_t *p) {
  __m512i upper = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)(p + 32)));
  upper = _mm512_srlv_epi64(upper, _mm512_set_epi64(6, 6, 4, 4, 2, 2, 0, 0));
  return _mm512_or_si512(weights_4(p), _mm512_slli_epi64(_mm512_and_si512(upper, _mm512_set1_epi8(3)), 4));
}

/* DOTS_8 for weights in groups: sums are exact within a group, and groups are added in order. Weights with offsets are what they
 * are, and need no correction. LOAD: 64 of them. WIDTH: bytes of these. */
#define DOTS_IN_GROUPS(R, NAME, LOAD, WIDTH, OFFSETS) \
  static void NAME##_##R(const Matrix *m, int64_t first, int64_t stride, const char *x, Fetch fetch, float *y) { \
    vf total[4][R]; \
    const int64_t chunks = m->in / CHUNK_INPUTS, num_groups = m->in / m->group, row = chunks * WIDTH; \
    const uint8_t *w = (const uint8_t *)m->weight + first * row; \
    const int level = m->group == 16 ? 0 : m->group == 32 ? 1 : m->group == 64 ? 2 : 3; \
    const int64_t period = (SCALES / 4) << level; /* chunks covered by SCALES scales */ \
    const int64_t groups_bytes = m->scales == FLOATS ? 4 : m->scales == HALVES ? 2 : 1, offsets_bytes = m->blocks ? 1 : 4; \
    const __m512i quarter = lanes_by(2); \
    const Fixed *fixed = (const Fixed *)(x + R * chunks * (GROUPED_DIGITS + 1) * CHUNK_INPUTS); \
    const float *row_sums = (const float *)(fixed + R); \
    UNROLL for (int o = 0; o < 4; o++) UNROLL for (int r = 0; r < R; r++) total[o][r] = (vf){0}; \
    for (int64_t start = 0; start < chunks; start += period) { \
      const int64_t end = min(chunks, start + period), from = start * 4 >> level; \
      const __mmask16 there = (1u << min(SCALES, num_groups - from)) - 1; \
      __m512 scales[4]; \
      if (fetch.ahead) \
        UNROLL for (int o = 0; o < 4; o++) { \
          const int64_t at = (first + o + fetch.ahead) * num_groups + from; \
          FETCH((const char *)m->groups + at * groups_bytes); \
          if (OFFSETS) FETCH((const char *)m->offsets + at * offsets_bytes); \
        } \
      UNROLL for (int o = 0; o < 4; o++) { \
        __m512 offsets; \
        scales[o] = group_scales(m, first + (stride ? o : 0), from, there, OFFSETS ? &offsets : NULL); \
        if (OFFSETS) add_offsets_##R(m, from, offsets, row_sums, total[o]); \
      } \
      for (int64_t c = start; c < end; c++) { \
        const __m512i place = _mm512_srli_epi32(_mm512_add_epi32(_mm512_set1_epi32((int)(4 * (c - start))), quarter), level); \
        if (fetch.ahead && (WIDTH != 32 || !(c & 1)) && (c * WIDTH & fetch.mask & -64) == fetch.place) \
          UNROLL for (int o = 0; o < 4; o++) FETCH(w + (o + fetch.ahead) * row + c * WIDTH); \
        UNROLL for (int o = 0; o < 4; o++) { \
          const __m512i weights = LOAD(w + o * stride + c * WIDTH); \
          const __m512 scale = _mm512_permutexvar_ps(place, scales[o]); \
          UNROLL for (int r = 0; r < R; r++) { \
            const char *digits = x + r * (GROUPED_DIGITS + 1) * CHUNK_INPUTS; \
            __m512i sums = add_products(_mm512_setzero_si512(), weights, _mm512_loadu_si512(digits)); \
            sums = _mm512_slli_epi32(sums, 8); \
            if (!OFFSETS) sums = _mm512_add_epi32(sums, _mm512_loadu_si512(digits + 2 * CHUNK_INPUTS)); \
            sums = add_products(sums, weights, _mm512_loadu_si512(digits + CHUNK_INPUTS)); \
            total[o][r] = (vf)_mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), scale, (__m512)total[o][r]); \
          } \
        } \
        x += R * (GROUPED_DIGITS + 1) * CHUNK_INPUTS; \
      } \
    } \
    UNROLL for (int r = 0; r < R; r++) { \
      float parts[4]; \
      sum_4(total[0][r], total[1][r], total[2][r], total[3][r], parts); \
      UNROLL for (int o = 0; o < 4; o++) y[r * BLOCK + o] = parts[o] * fixed[r].unit; \
    } \
  }
#define DOTS_IN_GROUPS_OF(NAME, LOAD, WIDTH, OFFSETS) \
  DOTS_IN_GROUPS(1, NAME, LOAD, WIDTH, OFFSETS) DOTS_IN_GROUPS(2, NAME, LOAD, WIDTH, OFFSETS) \
  DOTS_IN_GROUPS(3, NAME, LOAD, WIDTH, OFFSETS) DOTS_IN_GROUPS(4, NAME, LOAD, WIDTH, OFFSETS) \
  static void NAME(const Matrix *m, int64_t first, int64_t stride, const float *x, int64_t rows, Fetch fetch, float *y) { \
    switch (min(rows, 4)) { \
    case 1: NAME##_1(m, first, stride, (const char *)x, fetch, y); break; \
    case 2: NAME##_2(m, first, stride, (const char *)x, fetch, y); break; \
    case 3: NAME##_3(m, first, stride, (const char *)x, fetch, y); break; \
    default: NAME##_4(m, first, stride, (const char *)x, fetch, y); \
    } \
  }
DOTS_IN_GROUPS_OF(dots_nibbles, weights_4, 32, 0)
DOTS_IN_GROUPS_OF(offset_dots_nibbles, weights_4, 32, 1)
DOTS_IN_GROUPS_OF(dots_numbers, weights_of_bytes, 64, 0)
DOTS_IN_GROUPS_OF(offset_dots_numbers, weights_of_bytes, 64, 1)
DOTS_IN_GROUPS_OF(dots_of_sixes, weights_6, 48, 0)
DOTS_IN_GROUPS_OF(offset_dots_of_sixes, weights_6, 48, 1)

static void dots_in_groups(const Matrix *m, int64_t first, int64_t stride, const float *x, int64_t rows, Fetch fetch, float *y) {
  if (m->kind == INT4) (m->offsets ? offset_dots_nibbles : dots_nibbles)(m, first, stride, x, rows, fetch, y);
  else if (m->kind == SIXES) (m->offsets ? offset_dots_of_sixes : dots_of_sixes)(m, first, stride, x, rows, fetch, y);
  else (m->offsets ? offset_dots_numbers : dots_numbers)(m, first, stride, x, rows, fetch, y);
}

/* `dots_in_groups` where some of the rows may have finer digits. */
static void finer_dots(const Matrix *m, int64_t first, int64_t stride, const float *x, int64_t rows, Fetch fetch, float *y) {
  dots_in_groups(m, first, stride, x, rows, fetch, y);
  const Finer *finer = (const Finer *)(x + rows * digits_size(m));
  int64_t count = min(finer->count, rows); /* a late member may read any number here, and must stay within its memory */
  if (count <= 0) return;
  float more[GROUPED_ROWS * BLOCK];
  dots_in_groups(m, first, stride, (const float *)(finer + 1), count, (Fetch){0}, more);
  for (int64_t k = 0; k < count; k++) {
    int64_t r = finer->rows[k];
    if (r < 0 || r >= rows) continue;
    for (int o = 0; o < 4; o++) y[r * BLOCK + o] += more[k * BLOCK + o];
  }
}

/* `outputs` for rows as integers, before scale and bias. */
static void integer_outputs(const Matrix *m, int64_t first, int64_t count, const float *x, int64_t rows, Fetch fetch, float *y) {
  const int64_t stride = bytes_of(m->kind, m->in);
  for (int64_t o = 0; o < count; o += 4) {
    if (count - o >= 4) {
      if (m->kind == INT8) dots_8(m, first + o, stride, x, rows, fetch, y + o);
      else finer_dots(m, first + o, stride, x, rows, fetch, y + o);
      continue;
    }
    for (; o < count; o++) { /* the last outputs one by one, each computed four times over */
      float same[ROWS * BLOCK];
      if (m->kind == INT8) dots_8(m, first + o, 0, x, rows, (Fetch){0}, same);
      else finer_dots(m, first + o, 0, x, rows, (Fetch){0}, same);
      for (int64_t r = 0; r < rows; r++) y[r * BLOCK + o] = same[r * BLOCK];
    }
  }
}
#endif
#endif
