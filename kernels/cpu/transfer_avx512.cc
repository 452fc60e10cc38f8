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
constexpr uint32_t kVectorsMax = 16;

// --- Sealing. A register holds one dim of 16 tokens, so that everything about a vector (its
// maximum, scale, thresholds, errors in index order) is lane-wise.

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

// Codes of the vectors in 16 lanes: dims 0..7 in `low`, 8..15 in `high`, four bits each.
struct Candidate {
  __m512i scale;
  __m512i low;
  __m512i high;
};

KVTIER_AVX512_INLINE __m512 StepOf(__m512i scale, float g) {
  return _mm512_mul_ps(ScalesToFloat(_mm512_cvtepi32_epi8(scale)),
                       _mm512_mul_ps(_mm512_set1_ps(g), _mm512_set1_ps(256.0F)));
}

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

// Writes 8-byte runs of 16 tokens of one vector; `codes` and `scales` are those of the group.
KVTIER_AVX512_INLINE void StoreV(const Candidate& candidate, uint32_t vector, uint32_t vector_count,
                                 std::byte* codes, std::byte* scales) {
  // Tokens 0 1 4 5 8 9 12 13 and 2 3 6 7 10 11 14 15.
  const __m512i a = _mm512_unpacklo_epi32(candidate.low, candidate.high);
  const __m512i b = _mm512_unpackhi_epi32(candidate.low, candidate.high);
  const __m512i swap = _mm512_set1_epi64(vector % 2 != 0 ? 8 : 0);
  const __m512i first = _mm512_xor_si512(_mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), swap);
  const __m512i second = _mm512_xor_si512(_mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), swap);
  _mm512_storeu_si512(codes + vector * 128, _mm512_permutex2var_epi64(a, first, b));
  _mm512_storeu_si512(codes + vector * 128 + 64, _mm512_permutex2var_epi64(a, second, b));
  alignas(16) uint8_t bytes[kGroupTokens];
  _mm_store_si128(reinterpret_cast<__m128i*>(bytes), _mm512_cvtepi32_epi8(candidate.scale));
  for (uint32_t quad = 0; quad < 4; ++quad) {
    std::memcpy(scales + (quad * vector_count + vector) * 4, bytes + quad * 4, 4);
  }
}

// The same for K; scale bytes are collected by vector.
KVTIER_AVX512_INLINE void StoreK(const Candidate& candidate, std::byte* codes, uint64_t row_bytes,
                                 uint8_t scales[kGroupTokens]) {
  alignas(64) uint64_t runs[2][8];
  _mm512_store_si512(runs[0], _mm512_unpacklo_epi32(candidate.low, candidate.high));
  _mm512_store_si512(runs[1], _mm512_unpackhi_epi32(candidate.low, candidate.high));
  for (uint32_t token = 0; token < kGroupTokens; ++token) {
    const uint32_t half = token / 2 % 2;
    std::memcpy(codes + token * row_bytes, &runs[half][token / 4 * 2 + token % 2], 8);
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(scales), _mm512_cvtepi32_epi8(candidate.scale));
}

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

template <RowType kType, bool kTransform>
SealCounts SealOf(const SealSide& side) {
  SealCounts counts{};
  const uint32_t vector_count = side.head_dim / 16;
  for (uint32_t token = 0; token < side.block_tokens; token += kGroupTokens) {
    uint8_t k_scales[kVectorsMax][kGroupTokens];
    std::byte* scales = side.scales + token * vector_count;
    for (uint32_t vector = 0; vector < vector_count; ++vector) {
      const Candidate best = EncodeVector<kType, kTransform>(side, token, vector * 16, &counts);
      if (side.order == SideOrder::kV) {
        StoreV(best, vector, vector_count, side.codes + uint64_t{token} * side.head_dim / 2,
               scales);
        continue;
      }
      const uint32_t panel = vector / 8;
      const uint32_t dims_left = side.head_dim - panel * 128;
      const uint32_t row_bytes = dims_left < 128 ? dims_left / 2 : 64;
      StoreK(best,
             side.codes + uint64_t{panel} * side.block_tokens * 64 + token * row_bytes +
                 vector % 8 * 8,
             row_bytes, k_scales[vector]);
    }
    if (side.order == SideOrder::kV) continue;
    for (uint32_t t = 0; t < kGroupTokens; ++t) {
      for (uint32_t vector = 0; vector < vector_count; ++vector) {
        scales[t * vector_count + vector] = std::byte{k_scales[vector][t]};
      }
    }
  }
  return counts;
}

