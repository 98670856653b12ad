/* 8-bit weights and weights in groups, 16 outputs side by side in memory, times rows as limbs.
 *
 * One instruction multiplies four inputs of 16 outputs by the same four limbs of a row, so that each lane adds up one output.
 * With 8-bit weights these sums are exact. In groups they are exact within a span of 32 inputs (16 where groups have 16), and are then
 * multiplied by the spans' scales and added as floats, span after span: in the order of the inputs, or where a chunk has four spans
 * the first, third, second and fourth of it. So a row's results do not depend on how many rows there are.
 *
 * Memory, for each 16 outputs: the numbers, [words of 4 bytes of an output, 16]; scales and offsets, [in / group, 16]; scales of
 * blocks, [in / 256, 1 or 2, 16]. 8-bit weights are stored plus 128, since the instruction needs one unsigned factor.
 * interleaving.py has this made of rows of outputs.
 */
#ifndef SELFSPEC_INTERLEAVED_H
#define SELFSPEC_INTERLEAVED_H
#include "limbs.h"

/* Reorder rows of `words` numbers of `size` bytes in place, 16 rows at a time: the rows' first numbers, their second ones and so on.
 * rows: a multiple of 16. flip: bits to turn over in each. scratch: 16 rows. */
#define INTERLEAVE(NAME, T) \
  static void NAME(T *numbers, int64_t rows, int64_t words, T flip, T *scratch) { \
    for (int64_t first = 0; first < rows; first += 16, numbers += 16 * words) { \
      for (int64_t w = 0; w < words; w++) \
        UNROLL16 for (int64_t o = 0; o < 16; o++) scratch[w * 16 + o] = numbers[o * words + w] ^ flip; \
      memcpy(numbers, scratch, sizeof(T) * 16 * words); \
    } \
  }
INTERLEAVE(interleave_1, uint8_t)
INTERLEAVE(interleave_2, uint16_t)
INTERLEAVE(interleave_4, uint32_t)

/* Where 16 outputs' scales and offsets are. */
typedef struct {
  const char *scales, *offsets;
  const uint16_t *blocks;
} Factors;

INLINE Factors factors_at(const Matrix *m, int64_t first) {
  const int64_t groups = first * (m->in / m->group);
  const int size = m->scales == FLOATS ? 4 : m->scales == HALVES ? 2 : 1, size_of_offset = m->blocks ? 1 : 4;
  return (Factors){(const char *)m->groups + groups * size, (const char *)m->offsets + (m->offsets ? groups * size_of_offset : 0),
                   m->blocks ? m->blocks + first * (m->in / BLOCK_INPUTS) * (m->offsets ? 2 : 1) : NULL};
}

/* By how many bits to shift a span's number for that of its group. */
INLINE int spans_shift(const Matrix *m) { return m->group == 64 ? 1 : m->group == 128 ? 2 : 0; }

/* The factors of a block's scales, and of its offsets. */
#define SIDES (BLOCK / LANES) /* vectors that hold 16 outputs */
typedef struct {
  vf scales[SIDES], offsets[SIDES];
} BlockFactors;

INLINE BlockFactors factors_of_block(const Matrix *m, Factors at, int64_t block) {
  BlockFactors found = {{{0}}, {{0}}};
  const uint16_t *p = at.blocks + block * (m->offsets ? 32 : 16);
  UNROLL for (int side = 0; side < SIDES; side++) {
    found.scales[side] = load_float16(p + LANES * side);
    if (m->offsets) found.offsets[side] = -load_float16(p + 16 + LANES * side);
  }
  return found;
}

/* The scales of a group, and its offsets, for LANES of 16 outputs. Integers are of one type. */
INLINE vf integers_of(const Matrix *m, const char *p) {
  return m->scales == SIGNED ? load_int8((const int8_t *)p) : __builtin_convertvector(load_bytes((const uint8_t *)p), vf);
}
INLINE vf scales_of(const Matrix *m, Factors at, int64_t group, const BlockFactors *block, int side) {
  const int64_t place = 16 * group + LANES * side;
  if (m->scales == HALVES) return load_float16((const uint16_t *)at.scales + place);
  if (m->scales == FLOATS) return load((const float *)at.scales + place);
  return integers_of(m, at.scales + place) * block->scales[side];
}
INLINE vf offsets_of(const Matrix *m, Factors at, int64_t group, const BlockFactors *block, int side) {
  const int64_t place = 16 * group + LANES * side;
  return m->blocks ? integers_of(m, at.offsets + place) * block->offsets[side] : load((const float *)at.offsets + place);
}

