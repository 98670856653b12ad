/* A weight matrix, and how many of its outputs and how many rows are processed at a time. */
#ifndef SELFSPEC_MATRIX_H
#define SELFSPEC_MATRIX_H
#include "vectors.h"

/* How a weight's numbers are stored; `KINDS` in library.py. The last are small numbers in groups of inputs, of 4, 8 and 6 bits. */
enum Kind { FLOAT32, BFLOAT16, FLOAT16, INT8, INT4, BYTES, SIXES };

/* How the scales of groups are stored; `SCALES` in library.py. The last two are integers that a block's own scale multiplies. */
enum Scales { HALVES, FLOATS, UNSIGNED, SIGNED };
#define IN_ROWS 2 /* floats of an embedding that no product reads: each output's in a row (`row_of`) */
#define BLOCK_INPUTS 256 /* inputs of such a block */

/* A number q of 0 to 15, 63 or 255 stands for scale * q + offset, or for scale * (q - zero) without offsets. Numbers of 4 bits come in
 * chunks of 64 inputs, 32 bytes each: the low nibble of byte j is input j, the high nibble input 32 + j. Numbers of 6 bits have 16
 * bytes after these: bits 2 k and 2 k + 1 of byte j are the upper two of input 16 k + j. */
typedef struct {
  const void *weight; /* [out, in]; where it is not in groups, 16 outputs side by side (`side_by_side.h`, `interleaved.h`) */
  const float *scale; /* [out], one factor per output, or NULL */
  const float *bias;  /* [out] or NULL */
  int64_t kind, in, out;
  const void *groups;     /* [out, in / group], scales; only where numbers are in groups */
  const void *offsets;    /* [out, in / group], float32, or integers as scales are where blocks have a scale for offsets; or NULL */
  int64_t group;          /* inputs that share a scale: 16, 32, 64 or 128 */
  int64_t scales;         /* `Scales` */
  const uint16_t *blocks; /* [out, in / BLOCK_INPUTS, 1 or 2], float16: what integer scales are multiplied by, and offsets, negated */
  int64_t zero;           /* the number that stands for 0 where there are no offsets */
  int64_t interleaved;    /* whether it is stored for integer products or a matrix unit, as `interleaves` says; or `IN_ROWS` */
  int64_t row_bits;       /* 8 or 16: what rows are rounded to where weights are in groups (`limbs.h`) */
} Matrix;

INLINE int is_grouped(const Matrix *m) { return m->kind >= INT4; }

/* Whether rows are multiplied as floats, and 16 outputs are side by side in memory. */
INLINE int side_by_side(const Matrix *m) { return !m->interleaved && !is_grouped(m); }

/* Bytes of `count` weights. */
INLINE int64_t bytes_of(int64_t kind, int64_t count) {
  switch (kind) {
  case FLOAT32: return 4 * count;
  case INT8:
  case BYTES: return count;
  case INT4: return count / 2;
  case SIXES: return count / 4 * 3;
  default: return 2 * count;
  }
}

#if defined(__AVX512VNNI__)
#define VNNI 1
#else
#define VNNI 0
#endif
#if defined(__AMX_INT8__) || defined(__AMXINT8__) || defined(EMULATED_TILES) /* Clang had the second name */
#define TILES 1
#else
#define TILES 0
#endif
#if defined(__AVX2__) && !VNNI && !TILES
#define PAIRS 1 /* 16-bit integers are multiplied in pairs (`pairs.h`) */
#else
#define PAIRS 0
#endif
#if defined(__AVXVNNI__) || defined(EMULATED_AVXVNNI)
#define SHORT_VNNI 1 /* besides, 32 bytes are multiplied by an instruction of VNNI */
#else
#define SHORT_VNNI 0
#endif
#define BLOCK 16  /* outputs computed side by side, so that an input is loaded once for all of them */
#define WIDEST 128 /* most outputs computed at once, a few blocks of them */
#define ROWS (TILES ? 16 : 8) /* most rows multiplied by a weight while it is loaded */

#ifndef TILE_BYTES
/* Smallest bfloat16 matrix, in bytes, that uses tiles. With vectors, models whose matrices are all smaller decode 1.45 times as
 * fast, and read prompts .86 times as fast. */
#define TILE_BYTES (4 << 20)
#endif

/* Whether the kernels want a matrix interleaved, always where it is in groups: of others, outputs fill blocks of 16 (each half, if gates
 * are stacked above ups), inputs fill chunks of 64, and no sum of up to 255 * 128 an input exceeds 32 bits. */
INLINE int interleaves(int64_t kind, int64_t out, int64_t in) {
  if (kind >= INT4) return 1;
  if (out % 32 || in % 64) return 0;
  if (kind == INT8) return (VNNI || TILES) && in <= 1 << 16;
  return kind == BFLOAT16 && TILES && bytes_of(kind, out * in) >= TILE_BYTES;
}

/* Whether rows are cut into splits for weights in bfloat16, which a matrix unit multiplies. */
INLINE int in_splits(const Matrix *m) { return TILES && m->interleaved && m->kind == BFLOAT16; }

#define GROUP 32 /* outputs that all rows are multiplied by before the next: later rows find their weights in the cache */
#define GROUP_BYTES (64 << 10) /* most bytes of a group's weights: these and the next group's stay in the L2 cache */
#define LINE 64 /* bytes of a cache line */
#define AHEAD 8192 /* prefetch distance in bytes: what memory delivers during one access's latency */

/* Weights to prefetch while others are in use. The hardware prefetcher starts too late, and starts over at every row of the
 * matrix. Where several groups of rows meet a group's weights, each fetches its share of the next group's cache lines (64 bytes),
 * so that memory is never idle. Small enough for a register. */
typedef struct {
  int32_t ahead;       /* how many outputs ahead; 0: fetch nothing */
  int16_t mask, place; /* fetch the lines whose byte offset & mask is `place` */
} Prefetch;

/* Into the L2 cache, because L1 has too few slots for lines in flight (1.8 times as fast on Zen 4). */
#define PREFETCH(p) __builtin_prefetch(p, 0, 2)

INLINE Prefetch share_of_row_group(int64_t row_group, int64_t row_groups, int64_t ahead) {
  static const int16_t of_two[] = {0, 64}, of_three[] = {0, 128, 64}, of_four[] = {0, 128, 64, 192};
  if (row_groups == 1) return (Prefetch){row_group ? 0 : (int32_t)ahead, 63, 0};
  if (row_groups == 2) return (Prefetch){(int32_t)ahead, 127, of_two[row_group]};
  if (row_groups == 3) return (Prefetch){(int32_t)ahead, row_group == 2 ? 127 : 255, of_three[row_group]};
  int64_t part = 4 * row_group / row_groups;
  return (Prefetch){part == 4 * (row_group + 1) / row_groups ? 0 : (int32_t)ahead, 255, of_four[part]};
}

#endif
