// SPDX-License-Identifier: Apache-2.0
// Compares the number format with the host conversions of CUDA's cuda_fp4.h and cuda_fp8.h, which
// model cvt.rn.satfinite. Needs the toolkit's headers only: no GPU, no driver, no CUDA library.

#include <cuda_fp4.h>
#include <cuda_fp8.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "gtest/gtest.h"
#include "kernels/nvfp4.h"
#include "kernels/nvfp4_cases.h"

namespace kvtier::kernels {
namespace {

uint8_t CudaE2m1(double x) { return __nv_cvt_double_to_fp4(x, __NV_E2M1, cudaRoundNearest); }

uint8_t CudaE4m3(float s) { return __nv_cvt_float_to_fp8(s, __NV_SATFINITE, __NV_E4M3); }

// Widens through CUDA's half, not through our tables.
float CudaE4m3Value(uint8_t byte) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(byte, __NV_E4M3)));
}

float CudaE2m1Value(uint8_t code) {
  return __half2float(__half(__nv_cvt_fp4_to_halfraw(code, __NV_E2M1)));
}

TEST(CudaOracle, DecodesEveryCodeAndEveryScaleByteAlike) {
  for (uint8_t code = 0; code < 16; ++code) {
    EXPECT_EQ(std::bit_cast<uint32_t>(DecodeE2m1(code)),
              std::bit_cast<uint32_t>(CudaE2m1Value(code)));
  }
  for (uint32_t i = 0; i < 256; ++i) {
    const auto byte = static_cast<uint8_t>(i);
    const float ours = DecodeE4m3Scale(byte);
    const float theirs = CudaE4m3Value(byte);
    if (std::isnan(theirs)) {
      EXPECT_TRUE(std::isnan(ours)) << i;
    } else {
      EXPECT_EQ(std::bit_cast<uint32_t>(ours), std::bit_cast<uint32_t>(theirs)) << i;
    }
  }
}

TEST(CudaOracle, EncodesE2m1OfEveryBf16Alike) {
  for (uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const float x = Bf16ToFloat(static_cast<uint16_t>(bits));
    ASSERT_EQ(EncodeE2m1(x), CudaE2m1(static_cast<double>(x))) << bits;
    ASSERT_EQ(EncodeE2m1(x), __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest)) << bits;
  }
}

TEST(CudaOracle, EncodesE2m1AroundEveryTieAlike) {
  uint64_t case_count = 0;
  for (const float tie : {0.0F, 0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5.0F, 6.0F}) {
    for (const float sign : {1.0F, -1.0F}) {
      const auto centre = static_cast<int64_t>(std::bit_cast<uint32_t>(tie));
      for (int64_t ulp = tie == 0.0F ? 0 : -1000; ulp <= 1000; ++ulp) {
        const float x = sign * std::bit_cast<float>(static_cast<uint32_t>(centre + ulp));
        ASSERT_EQ(EncodeE2m1(x), CudaE2m1(static_cast<double>(x))) << x;
        ++case_count;
      }
    }
  }
  EXPECT_EQ(case_count, 2U * (8 * 2001 + 1001));
}

TEST(CudaOracle, EncodesE4m3OfEveryNonNegativeBf16Alike) {
  for (uint32_t bits = 0; bits < 0x8000; ++bits) {
    const float s = Bf16ToFloat(static_cast<uint16_t>(bits));
    ASSERT_EQ(EncodeE4m3Scale(s), CudaE4m3(s)) << bits;
  }
}

TEST(CudaOracle, EncodesE4m3AroundEveryMidpointAlike) {
  for (uint32_t byte = 0; byte < 0x7E; ++byte) {
    const float midpoint = (CudaE4m3Value(static_cast<uint8_t>(byte)) +
                            CudaE4m3Value(static_cast<uint8_t>(byte + 1))) /
                           2;
    const auto centre = static_cast<int64_t>(std::bit_cast<uint32_t>(midpoint));
    for (int64_t ulp = -1000; ulp <= 1000; ++ulp) {
      const float s = std::bit_cast<float>(static_cast<uint32_t>(centre + ulp));
      ASSERT_EQ(EncodeE4m3Scale(s), CudaE4m3(s)) << s;
    }
  }
}