/* Add a span's sums to the totals of a row: times their scales, and where there are offsets these times the sum of the row's inputs.
 * word: the span's, after the chunk's limbs. */
INLINE vf add_span(vf total, vi sums, vf scale, int shifted, vf offset, const char *word) {
  typedef float number __attribute__((aligned(4), may_alias));
  if (shifted) total = multiply_add(offset, splat(*(const number *)word), total);
  return multiply_add(__builtin_convertvector(sums, vf), scale, total);
}

/* Store the totals of a row times its unit, a power of two that float32 may not have; 1 for `limbs` 1. */
INLINE void store_totals(const vf *total, int limbs, double unit, float *y) {
  UNROLL for (int side = 0; side < SIDES; side++) store(y + LANES * side, total[side]);
  for (int o = 0; limbs > 1 && o < BLOCK; o++) y[o] = (float)(y[o] * unit);
}

typedef void Dots(const Matrix *, int64_t, const char *, Prefetch, float *);

#if VNNI
/* Multiply four unsigned bytes in every lane by the same four signed ones, and add the products to the lane of `sums`. */
INLINE __m512i add_quad(__m512i sums, __m512i weights, const char *limbs) {
  typedef int32_t quad __attribute__((aligned(4), may_alias));
#if defined(__clang__)
  return _mm512_dpbusd_epi32(sums, weights, _mm512_set1_epi32(*(const quad *)limbs));
#else
  __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(weights), "m"(*(const quad *)limbs));
  return sums;
#endif
}

/* y[r * BLOCK + o] for 16 outputs from `first` on and `rows` rows, at most BYTE_ROWS, a constant where this is called. */
INLINE void byte_dots(int rows, const Matrix *m, int64_t first, const char *x, Prefetch fetch, float *y) {
  const int64_t chunks = m->in / CHUNK_INPUTS, ahead = fetch.ahead * m->in, chunk_size = rows * LIMBS * CHUNK_INPUTS;
  const uint8_t *w = (const uint8_t *)m->weight + first * m->in;
  const Fixed *fixed = (const Fixed *)(x + chunks * chunk_size);
  __m512i total[BYTE_ROWS][LIMBS];
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int d = 0; d < LIMBS; d++) total[r][d] = _mm512_setzero_si512();
  for (int64_t c = 0; c < chunks; c++, w += 64 * QUADS, x += chunk_size)
    for (int t = 0; t < QUADS; t++) {
      const char *limbs = x + 4 * t * rows * LIMBS;
      if (fetch.ahead && (64 * t & fetch.mask) == fetch.place) PREFETCH(w + ahead + 64 * t);
      const __m512i line = _mm512_loadu_si512(w + 64 * t);
      UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int d = 0; d < LIMBS; d++) total[r][d] = add_quad(total[r][d], line, limbs + 4 * (r * LIMBS + d));
    }
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int half = 0; half < 2; half++) {
      __m512i whole = _mm512_set1_epi64(-128 * fixed[r].sum);
      UNROLL for (int d = 0; d < LIMBS; d++) {
        const __m256i part = half ? _mm512_extracti64x4_epi64(total[r][d], 1) : _mm512_castsi512_si256(total[r][d]);
        whole = _mm512_add_epi64(whole, _mm512_slli_epi64(_mm512_cvtepi32_epi64(part), 8 * (LIMBS - 1 - d)));
      }
      const __m512d scaled = _mm512_cvtepi64_pd(whole) * _mm512_set1_pd(fixed[r].unit);
      _mm256_storeu_ps(y + r * BLOCK + 8 * half, _mm512_cvtpd_ps(scaled));
    }
}

/* Of 16 outputs' numbers in a chunk the quads t and 8 + t, t < 8. w: the chunk. */
typedef struct {
  __m512i first, second;
} Pair;

