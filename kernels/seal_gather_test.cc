// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/gather.h"
#include "kernels/nvfp4.h"
#include "kernels/seal.h"
#include "kernels/tile_layout.h"

namespace kvtier::kernels {
namespace {

constexpr uint32_t kSeed = 20261106;
constexpr float kGk = 0x1p-6F;
constexpr float kGv = 0x1p-8F;

// Rows of an element type with a gap after each, and the values the format sees for them.
struct Source {
  Source(ElementType element_type, const TileShape& shape, uint32_t stride, std::mt19937* random)
      : type(element_type), token_stride(stride), bytes(uint64_t{shape.block_tokens} * stride * 4) {
    std::normal_distribution<float> normal;
    for (uint32_t token = 0; token < shape.block_tokens; ++token) {
      for (uint32_t dim = 0; dim < shape.head_dim; ++dim) {
        const float outlier = dim % 37 == 5 ? 16.0F : 1.0F;
        values.push_back(Store(uint64_t{token} * stride + dim, outlier * normal(*random)));
      }
    }
  }

  // Stores x and returns what the format quantizes: FP32 is first rounded to BF16.
  float Store(uint64_t element_idx, float x) {
    std::byte* target = bytes.data() + element_idx * ElementBytes(type);
    if (type == ElementType::kFp32) {
      std::memcpy(target, &x, sizeof(x));
      return Bf16ToFloat(FloatToBf16(x));
    }
    const bool bf16 = type == ElementType::kBf16;
    const uint16_t bits = bf16 ? FloatToBf16(x) : FloatToFp16(x);
    std::memcpy(target, &bits, sizeof(bits));
    return bf16 ? Bf16ToFloat(bits) : Fp16ToFloat(bits);
  }

  ConstRows Rows() const {
    return {.type = type, .data = bytes.data(), .token_stride = token_stride};
  }

