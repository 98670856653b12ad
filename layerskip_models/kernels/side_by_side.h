/* Weights that are multiplied as floats, 16 outputs side by side in memory, times rows as they are.
 *
 * A lane of a vector adds up one output: a vector of weights is loaded once and multiplied by one number of each row. Every output is a
 * single chain of multiply-adds in the order of the inputs, so a row's results do not depend on how many rows or outputs are taken at once.
 * Such a chain waits for its last addition. So a few rows meet several blocks of 16 outputs at once, as many as there are registers for.
 *
 * Memory, for each block of 16 outputs: [in, 16], or in bfloat16 pairs of inputs, [in / 2, 16, 2]: the even ones are the lower halves of
 * words, as a matrix unit takes them. Zeros fill the last block and the last pair.
 */
#ifndef SELFSPEC_SIDE_BY_SIDE_H
#define SELFSPEC_SIDE_BY_SIDE_H
#include "matrix.h"

#define VECTORS (BLOCK / LANES) /* of a block's weights with one input */
#define SIDE_SUMS (MANY_REGISTERS ? 24 : 12) /* vectors of sums that stay in registers */
#define SIDE_ROWS (SIDE_SUMS < 6 * VECTORS ? SIDE_SUMS / VECTORS : 6) /* most rows at once */
/* Blocks of outputs at once for R rows: 8, 4, 2 or 1. Eight are for weights that take longest to convert. */
#define MOST_BLOCKS(KIND, R) \
  (SIDE_SUMS >= 8 * (R) * VECTORS && (R) > 1 && ((KIND) == FLOAT16 || (KIND) == INT8) ? 8 \
   : SIDE_SUMS >= 4 * (R) * VECTORS                                                   ? 4 \
   : SIDE_SUMS >= 2 * (R) * VECTORS                                                   ? 2 \
                                                                                      : 1)
#define MOST_SIDE 8
#define NEAR 1024 /* prefetch distance in bytes within each of several blocks, which the hardware follows as well; else it is AHEAD */
INLINE int number_size(int kind) { return kind == FLOAT32 ? 4 : kind == INT8 ? 1 : 2; }

/* Bytes of a block. */
INLINE int64_t side_bytes(int kind, int64_t in) { return BLOCK * number_size(kind) * (kind == BFLOAT16 ? (in + 1) / 2 * 2 : in); }

#define UPPER 0xffff0000u

/* The odd inputs of words. full: whether there is no register for a mask. */
INLINE vu odd_inputs(int full, vu words) {
#if defined(__FMA__) && !MANY_REGISTERS
  static const uint32_t all[LANES] __attribute__((aligned(32))) = {UPPER, UPPER, UPPER, UPPER, UPPER, UPPER, UPPER, UPPER};
  if (full) {
    __asm__("vpand %1, %0, %0" : "+x"(words) : "m"(all));
    return words;
  }
#else
  (void)full;
#endif
  return words & UPPER;
}

/* A vector of weights with input `s` of a line of 64 bytes. */
INLINE vf side_weights(int kind, int full, const char *line, int s, int v) {
  switch (kind) {
  case FLOAT32: return load((const float *)line + LANES * v);
  case BFLOAT16: {
    const vu words = (vu)load((const float *)line + LANES * v);
    return (vf)(s ? odd_inputs(full, words) : words << 16);
  }
  case FLOAT16: return load_float16((const uint16_t *)line + BLOCK * s + LANES * v);
  default: return load_int8((const int8_t *)line + BLOCK * s + LANES * v);
  }
}

/* One weight, without its output's scale. */
INLINE float side_weight(const Matrix *m, int64_t output, int64_t i) {
  const int64_t inputs = m->kind == BFLOAT16 ? 2 : 1, at = (i / inputs * BLOCK + output % BLOCK) * inputs + i % inputs;
  const char *w = (const char *)m->weight + output / BLOCK * side_bytes((int)m->kind, m->in) + at * number_size((int)m->kind);
  switch (m->kind) {
  case FLOAT32: return one_float32((const float *)w);
  case BFLOAT16: return one_bfloat16((const uint16_t *)w);
  case FLOAT16: return one_float16((const uint16_t *)w);
  default: return one_int8((const int8_t *)w);
  }
}

/* total += a * b, where b is a row's number in every lane. GCC would put sums into other registers, and then has too few. */
#if defined(__FMA__) && !defined(__clang__)
typedef vf Factor;
#define FACTOR(x) splat(x)
#define ADD_PRODUCT(total, a, b) __asm__("vfmadd231ps %2, %1, %0" : "+v"(total) : "v"(a), "v"(b))
#elif defined(__ARM_NEON) && defined(__aarch64__) && !defined(__clang__)
typedef float Factor;
#define FACTOR(x) (x)
#define ADD_PRODUCT(total, a, b) __asm__("fmla %0.4s, %1.4s, %2.s[0]" : "+w"(total) : "w"(a), "w"(b))
#else
typedef vf Factor;
#define FACTOR(x) splat(x)
#define ADD_PRODUCT(total, a, b) total = multiply_add(a, b, total)
#endif

