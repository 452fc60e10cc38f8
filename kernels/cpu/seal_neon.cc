// SPDX-License-Identifier: Apache-2.0
#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/neon.h"

namespace kvtier::kernels::cpu {
namespace {

// A quad's values as the format quantizes them: BF16, or FP16 from FP16 rows, 16 dims a token.
struct Source {
  uint16x8_t words[kQuadTokens][2];
};

// What is encoded of a quad: codes one a byte, scale bytes in 32-bit lanes.
struct Candidate {
  uint32x4_t scales;
  uint8x16_t codes[kQuadTokens];
};

// FP32 -> nearest BF16; NaN stays NaN.
KVTIER_NEON_INLINE uint16x4_t RoundToBf16(float32x4_t x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint16x4_t rounded = vaddhn_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
  const uint16x4_t quiet = vorr_u16(vshrn_n_u32(bits, 16), vdup_n_u16(0x0040));
  return vbsl_u16(vmovn_u32(vceqq_f32(x, x)), rounded, quiet);
}

// 16 dims of a row of any type in FP32.
KVTIER_NEON_INLINE Floats16 LoadFloats(const SealSide& side, const std::byte* row, uint32_t dim) {
  switch (side.type) {
    case RowType::kBf16:
      return WidenBf16(vreinterpretq_u16_u8(LoadBytes(row + dim * 2)),
                       vreinterpretq_u16_u8(LoadBytes(row + dim * 2 + 16)));
    case RowType::kFp16:
      return WidenFp16(vreinterpretq_u16_u8(LoadBytes(row + dim * 2)),
                       vreinterpretq_u16_u8(LoadBytes(row + dim * 2 + 16)));
    case RowType::kFp32: {
      Floats16 x;
      for (uint32_t i = 0; i < 4; ++i) {
        x.part[i] = vreinterpretq_f32_u8(LoadBytes(row + dim * 4 + i * 16));
      }
      return x;
    }
    case RowType::kFp8:
      break;
  }
  Floats16 x = WidenFp8(LoadBytes(row + dim));
  for (float32x4_t& part : x.part) part = vmulq_n_f32(part, side.row_scale);
  return x;
}

// Loads 16 dims of a row that must be rounded to BF16.
void LoadRounded(const SealSide& side, const std::byte* row, uint32_t dim, uint16x8_t words[2]) {
  Floats16 x = LoadFloats(side, row, dim);
  if (side.mean != nullptr) {
    for (uint32_t i = 0; i < 4; ++i) {
      const float32x4_t centered = vsubq_f32(x.part[i], vld1q_f32(side.mean + dim + i * 4));
      x.part[i] = vmulq_f32(centered, vld1q_f32(side.inverse_smooth + dim + i * 4));
    }
  }
  for (uint32_t i = 0; i < 2; ++i) {
    words[i] = vcombine_u16(RoundToBf16(x.part[2 * i]), RoundToBf16(x.part[2 * i + 1]));
  }
}

KVTIER_NEON_INLINE Source LoadSource(const SealSide& side, uint32_t token, uint32_t dim) {
  const bool exact = side.type == RowType::kBf16 || side.type == RowType::kFp16;
  Source source;
  for (uint32_t i = 0; i < kQuadTokens; ++i) {
    const std::byte* row = side.rows[token + i];
    if (exact && side.mean == nullptr) {
      source.words[i][0] = vreinterpretq_u16_u8(LoadBytes(row + dim * 2));
      source.words[i][1] = vreinterpretq_u16_u8(LoadBytes(row + dim * 2 + 16));
    } else {
      LoadRounded(side, row, dim, source.words[i]);
    }
  }
  return source;
}

// For FP16 words: the magnitude as a doubled BF16 word whose last bit tells that bits were dropped.
// Thresholds are exact in BF16, so comparisons with a doubled threshold are those of the value.
KVTIER_NEON_INLINE uint16x8_t DoubledBf16(uint16x8_t half) {
  const float16x8_t x = vreinterpretq_f16_u16(half);
  const uint32x4_t low = vreinterpretq_u32_f32(vcvt_f32_f16(vget_low_f16(x)));
  const uint32x4_t high = vreinterpretq_u32_f32(vcvt_high_f32_f16(x));
  const uint16x8_t dropped = vtstq_u16(
      vuzp1q_u16(vreinterpretq_u16_u32(low), vreinterpretq_u16_u32(high)), vdupq_n_u16(0xFFFF));
  const uint16x8_t kept = vuzp2q_u16(vreinterpretq_u16_u32(low), vreinterpretq_u16_u32(high));
  return vsriq_n_u16(vshlq_n_u16(kept, 1), dropped, 15);
}

// Largest magnitudes of 4 tokens, as doubled words. `limit` counts as zero what is above it.
KVTIER_NEON_INLINE uint16x4_t LargestOf(const Source& source, uint16_t limit) {
  uint16x8_t largest[kQuadTokens];
  for (uint32_t i = 0; i < kQuadTokens; ++i) {
    uint16x8_t half[2];
    for (uint32_t h = 0; h < 2; ++h) {
      half[h] = vshlq_n_u16(source.words[i][h], 1);
      if (limit != UINT16_MAX) half[h] = vandq_u16(half[h], vcleq_u16(half[h], vdupq_n_u16(limit)));
    }
    largest[i] = vmaxq_u16(half[0], half[1]);
  }
  const uint16x8_t pairs =
      vpmaxq_u16(vpmaxq_u16(largest[0], largest[1]), vpmaxq_u16(largest[2], largest[3]));
  return vget_low_u16(vpmaxq_u16(pairs, pairs));
}

KVTIER_NEON_INLINE uint64_t CountLanes(uint16x4_t mask) { return vaddv_u16(vshr_n_u16(mask, 15)); }

// The doubled words above which a magnitude has at least the code of their index.
struct Thresholds {
  uint16_t above[8][kQuadTokens];
};
KVTIER_NEON_INLINE Thresholds ThresholdsOf(float32x4_t steps) {
  Thresholds thresholds;
  const auto set = [&](uint32_t code, float midpoint, uint16_t below) {
    const uint32x4_t bits = vreinterpretq_u32_f32(vmulq_n_f32(steps, midpoint));
    vst1_u16(thresholds.above[code], vsub_u16(vshrn_n_u32(bits, 15), vdup_n_u16(below)));
  };
  // A tie belongs to the even code: the midpoint itself must compare as above for those.
  set(1, 0.25F, 0);
  set(2, 0.75F, 1);
  set(3, 1.25F, 0);
  set(4, 1.75F, 1);
  set(5, 2.5F, 0);
  set(6, 3.5F, 1);
  set(7, 5.0F, 0);
  return thresholds;
}

// Codes of 8 values of token i, in 16-bit lanes.
template <bool kIsFp16>
KVTIER_NEON_INLINE uint16x8_t EncodeWords(uint16x8_t words, const Thresholds& thresholds,
                                          uint32_t i, bool has_nan) {
  const auto at = [&](uint32_t code) { return vld1q_dup_u16(&thresholds.above[code][i]); };
  const uint16x8_t a = kIsFp16 ? DoubledBf16(words) : vshlq_n_u16(words, 1);
  const uint16x8_t four = vcgtq_u16(a, at(4));
  const uint16x8_t two = vcgtq_u16(a, vbslq_u16(four, at(6), at(2)));
  const uint16x8_t one =
      vcgtq_u16(a, vbslq_u16(four, vbslq_u16(two, at(7), at(5)), vbslq_u16(two, at(3), at(1))));
  uint16x8_t code = vsliq_n_u16(one, two, 1);
  code = vsliq_n_u16(code, four, 2);
  code = vsliq_n_u16(code, vshrq_n_u16(words, 15), 3);
  if (has_nan) code = vbslq_u16(vcgtq_u16(a, vdupq_n_u16(0xFF00)), vdupq_n_u16(7), code);
  return code;
}

template <bool kIsFp16>
KVTIER_NEON_INLINE Candidate EncodeWithScale(const Source& source, float32x4_t s, float g,
                                             bool has_nan) {
  Candidate result;
  result.scales = EncodeScale(s);
  const Thresholds thresholds = ThresholdsOf(StepsOf(result.scales, g));
  // Canonical: all codes zero under a zero scale.
  uint32_t nonzero[kQuadTokens];
  vst1q_u32(nonzero, vtstq_u32(result.scales, result.scales));
  for (uint32_t i = 0; i < kQuadTokens; ++i) {
    const uint16x8_t low = EncodeWords<kIsFp16>(source.words[i][0], thresholds, i, has_nan);
    const uint16x8_t high = EncodeWords<kIsFp16>(source.words[i][1], thresholds, i, has_nan);
    result.codes[i] = vandq_u8(vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high)),
                               vreinterpretq_u8_u32(vld1q_dup_u32(&nonzero[i])));
  }
  return result;
}

