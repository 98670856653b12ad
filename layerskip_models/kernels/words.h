/* Weights in groups and rows as 16-bit integers, in two cases: many rows, for which weights are expanded first; and groups whose
 * scales are integers, too. Such weights are multiplied by their scales, and their products added up as integers over a whole block
 * of inputs or half of one. A lane adds up the same four inputs of 64 as with digits, in two instructions.
 */
#ifndef SELFSPEC_WORDS_H
#define SELFSPEC_WORDS_H
#include "groups.h"

#define EXPAND_ROWS 16 /* rows from which on it pays to expand weights first */

/* Whether this many rows are multiplied by expanded weights. */
INLINE int expands(const Matrix *m, int64_t rows) { return is_grouped(m) && as_integers(m) && rows >= EXPAND_ROWS; }

/* Whether rows are multiplied as 16-bit integers instead of digits. */
INLINE int as_words(const Matrix *m, int64_t rows) { return expands(m, rows) || m->blocks; }

/* Floats of memory for `count` outputs' expanded weights: 16-bit integers [count, in], then their scales, float32,
 * [count, in / group] or with integer scales [count, in / BLOCK_INPUTS], and if there are offsets these, float32, one for each of a
 * row's sums. */
INLINE int64_t expanded_scales(const Matrix *m) { return m->blocks ? m->in / BLOCK_INPUTS : m->in / m->group; }
INLINE int64_t expanded_size(const Matrix *m, int64_t count) {
  return count * (m->in / 2 + expanded_scales(m) + (m->offsets ? m->in / CHUNK_INPUTS * sums_of_chunk(m) : 0));
}

#if VNNI
/* Inputs whose products are added up as integers where scales are integers: a block, or half of one where numbers times scales may
 * be twice as large: `_sums_fit` in native_grouped.py sees to it that they are at most 2^12 or 2^13. */
INLINE int64_t span_of(const Matrix *m) { return m->offsets && m->group == 16 ? BLOCK_INPUTS / 2 : BLOCK_INPUTS; }

/* The factor of an output's scales in a block, in every lane. */
INLINE __m512 block_scale(const Matrix *m, int64_t output, int64_t block) {
  const int64_t at = (output * (m->in / BLOCK_INPUTS) + block) * (m->offsets ? 2 : 1);
  return _mm512_cvtph_ps(_mm256_set1_epi16((short)m->blocks[at]));
}

/* Of every four bytes the first two, and the other two, as 16-bit integers. */
INLINE __m512i first_two(__m512i bytes) {
  return _mm512_shuffle_epi8(bytes, _mm512_set4_epi32((int)0x800d800c, (int)0x80098008, (int)0x80058004, (int)0x80018000));
}
INLINE __m512i last_two(__m512i bytes) {
  return _mm512_shuffle_epi8(bytes, _mm512_set4_epi32((int)0x800f800e, (int)0x800b800a, (int)0x80078006, (int)0x80038002));
}

