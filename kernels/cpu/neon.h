// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CPU_NEON_H_
#define KVTIER_KERNELS_CPU_NEON_H_

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/transfer.h"

// Internal to kernels/cpu/*_neon.cc: pieces that they share. Baseline ARMv8-A, little endian: what
// every AArch64 processor has, so these files need no compile flags of their own.
//
// The work is cut into quads: one vector (16 dims) of 4 adjacent tokens, whose 4 scales fill the
// 4 FP32 lanes of a register.

#define KVTIER_NEON_INLINE [[gnu::always_inline]] static inline

namespace kvtier::kernels::cpu {

inline constexpr uint32_t kQuadTokens = 4;

// Rows and tiles need no alignment: loads and stores are of bytes.
KVTIER_NEON_INLINE uint8x16_t LoadBytes(const std::byte* source) {
  return vld1q_u8(reinterpret_cast<const uint8_t*>(source));
}
KVTIER_NEON_INLINE void StoreBytes(std::byte* target, uint8x16_t bytes) {
  vst1q_u8(reinterpret_cast<uint8_t*>(target), bytes);
}

// Where a quad is, in bytes from the start of a side's codes and of its scales (FORMAT.md, 2.1, 2.2
// and 5). K has a row of codes a token; V and latents have the 4 runs side by side, in an order
// that depends on the parity of the vector.
struct QuadPlace {
  uint64_t codes;
  uint64_t step;
  uint64_t flip;
  uint64_t scales;
  uint64_t scale_step;

  uint64_t Run(uint64_t i) const { return codes + ((i * step) ^ flip); }
  uint64_t Scale(uint64_t i) const { return scales + i * scale_step; }
};

// `token` is a multiple of 4.
KVTIER_NEON_INLINE QuadPlace PlaceOf(SideOrder order, uint32_t block_tokens, uint32_t head_dim,
                                     uint32_t token, uint32_t vector) {
  const uint32_t vector_count = head_dim / 16;
  if (order == SideOrder::kK) {
    const uint32_t panel = vector / 8;
    const uint32_t dims_left = head_dim - panel * 128;
    const uint32_t row_bytes = dims_left < 128 ? dims_left / 2 : 64;
    return {.codes = uint64_t{panel} * block_tokens * 64 + token * row_bytes + vector % 8 * 8,
            .step = row_bytes,
            .flip = 0,
            .scales = token * vector_count + vector,
            .scale_step = vector_count};
  }
  const uint32_t adjacent = order == SideOrder::kV ? 4 : 16;  // Tokens with adjacent scales.
  return {
      .codes = uint64_t{token / 16} * 8 * head_dim + vector * 128 + token % 16 * 8,
      .step = 8,
      .flip = (vector & 1) * 16,
      .scales = token / adjacent * adjacent * vector_count + vector * adjacent + token % adjacent,
      .scale_step = 1};
}

// e4m3(scale) * g for 4 scale bytes 0x00..0x7F in 32-bit lanes: as FP16 bits, the byte has 8 less
// in the exponent bias. Exact.
KVTIER_NEON_INLINE float32x4_t StepsOf(uint32x4_t scales, float g) {
  const uint16x4_t half = vmovn_u32(vshlq_n_u32(scales, 7));
  return vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(half)), 256.0F * g);
}

// The same for the scales of a quad.
KVTIER_NEON_INLINE float32x4_t LoadSteps(const std::byte* scales, const QuadPlace& place, float g) {
  uint32_t bytes[kQuadTokens];
  for (uint32_t i = 0; i < kQuadTokens; ++i) {
    bytes[i] = std::to_integer<uint32_t>(scales[place.Scale(i)]);
  }
  return StepsOf(vld1q_u32(bytes), g);
}

// The 16 codes of an 8-byte run, one a byte.
KVTIER_NEON_INLINE uint8x16_t UnpackRun(const std::byte* run) {
  const uint8x8_t bytes = vld1_u8(reinterpret_cast<const uint8_t*>(run));
  const uint8x8_t low = vand_u8(bytes, vdup_n_u8(15));
  const uint8x8_t high = vshr_n_u8(bytes, 4);
  return vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high));
}