  ElementType type;
  uint32_t token_stride;
  std::vector<std::byte> bytes;
  std::vector<float> values;  // [token][dim], dense
};

std::vector<float> QuantizeDequantize(const std::vector<float>& values, float g,
                                      ScaleSearch search) {
  std::vector<float> result(values.size());
  for (size_t i = 0; i < values.size(); i += kVectorDims) {
    uint8_t codes[kVectorCodeBytes];
    uint8_t scale = 0;
    Quantize16(&values[i], g, codes, &scale, search);
    Dequantize16(codes, scale, g, &result[i]);
  }
  return result;
}

void CheckSealThenGather(const TileShape& shape, ElementType type, uint32_t stride_gap,
                         ScaleSearch search) {
  std::mt19937 random(kSeed);
  const Source k(type, shape, shape.head_dim + stride_gap, &random);
  const Source v(type, shape, shape.head_dim + 2 * stride_gap, &random);
  std::vector<std::byte> tile(TileBytes(shape), std::byte{0x7F});
  SealStats stats;
  const SealOptions options{.g_k = kGk, .g_v = kGv, .search = search};
  ASSERT_TRUE(SealTile(shape, k.Rows(), v.Rows(), options, tile, &stats).ok());
  ASSERT_TRUE(ValidateTile(shape, tile).ok());
  EXPECT_EQ(stats.nonfinite_count, 0U);

  const uint64_t stride = shape.head_dim + stride_gap;
  const auto untouched = std::numeric_limits<float>::max();
  std::vector<float> k_out(shape.block_tokens * stride, untouched);
  std::vector<uint16_t> v_out(shape.block_tokens * stride, 0x5A5A);
  ASSERT_TRUE(GatherTile(shape, tile, kGk, kGv,
                         {.type = ElementType::kFp32, .data = k_out.data(), .token_stride = stride},
                         {.type = ElementType::kBf16, .data = v_out.data(), .token_stride = stride})
                  .ok());
  const std::vector<float> k_expected = QuantizeDequantize(k.values, kGk, search);
  const std::vector<float> v_expected = QuantizeDequantize(v.values, kGv, search);
  for (uint32_t token = 0; token < shape.block_tokens; ++token) {
    for (uint32_t dim = 0; dim < stride; ++dim) {
      const uint64_t idx = token * stride + dim;
      if (dim >= shape.head_dim) {
        ASSERT_EQ(k_out[idx], untouched);
        ASSERT_EQ(v_out[idx], 0x5A5A);
        continue;
      }
      const uint64_t dense = uint64_t{token} * shape.head_dim + dim;
      ASSERT_EQ(k_out[idx], k_expected[dense]);
      ASSERT_EQ(Bf16ToFloat(v_out[idx]), v_expected[dense]);
    }
  }
}

TEST(SealGather, EqualsQuantizeDequantizeForEveryShapeAndType) {
  for (const uint32_t block_tokens : {16U, 32U, 64U, 128U}) {
    for (const uint32_t head_dim : {64U, 80U, 96U, 128U, 192U, 256U}) {
      for (const ElementType type : {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32}) {
        CheckSealThenGather({.block_tokens = block_tokens, .head_dim = head_dim}, type,
                            type == ElementType::kFp16 ? 0 : 7, ScaleSearch::kAmax6);
      }
    }
  }
}

TEST(SealGather, FourOverSixReachesTheTile) {
  CheckSealThenGather({.block_tokens = 16, .head_dim = 128}, ElementType::kBf16, 0,
                      ScaleSearch::kFourOverSix);
}

TEST(SealGather, QuantizationErrorIsThatOfTheFormat) {
  std::mt19937 random(kSeed);
  std::normal_distribution<float> normal;
  const TileShape shape{.block_tokens = 128, .head_dim = 128};
  std::vector<float> x(16384);
  for (float& value : x) value = normal(random);
  std::vector<float> k(x.size());
  std::vector<float> v(x.size());
  std::vector<std::byte> tile(TileBytes(shape));
  SealStats stats;
  const ConstRows rows{.type = ElementType::kFp32, .data = x.data(), .token_stride = 128};
  ASSERT_TRUE(SealTile(shape, rows, rows, {.g_k = kGk, .g_v = kGv}, tile, &stats).ok());
  ASSERT_TRUE(GatherTile(shape, tile, kGk, kGv,
                         {.type = ElementType::kFp32, .data = k.data(), .token_stride = 128},
                         {.type = ElementType::kFp32, .data = v.data(), .token_stride = 128})
                  .ok());
  for (const std::vector<float>& out : {k, v}) {
    double error = 0;
    double norm = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      error += std::pow(static_cast<double>(out[i]) - static_cast<double>(x[i]), 2);
      norm += std::pow(static_cast<double>(x[i]), 2);
    }
    // Two-sided: NVFP4 of Gaussian data is 9.5 % off; less would mean the test compares nothing.
    EXPECT_GT(std::sqrt(error / norm), 0.085) << "seed " << kSeed;
    EXPECT_LT(std::sqrt(error / norm), 0.105) << "seed " << kSeed;
  }
}

class SealErrors : public testing::Test {
 protected:
  SealErrors() : data_(uint64_t{16} * 64, 0), tile_(TileBytes(shape_)) {}

  ConstRows Good() const {
    return {.type = ElementType::kBf16, .data = data_.data(), .token_stride = 64};
  }
  StatusCode Seal(const TileShape& shape, const ConstRows& k, const ConstRows& v,
                  const SealOptions& options) {
    return SealTile(shape, k, v, options, tile_, &stats_).code();
  }