/* Expand one output. to: [in / 64, 2, 32], in the order of `first_two` and `last_two`. */
static void expand_output(const Matrix *m, int64_t output, int16_t *to, float *scales, float *offsets) {
  const int64_t chunks = m->in / CHUNK_INPUTS, num_groups = m->in / m->group, width = bytes_of(m->kind, CHUNK_INPUTS);
  const uint8_t *w = (const uint8_t *)m->weight + output * chunks * width;
  const int level = level_of(m);
  const int64_t period = (SCALES / 4) << level, num_sums = chunks * sums_of_chunk(m), each = num_sums / num_groups;
  const __m512i zero = _mm512_set1_epi16(m->offsets ? 0 : (short)m->zero);
  for (int64_t start = 0; start < chunks; start += period) {
    const int64_t end = min(chunks, start + period), from = start * 4 >> level;
    const __mmask16 there = (1u << min(SCALES, num_groups - from)) - 1;
    __m512i factors = _mm512_setzero_si512();
    if (!m->blocks) _mm512_mask_storeu_ps(scales + from, there, group_scales(m, output, from, there));
    if (m->offsets) {
      const __m512 own = group_offsets(m, output, from, there);
      for (int64_t part = 0; part < each && from * each + 16 * part < num_sums; part++) {
        const __mmask16 here = (1u << min(16, num_sums - from * each - 16 * part)) - 1;
        _mm512_mask_storeu_ps(offsets + from * each + 16 * part, here, offsets_of_part(own, part, each));
      }
    }
    if (m->blocks) factors = scale_words(m, output, from, there);
    for (int64_t c = start; c < end; c++, to += CHUNK_INPUTS) {
      const uint8_t *p = w + c * width;
      const __m512i bytes = m->kind == INT4 ? weights_4(p) : m->kind == SIXES ? weights_6(p) : weights_of_bytes(p);
      __m512i first = _mm512_sub_epi16(first_two(bytes), zero), last = _mm512_sub_epi16(last_two(bytes), zero);
      if (m->blocks) {
        const __m512i factor = _mm512_permutexvar_epi32(groups_of_lanes(c - start, level), factors);
        first = _mm512_mullo_epi16(first, factor);
        last = _mm512_mullo_epi16(last, factor);
      }
      _mm512_storeu_si512(to, first);
      _mm512_storeu_si512(to + CHUNK_INPUTS / 2, last);
      FETCH(p + AHEAD);
    }
  }
  for (int64_t b = 0; m->blocks && b < m->in / BLOCK_INPUTS; b++) scales[b] = _mm512_cvtss_f32(block_scale(m, output, b));
}

/* A copy of a matrix in groups with expanded weights, in `scratch`. */
static Matrix expanded(const Matrix *m, float *scratch) {
  Matrix wide = *m;
  const int64_t num_scales = expanded_scales(m), num_sums = m->in / CHUNK_INPUTS * sums_of_chunk(m);
  float *scales = scratch + m->out * m->in / 2, *offsets = m->offsets ? scales + m->out * num_scales : NULL;
  for (int64_t o = 0; o < m->out; o++)
    expand_output(m, o, (int16_t *)scratch + o * m->in, scales + o * num_scales, offsets ? offsets + o * num_sums : NULL);
  wide.kind = EXPANDED;
  wide.weight = scratch;
  wide.groups = scales;
  wide.offsets = offsets;
  wide.scales = FLOATS;
  return wide;
}

/* Multiply 32 by 32 16-bit integers and add each two products to a lane of `sums`; for each compiler like `add_products`. */
INLINE __m512i add_word_products(__m512i sums, __m512i words, __m512i others) {
#if defined(__clang__)
  return _mm512_dpwssd_epi32(sums, words, others);
#else
  __asm__("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(words), "vm"(others));
  return sums;
#endif
}

/* DOTS_IN_GROUPS for expanded weights whose scales are floats. */
#define EXPANDED_DOTS(R, NAME, OFFSETS) \
  static void NAME##_##R(const Matrix *m, int64_t first, int64_t stride, const char *x, Fetch fetch, float *y) { \
    (void)fetch; \
    vf total[4][R]; \
    const int64_t chunks = m->in / CHUNK_INPUTS, num_groups = m->in / m->group, each = stride ? 1 : 0; \
    const int64_t parts = sums_of_chunk(m), num_sums = chunks * parts; \
    const int16_t *w = (const int16_t *)m->weight + first * m->in; \
    const float *own_scales = (const float *)m->groups + first * num_groups; \
    const float *own_offsets = (const float *)m->offsets + (OFFSETS ? first * num_sums : 0); \
    const int level = level_of(m); \
    const int64_t period = (SCALES / 4) << level; \
    const Fixed *fixed = (const Fixed *)(x + R * chunks * (GROUPED_DIGITS + 1) * CHUNK_INPUTS); \
    const float *row_sums = (const float *)(fixed + R); \
    UNROLL for (int o = 0; o < 4; o++) UNROLL for (int r = 0; r < R; r++) total[o][r] = (vf){0}; \
    for (int64_t start = 0; start < chunks; start += period) { \
      const int64_t end = min(chunks, start + period), from = start * 4 >> level, last = min(num_sums, end * parts); \
      const __mmask16 there = (1u << min(SCALES, num_groups - from)) - 1; \
      __m512 scales[4]; \
      UNROLL for (int o = 0; o < 4; o++) scales[o] = _mm512_maskz_loadu_ps(there, own_scales + each * o * num_groups + from); \
      for (int64_t i = start * parts; OFFSETS && i < last; i += 16) { \
        const __mmask16 here = (1u << min(16, last - i)) - 1; \
        __m512 offsets[4]; \
        UNROLL for (int o = 0; o < 4; o++) offsets[o] = _mm512_maskz_loadu_ps(here, own_offsets + each * o * num_sums + i); \
        UNROLL for (int r = 0; r < R; r++) { \
          const __m512 sums = _mm512_maskz_loadu_ps(here, row_sums + r * num_sums + i); \
          UNROLL for (int o = 0; o < 4; o++) total[o][r] = (vf)_mm512_fmadd_ps(offsets[o], sums, (__m512)total[o][r]); \
        } \
      } \
      for (int64_t c = start; c < end; c++, w += CHUNK_INPUTS, x += R * (GROUPED_DIGITS + 1) * CHUNK_INPUTS) { \
        const __m512i place = groups_of_lanes(c - start, level); \
        UNROLL for (int o = 0; o < 4; o++) { \
          const __m512i words = _mm512_loadu_si512(w + o * each * m->in), more = _mm512_loadu_si512(w + o * each * m->in + 32); \
          const __m512 scale = _mm512_permutexvar_ps(place, scales[o]); \
          UNROLL for (int r = 0; r < R; r++) { \
            const char *row = x + r * (GROUPED_DIGITS + 1) * CHUNK_INPUTS; \
            __m512i sums = add_word_products(_mm512_setzero_si512(), words, _mm512_loadu_si512(row)); \
            sums = add_word_products(sums, more, _mm512_loadu_si512(row + CHUNK_INPUTS)); \
            total[o][r] = (vf)_mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), scale, (__m512)total[o][r]); \
          } \
        } \
      } \
    } \
    STORE_TOTALS(R) \
  }
