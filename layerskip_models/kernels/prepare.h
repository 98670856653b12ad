/* Convert rows of floats to the form a product takes: limbs for integer products, or bfloat16 splits for tiles.
 * Weights side by side take rows as they are.
 *
 * A row's numbers do not depend on the other rows; only where they are stored does.
 */
#ifndef SELFSPEC_PREPARE_H
#define SELFSPEC_PREPARE_H
#include "limb_tiles.h"
#include "side_by_side.h"
#include "splits.h"

/* The power of two that scales magnitudes up to `largest` to integers of `limbs` bytes. */
static int fixed_exponent(float largest, int limbs) {
  const double most = limbs == 3 ? 127 * 65536 + 127 * 256 + 127 : 127 * 256 + 127;
  int exponent;
  frexpf(largest, &exponent);
  exponent = 8 * limbs - 1 - exponent;
  return ldexp(largest, exponent) > most ? exponent - 1 : exponent;
}

/* How a row is scaled to integers: times `factor`, then times `rest`. Two steps, since one power of two may overflow float32. */
typedef struct {
  float factor, rest;
  float largest;
  int exponent, not_finite; /* not_finite: the row has NaN or infinity; its result is NaN */
} Scaling;

static Scaling scaling_of(const float *x, int64_t in, int limbs) {
  const float largest = peak_of(x, in);
  const int not_finite = !(largest < INFINITY), exponent = not_finite || largest == 0 ? 0 : fixed_exponent(largest, limbs);
  return (Scaling){ldexpf(1, exponent / 2), ldexpf(1, exponent - exponent / 2), largest, exponent, not_finite};
}

/* Cut 64 integers into limbs. high: NULL for two limbs. */
INLINE void cut_limbs(const vi *q, int8_t *low, int8_t *middle, int8_t *high) {
#if defined(__AVX512F__)
  const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0); /* undoes the packing's order */
  const __m512i word = _mm512_set1_epi32(0xffff), byte = _mm512_set1_epi16(0xff), half = _mm512_set1_epi16(128);
  __m512i a = _mm512_packus_epi32(_mm512_and_si512((__m512i)q[0], word), _mm512_and_si512((__m512i)q[1], word));
  __m512i b = _mm512_packus_epi32(_mm512_and_si512((__m512i)q[2], word), _mm512_and_si512((__m512i)q[3], word));
  __m512i bytes = _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte));
  _mm512_storeu_si512(low, _mm512_permutexvar_epi32(order, bytes));
  bytes = _mm512_packus_epi16(_mm512_srli_epi16(_mm512_add_epi16(a, half), 8), _mm512_srli_epi16(_mm512_add_epi16(b, half), 8));
  _mm512_storeu_si512(middle, _mm512_permutexvar_epi32(order, bytes));
  if (!high) return;
  vi up[4];
  UNROLL for (int i = 0; i < 4; i++) up[i] = (q[i] + (128 + 128 * 256)) >> 16;
  bytes = _mm512_packs_epi16(_mm512_packs_epi32((__m512i)up[0], (__m512i)up[1]), _mm512_packs_epi32((__m512i)up[2], (__m512i)up[3]));
  _mm512_storeu_si512(high, _mm512_permutexvar_epi32(order, bytes));
#else
  for (int i = 0; i < CHUNK_INPUTS; i++) {
    int32_t number = q[i / LANES][i % LANES];
    low[i] = (int8_t)number;
    middle[i] = (int8_t)((number + 128) >> 8);
    if (high) high[i] = (int8_t)((number + 128 + 128 * 256) >> 16);
  }
#endif
}

