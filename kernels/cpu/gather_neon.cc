// SPDX-License-Identifier: Apache-2.0
#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/neon.h"

namespace kvtier::kernels::cpu {
namespace {

// A vector has 8 magnitudes. They are scaled and converted to the rows' type once; the 16 values
// are then looked up byte by byte.

// 8 magnitudes with 16 bits each.
KVTIER_NEON_INLINE void StoreWords(uint16x8_t magnitudes, uint8x16_t codes, bool widen,
                                   std::byte* target) {
  const uint8x16_t bytes = vreinterpretq_u8_u16(magnitudes);
  const uint8x8_t low_half = vget_low_u8(vuzp1q_u8(bytes, bytes));
  const uint8x8_t high_half = vget_low_u8(vuzp2q_u8(bytes, bytes));
  const uint8x16_t low_table = vcombine_u8(low_half, low_half);
  const uint8x16_t high_table = vcombine_u8(high_half, vorr_u8(high_half, vdup_n_u8(0x80)));
  const uint8x16_t low = vqtbl1q_u8(low_table, codes);
  const uint8x16_t high = vqtbl1q_u8(high_table, codes);
  const uint8x16_t words[2] = {vzip1q_u8(low, high), vzip2q_u8(low, high)};
  if (!widen) {
    StoreBytes(target, words[0]);
    StoreBytes(target + 16, words[1]);
    return;
  }
  const Floats16 values = WidenBf16(vreinterpretq_u16_u8(words[0]), vreinterpretq_u16_u8(words[1]));
  for (int i = 0; i < 4; ++i) StoreBytes(target + i * 16, vreinterpretq_u8_f32(values.part[i]));
}

// One vector of one token.
template <RowType kType>
KVTIER_NEON_INLINE void Store(uint8x16_t codes, float step, float inverse_row_scale,
                              std::byte* target) {
  const float32x4_t small = vmulq_n_f32(float32x4_t{0.0F, 0.5F, 1.0F, 1.5F}, step);
  const float32x4_t large = vmulq_n_f32(float32x4_t{2.0F, 3.0F, 4.0F, 6.0F}, step);
  if constexpr (kType == RowType::kFp16) {
    const uint16x4_t low = vreinterpret_u16_f16(vcvt_f16_f32(small));
    const uint16x4_t high = vreinterpret_u16_f16(vcvt_f16_f32(large));
    StoreWords(vcombine_u16(low, high), codes, false, target);
  } else if constexpr (kType == RowType::kFp8) {
    const uint16x4_t low = vmovn_u32(EncodeScale(vmulq_n_f32(small, inverse_row_scale)));
    const uint16x4_t high = vmovn_u32(EncodeScale(vmulq_n_f32(large, inverse_row_scale)));
    const uint8x8_t bytes = vmovn_u16(vcombine_u16(low, high));
    StoreBytes(target, vqtbl1q_u8(vcombine_u8(bytes, vorr_u8(bytes, vdup_n_u8(0x80))), codes));
  } else {
    // Every value is exact in BF16: the upper halves of the FP32 bits.
    StoreWords(vuzp2q_u16(vreinterpretq_u16_f32(small), vreinterpretq_u16_f32(large)), codes,
               kType == RowType::kFp32, target);
  }
}

template <RowType kType>
void GatherOf(const GatherSide& side) {
  constexpr uint32_t kVectorBytes =
      kType == RowType::kFp32 ? 64 : (kType == RowType::kFp8 ? 16 : 32);
  const uint32_t vector_count = side.head_dim / 16;
  for (uint32_t token = 0; token < side.block_tokens; token += kQuadTokens) {
    for (uint32_t vector = 0; vector < vector_count; ++vector) {
      const QuadPlace place = PlaceOf(side.order, side.block_tokens, side.head_dim, token, vector);
      float steps[kQuadTokens];
      vst1q_f32(steps, LoadSteps(side.scales, place, side.g));
      for (uint32_t i = 0; i < kQuadTokens; ++i) {
        Store<kType>(UnpackRun(side.codes + place.Run(i)), steps[i], side.inverse_row_scale,
                     side.rows[token + i] + uint64_t{vector} * kVectorBytes);
      }
    }
  }
}

}  // namespace

// `streaming` has no effect: NEON's non-temporal store is a hint for pairs of registers that
// compilers have no intrinsic for.
void GatherSideNeon(const GatherSide& side) {
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
