// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_NVFP4_H_
#define KVTIER_KERNELS_NVFP4_H_

#include <array>
#include <bit>
#include <cstdint>

#include "kernels/status.h"

// The NVFP4 number format: scalar reference, bit-exact on every architecture. The specification in
// prose is FORMAT.md, section 1; these functions are its normative code.
//
//   value = e2m1(code) * e4m3(scale byte) * g
//
// code:       4 bits, sign | 2 exponent | 1 mantissa: 0 .5 1 1.5 2 3 4 6 and their negatives
// (8..15). scale byte: E4M3 with sign 0, one per 16 values (a "vector"), 0x00..0x7E. 0x7F (NaN) and
// the
//             bytes with the sign bit set are never written and never decoded.
// g:          FP32 global scale, a power of two in [2^-100, 2^100], one per (layer, K or V[,
// head]).
//             It is a multiplier of the stored value (a dequantization scale), never its inverse.
//
// All functions are pure, thread-safe, do not block, allocate or throw. They rely on the IEEE-754
// default environment (round to nearest even, no flush to zero) and no fused contraction
// (-ffp-contract=off): never compile them with -ffast-math.

namespace kvtier::kernels {

inline constexpr uint32_t kVectorDims = 16;      // Values that share one scale byte.
inline constexpr uint32_t kVectorCodeBytes = 8;  // Two codes a byte.
inline constexpr float kE2m1Max = 6.0F;
inline constexpr float kE4m3Max = 448.0F;
inline constexpr uint8_t kScaleByteMax = 0x7E;  // 448.
static_assert(kVectorCodeBytes * 2 == kVectorDims);

// The value of each code, by code.
inline constexpr std::array<float, 16> kE2m1Values = {
    0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,  4.0F,  6.0F,  //
    -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F};

// Nearest code, ties to the even code; beyond +-6 and infinities saturate to +-6; the sign is kept
// on underflow (-0.1 -> 0x8) and of zero; NaN of either sign -> 0x7, as cvt.rn.satfinite does.
uint8_t EncodeE2m1(float x);

// Only the low four bits of `code` are read.
constexpr float DecodeE2m1(uint8_t code) { return kE2m1Values[code & 0xFU]; }

// Nearest E4M3 byte for a scale, ties to even; above 448 and +inf -> 0x7E; NaN -> 0x7F; negative
// values and -0 -> 0x00 (a scale has no sign).
uint8_t EncodeE4m3Scale(float s);

// Signed E4M3: 0x7F and 0xFF are NaN, 0x80..0xFE negative. Kernels refuse all of these as a scale
// (IsValidScaleByte) instead of decoding them.
float DecodeE4m3Scale(uint8_t byte);

// True for the bytes that Quantize16 can write.
constexpr bool IsValidScaleByte(uint8_t byte) { return byte <= kScaleByteMax; }

// True for a power of two in [2^-100, 2^100]: then every threshold of the encoder and every decoded
// value is a normal number that BF16 holds exactly.
bool IsValidGlobalScale(float g);

// Sets *g to 2^ceil(log2(amax / 448)), limited to [2^-100, 2^100]; computed exactly. `amax` is the
// largest magnitude seen in calibration. amax == 0 gives 1. Larger values than amax keep full
// precision up to 6 * amax and saturate beyond 2688 * g.
// Errors: kInvalidArgument if amax is negative, infinite or NaN (*g is untouched).
Status GlobalScaleFromAmax(float amax, float* g);

struct QuantizeFlags {
  bool nonfinite = false;  // The vector holds a NaN or an infinity: the codes do not represent it.
  bool saturated = false;  // The scale byte is 0x7E: values may be clipped, g is too small.
};

// How the scale byte is chosen from the vector's largest magnitude.
enum class ScaleSearch : uint8_t {
  kAmax6 = 0,        // The maximum maps to 6.
  kFourOverSix = 1,  // Of amax/6 and amax/4 the one with the smaller squared error; a tie, or any
                     // error that is not finite, takes amax/6.
};

// Quantizes the 16 values x[0..15] with global scale g. Writes 8 code bytes (byte k holds value 2k
// in its low nibble and value 2k + 1 in its high one) and one scale byte, never above 0x7E.
//   - A zero scale byte means 16 codes 0x0, whatever the signs (and NaNs) were.
//   - NaN -> code 0x7; it does not take part in the maximum. Inf -> +-6 under scale byte 0x7E.
// x is used as given. Sources in FP32 are first rounded to BF16 by SealTile: the format is defined
// over BF16 and FP16 values.
// Requires: IsValidGlobalScale(g).
QuantizeFlags Quantize16(const float x[kVectorDims], float g, uint8_t codes[kVectorCodeBytes],
                         uint8_t* scale, ScaleSearch search = ScaleSearch::kAmax6);

// The inverse map; exact (the product has at most 6 significant bits), so out is also exact in
// BF16. Requires: IsValidScaleByte(scale) and IsValidGlobalScale(g).
void Dequantize16(const uint8_t codes[kVectorCodeBytes], uint8_t scale, float g,
                  float out[kVectorDims]);

// Bit patterns of 16-bit floats. Narrowing rounds to nearest even, overflows to infinity and keeps
// NaN a (quiet) NaN with its sign.
constexpr float Bf16ToFloat(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }
constexpr uint16_t FloatToBf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const bool is_nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
  const uint32_t rounded = (bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16;
  return static_cast<uint16_t>(is_nan ? bits >> 16 | 0x0040U : rounded);
}
float Fp16ToFloat(uint16_t bits);
uint16_t FloatToFp16(float x);

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_NVFP4_H_
