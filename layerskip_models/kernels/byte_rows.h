/* Weights in groups, interleaved, times rows of 8 bits (`to_bytes`): half the products of rows with two limbs. Where there is neither
 * AVX2 nor VNNI, times rows of two limbs as well.
 *
 * A span's products are added up as integers. The sum times the scale of the weights, as a float, is then multiplied by the factor of
 * the row's 32 inputs and added to the total, so spans are added in the order of interleaved.h. All variants have one order and one
 * loop; only the instructions that multiply four bytes differ.
 */
#ifndef SELFSPEC_BYTE_ROWS_H
#define SELFSPEC_BYTE_ROWS_H
#include "pairs.h"

#define PLAIN (!VNNI && !PAIRS)

typedef uint16_t Halves __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves_memory __attribute__((vector_size(4 * LANES), aligned(1), may_alias));

/* Four numbers of LANES outputs each, as unsigned bytes. w: the chunk, from the first of these outputs on. */
INLINE Halves numbers_of_quad(int kind, const uint8_t *w, int quad) {
  if (kind == BYTES) return *(const Halves_memory *)(w + 64 * quad);
  const Halves line = *(const Halves_memory *)(w + 64 * (quad % 8));
  const Halves low = (quad < 8 ? line : line >> 4) & 0x0f0f;
  if (kind == INT4) return low;
  const Halves upper = *(const Halves_memory *)(w + 512 + 64 * (quad % 4));
  const int right = 2 * (quad / 4) - 4;
  return low | ((right > 0 ? upper >> right : upper << -right) & 0x3030);
}

typedef int32_t Quad __attribute__((aligned(1), may_alias));
#if PAIRS && !SHORT_VNNI
#define RUN(KIND) (KIND == INT4 ? 8 : 2) /* quads whose sums fit `Sums`: 8 * 2 * 15 * 127 and 2 * 2 * 63 * 127 fit 16 bits */
typedef int16_t Sums __attribute__((vector_size(4 * LANES)));
#else
#define RUN(KIND) 8
typedef vi Sums;
INLINE vi widened_sums(Sums sums) { return sums; }
#endif

/* Add four products to each of LANES sums. */
#if VNNI
INLINE Sums add_products(int kind, Sums sums, Halves weights, const char *row) {
  (void)kind;
  return (vi)add_quad((__m512i)sums, (__m512i)weights, row);
}
#elif SHORT_VNNI
INLINE Sums add_products(int kind, Sums sums, Halves weights, const char *row) {
  (void)kind;
  ADD_PRODUCTS("vpdpbusd", sums, weights, *(const Quad *)row + (vi){0});
  return sums;
}
#elif PAIRS && LANES == 16
INLINE Sums add_products(int kind, Sums sums, Halves weights, const char *row) {
  (void)kind;
  sums += (Sums)_mm512_maddubs_epi16((__m512i)weights, _mm512_set1_epi32(*(const Quad *)row));
  __asm__("" : "+v"(sums)); /* else GCC adds products up first, for which there are no registers */
  return sums;
}
INLINE vi widened_sums(Sums sums) { return (vi)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1)); }
#elif PAIRS
INLINE Sums add_products(int kind, Sums sums, Halves weights, const char *row) {
  (void)kind;
  sums += (Sums)_mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(*(const Quad *)row));
  __asm__("" : "+x"(sums)); /* as above */
  return sums;
}
INLINE vi widened_sums(Sums sums) { return (vi)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)); }
#elif defined(__ARM_NEON) && defined(__aarch64__)
INLINE int32x4_t add_signed(int32x4_t sums, int8x16_t weights, int8x16_t row) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sums, weights, row);
#else
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(weights), vget_low_s8(row)));
  return vaddq_s32(sums, vpaddq_s32(low, vpaddlq_s16(vmull_high_s8(weights, row))));