template <RowType kType>
SealCounts SealType(const SealSide& side) {
  return side.mean == nullptr ? SealOf<kType, false>(side) : SealOf<kType, true>(side);
}

// --- Gathering. A table has the 16 values under each scale byte in the target's type, so a value
// is one 16-bit permute.

using ValueTable = uint16_t[128][16];

// Signed E4M3 of finite values, saturating, in 32-bit lanes.
KVTIER_AVX512_INLINE __m512i EncodeFp8(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512 magnitude =
      _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF)));
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
  return _mm512_or_si512(EncodeScale(magnitude), sign);
}

void BuildTable(const GatherSide& side, ValueTable* table) {
  const __m512 values = _mm512_setr_ps(0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F, -0.0F, -0.5F,
                                       -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F);
  for (int scale = 0; scale < 127; ++scale) {
    const __m512 x = _mm512_mul_ps(values, StepOf(_mm512_set1_epi32(scale), side.g));
    __m256i words;
    if (side.type == RowType::kFp16) {
      words = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else if (side.type == RowType::kFp8) {
      const __m512 scaled = _mm512_mul_ps(x, _mm512_set1_ps(side.inverse_row_scale));
      words = _mm512_cvtepi32_epi16(EncodeFp8(scaled));
    } else {
      words = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(x), 16));
    }
    _mm256_store_si256(reinterpret_cast<__m256i*>((*table)[scale]), words);
  }
}

// 32 values as 16-bit words: the vectors of the runs a and b.
KVTIER_AVX512_INLINE __m512i LookUp(const std::byte* a, const std::byte* b, const uint16_t* a_table,
                                    const uint16_t* b_table) {
  const __m128i runs = _mm_unpacklo_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(a)),
                                          _mm_loadl_epi64(reinterpret_cast<const __m128i*>(b)));
  // Byte k to words 2k and 2k + 1, the second one shifted to its high nibble.
  const __m512i spread = _mm512_shuffle_epi8(
      _mm512_broadcast_i32x4(runs),
      _mm512_set_epi64(0x0F0F0F0F0E0E0E0E, 0x0D0D0D0D0C0C0C0C, 0x0B0B0B0B0A0A0A0A,
                       0x0909090908080808, 0x0707070706060606, 0x0505050504040404,
                       0x0303030302020202, 0x0101010100000000));
  const __m512i nibbles = _mm512_srlv_epi16(spread, _mm512_set1_epi32(4 << 16));
  const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
  const __m512i index =
      _mm512_ternarylogic_epi32(nibbles, _mm512_set1_epi16(15), second, 0xEA);  // (n & 15) | second
  const __m512i table = _mm512_inserti64x4(
      _mm512_castsi256_si512(_mm256_load_si256(reinterpret_cast<const __m256i*>(a_table))),
      _mm256_load_si256(reinterpret_cast<const __m256i*>(b_table)), 1);
  return _mm512_permutexvar_epi16(index, table);
}