/* Multiply-add the inputs of one line of every block. w: that of the first block, `block` bytes before that of the next. x: row 0 from
 * these inputs on. fourth: row 3. stride: from row to row. kind, blocks, rows: constants. */
INLINE void side_line(int kind, int blocks, int rows, const char *w, int64_t block, const float *x, const float *fourth, int64_t stride,
                      vf (*total)[SIDE_ROWS][VECTORS]) {
  /* Every row's number stays in a register while the weights pass, if there are registers; else a block's weights do. */
  const int used = rows * (blocks * VECTORS + 1) + 1, numbers_stay = used <= (MANY_REGISTERS ? 32 : 16), full = used == 16;
  UNROLL for (int s = 0; s < LINE / BLOCK / number_size(kind); s++) {
    Factor numbers[SIDE_ROWS];
    vf weights[VECTORS];
#if defined(__aarch64__)
    __asm__ volatile("" : : : "memory"); /* GCC would load the next inputs first, for which there are no registers */
#endif
    if (kind == BFLOAT16 && s && rows > 2 && !MANY_REGISTERS) __asm__("" : "+r"(w)); /* or all pairs of weights would be kept */
    UNROLL for (int r = 0; numbers_stay && r < rows; r++) numbers[r] = FACTOR(r < 3 ? x[r * stride + s] : fourth[(r - 3) * stride + s]);
    UNROLL for (int b = 0; numbers_stay && b < blocks; b++)
      UNROLL for (int v = 0; v < VECTORS; v++) {
        const vf weight = side_weights(kind, full, w + b * block, s, v);
        UNROLL for (int r = 0; r < rows; r++) ADD_PRODUCT(total[b][r][v], weight, numbers[r]);
      }
    if (numbers_stay) continue;
    UNROLL for (int v = 0; v < VECTORS; v++) weights[v] = side_weights(kind, 0, w, s, v);
    UNROLL for (int r = 0; r < rows; r++) {
      const Factor number = FACTOR(r < 3 ? x[r * stride + s] : fourth[(r - 3) * stride + s]);
      UNROLL for (int v = 0; v < VECTORS; v++) ADD_PRODUCT(total[0][r][v], weights[v], number);
    }
  }
}

/* The inputs that fill no line, one by one, after y. */
__attribute__((noinline)) static void side_rest(const Matrix *m, int64_t first, int64_t width, const float *x, int64_t rows,
                                                int64_t inputs, float *y) {
  for (int64_t i = m->in / inputs * inputs; i < m->in; i++)
    for (int64_t r = 0; r < rows; r++)
      for (int64_t o = r * width; o < (r + 1) * width; o++)
        y[o] = multiply_add_1(side_weight(m, first + o - r * width, i), x[r * m->in + i], y[o]);
}

/* y[r * BLOCK * blocks + o] for outputs from `first` on, a multiple of BLOCK. x: [rows, in]. kind, blocks, rows: constants where this is
 * called. Several groups of rows fetch their shares of the next group of outputs. One alone fetches what comes next in each block, and at
 * its end in the blocks after these. */
INLINE void side_dots(int kind, int blocks, int rows, const Matrix *m, int64_t first, const float *x, Prefetch fetch, float *y) {
  const int inputs = LINE / BLOCK / number_size(kind), alone = fetch.mask == LINE - 1;
  const int64_t in = m->in, block = side_bytes(kind, in), lines = in / inputs;
  const int64_t lead = min((blocks >= 4 && kind != INT8 ? NEAR : AHEAD) / LINE, lines);
  const int64_t skipped = alone ? BLOCK * blocks : fetch.ahead, more = first + skipped + BLOCK * blocks <= m->out;
  const int64_t next = alone ? (blocks - 1) * block + lead * LINE : skipped / BLOCK * block, turn = alone ? lines - lead : 0;
  const int64_t mask = fetch.mask, place = fetch.ahead ? fetch.place : -1, fetched = more ? lines : turn;
  const char *w = (const char *)m->weight + first / BLOCK * block;
  const float *fourth = x + 3 * in;
  vf total[MOST_SIDE][SIDE_ROWS][VECTORS];
  UNROLL for (int b = 0; b < blocks; b++)
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < VECTORS; v++) total[b][r][v] = (vf){0};
  for (int64_t line = 0; line < lines; line++, w += LINE, x += inputs, fourth += inputs) {
    if ((LINE * line & mask) == place && line < fetched) {
      const int64_t ahead = line < turn ? lead * LINE : next;
      UNROLL for (int b = 0; b < blocks; b++) PREFETCH(w + b * block + ahead);
    }
    side_line(kind, blocks, rows, w, block, x, fourth, in, total);
  }
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int b = 0; b < blocks; b++)
      UNROLL for (int v = 0; v < VECTORS; v++) store(y + (r * blocks + b) * BLOCK + LANES * v, total[b][r][v]);
  if (in % inputs) side_rest(m, first, BLOCK * blocks, x - lines * inputs, rows, inputs, y);
}