#endif
}
INLINE Sums add_products(int kind, Sums sums, Halves weights, const char *row) {
  const int8x16_t numbers = vreinterpretq_s8_s32(vdupq_n_s32(*(const Quad *)row));
  int32x4_t all = (int32x4_t)sums;
  if (kind == BYTES) { /* these may exceed a signed byte: minus 128, and twice 64 more */
    weights ^= 0x8080;
    all = add_signed(add_signed(all, vdupq_n_s8(64), numbers), vdupq_n_s8(64), numbers);
  }
  return (vi)add_signed(all, (int8x16_t)weights, numbers);
}
#elif defined(__SSE2__)
INLINE Sums add_products(int kind, Sums sums, Halves weights, const char *row) {
  (void)kind;
  const __m128i numbers = _mm_set1_epi32(*(const Quad *)row);
  const __m128i even = _mm_madd_epi16((__m128i)(weights & 0xff), _mm_srai_epi16(_mm_slli_epi16(numbers, 8), 8));
  return sums + (vi)even + (vi)_mm_madd_epi16((__m128i)(weights >> 8), _mm_srai_epi16(numbers, 8));
}
#else
INLINE Sums add_products(int kind, Sums sums, Halves weights, const char *row) {
  (void)kind;
  const int32_t numbers = *(const Quad *)row;
  for (int i = 0; i < 32; i += 8) sums += ((vi)weights >> i & 255) * (int32_t)(int8_t)(numbers >> i);
  return sums;
}
#endif

/* Add a span's sums to the totals of a row: times the scales and the row's unit, and where there are offsets these times `word`. */
INLINE vf add_byte_span(vf total, vi sums, vf scale, int shifted, vf offset, const char *word, float unit) {
  typedef float number __attribute__((aligned(4), may_alias));
  if (shifted) total = multiply_add(offset, splat(*(const number *)word), total);
  return multiply_add(__builtin_convertvector(sums, vf) * scale, splat(unit), total);
}