#define EXPANDED_DOTS_OF(NAME, OFFSETS) \
  EXPANDED_DOTS(1, NAME, OFFSETS) EXPANDED_DOTS(2, NAME, OFFSETS) EXPANDED_DOTS(3, NAME, OFFSETS) EXPANDED_DOTS(4, NAME, OFFSETS) \
  BY_ROWS_UP_TO_4(NAME)
EXPANDED_DOTS_OF(expanded_dots, 0)
EXPANDED_DOTS_OF(offset_expanded_dots, 1)

/* DOTS_IN_GROUPS for weights whose scales are integers. These multiply the weights, so that products are added up as integers over
 * a whole span. WIDTH: 0 for expanded weights, which are multiplied already. */
#define BLOCK_DOTS(R, NAME, LOAD, WIDTH, OFFSETS) \
  static void NAME##_##R(const Matrix *m, int64_t first, int64_t stride, const char *x, Fetch fetch, float *y) { \
    vf total[4][R]; \
    const int64_t chunks = m->in / CHUNK_INPUTS, num_groups = m->in / m->group, blocks = m->in / BLOCK_INPUTS; \
    const int64_t each = stride ? 1 : 0; \
    const int64_t parts = sums_of_chunk(m), num_sums = chunks * parts, row = chunks * (WIDTH ? WIDTH : 2 * CHUNK_INPUTS); \
    const uint8_t *w = (const uint8_t *)m->weight + first * row; \
    const int level = level_of(m); \
    const int64_t period = (SCALES / 4) << level, span = span_of(m) / CHUNK_INPUTS; \
    const __m512i zero = _mm512_set1_epi16(OFFSETS ? 0 : (short)m->zero); \
    const __m512i first_place = lanes_by(2 + level), next = _mm512_set1_epi32(4 >> level); /* level is at most 1 */ \
    __m512i place = first_place; \
    const Fixed *fixed = (const Fixed *)(x + R * chunks * (GROUPED_DIGITS + 1) * CHUNK_INPUTS); \
    const float *row_sums = (const float *)(fixed + R); \
    __m512i factors[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()}; \
    UNROLL for (int o = 0; o < 4; o++) UNROLL for (int r = 0; r < R; r++) total[o][r] = (vf){0}; \
    for (int64_t start = 0; start < chunks; start += span) { \
      const int64_t end = min(chunks, start + span), begin = start / period * period, from = begin * 4 >> level; \
      const __mmask16 there = (1u << min(SCALES, num_groups - from)) - 1; \
      const int fresh = start == begin; \
      __m512i whole[4][R]; \
      UNROLL for (int o = 0; o < 4; o++) UNROLL for (int r = 0; r < R; r++) whole[o][r] = _mm512_setzero_si512(); \
      if (WIDTH && fresh) \
        UNROLL for (int o = 0; o < 4; o++) { \
          place = first_place; \
          factors[o] = scale_words(m, first + each * o, from, there); \
          if (!fetch.ahead) continue; \
          const int64_t ahead = first + o + fetch.ahead; \
          FETCH((const uint8_t *)m->groups + ahead * num_groups + from); \
          if (OFFSETS) FETCH((const uint8_t *)m->offsets + ahead * num_groups + from); \
          FETCH(m->blocks + (ahead * blocks + begin * CHUNK_INPUTS / BLOCK_INPUTS) * (OFFSETS ? 2 : 1)); \
        } \
      for (int64_t c = start; !WIDTH && c < end; c++, x += R * (GROUPED_DIGITS + 1) * CHUNK_INPUTS) \
        UNROLL for (int half = 0; half < 2; half++) { \
          __m512i words[4]; \
          UNROLL for (int o = 0; o < 4; o++) words[o] = _mm512_loadu_si512(w + o * stride + (2 * c + half) * 64); \
          UNROLL for (int r = 0; r < R; r++) { \
            const __m512i numbers = _mm512_loadu_si512(x + (r * (GROUPED_DIGITS + 1) + half) * CHUNK_INPUTS); \
            UNROLL for (int o = 0; o < 4; o++) whole[o][r] = add_word_products(whole[o][r], words[o], numbers); \
          } \
        } \
      for (int64_t c = start; WIDTH && c < end; c += 2) { \
        if (fetch.ahead) \
          UNROLL for (int k = 0; k < (WIDTH == 32 ? 1 : 2); k++) \
            if (((c + k) * WIDTH & fetch.mask & -64) == fetch.place) \
              UNROLL for (int o = 0; o < 4; o++) FETCH(w + (o + fetch.ahead) * row + (c + k) * WIDTH); \
        UNROLL for (int k = 0; k < 2; k++, x += R * (GROUPED_DIGITS + 1) * CHUNK_INPUTS, place = _mm512_add_epi32(place, next)) \
          UNROLL for (int o = 0; o < 4; o++) { \
            const __m512i bytes = LOAD(w + o * stride + (c + k) * WIDTH), factor = _mm512_permutexvar_epi32(place, factors[o]); \
            const __m512i words = _mm512_mullo_epi16(_mm512_sub_epi16(first_two(bytes), zero), factor); \
            const __m512i more = _mm512_mullo_epi16(_mm512_sub_epi16(last_two(bytes), zero), factor); \
            UNROLL for (int r = 0; r < R; r++) { \
              const char *numbers = x + r * (GROUPED_DIGITS + 1) * CHUNK_INPUTS; \
              whole[o][r] = add_word_products(whole[o][r], words, _mm512_loadu_si512(numbers)); \
              whole[o][r] = add_word_products(whole[o][r], more, _mm512_loadu_si512(numbers + CHUNK_INPUTS)); \
            } \
          } \
      } \
      /* a group has 16 or 32 inputs, so a period has at most 16 sums */ \
      const __mmask16 here = OFFSETS && fresh ? (1u << min(16, num_sums - start * parts)) - 1 : 0; \
      UNROLL for (int o = 0; o < 4; o++) { \
        const int64_t output = first + each * o, block = start * CHUNK_INPUTS / BLOCK_INPUTS; \
        const __m512 scale = WIDTH ? block_scale(m, output, block) \
                                   : _mm512_set1_ps(((const float *)m->groups)[output * blocks + block]); \
        if (!here) { \
          UNROLL for (int r = 0; r < R; r++) \
            total[o][r] = (vf)_mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[o][r]), scale, (__m512)total[o][r]); \
          continue; \
        } \
        const __m512 offsets = WIDTH ? group_offsets(m, output, from, there) \
                                     : _mm512_maskz_loadu_ps(here, (const float *)m->offsets + output * num_sums + start * parts); \
        UNROLL for (int r = 0; r < R; r++) { \
          const __m512 sums = _mm512_maskz_loadu_ps(here, row_sums + r * num_sums + start * parts); \
          const __m512 before = _mm512_fmadd_ps(offsets, sums, (__m512)total[o][r]); \
          total[o][r] = (vf)_mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[o][r]), scale, before); \
        } \
      } \
    } \
    STORE_TOTALS(R) \
  }
