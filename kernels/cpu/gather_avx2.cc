// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/avx2.h"
#include "kernels/cpu/kernel_table.h"

namespace kvtier::kernels::cpu {
namespace {

// Signed E4M3 of finite values, saturating, in 32-bit lanes.
KVTIER_AVX2_INLINE __m256i EncodeFp8(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256 magnitude =
      _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF)));
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
  return _mm256_or_si256(EncodeScale(magnitude), sign);
}

// DequantizeRun loses the sign of zero (its table holds integers); the code has it.
KVTIER_AVX2_INLINE Vector16 DequantizeExactly(const std::byte* run, float step) {
  Vector16 values = DequantizeRun(run, step);
  uint64_t bits = 0;
  std::memcpy(&bits, run, sizeof(bits));
  const __m256i shifts = _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0);
  const __m256i sign = _mm256_set1_epi32(static_cast<int>(0x80000000U));
  const auto signs = [&](uint64_t eight) {
    const __m256i codes = _mm256_set1_epi32(static_cast<int>(static_cast<uint32_t>(eight)));
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_sllv_epi32(codes, shifts), sign));
  };
  values.low = _mm256_or_ps(values.low, signs(bits));
  values.high = _mm256_or_ps(values.high, signs(bits >> 32));
  return values;
}

KVTIER_AVX2_INLINE void Store(RowType type, const Vector16& values, float inverse_row_scale,
                              std::byte* target) {
  const __m256 halves[2] = {values.low, values.high};
  for (int i = 0; i < 2; ++i) {
    const __m256 x = halves[i];
    auto* words = reinterpret_cast<__m128i*>(target + i * 16);
    switch (type) {
      case RowType::kBf16:
        _mm_storeu_si128(words, PackWords(_mm256_srli_epi32(_mm256_castps_si256(x), 16)));
        break;
      case RowType::kFp16:
        _mm_storeu_si128(words, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        break;
      case RowType::kFp32:
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + i * 32), _mm256_castps_si256(x));
        break;
      case RowType::kFp8: {
        const __m128i bytes =
            PackWords(EncodeFp8(_mm256_mul_ps(x, _mm256_set1_ps(inverse_row_scale))));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(target + i * 8),
                         _mm_packus_epi16(bytes, bytes));
        break;
      }
    }
  }
}

template <RowType kType>
void GatherOf(const GatherSide& side) {
  constexpr uint32_t kVectorBytes =
      kType == RowType::kFp32 ? 64 : (kType == RowType::kFp8 ? 16 : 32);
  const uint32_t vector_count = side.head_dim / 16;
  for (uint32_t token = 0; token < side.block_tokens; ++token) {
    for (uint32_t vector = 0; vector < vector_count; ++vector) {
      const std::byte* run = side.codes;
      const std::byte* scale = side.scales;
      if (side.order == SideOrder::kK) {
        const uint32_t panel = vector / 8;
        const uint32_t dims_left = side.head_dim - panel * 128;
        run += uint64_t{panel} * side.block_tokens * 64 +
               token * (dims_left < 128 ? dims_left / 2 : 64) + vector % 8 * 8;
        scale += token * vector_count + vector;
      } else {
        run += uint64_t{token / 16} * 8 * side.head_dim + vector * 128 + token % 16 / 4 * 32 +
               16 * ((token % 4 / 2) ^ (vector & 1)) + 8 * (token & 1);
        // Words of four tokens, or all 16 of a group of latents.
        const uint32_t adjacent = side.order == SideOrder::kV ? 4 : 16;
        scale += token / adjacent * adjacent * vector_count + vector * adjacent + token % adjacent;
      }
      Store(kType, DequantizeExactly(run, ScaleToFloat(*scale) * side.g), side.inverse_row_scale,
            side.rows[token] + vector * kVectorBytes);
    }
  }
}

}  // namespace

void GatherSideAvx2(const GatherSide& side) {
  switch (side.type) {
    case RowType::kBf16:
      return GatherOf<RowType::kBf16>(side);
    case RowType::kFp16:
      return GatherOf<RowType::kFp16>(side);
    case RowType::kFp32:
      return GatherOf<RowType::kFp32>(side);
    case RowType::kFp8:
      return GatherOf<RowType::kFp8>(side);
  }
}

}  // namespace kvtier::kernels::cpu