/* y[r * BLOCK + o] for 16 outputs from `first` on. limbs, rows, kind, spans and shifted are constants where this is called. */
INLINE void row_dots(int limbs, int rows, int kind, int spans, int shifted, const Matrix *m, int64_t first, const char *x,
                     Prefetch fetch, float *y) {
  typedef int32_t whole __attribute__((aligned(4), may_alias));
  typedef float number __attribute__((aligned(4), may_alias));
  const int64_t chunks = m->in / CHUNK_INPUTS, ahead = bytes_of(kind, fetch.ahead * m->in);
  const int lines = kind == INT4 ? 8 : kind == SIXES ? 12 : 16, shift = spans_shift(m);
  const int words_at = rows * limbs * CHUNK_INPUTS, chunk_size = words_at + rows * 4 * (spans + (limbs == 1 ? 2 : 0));
  const int fits = (MANY_REGISTERS ? 16 : 8) / (rows * limbs), most = fits >= 4 ? 4 : fits >= 2 ? 2 : 1;
  const int together = SIDES < most ? SIDES : most; /* sides at once */
  const uint8_t *w = (const uint8_t *)m->weight + bytes_of(kind, first * m->in);
  const Factors at = factors_at(m, first), later = factors_at(m, first + fetch.ahead);
  BlockFactors block = {{{0}}, {{0}}};
  const Fixed *fixed = (const Fixed *)(x + chunks * chunk_size);
  vf total[BYTE_ROWS][SIDES];
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int side = 0; side < SIDES; side++) total[r][side] = (vf){0};
  for (int64_t c = 0; c < chunks; c++, w += 64 * lines, x += chunk_size) {
    const char *words = x + words_at, *units = words + rows * 4 * spans;
    if (m->blocks && c % (BLOCK_INPUTS / CHUNK_INPUTS) == 0) block = factors_of_block(m, at, c / (BLOCK_INPUTS / CHUNK_INPUTS));
    if (fetch.ahead) {
      if (fetch.mask < 64)
        UNROLL16 for (int line = 0; line < lines; line++) PREFETCH(w + ahead + 64 * line);
      else
        ROLLED for (int line = 0; line < lines; line++)
          if ((64 * line & fetch.mask) == fetch.place) PREFETCH(w + ahead + 64 * line);
      if (!fetch.place) {
        PREFETCH(later.scales + c * spans * (m->scales == FLOATS ? 64 : m->scales == HALVES ? 32 : 16));
        if (shifted) PREFETCH(later.offsets + c * spans * (m->blocks ? 16 : 64));
      }
    }
    UNROLL for (int turn = 0; turn < spans; turn++) {
      const int span = spans == 2 ? turn : turn % 2 * 2 + turn / 2, quads = QUADS / spans, run = RUN(kind) < quads ? RUN(kind) : quads;
      const int64_t group = (c * spans + span) >> shift;
      for (int side = 0; side < SIDES; side += together) {
        vi sums[BYTE_ROWS][SIDES];
        const char *row = x;
        const uint8_t *own = w + 4 * LANES * side;
        if (!VNNI) __asm__("" : "+r"(row), "+r"(own)); /* else GCC stores what it reads through them for other sides and spans */
        UNROLL for (int r = 0; r < rows; r++)
          UNROLL for (int e = 0; e < together; e++)
            sums[r][e] = (shifted ? 0 : *(const whole *)(words + 4 * (span * rows + r))) + (vi){0};
        UNROLL for (int begin = 0; begin < quads; begin += run) {
          Sums part[BYTE_ROWS][SIDES][2];
          UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int e = 0; e < together; e++) part[r][e][0] = part[r][e][1] = (Sums){0};
          UNROLL for (int t = begin; t < begin + run; t++) {
            Halves weights[SIDES];
            const int quad = span * quads + t;
            UNROLL for (int e = 0; e < together; e++) weights[e] = numbers_of_quad(kind, own + 4 * LANES * e, quad);
            UNROLL for (int r = 0; r < rows; r++)
              UNROLL for (int limb = 0; limb < limbs; limb++)
                UNROLL for (int e = 0; e < together; e++)
                  part[r][e][limb] = add_products(kind, part[r][e][limb], weights[e], row + ((quad * rows + r) * limbs + limb) * 4);
          }
          UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int e = 0; e < together; e++) {
              if (limbs == 2) sums[r][e] += (widened_sums(part[r][e][0]) << 8) + widened_sums(part[r][e][1]);
              else sums[r][e] += widened_sums(part[r][e][0]);
            }
        }
        UNROLL for (int e = 0; e < together; e++) {
          const vf scale = scales_of(m, at, group, &block, side + e);
          const vf offset = shifted ? offsets_of(m, at, group, &block, side + e) : (vf){0};
          UNROLL for (int r = 0; r < rows; r++) {
            vf *sum = &total[r][side + e];
            const char *word = words + 4 * (span * rows + r);
            if (limbs == 1) {
              const float unit = *(const number *)(units + 4 * (span * 2 / spans * rows + r));
              *sum = add_byte_span(*sum, sums[r][e], scale, shifted, offset, word, unit);
            } else {
              *sum = add_span(*sum, sums[r][e], scale, shifted, offset, word);
            }
          }
        }
      }
    }
  }
  for (int r = 0; r < rows; r++) store_totals(total[r], limbs, limbs == 1 ? 1 : fixed[r].unit, y + r * BLOCK);
}

#define ROW_DOTS(NAME, ROWS_, LIMBS_, KIND, SPANS, SHIFTED) \
  static void NAME##_##ROWS_(const Matrix *m, int64_t first, const char *x, Prefetch fetch, float *y) { \
    row_dots(LIMBS_, ROWS_, KIND, SPANS, SHIFTED, m, first, x, fetch, y); \
  }