/* Store a row's chunk for weights in groups: its limbs, and a word for each span. row: its number among `rows`. */
INLINE void put_grouped_chunk(const vi *q, const Matrix *m, int64_t rows, int64_t row, char *chunk) {
  const int spans = spans_of_chunk(m);
  int32_t quarters[4];
  UNROLL for (int k = 0; k < 4; k++) {
    vi all = {0};
    UNROLL for (int i = 0; i < 16 / LANES; i++) all += q[k * (16 / LANES) + i];
    quarters[k] = sum_integers(all);
  }
  for (int span = 0; span < spans; span++) {
    const int32_t sum = spans == 4 ? quarters[span] : quarters[2 * span] + quarters[2 * span + 1];
    const int32_t correction = -(int32_t)m->zero * sum;
    const float number = (float)sum;
    memcpy(chunk + rows * GROUPED_LIMBS * CHUNK_INPUTS + 4 * (span * rows + row), m->offsets ? (const void *)&number : &correction, 4);
  }
#if PAIRS
  const char numbers[16] = {0, 1, 8, 9, 4, 5, 12, 13}; /* the lower halves of a quad's first, third, second and fourth number */
  const __m256i pick = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)numbers));
  UNROLL for (int i = 0; i < QUADS / 2; i++) {
    const __m256i two = _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *)q + i), pick);
    _mm_storel_epi64((void *)(chunk + (2 * i * rows + row) * 8), _mm256_castsi256_si128(two));
    _mm_storel_epi64((void *)(chunk + ((2 * i + 1) * rows + row) * 8), _mm256_extracti128_si256(two, 1));
  }
  return;
#endif
  int32_t high[QUADS], low[QUADS];
  cut_limbs(q, (int8_t *)low, (int8_t *)high, NULL);
  if (by_tiles(m, rows)) {
    const int width = CHUNK_INPUTS / spans;
    for (int span = 0; span < spans; span++) {
      char *to = chunk + (span * GROUPED_LIMBS * rows + row) * width;
      memcpy(to, (const char *)high + span * width, width);
      memcpy(to + rows * width, (const char *)low + span * width, width);
    }
    return;
  }
  for (int quad = 0; quad < QUADS; quad++) {
    char *to = chunk + (quad * rows + row) * 8;
    memcpy(to, high + quad, 4);
    memcpy(to + 4, low + quad, 4);
  }
}

/* Whether most of a row is so much smaller than its largest number that two limbs would lose too much: compared with the mean of
 * the others, since the largest alone may be all of a short row's mean. */
INLINE int wants_finer(const float *x, int64_t in, float largest) {
  vf total = {0};
  for (int64_t i = 0; i < in; i += LANES) total += (vf)((vi)load(x + i) & 0x7fffffff);
  return (double)largest * (in - 1) > FINER * ((double)sum(total) - largest);
}

/* Convert rows [rows, in] to limbs for weights in groups. Layout: for each chunk of 64 inputs [run of four inputs, row, limb, 4],
 * or for tiles [span, limb, row, inputs of the span], highest limb first; then [span, row]: the sum of the span's q, as a float
 * where the weights have offsets, else as an integer times -`zero`. For pairs the four q of a run take the place of its limbs: the first,
 * third, second and fourth in 16 bits each. After all chunks come each row's `Fixed`; then `Finer`, and the same layout again with the
 * remainders of the rows that it lists. A row with NaN or infinity gives NaN. */
static void to_grouped_limbs(const float *x, int64_t rows, const Matrix *m, float *scratch) {
  const int64_t in = m->in, chunks = in / CHUNK_INPUTS;
  Finer *finer = (Finer *)(scratch + rows * limbs_size(m));
  Scaling scaling[ROWS];
  int slots[ROWS]; /* a row's index among those with finer limbs, or -1 */
  finer->count = 0;
  for (int64_t r = 0; r < rows; r++) {
    scaling[r] = scaling_of(x + r * in, in, GROUPED_LIMBS);
    slots[r] = -1;
    if (scaling[r].not_finite || !wants_finer(x + r * in, in, scaling[r].largest)) continue;
    slots[r] = finer->count++;
    finer->rows[slots[r]] = (int32_t)r;
  }
  const int64_t fine = finer->count;
  char *limbs = (char *)scratch, *more = (char *)(finer + 1);
  Fixed *fixed = (Fixed *)(limbs + rows * chunks * chunk_bytes(m)), *fixed_more = (Fixed *)(more + fine * chunks * chunk_bytes(m));
  for (int64_t r = 0; r < rows; r++) {
    fixed[r] = (Fixed){scaling[r].not_finite ? (double)NAN : ldexp(1.0, -scaling[r].exponent), 0};
    if (slots[r] >= 0) fixed_more[slots[r]] = (Fixed){ldexp(1.0, -scaling[r].exponent - FINER_BITS), 0};
  }
  for (int64_t c = 0; c < chunks; c++)
    for (int64_t r = 0; r < rows; r++) {
      const float *from = x + r * in + c * CHUNK_INPUTS;
      vi q[CHUNK_INPUTS / LANES], rest[CHUNK_INPUTS / LANES];
      UNROLL16 for (int i = 0; i < CHUNK_INPUTS / LANES; i++) {
        vf number = scaling[r].not_finite ? splat(0) : load(from + i * LANES) * scaling[r].factor * scaling[r].rest;
        q[i] = nearest(number);
        rest[i] = nearest((number - __builtin_convertvector(q[i], vf)) * (float)(1 << FINER_BITS));
      }
      put_grouped_chunk(q, m, rows, r, limbs + c * rows * chunk_bytes(m));
      if (slots[r] >= 0) put_grouped_chunk(rest, m, fine, slots[r], more + c * fine * chunk_bytes(m));
    }
}

