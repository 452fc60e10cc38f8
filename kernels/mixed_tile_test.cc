// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/gather.h"
#include "kernels/nvfp4.h"
#include "kernels/seal.h"
#include "kernels/tile_layout.h"

// Sealing and gathering tiles with FP8 and BF16 sides, against one element at a time.

namespace kvtier::kernels {
namespace {

constexpr uint32_t kSeed = 20261129;
constexpr SideFormat kFormats[] = {SideFormat::kNvfp4, SideFormat::kFp8, SideFormat::kBf16};
constexpr ElementType kTypes[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32,
                                  ElementType::kFp8E4m3};
constexpr float kSourceScale = 0.7F;
constexpr float kTargetScale = 1.3F;
constexpr uint64_t kGap = 3;

float ScaleOf(SideFormat format) { return format == SideFormat::kFp8 ? 0.011F : 0x1p-6F; }

uint8_t ToFp8(float x) {
  return static_cast<uint8_t>(EncodeE4m3Scale(std::fabs(x)) | (std::signbit(x) ? 0x80 : 0));
}

float Load(ElementType type, const std::byte* at, float scale) {
  uint16_t bits = 0;
  float x = 0;
  switch (type) {
    case ElementType::kBf16:
    case ElementType::kFp16:
      std::memcpy(&bits, at, sizeof(bits));
      return type == ElementType::kBf16 ? Bf16ToFloat(bits) : Fp16ToFloat(bits);
    case ElementType::kFp32:
      std::memcpy(&x, at, sizeof(x));
      return x;
    case ElementType::kFp8E4m3:
      return DecodeE4m3Scale(std::to_integer<uint8_t>(*at)) * scale;
  }
  return 0;
}

void Store(ElementType type, float x, float inverse_scale, std::byte* at) {
  if (type == ElementType::kFp32) {
    std::memcpy(at, &x, sizeof(x));
  } else if (type == ElementType::kFp8E4m3) {
    *at = std::byte{ToFp8(x * inverse_scale)};
  } else {
    const uint16_t bits = type == ElementType::kBf16 ? FloatToBf16(x) : FloatToFp16(x);
    std::memcpy(at, &bits, sizeof(bits));
  }
}

// Rows with a gap after each: numbers of all sizes, zeros and, with `special`, any bits.
std::vector<std::byte> RandomRows(ElementType type, const TileShape& shape, bool special,
                                  std::mt19937* random) {
  std::normal_distribution<float> normal;
  std::vector<std::byte> rows(shape.block_tokens * (shape.head_dim + kGap) * ElementBytes(type));
  for (size_t i = 0; i < rows.size(); i += ElementBytes(type)) {
    const uint32_t kind = (*random)() % 32;
    float x = normal(*random);
    if (kind == 0) x *= 0x1p-20F;
    if (kind == 1) x *= 30.0F;
    if (kind == 2) x = -0.0F;
    Store(type, x, 1.0F, &rows[i]);
    if (!special || kind != 3) continue;
    for (uint32_t b = 0; b < ElementBytes(type); ++b) {
      rows[i + b] = static_cast<std::byte>((*random)());
    }
  }
  return rows;
}

struct Channels {
  std::vector<float> mean, smooth;
};

Channels RandomChannels(uint32_t head_dim, std::mt19937* random) {
  std::normal_distribution<float> normal;
  Channels channels;
  for (uint32_t i = 0; i < head_dim; ++i) {
    channels.mean.push_back(0.5F * normal(*random));
    channels.smooth.push_back(std::exp2(normal(*random)));
  }
  return channels;
}

// The value that the format stores, of an element of a source.
float Sealed(ElementType type, float x, const Channels* channels, uint32_t dim) {
  if (channels != nullptr) x = (x - channels->mean[dim]) * (1.0F / channels->smooth[dim]);
  const bool half = type == ElementType::kBf16 || type == ElementType::kFp16;
  return half && channels == nullptr ? x : Bf16ToFloat(FloatToBf16(x));
}

class MixedTile : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (!IsaIsAvailable(GetParam())) GTEST_SKIP() << "not on this machine";
  }

