// SPDX-License-Identifier: Apache-2.0
#include "kernels/nvfp4.h"

#include <bit>
#include <cmath>
#include <cstddef>
#include <limits>

namespace kvtier::kernels {
namespace {

constexpr float kGlobalScaleMin = 0x1p-100F;
constexpr float kGlobalScaleMax = 0x1p+100F;
constexpr uint32_t kFloatSignBit = 0x80000000U;
constexpr uint8_t kNanCode = 0x7;  // +6 for NaN of either sign, as the hardware conversion gives.
constexpr uint8_t kE4m3Nan = 0x7F;

// Midpoints between adjacent codes. A midpoint belongs to the neighbour with the even code, so the
// comparison alternates: > leaves a tie at the lower code, >= lifts it to the upper one.
struct Thresholds {
  explicit Thresholds(float step)
      : t01(0.25F * step),
        t12(0.75F * step),
        t23(1.25F * step),
        t34(1.75F * step),
        t45(2.5F * step),
        t56(3.5F * step),
        t67(5.0F * step) {}

  float t01, t12, t23, t34, t45, t56, t67;
};

// The code of x / step. The products t * step are exact, so no division is needed. NaN -> 0 or 8.
inline uint32_t CodeOf(float x, const Thresholds& t) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const float a = std::bit_cast<float>(bits & ~kFloatSignBit);
  const uint32_t magnitude = uint32_t{a > t.t01} + uint32_t{a >= t.t12} + uint32_t{a > t.t23} +
                             uint32_t{a >= t.t34} + uint32_t{a > t.t45} + uint32_t{a >= t.t56} +
                             uint32_t{a > t.t67};
  return magnitude | (bits >> 28 & 0x8U);
}

// E4M3: sign | 4 exponent bits, bias 7 | 3 mantissa bits; exponent 0 is subnormal, no infinity.
constexpr std::array<float, 256> MakeE4m3Values() {
  std::array<float, 256> values{};
  for (uint32_t byte = 0; byte < values.size(); ++byte) {
    const uint32_t exponent = byte >> 3 & 0xFU;
    const uint32_t mantissa = byte & 0x7U;
    float magnitude = static_cast<float>(exponent == 0 ? mantissa : 8U + mantissa) * 0x1p-9F;
    for (uint32_t i = 1; i < exponent; ++i) magnitude *= 2.0F;
    if ((byte & 0x7FU) == kE4m3Nan) magnitude = std::numeric_limits<float>::quiet_NaN();
    values[byte] = (byte & 0x80U) != 0 ? -magnitude : magnitude;
  }
  return values;
}

constexpr std::array<float, 256> kE4m3Values = MakeE4m3Values();
static_assert(kE4m3Values[0x01] == 0x1p-9F && kE4m3Values[0x08] == 0x1p-6F);
static_assert(kE4m3Values[0x38] == 1.0F && kE4m3Values[kScaleByteMax] == kE4m3Max);

struct Candidate {
  uint8_t scale = 0;
  uint32_t codes[kVectorDims] = {};  // As wide as the values: the compiler vectorizes the compares.
};

// Codes of x for the scale byte nearest to s.
Candidate EncodeWithScale(const float x[kVectorDims], float s, float g, bool has_nan) {
  Candidate result;
  result.scale = EncodeE4m3Scale(s);
  if (result.scale == 0) return result;  // Canonical: all codes zero, signs and NaNs included.
  const Thresholds thresholds(kE4m3Values[result.scale] * g);
  for (uint32_t i = 0; i < kVectorDims; ++i) {
    result.codes[i] = CodeOf(x[i], thresholds);
  }
  if (has_nan) {
    for (uint32_t i = 0; i < kVectorDims; ++i) {
      if (std::isnan(x[i])) result.codes[i] = kNanCode;
    }
  }
  return result;
}

// In FP32 and in index order: the choice between candidates is part of the format.
float SquaredError(const float x[kVectorDims], const Candidate& candidate, float g) {
  const float step = kE4m3Values[candidate.scale] * g;
  float sum = 0.0F;
  for (uint32_t i = 0; i < kVectorDims; ++i) {
    const float error = x[i] - kE2m1Values[candidate.codes[i]] * step;
    sum += error * error;
  }
  return sum;
}

}  // namespace

uint8_t EncodeE2m1(float x) {
  if (std::isnan(x)) return kNanCode;
  return static_cast<uint8_t>(CodeOf(x, Thresholds(1.0F)));
}

uint8_t EncodeE4m3Scale(float s) {
  if (std::isnan(s)) return kE4m3Nan;
  if (!(s > 0.0F)) return 0;
  if (s >= kE4m3Max) return kScaleByteMax;
  if (s < 0x1p-6F) {
    // Subnormal: steps of 2^-9. Adding 2^14, whose unit in the last place is 2^-9, rounds to
    // nearest even there; a carry gives 8, which is the first normal byte.
    constexpr float kShift = 0x1p14F;
    return static_cast<uint8_t>(std::bit_cast<uint32_t>(s + kShift) -
                                std::bit_cast<uint32_t>(kShift));
  }
  // Normal: drop 20 mantissa bits with round to nearest even, then move the exponent bias 127 to 7.
  const uint32_t bits = std::bit_cast<uint32_t>(s);
  const uint32_t rounded = (bits + 0x7FFFFU + (bits >> 20 & 1U)) >> 20;
  return static_cast<uint8_t>(rounded - ((127U - 7U) << 3));
}

