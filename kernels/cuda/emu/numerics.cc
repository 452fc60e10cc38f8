// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/emu/numerics.h"

#include <bit>
#include <cmath>
#include <limits>

#include "kernels/nvfp4.h"

namespace kvtier::kernels::cuda::emu {
namespace {

constexpr uint32_t kCanonicalNan = 0x7FFF;
constexpr uint32_t kHalfInfinity = 0x7C00;
constexpr uint32_t kHalfMax = 0x7BFF;

float FlushSubnormal(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0F, x) : x;
}

float FromBf16(uint32_t bits) { return Bf16ToFloat(static_cast<uint16_t>(bits)); }

// x as a float whose further rounding to a narrower type is right: the last bit of an inexact
// result is 1 (round to odd).
float RoundToOdd(double x) {
  const auto rounded = static_cast<float>(x);
  const auto back = static_cast<double>(rounded);
  if (back == x || std::isnan(x) || std::isinf(rounded)) return rounded;
  const uint32_t bits = std::bit_cast<uint32_t>(rounded);
  if ((bits & 1U) != 0) return rounded;
  // Of the two neighbours that enclose x, one is `rounded`; the other has the odd last bit.
  return std::bit_cast<float>(std::fabs(back) < std::fabs(x) ? bits + 1 : bits - 1);
}

// a * b + c with one rounding to odd in FP32: the product of two 16-bit floats is exact in FP64,
// and the error of its sum with c is known (TwoSum).
float FmaToOdd(float a, float b, float c) {
  const double product = static_cast<double>(a) * static_cast<double>(b);
  const auto addend = static_cast<double>(c);
  const double sum = product + addend;
  if (!std::isfinite(sum)) return static_cast<float>(sum);
  const double addend_part = sum - product;
  const double error = (product - (sum - addend_part)) + (addend - addend_part);
  if (error == 0.0) return RoundToOdd(sum);
  const auto bits = std::bit_cast<uint64_t>(sum);
  if ((bits & 1U) != 0) return RoundToOdd(sum);
  const bool is_above = (error > 0.0) == (sum > 0.0);
  return RoundToOdd(std::bit_cast<double>(is_above ? bits + 1 : bits - 1));
}

template <typename Function>
uint32_t ForBoth(const Function& function, uint32_t a, uint32_t b) {
  return function(a & 0xFFFFU, b & 0xFFFFU) | function(a >> 16, b >> 16) << 16;
}

}  // namespace

uint32_t PermuteBytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> (4 * i) & 0xFU;
    auto byte = static_cast<uint32_t>(bytes >> (8 * (nibble & 7U)) & 0xFFU);
    if ((nibble & 8U) != 0) byte = (byte & 0x80U) != 0 ? 0xFFU : 0x00U;
    result |= byte << (8 * i);
  }
  return result;
}

float Exp2(float x) {
  return FlushSubnormal(static_cast<float>(std::exp2(static_cast<double>(FlushSubnormal(x)))));
}

float Log2(float x) {
  return FlushSubnormal(static_cast<float>(std::log2(static_cast<double>(FlushSubnormal(x)))));
}

float ReciprocalNear(float x) {
  const float result = FlushSubnormal(1.0F / FlushSubnormal(x));
  const bool is_exact = (std::bit_cast<uint32_t>(x) & 0x7FFFFFU) == 0;
  if (is_exact || !std::isfinite(result) || result == 0.0F) return result;
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t mixed = (bits >> 20 ^ bits >> 21 ^ bits >> 23) & 3U;
  if (mixed < 2) return result;
  return std::nextafter(result, mixed == 2 ? 0.0F : std::copysign(1e38F, result));
}

uint32_t ToHalf(float x) { return std::isnan(x) ? kCanonicalNan : FloatToFp16(x); }
float FromHalf(uint32_t bits) { return Fp16ToFloat(static_cast<uint16_t>(bits)); }

uint32_t HalfAbove(float x) {
  const uint32_t nearest = ToHalf(x);
  if (nearest == kCanonicalNan) return nearest;
  return FromHalf(nearest) < x ? nearest + 1 : nearest;
}

uint32_t HalfBelow(float x) {
  const uint32_t nearest = ToHalf(x);
  if (nearest == kCanonicalNan) return nearest;
  if (nearest == kHalfInfinity) return std::isinf(x) ? nearest : kHalfMax;
  return FromHalf(nearest) > x ? nearest - 1 : nearest;
}

uint32_t ToBf16(float x) { return std::isnan(x) ? kCanonicalNan : FloatToBf16(x); }

uint32_t ToE4m3(float x) {
  if (std::isnan(x)) return 0x7F;
  return EncodeE4m3Scale(std::fabs(x)) | (std::signbit(x) ? 0x80U : 0U);
}
float FromE4m3(uint32_t byte) { return DecodeE4m3Scale(static_cast<uint8_t>(byte)); }
uint32_t ToE2m1(float x) { return EncodeE2m1(x); }
float FromE2m1(uint32_t code) { return DecodeE2m1(static_cast<uint8_t>(code & 0xFU)); }

uint32_t MulHalf2(uint32_t a, uint32_t b) {
  // The product of two FP16 numbers is exact in FP32.
  const auto mul = [](uint32_t x, uint32_t y) { return ToHalf(FromHalf(x) * FromHalf(y)); };
  return ForBoth(mul, a, b);
}

uint32_t FmaHalf2(uint32_t a, uint32_t b, uint32_t c) {
  const auto fma = [&](uint32_t shift) {
    return ToHalf(FmaToOdd(FromHalf(a >> shift & 0xFFFFU), FromHalf(b >> shift & 0xFFFFU),
                           FromHalf(c >> shift & 0xFFFFU)));
  };
  return fma(0) | fma(16) << 16;
}

uint32_t MaxNanHalf2(uint32_t a, uint32_t b) {
  const auto max = [](uint32_t x, uint32_t y) {
    if (std::isnan(FromHalf(x)) || std::isnan(FromHalf(y))) return kCanonicalNan;
    if (FromHalf(x) == FromHalf(y)) return x & y;  // +0 is above -0.
    return FromHalf(x) > FromHalf(y) ? x : y;
  };
  return ForBoth(max, a, b);
}

uint32_t GreaterOrNanMask(uint32_t a, uint32_t b) {
  const auto compare = [](uint32_t x, uint32_t y) {
    return FromHalf(x) <= FromHalf(y) ? 0U : 0xFFFFU;
  };
  return ForBoth(compare, a, b);
}

uint32_t GreaterEqualOrNanMask(uint32_t a, uint32_t b) {
  const auto compare = [](uint32_t x, uint32_t y) {
    return FromHalf(x) < FromHalf(y) ? 0U : 0xFFFFU;
  };
  return ForBoth(compare, a, b);
}

uint32_t FmaBf162(uint32_t a, uint32_t b, uint32_t c) {
  const auto fma = [&](uint32_t shift) {
    return ToBf16(FmaToOdd(FromBf16(a >> shift & 0xFFFFU), FromBf16(b >> shift & 0xFFFFU),
                           FromBf16(c >> shift & 0xFFFFU)));
  };
  return fma(0) | fma(16) << 16;
}

uint32_t MaxNanBf162(uint32_t a, uint32_t b) {
  const auto max = [](uint32_t x, uint32_t y) {
    if (std::isnan(FromBf16(x)) || std::isnan(FromBf16(y))) return kCanonicalNan;
    if (FromBf16(x) == FromBf16(y)) return x & y;
    return FromBf16(x) > FromBf16(y) ? x : y;
  };
  return ForBoth(max, a, b);
}

}  // namespace kvtier::kernels::cuda::emu
