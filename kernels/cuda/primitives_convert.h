// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_PRIMITIVES_CONVERT_H_
#define KVTIER_KERNELS_CUDA_PRIMITIVES_CONVERT_H_

#include <cmath>
#include <cstdint>

#include "kernels/cuda/primitives_warp.h"
#include "kernels/cuda/target.h"

#if !defined(__CUDACC__)
#include "kernels/cuda/emu/numerics.h"
#endif

// Byte permutation, arithmetic on packed 16-bit floats, conversions. A "pair" is two 16-bit
// elements in a register, the first in the low half. Nothing here flushes subnormals except Exp2,
// Log2 and ReciprocalNear. NaN results are canonical (0x7FFF). Architectures: sm_80 unless it says
// otherwise.

namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR {

#if defined(__CUDACC__)

// Byte i of the result is byte (selector nibble i) of the 8 bytes b:a; nibble bit 3 replicates that
// byte's sign instead.
KVTIER_DEVICE uint32_t PermuteBytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}

// FP32 steps that the compiler must not fuse: each rounds to nearest even.
KVTIER_DEVICE float MulRn(float a, float b) { return __fmul_rn(a, b); }
KVTIER_DEVICE float AddRn(float a, float b) { return __fadd_rn(a, b); }
KVTIER_DEVICE float SubRn(float a, float b) { return __fsub_rn(a, b); }
KVTIER_DEVICE float FmaRn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
KVTIER_DEVICE float MinFloat(float a, float b) { return fminf(a, b); }
KVTIER_DEVICE float MaxFloat(float a, float b) { return fmaxf(a, b); }