#define BYTE_ROW_DOTS_OF(NAME, KIND, SPANS, SHIFTED) \
  ROW_DOTS(NAME, 1, 1, KIND, SPANS, SHIFTED) ROW_DOTS(NAME, 2, 1, KIND, SPANS, SHIFTED) ROW_DOTS(NAME, 3, 1, KIND, SPANS, SHIFTED) \
  ROW_DOTS(NAME, 4, 1, KIND, SPANS, SHIFTED) ROW_DOTS(NAME, 5, 1, KIND, SPANS, SHIFTED) ROW_DOTS(NAME, 6, 1, KIND, SPANS, SHIFTED) \
  ROW_DOTS(NAME, 7, 1, KIND, SPANS, SHIFTED) ROW_DOTS(NAME, 8, 1, KIND, SPANS, SHIFTED) \
  static Dots *const NAME[] = {NAME##_1, NAME##_2, NAME##_3, NAME##_4, NAME##_5, NAME##_6, NAME##_7, NAME##_8};
BYTE_ROW_DOTS_OF(byte_rows_4, INT4, 2, 0)
BYTE_ROW_DOTS_OF(byte_rows_4_shifted, INT4, 2, 1)
BYTE_ROW_DOTS_OF(byte_rows_6, SIXES, 2, 0)
BYTE_ROW_DOTS_OF(byte_rows_6_shifted, SIXES, 2, 1)
BYTE_ROW_DOTS_OF(byte_rows_6_short, SIXES, 4, 0)
BYTE_ROW_DOTS_OF(byte_rows_6_short_shifted, SIXES, 4, 1)

static void byte_rows(const Matrix *m, int64_t first, const char *x, int64_t rows, Prefetch fetch, float *y) {
  static Dots *const *const dots[3][2] = {{byte_rows_4, byte_rows_4_shifted}, {byte_rows_6, byte_rows_6_shifted},
                                          {byte_rows_6_short, byte_rows_6_short_shifted}};
  dots[m->kind == INT4 ? 0 : m->group == 16 ? 2 : 1][m->offsets != NULL][rows - 1](m, first, x, fetch, y);
}

#if PLAIN
#define LIMB_ROW_DOTS_OF(NAME, KIND, SPANS, SHIFTED) \
  ROW_DOTS(NAME, 1, 2, KIND, SPANS, SHIFTED) ROW_DOTS(NAME, 2, 2, KIND, SPANS, SHIFTED) ROW_DOTS(NAME, 3, 2, KIND, SPANS, SHIFTED) \
  ROW_DOTS(NAME, 4, 2, KIND, SPANS, SHIFTED) \
  static Dots *const NAME[] = {NAME##_1, NAME##_2, NAME##_3, NAME##_4};
LIMB_ROW_DOTS_OF(limb_rows_4, INT4, 2, 0)
LIMB_ROW_DOTS_OF(limb_rows_4_shifted, INT4, 2, 1)
LIMB_ROW_DOTS_OF(limb_rows_8, BYTES, 2, 0)
LIMB_ROW_DOTS_OF(limb_rows_8_shifted, BYTES, 2, 1)
LIMB_ROW_DOTS_OF(limb_rows_8_short, BYTES, 4, 0)
LIMB_ROW_DOTS_OF(limb_rows_8_short_shifted, BYTES, 4, 1)
LIMB_ROW_DOTS_OF(limb_rows_6, SIXES, 2, 0)
LIMB_ROW_DOTS_OF(limb_rows_6_shifted, SIXES, 2, 1)
LIMB_ROW_DOTS_OF(limb_rows_6_short, SIXES, 4, 0)
LIMB_ROW_DOTS_OF(limb_rows_6_short_shifted, SIXES, 4, 1)

static void vector_dots(const Matrix *m, int64_t first, const char *x, int64_t rows, Prefetch fetch, float *y) {
  static Dots *const *const dots[3][2][2] = {
      {{limb_rows_4, limb_rows_4_shifted}, {0}},
      {{limb_rows_8, limb_rows_8_shifted}, {limb_rows_8_short, limb_rows_8_short_shifted}},
      {{limb_rows_6, limb_rows_6_shifted}, {limb_rows_6_short, limb_rows_6_short_shifted}}};
  dots[m->kind - INT4][m->group == 16][m->offsets != NULL][rows - 1](m, first, x, fetch, y);
}
#endif
#endif
