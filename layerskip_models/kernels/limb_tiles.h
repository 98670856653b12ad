/* Interleaved weights and many rows on a matrix unit, and which rows go there.
 *
 * Sums are those of interleaved.h: the unit adds up products of 16 outputs and up to 16 rows at once, exactly, and the rest is done as
 * vectors do it. So a row has the same results either way. A chunk of 8-bit weights is a tile as it is in memory.
 */
#ifndef SELFSPEC_LIMB_TILES_H
#define SELFSPEC_LIMB_TILES_H
#include "byte_rows.h"
#include "tiles.h"

#if TILES
/* `outputs` for 16 outputs with 8-bit weights, before the scale. Rows are in the layout of tiles. */
static void tile_byte_dots(const Matrix *m, int64_t first, const char *x, int64_t rows, Prefetch fetch, float *y) {
  const int64_t runs = m->in / CHUNK_INPUTS, ahead = fetch.ahead * m->in;
  const char *w = (const char *)m->weight + first * m->in;
  const Fixed *fixed = (const Fixed *)(x + runs * rows * LIMBS * CHUNK_INPUTS);
  int32_t sums[LIMBS][16][16];
  THREE_SUMS(tile_dot_bytes);
  for (int64_t r = 0; r < rows; r++)
    for (int o = 0; o < BLOCK; o++) {
      const int64_t whole = (sums[0][r][o] * (int64_t)256 + sums[1][r][o]) * 256 + sums[2][r][o] - 128 * fixed[r].sum;
      y[r * BLOCK + o] = (float)((double)whole * fixed[r].unit);
    }
}

#if VNNI
/* The same for weights in groups, and rows of two limbs. kind, spans, shifted: constants where this is called. */
INLINE void tile_span_dots(int kind, int spans, int shifted, const Matrix *m, int64_t first, const char *x, int64_t rows,
                           Prefetch fetch, float *y) {
  typedef int32_t whole __attribute__((aligned(4), may_alias));
  const int lines = kind == INT4 ? 8 : kind == SIXES ? 12 : 16, shift = spans_shift(m), width = CHUNK_INPUTS / spans;
  const int64_t chunks = m->in / CHUNK_INPUTS, ahead = bytes_of(kind, fetch.ahead * m->in);
  const int64_t chunk_size = rows * (GROUPED_LIMBS * CHUNK_INPUTS + 4 * spans);
  const uint8_t *w = (const uint8_t *)m->weight + bytes_of(kind, first * m->in);
  const Factors at = factors_at(m, first);
  const Fixed *fixed = (const Fixed *)(x + chunks * chunk_size);
  uint8_t quads[QUADS][64] __attribute__((aligned(64)));
  int32_t sums[4][16][16] __attribute__((aligned(64)));
  BlockFactors block = {{{0}}, {{0}}};
  vf total[16];
  configure_tiles(rows, width);
  for (int64_t r = 0; r < rows; r++) total[r] = (vf){0};
  for (int64_t c = 0; c < chunks; c++, w += 64 * lines, x += chunk_size) {
    const char *words = x + rows * GROUPED_LIMBS * CHUNK_INPUTS;
    if (m->blocks && c % (BLOCK_INPUTS / CHUNK_INPUTS) == 0) block = factors_of_block(m, at, c / (BLOCK_INPUTS / CHUNK_INPUTS));
    if (fetch.ahead)
      for (int line = 0; line < lines; line++)
        if ((64 * line & fetch.mask) == fetch.place) PREFETCH(w + ahead + 64 * line);
    UNROLL for (int t = 0; t < 8; t++) {
      const Pair pair = quads_of(kind, w, t);
      _mm512_store_si512(quads[t], pair.first);
      _mm512_store_si512(quads[8 + t], pair.second);
    }
    __asm__ volatile("" : : "r"(quads) : "memory"); /* as in configure_tiles */
    UNROLL for (int half = 0; half < spans / 2; half++) {
      const int other = half + spans / 2;
      const char *own = x + half * GROUPED_LIMBS * rows * width, *others = x + other * GROUPED_LIMBS * rows * width;
      tile_zero(0);
      tile_zero(1);
      tile_zero(2);
      tile_zero(3);
      tile_load(4, quads[half * width / 4], 64);
      tile_load(6, own, width);
      tile_dot_bytes(0, 6, 4);
      tile_load(5, quads[other * width / 4], 64);
      tile_load(7, others, width);
      tile_dot_bytes(2, 7, 5);
      tile_load(6, own + rows * width, width);
      tile_dot_bytes(1, 6, 4);
      tile_load(7, others + rows * width, width);
      tile_dot_bytes(3, 7, 5);
      tile_store(0, sums[0], 64);
      tile_store(1, sums[1], 64);
      tile_store(2, sums[2], 64);
      tile_store(3, sums[3], 64);
      for (int k = 0; k < 2; k++) {
        const int span = k ? other : half;
        const int64_t group = (c * spans + span) >> shift;
        const vf scale = scales_of(m, at, group, &block, 0), offset = shifted ? offsets_of(m, at, group, &block, 0) : (vf){0};
        for (int64_t r = 0; r < rows; r++) {
          const char *word = words + 4 * (span * rows + r);
          const __m512i high = _mm512_load_si512(sums[2 * k][r]), low = _mm512_load_si512(sums[2 * k + 1][r]);
          __m512i all = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
          if (!shifted) all = _mm512_add_epi32(all, _mm512_set1_epi32(*(const whole *)word));
          total[r] = add_span(total[r], (vi)all, scale, shifted, offset, word);
        }
      }
    }
  }
  for (int64_t r = 0; r < rows; r++) store_totals(total + r, GROUPED_LIMBS, fixed[r].unit, y + r * BLOCK);
}

