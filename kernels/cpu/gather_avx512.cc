// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/avx512.h"
#include "kernels/cpu/kernel_table.h"

namespace kvtier::kernels::cpu {
namespace {

// A table has the 16 values under each scale byte in the target's type, so a value is one 16-bit
// permute.

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
void GatherOf(const GatherSide& arguments, const ValueTable& table) {
  // A copy: stores of bytes could otherwise change it, as far as the compiler knows.
  const GatherSide side = arguments;
  constexpr uint32_t kElementBytes = kType == RowType::kFp32 ? 4 : (kType == RowType::kFp8 ? 1 : 2);
  const uint32_t vector_count = side.head_dim / 16;
  // Tokens whose scales of a vector are adjacent, if it is not K.
  const uint32_t adjacent = side.order == SideOrder::kV ? 4 : 16;
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
        const std::byte* scale = side.scales + token / adjacent * adjacent * vector_count +
                                 vector * adjacent + token % adjacent;
        a_scale = static_cast<uint8_t>(scale[0]);
        b_scale = static_cast<uint8_t>(scale[both ? adjacent : 0]);
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

}  // namespace

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

}  // namespace kvtier::kernels::cpu
