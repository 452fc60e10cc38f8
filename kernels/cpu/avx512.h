// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CPU_AVX512_H_
#define KVTIER_KERNELS_CPU_AVX512_H_

#include <immintrin.h>

#include <cstdint>
#include <cstring>

// Internal to kernels/cpu/*_avx512.cc: pieces that they share. Always inlined and of internal
// linkage: see attend.h.

#define KVTIER_AVX512_INLINE [[gnu::always_inline]] static inline

namespace kvtier::kernels::cpu {

KVTIER_AVX512_INLINE int32_t LoadInt32(const void* data) {
  int32_t value = 0;
  std::memcpy(&value, data, sizeof(value));
  return value;
}

KVTIER_AVX512_INLINE __m512 DotBf16(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// Stores 32 BF16 numbers, `low` first, rounded to nearest even.
KVTIER_AVX512_INLINE void StoreBf16(uint16_t* target, __m512 high, __m512 low) {
  _mm512_storeu_si512(target, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

KVTIER_AVX512_INLINE __m512 RoundToBf16(__m512 x) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
}

// The 16 e2m1 values in BF16, twice: bit 4 of an index does not matter.
KVTIER_AVX512_INLINE __m512i E2m1Bf16Table() {
  const __m256i values = _mm256_setr_epi16(
      0, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, static_cast<int16_t>(0x8000),
      static_cast<int16_t>(0xBF00), static_cast<int16_t>(0xBF80), static_cast<int16_t>(0xBFC0),
      static_cast<int16_t>(0xC000), static_cast<int16_t>(0xC040), static_cast<int16_t>(0xC080),
      static_cast<int16_t>(0xC0C0));
  return _mm512_broadcast_i64x4(values);
}

// The 16 e2m1 values times 2 in INT16, twice.
KVTIER_AVX512_INLINE __m512i E2m1Int16Table() {
  return _mm512_broadcast_i64x4(
      _mm256_setr_epi16(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
}

KVTIER_AVX512_INLINE uint32_t MaxByte(__m512i x) {
  const __m256i y = _mm256_max_epu8(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
  __m128i z = _mm_max_epu8(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
  z = _mm_max_epu8(z, _mm_srli_epi16(z, 8));
  // The one horizontal instruction finds a minimum of words.
  const __m128i least =
      _mm_minpos_epu16(_mm_sub_epi16(_mm_set1_epi16(255), _mm_and_si128(z, _mm_set1_epi16(255))));
  return 255U - (static_cast<uint32_t>(_mm_cvtsi128_si32(least)) & 0xFFU);
}

// 2^exponent for a normal result.
KVTIER_AVX512_INLINE float Power2(int exponent) {
  const int bits = (127 + exponent) << 23;
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Scale bytes (0x00..0x7E) as e4m3 / 256: as FP16 bits, the byte has 8 less in the exponent bias.
KVTIER_AVX512_INLINE __m512 ScalesToFloat(__m128i bytes) {
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 7));
}

// 16 signed E4M3 bytes. Exact; the two NaN bytes become NaN.
KVTIER_AVX512_INLINE __m512 Fp8ToFloat(__m128i bytes) {
  const __m256i magnitude_mask = _mm256_set1_epi16(0x7F);
  const __m256i words = _mm256_cvtepu8_epi16(bytes);
  const __m256i magnitude = _mm256_and_si256(words, magnitude_mask);
  const __m256i half =
      _mm256_or_si256(_mm256_slli_epi16(magnitude, 7),
                      _mm256_slli_epi16(_mm256_andnot_si256(magnitude_mask, words), 8));
  const __m512 value = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0F));
  const __mmask16 nan = _mm256_cmpeq_epi16_mask(magnitude, magnitude_mask);
  return _mm512_mask_mov_ps(value, nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000)));
}

// EncodeE4m3Scale of values >= 0 without NaN.
KVTIER_AVX512_INLINE __m512i EncodeScale(__m512 s) {
  const __m512 shift = _mm512_set1_ps(0x1p14F);
  const __m512i subnormal =
      _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(s, shift)), _mm512_castps_si512(shift));
  const __m512i bits = _mm512_castps_si512(s);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(
      _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFFF)), odd), 20);
  const __m512i normal = _mm512_sub_epi32(rounded, _mm512_set1_epi32((127 - 7) << 3));
  const __mmask16 small = _mm512_cmp_ps_mask(s, _mm512_set1_ps(0x1p-6F), _CMP_LT_OQ);
  return _mm512_min_epi32(_mm512_mask_mov_epi32(normal, small, subnormal), _mm512_set1_epi32(0x7E));
}

