/* Float vectors as wide as the target processor's, with one set of operations for all widths.
 *
 * The compiler must not fuse multiplications with additions (-ffp-contract=off): it might do so in one copy of a loop and not in
 * another, and a row's result would then depend on which other rows are in the batch. Only `multiply_add` fuses.
 */
#ifndef SELFSPEC_VECTORS_H
#define SELFSPEC_VECTORS_H
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
#define MANY_REGISTERS 1 /* 32 vector registers, not 16 */
#else
#define MANY_REGISTERS 0
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef float vf_memory __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t vh_memory __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t vb_memory __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef float v4 __attribute__((vector_size(16)));
typedef float v4_memory __attribute__((vector_size(16), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline, unused))
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#define UNROLL16 _Pragma("unroll")
#define ROLLED _Pragma("clang loop unroll(disable)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#define UNROLL16 _Pragma("GCC unroll 16")
#define ROLLED _Pragma("GCC unroll 1")
#endif

INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE vf load(const float *p) { return *(const vf_memory *)p; }
INLINE void store(float *p, vf v) { *(vf_memory *)p = v; }
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf choose(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }

/* Round to the nearest bfloat16, ties to even. NaN stays NaN. */
INLINE uint16_t to_bfloat16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded);
}

/* The same for LANES numbers: each lane's lower 16 bits are the bfloat16. */
INLINE vu to_bfloat16_lanes(vf x) {
  vu bits = (vu)x, rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  vu is_nan = (vu)((vi)(bits & 0x7fffffffu) > 0x7f800000);
  return ((bits >> 16 | 0x40u) & is_nan) | (rounded & ~is_nan);
}

/* a * b + c, rounded once where the processor has fused multiply-add, else twice; vectors and scalars round alike. */
#if defined(__AVX512F__)
INLINE vf multiply_add(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE float multiply_add_1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#elif defined(__AVX2__) && defined(__FMA__)
INLINE vf multiply_add(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE float multiply_add_1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#elif defined(__ARM_NEON) && defined(__aarch64__)
INLINE vf multiply_add(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE float multiply_add_1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
INLINE vf multiply_add(vf a, vf b, vf c) { return a * b + c; }
INLINE float multiply_add_1(float a, float b, float c) { return a * b + c; }
#endif

/* Load LANES weights stored as float32, bfloat16 (the upper half of a float32), float16 or int8, and convert them to float32
 * without rounding. Intrinsics, because compilers vectorise these conversions badly. */
INLINE vf load_float32(const float *p) { return load(p); }
#if defined(__AVX512F__)
INLINE vf load_bfloat16(const uint16_t *p) {
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16);
}
INLINE vf load_float16(const uint16_t *p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
INLINE vf load_int8(const int8_t *p) { return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p))); }
#elif defined(__AVX2__)
INLINE vf load_bfloat16(const uint16_t *p) {
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16);
}
INLINE vf load_float16(const uint16_t *p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const void *)p)); }
INLINE vf load_int8(const int8_t *p) { return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p))); }
#else
INLINE vf load_bfloat16(const uint16_t *p) { return (vf)(__builtin_convertvector(*(const vh_memory *)p, vu) << 16); }
INLINE vf load_int8(const int8_t *p) { return __builtin_convertvector(__builtin_convertvector(*(const vb_memory *)p, vi), vf); }
#if defined(__ARM_NEON) && defined(__aarch64__)
INLINE vf load_float16(const uint16_t *p) { return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
#else
INLINE vf load_float16(const uint16_t *p) {
  vu h = __builtin_convertvector(*(const vh_memory *)p, vu), magnitude = h & 0x7fff;
  vf small = __builtin_convertvector((vi)magnitude, vf) * 0x1p-24f; /* subnormal: below 2^-14, exponent 0 */
  vu normal = (magnitude << 13) + (112u << 23);
  normal += (vu)(magnitude > 0x7bff) & (112u << 23); /* infinity and NaN get float32's largest exponent */
  vf value = choose((vi)(magnitude < 0x400), small, (vf)normal);
  return (vf)((vu)value | (h & 0x8000) << 16);
}
#endif
#endif

/* LANES unsigned bytes as integers from 0 to 255. */
#if defined(__AVX512F__)
INLINE vi load_bytes(const uint8_t *p) { return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p)); }
#elif defined(__AVX2__)
INLINE vi load_bytes(const uint8_t *p) { return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p)); }
#else
typedef uint8_t vub_memory __attribute__((vector_size(LANES), aligned(1), may_alias));
INLINE vi load_bytes(const uint8_t *p) { return __builtin_convertvector(*(const vub_memory *)p, vi); }
#endif

/* Round to the nearest integers, ties to even. Magnitudes must be below 2^31. */
INLINE vi nearest(vf v) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX2__)
  return (vi)_mm256_cvtps_epi32((__m256)v);
#elif defined(__SSE2__)
  return (vi)_mm_cvtps_epi32((__m128)v);
#else
  vi q;
  for (int i = 0; i < LANES; i++) q[i] = (int32_t)rintf(v[i]);
  return q;
#endif
}

INLINE vi larger_integers(vi a, vi b) {
#if defined(__AVX512F__)
  return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
  vi larger = a > b;
  return (a & larger) | (b & ~larger);
#endif
}

INLINE int32_t largest_integer(vi v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)v);
#elif defined(__AVX2__)
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
#else
  int32_t top = v[0];
  for (int i = 1; i < LANES; i++) top = v[i] > top ? v[i] : top;
  return top;
