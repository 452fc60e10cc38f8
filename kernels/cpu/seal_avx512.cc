// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/avx512.h"
#include "kernels/cpu/kernel_table.h"

namespace kvtier::kernels::cpu {
namespace {

constexpr uint32_t kGroupTokens = 16;
constexpr uint32_t kVectorsMax = 32;

// A register holds one or two dims of 16 tokens, so that everything about a vector (its maximum,
// scale, thresholds, errors in index order) is lane-wise. Values that BF16 holds are encoded as
// 16-bit words, two dims a register: every threshold is a BF16 number, and magnitudes compare like
// their bits. FP16 sources, 4-over-6 and vectors with a NaN take FP32 lanes.

// FP32 -> nearest BF16 as FP32 (NaN stays NaN). Not the BF16 instruction: that one flushes
// denormals.
KVTIER_AVX512_INLINE __m512 RoundToBf16(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x00400000));
  return _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(-0x10000)));
}

// 16 dims of a row, as the format quantizes them.
template <RowType kType, bool kTransform>
KVTIER_AVX512_INLINE __m512 LoadSource(const SealSide& side, uint32_t token, uint32_t dim) {
  const std::byte* row = side.rows[token];
  __m512 x;
  if constexpr (kType == RowType::kBf16) {
    x = _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + dim * 2))),
        16));
  } else if constexpr (kType == RowType::kFp16) {
    x = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + dim * 2)));
  } else if constexpr (kType == RowType::kFp32) {
    x = _mm512_loadu_ps(row + dim * 4);
  } else {
    x = _mm512_mul_ps(Fp8ToFloat(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + dim))),
                      _mm512_set1_ps(side.row_scale));
  }
  if constexpr (kTransform) {
    x = _mm512_mul_ps(_mm512_sub_ps(x, _mm512_loadu_ps(side.mean + dim)),
                      _mm512_loadu_ps(side.inverse_smooth + dim));
  }
  constexpr bool kExact = kType == RowType::kBf16 || kType == RowType::kFp16;
  return kExact && !kTransform ? x : RoundToBf16(x);
}

// Codes of the vectors in 16 lanes: dims 0..7 in `low`, 8..15 in `high`, four bits each.
struct Candidate {
  __m512i scale;
  __m512i low;
  __m512i high;
};

// Magnitudes are compared as integers, with thresholds that are the least value of their code.
KVTIER_AVX512_INLINE Candidate EncodeWithScale(const __m512 x[16], __m512 s, float g) {
  Candidate result{};
  result.scale = EncodeScale(s);
  const __m512 step = StepOf(result.scale, g);
  const auto at = [&](float t, int above) {
    return _mm512_add_epi32(_mm512_castps_si512(_mm512_mul_ps(step, _mm512_set1_ps(t))),
                            _mm512_set1_epi32(above));
  };
  const __m512i u1 = at(0.25F, 1);
  const __m512i u2 = at(0.75F, 0);
  const __m512i u3 = at(1.25F, 1);
  const __m512i u4 = at(1.75F, 0);
  const __m512i u5 = at(2.5F, 1);
  const __m512i u6 = at(3.5F, 0);
  const __m512i u7 = at(5.0F, 1);
  // Canonical: all codes zero under a zero scale.
  const __mmask16 coded = _mm512_test_epi32_mask(result.scale, result.scale);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    const int shift = i % 8 * 4;
    const auto bit = [&](uint32_t value) {
      return _mm512_set1_epi32(static_cast<int>(value << shift));
    };
    const __m512i bits = _mm512_castps_si512(x[i]);
    const __m512i a = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
    const __mmask16 four = _mm512_mask_cmpge_epi32_mask(coded, a, u4);
    const __mmask16 two =
        _mm512_mask_cmpge_epi32_mask(coded, a, _mm512_mask_blend_epi32(four, u2, u6));
    const __m512i last = _mm512_mask_blend_epi32(four, _mm512_mask_blend_epi32(two, u1, u3),
                                                 _mm512_mask_blend_epi32(two, u5, u7));
    const __mmask16 one = _mm512_mask_cmpge_epi32_mask(coded, a, last);
    __m512i& codes = i < 8 ? result.low : result.high;
    codes = _mm512_mask_or_epi32(codes, four, codes, bit(4));
    codes = _mm512_mask_or_epi32(codes, two, codes, bit(2));
    codes = _mm512_mask_or_epi32(codes, one, codes, bit(1));
    // codes | (sign at bit 3 of the nibble)
    codes = _mm512_ternarylogic_epi32(codes, _mm512_srli_epi32(bits, 28 - shift), bit(8), 0xF8);
  }
  result.low = _mm512_maskz_mov_epi32(coded, result.low);
  result.high = _mm512_maskz_mov_epi32(coded, result.high);
  return result;
}