// Sums of squared errors of 4 tokens, in FP32 and in index order.
template <bool kIsFp16>
KVTIER_NEON_INLINE float32x4_t SquaredErrors(const Source& source, const Candidate& candidate,
                                             float g) {
  float steps[kQuadTokens];
  vst1q_f32(steps, StepsOf(candidate.scales, g));
  float32x4_t squares[kQuadTokens][4];
  for (uint32_t i = 0; i < kQuadTokens; ++i) {
    const Floats16 x = kIsFp16 ? WidenFp16(source.words[i][0], source.words[i][1])
                               : WidenBf16(source.words[i][0], source.words[i][1]);
    const Floats16 value = Dequantize(candidate.codes[i], steps[i]);
    for (uint32_t part = 0; part < 4; ++part) {
      const float32x4_t error = vsubq_f32(x.part[part], value.part[part]);
      squares[i][part] = vmulq_f32(error, error);
    }
  }
  float32x4_t sum = vdupq_n_f32(0.0F);
  for (uint32_t part = 0; part < 4; ++part) {
    // From a token's 4 dims a register to a dim's 4 tokens.
    const float32x4_t even[2] = {vtrn1q_f32(squares[0][part], squares[1][part]),
                                 vtrn1q_f32(squares[2][part], squares[3][part])};
    const float32x4_t odd[2] = {vtrn2q_f32(squares[0][part], squares[1][part]),
                                vtrn2q_f32(squares[2][part], squares[3][part])};
    sum = vaddq_f32(sum, vcombine_f32(vget_low_f32(even[0]), vget_low_f32(even[1])));
    sum = vaddq_f32(sum, vcombine_f32(vget_low_f32(odd[0]), vget_low_f32(odd[1])));
    sum = vaddq_f32(sum, vcombine_f32(vget_high_f32(even[0]), vget_high_f32(even[1])));
    sum = vaddq_f32(sum, vcombine_f32(vget_high_f32(odd[0]), vget_high_f32(odd[1])));
  }
  return sum;
}