/* Convert 32 integers of -128 to 127 to bytes. */
INLINE void to_signed_bytes(const vi *q, int8_t *bytes) {
#if LANES == 8
  const __m256i a = _mm256_packs_epi32((__m256i)q[0], (__m256i)q[1]), b = _mm256_packs_epi32((__m256i)q[2], (__m256i)q[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* undoes the packing's */
  _mm256_storeu_si256((void *)bytes, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), order));
#elif LANES == 16
  UNROLL for (int i = 0; i < 2; i++) _mm_storeu_si128((void *)(bytes + 16 * i), _mm512_cvtepi32_epi8((__m512i)q[i]));
#else
  for (int i = 0; i < UNIT_INPUTS; i++) bytes[i] = (int8_t)q[i / LANES][i % LANES];
#endif
}

#define SMALLEST 0x1p-120f /* 127 divided by this fits float32 */

/* Convert rows [rows, in] to bytes, for weights in groups. 32 inputs become x * (127 / largest), rounded, and their unit is
 * largest / 127. Where the largest is below `SMALLEST` all are 0; where one is NaN or infinite they are 0, and the unit NaN, so that the
 * row gives NaN. Layout: for each chunk of 64 inputs [run of four inputs, row, 4]; then
 * [span, row]: the sum of the span's bytes times their unit where the weights have offsets, else as an integer times -`zero`; then
 * [run of 32 inputs, row]: the unit. */
static void to_bytes(const float *x, int64_t rows, const Matrix *m, float *scratch) {
  const int64_t in = m->in;
  const int spans = spans_of_chunk(m);
  char *chunk = (char *)scratch;
  for (int64_t c = 0; c < in / CHUNK_INPUTS; c++, chunk += rows * chunk_bytes(m))
    for (int64_t r = 0; r < rows; r++)
      UNROLL for (int half = 0; half < 2; half++) {
        const float *from = x + r * in + c * CHUNK_INPUTS + half * UNIT_INPUTS;
        vi tops = {0}, q[UNIT_INPUTS / LANES], sums[2] = {{0}, {0}};
        int8_t bytes[UNIT_INPUTS];
        UNROLL for (int i = 0; i < UNIT_INPUTS / LANES; i++) tops = larger_integers((vi)load(from + i * LANES) & 0x7fffffff, tops);
        const float largest = of_bits((uint32_t)largest_integer(tops));
        const int finite = largest < INFINITY, some = finite && largest >= SMALLEST;
        const float unit = !finite ? NAN : some ? largest / 127 : 0, factor = some ? 127 / largest : 0;
        UNROLL for (int i = 0; i < UNIT_INPUTS / LANES; i++) {
          q[i] = nearest(finite ? load(from + i * LANES) * factor : splat(0));
          sums[i >= 16 / LANES] += q[i];
        }
        to_signed_bytes(q, bytes);
        UNROLL for (int t = 0; t < 8; t++) memcpy(chunk + ((8 * half + t) * rows + r) * 4, bytes + 4 * t, 4);
        memcpy(chunk + rows * (CHUNK_INPUTS + 4 * spans) + 4 * (half * rows + r), &unit, 4);
        if (spans == 2) sums[0] += sums[1];
        for (int k = 0; k < spans / 2; k++) {
          const int span = half * (spans / 2) + k;
          const int32_t sum = sum_integers(sums[k]), correction = -(int32_t)m->zero * sum;
          const float number = unit * (float)sum;
          char *word = chunk + rows * CHUNK_INPUTS + 4 * (span * rows + r);
          memcpy(word, m->offsets ? (const void *)&number : &correction, 4);
        }
      }
}