// NaN elements: code 0x7 and no part in the maximum. Rare.
[[gnu::noinline]] void FixNan(const __m512 x[16], Candidate* candidate) {
  const __mmask16 coded = _mm512_test_epi32_mask(candidate->scale, candidate->scale);
  for (int i = 0; i < 16; ++i) {
    const int shift = i % 8 * 4;
    const auto nan = static_cast<__mmask16>(coded & _mm512_cmp_ps_mask(x[i], x[i], _CMP_UNORD_Q));
    __m512i* codes = i < 8 ? &candidate->low : &candidate->high;
    const __m512i others =
        _mm512_andnot_si512(_mm512_set1_epi32(static_cast<int>(0xFU << shift)), *codes);
    *codes = _mm512_mask_or_epi32(*codes, nan, others,
                                  _mm512_set1_epi32(static_cast<int>(0x7U << shift)));
  }
}

[[gnu::noinline]] __m512i MaximumWithoutNan(const __m512 x[16]) {
  __m512i largest = _mm512_setzero_si512();
  for (int i = 0; i < 16; ++i) {
    const __m512i a = _mm512_and_si512(_mm512_castps_si512(x[i]), _mm512_set1_epi32(0x7FFFFFFF));
    const __mmask16 number = _mm512_cmp_ps_mask(x[i], x[i], _CMP_ORD_Q);
    largest = _mm512_mask_max_epi32(largest, number, largest, a);
  }
  return largest;
}

// Sum of squared errors, in FP32 and in index order.
KVTIER_AVX512_INLINE __m512 SquaredError(const __m512 x[16], const Candidate& candidate, float g) {
  const __m512 values = _mm512_setr_ps(0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F, -0.0F, -0.5F,
                                       -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F);
  const __m512 step = StepOf(candidate.scale, g);
  __m512 sum = _mm512_setzero_ps();
  for (int i = 0; i < 16; ++i) {
    // A permute reads the low four bits of an index.
    const __m512i code =
        _mm512_srl_epi32(i < 8 ? candidate.low : candidate.high, _mm_cvtsi32_si128(i % 8 * 4));
    const __m512 value = _mm512_mul_ps(_mm512_permutexvar_ps(code, values), step);
    const __m512 error = _mm512_sub_ps(x[i], value);
    sum = _mm512_add_ps(sum, _mm512_mul_ps(error, error));
  }
  return sum;
}

// 16 dims of a row as BF16 bits.
template <RowType kType, bool kTransform>
KVTIER_AVX512_INLINE __m256i LoadBf16(const SealSide& side, uint32_t token, uint32_t dim) {
  if constexpr (kType == RowType::kBf16 && !kTransform) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(side.rows[token] + dim * 2));
  } else {
    const __m512 x = LoadSource<kType, kTransform>(side, token, dim);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(x), 16));
  }
}