INLINE Pair quads_of(int kind, const uint8_t *w, int t) {
  const __m512i line = _mm512_loadu_si512(w + 64 * t);
  if (kind == BYTES) return (Pair){line, _mm512_loadu_si512(w + 64 * (8 + t))};
  const __m512i low = _mm512_set1_epi8(15);
  const __m512i first = _mm512_and_si512(line, low), second = _mm512_and_si512(_mm512_srli_epi16(line, 4), low);
  if (kind == INT4) return (Pair){first, second};
  /* bits 2 k and 2 k + 1 of byte j are the upper two of input 16 k + j */
  const __m512i bits = _mm512_set1_epi8(0x30), upper = _mm512_loadu_si512(w + 512 + 64 * (t % 4));
  const __m512i above = t < 4 ? _mm512_slli_epi16(upper, 4) : _mm512_slli_epi16(upper, 2);
  const __m512i others = t < 4 ? upper : _mm512_srli_epi16(upper, 2);
  return (Pair){_mm512_or_si512(first, _mm512_and_si512(above, bits)), _mm512_or_si512(second, _mm512_and_si512(others, bits))};
}

/* The same for weights in groups and at most GROUPED_ROWS rows. kind, spans and shifted are constants, too: there is a copy for each
 * combination, with its sums in registers. shifted: whether there are offsets. */
INLINE void span_dots(int rows, int kind, int spans, int shifted, const Matrix *m, int64_t first, const char *x, Prefetch fetch, float *y) {
  typedef int32_t whole __attribute__((aligned(4), may_alias));
  const int64_t chunks = m->in / CHUNK_INPUTS, ahead = bytes_of(kind, fetch.ahead * m->in);
  const int lines = kind == INT4 ? 8 : kind == SIXES ? 12 : 16, chunk_size = rows * (QUADS * 8 + 4 * spans), shift = spans_shift(m);
  const uint8_t *w = (const uint8_t *)m->weight + bytes_of(kind, first * m->in);
  const Factors at = factors_at(m, first), later = factors_at(m, first + fetch.ahead);
  const Fixed *fixed = (const Fixed *)(x + chunks * chunk_size);
  BlockFactors block = {{{0}}, {{0}}};
  vf total[GROUPED_ROWS];
  UNROLL for (int r = 0; r < rows; r++) total[r] = (vf){0};
  for (int64_t c = 0; c < chunks; c++, w += 64 * lines, x += chunk_size) {
    const char *words = x + rows * QUADS * 8;
    if (m->blocks && c % (BLOCK_INPUTS / CHUNK_INPUTS) == 0) block = factors_of_block(m, at, c / (BLOCK_INPUTS / CHUNK_INPUTS));
    if (fetch.ahead && !fetch.place) {
      PREFETCH(later.scales + c * spans * (m->scales == FLOATS ? 64 : m->scales == HALVES ? 32 : 16));
      if (shifted) PREFETCH(later.offsets + c * spans * (m->blocks ? 16 : 64));
    }
    UNROLL for (int half = 0; half < spans / 2; half++) {
      const int other = half + spans / 2; /* a span of each of the chunk's halves, two limbs each */
      __m512i high[GROUPED_ROWS], low[GROUPED_ROWS], other_high[GROUPED_ROWS], other_low[GROUPED_ROWS];
      UNROLL for (int r = 0; r < rows; r++) {
        high[r] = other_high[r] = low[r] = other_low[r] = _mm512_setzero_si512();
        if (shifted) continue;
        low[r] = _mm512_set1_epi32(*(const whole *)(words + 4 * (half * rows + r)));
        other_low[r] = _mm512_set1_epi32(*(const whole *)(words + 4 * (other * rows + r)));
      }
      UNROLL for (int i = 0; i < 16 / spans; i++) {
        const int t = half * 4 + i;
        const char *limbs = x + t * rows * 8;
        if (fetch.ahead)
          UNROLL for (int line = t; line < lines; line += 8)
            if ((64 * line & fetch.mask) == fetch.place) PREFETCH(w + ahead + 64 * line);
        const Pair quads = quads_of(kind, w, t);
        UNROLL for (int r = 0; r < rows; r++) {
          high[r] = add_quad(high[r], quads.first, limbs + 8 * r);
          low[r] = add_quad(low[r], quads.first, limbs + 8 * r + 4);
          other_high[r] = add_quad(other_high[r], quads.second, limbs + 8 * (8 * rows + r));
          other_low[r] = add_quad(other_low[r], quads.second, limbs + 8 * (8 * rows + r) + 4);
        }
      }
      const int64_t group = (c * spans + half) >> shift, next = (c * spans + other) >> shift;
      const vf scale = scales_of(m, at, group, &block, 0), other_scale = scales_of(m, at, next, &block, 0);
      const vf offset = shifted ? offsets_of(m, at, group, &block, 0) : (vf){0};
      const vf other_offset = shifted ? offsets_of(m, at, next, &block, 0) : (vf){0};
      UNROLL for (int r = 0; r < rows; r++) {
        const __m512i sums = _mm512_add_epi32(_mm512_slli_epi32(high[r], 8), low[r]);
        const __m512i others = _mm512_add_epi32(_mm512_slli_epi32(other_high[r], 8), other_low[r]);
        total[r] = add_span(total[r], (vi)sums, scale, shifted, offset, words + 4 * (half * rows + r));
        total[r] = add_span(total[r], (vi)others, other_scale, shifted, other_offset, words + 4 * (other * rows + r));
      }
    }
  }
  UNROLL for (int r = 0; r < rows; r++) store_totals(total + r, GROUPED_LIMBS, fixed[r].unit, y + r * BLOCK);
}