template <bool kIsFp16>
KVTIER_NEON_INLINE Candidate EncodeQuad(const SealSide& side, const Source& source,
                                        SealCounts* counts) {
  constexpr uint16_t kInfinity = kIsFp16 ? 0xF800 : 0xFF00;  // As a doubled word.
  uint16x4_t largest = LargestOf(source, UINT16_MAX);
  bool has_nan = false;
  if (const uint16_t top = vmaxv_u16(largest); top >= kInfinity) {
    counts->nonfinite_count += CountLanes(vcge_u16(largest, vdup_n_u16(kInfinity)));
    has_nan = top > kInfinity;
    if (has_nan) largest = LargestOf(source, kInfinity);
  }
  const float32x4_t amax = kIsFp16 ? vcvt_f32_f16(vreinterpret_f16_u16(vshr_n_u16(largest, 1)))
                                   : vreinterpretq_f32_u32(vshll_n_u16(largest, 15));
  const float32x4_t z = vminq_f32(vmulq_n_f32(amax, 1.0F / side.g), vdupq_n_f32(2688.0F));
  Candidate best =
      EncodeWithScale<kIsFp16>(source, vdivq_f32(z, vdupq_n_f32(6.0F)), side.g, has_nan);
  if (side.four_over_six) {
    const Candidate four = EncodeWithScale<kIsFp16>(source, vmulq_n_f32(z, 0.25F), side.g, has_nan);
    const uint32x4_t better = vcltq_f32(SquaredErrors<kIsFp16>(source, four, side.g),
                                        SquaredErrors<kIsFp16>(source, best, side.g));
    best.scales = vbslq_u32(better, four.scales, best.scales);
    uint32_t masks[kQuadTokens];
    vst1q_u32(masks, better);
    for (uint32_t i = 0; i < kQuadTokens; ++i) {
      best.codes[i] =
          vbslq_u8(vreinterpretq_u8_u32(vld1q_dup_u32(&masks[i])), four.codes[i], best.codes[i]);
    }
  }
  counts->saturated_count += CountLanes(vmovn_u32(vceqq_u32(best.scales, vdupq_n_u32(0x7E))));
  return best;
}

template <bool kIsFp16>
SealCounts SealOf(const SealSide& side) {
  SealCounts counts{};
  const uint32_t vector_count = side.head_dim / 16;
  for (uint32_t token = 0; token < side.block_tokens; token += kQuadTokens) {
    for (uint32_t vector = 0; vector < vector_count; ++vector) {
      const Source source = LoadSource(side, token, vector * 16);
      const Candidate best = EncodeQuad<kIsFp16>(side, source, &counts);
      const QuadPlace place = PlaceOf(side.order, side.block_tokens, side.head_dim, token, vector);
      uint32_t scales[kQuadTokens];
      vst1q_u32(scales, best.scales);
      for (uint32_t i = 0; i < kQuadTokens; ++i) {
        const uint16x8_t pairs = vreinterpretq_u16_u8(best.codes[i]);
        vst1_u8(reinterpret_cast<uint8_t*>(side.codes + place.Run(i)),
                vmovn_u16(vsraq_n_u16(pairs, pairs, 4)));
        side.scales[place.Scale(i)] = static_cast<std::byte>(scales[i]);
      }
    }
  }
  return counts;
}

}  // namespace

// `next_rows` has no effect: rows are read in order, which processors prefetch by themselves.
SealCounts SealSideNeon(const SealSide& side) {
  const bool is_fp16 = side.type == RowType::kFp16 && side.mean == nullptr;
  return is_fp16 ? SealOf<true>(side) : SealOf<false>(side);
}

}  // namespace kvtier::kernels::cpu