// In: register i holds tokens 2i, 2i + 1. Out: register r = 0..3 holds dims r and 4 + r of 16
// tokens, register 4 + r holds dims 8 + r and 12 + r. Each stage exchanges one bit of the register
// number (of the token) for one of the lane number (of the dim).
KVTIER_AVX512_INLINE void TransposeWords(__m512i x[8]) {
  alignas(64) static constexpr uint16_t kEven[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20,
                                                     22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42,
                                                     44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
  alignas(64) static constexpr uint16_t kLast[32] = {0,  4,  8,  12, 16, 20, 24, 28, 32, 36, 40,
                                                     44, 48, 52, 56, 60, 1,  5,  9,  13, 17, 21,
                                                     25, 29, 33, 37, 41, 45, 49, 53, 57, 61};
  const __m512i even = _mm512_load_si512(kEven);
  const __m512i last = _mm512_load_si512(kLast);
  const __m512i odd = _mm512_add_epi16(even, _mm512_set1_epi16(1));
  const __m512i last_high = _mm512_add_epi16(last, _mm512_set1_epi16(2));
  __m512i y[8];
  for (int t = 0; t < 4; ++t) {  // Token bit 1 for dim bit 0.
    y[2 * t] = _mm512_permutex2var_epi16(x[2 * t], even, x[2 * t + 1]);
    y[2 * t + 1] = _mm512_permutex2var_epi16(x[2 * t], odd, x[2 * t + 1]);
  }
  for (int t = 0; t < 2; ++t) {  // Token bit 2 for dim bit 1.
    for (int d0 = 0; d0 < 2; ++d0) {
      x[4 * t + d0] = _mm512_permutex2var_epi16(y[4 * t + d0], even, y[4 * t + 2 + d0]);
      x[4 * t + 2 + d0] = _mm512_permutex2var_epi16(y[4 * t + d0], odd, y[4 * t + 2 + d0]);
    }
  }
  for (int r = 0; r < 4;
       ++r) {  // Token bit 3 for dim bit 3; dim bit 2 is now the highest lane bit.
    y[r] = _mm512_permutex2var_epi16(x[r], last, x[4 + r]);
    y[4 + r] = _mm512_permutex2var_epi16(x[r], last_high, x[4 + r]);
  }
  for (int i = 0; i < 8; ++i) x[i] = y[i];
}

// Scale bytes in 32-bit lanes and codes as words: dims 0..3 and 4..7, then 8..11 and 12..15.
struct WordCodes {
  __m512i scale;
  __m512i low;
  __m512i high;
};

// False, with nothing done, if there is a NaN.
KVTIER_AVX512_INLINE bool EncodeWords(const __m512i x[8], float g, WordCodes* result,
                                      SealCounts* counts) {
  const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
  __m512i both = _mm512_setzero_si512();
  for (int i = 0; i < 8; ++i) both = _mm512_max_epu16(both, _mm512_and_si512(x[i], magnitude));
  const __m256i largest =
      _mm256_max_epu16(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
  const __m256i infinity = _mm256_set1_epi16(0x7F80);
  if (_mm256_cmpgt_epu16_mask(largest, infinity) != 0) return false;
  const __m512 amax = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(largest), 16));
  const __m512 z =
      _mm512_min_ps(_mm512_mul_ps(amax, _mm512_set1_ps(1.0F / g)), _mm512_set1_ps(2688.0F));
  result->scale = EncodeScale(_mm512_div_ps(z, _mm512_set1_ps(6.0F)));
  const __m512 step = StepOf(result->scale, g);
  const auto at = [&](float t, short above) {
    const __m512i bits = _mm512_castps_si512(_mm512_mul_ps(step, _mm512_set1_ps(t)));
    const __m256i words = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
    return _mm512_add_epi16(_mm512_broadcast_i64x4(words), _mm512_set1_epi16(above));
  };
  const __m512i u1 = at(0.25F, 1);
  const __m512i u2 = at(0.75F, 0);
  const __m512i u3 = at(1.25F, 1);
  const __m512i u4 = at(1.75F, 0);
  const __m512i u5 = at(2.5F, 1);
  const __m512i u6 = at(3.5F, 0);
  const __m512i u7 = at(5.0F, 1);
  __m512i codes[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
#pragma GCC unroll 8
  for (int i = 7; i >= 0; --i) {
    const __m512i a = _mm512_and_si512(x[i], magnitude);
    const __mmask32 four = _mm512_cmpge_epu16_mask(a, u4);
    const __mmask32 two = _mm512_cmpge_epu16_mask(a, _mm512_mask_blend_epi16(four, u2, u6));
    const __m512i last = _mm512_mask_blend_epi16(four, _mm512_mask_blend_epi16(two, u1, u3),
                                                 _mm512_mask_blend_epi16(two, u5, u7));
    const __mmask32 one = _mm512_cmpge_epu16_mask(a, last);
    // The code in the highest nibble, below the sign that is there already.
    __m512i code = _mm512_andnot_si512(magnitude, x[i]);
    code = _mm512_mask_add_epi16(code, four, code, _mm512_set1_epi16(0x4000));
    code = _mm512_mask_add_epi16(code, two, code, _mm512_set1_epi16(0x2000));
    code = _mm512_mask_add_epi16(code, one, code, _mm512_set1_epi16(0x1000));
    codes[i / 4] = _mm512_shldi_epi16(codes[i / 4], code, 4);
  }
  // Canonical: all codes zero under a zero scale.
  const auto coded = static_cast<uint32_t>(_mm512_test_epi32_mask(result->scale, result->scale));
  const __mmask32 coded_words = coded | coded << 16;
  result->low = _mm512_maskz_mov_epi16(coded_words, codes[0]);
  result->high = _mm512_maskz_mov_epi16(coded_words, codes[1]);
  counts->nonfinite_count +=
      static_cast<uint64_t>(_mm_popcnt_u32(_mm256_cmpeq_epu16_mask(largest, infinity)));
  counts->saturated_count += static_cast<uint64_t>(
      _mm_popcnt_u32(_mm512_cmpeq_epi32_mask(result->scale, _mm512_set1_epi32(0x7E))));
  return true;
}

// The 8-byte runs of 16 tokens and their scale bytes.
struct Runs {
  alignas(64) uint64_t codes[kGroupTokens];
  alignas(16) uint8_t scales[kGroupTokens];
};

template <RowType kType, bool kTransform>
KVTIER_AVX512_INLINE Candidate EncodeVector(const SealSide& side, uint32_t token, uint32_t dim,
                                            SealCounts* counts) {
  const __m512i infinity = _mm512_set1_epi32(0x7F800000);
  __m512 x[16];
  for (uint32_t i = 0; i < kGroupTokens; ++i) {
    x[i] = LoadSource<kType, kTransform>(side, token + i, dim);
  }
  Transpose16(x);
  __m512i largest = _mm512_setzero_si512();
  for (const __m512 value : x) {
    largest = _mm512_max_epi32(
        largest, _mm512_and_si512(_mm512_castps_si512(value), _mm512_set1_epi32(0x7FFFFFFF)));
  }
  const __mmask16 nonfinite = _mm512_cmpge_epi32_mask(largest, infinity);
  const bool has_nan = _mm512_cmpgt_epi32_mask(largest, infinity) != 0;
  if (has_nan) largest = MaximumWithoutNan(x);
  const __m512 z =
      _mm512_min_ps(_mm512_mul_ps(_mm512_castsi512_ps(largest), _mm512_set1_ps(1.0F / side.g)),
                    _mm512_set1_ps(2688.0F));
  Candidate best = EncodeWithScale(x, _mm512_div_ps(z, _mm512_set1_ps(6.0F)), side.g);
  if (has_nan) FixNan(x, &best);
  if (side.four_over_six) {
    Candidate four = EncodeWithScale(x, _mm512_mul_ps(z, _mm512_set1_ps(0.25F)), side.g);
    if (has_nan) FixNan(x, &four);
    const __mmask16 better = _mm512_cmp_ps_mask(SquaredError(x, four, side.g),
                                                SquaredError(x, best, side.g), _CMP_LT_OQ);
    best.scale = _mm512_mask_mov_epi32(best.scale, better, four.scale);
    best.low = _mm512_mask_mov_epi32(best.low, better, four.low);
    best.high = _mm512_mask_mov_epi32(best.high, better, four.high);
  }
  counts->nonfinite_count += static_cast<uint64_t>(_mm_popcnt_u32(nonfinite));
  counts->saturated_count += static_cast<uint64_t>(
      _mm_popcnt_u32(_mm512_cmpeq_epi32_mask(best.scale, _mm512_set1_epi32(0x7E))));
  return best;
}

// Encodes dims [dim, dim + 16) of 16 tokens.
template <RowType kType, bool kTransform>
KVTIER_AVX512_INLINE void EncodeRuns(const SealSide& side, uint32_t token, uint32_t dim,
                                     SealCounts* counts, Runs* runs) {
  if ((kType != RowType::kFp16 || kTransform) && !side.four_over_six) {
    __m512i x[8];
    for (uint32_t i = 0; i < 8; ++i) {
      const __m256i even = LoadBf16<kType, kTransform>(side, token + 2 * i, dim);
      const __m256i odd = LoadBf16<kType, kTransform>(side, token + 2 * i + 1, dim);
      x[i] = _mm512_inserti64x4(_mm512_castsi256_si512(even), odd, 1);
    }
    TransposeWords(x);
    WordCodes words;
    if (EncodeWords(x, side.g, &words, counts)) {
      // Words t, 16 + t, 32 + t, 48 + t are those of token t.
      const __m512i first = _mm512_add_epi64(
          _mm512_set1_epi64(0x0030002000100000),
          _mm512_setr_epi64(0, 0x0001000100010001, 0x0002000200020002, 0x0003000300030003,
                            0x0004000400040004, 0x0005000500050005, 0x0006000600060006,
                            0x0007000700070007));
      const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(8));
      _mm512_store_si512(runs->codes, _mm512_permutex2var_epi16(words.low, first, words.high));
      _mm512_store_si512(runs->codes + 8, _mm512_permutex2var_epi16(words.low, second, words.high));
      _mm_store_si128(reinterpret_cast<__m128i*>(runs->scales), _mm512_cvtepi32_epi8(words.scale));
      return;
    }
  }
  const Candidate best = EncodeVector<kType, kTransform>(side, token, dim, counts);
  // Tokens 0 1 4 5 8 9 12 13 and 2 3 6 7 10 11 14 15.
  const __m512i a = _mm512_unpacklo_epi32(best.low, best.high);
  const __m512i b = _mm512_unpackhi_epi32(best.low, best.high);
  const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  _mm512_store_si512(runs->codes, _mm512_permutex2var_epi64(a, first, b));
  _mm512_store_si512(runs->codes + 8, _mm512_permutex2var_epi64(a, second, b));
  _mm_store_si128(reinterpret_cast<__m128i*>(runs->scales), _mm512_cvtepi32_epi8(best.scale));
}

