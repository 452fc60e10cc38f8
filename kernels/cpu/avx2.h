// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CPU_AVX2_H_
#define KVTIER_KERNELS_CPU_AVX2_H_

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

// Internal to kernels/cpu/*_avx2.cc: pieces that they share. Always inlined and of internal
// linkage: see attend.h.

#define KVTIER_AVX2_INLINE [[gnu::always_inline]] static inline

namespace kvtier::kernels::cpu {

// 8 scale bytes (0x00..0x7E) as e4m3: as FP16 bits, the byte has 8 less in the exponent bias.
KVTIER_AVX2_INLINE __m256 ScalesToFloat(__m128i bytes) {
  return _mm256_mul_ps(_mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 7)),
                       _mm256_set1_ps(256.0F));
}

KVTIER_AVX2_INLINE float ScaleToFloat(std::byte scale) {
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(static_cast<int>(scale) << 7))) * 256.0F;
}

// 8 signed E4M3 bytes. Exact; the two NaN bytes become NaN.
KVTIER_AVX2_INLINE __m256 Fp8ToFloat(__m128i bytes) {
  const __m128i magnitude_mask = _mm_set1_epi16(0x7F);
  const __m128i words = _mm_cvtepu8_epi16(bytes);
  const __m128i magnitude = _mm_and_si128(words, magnitude_mask);
  const __m128i half = _mm_or_si128(_mm_slli_epi16(magnitude, 7),
                                    _mm_slli_epi16(_mm_andnot_si128(magnitude_mask, words), 8));
  const __m256 value = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0F));
  const __m256i nan = _mm256_cvtepi16_epi32(_mm_cmpeq_epi16(magnitude, magnitude_mask));
  return _mm256_blendv_ps(value, _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000)),
                          _mm256_castsi256_ps(nan));
}

KVTIER_AVX2_INLINE __m256 Bf16ToFloat8(__m128i words) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

// The 16 values of an 8-byte run under the scale `step`. Exact: the table holds doubled values.
struct Vector16 {
  __m256 low;
  __m256 high;
};
KVTIER_AVX2_INLINE Vector16 DequantizeRun(const std::byte* run, float step) {
  const __m128i doubled = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(run));
  const __m128i mask = _mm_set1_epi8(15);
  const __m128i codes =
      _mm_unpacklo_epi8(_mm_and_si128(bytes, mask), _mm_and_si128(_mm_srli_epi16(bytes, 4), mask));
  const __m128i values = _mm_shuffle_epi8(doubled, codes);
  const __m256 half = _mm256_set1_ps(step * 0.5F);
  return {_mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(values)), half),
          _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(values, 8))), half)};
}

// EncodeE4m3Scale of values >= 0 without NaN, in 32-bit lanes.
KVTIER_AVX2_INLINE __m256i EncodeScale(__m256 s) {
  const __m256 shift = _mm256_set1_ps(0x1p14F);
  const __m256i subnormal =
      _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(s, shift)), _mm256_castps_si256(shift));
  const __m256i bits = _mm256_castps_si256(s);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 20), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFFF)), odd), 20);
  const __m256i normal = _mm256_sub_epi32(rounded, _mm256_set1_epi32((127 - 7) << 3));
  const __m256i small = _mm256_castps_si256(_mm256_cmp_ps(s, _mm256_set1_ps(0x1p-6F), _CMP_LT_OQ));
  return _mm256_min_epi32(_mm256_blendv_epi8(normal, subnormal, small), _mm256_set1_epi32(0x7E));
}

// e4m3(scale) * g for scale bytes in 32-bit lanes.
KVTIER_AVX2_INLINE __m256 StepOf(__m256i scale, float g) {
  const __m128i words =
      _mm_packus_epi32(_mm256_castsi256_si128(scale), _mm256_extracti128_si256(scale, 1));
  return _mm256_mul_ps(ScalesToFloat(_mm_packus_epi16(words, words)), _mm256_set1_ps(g));
}

// The low 16 bits of 32-bit lanes.
KVTIER_AVX2_INLINE __m128i PackWords(__m256i x) {
  return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}

KVTIER_AVX2_INLINE void Transpose8(__m256 r[8]) {
  __m256 t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int q = 0; q < 8; q += 4) {
    r[q] = _mm256_shuffle_ps(t[q], t[q + 2], 0x44);
    r[q + 1] = _mm256_shuffle_ps(t[q], t[q + 2], 0xEE);
    r[q + 2] = _mm256_shuffle_ps(t[q + 1], t[q + 3], 0x44);
    r[q + 3] = _mm256_shuffle_ps(t[q + 1], t[q + 3], 0xEE);
  }
  for (int c = 0; c < 4; ++c) {
    t[c] = _mm256_permute2f128_ps(r[c], r[c + 4], 0x20);
    t[c + 4] = _mm256_permute2f128_ps(r[c], r[c + 4], 0x31);
  }
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}

}  // namespace kvtier::kernels::cpu

#endif  // KVTIER_KERNELS_CPU_AVX2_H_
