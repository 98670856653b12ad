/* Interleaved weights in groups times rows of 16 bits, where the processor multiplies 16-bit integers in pairs (AVX2), and not 64
 * bytes at once (AVX-512 VNNI).
 *
 * Bytes are multiplied in pairs as well, but their sums could exceed 16 bits. So a row's q are kept whole, [run of four inputs, row, 4], and
 * the first and third of four weights are multiplied by theirs, then the second and fourth: as 16-bit integers these are a mask and a shift
 * away. Sums, and the order in which they are added up, are those of interleaved.h.
 */
#ifndef SELFSPEC_PAIRS_H
#define SELFSPEC_PAIRS_H
#include "interleaved.h"

#if PAIRS
#if SHORT_VNNI
/* Where it is emulated, the processor has these instructions in the form of AVX-512 only, which is the assembler's default. */
#if defined(EMULATED_AVXVNNI)
#define VNNI_FORM ""
#else
#define VNNI_FORM "%{vex%} "
#endif
#define ADD_PRODUCTS(NAME, sums, weights, row) __asm__(VNNI_FORM NAME " %2, %1, %0" : "+x"(sums) : "x"(weights), "x"(row))
#endif

/* Of quad t, t < 4, in quarter `quarter` of a chunk the first and third weights, or the second and fourth if `odd`, of 8 outputs, as 16-bit
 * integers. w: their half of the chunk's first line. quarter, odd: constants where this is called. */
INLINE __m256i two_of_quad(int kind, const uint8_t *w, int quarter, int t, int odd) {
  const int down = 8 * odd;
  if (kind == BYTES) {
    const __m256i line = _mm256_loadu_si256((const void *)(w + 64 * (4 * quarter + t)));
    return odd ? _mm256_srli_epi16(line, 8) : _mm256_and_si256(line, _mm256_set1_epi16(255));
  }
  const __m256i line = _mm256_loadu_si256((const void *)(w + 64 * (4 * (quarter % 2) + t)));
  const int by = down + (quarter < 2 ? 0 : 4);
  const __m256i moved = by ? _mm256_srli_epi16(line, by) : line;
  const __m256i low = by == 12 ? moved : _mm256_and_si256(moved, _mm256_set1_epi16(15));
  if (kind == INT4) return low;
  /* bits 2 k and 2 k + 1 of byte j are the upper two of input 16 k + j */
  const __m256i upper = _mm256_loadu_si256((const void *)(w + 512 + 64 * t));
  const int right = down + 2 * quarter - 4;
  const __m256i placed = right > 0 ? _mm256_srli_epi16(upper, right) : _mm256_slli_epi16(upper, -right);
  return _mm256_or_si256(low, _mm256_and_si256(placed, _mm256_set1_epi16(0x30)));
}

/* The sums of LANES of 16 outputs. */
INLINE vi sums_of_side(const __m256i *sums, int side) {
#if LANES == 16
  return (vi)_mm512_inserti64x4(_mm512_castsi256_si512(sums[side]), sums[1], 1);
#else
  return (vi)sums[side];
#endif
}

/* Add the products of quad t in a quarter to the sums of 16 outputs. x: the chunk's rows. */
INLINE void add_quad_of_pairs(int rows, int kind, const uint8_t *w, const char *x, int quarter, int t, __m256i sums[][2]) {
  typedef int32_t whole __attribute__((aligned(4), may_alias));
  UNROLL for (int odd = 0; odd < 2; odd++) {
    __m256i weights[2];
    UNROLL for (int e = 0; e < 2; e++) weights[e] = two_of_quad(kind, w + 32 * e, quarter, t, odd);
    UNROLL for (int r = 0; r < rows; r++) {
      const __m256i numbers = _mm256_set1_epi32(*(const whole *)(x + ((4 * quarter + t) * rows + r) * 8 + 4 * odd));
      UNROLL for (int e = 0; e < 2; e++) {
#if SHORT_VNNI
        ADD_PRODUCTS("vpdpwssd", sums[r][e], weights[e], numbers);
#else
        sums[r][e] = _mm256_add_epi32(sums[r][e], _mm256_madd_epi16(weights[e], numbers));
        __asm__("" : "+x"(sums[r][e])); /* else GCC adds products up first, for which there are no registers */
#endif
      }
    }
  }
}

