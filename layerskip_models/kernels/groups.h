/* Weights in groups: their scales, and their products with rows as digits. Sums of products are exact within a group, and are
 * added as floats: lane by lane, in the order of the inputs, and after the offsets of the same SCALES groups. All functions here
 * and in words.h add in this order, so a row's results do not depend on how many rows there are.
 */
#ifndef SELFSPEC_GROUPS_H
#define SELFSPEC_GROUPS_H
#include "digits.h"

#if VNNI
/* 64 4-bit weights, 0 to 15: the 32 bytes twice, the second copy shifted right by 4 bits. */
INLINE __m512i weights_4(const uint8_t *p) {
  __m512i pairs = _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)p));
  __m512i down = _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0);
  return _mm512_and_si512(_mm512_srlv_epi64(pairs, down), _mm512_set1_epi8(15));
}

/* A group has 16 inputs times 2 to the power of this. */
INLINE int level_of(const Matrix *m) { return m->group == 16 ? 0 : m->group == 32 ? 1 : m->group == 64 ? 2 : 3; }

#define SCALES 16 /* scales of groups, or offsets, converted to float32 at once */

/* The lanes' numbers from 0 to 15, divided by 2 to the power of `level`. */
INLINE __m512i lanes_by(int level) {
  return _mm512_srli_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), level);
}

/* For each lane of a chunk, its group's number among those of a period. chunk: in the period. */
INLINE __m512i groups_of_lanes(int64_t chunk, int level) {
  return _mm512_srli_epi32(_mm512_add_epi32(_mm512_set1_epi32((int)(4 * chunk)), lanes_by(2)), level);
}

/* The offsets of 16 groups of an output from group `from` on, a multiple of 16: those that `there` selects. */
INLINE __m512 group_offsets(const Matrix *m, int64_t output, int64_t from, __mmask16 there) {
  const int64_t at = output * (m->in / m->group) + from;
  if (!m->blocks) return _mm512_maskz_loadu_ps(there, (const float *)m->offsets + at);
  const int64_t count = m->in / BLOCK_INPUTS, block = from * m->group / BLOCK_INPUTS;
  const __mmask8 halves = (1u << min(2, count - block) * 2) - 1;
  const __m128 factors = _mm_cvtph_ps(_mm_maskz_loadu_epi16(halves, m->blocks + (output * count + block) * 2));
  const __m512 numbers = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(there, (const uint8_t *)m->offsets + at)));
  const __m512i place = _mm512_mask_set1_epi32(_mm512_set1_epi32(1), m->group == 16 ? 0 : 0xff00, 3);
  return _mm512_mul_ps(numbers, _mm512_permutexvar_ps(place, _mm512_castps128_ps512(_mm_xor_ps(factors, _mm_set1_ps(-0.0f)))));
}

/* The scales of these groups, where they are floats. */
INLINE __m512 group_scales(const Matrix *m, int64_t output, int64_t from, __mmask16 there) {
  const int64_t at = output * (m->in / m->group) + from;
  if (m->scales == FLOATS) return _mm512_maskz_loadu_ps(there, (const float *)m->groups + at);
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, (const uint16_t *)m->groups + at));
}

/* Where they are integers, twice in each lane. */
INLINE __m512i scale_words(const Matrix *m, int64_t output, int64_t from, __mmask16 there) {
  const __m128i bytes = _mm_maskz_loadu_epi8(there, (const uint8_t *)m->groups + output * (m->in / m->group) + from);
  const __m512i integers = m->scales == SIGNED ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
  return _mm512_mask_blend_epi16(0xaaaaaaaa, integers, _mm512_slli_epi32(integers, 16));
}

/* Of the offsets of 16 groups those that belong to 16 of a row's sums, of which a group has `each`. */
INLINE __m512 offsets_of_part(__m512 offsets, int64_t part, int64_t each) {
  if (each == 1) return offsets;
  const __m512i first = _mm512_set1_epi32((int)(part * 16 / each));
  return _mm512_permutexvar_ps(_mm512_add_epi32(lanes_by(each == 2 ? 1 : 2), first), offsets);
}

/* Add the offsets of 16 groups from group `from` on to the lanes of R totals: each times the sum of its group's inputs. sums: of a
 * chunk's parts, for each row. */