float DecodeE4m3Scale(uint8_t byte) { return kE4m3Values[byte]; }

bool IsValidGlobalScale(float g) {
  constexpr uint32_t kMantissaMask = 0x007FFFFFU;
  return g >= kGlobalScaleMin && g <= kGlobalScaleMax &&
         (std::bit_cast<uint32_t>(g) & kMantissaMask) == 0;
}

Status GlobalScaleFromAmax(float amax, float* g) {
  if (!std::isfinite(amax) || amax < 0.0F) {
    return Status::InvalidArgument("amax must be finite and not negative");
  }
  if (g == nullptr) return Status::InvalidArgument("a result pointer is required");
  if (amax == 0.0F) {
    *g = 1.0F;
    return Status();
  }
  // amax = m * 2^e with m in [0.5, 1) and 448 = 0.875 * 2^9: amax / 448 = (m / 0.875) * 2^(e - 9)
  // with the first factor in (0.5, 8/7).
  int exponent = 0;
  const float mantissa = std::frexp(amax, &exponent);
  exponent -= mantissa <= 0.875F ? 9 : 8;
  const float exact = std::ldexp(1.0F, exponent);
  *g = std::fmin(std::fmax(exact, kGlobalScaleMin), kGlobalScaleMax);
  return Status();
}

QuantizeFlags Quantize16(const float x[kVectorDims], float g, uint8_t codes[kVectorCodeBytes],
                         uint8_t* scale, ScaleSearch search) {
  constexpr uint32_t kInfinityBits = 0x7F800000U;
  uint32_t amax_bits = 0;  // Magnitudes of floats compare like their bits; NaNs are above infinity.
  for (uint32_t i = 0; i < kVectorDims; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(x[i]) & ~kFloatSignBit;
    amax_bits = bits > amax_bits ? bits : amax_bits;
  }
  const bool nonfinite = amax_bits >= kInfinityBits;
  const bool has_nan = amax_bits > kInfinityBits;
  float amax = std::bit_cast<float>(amax_bits);
  if (has_nan) {
    amax = 0.0F;
    // Not std::fmax: it turns a signaling NaN into its result.
    for (uint32_t i = 0; i < kVectorDims; ++i) {
      const float a = std::fabs(x[i]);
      if (a > amax) amax = a;
    }
  }
  // 1 / g is exact. The clamp keeps infinity out of the division (and of reciprocal forms of it).
  const float z = std::fmin(amax * (1.0F / g), kE4m3Max * kE2m1Max);
  Candidate best = EncodeWithScale(x, z / 6.0F, g, has_nan);
  if (search == ScaleSearch::kFourOverSix) {
    const Candidate four = EncodeWithScale(x, z / 4.0F, g, has_nan);
    const float error_six = SquaredError(x, best, g);
    const float error_four = SquaredError(x, four, g);
    if (error_four < error_six) best = four;
  }
  for (size_t i = 0; i < kVectorCodeBytes; ++i) {
    codes[i] = static_cast<uint8_t>(best.codes[2 * i] | best.codes[2 * i + 1] << 4);
  }
  *scale = best.scale;
  return QuantizeFlags{.nonfinite = nonfinite, .saturated = best.scale == kScaleByteMax};
}

void Dequantize16(const uint8_t codes[kVectorCodeBytes], uint8_t scale, float g,
                  float out[kVectorDims]) {
  const float step = kE4m3Values[scale] * g;
  for (size_t i = 0; i < kVectorCodeBytes; ++i) {
    out[2 * i] = kE2m1Values[codes[i] & 0xFU] * step;
    out[2 * i + 1] = kE2m1Values[codes[i] >> 4] * step;
  }
}

float Fp16ToFloat(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000U) << 16;
  const uint32_t exponent = bits >> 10 & 0x1FU;
  const uint32_t mantissa = bits & 0x3FFU;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  if (exponent == 0x1FU) return std::bit_cast<float>(sign | 0x7F800000U | mantissa << 13);
  return std::bit_cast<float>(sign | (exponent + (127U - 15U)) << 23 | mantissa << 13);
}

uint16_t FloatToFp16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = bits >> 16 & 0x8000U;
  const uint32_t magnitude_bits = bits & ~kFloatSignBit;
  const float magnitude = std::bit_cast<float>(magnitude_bits);
  if (std::isnan(x)) {
    return static_cast<uint16_t>(sign | 0x7E00U | (magnitude_bits >> 13 & 0x3FFU));
  }
  if (magnitude >= 65520.0F) return static_cast<uint16_t>(sign | 0x7C00U);
  if (magnitude < 0x1p-14F) {
    // Subnormal: steps of 2^-24, the unit in the last place of 0.5; see EncodeE4m3Scale.
    const uint32_t rounded =
        std::bit_cast<uint32_t>(magnitude + 0.5F) - std::bit_cast<uint32_t>(0.5F);
    return static_cast<uint16_t>(sign | rounded);
  }
  const uint32_t rounded = (magnitude_bits + 0xFFFU + (magnitude_bits >> 13 & 1U)) >> 13;
  return static_cast<uint16_t>(sign | (rounded - ((127U - 15U) << 10)));
}

}  // namespace kvtier::kernels
