/* Weights in bfloat16 on a matrix unit. Each of a row's numbers is cut into three bfloat16 numbers that add up to it, its splits
 * (`to_splits`), and the unit sums the products of each in float32. The splits of a few rows lie in one tile, so that the unit passes a
 * tile of weights once instead of three times; every sum is computed by itself, so a row has the same results either way.
 */
#ifndef SELFSPEC_SPLITS_H
#define SELFSPEC_SPLITS_H
#include "tiles.h"

#define SPLITS 3        /* of each number of a row */
#define SPLIT_INPUTS 32 /* that a run of 64 bytes holds */
#define RUNS_AHEAD 2    /* of 16 outputs, which few rows fetch: from further ahead than 3 KB tiles come a tenth more slowly */

#if TILES
/* The sums of each split, [split, row, 16 outputs]. x: [run, split, row, 64 bytes]. */
static void split_sums(const Matrix *m, int64_t first, const char *x, int64_t rows, Prefetch fetch, float *all) {
  const int64_t runs = m->in / SPLIT_INPUTS, ahead = bytes_of(BFLOAT16, fetch.ahead * m->in);
  const char *w = (const char *)m->weight + bytes_of(BFLOAT16, first * m->in);
  if (SPLITS * rows > 16) {
    float (*sums)[16 * BLOCK] = (float (*)[16 * BLOCK])all;
    THREE_SUMS(tile_dot_bfloat16);
    return;
  }
  configure_tiles(SPLITS * rows, 64);
  tile_zero(0);
  for (int64_t run = 0; run < runs; run++, w += 1024, x += SPLITS * 64 * rows) {
    for (int line = 0; fetch.ahead && line < 16; line++) PREFETCH(w + RUNS_AHEAD * 1024 + 64 * line);
    tile_load(4, w, 64);
    tile_load(6, x, 64);
    tile_dot_bfloat16(0, 6, 4);
  }
  tile_store(0, all, 64);
}

/* `outputs` for 16 outputs, before the bias. */
static void split_outputs(const Matrix *m, int64_t first, const float *x, int64_t rows, Prefetch fetch, float *y) {
  const int64_t apart = SPLITS * rows > 16 ? 16 * BLOCK : rows * BLOCK;
  float sums[SPLITS * 16 * BLOCK];
  split_sums(m, first, (const char *)x, rows, fetch, sums);
  for (int64_t i = 0; i < rows * BLOCK; i++) y[i] = (sums[2 * apart + i] + sums[apart + i]) + sums[i];
}
#endif
#endif