/* Convert rows [rows, in] to limbs for 8-bit weights. Layout: for each chunk of 64 inputs [run of four inputs, row, limb, 4],
 * or for tiles [limb, row, 64], highest limb first. Each row's `Fixed` comes after all chunks. A row with NaN or infinity gives
 * NaN. */
static void to_limbs(const float *x, int64_t rows, const Matrix *m, float *scratch) {
  const int64_t in = m->in, chunks = in / CHUNK_INPUTS;
  const int tiles = by_tiles(m, rows);
  char *limbs = (char *)scratch;
  Fixed *fixed = (Fixed *)(limbs + rows * chunks * chunk_bytes(m));
  Scaling scaling[ROWS];
  for (int64_t r = 0; r < rows; r++) {
    scaling[r] = scaling_of(x + r * in, in, LIMBS);
    fixed[r] = (Fixed){scaling[r].not_finite ? (double)NAN : ldexp(1.0, -scaling[r].exponent), 0};
  }
  for (int64_t c = 0; c < chunks; c++) {
    char *chunk = limbs + c * rows * chunk_bytes(m);
    for (int64_t r = 0; r < rows; r++) {
      const float *from = x + r * in + c * CHUNK_INPUTS;
      vi q[CHUNK_INPUTS / LANES], total = {0};
      UNROLL16 for (int i = 0; i < CHUNK_INPUTS / LANES; i++) {
        vf number = scaling[r].not_finite ? splat(0) : load(from + i * LANES) * scaling[r].factor * scaling[r].rest;
        q[i] = nearest(number);
        total += q[i];
      }
      fixed[r].sum += sum_integers(total);
      int32_t cut[LIMBS][QUADS];
      cut_limbs(q, (int8_t *)cut[2], (int8_t *)cut[1], (int8_t *)cut[0]);
      for (int d = 0; d < LIMBS; d++)
        if (tiles) memcpy(chunk + (d * rows + r) * CHUNK_INPUTS, cut[d], CHUNK_INPUTS);
        else
          for (int t = 0; t < QUADS; t++) memcpy(chunk + 4 * ((t * rows + r) * LIMBS + d), cut[d] + t, 4);
    }
  }
}

#if TILES
/* Split rows [rows, in] into three bfloat16 numbers each, the splits, which add up to them, the largest first.
 * Layout: [in / 32, split, rows, 32]. */
static void to_splits(const float *x, int64_t rows, int64_t in, float *scratch) {
  uint16_t *halves = (uint16_t *)scratch;
  for (int64_t i = 0; i < in; i += SPLIT_INPUTS, halves += SPLITS * rows * SPLIT_INPUTS)
    for (int64_t r = 0; r < rows; r++)
      UNROLL for (int k = 0; k < SPLIT_INPUTS; k += LANES) {
        vf left = load(x + r * in + i + k);
        UNROLL for (int p = 0; p < SPLITS; p++) {
          const vu split = to_bfloat16_lanes(left);
          store_halves(halves + (p * rows + r) * SPLIT_INPUTS + k, split);
          left -= (vf)(split << 16);
        }
      }
}

#endif

/* Floats of memory for a row in the form that `outputs` takes. */
INLINE int64_t row_size(const Matrix *m) {
  return in_splits(m) ? SPLITS * m->in / 2 : as_integers(m) ? limbs_capacity(m) : m->in;
}

/* Bytes of that which are read for nearly every row: few have finer limbs. */
INLINE int64_t hot_row_bytes(const Matrix *m) {
  return in_splits(m) ? SPLITS * bytes_of(BFLOAT16, m->in) : (as_integers(m) ? limbs_size(m) : m->in) * (int64_t)sizeof(float);
}

/* Convert the rows of one group (`together`) to the form that `outputs` takes. */
INLINE void arrange(const Matrix *m, const float *x, int64_t rows, float *scratch) {
#if TILES
  if (in_splits(m)) {
    to_splits(x, rows, m->in, scratch);
    return;
  }
#endif
  if (takes_bytes(m)) to_bytes(x, rows, m, scratch);
  else if (is_grouped(m)) to_grouped_limbs(x, rows, m, scratch);
  else to_limbs(x, rows, m, scratch);
}
#endif