  // Expects the bytes of a wide side.
  static void CheckSide(const TileShape& shape, SideFormat format, ElementType type,
                        const std::vector<std::byte>& rows, const Channels* channels,
                        std::span<const std::byte> side, SealStats* expected) {
    const float inverse = 1.0F / ScaleOf(format);
    for (uint32_t i = 0; i < shape.block_tokens * shape.head_dim; ++i) {
      const uint32_t dim = i % shape.head_dim;
      const uint64_t at = (i / shape.head_dim * (shape.head_dim + kGap) + dim) * ElementBytes(type);
      const float x = Sealed(type, Load(type, &rows[at], kSourceScale), channels, dim);
      if (format == SideFormat::kBf16) {
        uint16_t bits = 0;
        std::memcpy(&bits, &side[uint64_t{2} * i], sizeof(bits));
        ASSERT_TRUE(bits == FloatToBf16(x) || (std::isnan(x) && std::isnan(Bf16ToFloat(bits))))
            << x;
        continue;
      }
      const uint8_t byte = std::isnan(x) ? 0x7E : ToFp8(x * inverse);
      const auto actual = std::to_integer<uint8_t>(side[i]);
      ASSERT_TRUE(actual == byte || (std::isnan(x) && actual == 0xFE)) << x << " " << int(actual);
    }
    for (uint32_t i = 0; format == SideFormat::kFp8 && i < shape.block_tokens * shape.head_dim;
         i += kVectorDims) {
      bool nonfinite = false;
      float largest = 0;
      for (uint32_t dim = i % shape.head_dim; dim < i % shape.head_dim + kVectorDims; ++dim) {
        const uint64_t at =
            (i / shape.head_dim * (shape.head_dim + kGap) + dim) * ElementBytes(type);
        const float x = Sealed(type, Load(type, &rows[at], kSourceScale), channels, dim);
        nonfinite |= !std::isfinite(x);
        if (!std::isnan(x)) largest = std::fmax(largest, std::fabs(x));
      }
      expected->nonfinite_count += nonfinite ? 1 : 0;
      expected->saturated_count += largest * inverse > 464.0F ? 1 : 0;
    }
  }

  std::mt19937 random_{kSeed};
};

INSTANTIATE_TEST_SUITE_P(Isas, MixedTile, testing::ValuesIn(kAllIsas),
                         [](const auto& param_info) { return IsaName(param_info.param); });

TEST_P(MixedTile, SealsEveryFormatFromEveryType) {
  for (const TileShape shape : {TileShape{16, 64}, TileShape{32, 80}, TileShape{128, 256}}) {
    const Channels channels = RandomChannels(shape.head_dim, &random_);
    for (const ElementType type : kTypes) {
      for (const bool transform : {false, true}) {
        const auto k = RandomRows(type, shape, transform, &random_);
        const auto v = RandomRows(type, shape, !transform, &random_);
        const uint64_t stride = shape.head_dim + kGap;
        const ConstRows k_rows{
            .type = type, .data = k.data(), .token_stride = stride, .scale = kSourceScale};
        ConstRows v_rows = k_rows;
        v_rows.data = v.data();
        SealOptions options{.isa = GetParam()};
        if (transform) {
          options.k_mean = channels.mean;
          options.k_smooth = channels.smooth;
        }
        std::vector<std::byte> plain(TileBytes(shape));
        SealStats ignored;
        options.g_k = options.g_v = ScaleOf(SideFormat::kNvfp4);
        ASSERT_TRUE(SealTile(shape, k_rows, v_rows, options, plain, &ignored).ok());
        for (const SideFormat k_format : kFormats) {
          for (const SideFormat v_format : kFormats) {
            const LayerFormat format{.k = k_format, .v = v_format};
            std::vector<std::byte> tile(TileBytes(shape, format), std::byte{0xFF});
            options.g_k = ScaleOf(k_format);
            options.g_v = ScaleOf(v_format);
            SealStats stats;
            ASSERT_TRUE(SealTile(shape, format, k_rows, v_rows, options, tile, &stats).ok());
            EXPECT_TRUE(ValidateTile(shape, format, tile).ok());
            const auto k_side = std::span(tile).first(SideBytes(shape, k_format));
            const auto v_side = std::span(tile).subspan(k_side.size());
            SealStats expected;
            if (k_format == SideFormat::kNvfp4) {
              EXPECT_TRUE(std::equal(k_side.begin(), k_side.end(), plain.begin()));
            } else {
              CheckSide(shape, k_format, type, k, transform ? &channels : nullptr, k_side,
                        &expected);
            }
            if (v_format == SideFormat::kNvfp4) {
              EXPECT_TRUE(std::equal(v_side.begin(), v_side.end(),
                                     plain.begin() + int64_t(VDataOffset(shape))));
            } else {
              CheckSide(shape, v_format, type, v, nullptr, v_side, &expected);
            }
            if (k_format == SideFormat::kNvfp4 || v_format == SideFormat::kNvfp4) continue;
            EXPECT_EQ(stats.nonfinite_count, expected.nonfinite_count);
            EXPECT_EQ(stats.saturated_count, expected.saturated_count);
          }
        }
      }
    }
  }
}

