// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_NVFP4_DEVICE_H_
#define KVTIER_KERNELS_CUDA_NVFP4_DEVICE_H_

#include <cstdint>

#include "kernels/cuda/primitives.h"
#include "kernels/cuda/target.h"

// The number format (FORMAT.md, section 1) on the device: what seal, gather and decode share. All
// functions are pure and give the bits of kernels/nvfp4.h.

namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR {

// Codes. DequantizeWord turns the 8 codes of a word into 4 FP16 pairs of e2m1(code) * 2^-14
// (kCodeExponent), or of e2m1(code) where the hardware converts. A pair times a scale's FP16 value
// is exact, subnormals included; fold 2^-kCodeExponent into what comes later.
//
// FirstOf and SecondOf say which codes pair i holds. Without hardware the order is
// (3,7) (1,5) (2,6) (0,4): sums over dims do not care, so permute the other operand once instead of
// every tile.
template <typename Arch>
struct Codes {
  static constexpr int kCodeExponent = Arch::kConvertsE2m1 ? 0 : -14;

  static constexpr uint32_t FirstOf(uint32_t pair) {
    if (Arch::kConvertsE2m1) return 2 * pair;
    return pair == 0 ? 3 : pair == 1 ? 1 : pair == 2 ? 2 : 0;
  }
  static constexpr uint32_t SecondOf(uint32_t pair) {
    return Arch::kConvertsE2m1 ? 2 * pair + 1 : FirstOf(pair) + 4;
  }
};

// "s eem" of a code, moved to the top of an FP16 number, is its sign, its two low exponent bits and
// its top mantissa bit: the code's value times 2^-14, 0.5 as a subnormal. Two codes of a byte are
// treated at once; PermuteBytes moves even bytes to the top of their half.
KVTIER_DEVICE void DequantizeWordByBytes(uint32_t codes, uint32_t (&pairs)[4]) {
  const uint32_t high = (codes & 0x80808080U) | ((codes >> 3) & 0x0E0E0E0EU);
  const uint32_t low = ((codes << 4) & 0x80808080U) | ((codes << 1) & 0x0E0E0E0EU);
  pairs[0] = high & 0xFF00FF00U;
  pairs[1] = PermuteBytes(high, 0, 0x2404);
  pairs[2] = low & 0xFF00FF00U;
  pairs[3] = PermuteBytes(low, 0, 0x2404);
}

template <typename Arch>
KVTIER_DEVICE void DequantizeWord(uint32_t codes, uint32_t (&pairs)[4]) {
  if constexpr (Arch::kConvertsE2m1) {
    E2m1ToHalf2(codes, pairs);
  } else {
    DequantizeWordByBytes(codes, pairs);
  }
}

// Scales. Two valid scale bytes (bits 0..15) to an FP16 pair. Without hardware: the byte 7 bits up
// is the value times 2^-8, subnormals included.
template <typename Arch>
KVTIER_DEVICE uint32_t ScalesToHalf2(uint32_t bytes) {
  if constexpr (Arch::kConvertsE4m3) {
    return E4m3ToHalf2(bytes);
  } else {
    constexpr uint32_t k256 = 0x5C005C00U;
    return MulHalf2(PermuteBytes(bytes, 0, 0x1404) >> 1, k256);
  }
}

template <typename Arch>
KVTIER_DEVICE float ScaleToFloat(uint32_t byte) {
  if constexpr (Arch::kConvertsE4m3) {
    return FirstHalf(E4m3ToHalf2(byte));
  } else {
    return MulRn(FirstHalf(byte << 7), 256.0F);
  }
}

// Nearest scale byte. Requires: 0 <= s <= 448.
template <typename Arch>
KVTIER_DEVICE uint32_t EncodeScale(float s) {
  if constexpr (Arch::kConvertsE4m3) {
    return PackE4m3(s, 0.0F) & 0xFFU;
  } else {
    // As EncodeE4m3Scale: subnormals by adding the number whose last place is their step.
    const uint32_t subnormal = BitsOf(AddRn(s, 0x1p14F)) - BitsOf(0x1p14F);
    const uint32_t bits = BitsOf(s);
    const uint32_t normal = ((bits + 0x7FFFFU + (bits >> 20 & 1U)) >> 20) - ((127U - 7U) << 3);
    return s < 0x1p-6F ? subnormal : normal;
  }
}

// FP32 to two signed E4M3 bytes: nearest even, saturating at 448, NaN to 0x7F.
template <typename Arch>
KVTIER_DEVICE uint32_t PackFp8(float first, float second) {
  if constexpr (Arch::kConvertsE4m3) {
    return PackE4m3(first, second);
  } else {
    const auto encode = [](float x) {
      const uint32_t sign = BitsOf(x) >> 24 & 0x80U;
      const float magnitude = FloatOf(BitsOf(x) & 0x7FFFFFFFU);
      if (BitsOf(magnitude) > 0x7F800000U) return uint32_t{0x7F};
      return sign | EncodeScale<Arch>(MinFloat(magnitude, 448.0F));
    };
    return encode(first) | encode(second) << 8;
  }
}

// Two signed E4M3 bytes to an FP16 pair, NaN to NaN.
template <typename Arch>
KVTIER_DEVICE uint32_t UnpackFp8(uint32_t bytes) {
  if constexpr (Arch::kConvertsE4m3) {
    return E4m3ToHalf2(bytes);
  } else {
    constexpr uint32_t kNanMagnitudes = 0x3F803F80U;  // 0x7F, 7 bits up.
    const uint32_t halves = PermuteBytes(bytes, 0, 0x1404);
    const uint32_t magnitudes = (halves & 0x7F007F00U) >> 1;
    const uint32_t nans = GreaterEqualOrNanMask(magnitudes, kNanMagnitudes) & 0x7FFF7FFFU;
    return MulHalf2(magnitudes | (halves & 0x80008000U), 0x5C005C00U) | nans;
  }
}

// A power of two in [2^-100, 2^100].
KVTIER_DEVICE bool IsGlobalScale(float g) {
  const uint32_t bits = BitsOf(g);
  return (bits & 0x807FFFFFU) == 0 && bits >= BitsOf(0x1p-100F) && bits <= BitsOf(0x1p100F);
}

// Finite and above 0; and with a finite reciprocal too, which 2^-128 and less have not. In bits.
KVTIER_DEVICE bool IsScale(float scale) { return BitsOf(scale) - 1U < 0x7F7FFFFFU; }
KVTIER_DEVICE bool IsReciprocalScale(float scale) {
  constexpr uint32_t kLeast = 0x00200001U;
  return BitsOf(scale) - kLeast < 0x7F800000U - kLeast;
}

// 1 / g, exact. Requires: IsGlobalScale(g).
KVTIER_DEVICE float InverseOfPowerOfTwo(float g) { return FloatOf((254U << 23) - BitsOf(g)); }

}  // namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR

#endif  // KVTIER_KERNELS_CUDA_NVFP4_DEVICE_H_