#define TILE_DOTS(KIND) \
  do { \
    const int shifted = m->offsets != NULL; \
    if (m->group == 16 && shifted) tile_span_dots(KIND, 4, 1, m, first, x, rows, fetch, y); \
    else if (m->group == 16) tile_span_dots(KIND, 4, 0, m, first, x, rows, fetch, y); \
    else if (shifted) tile_span_dots(KIND, 2, 1, m, first, x, rows, fetch, y); \
    else tile_span_dots(KIND, 2, 0, m, first, x, rows, fetch, y); \
  } while (0)
static void tile_dots(const Matrix *m, int64_t first, const char *x, int64_t rows, Prefetch fetch, float *y) {
  if (m->kind == INT4) TILE_DOTS(INT4);
  else if (m->kind == BYTES) TILE_DOTS(BYTES);
  else TILE_DOTS(SIXES);
}
#endif
#endif

INLINE void grouped_dots(const Matrix *m, int64_t first, const char *x, int64_t rows, Prefetch fetch, float *y) {
#if TILES && VNNI
  if (by_tiles(m, rows)) {
    tile_dots(m, first, x, rows, fetch, y);
    return;
  }
#endif
  if (takes_bytes(m)) byte_rows(m, first, x, rows, fetch, y);
  else vector_dots(m, first, x, rows, fetch, y);
}

/* `outputs` for weights in groups, before scale and bias. Some of the rows may have finer limbs. */
static void grouped_outputs(const Matrix *m, int64_t first, const float *x, int64_t rows, Prefetch fetch, float *y) {
  grouped_dots(m, first, (const char *)x, rows, fetch, y);
  if (takes_bytes(m)) return;
  const Finer *finer = (const Finer *)(x + rows * limbs_size(m));
  const int64_t count = min(finer->count, rows); /* a late worker may read any number here, and must stay within its memory */
  if (count <= 0) return;
  float more[ROWS * BLOCK];
  grouped_dots(m, first, (const char *)(finer + 1), count, (Prefetch){0}, more);
  for (int64_t k = 0; k < count; k++) {
    const int64_t r = finer->rows[k];
    if (r < 0 || r >= rows) continue;
    for (int o = 0; o < BLOCK; o++) y[r * BLOCK + o] += more[k * BLOCK + o];
  }
}

/* `outputs` for interleaved weights, before scale and bias. */
static void integer_outputs(const Matrix *m, int64_t first, const float *x, int64_t rows, Prefetch fetch, float *y) {
  if (is_grouped(m)) {
    grouped_outputs(m, first, x, rows, fetch, y);
    return;
  }
#if TILES
  if (by_tiles(m, rows)) {
    tile_byte_dots(m, first, (const char *)x, rows, fetch, y);
    return;
  }
#endif
#if VNNI
  vector_byte_dots(m, first, (const char *)x, rows, fetch, y);
#endif
}
#endif
