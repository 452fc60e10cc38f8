// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/avx2.h"
#include "kernels/cpu/kernel_table.h"

namespace kvtier::kernels::cpu {
namespace {

// A register holds one dim of 8 tokens in FP32, so that everything about a vector (its maximum,
// scale, thresholds, errors in index order) is lane-wise.
constexpr uint32_t kGroupTokens = 8;

// FP32 -> nearest BF16 as FP32; NaN stays NaN.
KVTIER_AVX2_INLINE __m256 RoundToBf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_castsi256_ps(
      _mm256_and_si256(_mm256_blendv_epi8(rounded, quiet, nan), _mm256_set1_epi32(-0x10000)));
}

// 8 dims of a row, as the format quantizes them.
KVTIER_AVX2_INLINE __m256 LoadSource(const SealSide& side, uint32_t token, uint32_t dim) {
  const std::byte* row = side.rows[token];
  __m256 x = _mm256_setzero_ps();
  switch (side.type) {
    case RowType::kBf16:
      x = Bf16ToFloat8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + dim * 2)));
      break;
    case RowType::kFp16:
      x = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + dim * 2)));
      break;
    case RowType::kFp32:
      x = _mm256_castsi256_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + dim * 4)));
      break;
    case RowType::kFp8:
      x = _mm256_mul_ps(Fp8ToFloat(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + dim))),
                        _mm256_set1_ps(side.row_scale));
      break;
  }
  if (side.mean != nullptr) {
    x = _mm256_mul_ps(_mm256_sub_ps(x, _mm256_loadu_ps(side.mean + dim)),
                      _mm256_loadu_ps(side.inverse_smooth + dim));
  }
  const bool exact = side.type == RowType::kBf16 || side.type == RowType::kFp16;
  return exact && side.mean == nullptr ? x : RoundToBf16(x);
}

// Codes of the vectors in 8 lanes: dims 0..7 in codes[0], 8..15 in codes[1], four bits each.
struct Candidate {
  __m256i scale;
  __m256i codes[2];
};

// Magnitudes are compared as integers; a threshold is the largest value below its code.
KVTIER_AVX2_INLINE Candidate EncodeWithScale(const __m256 x[16], __m256 s, float g, bool has_nan) {
  Candidate result{};
  result.scale = EncodeScale(s);
  const __m256 step = StepOf(result.scale, g);
  const auto at = [&](float t, int below) {
    return _mm256_sub_epi32(_mm256_castps_si256(_mm256_mul_ps(step, _mm256_set1_ps(t))),
                            _mm256_set1_epi32(below));
  };
  const __m256i u1 = at(0.25F, 0);
  const __m256i u2 = at(0.75F, 1);
  const __m256i u3 = at(1.25F, 0);
  const __m256i u4 = at(1.75F, 1);
  const __m256i u5 = at(2.5F, 0);
  const __m256i u6 = at(3.5F, 1);
  const __m256i u7 = at(5.0F, 0);
  for (int i = 15; i >= 0; --i) {
    const __m256i bits = _mm256_castps_si256(x[i]);
    const __m256i a = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
    const __m256i four = _mm256_cmpgt_epi32(a, u4);
    const __m256i two = _mm256_cmpgt_epi32(a, _mm256_blendv_epi8(u2, u6, four));
    const __m256i last =
        _mm256_blendv_epi8(_mm256_blendv_epi8(u1, u3, two), _mm256_blendv_epi8(u5, u7, two), four);
    const __m256i one = _mm256_cmpgt_epi32(a, last);
    __m256i code = _mm256_or_si256(_mm256_and_si256(four, _mm256_set1_epi32(4)),
                                   _mm256_and_si256(two, _mm256_set1_epi32(2)));
    code = _mm256_or_si256(code, _mm256_and_si256(one, _mm256_set1_epi32(1)));
    code =
        _mm256_or_si256(code, _mm256_and_si256(_mm256_srli_epi32(bits, 28), _mm256_set1_epi32(8)));
    if (has_nan) {
      const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x[i], x[i], _CMP_UNORD_Q));
      code = _mm256_blendv_epi8(code, _mm256_set1_epi32(7), nan);
    }
    __m256i& codes = result.codes[i / 8];
    codes = _mm256_or_si256(_mm256_slli_epi32(codes, 4), code);
  }
  // Canonical: all codes zero under a zero scale.
  const __m256i zero = _mm256_cmpeq_epi32(result.scale, _mm256_setzero_si256());
  for (__m256i& codes : result.codes) codes = _mm256_andnot_si256(zero, codes);
  return result;
}

// Sum of squared errors, in FP32 and in index order.
KVTIER_AVX2_INLINE __m256 SquaredError(const __m256 x[16], const Candidate& candidate, float g) {
  const __m256 magnitudes = _mm256_setr_ps(0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F);
  const __m256 step = StepOf(candidate.scale, g);
  __m256 sum = _mm256_setzero_ps();
  for (int i = 0; i < 16; ++i) {
    // A permute reads the low three bits of an index; bit 3 is the sign.
    const __m256i code = _mm256_srl_epi32(candidate.codes[i / 8], _mm_cvtsi32_si128(i % 8 * 4));
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(code, _mm256_set1_epi32(8)), 28);
    const __m256 value =
        _mm256_xor_ps(_mm256_permutevar8x32_ps(magnitudes, code), _mm256_castsi256_ps(sign));
    const __m256 error = _mm256_sub_ps(x[i], _mm256_mul_ps(value, step));
    sum = _mm256_add_ps(sum, _mm256_mul_ps(error, error));
  }
  return sum;
}

