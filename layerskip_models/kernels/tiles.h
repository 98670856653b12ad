/* Products on a matrix unit (AMX): 16 outputs and up to 16 rows at the price of one.
 *
 * Weights of bytes and in groups are in digit_tiles.h. For bfloat16 weights, which are read as stored, rows are cut into three bfloat16
 * numbers that add up to the float32 number; the unit sums their products in float32.
 * Each element of a tile is computed by itself, in an order fixed by the processor, so a row does not depend on other rows.
 *
 * With EMULATED_TILES the unit is a few loops in C that follow Intel's description of the instructions and count their calls, for
 * the tests.
 */
#ifndef SELFSPEC_TILES_H
#define SELFSPEC_TILES_H
#include "digits.h"

#define PARTS 3 /* of each number of a row */

#if TILES
#define WEIGHTS PARTS /* tile number of the weights; lower tiles hold the sums of each part, higher ones the rows' parts */

typedef struct {
  uint8_t palette, start, unused[14];
  uint16_t bytes[16]; /* bytes per row, for each tile */
  uint8_t rows[16];
} TileConfig;

#if defined(EMULATED_TILES)
typedef union {
  char bytes[16][64];
  int8_t bytes_8[16][64];
  uint16_t halves[16][32];
  int32_t integers[16][16];
  float floats[16][16];
} Tile;
static __thread TileConfig tile_config;
static __thread Tile tiles[8];
int64_t tile_products[2]; /* calls so far: of byte products, of bfloat16 products */

INLINE void tiles_load_config(const TileConfig *config) { tile_config = *config; }
INLINE void tiles_release(void) { memset(&tile_config, 0, sizeof tile_config); }
INLINE void tile_zero(int t) { memset(tiles + t, 0, sizeof *tiles); }
INLINE void tile_load(int t, const void *from, int64_t stride) {
  for (int r = 0; r < tile_config.rows[t]; r++) memcpy(tiles[t].bytes[r], (const char *)from + r * stride, tile_config.bytes[t]);
}
INLINE void tile_store(int t, void *to, int64_t stride) {
  for (int r = 0; r < tile_config.rows[t]; r++) memcpy((char *)to + r * stride, tiles[t].bytes[r], tile_config.bytes[t]);
}
static void tile_dot_bytes(int sums, int a, int b) { /* TDPBSUD: the bytes of b are unsigned */
  __atomic_fetch_add(tile_products, 1, __ATOMIC_RELAXED);
  for (int m = 0; m < tile_config.rows[sums]; m++)
    for (int k = 0; k < tile_config.bytes[a] / 4; k++)
      for (int n = 0; n < tile_config.bytes[sums] / 4; n++)
        for (int i = 0; i < 4; i++)
          tiles[sums].integers[m][n] += tiles[a].bytes_8[m][4 * k + i] * (uint8_t)tiles[b].bytes_8[k][4 * n + i];
}
INLINE float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; } /* the unit flushes subnormals to 0 */
INLINE float half_product(const uint16_t *a, const uint16_t *b) {
  return flushed(flushed(one_bfloat16(a)) * flushed(one_bfloat16(b)));
}
static void tile_dot_bfloat16(int sums, int a, int b) { /* TDPBF16PS */
  __atomic_fetch_add(tile_products + 1, 1, __ATOMIC_RELAXED);
  for (int m = 0; m < tile_config.rows[sums]; m++)
    for (int n = 0; n < tile_config.bytes[sums] / 4; n++) {
      float even = 0, odd = 0, *sum = &tiles[sums].floats[m][n];
      for (int k = 0; k < tile_config.bytes[a] / 4; k++) {
        even = flushed(even + half_product(&tiles[a].halves[m][2 * k], &tiles[b].halves[k][2 * n]));
        odd = flushed(odd + half_product(&tiles[a].halves[m][2 * k + 1], &tiles[b].halves[k][2 * n + 1]));
      }
      *sum = flushed(flushed(*sum) + flushed(even + odd));
    }
}
#else
/* GCC 12 thinks that the configuration is 8 bytes long, and may drop stores to the rest of it. */
#define tiles_load_config(config) \
  do { \
    __asm__ volatile("" : : "r"(config) : "memory"); \
    _tile_loadconfig(config); \
  } while (0)
