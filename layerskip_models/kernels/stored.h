/* Rows of a weight as files store them, to what the other kernels multiply by. A row passes through float32 in the first cache
 * only, and comes out as PyTorch's operators would make it of gguf's own float32 numbers, bit for bit.
 *
 * Blocks of few bits are those of GGUF files: 32 inputs, or 256 for types that end in K. Source: gguf's `quants.py`. */
#ifndef SELFSPEC_STORED_H
#define SELFSPEC_STORED_H
#include "matrix.h"
#include <float.h>

/* How a file stores numbers; `STORED` in stored_rows.py. */
enum Stored { IN_FLOAT32, IN_BFLOAT16, IN_FLOAT16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, IQ4_NL };

INLINE uint16_t half_at(const uint8_t *p) {
  uint16_t bits;
  memcpy(&bits, p, 2);
  return bits;
}
INLINE float scale_at(const uint8_t *p) {
  uint16_t bits = half_at(p);
  return one_float16(&bits);
}

/* y[i] = q[i] * d, then + m. Two roundings, as in numpy. */
INLINE void scaled(const uint8_t *q, int64_t count, float d, float m, float *y) {
  for (int64_t i = 0; i < count; i += LANES)
    store(y + i, __builtin_convertvector(load_bytes(q + i), vf) * splat(d) + splat(m));
}
INLINE void signed_scaled(const int8_t *q, int64_t count, float d, float *y) {
  for (int64_t i = 0; i < count; i += LANES) store(y + i, load_int8(q + i) * splat(d));
}

/* 32 numbers of four or five bits: low ones in the low halves of the bytes. `high`: the fifth bits, or 0. */
INLINE void nibbles_of(const uint8_t *p, uint32_t high, uint8_t *q) {
  for (int i = 0; i < 16; i++) {
    q[i] = (uint8_t)((p[i] & 15) | (high >> i & 1) << 4);
    q[16 + i] = (uint8_t)(p[i] >> 4 | (high >> (16 + i) & 1) << 4);
  }
}

INLINE uint32_t word_at(const uint8_t *p) {
  uint32_t bits;
  memcpy(&bits, p, 4);
  return bits;
}

/* Scale and minimum, of six bits each, of one of the eight groups of a K block. */
INLINE void six_bits(const uint8_t *p, int group, uint8_t *scale, uint8_t *least) {
  if (group < 4) {
    *scale = p[group] & 63;
    *least = p[group + 4] & 63;
  } else {
    *scale = (uint8_t)((p[group + 4] & 15) | (p[group - 4] >> 6) << 4);
    *least = (uint8_t)(p[group + 4] >> 4 | (p[group] >> 6) << 4);
  }
}

/* 32 numbers of a group of a K block, with four bits each, and a fifth if `high` is not NULL. */
INLINE void numbers_of_k(const uint8_t *low, const uint8_t *high, int group, uint8_t *q) {
  const uint8_t *from = low + group / 2 * 32;
  for (int i = 0; i < 32; i++) {
    uint8_t four = group & 1 ? from[i] >> 4 : from[i] & 15;
    q[i] = (uint8_t)(high ? four | (high[i] >> group & 1) << 4 : four);
  }
}

/* 256 numbers in eight groups. */
INLINE void k_block(const uint8_t *p, const uint8_t *low, const uint8_t *high, float *y) {
  const float d = scale_at(p), m = scale_at(p + 2);
  for (int group = 0; group < 8; group++) {
    uint8_t scale, least, q[32];
    six_bits(p + 4, group, &scale, &least);
    numbers_of_k(low, high, group, q);
    scaled(q, 32, d * scale, -(m * least), y + 32 * group);
  }
}

/* 256 numbers of six bits, of which 32 stands for 0. */
INLINE void numbers_of_q6(const uint8_t *p, uint8_t *q) {
  const uint8_t *low = p, *high = p + 128;
  for (int half = 0; half < 2; half++)
    for (int part = 0; part < 4; part++)
      for (int i = 0; i < 32; i++) {
        uint8_t four = low[64 * half + 32 * (part & 1) + i];
        four = part < 2 ? four & 15 : four >> 4;
        q[128 * half + 32 * part + i] = (uint8_t)(four | (high[32 * half + i] >> 2 * part & 3) << 4);
      }
}

