/* Rows as integers, for 8-bit weights and weights in groups that are interleaved: integer sums of products are exact, so their order
 * does not matter.
 *
 * A row becomes fixed-point numbers q * unit, where `unit` is a power of two chosen for the row's largest number. Each q is cut
 * into signed bytes, its limbs: three for 8-bit weights, two for weights in groups. One instruction multiplies 64 limbs by 64
 * weights and adds the products up. Only small numbers of a row are rounded: to within 2^-23 of its largest, about as float32
 * rounds a sum of them, or with two limbs to within 2^-15. Where most of a row is much smaller than its largest number, two
 * limbs are too coarse. Such a row gets two more limbs for the remainder, and is multiplied twice.
 */
#ifndef SELFSPEC_LIMBS_H
#define SELFSPEC_LIMBS_H
#include "matrix.h"

/* Whether this matrix multiplies rows as integers. */
INLINE int as_integers(const Matrix *m) { return m->interleaved && m->kind != BFLOAT16; }

#define LIMBS 3          /* bytes per number of a row, for 8-bit weights */
#define GROUPED_LIMBS 2  /* the same for weights in groups: beside that of 4-bit weights the error is a hundred-thousandth */
#define FINER 64         /* weights in groups: a row gets more limbs if its largest magnitude exceeds the others' mean this many times */
#define FINER_BITS 15    /* bits by which the finer limbs' unit is below the first limbs' */
#define CHUNK_INPUTS 64  /* inputs whose limbs are prepared together */
#define QUADS 16         /* runs of four inputs in a chunk */
#define BYTE_ROWS 8      /* rows multiplied at once by 8-bit weights on vectors, with an accumulator per limb; also rows of bytes */
#define UNIT_INPUTS 32   /* inputs of a row of bytes that share a factor */
#define GROUPED_ROWS (PAIRS ? 6 : VNNI ? 5 : 4) /* and by weights in groups, with an accumulator per limb of two spans, or for pairs one */
#define FEW_ROWS 2       /* rows that vectors multiply faster by 8-bit weights than a matrix unit does, with the same bits */

/* Whether rows become one byte a number (`to_bytes`). */
INLINE int takes_bytes(const Matrix *m) { return (m->kind == INT4 || m->kind == SIXES) && m->row_bits == 8; }

/* Most rows that vectors multiply at once. */
INLINE int64_t rows_at_once(const Matrix *m) { return m->kind == INT8 || takes_bytes(m) ? BYTE_ROWS : GROUPED_ROWS; }

/* Whether this matrix multiplies many rows as integers on the matrix unit. Not rows of bytes: most of their time goes into the factors
 * of each 32 inputs, and vectors are 1.3 times as fast. */
INLINE int has_tiles(const Matrix *m) { return TILES && as_integers(m) && !takes_bytes(m) && (VNNI || !is_grouped(m)); }

/* Whether it multiplies this many there. */
INLINE int by_tiles(const Matrix *m, int64_t rows) {
  return has_tiles(m) && !(VNNI && rows <= (m->kind == INT8 ? FEW_ROWS : rows_at_once(m)));
}

INLINE int limbs_for(const Matrix *m) { return takes_bytes(m) ? 1 : is_grouped(m) ? GROUPED_LIMBS : LIMBS; }

/* The factor of a row's limbs, and the sum of its q. */
typedef struct {
  double unit;
  int64_t sum;
} Fixed;

/* Sums that a chunk's products with weights in groups are added up to: of 32 inputs each, or of 16. */
INLINE int spans_of_chunk(const Matrix *m) { return m->group == 16 ? 4 : 2; }

/* Bytes of a row's chunk: its limbs, and for weights in groups a word for each span (`to_grouped_limbs`), for bytes also their units. */
INLINE int64_t chunk_bytes(const Matrix *m) {
  const int words = (is_grouped(m) ? spans_of_chunk(m) : 0) + (takes_bytes(m) ? CHUNK_INPUTS / UNIT_INPUTS : 0);
  return limbs_for(m) * CHUNK_INPUTS + 4 * words;
}

/* Size of a row's limbs in 4-byte words: its chunks and `Fixed`, which rows of bytes have not. */
INLINE int64_t limbs_size(const Matrix *m) {
  return m->in / CHUNK_INPUTS * (chunk_bytes(m) / 4) + (takes_bytes(m) ? 0 : (int64_t)(sizeof(Fixed) / 4));
}

/* Follows the limbs of rows that weights in groups multiply together: which rows have finer limbs. Those limbs come next. */
typedef struct {
  int32_t count, rows[ROWS], unused;
} Finer;

/* Words to reserve for a row: its limbs, and for weights in groups as much again for finer limbs, which few rows have. */
INLINE int64_t limbs_capacity(const Matrix *m) {
  return is_grouped(m) && !takes_bytes(m) ? 2 * limbs_size(m) + (int64_t)(sizeof(Finer) / 4) : limbs_size(m);
}
#endif