#define tiles_release _tile_release
#define tile_zero(t) _tile_zero(t)
#define tile_load(t, from, stride) _tile_loadd(t, from, stride)
#define tile_store(t, to, stride) _tile_stored(t, to, stride)
#define tile_dot_bytes(sums, a, b) _tile_dpbsud(sums, a, b)
#define tile_dot_bfloat16(sums, a, b) _tile_dpbf16ps(sums, a, b)
#endif

#define SHARED_TILE_BYTES (16 << 20) /* parts side by side are faster for smaller matrices: measured at 8 MB, not at 32 MB */

/* Whether a row's three parts share a tile, if they fit: one product then does the work of three, with the same bits. */
INLINE int side_by_side(const Matrix *m, int64_t rows) {
  return m->kind == BFLOAT16 && PARTS * rows <= 16 && whole_bytes(m) < SHARED_TILE_BYTES;
}

static __thread int64_t tiles_key; /* what this thread's tiles are configured for: columns, or `configure_spans`; 0: nothing */

/* Configure tiles with `rows` columns. */
INLINE void configure_tiles(int64_t rows) {
  if (rows == tiles_key) return;
  TileConfig config = {.palette = 1};
  for (int t = 0; t < 2 * PARTS + 1; t++) {
    config.rows[t] = 16;
    config.bytes[t] = t == WEIGHTS ? 64 : (uint16_t)(4 * rows);
  }
  tiles_load_config(&config);
  tiles_key = rows;
}

/* Release the tiles at the end of a job: the system need not save them, and the core may clock higher. */
INLINE void leave_tiles(void) {
  if (tiles_key) tiles_release();
  tiles_key = 0;
}

/* `outputs` for BLOCK outputs of weights in bfloat16, before the bias. Tile numbers must be constants. */
static void part_outputs(const Matrix *m, int64_t first, const float *packed, int64_t rows, Fetch fetch, float *y) {
  int64_t width = bytes_of(m->kind, m->in);
  const char *w = (const char *)m->weight + first * width, *x = (const char *)packed;
  const int beside = side_by_side(m, rows);
  float sums[PARTS][BLOCK][16];
  configure_tiles(beside ? PARTS * rows : rows);
  tile_zero(0);
  tile_zero(1);
  tile_zero(2);
  for (int64_t at = 0; at < width; at += 64, x += PARTS * 64 * rows) {
    if (fetch.ahead && (at & fetch.mask) == fetch.place)
      for (int o = 0; o < BLOCK; o++) FETCH(w + (o + fetch.ahead) * width + at);
    tile_load(3, w + at, width);
    if (beside) {
      tile_load(4, x, 4 * PARTS * rows);
      tile_dot_bfloat16(0, 3, 4);
      continue;
    }
    tile_load(4, x, 4 * rows);
    tile_dot_bfloat16(0, 3, 4);
    tile_load(5, x + 64 * rows, 4 * rows);
    tile_dot_bfloat16(1, 3, 5);
    tile_load(6, x + 128 * rows, 4 * rows);
    tile_dot_bfloat16(2, 3, 6);
  }
  tile_store(0, sums[0], 64);
  tile_store(1, sums[1], 64);
  tile_store(2, sums[2], 64);
  for (int64_t r = 0; r < rows; r++)
    for (int o = 0; o < BLOCK; o++) {
      const float largest = sums[0][o][r];
      y[r * BLOCK + o] = beside ? (sums[0][o][2 * rows + r] + sums[0][o][rows + r]) + largest
                                : (sums[2][o][r] + sums[1][o][r]) + largest;
    }
}
#else
INLINE void leave_tiles(void) {}
#endif
#endif