// `codes` and `scales` are those of the group of 16 tokens.
KVTIER_AVX512_INLINE void StoreV(const Runs& runs, uint32_t vector, uint32_t vector_count,
                                 bool is_latent, std::byte* codes, std::byte* scales) {
  // Odd vectors have tokens 2, 3 of four before 0, 1.
  const __m512i order = _mm512_xor_si512(_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7),
                                         _mm512_set1_epi64(vector % 2 != 0 ? 2 : 0));
  for (int i = 0; i < 2; ++i) {
    _mm512_storeu_si512(codes + vector * 128 + i * 64,
                        _mm512_permutexvar_epi64(order, _mm512_load_si512(runs.codes + i * 8)));
  }
  if (is_latent) {
    std::memcpy(scales + vector * 16, runs.scales, 16);
    return;
  }
  for (uint32_t quad = 0; quad < 4; ++quad) {
    std::memcpy(scales + (quad * vector_count + vector) * 4, runs.scales + quad * 4, 4);
  }
}

// Requests 16 rows.
KVTIER_AVX512_INLINE void RequestRows(const std::byte* const* rows, uint32_t row_bytes) {
  for (uint32_t t = 0; t < kGroupTokens; ++t) {
    for (uint32_t i = 0; i < row_bytes; i += 64) _mm_prefetch(rows[t] + i, _MM_HINT_T0);
  }
}