uint64_t CountLanes(__m256i mask) {
  return static_cast<uint64_t>(
      _mm_popcnt_u32(static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(mask)))));
}

// Encodes dims [dim, dim + 16) of 8 tokens.
Candidate EncodeVector(const SealSide& side, uint32_t token, uint32_t dim, SealCounts* counts) {
  __m256 x[16];
  for (uint32_t half = 0; half < 2; ++half) {
    for (uint32_t i = 0; i < kGroupTokens; ++i) {
      x[half * 8 + i] = LoadSource(side, token + i, dim + half * 8);
    }
    Transpose8(x + half * 8);
  }
  __m256i largest = _mm256_setzero_si256();
  __m256i largest_number = _mm256_setzero_si256();
  for (const __m256 value : x) {
    const __m256i a = _mm256_and_si256(_mm256_castps_si256(value), _mm256_set1_epi32(0x7FFFFFFF));
    const __m256i number = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_ORD_Q));
    largest = _mm256_max_epi32(largest, a);
    largest_number = _mm256_max_epi32(largest_number, _mm256_and_si256(a, number));
  }
  const __m256i infinity = _mm256_set1_epi32(0x7F800000);
  counts->nonfinite_count +=
      CountLanes(_mm256_cmpgt_epi32(largest, _mm256_sub_epi32(infinity, _mm256_set1_epi32(1))));
  const bool has_nan = CountLanes(_mm256_cmpgt_epi32(largest, infinity)) != 0;
  const __m256 z = _mm256_min_ps(
      _mm256_mul_ps(_mm256_castsi256_ps(largest_number), _mm256_set1_ps(1.0F / side.g)),
      _mm256_set1_ps(2688.0F));
  Candidate best = EncodeWithScale(x, _mm256_div_ps(z, _mm256_set1_ps(6.0F)), side.g, has_nan);
  if (side.four_over_six) {
    const Candidate four =
        EncodeWithScale(x, _mm256_mul_ps(z, _mm256_set1_ps(0.25F)), side.g, has_nan);
    const __m256i better = _mm256_castps_si256(
        _mm256_cmp_ps(SquaredError(x, four, side.g), SquaredError(x, best, side.g), _CMP_LT_OQ));
    best.scale = _mm256_blendv_epi8(best.scale, four.scale, better);
    for (int i = 0; i < 2; ++i) {
      best.codes[i] = _mm256_blendv_epi8(best.codes[i], four.codes[i], better);
    }
  }
  counts->saturated_count += CountLanes(_mm256_cmpeq_epi32(best.scale, _mm256_set1_epi32(0x7E)));
  return best;
}

}  // namespace

SealCounts SealSideAvx2(const SealSide& side) {
  SealCounts counts{};
  const uint32_t vector_count = side.head_dim / 16;
  for (uint32_t first = 0; first < side.block_tokens; first += kGroupTokens) {
    for (uint32_t vector = 0; vector < vector_count; ++vector) {
      const Candidate best = EncodeVector(side, first, vector * 16, &counts);
      alignas(32) uint32_t low[8];
      alignas(32) uint32_t high[8];
      alignas(32) uint32_t scales[8];
      _mm256_store_si256(reinterpret_cast<__m256i*>(low), best.codes[0]);
      _mm256_store_si256(reinterpret_cast<__m256i*>(high), best.codes[1]);
      _mm256_store_si256(reinterpret_cast<__m256i*>(scales), best.scale);
      for (uint32_t i = 0; i < kGroupTokens; ++i) {
        const uint32_t token = first + i;
        std::byte* codes = side.codes;
        std::byte* scale = side.scales;
        if (side.order == SideOrder::kK) {
          const uint32_t panel = vector / 8;
          const uint32_t dims_left = side.head_dim - panel * 128;
          codes += uint64_t{panel} * side.block_tokens * 64 +
                   token * (dims_left < 128 ? dims_left / 2 : 64) + vector % 8 * 8;
          scale += token * vector_count + vector;
        } else {
          codes += uint64_t{token / 16} * 8 * side.head_dim + vector * 128 + token % 16 / 4 * 32 +
                   16 * ((token % 4 / 2) ^ (vector & 1)) + 8 * (token & 1);
          // Words of four tokens, or all 16 of a group of latents.
          const uint32_t adjacent = side.order == SideOrder::kV ? 4 : 16;
          scale +=
              token / adjacent * adjacent * vector_count + vector * adjacent + token % adjacent;
        }
        std::memcpy(codes, &low[i], 4);
        std::memcpy(codes + 4, &high[i], 4);
        *scale = static_cast<std::byte>(scales[i]);
      }
    }
  }
  return counts;
}

}  // namespace kvtier::kernels::cpu