/* y[r * BLOCK + o] for 16 outputs from `first` on. rows, kind, spans and shifted are constants where this is called. */
INLINE void pair_dots(int rows, int kind, int spans, int shifted, const Matrix *m, int64_t first, const char *x, Prefetch fetch, float *y) {
  typedef int32_t whole __attribute__((aligned(4), may_alias));
  const int64_t chunks = m->in / CHUNK_INPUTS, ahead = bytes_of(kind, fetch.ahead * m->in);
  const int lines = kind == INT4 ? 8 : kind == SIXES ? 12 : 16, chunk_size = rows * (QUADS * 8 + 4 * spans), shift = spans_shift(m);
  const uint8_t *w = (const uint8_t *)m->weight + bytes_of(kind, first * m->in);
  const Factors at = factors_at(m, first);
  const Fixed *fixed = (const Fixed *)(x + chunks * chunk_size);
  BlockFactors block = {{{0}}, {{0}}};
  vf total[GROUPED_ROWS][SIDES];
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int side = 0; side < SIDES; side++) total[r][side] = (vf){0};
  for (int64_t c = 0; c < chunks; c++, w += 64 * lines, x += chunk_size) {
    const char *words = x + rows * QUADS * 8;
    if (m->blocks && c % (BLOCK_INPUTS / CHUNK_INPUTS) == 0) block = factors_of_block(m, at, c / (BLOCK_INPUTS / CHUNK_INPUTS));
    if (fetch.ahead)
      for (int line = 0; line < lines; line++)
        if ((64 * line & fetch.mask) == fetch.place) PREFETCH(w + ahead + 64 * line);
    UNROLL for (int turn = 0; turn < spans; turn++) {
      const int span = spans == 2 ? turn : turn % 2 * 2 + turn / 2;
      __m256i sums[GROUPED_ROWS][2];
      UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int e = 0; e < 2; e++) sums[r][e] = _mm256_set1_epi32(shifted ? 0 : *(const whole *)(words + 4 * (span * rows + r)));
      UNROLL for (int quarter = 4 * span / spans; quarter < 4 * (span + 1) / spans; quarter++) {
        if (rows == 1 && kind != SIXES) /* a loop around so little work costs a tenth of the time */
          UNROLL for (int t = 0; t < 4; t++) add_quad_of_pairs(rows, kind, w, x, quarter, t, sums);
        else
          ROLLED for (int t = 0; t < 4; t++) add_quad_of_pairs(rows, kind, w, x, quarter, t, sums);
      }
      const int64_t group = (c * spans + span) >> shift;
      UNROLL for (int side = 0; side < SIDES; side++) {
        const vf scale = scales_of(m, at, group, &block, side), offset = shifted ? offsets_of(m, at, group, &block, side) : (vf){0};
        UNROLL for (int r = 0; r < rows; r++) {
          const char *word = words + 4 * (span * rows + r);
          total[r][side] = add_span(total[r][side], sums_of_side(sums[r], side), scale, shifted, offset, word);
        }
      }
    }
  }
  UNROLL for (int r = 0; r < rows; r++) store_totals(total[r], GROUPED_LIMBS, fixed[r].unit, y + r * BLOCK);
}

#define PAIR_DOTS(NAME, ROWS_, KIND, SPANS, SHIFTED) \
  static void NAME##_##ROWS_(const Matrix *m, int64_t first, const char *x, Prefetch fetch, float *y) { \
    pair_dots(ROWS_, KIND, SPANS, SHIFTED, m, first, x, fetch, y); \
  }
#define PAIR_DOTS_OF(NAME, KIND, SPANS, SHIFTED) \
  PAIR_DOTS(NAME, 1, KIND, SPANS, SHIFTED) PAIR_DOTS(NAME, 2, KIND, SPANS, SHIFTED) PAIR_DOTS(NAME, 3, KIND, SPANS, SHIFTED) \
  PAIR_DOTS(NAME, 4, KIND, SPANS, SHIFTED) PAIR_DOTS(NAME, 5, KIND, SPANS, SHIFTED) PAIR_DOTS(NAME, 6, KIND, SPANS, SHIFTED)
#define PAIR_DOTS_FOR(NAME, KIND) \
  PAIR_DOTS_OF(NAME##_2, KIND, 2, 0) PAIR_DOTS_OF(NAME##_2_shifted, KIND, 2, 1) \
  PAIR_DOTS_OF(NAME##_4, KIND, 4, 0) PAIR_DOTS_OF(NAME##_4_shifted, KIND, 4, 1)
PAIR_DOTS_FOR(nibbles, INT4)
PAIR_DOTS_FOR(numbers, BYTES)
PAIR_DOTS_FOR(sixes, SIXES)
#define BY_ROWS(NAME) {NAME##_1, NAME##_2, NAME##_3, NAME##_4, NAME##_5, NAME##_6}
#define BY_SPANS(NAME) {{BY_ROWS(NAME##_2), BY_ROWS(NAME##_2_shifted)}, {BY_ROWS(NAME##_4), BY_ROWS(NAME##_4_shifted)}}

static void vector_dots(const Matrix *m, int64_t first, const char *x, int64_t rows, Prefetch fetch, float *y) {
  static Dots *const dots[3][2][2][GROUPED_ROWS] = {BY_SPANS(nibbles), BY_SPANS(numbers), BY_SPANS(sixes)};
  dots[m->kind - INT4][m->group == 16][m->offsets != NULL][rows - 1](m, first, x, fetch, y);
}
#endif
#endif