#define SIDE_DOTS(KIND, BLOCKS, R) \
  case 8 * BLOCKS + R: \
    if (BLOCKS <= MOST_BLOCKS(KIND, R) && R <= SIDE_ROWS) side_dots(KIND, BLOCKS, R, m, first, x, fetch, y); \
    break;
#define SIDE_DOTS_FOR(NAME, KIND) \
  static void side_##NAME(const Matrix *m, int64_t first, int64_t blocks, const float *x, int64_t rows, Prefetch fetch, float *y) { \
    switch (8 * blocks + rows) { \
      SIDE_DOTS(KIND, 1, 1) SIDE_DOTS(KIND, 1, 2) SIDE_DOTS(KIND, 1, 3) SIDE_DOTS(KIND, 1, 4) SIDE_DOTS(KIND, 1, 5) SIDE_DOTS(KIND, 1, 6) \
      SIDE_DOTS(KIND, 2, 1) SIDE_DOTS(KIND, 2, 2) SIDE_DOTS(KIND, 2, 3) SIDE_DOTS(KIND, 2, 4) SIDE_DOTS(KIND, 2, 5) SIDE_DOTS(KIND, 2, 6) \
      SIDE_DOTS(KIND, 4, 1) SIDE_DOTS(KIND, 4, 2) SIDE_DOTS(KIND, 4, 3) SIDE_DOTS(KIND, 4, 4) SIDE_DOTS(KIND, 4, 5) SIDE_DOTS(KIND, 4, 6) \
      SIDE_DOTS(KIND, 8, 2) SIDE_DOTS(KIND, 8, 3) \
    } \
  }
SIDE_DOTS_FOR(float32, FLOAT32)
SIDE_DOTS_FOR(bfloat16, BFLOAT16)
SIDE_DOTS_FOR(float16, FLOAT16)
SIDE_DOTS_FOR(int8, INT8)

/* `outputs` before scale and bias. width: as `outputs_at_once` says. */
static void side_outputs(const Matrix *m, int64_t first, int64_t width, const float *x, int64_t rows, Prefetch fetch, float *y) {
  switch (m->kind) {
  case FLOAT32: side_float32(m, first, width / BLOCK, x, rows, fetch, y); break;
  case BFLOAT16: side_bfloat16(m, first, width / BLOCK, x, rows, fetch, y); break;
  case FLOAT16: side_float16(m, first, width / BLOCK, x, rows, fetch, y); break;
  default: side_int8(m, first, width / BLOCK, x, rows, fetch, y);
  }
}

/* Outputs that `rows` rows meet at once, where `left` are still to be computed. */
INLINE int64_t side_width(int64_t kind, int64_t rows, int64_t left) {
  int64_t blocks = MOST_BLOCKS(kind, rows);
  while (blocks > 1 && BLOCK * (blocks - 1) >= left) blocks /= 2;
  return BLOCK * blocks;
}

/* One output's weights as float32, [in]. */
INLINE void side_row(const Matrix *m, int64_t output, float *y) {
  for (int64_t i = 0; i < m->in; i++) y[i] = side_weight(m, output, i) * (m->scale ? m->scale[output] : 1);
}

/* Store rows [rows, row_bytes] in this order. T: what moves as one. A line of a row is read at once: rows may be a power of two apart. */
#define LAY(NAME, T) \
  static void NAME(const char *from, int64_t rows, int64_t row_bytes, T *to) { \
    const int64_t numbers = (row_bytes + (int64_t)sizeof(T) - 1) / (int64_t)sizeof(T), most = LINE / sizeof(T); \
    for (int64_t first = 0; first < rows; first += BLOCK, to += BLOCK * numbers) \
      for (int64_t i = 0; i < numbers; i += most) { \
        const int64_t count = min(most, numbers - i), bytes = min(LINE, row_bytes - i * (int64_t)sizeof(T)); \
        T lines[BLOCK][LINE / sizeof(T)]; \
        if (bytes < LINE || first + BLOCK > rows) memset(lines, 0, sizeof lines); \
        for (int64_t o = 0; o < BLOCK && first + o < rows; o++) \
          memcpy(lines[o], from + (first + o) * row_bytes + i * (int64_t)sizeof(T), bytes); \
        for (int64_t k = 0; k < count; k++) \
          UNROLL16 for (int64_t o = 0; o < BLOCK; o++) to[(i + k) * BLOCK + o] = lines[o][k]; \
      } \
  }
LAY(lay_1, uint8_t)
LAY(lay_2, uint16_t)
LAY(lay_4, uint32_t)

static void lay_side_by_side(int64_t kind, const void *from, int64_t rows, int64_t in, void *to) {
  const int64_t row_bytes = bytes_of(kind, in);
  if (kind == INT8) lay_1(from, rows, row_bytes, to);
  else if (kind == FLOAT16) lay_2(from, rows, row_bytes, to);
  else lay_4(from, rows, row_bytes, to);
}
#endif