#endif
}

/* Store the lower 16 bits of each integer. */
INLINE void store_halves(uint16_t *p, vu v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((void *)p, _mm512_cvtepi32_epi16((__m512i)v));
#else
  for (int i = 0; i < LANES; i++) p[i] = (uint16_t)v[i];
#endif
}

INLINE int32_t sum_integers(vi v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#elif defined(__AVX2__)
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
#else
  int32_t total = 0;
  for (int i = 0; i < LANES; i++) total += v[i];
  return total;
#endif
}

/* Scalar versions of the loads above. */
INLINE float of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
INLINE float one_float32(const float *p) { return *p; }
INLINE float one_bfloat16(const uint16_t *p) { return of_bits((uint32_t)*p << 16); }
INLINE float one_float16(const uint16_t *p) {
  uint32_t sign = (*p & 0x8000u) << 16, magnitude = *p & 0x7fffu;
  if (magnitude < 0x400) return sign ? -(magnitude * 0x1p-24f) : magnitude * 0x1p-24f;
  return of_bits(sign | ((magnitude << 13) + ((magnitude > 0x7bff ? 224u : 112u) << 23)));
}
INLINE float one_int8(const int8_t *p) { return *p; }

/* The largest magnitude of a row; NaN or infinity if one of its numbers is that. As integers without the sign, magnitudes are in the same
 * order, and infinity and NaN come last. */
INLINE float peak_of(const float *x, int64_t in) {
  vi tops = {0}, others = {0};
  int64_t i = 0;
  for (; i + 2 * LANES <= in; i += 2 * LANES) {
    tops = larger_integers((vi)load(x + i) & 0x7fffffff, tops);
    others = larger_integers((vi)load(x + i + LANES) & 0x7fffffff, others);
  }
  int32_t top = largest_integer(larger_integers(tops, others));
  for (; i < in; i++) {
    int32_t bits;
    memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;
    top = bits > top ? bits : top;
  }
  return of_bits((uint32_t)top);
}

/* y[0 .. 3] = the sums over lanes of four vectors. */
INLINE void sum_4(vf a, vf b, vf c, vf d, float *y) {
#if defined(__AVX512F__)
  __m512 ab = _mm512_unpacklo_ps((__m512)a, (__m512)b) + _mm512_unpackhi_ps((__m512)a, (__m512)b);
  __m512 cd = _mm512_unpacklo_ps((__m512)c, (__m512)d) + _mm512_unpackhi_ps((__m512)c, (__m512)d);
  __m512d low = _mm512_unpacklo_pd((__m512d)ab, (__m512d)cd), high = _mm512_unpackhi_pd((__m512d)ab, (__m512d)cd);
  __m512 all = (__m512)low + (__m512)high;
  __m256 half = _mm512_castps512_ps256(all) + (__m256)_mm512_extractf64x4_pd((__m512d)all, 1);
  _mm_storeu_ps(y, _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
#elif defined(__AVX2__)
  __m256 all = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
  _mm_storeu_ps(y, _mm256_castps256_ps128(all) + _mm256_extractf128_ps(all, 1));
#elif defined(__SSE2__)
  __m128 ab = (__m128)_mm_unpacklo_ps((__m128)a, (__m128)b) + (__m128)_mm_unpackhi_ps((__m128)a, (__m128)b);
  __m128 cd = (__m128)_mm_unpacklo_ps((__m128)c, (__m128)d) + (__m128)_mm_unpackhi_ps((__m128)c, (__m128)d);
  _mm_storeu_ps(y, _mm_movelh_ps(ab, cd) + _mm_movehl_ps(cd, ab));
#elif defined(__ARM_NEON) && defined(__aarch64__)
  vst1q_f32(y, vpaddq_f32(vpaddq_f32((float32x4_t)a, (float32x4_t)b), vpaddq_f32((float32x4_t)c, (float32x4_t)d)));
#else
  for (int k = 0; k < 4; k++) {
    vf v = k == 0 ? a : k == 1 ? b : k == 2 ? c : d;
    y[k] = (v[0] + v[2]) + (v[1] + v[3]);
  }
#endif
}
INLINE float sum(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#elif LANES == 8
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

/* e^x to within 2 ULP. 0 for x below -87; x above 88 counts as 88; NaN stays NaN. */
INLINE vf exponential(vf x) {
  vi small = x < -87.0f;
  x = choose(small, splat(-87.0f), choose(x > 88.0f, splat(88.0f), x));
  vf magic = splat(12582912.0f), n = multiply_add(x, splat(1.44269504f), magic) - magic;
  vf r = multiply_add(n, splat(2.12194440e-4f), multiply_add(n, splat(-0.693359375f), x));
  vf p = splat(1.9875691500e-4f);
  p = multiply_add(p, r, splat(1.3981999507e-3f));
  p = multiply_add(p, r, splat(8.3334519073e-3f));
  p = multiply_add(p, r, splat(4.1665795894e-2f));
  p = multiply_add(p, r, splat(1.6666665459e-1f));
  p = multiply_add(p, r, splat(5.0000001201e-1f));
  p = multiply_add(p * r, r, r) + 1.0f;
  vu power = (vu)(__builtin_convertvector(n, vi) + 127) << 23;
  return (vf)((vi)(p * (vf)power) & ~small);
}
#endif