#define BLOCK_DOTS_OF(NAME, LOAD, WIDTH, OFFSETS) \
  BLOCK_DOTS(1, NAME, LOAD, WIDTH, OFFSETS) BLOCK_DOTS(2, NAME, LOAD, WIDTH, OFFSETS) BLOCK_DOTS(3, NAME, LOAD, WIDTH, OFFSETS) \
  BLOCK_DOTS(4, NAME, LOAD, WIDTH, OFFSETS) BLOCK_DOTS(5, NAME, LOAD, WIDTH, OFFSETS) BLOCK_DOTS(6, NAME, LOAD, WIDTH, OFFSETS) \
  static void NAME(const Matrix *m, int64_t first, int64_t stride, const char *x, int64_t rows, Fetch fetch, float *y) { \
    switch (rows) { \
    case 1: NAME##_1(m, first, stride, x, fetch, y); break; \
    case 2: NAME##_2(m, first, stride, x, fetch, y); break; \
    case 3: NAME##_3(m, first, stride, x, fetch, y); break; \
    case 4: NAME##_4(m, first, stride, x, fetch, y); break; \
    case 5: NAME##_5(m, first, stride, x, fetch, y); break; \
    default: NAME##_6(m, first, stride, x, fetch, y); \
    } \
  }
BLOCK_DOTS_OF(block_dots_nibbles, weights_4, 32, 0)
BLOCK_DOTS_OF(offset_block_dots_nibbles, weights_4, 32, 1)
BLOCK_DOTS_OF(block_dots_numbers, weights_of_bytes, 64, 0)
BLOCK_DOTS_OF(offset_block_dots_numbers, weights_of_bytes, 64, 1)
BLOCK_DOTS_OF(block_dots_of_sixes, weights_6, 48, 0)
BLOCK_DOTS_OF(offset_block_dots_of_sixes, weights_6, 48, 1)
BLOCK_DOTS_OF(expanded_block_dots, weights_of_bytes, 0, 0)
BLOCK_DOTS_OF(offset_expanded_block_dots, weights_of_bytes, 0, 1)