TEST_P(MixedTile, GathersEveryFormatIntoEveryType) {
  for (const TileShape shape : {TileShape{16, 64}, TileShape{32, 80}, TileShape{128, 256}}) {
    const Channels channels = RandomChannels(shape.head_dim, &random_);
    const auto source = RandomRows(ElementType::kBf16, shape, false, &random_);
    const ConstRows rows{.data = source.data(), .token_stride = shape.head_dim + kGap};
    for (const SideFormat format : kFormats) {
      std::vector<std::byte> tile(TileBytes(shape, {format, format}));
      const float scale = ScaleOf(format);
      SealStats stats;
      ASSERT_TRUE(
          SealTile(shape, {format, format}, rows, rows, {.g_k = scale, .g_v = scale}, tile, &stats)
              .ok());
      std::vector<float> values(uint64_t{shape.block_tokens} * shape.head_dim);
      const MutableRows plain{
          .type = ElementType::kFp32, .data = values.data(), .token_stride = shape.head_dim};
      const GatherOptions scalar{.g_k = scale, .g_v = scale, .isa = Isa::kScalar};
      ASSERT_TRUE(GatherTile(shape, {format, format}, tile, scalar, plain, plain).ok());
      for (uint32_t i = 0; format != SideFormat::kNvfp4 && i < values.size(); ++i) {
        const bool fp8 = format == SideFormat::kFp8;
        const std::byte* at = &tile[SideBytes(shape, format) + (fp8 ? i : uint64_t{2} * i)];
        const float expected = Load(fp8 ? ElementType::kFp8E4m3 : ElementType::kBf16, at, scale);
        ASSERT_EQ(std::memcmp(&values[i], &expected, sizeof(expected)), 0);
      }
      for (const ElementType type : kTypes) {
        for (const bool transform : {false, true}) {
          const uint64_t stride = shape.head_dim + kGap;
          std::vector<std::byte> out[2];
          MutableRows targets[2];
          for (const bool is_v : {false, true}) {
            out[is_v].assign(shape.block_tokens * stride * ElementBytes(type), std::byte{0x5A});
            targets[is_v] = {.type = type,
                             .data = out[is_v].data(),
                             .token_stride = stride,
                             .scale = kTargetScale};
          }
          GatherOptions options{.g_k = scale, .g_v = scale, .isa = GetParam()};
          if (transform) {
            options.k_mean = channels.mean;
            options.k_smooth = channels.smooth;
          }
          ASSERT_TRUE(
              GatherTile(shape, {format, format}, tile, options, targets[0], targets[1]).ok());
          for (const bool is_v : {false, true}) {
            std::vector<std::byte> expected(out[is_v].size(), std::byte{0x5A});
            for (uint32_t i = 0; i < values.size(); ++i) {
              const uint32_t dim = i % shape.head_dim;
              float x = values[i];
              if (transform && !is_v) x = x * channels.smooth[dim] + channels.mean[dim];
              const uint64_t at = (i / shape.head_dim * stride + dim) * ElementBytes(type);
              Store(type, x, 1.0F / kTargetScale, &expected[at]);
            }
            ASSERT_EQ(out[is_v], expected) << "format " << int(format) << " type " << int(type);
          }
        }
      }
    }
  }
}