template <RowType kType, bool kTransform>
SealCounts SealOf(const SealSide& arguments) {
  // A copy: stores of bytes could otherwise change it, as far as the compiler knows.
  const SealSide side = arguments;
  constexpr uint32_t kElementBytes = kType == RowType::kFp32 ? 4 : (kType == RowType::kFp8 ? 1 : 2);
  SealCounts counts{};
  const uint32_t vector_count = side.head_dim / 16;
  if (side.is_first) RequestRows(side.rows, side.head_dim * kElementBytes);
  for (uint32_t token = 0; token < side.block_tokens; token += kGroupTokens) {
    const bool is_last = token + kGroupTokens == side.block_tokens;
    const std::byte* const* next = is_last ? side.next_rows : side.rows + token + kGroupTokens;
    if (next != nullptr) RequestRows(next, side.head_dim * kElementBytes);
    Runs runs[kVectorsMax];
    std::byte* scales = side.scales + token * vector_count;
    for (uint32_t vector = 0; vector < vector_count; ++vector) {
      EncodeRuns<kType, kTransform>(side, token, vector * 16, &counts, &runs[vector]);
      if (side.order != SideOrder::kK) {
        StoreV(runs[vector], vector, vector_count, side.order == SideOrder::kLatent,
               side.codes + uint64_t{token} * side.head_dim / 2, scales);
      }
    }
    if (side.order != SideOrder::kK) continue;
    for (uint32_t vector = 0; vector < vector_count; ++vector) {
      const uint32_t panel = vector / 8;
      const uint32_t dims_left = side.head_dim - panel * 128;
      const uint32_t row_bytes = dims_left < 128 ? dims_left / 2 : 64;
      std::byte* codes = side.codes + uint64_t{panel} * side.block_tokens * 64 + token * row_bytes +
                         vector % 8 * 8;
      std::byte* scale = scales + vector;
#pragma GCC unroll 16
      for (uint32_t t = 0; t < kGroupTokens; ++t) {
        std::memcpy(codes + t * row_bytes, &runs[vector].codes[t], 8);
        scale[t * vector_count] = std::byte{runs[vector].scales[t]};
      }
    }
  }
  return counts;
}

template <RowType kType>
SealCounts SealType(const SealSide& side) {
  return side.mean == nullptr ? SealOf<kType, false>(side) : SealOf<kType, true>(side);
}

}  // namespace

SealCounts SealSideAvx512(const SealSide& side) {
  switch (side.type) {
    case RowType::kBf16:
      return SealType<RowType::kBf16>(side);
    case RowType::kFp16:
      return SealType<RowType::kFp16>(side);
    case RowType::kFp32:
      return SealType<RowType::kFp32>(side);
    case RowType::kFp8:
      return SealType<RowType::kFp8>(side);
  }
  return {};
}

}  // namespace kvtier::kernels::cpu