static void dots_in_groups(const Matrix *m, int64_t first, int64_t stride, const float *x, int64_t rows, Fetch fetch, float *y) {
  typedef void Dots(const Matrix *, int64_t, int64_t, const char *, int64_t, Fetch, float *);
  static Dots *const dots[2][4][2] = {{{dots_nibbles, offset_dots_nibbles},
                                       {dots_numbers, offset_dots_numbers},
                                       {dots_of_sixes, offset_dots_of_sixes},
                                       {expanded_dots, offset_expanded_dots}},
                                      {{block_dots_nibbles, offset_block_dots_nibbles},
                                       {block_dots_numbers, offset_block_dots_numbers},
                                       {block_dots_of_sixes, offset_block_dots_of_sixes},
                                       {expanded_block_dots, offset_expanded_block_dots}}};
  dots[m->blocks != 0][m->kind - INT4][m->offsets != NULL](m, first, stride, (const char *)x, rows, fetch, y);
}

/* `dots_in_groups` where some of the rows may have finer digits. */
static void finer_dots(const Matrix *m, int64_t first, int64_t stride, const float *x, int64_t rows, Fetch fetch, float *y) {
  dots_in_groups(m, first, stride, x, rows, fetch, y);
  const Finer *finer = (const Finer *)(x + rows * digits_size(m));
  int64_t count = min(finer->count, rows); /* a late member may read any number here, and must stay within its memory */
  if (count <= 0) return;
  float more[EXPANDED_ROWS * BLOCK];
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