  const TileShape shape_{.block_tokens = 16, .head_dim = 64};
  std::vector<uint16_t> data_;
  std::vector<std::byte> tile_;
  SealStats stats_;
};

TEST_F(SealErrors, AreInvalidArgumentAndWriteNothing) {
  std::fill(tile_.begin(), tile_.end(), std::byte{0xAB});
  const auto invalid = StatusCode::kInvalidArgument;
  EXPECT_EQ(Seal({.block_tokens = 17, .head_dim = 64}, Good(), Good(), {}), invalid);
  EXPECT_EQ(Seal({.block_tokens = 32, .head_dim = 64}, Good(), Good(), {}), invalid);  // dst size.
  ConstRows bad = Good();
  bad.data = nullptr;
  EXPECT_EQ(Seal(shape_, bad, Good(), {}), invalid);
  bad = Good();
  bad.token_stride = 63;
  EXPECT_EQ(Seal(shape_, Good(), bad, {}), invalid);
  bad = Good();
  bad.type = static_cast<ElementType>(9);
  EXPECT_EQ(Seal(shape_, bad, Good(), {}), invalid);
  EXPECT_EQ(Seal(shape_, Good(), Good(), {.g_k = 0.3F}), invalid);
  EXPECT_EQ(Seal(shape_, Good(), Good(), {.g_v = 0.0F}), invalid);
  EXPECT_EQ(Seal(shape_, Good(), Good(), {.search = static_cast<ScaleSearch>(7)}), invalid);
  EXPECT_EQ(SealTile(shape_, Good(), Good(), {}, tile_, nullptr).code(), invalid);
  for (const std::byte byte : tile_) ASSERT_EQ(byte, std::byte{0xAB});
}

TEST_F(SealErrors, StatsCountNonfiniteAndSaturatedVectors) {
  data_[0] = 0x7F80;              // Infinity: nonfinite and saturated.
  data_[16] = 0x7FC0;             // NaN: nonfinite.
  data_[32] = FloatToBf16(1e6F);  // Saturated.
  ASSERT_EQ(Seal(shape_, Good(), Good(), {}), StatusCode::kOk);
  EXPECT_EQ(stats_.nonfinite_count, 4U);  // K and V have the same source here.
  EXPECT_EQ(stats_.saturated_count, 4U);
  EXPECT_TRUE(ValidateTile(shape_, tile_).ok());
}

TEST(Gather, RefusesEveryScaleByteThatIsNeverWritten) {
  const TileShape shape{.block_tokens = 16, .head_dim = 64};
  std::vector<float> k(uint64_t{16} * 64, 3.0F);
  std::vector<float> v(uint64_t{16} * 64, 3.0F);
  const MutableRows k_rows{.type = ElementType::kFp32, .data = k.data(), .token_stride = 64};
  const MutableRows v_rows{.type = ElementType::kFp32, .data = v.data(), .token_stride = 64};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    for (const uint64_t position :
         {KScaleOffset(shape), VDataOffset(shape) - 1, VScaleOffset(shape), TileBytes(shape) - 1}) {
      std::vector<std::byte> tile(TileBytes(shape), std::byte{0});
      std::fill_n(tile.begin(), KScaleOffset(shape), std::byte{0xFF});  // Codes are all valid.
      tile[position] = static_cast<std::byte>(byte);
      const StatusCode expected = byte <= 0x7E ? StatusCode::kOk : StatusCode::kDataLoss;
      ASSERT_EQ(ValidateTile(shape, tile).code(), expected) << byte;
      std::fill(k.begin(), k.end(), 3.0F);
      ASSERT_EQ(GatherTile(shape, tile, 1.0F, 1.0F, k_rows, v_rows).code(), expected);
      ASSERT_EQ(k[0] == 3.0F, expected == StatusCode::kDataLoss);
    }
  }
}

TEST(Gather, RefusesBadArguments) {
  const TileShape shape{.block_tokens = 16, .head_dim = 64};
  const std::vector<std::byte> tile(TileBytes(shape));
  std::vector<float> data(uint64_t{16} * 64);
  const MutableRows good{.type = ElementType::kFp32, .data = data.data(), .token_stride = 64};
  const auto gather = [&](std::span<const std::byte> bytes, float g, const MutableRows& v) {
    return GatherTile(shape, bytes, g, 1.0F, good, v).code();
  };
  EXPECT_EQ(gather(tile, 1.0F, good), StatusCode::kOk);
  EXPECT_EQ(gather(std::span(tile).first(1151), 1.0F, good), StatusCode::kInvalidArgument);
  EXPECT_EQ(gather(tile, 3.0F, good), StatusCode::kInvalidArgument);
  MutableRows bad = good;
  bad.type = ElementType::kFp16;
  EXPECT_EQ(gather(tile, 1.0F, bad), StatusCode::kInvalidArgument);
  bad = good;
  bad.data = nullptr;
  EXPECT_EQ(gather(tile, 1.0F, bad), StatusCode::kInvalidArgument);
  bad = good;
  bad.token_stride = 1;
  EXPECT_EQ(gather(tile, 1.0F, bad), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvtier::kernels