// 2^x and log2(x), about 2 units in the last place; subnormal inputs and results count as zero.
KVTIER_DEVICE float Exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
KVTIER_DEVICE float Log2(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / x: correctly rounded, and within 1 unit in the last place in one instruction. The second
// flushes subnormals; its emulation is wrong by a unit half of the time, so that nobody relies on
// more.
KVTIER_DEVICE float ReciprocalRn(float x) { return __frcp_rn(x); }
KVTIER_DEVICE float ReciprocalNear(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// FP16 pairs.
KVTIER_DEVICE uint32_t MulHalf2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
KVTIER_DEVICE uint32_t FmaHalf2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}
// The larger element; NaN if one is.
KVTIER_DEVICE uint32_t MaxNanHalf2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
// 0xFFFF in each half where a > b, or a >= b, or one of them is NaN; else 0.
KVTIER_DEVICE uint32_t GreaterOrNanMask(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("set.gtu.u32.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
KVTIER_DEVICE uint32_t GreaterEqualOrNanMask(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("set.geu.u32.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// BF16 pairs.
KVTIER_DEVICE uint32_t FmaBf162(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}
KVTIER_DEVICE uint32_t MaxNanBf162(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// FP32 to a pair, nearest even, beyond the range to infinity; and back.
KVTIER_DEVICE uint32_t PackHalf2(float first, float second) {
  uint32_t result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
  return result;
}
KVTIER_DEVICE uint32_t PackBf162(float first, float second) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
  return result;
}
KVTIER_DEVICE float FirstHalf(uint32_t pair) {
  float result;
  asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.f32.f16 %0, lo; }" : "=f"(result) : "r"(pair));
  return result;
}
KVTIER_DEVICE float SecondHalf(uint32_t pair) {
  float result;
  asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.f32.f16 %0, hi; }" : "=f"(result) : "r"(pair));
  return result;
}
// FP32 to the nearest FP16 above (or equal), or below, as bits; up beyond the range is infinity,
// down 65504. For x >= 0.
KVTIER_DEVICE uint32_t HalfAbove(float x) {
  uint16_t result;
  asm("cvt.rp.f16.f32 %0, %1;" : "=h"(result) : "f"(x));
  return result;
}
KVTIER_DEVICE uint32_t HalfBelow(float x) {
  uint16_t result;
  asm("cvt.rm.f16.f32 %0, %1;" : "=h"(result) : "f"(x));
  return result;
}

// Arch::kConvertsE4m3. Two E4M3 bytes (bits 0..15) to a pair of FP16, exact. And FP32 to two bytes:
// nearest even, saturating at 448, NaN to 0x7F.
KVTIER_DEVICE uint32_t E4m3ToHalf2(uint32_t bytes) {
  uint32_t result;
  asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.rn.f16x2.e4m3x2 %0, h; }" : "=r"(result) : "r"(bytes));
  return result;
}
KVTIER_DEVICE uint32_t PackE4m3(float first, float second) {
  uint16_t result;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(second), "f"(first));
  return result;
}

// Arch::kConvertsE2m1. The 8 codes of a word to FP16 pairs (0,1) (2,3) (4,5) (6,7); and 8 FP32
// values to a word of codes: nearest, ties to even, saturating at 6, NaN to 0x7.
KVTIER_DEVICE void E2m1ToHalf2(uint32_t codes, uint32_t (&pairs)[4]) {
  asm("{ .reg .b8 b0, b1, b2, b3; mov.b32 {b0, b1, b2, b3}, %4;\n"
      "  cvt.rn.f16x2.e2m1x2 %0, b0; cvt.rn.f16x2.e2m1x2 %1, b1;\n"
      "  cvt.rn.f16x2.e2m1x2 %2, b2; cvt.rn.f16x2.e2m1x2 %3, b3; }"
      : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
      : "r"(codes));
}
KVTIER_DEVICE uint32_t PackE2m1(const float (&x)[8]) {
  uint32_t result;
  asm("{ .reg .b8 b0, b1, b2, b3;\n"
      "  cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1; cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n"
      "  cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5; cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n"
      "  mov.b32 %0, {b0, b1, b2, b3}; }"
      : "=r"(result)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
  return result;
}

#else  // The emulation. The host compiles with -ffp-contract=off.

KVTIER_DEVICE uint32_t PermuteBytes(uint32_t a, uint32_t b, uint32_t selector) {
  return emu::PermuteBytes(a, b, selector);
}

KVTIER_DEVICE float MulRn(float a, float b) { return a * b; }
KVTIER_DEVICE float AddRn(float a, float b) { return a + b; }
KVTIER_DEVICE float SubRn(float a, float b) { return a - b; }
KVTIER_DEVICE float FmaRn(float a, float b, float c) { return std::fma(a, b, c); }
KVTIER_DEVICE float MinFloat(float a, float b) { return std::fmin(a, b); }
KVTIER_DEVICE float MaxFloat(float a, float b) { return std::fmax(a, b); }

KVTIER_DEVICE float Exp2(float x) { return emu::Exp2(x); }
KVTIER_DEVICE float Log2(float x) { return emu::Log2(x); }

KVTIER_DEVICE float ReciprocalRn(float x) { return 1.0F / x; }
KVTIER_DEVICE float ReciprocalNear(float x) { return emu::ReciprocalNear(x); }

KVTIER_DEVICE uint32_t MulHalf2(uint32_t a, uint32_t b) { return emu::MulHalf2(a, b); }
KVTIER_DEVICE uint32_t FmaHalf2(uint32_t a, uint32_t b, uint32_t c) {
  return emu::FmaHalf2(a, b, c);
}
KVTIER_DEVICE uint32_t MaxNanHalf2(uint32_t a, uint32_t b) { return emu::MaxNanHalf2(a, b); }
KVTIER_DEVICE uint32_t GreaterOrNanMask(uint32_t a, uint32_t b) {
  return emu::GreaterOrNanMask(a, b);
}
KVTIER_DEVICE uint32_t GreaterEqualOrNanMask(uint32_t a, uint32_t b) {
  return emu::GreaterEqualOrNanMask(a, b);
}

KVTIER_DEVICE uint32_t FmaBf162(uint32_t a, uint32_t b, uint32_t c) {
  return emu::FmaBf162(a, b, c);
}
KVTIER_DEVICE uint32_t MaxNanBf162(uint32_t a, uint32_t b) { return emu::MaxNanBf162(a, b); }

KVTIER_DEVICE uint32_t PackHalf2(float first, float second) {
  return emu::ToHalf(first) | emu::ToHalf(second) << 16;
}
KVTIER_DEVICE uint32_t PackBf162(float first, float second) {
  return emu::ToBf16(first) | emu::ToBf16(second) << 16;
}
KVTIER_DEVICE float FirstHalf(uint32_t pair) { return emu::FromHalf(pair & 0xFFFFU); }
KVTIER_DEVICE float SecondHalf(uint32_t pair) { return emu::FromHalf(pair >> 16); }
KVTIER_DEVICE uint32_t HalfAbove(float x) { return emu::HalfAbove(x); }
KVTIER_DEVICE uint32_t HalfBelow(float x) { return emu::HalfBelow(x); }

KVTIER_DEVICE uint32_t E4m3ToHalf2(uint32_t bytes) {
  return emu::ToHalf(emu::FromE4m3(bytes & 0xFFU)) | emu::ToHalf(emu::FromE4m3(bytes >> 8 & 0xFFU))
                                                         << 16;
}
KVTIER_DEVICE uint32_t PackE4m3(float first, float second) {
  return emu::ToE4m3(first) | emu::ToE4m3(second) << 8;
}

KVTIER_DEVICE void E2m1ToHalf2(uint32_t codes, uint32_t (&pairs)[4]) {
  for (uint32_t i = 0; i < 4; ++i) {
    pairs[i] = emu::ToHalf(emu::FromE2m1(codes >> (8 * i))) |
               emu::ToHalf(emu::FromE2m1(codes >> (8 * i + 4))) << 16;
  }
}
KVTIER_DEVICE uint32_t PackE2m1(const float (&x)[8]) {
  uint32_t codes = 0;
  for (uint32_t i = 0; i < 8; ++i) codes |= emu::ToE2m1(x[i]) << (4 * i);
  return codes;
}

#endif

// Exact where the product is: -0 as addend keeps the sign of zeros. (mul.bf16x2 needs sm_90.)
KVTIER_DEVICE uint32_t MulBf162(uint32_t a, uint32_t b) { return FmaBf162(a, b, 0x80008000U); }

KVTIER_DEVICE float FirstBf16(uint32_t pair) { return FloatOf(pair << 16); }
KVTIER_DEVICE float SecondBf16(uint32_t pair) { return FloatOf(pair & 0xFFFF0000U); }

}  // namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR

#endif  // KVTIER_KERNELS_CUDA_PRIMITIVES_CONVERT_H_