// BF16 words to FP32, dims in order.
struct Floats16 {
  float32x4_t part[4];
};
KVTIER_NEON_INLINE Floats16 WidenBf16(uint16x8_t low, uint16x8_t high) {
  return {{vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(low), 16)),
           vreinterpretq_f32_u32(vshll_high_n_u16(low, 16)),
           vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(high), 16)),
           vreinterpretq_f32_u32(vshll_high_n_u16(high, 16))}};
}
KVTIER_NEON_INLINE Floats16 WidenFp16(uint16x8_t low, uint16x8_t high) {
  const float16x8_t halves[2] = {vreinterpretq_f16_u16(low), vreinterpretq_f16_u16(high)};
  return {{vcvt_f32_f16(vget_low_f16(halves[0])), vcvt_high_f32_f16(halves[0]),
           vcvt_f32_f16(vget_low_f16(halves[1])), vcvt_high_f32_f16(halves[1])}};
}

// 16 signed E4M3 bytes. Exact; the two NaN bytes become NaN.
KVTIER_NEON_INLINE Floats16 WidenFp8(uint8x16_t bytes) {
  const uint8x16_t magnitude = vandq_u8(bytes, vdupq_n_u8(0x7F));
  // Sign, a zero exponent bit, then the byte's exponent and mantissa. For a NaN that bit and the
  // exponent become ones.
  const uint8x16_t nan = vandq_u8(vceqq_u8(magnitude, vdupq_n_u8(0x7F)), vdupq_n_u8(0x40));
  const uint8x16_t high =
      vorrq_u8(vorrq_u8(vshrq_n_u8(magnitude, 1), vandq_u8(bytes, vdupq_n_u8(0x80))), nan);
  const uint8x16_t low = vshlq_n_u8(bytes, 7);
  Floats16 values = WidenFp16(vreinterpretq_u16_u8(vzip1q_u8(low, high)),
                              vreinterpretq_u16_u8(vzip2q_u8(low, high)));
  for (float32x4_t& part : values.part) part = vmulq_n_f32(part, 256.0F);
  return values;
}

// The 16 values of codes (one a byte) under the scale `step`. Exact, signs of zeros included: the
// tables hold the two bytes of the codes' values in BF16.
KVTIER_NEON_INLINE Floats16 Dequantize(uint8x16_t codes, float step) {
  const uint8x16_t low_table = {0x00, 0x00, 0x80, 0xC0, 0x00, 0x40, 0x80, 0xC0,
                                0x00, 0x00, 0x80, 0xC0, 0x00, 0x40, 0x80, 0xC0};
  const uint8x16_t high_table = {0x00, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40,
                                 0x80, 0xBF, 0xBF, 0xBF, 0xC0, 0xC0, 0xC0, 0xC0};
  const uint8x16_t low = vqtbl1q_u8(low_table, codes);
  const uint8x16_t high = vqtbl1q_u8(high_table, codes);
  Floats16 values = WidenBf16(vreinterpretq_u16_u8(vzip1q_u8(low, high)),
                              vreinterpretq_u16_u8(vzip2q_u8(low, high)));
  for (float32x4_t& part : values.part) part = vmulq_n_f32(part, step);
  return values;
}

// EncodeE4m3Scale of values >= 0 without NaN, in 32-bit lanes.
KVTIER_NEON_INLINE uint32x4_t EncodeScale(float32x4_t s) {
  const float32x4_t shift = vdupq_n_f32(0x1p14F);
  const uint32x4_t subnormal =
      vsubq_u32(vreinterpretq_u32_f32(vaddq_f32(s, shift)), vreinterpretq_u32_f32(shift));
  const uint32x4_t bits = vreinterpretq_u32_f32(s);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 20), vdupq_n_u32(1));
  const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFFF)), odd), 20);
  const uint32x4_t normal = vsubq_u32(rounded, vdupq_n_u32((127 - 7) << 3));
  const uint32x4_t small = vcltq_f32(s, vdupq_n_f32(0x1p-6F));
  return vminq_u32(vbslq_u32(small, subnormal, normal), vdupq_n_u32(0x7E));
}

}  // namespace kvtier::kernels::cpu

#endif  // KVTIER_KERNELS_CPU_NEON_H_