TEST_P(MixedTile, EveryValueOfEveryTypeIsConvertedLikeTheReference) {
  // All bit patterns of 16-bit sources into both wide formats, and back into every type.
  const TileShape shape{.block_tokens = 128, .head_dim = 256};
  for (const ElementType type : {ElementType::kBf16, ElementType::kFp16}) {
    for (const uint32_t half : {0U, 1U}) {
      std::vector<uint16_t> words(uint64_t{128} * 256);
      for (uint32_t i = 0; i < words.size(); ++i) {
        words[i] = static_cast<uint16_t>(half * words.size() + i);
      }
      const ConstRows rows{.type = type, .data = words.data(), .token_stride = 256};
      const LayerFormat format{.k = SideFormat::kFp8, .v = SideFormat::kBf16};
      std::vector<std::byte> tile(TileBytes(shape, format));
      SealStats stats;
      ASSERT_TRUE(
          SealTile(shape, format, rows, rows, {.g_k = 0.011F, .isa = GetParam()}, tile, &stats)
              .ok());
      std::vector<uint16_t> halves(words.size());
      const MutableRows fp16{
          .type = ElementType::kFp16, .data = halves.data(), .token_stride = 256};
      std::vector<std::byte> bytes(words.size());
      const MutableRows fp8{.type = ElementType::kFp8E4m3,
                            .data = bytes.data(),
                            .token_stride = 256,
                            .scale = 0.011F};
      ASSERT_TRUE(
          GatherTile(shape, format, tile, {.g_k = 0.011F, .isa = GetParam()}, fp8, fp16).ok());
      EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), tile.begin()));  // The same scale.
      for (uint32_t i = 0; i < words.size(); ++i) {
        const float x = type == ElementType::kBf16 ? Bf16ToFloat(words[i]) : Fp16ToFloat(words[i]);
        const auto byte = std::to_integer<uint8_t>(tile[i]);
        ASSERT_EQ(byte & 0x7F, std::isnan(x) ? 0x7E : ToFp8(x * (1.0F / 0.011F)) & 0x7F) << x;
        ASSERT_TRUE(std::isnan(x) || (byte >> 7 != 0) == std::signbit(x)) << x;
        const float bf16 = Bf16ToFloat(FloatToBf16(x));
        ASSERT_TRUE(halves[i] == FloatToFp16(bf16) || std::isnan(x)) << x;
        ASSERT_EQ(std::isnan(Fp16ToFloat(halves[i])), std::isnan(x)) << x;
      }
    }
  }
}

TEST_P(MixedTile, Fp8SourceKeepsItsBytesUnderTheSameScale) {
  const TileShape shape{.block_tokens = 16, .head_dim = 64};
  std::vector<std::byte> rows(uint64_t{16} * 64);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<std::byte>(i);
  for (int exponent = -100; exponent <= 100; exponent += 20) {
    for (const float mantissa : {1.0F, 1.1F, 1.3333334F, 1.999F}) {
      const float scale = std::ldexp(mantissa, exponent);
      const ConstRows source{
          .type = ElementType::kFp8E4m3, .data = rows.data(), .token_stride = 64, .scale = scale};
      std::vector<std::byte> tile(2 * rows.size());
      SealStats stats;
      ASSERT_TRUE(SealTile(shape, {SideFormat::kFp8, SideFormat::kFp8}, source, source,
                           {.g_k = scale, .g_v = scale, .isa = GetParam()}, tile, &stats)
                      .ok());
      EXPECT_EQ(stats.nonfinite_count,
                2U * 2 * 4);  // Two NaN bytes of 256, in vectors of their own.
      for (size_t i = 0; i < tile.size(); ++i) {
        const auto byte = std::to_integer<uint8_t>(rows[i % rows.size()]);
        const uint32_t expected = (byte & 0x7F) == 0x7F ? byte - 1U : byte;
        const auto actual = std::to_integer<uint8_t>(tile[i]);
        ASSERT_TRUE(actual == expected || (expected == 0xFE && actual == 0x7E)) << scale;
      }
    }
  }
}

TEST_P(MixedTile, SealsAndGathersPages) {
  const TileShape shape{.block_tokens = 16, .head_dim = 64};
  const LayerFormat format{.k = SideFormat::kBf16, .v = SideFormat::kFp8};
  const uint32_t table[] = {2, 0, 1};
  const Paging paging{.page_table = table,
                      .page_table_count = 3,
                      .page_tokens = 8,
                      .page_stride = 512,
                      .first_slot = 3};
  std::vector<uint16_t> pages(3 * 512);
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = FloatToBf16(static_cast<float>(i % 97));
  const ConstRows source{.data = pages.data(), .token_stride = 64, .paging = paging};
  std::vector<std::byte> tile(TileBytes(shape, format));
  SealStats stats;
  const float scale = 0.25F;
  ASSERT_TRUE(
      SealTile(shape, format, source, source, {.g_v = scale, .isa = GetParam()}, tile, &stats)
          .ok());
  std::vector<uint16_t> k(pages.size());
  std::vector<uint16_t> v(pages.size());
  ASSERT_TRUE(GatherTile(shape, format, tile, {.g_v = scale, .isa = GetParam()},
                         {.data = k.data(), .token_stride = 64, .paging = paging},
                         {.data = v.data(), .token_stride = 64, .paging = paging})
                  .ok());
  for (uint32_t token = 0; token < 16; ++token) {
    for (uint32_t dim = 0; dim < 64; ++dim) {
      const uint32_t slot = token + 3;
      const uint64_t at = table[slot / 8] * 512 + slot % 8 * 64 + dim;
      ASSERT_EQ(k[at], pages[at]);
      const float x = DecodeE4m3Scale(ToFp8(Bf16ToFloat(pages[at]) / scale)) * scale;
      ASSERT_EQ(Bf16ToFloat(v[at]), x);
    }
  }
}

