// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_ENCODE_H_
#define KVTIER_KERNELS_CUDA_ENCODE_H_

#include <cstdint>

#include "kernels/cuda/nvfp4_device.h"
#include "kernels/cuda/primitives.h"
#include "kernels/cuda/target.h"

// Quantize16 of kernels/nvfp4.h on the device, bit for bit: one thread, one vector of 16 values
// that are BF16 or FP16, as 8 pairs.

namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR {

struct EncodedVector {
  Words2 codes;
  uint32_t scale = 0;
  bool is_nonfinite = false;
};

// Magnitudes of BF16 numbers order like FP16 numbers with the same bits, except those of 2^121 and
// more, which are FP16 NaNs: "greater or NaN" is right for them too, because no threshold is that
// large, and gives NaN itself the code 7. So both types use FP16 compares, on every architecture.

template <bool kIsBf16>
KVTIER_DEVICE float FirstValue(uint32_t pair) {
  return kIsBf16 ? FirstBf16(pair) : FirstHalf(pair);
}
template <bool kIsBf16>
KVTIER_DEVICE float SecondValue(uint32_t pair) {
  return kIsBf16 ? SecondBf16(pair) : SecondHalf(pair);
}

// NaNs become +NaN (code 0x7 whatever their sign was) and, for the maximum, 0. Rare: not inlined
// into the straight path by a branch around it.
template <bool kIsBf16>
KVTIER_DEVICE float MaximumWithoutNans(uint32_t (&pairs)[8]) {
  constexpr uint32_t kInfinity = kIsBf16 ? 0x7F80U : 0x7C00U;
  uint32_t largest = 0;
  KVTIER_UNROLL
  for (uint32_t i = 0; i < 8; ++i) {
    KVTIER_UNROLL
    for (uint32_t shift = 0; shift < 32; shift += 16) {
      const uint32_t magnitude = pairs[i] >> shift & 0x7FFFU;
      if (magnitude > kInfinity) {
        pairs[i] = (pairs[i] & ~(0xFFFFU << shift)) | 0x7FFFU << shift;
      } else {
        largest = magnitude > largest ? magnitude : largest;
      }
    }
  }
  return FirstValue<kIsBf16>(largest);
}

// The 7 midpoints between codes times `step`, twice each. Exact in BF16. For FP16 the smallest FP16
// number that is at least the midpoint, or above it where a tie stays at the lower (even) code.
template <bool kIsBf16>
KVTIER_DEVICE void MakeThresholds(float step, uint32_t (&thresholds)[7]) {
  constexpr float kMidpoints[7] = {0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5.0F};
  if constexpr (kIsBf16) {
    // The midpoints as BF16 pairs: a table would be read from memory.
    const uint32_t steps = PermuteBytes(BitsOf(step), 0, 0x3232);
    thresholds[0] = MulBf162(steps, 0x3E803E80U);
    thresholds[1] = MulBf162(steps, 0x3F403F40U);
    thresholds[2] = MulBf162(steps, 0x3FA03FA0U);
    thresholds[3] = MulBf162(steps, 0x3FE03FE0U);
    thresholds[4] = MulBf162(steps, 0x40204020U);
    thresholds[5] = MulBf162(steps, 0x40604060U);
    thresholds[6] = MulBf162(steps, 0x40A040A0U);
  } else {
    KVTIER_UNROLL
    for (uint32_t i = 0; i < 7; ++i) {
      const float midpoint = MulRn(kMidpoints[i], step);
      const uint32_t bits = i % 2 == 0 ? HalfBelow(midpoint) + 1 : HalfAbove(midpoint);
      thresholds[i] = PermuteBytes(bits, 0, 0x1010);
    }
  }
}

// Minus the sum over the thresholds that both elements of |pair| reach, in 16-bit lanes that have
// carried into each other; UncarryFactor undoes that.
template <bool kIsBf16>
KVTIER_DEVICE uint32_t CountReached(uint32_t pair, const uint32_t (&thresholds)[7]) {
  const uint32_t magnitudes = pair & 0x7FFF7FFFU;
  uint32_t sum = 0;
  KVTIER_UNROLL
  for (uint32_t i = 0; i < 7; ++i) {
    const bool tie_stays = kIsBf16 && i % 2 == 0;
    sum += tie_stays ? GreaterOrNanMask(magnitudes, thresholds[i])
                     : GreaterEqualOrNanMask(magnitudes, thresholds[i]);
  }
  return sum;
}

// With L and H thresholds reached, masks of 0xFFFF add up to 65536 * (L - H) - L (mod 2^32); times
// this factor that is L + 65536 * H.
inline constexpr uint32_t kUncarryFactor = 0U - 65537U;

// Codes of 4 pairs by comparing, as a word.
template <bool kIsBf16>
KVTIER_DEVICE uint32_t CompareWord(uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                   const uint32_t (&thresholds)[7]) {
  // Of two pairs, the codes go to bits 0, 8 (first elements) and 16, 24 (second elements); the sign
  // bytes of the pairs, gathered in the same order, have the sign 4 bits too high.
  const auto two_pairs = [&](uint32_t low, uint32_t high) {
    const uint32_t signs = PermuteBytes(low, high, 0x7351) >> 4 & 0x08080808U;
    return CountReached<kIsBf16>(low, thresholds) * kUncarryFactor +
           (CountReached<kIsBf16>(high, thresholds) * (kUncarryFactor << 8) + signs);
  };
  const uint32_t front = two_pairs(a, b);
  const uint32_t back = two_pairs(c, d);
  return PermuteBytes(front, back, 0x5410) + (PermuteBytes(front, back, 0x7632) << 4);
}

// Codes of 4 pairs by converting the quotient. An approximate reciprocal and one correction give
// exact ties exactly; a value that is no tie is at least 2^-12 away from one. Requires: finite
// quotients.
template <bool kIsBf16>
KVTIER_DEVICE uint32_t ConvertWord(const uint32_t* pairs, float step, float reciprocal) {
  float quotients[8];
  KVTIER_UNROLL
  for (uint32_t i = 0; i < 8; ++i) {
    const uint32_t pair = pairs[i / 2];
    const float x = i % 2 == 0 ? FirstValue<kIsBf16>(pair) : SecondValue<kIsBf16>(pair);
    const float quotient = MulRn(x, reciprocal);
    // The sign of this difference matters: the other way round, -0 would become +0.
    const float excess = FmaRn(step, quotient, -x);
    quotients[i] = FmaRn(-excess, reciprocal, quotient);
  }
  return PackE2m1(quotients);
}

// Sum of (x - value)^2 in index order, each step rounded: the choice of 4-over-6 is part of the
// format.
template <typename Arch, bool kIsBf16>
KVTIER_DEVICE float SquaredError(const uint32_t (&pairs)[8], const Words2& codes, float step) {
  constexpr float kCodeFactor = Arch::kConvertsE2m1 ? 1.0F : 0x1p14F;
  float sum = 0.0F;
  KVTIER_UNROLL
  for (uint32_t word = 0; word < 2; ++word) {
    uint32_t code_pairs[4];
    DequantizeWord<Arch>(word == 0 ? codes.x : codes.y, code_pairs);
    float values[8];
    KVTIER_UNROLL
    for (uint32_t i = 0; i < 4; ++i) {
      values[Codes<Arch>::FirstOf(i)] = FirstHalf(code_pairs[i]);
      values[Codes<Arch>::SecondOf(i)] = SecondHalf(code_pairs[i]);
    }
    KVTIER_UNROLL
    for (uint32_t i = 0; i < 8; ++i) {
      const uint32_t pair = pairs[4 * word + i / 2];
      const float x = i % 2 == 0 ? FirstValue<kIsBf16>(pair) : SecondValue<kIsBf16>(pair);
      const float error = SubRn(x, MulRn(MulRn(values[i], kCodeFactor), step));
      sum = AddRn(sum, MulRn(error, error));
    }
  }
  return sum;
}

// Codes for the scale byte nearest to s.
template <typename Arch, bool kIsBf16>
KVTIER_DEVICE EncodedVector EncodeWithScale(const uint32_t (&pairs)[8], float s, float g,
                                            bool is_nonfinite) {
  EncodedVector result;
  result.scale = EncodeScale<Arch>(s);
  const float step = MulRn(ScaleToFloat<Arch>(result.scale), g);
  const bool is_saturated = result.scale == 0x7E;
  if (Arch::kConvertsE2m1 && !is_saturated && !is_nonfinite) {
    if constexpr (Arch::kConvertsE2m1) {
      const float reciprocal = ReciprocalNear(step);
      result.codes.x = ConvertWord<kIsBf16>(pairs, step, reciprocal);
      result.codes.y = ConvertWord<kIsBf16>(pairs + 4, step, reciprocal);
    }
  } else {
    uint32_t thresholds[7];
    MakeThresholds<kIsBf16>(step, thresholds);
    result.codes.x = CompareWord<kIsBf16>(pairs[0], pairs[1], pairs[2], pairs[3], thresholds);
    result.codes.y = CompareWord<kIsBf16>(pairs[4], pairs[5], pairs[6], pairs[7], thresholds);
  }
  // Canonical: no signs either.
  if (result.scale == 0) result.codes = Words2{};
  return result;
}

// Requires: IsGlobalScale(g). Changes NaNs among the pairs.
template <typename Arch, bool kIsBf16>
KVTIER_DEVICE EncodedVector EncodeVector(uint32_t (&pairs)[8], float g, bool four_over_six) {
  uint32_t largest = pairs[0] & 0x7FFF7FFFU;
  KVTIER_UNROLL
  for (uint32_t i = 1; i < 8; ++i) {
    const uint32_t magnitudes = pairs[i] & 0x7FFF7FFFU;
    largest = kIsBf16 ? MaxNanBf162(largest, magnitudes) : MaxNanHalf2(largest, magnitudes);
  }
  const uint32_t swapped = PermuteBytes(largest, 0, 0x1032);
  largest = kIsBf16 ? MaxNanBf162(largest, swapped) : MaxNanHalf2(largest, swapped);
  float amax = FirstValue<kIsBf16>(largest);
  const bool is_nonfinite = !(amax < FloatOf(0x7F800000U));
  if (is_nonfinite) amax = MaximumWithoutNans<kIsBf16>(pairs);

  // Infinity must not reach the division: its correction would make a NaN of it.
  const float z = MinFloat(MulRn(amax, InverseOfPowerOfTwo(g)), 448.0F * 6.0F);
  // z / 6, correctly rounded: the product with 1 / 6 and one correction.
  constexpr float kSixth = 1.0F / 6.0F;
  const float near = MulRn(z, kSixth);
  const float sixth = FmaRn(FmaRn(-6.0F, near, z), kSixth, near);
  EncodedVector best = EncodeWithScale<Arch, kIsBf16>(pairs, sixth, g, is_nonfinite);
  if (four_over_six) {
    const EncodedVector four =
        EncodeWithScale<Arch, kIsBf16>(pairs, MinFloat(MulRn(z, 0.25F), 448.0F), g, is_nonfinite);
    const auto error = [&](const EncodedVector& candidate) {
      const float step = MulRn(ScaleToFloat<Arch>(candidate.scale), g);
      return SquaredError<Arch, kIsBf16>(pairs, candidate.codes, step);
    };
    if (error(four) < error(best)) best = four;
  }
  best.is_nonfinite = is_nonfinite;
  return best;
}

}  // namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR

#endif  // KVTIER_KERNELS_CUDA_ENCODE_H_
