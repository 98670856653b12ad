/* Weights in bfloat16 on a matrix unit. Each of a row's numbers is cut into three bfloat16 numbers that add up to it, its splits
 * (`to_splits`), and the unit sums the products of each in float32.
 *
 * For a few rows vectors are faster. They do what Intel's description of TDPBF16PS says, so that a row has the same results either way:
 * 32 inputs at a time, products with even and with odd inputs summed apart in the inputs' order, both sums added, and that added to the
 * total; with fused multiply-adds that take subnormal numbers for 0 and give 0 for them.
 */
#ifndef SELFSPEC_SPLITS_H
#define SELFSPEC_SPLITS_H
#include "tiles.h"

#define SPLITS 3         /* of each number of a row */
#define SPLIT_INPUTS 32  /* that a run of 64 bytes holds */
#define SPLIT_ROWS 3     /* most rows that vectors multiply */
#define SPLIT_VECTORS (TILES && MANY_REGISTERS && LANES == 16)

#if TILES
INLINE int splits_by_vectors(int64_t rows) { return SPLIT_VECTORS && rows <= SPLIT_ROWS; }

#if SPLIT_VECTORS
/* sums: [split, row, 16 outputs]. x: splits as floats, [pair of inputs, row, split, 2]. rows: a constant where this is called. */
INLINE void split_sums(int rows, const Matrix *m, int64_t first, const float *x, Prefetch fetch, float (*sums)[16][16]) {
  const int64_t runs = m->in / SPLIT_INPUTS, ahead = bytes_of(BFLOAT16, fetch.ahead * m->in);
  const char *w = (const char *)m->weight + bytes_of(BFLOAT16, first * m->in);
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
  __m512 total[SPLIT_ROWS][SPLITS];
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int p = 0; p < SPLITS; p++) total[r][p] = _mm512_setzero_ps();
  for (int64_t run = 0; run < runs; run++) {
    __m512 even[SPLIT_ROWS][SPLITS], odd[SPLIT_ROWS][SPLITS];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int p = 0; p < SPLITS; p++) even[r][p] = odd[r][p] = _mm512_setzero_ps();
    for (int line = 0; line < 16; line++, w += 64, x += 2 * SPLITS * rows) {
      if (fetch.ahead && (64 * line & fetch.mask) == fetch.place) PREFETCH(w + ahead);
      const __m512i pairs = _mm512_loadu_si512(w);
      const __m512 evens = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)), odds = _mm512_castsi512_ps(_mm512_and_si512(pairs, upper));
      UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < SPLITS; p++) {
          even[r][p] = _mm512_fmadd_ps(evens, _mm512_set1_ps(x[2 * (r * SPLITS + p)]), even[r][p]);
          odd[r][p] = _mm512_fmadd_ps(odds, _mm512_set1_ps(x[2 * (r * SPLITS + p) + 1]), odd[r][p]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
      UNROLL for (int p = 0; p < SPLITS; p++) total[r][p] = _mm512_add_ps(total[r][p], _mm512_add_ps(even[r][p], odd[r][p]));
  }
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int p = 0; p < SPLITS; p++) _mm512_storeu_ps(sums[p][r], total[r][p]);
}

/* Not inlined: no operation may move out of it, to where subnormal numbers count. */
__attribute__((noinline)) static void vector_sums(const Matrix *m, int64_t first, const float *x, int64_t rows, Prefetch fetch,
                                                  float (*sums)[16][16]) {
  if (rows == 1) split_sums(1, m, first, x, fetch, sums);
  else if (rows == 2) split_sums(2, m, first, x, fetch, sums);
  else split_sums(3, m, first, x, fetch, sums);
}
#endif

static void tile_sums(const Matrix *m, int64_t first, const char *x, int64_t rows, Prefetch fetch, float (*sums)[16][16]) {
  const int64_t runs = m->in / SPLIT_INPUTS, ahead = bytes_of(BFLOAT16, fetch.ahead * m->in);
  const char *w = (const char *)m->weight + bytes_of(BFLOAT16, first * m->in);
  THREE_SUMS(tile_dot_bfloat16);
}

/* `outputs` for 16 outputs, before the bias. */
static void split_outputs(const Matrix *m, int64_t first, const float *x, int64_t rows, Prefetch fetch, float *y) {
  float sums[SPLITS][16][16];
#if SPLIT_VECTORS
  if (splits_by_vectors(rows)) {
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040); /* subnormal numbers are and give 0 */
    vector_sums(m, first, x, rows, fetch, sums);
    _mm_setcsr(mode);
  } else
#endif
    tile_sums(m, first, (const char *)x, rows, fetch, sums);
  for (int64_t r = 0; r < rows; r++)
    for (int o = 0; o < BLOCK; o++) y[r * BLOCK + o] = (sums[2][r][o] + sums[1][r][o]) + sums[0][r][o];
}
#endif
#endif