#define ADD_OFFSETS(R) \
  INLINE void add_offsets_##R(const Matrix *m, int64_t from, __m512 offsets, const float *sums, vf *totals) { \
    const int64_t parts = sums_of_chunk(m), each = m->group * parts / CHUNK_INPUTS, count = m->in / CHUNK_INPUTS * parts; \
    for (int64_t part = 0, i = from * each; part < each && i < count; part++, i += 16) { \
      const __mmask16 here = (1u << min(16, count - i)) - 1; \
      const __m512 offset = offsets_of_part(offsets, part, each); \
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

/* The end of a function: the sums of the lanes of R rows' totals for four outputs. */
#define STORE_TOTALS(R) \
  UNROLL for (int r = 0; r < R; r++) { \
    float sums_of_row[4]; \
    sum_4(total[0][r], total[1][r], total[2][r], total[3][r], sums_of_row); \
    UNROLL for (int o = 0; o < 4; o++) y[r * BLOCK + o] = sums_of_row[o] * fixed[r].unit; \
  }

/* Calls NAME_1 to NAME_4, by the number of rows. */
#define BY_ROWS_UP_TO_4(NAME) \
  static void NAME(const Matrix *m, int64_t first, int64_t stride, const char *x, int64_t rows, Fetch fetch, float *y) { \
    switch (rows) { \
    case 1: NAME##_1(m, first, stride, x, fetch, y); break; \
    case 2: NAME##_2(m, first, stride, x, fetch, y); break; \
    case 3: NAME##_3(m, first, stride, x, fetch, y); break; \
    default: NAME##_4(m, first, stride, x, fetch, y); \
    } \
  }

/* DOTS_8 for weights in groups. Weights with offsets are what they are, and need no correction. LOAD: 64 of them. WIDTH: bytes of
 * these. */
#define DOTS_IN_GROUPS(R, NAME, LOAD, WIDTH, OFFSETS) \
  static void NAME##_##R(const Matrix *m, int64_t first, int64_t stride, const char *x, Fetch fetch, float *y) { \
    vf total[4][R]; \
    const int64_t chunks = m->in / CHUNK_INPUTS, num_groups = m->in / m->group, row = chunks * WIDTH; \
    const uint8_t *w = (const uint8_t *)m->weight + first * row; \
    const int level = level_of(m); \
    const int64_t period = (SCALES / 4) << level, groups_bytes = m->scales == FLOATS ? 4 : 2; \
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
          if (OFFSETS) FETCH((const float *)m->offsets + at); \
        } \
      UNROLL for (int o = 0; o < 4; o++) { \
        const int64_t output = first + (stride ? o : 0); \
        scales[o] = group_scales(m, output, from, there); \
        if (OFFSETS) add_offsets_##R(m, from, group_offsets(m, output, from, there), row_sums, total[o]); \
      } \
      for (int64_t c = start; c < end; c++) { \
        const __m512i place = groups_of_lanes(c - start, level); \
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
    STORE_TOTALS(R) \
  }
#define DOTS_IN_GROUPS_OF(NAME, LOAD, WIDTH, OFFSETS) \
  DOTS_IN_GROUPS(1, NAME, LOAD, WIDTH, OFFSETS) DOTS_IN_GROUPS(2, NAME, LOAD, WIDTH, OFFSETS) \
  DOTS_IN_GROUPS(3, NAME, LOAD, WIDTH, OFFSETS) DOTS_IN_GROUPS(4, NAME, LOAD, WIDTH, OFFSETS) \
  BY_ROWS_UP_TO_4(NAME)
DOTS_IN_GROUPS_OF(dots_nibbles, weights_4, 32, 0)
DOTS_IN_GROUPS_OF(offset_dots_nibbles, weights_4, 32, 1)
DOTS_IN_GROUPS_OF(dots_numbers, weights_of_bytes, 64, 0)
DOTS_IN_GROUPS_OF(offset_dots_numbers, weights_of_bytes, 64, 1)
DOTS_IN_GROUPS_OF(dots_of_sixes, weights_6, 48, 0)
DOTS_IN_GROUPS_OF(offset_dots_of_sixes, weights_6, 48, 1)
#endif
#endif