template <RowType kType, bool kStream>
KVTIER_AVX512_INLINE void StoreDims(std::byte* target, __m512i words, bool both) {
  const auto store = [&](std::byte* to, __m512i data) {
    if constexpr (kStream) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to), data);
    } else {
      _mm512_storeu_si512(to, data);
    }
  };
  if constexpr (kType == RowType::kFp32) {
    const auto expand = [](__m256i half) {
      return _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
    };
    store(target, expand(_mm512_castsi512_si256(words)));
    if (both) store(target + 64, expand(_mm512_extracti64x4_epi64(words, 1)));
  } else if constexpr (kType == RowType::kFp8) {
    const __m256i bytes = _mm512_cvtepi16_epi8(words);
    if (both) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), bytes);
    } else {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_castsi256_si128(bytes));
    }
  } else if (both) {
    store(target, words);
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_castsi512_si256(words));
  }
}

template <RowType kType, bool kStream>
void GatherOf(const GatherSide& side, const ValueTable& table) {
  constexpr uint32_t kElementBytes = kType == RowType::kFp32 ? 4 : (kType == RowType::kFp8 ? 1 : 2);
  const uint32_t vector_count = side.head_dim / 16;
  for (uint32_t token = 0; token < side.block_tokens; ++token) {
    const std::byte* v_codes =
        side.codes + uint64_t{token / 16} * 8 * side.head_dim + token % 16 / 4 * 32 + token % 2 * 8;
    const uint32_t half = token % 4 / 2;
    for (uint32_t vector = 0; vector < vector_count; vector += 2) {
      const bool both = vector + 1 < vector_count;
      const std::byte* a;
      const std::byte* b;
      uint8_t a_scale;
      uint8_t b_scale;
      if (side.order == SideOrder::kK) {
        const uint32_t panel = vector / 8;
        const uint32_t dims_left = side.head_dim - panel * 128;
        a = side.codes + uint64_t{panel} * side.block_tokens * 64 +
            token * (dims_left < 128 ? dims_left / 2 : 64) + vector % 8 * 8;
        b = both ? a + 8 : a;
        const std::byte* scale = side.scales + token * vector_count + vector;
        a_scale = static_cast<uint8_t>(scale[0]);
        b_scale = static_cast<uint8_t>(scale[both ? 1 : 0]);
      } else {
        a = v_codes + vector * 128 + half * 16;
        b = both ? v_codes + (vector + 1) * 128 + (half ^ 1) * 16 : a;
        const std::byte* scale =
            side.scales + token / 4 * 4 * vector_count + vector * 4 + token % 4;
        a_scale = static_cast<uint8_t>(scale[0]);
        b_scale = static_cast<uint8_t>(scale[both ? 4 : 0]);
      }
      StoreDims<kType, kStream>(side.rows[token] + vector * 16 * kElementBytes,
                                LookUp(a, b, table[a_scale], table[b_scale]), both);
    }
  }
}

template <RowType kType>
void GatherType(const GatherSide& side) {
  alignas(64) ValueTable table;
  BuildTable(side, &table);
  bool stream = side.streaming && kType != RowType::kFp8 && side.head_dim % 32 == 0;
  for (uint32_t token = 0; stream && token < side.block_tokens; ++token) {
    stream = reinterpret_cast<uintptr_t>(side.rows[token]) % 64 == 0;
  }
  if (!stream) return GatherOf<kType, false>(side, table);
  GatherOf<kType, true>(side, table);
  _mm_sfence();
}

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

void GatherSideAvx512(const GatherSide& side) {
  switch (side.type) {
    case RowType::kBf16:
      return GatherType<RowType::kBf16>(side);
    case RowType::kFp16:
      return GatherType<RowType::kFp16>(side);
    case RowType::kFp32:
      return GatherType<RowType::kFp32>(side);
    case RowType::kFp8:
      return GatherType<RowType::kFp8>(side);
  }
}

}  // namespace

const KernelTable kAvx512Kernels = {.attend_tiles = AttendTilesAvx512,
                                    .attend_rows = AttendRowsAvx512,
                                    .seal_side = SealSideAvx512,
                                    .gather_side = GatherSideAvx512};

}  // namespace kvtier::kernels::cpu
