/* The matrix unit (AMX): products of 16 outputs and up to 16 rows at the price of one.
 *
 * Rows are the first factor, a tile of up to 16 rows and 64 bytes; weights the second one, as they are in memory when they are
 * interleaved. Each element of a result is computed by itself, in an order fixed by the processor, so a row does not depend on others.
 *
 * With EMULATED_TILES the unit is a few loops in C that follow Intel's description of the instructions and count their calls, for
 * the tests.
 */
#ifndef SELFSPEC_TILES_H
#define SELFSPEC_TILES_H
#include "limbs.h"

#if TILES
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
int64_t tile_loads;       /* calls so far */

INLINE void tiles_load_config(const TileConfig *config) { tile_config = *config; }
INLINE void tiles_release(void) { memset(&tile_config, 0, sizeof tile_config); }
INLINE void tile_zero(int t) { memset(tiles + t, 0, sizeof *tiles); }
INLINE void tile_load(int t, const void *from, int64_t stride) {
  __atomic_fetch_add(&tile_loads, 1, __ATOMIC_RELAXED);
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
INLINE float half_product(const uint16_t *a, const uint16_t *b, float sum) {
  return flushed(fmaf(flushed(one_bfloat16(a)), flushed(one_bfloat16(b)), sum));
}
static void tile_dot_bfloat16(int sums, int a, int b) { /* TDPBF16PS */
  __atomic_fetch_add(tile_products + 1, 1, __ATOMIC_RELAXED);
  for (int m = 0; m < tile_config.rows[sums]; m++)
    for (int n = 0; n < tile_config.bytes[sums] / 4; n++) {
      float even = 0, odd = 0, *sum = &tiles[sums].floats[m][n];
      for (int k = 0; k < tile_config.bytes[a] / 4; k++) {
        even = half_product(&tiles[a].halves[m][2 * k], &tiles[b].halves[k][2 * n], even);
        odd = half_product(&tiles[a].halves[m][2 * k + 1], &tiles[b].halves[k][2 * n + 1], odd);
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

static __thread int64_t tiles_key; /* what this thread's tiles are configured for; 0: nothing */

/* Configure tiles: 0 to 3 for sums, 4 and 5 for weights, 6 and 7 for `rows` rows, of which `width` bytes meet weights at once. */
INLINE void configure_tiles(int64_t rows, int width) {
  const int64_t key = width * 32 + rows;
  __asm__ volatile("" : : : "memory"); /* GCC 12's loads of tiles do not say that they read memory, such as rows just prepared */
  if (key == tiles_key) return;
  TileConfig config = {.palette = 1};
  for (int t = 0; t < 8; t++) {
    config.rows[t] = (uint8_t)(t == 4 || t == 5 ? width / 4 : rows);
    config.bytes[t] = (uint16_t)(t < 6 ? 64 : width);
  }
  tiles_load_config(&config);
  tiles_key = key;
}

/* Release the tiles at the end of a job: the system need not save them, and the core may clock higher. */
INLINE void leave_tiles(void) {
  if (tiles_key) tiles_release();
  tiles_key = 0;
}

/* Fetch the share of what lies `ahead` of a run of 16 outputs. */
#define FETCH_RUN(w) \
  do { \
    if (fetch.ahead) \
      for (int line = 0; line < 16; line++) \
        if ((64 * line & fetch.mask) == fetch.place) PREFETCH((w) + ahead + 64 * line); \
  } while (0)

/* Three sums over 64-byte runs of a row: of its limbs with bytes, or of its splits with bfloat16 numbers. DOT multiplies.
 * sums: [3][16 rows][16 outputs] of 4 bytes. x: [run, 3, rows, 64]. */
#define THREE_SUMS(DOT) \
  do { \
    configure_tiles(rows, 64); \
    tile_zero(0); \
    tile_zero(1); \
    tile_zero(2); \
    for (int64_t run = 0; run < runs; run++, w += 1024, x += 3 * 64 * rows) { \
      FETCH_RUN(w); \
      tile_load(4, w, 64); \
      tile_load(6, x, 64); \
      DOT(0, 6, 4); \
      tile_load(7, x + 64 * rows, 64); \
      DOT(1, 7, 4); \
      tile_load(6, x + 128 * rows, 64); \
      DOT(2, 6, 4); \
    } \
    tile_store(0, sums[0], 64); \
    tile_store(1, sums[1], 64); \
    tile_store(2, sums[2], 64); \
  } while (0)
#else
INLINE void leave_tiles(void) {}
#endif
#endif
