/* One output's numbers as float32, whichever way a matrix keeps them: a model's embedding is read from its head, or from a file's own
 * numbers. These are gguf's float32 numbers bit for bit: a product and a sum are rounded separately, so nothing is fused. */
#ifndef SELFSPEC_ROW_OF_H
#define SELFSPEC_ROW_OF_H
#include "side_by_side.h"
#include "stored.h"

/* Where number n of an output's `count` is: in a row of its own, or in one of 16 outputs side by side. */
INLINE int64_t place_of_number(const Matrix *m, int64_t output, int64_t count, int64_t n) {
  return m->interleaved ? output / 16 * 16 * count + 16 * n + output % 16 : output * count + n;
}

/* Bytes first .. first + size - 1 of an output's row of numbers. All of these are whole words of 4 bytes. */
INLINE void words_of(const Matrix *m, int64_t output, int64_t first, int64_t size, void *to) {
  const int64_t words = bytes_of(m->kind, m->in) / 4;
  if (!m->interleaved) memcpy(to, (const char *)m->weight + output * bytes_of(m->kind, m->in) + first, size);
  else
    for (int64_t w = 0; w < size / 4; w++)
      memcpy((char *)to + 4 * w, (const char *)m->weight + 4 * place_of_number(m, output, words, first / 4 + w), 4);
}

INLINE float integer_at(const Matrix *m, const void *numbers, int64_t at) {
  return m->scales == SIGNED ? ((const int8_t *)numbers)[at] : ((const uint8_t *)numbers)[at];
}

/* The scale of a group and, where there are offsets, its offset. */
INLINE void factors_of(const Matrix *m, int64_t output, int64_t group, float *scale, float *offset) {
  const int64_t at = place_of_number(m, output, m->in / m->group, group), each = m->offsets ? 2 : 1;
  const int64_t blocks = m->in / BLOCK_INPUTS * each, block = group * m->group / BLOCK_INPUTS * each;
  if (m->blocks) {
    *scale = integer_at(m, m->groups, at) * one_float16(m->blocks + place_of_number(m, output, blocks, block));
    if (m->offsets) *offset = -(integer_at(m, m->offsets, at) * one_float16(m->blocks + place_of_number(m, output, blocks, block + 1)));
    return;
  }
  *scale = m->scales == HALVES ? one_float16((const uint16_t *)m->groups + at) : ((const float *)m->groups)[at];
  if (m->offsets) *offset = ((const float *)m->offsets)[at];
}

/* 64 numbers of a kind in groups, from their bytes. */
INLINE void numbers_of(int64_t kind, const uint8_t *bytes, uint8_t *q) {
  if (kind == BYTES) memcpy(q, bytes, 64);
  else
    for (int i = 0; i < 32; i++) q[i] = bytes[i] & 15, q[32 + i] = bytes[i] >> 4;
  if (kind == SIXES)
    for (int i = 0; i < 64; i++) q[i] = (uint8_t)(q[i] | (bytes[32 + i % 16] >> 2 * (i / 16) & 3) << 4);
}

static void row_in_groups(const Matrix *m, int64_t output, float *y) {
  const int64_t size = min(64, bytes_of(m->kind, 64)), step = min(m->group, 64);
  const float factor = m->scale ? m->scale[output] : 1;
  for (int64_t begin = 0; begin < m->in; begin += 64) {
    uint8_t bytes[64], q[64];
    words_of(m, output, begin / 64 * size, size, bytes);
    numbers_of(m->kind, bytes, q);
    for (int64_t i = 0; i < 64; i += step) {
      float scale, offset = 0;
      factors_of(m, output, (begin + i) / m->group, &scale, &offset);
      for (int64_t k = i; k < i + step; k++)
        y[begin + k] = (m->offsets ? q[k] * scale + offset : (float)(q[k] - m->zero) * scale) * factor;
    }
  }
}

/* Numbers of 8 bits as integer products take them. */
static void row_of_bytes(const Matrix *m, int64_t output, float *y) {
  for (int64_t begin = 0; begin < m->in; begin += 64) {
    uint8_t bytes[64];
    words_of(m, output, begin, 64, bytes);
    for (int64_t k = 0; k < 64; k++) y[begin + k] = (int8_t)(bytes[k] ^ 128) * m->scale[output];
  }
}

/* y: float32 [in]. */
static void row_of(const Matrix *m, int64_t output, float *y) {
  if (is_grouped(m)) row_in_groups(m, output, y);
  else if (m->interleaved == IN_ROWS) /* floats have one numbering here and in files */
    widen((int)m->kind, (const uint8_t *)m->weight + output * bytes_of(m->kind, m->in), m->in, y);
  else if (m->interleaved && m->kind == INT8) row_of_bytes(m, output, y);
  else side_row(m, output, y);
}
#endif