// e4m3(scale) * g for scale bytes in 32-bit lanes.
KVTIER_AVX512_INLINE __m512 StepOf(__m512i scale, float g) {
  return _mm512_mul_ps(ScalesToFloat(_mm512_cvtepi32_epi8(scale)),
                       _mm512_mul_ps(_mm512_set1_ps(g), _mm512_set1_ps(256.0F)));
}

// 8 tokens of a 16-dim block of V lie in 64 bytes, see FORMAT.md 2.2. For 4 of them, a b c d: the
// byte index that brings bytes k of a, b, c, d into words 4k .. 4k + 3. Words hold the byte twice.
KVTIER_AVX512_INLINE __m512i VQuadIndex(bool odd_block, bool second_quad) {
  const auto base = static_cast<int16_t>(second_quad ? 0x2020 : 0);
  const auto ab = static_cast<int16_t>(odd_block ? 0x1010 : 0);
  const auto cd = static_cast<int16_t>(odd_block ? 0 : 0x1010);
  const __m512i offsets = _mm512_set1_epi64(static_cast<int64_t>(
      static_cast<uint64_t>(ab) | (static_cast<uint64_t>(ab) + 0x0808U) << 16 |
      static_cast<uint64_t>(cd) << 32 | (static_cast<uint64_t>(cd) + 0x0808U) << 48));
  const __m512i k = _mm512_setr_epi64(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303,
                                      0x0404040404040404, 0x0505050505050505, 0x0606060606060606,
                                      0x0707070707070707);
  return _mm512_add_epi8(_mm512_add_epi8(offsets, k), _mm512_set1_epi16(base));
}

// 2^x, relative error below 3e-7; -inf -> 0, NaN -> NaN. No overflow check: for softmax.
KVTIER_AVX512_INLINE __m512 Exp2(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // Without -inf - -inf: for a whole of -inf any finite rest will do.
  const __m512 rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 y = _mm512_set1_ps(0x1.5ec866p-10F);
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0x1.3cbf60p-7F));
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0x1.c6afeep-5F));
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0x1.ebfa4cp-3F));
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0x1.62e430p-1F));
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(1.0F));
  return _mm512_scalef_ps(y, whole);
}

KVTIER_AVX512_INLINE void Transpose16(__m512 r[16]) {
  __m512 t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  // r[4q + c]: column c of each 4x4 square of rows 4q .. 4q + 3.
  for (int q = 0; q < 16; q += 4) {
    r[q] = _mm512_shuffle_ps(t[q], t[q + 2], 0x44);
    r[q + 1] = _mm512_shuffle_ps(t[q], t[q + 2], 0xEE);
    r[q + 2] = _mm512_shuffle_ps(t[q + 1], t[q + 3], 0x44);
    r[q + 3] = _mm512_shuffle_ps(t[q + 1], t[q + 3], 0xEE);
  }
  for (int c = 0; c < 4; ++c) {
    const __m512 a = _mm512_shuffle_f32x4(r[c], r[c + 4], 0x88);       // lanes 0 2 of q 0, 1
    const __m512 b = _mm512_shuffle_f32x4(r[c + 8], r[c + 12], 0x88);  // lanes 0 2 of q 2, 3
    const __m512 d = _mm512_shuffle_f32x4(r[c], r[c + 4], 0xDD);       // lanes 1 3
    const __m512 e = _mm512_shuffle_f32x4(r[c + 8], r[c + 12], 0xDD);
    t[c] = _mm512_shuffle_f32x4(a, b, 0x88);
    t[c + 8] = _mm512_shuffle_f32x4(a, b, 0xDD);
    t[c + 4] = _mm512_shuffle_f32x4(d, e, 0x88);
    t[c + 12] = _mm512_shuffle_f32x4(d, e, 0xDD);
  }
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

}  // namespace kvtier::kernels::cpu

#endif  // KVTIER_KERNELS_CPU_AVX512_H_