INLINE void q6_block(const uint8_t *p, float *y) {
  const int8_t *scales = (const int8_t *)p + 192;
  const float d = scale_at(p + 208);
  uint8_t q[256];
  numbers_of_q6(p, q);
  for (int i = 0; i < 256; i++) q[i] = (uint8_t)(q[i] - 32);
  for (int group = 0; group < 16; group++) signed_scaled((const int8_t *)q + 16 * group, 16, d * scales[group], y + 16 * group);
}

/* What the 16 numbers of IQ4_NL stand for, plus 128. */
static const uint8_t IQ4_NUMBERS[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
INLINE void numbers_of_iq4(const uint8_t *p, uint8_t *q) {
  nibbles_of(p, 0, q);
  for (int i = 0; i < 32; i++) q[i] = IQ4_NUMBERS[q[i]];
}

/* One row of `in` numbers as float32. */
static void widen(int kind, const uint8_t *p, int64_t in, float *y) {
  uint8_t q[32];
  int64_t i = 0;
  switch (kind) {
  case IN_FLOAT32: memcpy(y, p, in * sizeof(float)); break;
  case IN_BFLOAT16:
    for (; i + LANES <= in; i += LANES) store(y + i, load_bfloat16((const uint16_t *)(p + 2 * i)));
    for (; i < in; i++) y[i] = of_bits((uint32_t)half_at(p + 2 * i) << 16);
    break;
  case IN_FLOAT16:
    for (; i + LANES <= in; i += LANES) store(y + i, load_float16((const uint16_t *)(p + 2 * i)));
    for (; i < in; i++) y[i] = scale_at(p + 2 * i);
    break;
  case Q8_0:
    for (; i < in; i += 32, p += 34) signed_scaled((const int8_t *)p + 2, 32, scale_at(p), y + i);
    break;
  case Q4_0:
    for (; i < in; i += 32, p += 18) {
      nibbles_of(p + 2, 0, q);
      for (int k = 0; k < 32; k++) q[k] -= 8;
      signed_scaled((const int8_t *)q, 32, scale_at(p), y + i);
    }
    break;
  case Q4_1:
    for (; i < in; i += 32, p += 20) {
      nibbles_of(p + 4, 0, q);
      scaled(q, 32, scale_at(p), scale_at(p + 2), y + i);
    }
    break;
  case Q5_0:
    for (; i < in; i += 32, p += 22) {
      nibbles_of(p + 6, word_at(p + 2), q);
      for (int k = 0; k < 32; k++) q[k] -= 16;
      signed_scaled((const int8_t *)q, 32, scale_at(p), y + i);
    }
    break;
  case Q5_1:
    for (; i < in; i += 32, p += 24) {
      nibbles_of(p + 8, word_at(p + 4), q);
      scaled(q, 32, scale_at(p), scale_at(p + 2), y + i);
    }
    break;
  case Q4_K:
    for (; i < in; i += 256, p += 144) k_block(p, p + 16, NULL, y + i);
    break;
  case Q5_K:
    for (; i < in; i += 256, p += 176) k_block(p, p + 48, p + 16, y + i);
    break;
  case Q6_K:
    for (; i < in; i += 256, p += 210) q6_block(p, y + i);
    break;
  case IQ4_NL:
    for (; i < in; i += 32, p += 18) {
      numbers_of_iq4(p + 2, q);
      for (int k = 0; k < 32; k++) q[k] ^= 128;
      signed_scaled((const int8_t *)q, 32, scale_at(p), y + i);
    }
    break;
  }
}

typedef int8_t vb __attribute__((vector_size(LANES)));

/* Round a row to 8 bits: `y / scale` to the nearest integers. They are at most 127, or the row's peak was not its largest. */
INLINE void to_eight_bits(const float *y, int64_t in, float scale, int8_t *to) {
  int64_t i = 0;
  for (; i + LANES <= in; i += LANES) {
    vi q = nearest(load(y + i) / splat(scale));
#if defined(__AVX512F__)
    _mm_storeu_si128((void *)(to + i), _mm512_cvtepi32_epi8((__m512i)q));
#else
    *(vb_memory *)(to + i) = __builtin_convertvector(q, vb);
#endif
  }
  for (; i < in; i++) to[i] = (int8_t)rintf(y[i] / scale);
}

/* Rows of 8 bits with a scale each. row: float32 [in], scratch. Returns 0 if a number is NaN or infinite. */
static int eight_bit_rows(int kind, const uint8_t *from, int64_t rows, int64_t in, int64_t row_bytes, float *row, int8_t *to,
                          float *scales) {
  int finite = 1;
  for (int64_t r = 0; r < rows; r++) {
    widen(kind, from + r * row_bytes, in, row);
    const float peak = peak_of(row, in);
    if (!(peak <= FLT_MAX)) {
      finite = 0;
      continue;
    }
    scales[r] = (peak > FLT_MIN ? peak : FLT_MIN) / 127;
    to_eight_bits(row, in, scales[r], to + r * in);
  }
  return finite;
}

/* Rows of float32, or of bfloat16 if `to_kind` is that. from: where each row is in the file. row: float32 [in], scratch. Returns 0 if
 * a number is NaN or infinite. */
static int float_rows(int kind, const uint8_t *const *from, int64_t rows, int64_t in, int to_kind, float *row, void *to) {
  int finite = 1;
  for (int64_t r = 0; r < rows; r++) {
    float *y = to_kind == IN_FLOAT32 ? (float *)to + r * in : row;
    widen(kind, from[r], in, y);
    if (!(peak_of(y, in) <= FLT_MAX)) finite = 0;
    for (int64_t i = 0; to_kind == IN_BFLOAT16 && i < in; i++) ((uint16_t *)to)[r * in + i] = to_bfloat16(y[i]);
  }
  return finite;
}

/* Whether none of `count` neighbouring numbers is NaN or infinite: these have all bits of the exponent. */
static int finite_halves(const uint16_t *p, int64_t count, uint16_t exponent) {
  uint16_t found = 0;
  for (int64_t i = 0; i < count; i++) found |= (p[i] & exponent) == exponent ? 1 : 0;
  return !found;
}
static int finite_numbers(int kind, const void *p, int64_t count) {
  if (kind == IN_FLOAT32) return peak_of(p, count) <= FLT_MAX;
  return finite_halves(p, count, kind == IN_BFLOAT16 ? 0x7f80 : 0x7c00);
}

/* Where the rows of a matrix that keeps its numbers go. */
typedef struct {
  uint8_t *numbers; /* [out, in], of those with a 4 in their name [out, in / 2], with a 5 or a 6 [out, 3 in / 4] */
  void *groups;     /* [out, in / 32], float16, of Q4_K and Q5_K uint8; of Q6_K int8 [out, in / 16] */
  void *offsets;    /* [out, in / 32], of Q4_1 and Q5_1 float32, of Q4_K and Q5_K uint8; else NULL */
  uint16_t *blocks; /* [out, in / 256, 2] of Q4_K and Q5_K, [out, in / 256, 1] of Q6_K; else NULL */
} Blocks;

INLINE int is_finite_half(uint16_t bits) { return (bits & 0x7c00) != 0x7c00; }

INLINE int in_nibbles(int kind) { return kind == Q4_0 || kind == Q4_1 || kind == Q4_K; }
INLINE int in_sixes(int kind) { return kind == Q5_0 || kind == Q5_1 || kind == Q5_K || kind == Q6_K; }
/* Bytes of a row's numbers as they are kept. */
INLINE int64_t kept_bytes(int kind, int64_t in) { return in_nibbles(kind) ? in / 2 : in_sixes(kind) ? in / 4 * 3 : in; }

/* 64 numbers of at most six bits as 48 bytes (matrix.h). */
INLINE void pack_sixes(const uint8_t *q, uint8_t *chunk) {
  for (int i = 0; i < 32; i++) chunk[i] = (uint8_t)((q[i] & 15) | q[32 + i] << 4);
  for (int i = 0; i < 16; i++)
    chunk[32 + i] = (uint8_t)(q[i] >> 4 | q[16 + i] >> 4 << 2 | q[32 + i] >> 4 << 4 | q[48 + i] >> 4 << 6);
}

/* A row of K blocks, number for number. */
INLINE int k_row(int kind, const uint8_t *p, int64_t in, const Blocks *to, int64_t place) {
  const int64_t count = in / 256, bytes = kind == Q4_K ? 144 : kind == Q5_K ? 176 : 210;
  int finite = 1;
  uint8_t q[256], *numbers = to->numbers + place * kept_bytes(kind, in);
  for (int64_t b = 0; b < count; b++, p += bytes) {
    if (kind == Q4_K) memcpy(numbers + 128 * b, p + 16, 128); /* in the same order as ours */
    else {
      if (kind == Q6_K) numbers_of_q6(p, q);
      else
        for (int group = 0; group < 8; group++) numbers_of_k(p + 48, p + 16, group, q + 32 * group);
      for (int c = 0; c < 4; c++) pack_sixes(q + 64 * c, numbers + 192 * b + 48 * c);
    }
    if (kind == Q6_K) {
      memcpy((int8_t *)to->groups + place * (in / 16) + 16 * b, p + 192, 16);
      to->blocks[place * count + b] = half_at(p + 208);
      finite &= is_finite_half(half_at(p + 208));
      continue;
    }
    uint8_t *groups = (uint8_t *)to->groups + place * (in / 32) + 8 * b, *offsets = (uint8_t *)to->offsets + place * (in / 32) + 8 * b;
    for (int group = 0; group < 8; group++) six_bits(p + 4, group, groups + group, offsets + group);
    for (int k = 0; k < 2; k++) {
      to->blocks[2 * (place * count + b) + k] = half_at(p + 2 * k);
      finite &= is_finite_half(half_at(p + 2 * k));
    }
  }
  return finite;
}

/* A row of blocks of 32 inputs, number for number. in: a multiple of 64. */
INLINE int short_row(int kind, const uint8_t *p, int64_t in, const Blocks *to, int64_t place) {
  const int has_offset = kind == Q4_1 || kind == Q5_1;
  const int64_t fifth = has_offset ? 4 : 2, head = fifth + (in_sixes(kind) ? 4 : 0), bytes = head + (kind == Q8_0 ? 32 : 16);
  const int64_t count = in / 32;
  uint16_t *groups = (uint16_t *)to->groups + place * count;
  float *offsets = (float *)to->offsets + (to->offsets ? place * count : 0);
  uint8_t *numbers = to->numbers + place * kept_bytes(kind, in), q[64];
  int finite = 1;
  for (int64_t b = 0; b < count; b++, p += bytes) {
    groups[b] = half_at(p);
    finite &= is_finite_half(half_at(p));
    if (has_offset) {
      offsets[b] = scale_at(p + 2);
      finite &= is_finite_half(half_at(p + 2));
    }
    if (kind == IQ4_NL) numbers_of_iq4(p + 2, numbers + 32 * b);
    else if (kind == Q8_0)
      for (int i = 0; i < 32; i++) numbers[32 * b + i] = p[2 + i] ^ 128;
    else if (in_sixes(kind)) {
      nibbles_of(p + head, word_at(p + fifth), q + 32 * (b & 1));
      if (b & 1) pack_sixes(q, numbers + 24 * (b - 1));
    } else if (b & 1) { /* the second half of a chunk of 64 */
      const uint8_t *first = p - bytes + head, *second = p + head;
      uint8_t *chunk = numbers + 16 * (b - 1);
      for (int i = 0; i < 16; i++) {
        chunk[i] = (uint8_t)((first[i] & 15) | second[i] << 4);
        chunk[16 + i] = (uint8_t)(first[i] >> 4 | (second[i] & 0xf0));
      }
    }
  }
  return finite;
}

/* A row of Q4_0, Q4_1, Q8_0, IQ4_NL, Q4_K, Q5_K or Q6_K, number for number. in: a multiple of 64, for K blocks of 256. Returns 0 if
 * a scale or an offset is NaN or infinite. */
INLINE int in_k(int kind) { return kind == Q4_K || kind == Q5_K || kind == Q6_K; }
INLINE int block_row(int kind, const uint8_t *from, int64_t in, const Blocks *to, int64_t place) {
  return in_k(kind) ? k_row(kind, from, in, to, place) : short_row(kind, from, in, to, place);
}
#endif