TEST_P(MixedTile, RefusesBytesThatAreNeverWritten) {
  const TileShape shape{.block_tokens = 16, .head_dim = 64};
  const auto expect = [&](const LayerFormat& format, uint64_t at, uint32_t byte, StatusCode code) {
    std::vector<std::byte> tile(TileBytes(shape, format));
    tile[at] = static_cast<std::byte>(byte);
    EXPECT_EQ(ValidateTile(shape, format, tile).code(), code) << at << " " << byte;
    std::vector<float> out(uint64_t{16} * 64, 3.0F);
    const MutableRows rows{.type = ElementType::kFp32, .data = out.data(), .token_stride = 64};
    EXPECT_EQ(GatherTile(shape, format, tile, {.isa = GetParam()}, rows, rows).code(), code);
    EXPECT_EQ(out[0] == 3.0F, code != StatusCode::kOk);
  };
  const LayerFormat fp8_bf16{.k = SideFormat::kFp8, .v = SideFormat::kBf16};
  const LayerFormat nvfp4_fp8{.k = SideFormat::kNvfp4, .v = SideFormat::kFp8};
  for (const uint32_t byte : {0x7FU, 0xFFU}) {
    for (const uint64_t at : {0U, 500U, 1023U}) expect(fp8_bf16, at, byte, StatusCode::kDataLoss);
    expect(fp8_bf16, 1024, byte, StatusCode::kOk);
    expect(nvfp4_fp8, 575, byte, StatusCode::kDataLoss);
    expect(nvfp4_fp8, 576, byte, StatusCode::kDataLoss);
    expect(nvfp4_fp8, 511, byte, StatusCode::kOk);
  }
  expect(fp8_bf16, 5, 0xFE, StatusCode::kOk);
}

TEST_P(MixedTile, RefusesBadArgumentsAndWritesNothing) {
  const TileShape shape{.block_tokens = 16, .head_dim = 64};
  const LayerFormat format{.k = SideFormat::kFp8, .v = SideFormat::kBf16};
  std::vector<float> data(uint64_t{16} * 64, 1.0F);
  const ConstRows good{.type = ElementType::kFp32, .data = data.data(), .token_stride = 64};
  std::vector<std::byte> tile(TileBytes(shape, format), std::byte{0x2B});
  SealStats stats;
  const auto seal = [&](const LayerFormat& f, SealOptions options) {
    options.isa = GetParam();
    return SealTile(shape, f, good, good, options, tile, &stats).code();
  };
  const StatusCode invalid = StatusCode::kInvalidArgument;
  EXPECT_EQ(seal({}, {}), invalid);  // The size of dst.
  EXPECT_EQ(seal({.k = static_cast<SideFormat>(3)}, {}), invalid);
  for (const float scale :
       {0.0F, -1.0F, std::nanf(""), 1e-40F, std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(seal(format, {.g_k = scale}), invalid) << scale;
  }
  for (const std::byte byte : tile) ASSERT_EQ(byte, std::byte{0x2B});
  const MutableRows target{.type = ElementType::kFp32, .data = data.data(), .token_stride = 64};
  const std::vector<float> short_vector(63, 1.0F);
  const std::vector<float> zeros(64);
  const auto gather = [&](const LayerFormat& f, GatherOptions options) {
    options.isa = GetParam();
    return GatherTile(shape, f, tile, options, target, target).code();
  };
  EXPECT_EQ(gather({}, {}), invalid);
  EXPECT_EQ(gather({.v = static_cast<SideFormat>(9)}, {}), invalid);
  EXPECT_EQ(gather(format, {.g_k = 0.0F}), invalid);
  EXPECT_EQ(gather(format, {.k_mean = short_vector}), invalid);
  EXPECT_EQ(gather(format, {.k_smooth = zeros}), invalid);
  for (const float x : data) ASSERT_EQ(x, 1.0F);
  EXPECT_EQ(gather(format, {.g_v = std::nanf("")}), StatusCode::kOk);  // A BF16 side has no scale.
}

}  // namespace
}  // namespace kvtier::kernels