// All 65,536 BF16 values under every scale byte they can meet: codes against the FP64 quotient. Its
// rounding cannot create or hide a tie: a BF16 value that is no tie is at least 2^-8 away from one.
TEST(CudaOracle, QuantizesEveryBf16UnderEveryScaleAlike) {
  for (const float g : {1.0F, 0x1p-6F, 0x1p+3F, 0x1p-100F, 0x1p+100F}) {
    uint64_t case_count = 0;
    uint64_t mismatch_count = 0;
    for (uint32_t byte = 0; byte <= kScaleByteMax; ++byte) {
      const double step =
          static_cast<double>(CudaE4m3Value(static_cast<uint8_t>(byte))) * static_cast<double>(g);
      const auto check = [&](float x, uint8_t, uint8_t code) {
        const uint8_t expected = byte == 0 ? uint8_t{0} : CudaE2m1(static_cast<double>(x) / step);
        ++case_count;
        mismatch_count += code != expected ? 1 : 0;
      };
      ASSERT_TRUE(ForEachBf16UnderScale(static_cast<uint8_t>(byte), g, check)) << byte;
    }
    EXPECT_EQ(mismatch_count, 0U) << "of " << case_count << " cases, g = " << g;
    EXPECT_GT(case_count, 65536U);
    RecordProperty("cases_g_" + std::to_string(std::ilogb(g)), std::to_string(case_count));
  }
}

TEST(CudaOracle, ChoosesTheScaleOfEveryBf16MaximumAlike) {
  for (const float g : {1.0F, 0x1p-6F, 0x1p+3F, 0x1p-100F, 0x1p+100F}) {
    for (uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
      const float value = Bf16ToFloat(static_cast<uint16_t>(bits));
      float x[kVectorDims] = {};
      x[bits % kVectorDims] = value;
      uint8_t codes[kVectorCodeBytes];
      uint8_t scale = 0;
      Quantize16(x, g, codes, &scale);
      // NaN takes no part in the maximum; the quotient saturates beyond 448.
      const double amax = std::isnan(value) ? 0.0 : std::fabs(static_cast<double>(value));
      const auto quotient = static_cast<float>(amax / (6.0 * static_cast<double>(g)));
      ASSERT_EQ(scale, CudaE4m3(quotient)) << bits << " g " << g;
      ASSERT_TRUE(IsValidScaleByte(scale));
    }
  }
}

TEST(CudaOracle, DequantizesEveryCodeUnderEveryScaleAlike) {
  for (uint32_t byte = 0; byte <= kScaleByteMax; ++byte) {
    for (uint32_t pair = 0; pair < 256; ++pair) {
      const uint8_t codes[kVectorCodeBytes] = {static_cast<uint8_t>(pair)};
      float out[kVectorDims];
      Dequantize16(codes, static_cast<uint8_t>(byte), 0x1p-6F, out);
      // The low nibble is the first value of the pair in CUDA's fp4x2, too.
      const __half2 both(__half2_raw(
          __nv_cvt_fp4x2_to_halfraw2(static_cast<__nv_fp4x2_storage_t>(pair), __NV_E2M1)));
      const float step = CudaE4m3Value(static_cast<uint8_t>(byte)) * 0x1p-6F;
      ASSERT_EQ(out[0], __half2float(both.x) * step);
      ASSERT_EQ(out[1], __half2float(both.y) * step);
    }
  }
}

TEST(CudaOracle, PacksPairsAlike) {
  for (uint32_t i = 0; i < 16; ++i) {
    for (uint32_t j = 0; j < 16; ++j) {
      float x[kVectorDims] = {DecodeE2m1(static_cast<uint8_t>(i)),
                              DecodeE2m1(static_cast<uint8_t>(j)), 6.0F};
      uint8_t codes[kVectorCodeBytes];
      uint8_t scale = 0;
      Quantize16(x, 1.0F, codes, &scale);
      ASSERT_EQ(scale, 0x38);
      ASSERT_EQ(codes[0],
                __nv_cvt_float2_to_fp4x2(make_float2(x[0], x[1]), __NV_E2M1, cudaRoundNearest));
    }
  }
}

}  // namespace
}  // namespace kvtier::kernels