#define BYTE_DOTS(ROWS_) \
  static void bytes_##ROWS_(const Matrix *m, int64_t first, const char *x, Prefetch fetch, float *y) { \
    byte_dots(ROWS_, m, first, x, fetch, y); \
  }
BYTE_DOTS(1) BYTE_DOTS(2) BYTE_DOTS(3) BYTE_DOTS(4) BYTE_DOTS(5) BYTE_DOTS(6) BYTE_DOTS(7) BYTE_DOTS(8)
#define SPAN_DOTS(NAME, ROWS_, KIND, SPANS, SHIFTED) \
  static void NAME##_##ROWS_(const Matrix *m, int64_t first, const char *x, Prefetch fetch, float *y) { \
    span_dots(ROWS_, KIND, SPANS, SHIFTED, m, first, x, fetch, y); \
  }
#define SPAN_DOTS_OF(NAME, KIND, SPANS, SHIFTED) \
  SPAN_DOTS(NAME, 1, KIND, SPANS, SHIFTED) SPAN_DOTS(NAME, 2, KIND, SPANS, SHIFTED) SPAN_DOTS(NAME, 3, KIND, SPANS, SHIFTED) \
  SPAN_DOTS(NAME, 4, KIND, SPANS, SHIFTED) SPAN_DOTS(NAME, 5, KIND, SPANS, SHIFTED)
#define SPAN_DOTS_FOR(NAME, KIND) \
  SPAN_DOTS_OF(NAME##_2, KIND, 2, 0) SPAN_DOTS_OF(NAME##_2_shifted, KIND, 2, 1) \
  SPAN_DOTS_OF(NAME##_4, KIND, 4, 0) SPAN_DOTS_OF(NAME##_4_shifted, KIND, 4, 1)
SPAN_DOTS_FOR(nibbles, INT4)
SPAN_DOTS_FOR(numbers, BYTES)
SPAN_DOTS_FOR(sixes, SIXES)
#define BY_ROWS(NAME) {NAME##_1, NAME##_2, NAME##_3, NAME##_4, NAME##_5}
#define BY_SPANS(NAME) {{BY_ROWS(NAME##_2), BY_ROWS(NAME##_2_shifted)}, {BY_ROWS(NAME##_4), BY_ROWS(NAME##_4_shifted)}}

static void vector_byte_dots(const Matrix *m, int64_t first, const char *x, int64_t rows, Prefetch fetch, float *y) {
  static Dots *const dots[BYTE_ROWS] = {bytes_1, bytes_2, bytes_3, bytes_4, bytes_5, bytes_6, bytes_7, bytes_8};
  dots[rows - 1](m, first, x, fetch, y);
}

static void vector_dots(const Matrix *m, int64_t first, const char *x, int64_t rows, Prefetch fetch, float *y) {
  static Dots *const dots[3][2][2][GROUPED_ROWS] = {BY_SPANS(nibbles), BY_SPANS(numbers), BY_SPANS(sixes)};
  dots[m->kind - INT4][m->group == 16][m->offsets != NULL][rows - 1](m, first, x, fetch, y);
}
#endif
#endif
