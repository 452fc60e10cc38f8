// SPDX-License-Identifier: Apache-2.0
#include "kernels/mla.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/mla_layout.h"
#include "kernels/nvfp4.h"
#include "kernels/tile_layout.h"

// The bytes of a tile of latents, and sealing and gathering it.

namespace kvtier::kernels {
namespace {

constexpr uint32_t kSeed = 20261129;
constexpr uint32_t kRowDims = kMlaLatentDim + kMlaRopeDim;
constexpr ElementType kTypes[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32,
                                  ElementType::kFp8E4m3};

TEST(MlaLayout, AddressesCoverEveryByteOnce) {
  for (const uint32_t block_tokens : {16U, 32U, 64U, 128U}) {
    const MlaShape shape{.block_tokens = block_tokens};
    ASSERT_TRUE(Validate(shape).ok());
    std::vector<int> covered(MlaTileBytes(shape));
    for (uint32_t token = 0; token < block_tokens; ++token) {
      for (uint32_t vector = 0; vector < kMlaLatentDim / kVectorDims; ++vector) {
        for (uint32_t i = 0; i < kVectorCodeBytes; ++i) {
          ++covered[MlaCodeOffset(shape, token, vector) + i];
        }
        ++covered[MlaScaleByteOffset(shape, token, vector)];
      }
      for (uint32_t dim = 0; dim < kMlaRopeDim; ++dim) {
        for (uint32_t i = 0; i < 2; ++i) ++covered[MlaRopeElementOffset(shape, token, dim) + i];
      }
    }
    EXPECT_EQ(std::count(covered.begin(), covered.end(), 1), std::ssize(covered)) << block_tokens;
    EXPECT_EQ(MlaTileBytes(shape), block_tokens * 416U);
    EXPECT_EQ(MlaTileBytes(shape) % 16, 0U);
    EXPECT_EQ(MlaScaleOffset(shape) % 16 + MlaRopeOffset(shape) % 16, 0U);
  }
}

TEST(MlaLayout, GoldenAddresses) {
  const MlaShape shape{.block_tokens = 32};
  EXPECT_EQ(MlaCodeOffset(shape, 0, 0), 0U);
  EXPECT_EQ(MlaCodeOffset(shape, 1, 0), 8U);
  EXPECT_EQ(MlaCodeOffset(shape, 2, 1), 128U);  // Odd vectors begin with tokens 2 and 3 of four.
  EXPECT_EQ(MlaCodeOffset(shape, 31, 31), 4096U + 3968 + 96 + 0 + 8);
  EXPECT_EQ(MlaScaleByteOffset(shape, 17, 2), 8192U + 512 + 32 + 1);
  EXPECT_EQ(MlaRopeElementOffset(shape, 3, 31), 9216U + 192 + 62);
  EXPECT_EQ(MlaRopeElementOffset(shape, 3, 32), 9216U + 2048 + 192);
  EXPECT_EQ(MlaTileOffset({.layer_count = 61, .tile = shape}, 2), 2U * 13312);
}

// How often the busiest of the 32 four-byte banks is needed by one read of a warp. The least
// possible is the bytes of the read over 128.
uint32_t Passes(const std::array<uint64_t, 32>& address, uint32_t bytes) {
  std::array<std::set<uint64_t>, 32> words;
  for (const uint64_t a : address) {
    for (uint64_t byte = a; byte < a + bytes; ++byte) words[byte / 4 % 32].insert(byte / 4);
  }
  size_t most = 0;
  for (const auto& bank : words) most = std::max(most, bank.size());
  return static_cast<uint32_t>(most);
}

// FORMAT.md, section 5: lane (g, t) = (lane / 4, lane % 4) of a warp.
TEST(MlaLayout, OneOrderServesBothOperandsOfAGpuWithoutBankConflicts) {
  const MlaShape shape{.block_tokens = 64};
  for (uint32_t first_token = 0; first_token < 64; first_token += 16) {
    for (uint32_t step = 0; step < 8; ++step) {
      std::array<uint64_t, 32> data{};
      std::array<uint64_t, 32> scales{};
      for (uint32_t lane = 0; lane < 32; ++lane) {
        // Scores: the same vector of tokens 2g and 2g + 1, which are the two rows of the lane.
        const uint32_t token = first_token + lane / 4 * 2;
        const uint32_t vector = step * 4 + lane % 4;
        data[lane] = MlaCodeOffset(shape, token, vector);
        scales[lane] = MlaScaleByteOffset(shape, token, vector);
        EXPECT_EQ(MlaCodeOffset(shape, token + 1, vector), data[lane] + 8);
        EXPECT_EQ(MlaScaleByteOffset(shape, token + 1, vector), scales[lane] + 1);
      }
      EXPECT_EQ(Passes(data, 16), 4U);
      EXPECT_EQ(Passes(scales, 2), 1U);
    }
    for (uint32_t step = 0; step < 4; ++step) {
      std::array<uint64_t, 32> data[2] = {};
      std::array<uint64_t, 32> scales{};
      for (uint32_t lane = 0; lane < 32; ++lane) {
        // Values: vector 8 * step + g of tokens 4t .. 4t + 3.
        const uint32_t token = first_token + lane % 4 * 4;
        const uint32_t vector = step * 8 + lane / 4;
        for (const uint32_t h : {0U, 1U}) {
          data[h][lane] = MlaCodeOffset(shape, token + 2 * h, vector);
          EXPECT_EQ(MlaCodeOffset(shape, token + 2 * h + 1, vector), data[h][lane] + 8);
        }
        scales[lane] = MlaScaleByteOffset(shape, token, vector);
        EXPECT_EQ(MlaScaleByteOffset(shape, token + 3, vector), scales[lane] + 3);
      }
      EXPECT_EQ(Passes(data[0], 16), 4U);
      EXPECT_EQ(Passes(data[1], 16), 4U);
      EXPECT_EQ(Passes(scales, 4), 1U);
    }
    for (uint32_t dim = 0; dim < kMlaRopeDim; dim += 32) {
      std::array<uint64_t, 32> rope{};
      for (uint32_t lane = 0; lane < 32; ++lane) {
        rope[lane] = MlaRopeElementOffset(shape, first_token + lane / 4, dim + lane % 4 * 8);
      }
      EXPECT_EQ(Passes(rope, 16), 4U);
    }
  }
}

// Rows [latent | rope] of any type, with a gap, as an engine's cache has them.
class Rows {
 public:
  Rows(ElementType type, uint32_t token_count, bool special, std::mt19937* random)
      : type_(type), bytes_(token_count * kStride * ElementBytes(type)) {
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < bytes_.size(); i += ElementBytes(type)) {
      const float x = normal(*random) * ((*random)() % 32 == 0 ? 20.0F : 1.0F);
      if (special && (*random)() % 64 == 0) {
        for (uint32_t b = 0; b < ElementBytes(type); ++b) {
          bytes_[i + b] = static_cast<std::byte>((*random)());
        }
      } else if (type == ElementType::kFp32) {
        std::memcpy(&bytes_[i], &x, sizeof(x));
      } else if (type == ElementType::kFp8E4m3) {
        bytes_[i] = static_cast<std::byte>(EncodeE4m3Scale(std::fabs(x)) | (x < 0.0F ? 0x80 : 0));
      } else {
        const uint16_t bits = type == ElementType::kBf16 ? FloatToBf16(x) : FloatToFp16(x);
        std::memcpy(&bytes_[i], &bits, sizeof(bits));
      }
    }
  }

  ConstRows Latent() const {
    return {.type = type_, .data = bytes_.data(), .token_stride = kStride, .scale = kScale};
  }
  ConstRows Rope() const {
    ConstRows rows = Latent();
    rows.data = bytes_.data() + kMlaLatentDim * ElementBytes(type_);
    return rows;
  }

  // The value of an element that sealing sees, FP32 and FP8 rounded to BF16.
  float Value(uint32_t token, uint32_t dim) const {
    const std::byte* at = &bytes_[(token * kStride + dim) * ElementBytes(type_)];
    uint16_t bits = 0;
    float x = 0;
    switch (type_) {
      case ElementType::kBf16:
      case ElementType::kFp16:
        std::memcpy(&bits, at, sizeof(bits));
        return type_ == ElementType::kBf16 ? Bf16ToFloat(bits) : Fp16ToFloat(bits);
      case ElementType::kFp32:
        std::memcpy(&x, at, sizeof(x));
        break;
      case ElementType::kFp8E4m3:
        x = DecodeE4m3Scale(std::to_integer<uint8_t>(*at)) * kScale;
        break;
    }
    return Bf16ToFloat(FloatToBf16(x));
  }

 private:
  static constexpr uint64_t kStride = kRowDims + 5;
  static constexpr float kScale = 0.7F;

  ElementType type_;
  std::vector<std::byte> bytes_;
};

class Mla : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (!IsaIsAvailable(GetParam())) GTEST_SKIP() << "not on this machine";
  }

  std::vector<std::byte> Seal(const MlaShape& shape, const Rows& rows, MlaSealOptions options,
                              SealStats* stats) {
    options.isa = GetParam();
    std::vector<std::byte> tile(MlaTileBytes(shape), std::byte{0x7F});
    const Status status = SealMlaTile(shape, rows.Latent(), rows.Rope(), options, tile, stats);
    EXPECT_TRUE(status.ok()) << status.message();
    return tile;
  }

  std::mt19937 random_{kSeed};
};

INSTANTIATE_TEST_SUITE_P(Isas, Mla, testing::ValuesIn(kAllIsas),
                         [](const auto& param_info) { return IsaName(param_info.param); });

TEST_P(Mla, SealsTheBytesOfTheFormatAtItsAddresses) {
  for (const uint32_t block_tokens : {16U, 32U, 64U, 128U}) {
    const MlaShape shape{.block_tokens = block_tokens};
    for (const ElementType type : kTypes) {
      for (const ScaleSearch search : {ScaleSearch::kAmax6, ScaleSearch::kFourOverSix}) {
        const Rows rows(type, block_tokens, block_tokens == 32, &random_);
        SealStats stats;
        const auto tile = Seal(shape, rows, {.g = 0x1p-7F, .search = search}, &stats);
        SealStats expected;
        for (uint32_t token = 0; token < block_tokens; ++token) {
          for (uint32_t vector = 0; vector < kMlaLatentDim / kVectorDims; ++vector) {
            float x[kVectorDims];
            for (uint32_t i = 0; i < kVectorDims; ++i) {
              x[i] = rows.Value(token, vector * kVectorDims + i);
            }
            uint8_t codes[kVectorCodeBytes];
            uint8_t scale = 0;
            const QuantizeFlags flags = Quantize16(x, 0x1p-7F, codes, &scale, search);
            expected.nonfinite_count += flags.nonfinite ? 1 : 0;
            expected.saturated_count += flags.saturated ? 1 : 0;
            ASSERT_EQ(std::memcmp(&tile[MlaCodeOffset(shape, token, vector)], codes, 8), 0)
                << "T " << block_tokens << " token " << token << " vector " << vector;
            ASSERT_EQ(tile[MlaScaleByteOffset(shape, token, vector)], std::byte{scale});
          }
          for (uint32_t dim = 0; dim < kMlaRopeDim; ++dim) {
            const uint16_t bits = FloatToBf16(rows.Value(token, kMlaLatentDim + dim));
            ASSERT_EQ(std::memcmp(&tile[MlaRopeElementOffset(shape, token, dim)], &bits, 2), 0);
          }
        }
        EXPECT_EQ(stats.nonfinite_count, expected.nonfinite_count);
        EXPECT_EQ(stats.saturated_count, expected.saturated_count);
      }
    }
  }
}

TEST_P(Mla, GathersWhatWasSealedIntoEveryType) {
  for (const uint32_t block_tokens : {16U, 64U, 128U}) {
    const MlaShape shape{.block_tokens = block_tokens};
    const Rows rows(ElementType::kBf16, block_tokens, false, &random_);
    SealStats stats;
    const auto tile = Seal(shape, rows, {.g = 0x1p-7F}, &stats);
    for (const ElementType type : kTypes) {
      std::vector<std::byte> bytes[2];
      for (const bool scalar : {false, true}) {
        bytes[scalar].assign(uint64_t{block_tokens} * kRowDims * ElementBytes(type), {});
        const MutableRows latent{
            .type = type, .data = bytes[scalar].data(), .token_stride = kRowDims, .scale = 0.6F};
        MutableRows rope = latent;
        rope.data = bytes[scalar].data() + kMlaLatentDim * ElementBytes(type);
        ASSERT_TRUE(GatherMlaTile(shape, tile,
                                  {.g = 0x1p-7F, .isa = scalar ? Isa::kScalar : GetParam()}, latent,
                                  rope)
                        .ok());
      }
      EXPECT_EQ(bytes[0], bytes[1]);
      if (type != ElementType::kFp32) continue;
      for (uint32_t token = 0; token < block_tokens; ++token) {
        float row[kRowDims];
        std::memcpy(row, &bytes[0][token * sizeof(row)], sizeof(row));
        for (uint32_t vector = 0; vector < kMlaLatentDim / kVectorDims; ++vector) {
          float x[kVectorDims];
          Dequantize16(reinterpret_cast<const uint8_t*>(&tile[MlaCodeOffset(shape, token, vector)]),
                       std::to_integer<uint8_t>(tile[MlaScaleByteOffset(shape, token, vector)]),
                       0x1p-7F, x);
          ASSERT_EQ(std::memcmp(row + vector * kVectorDims, x, sizeof(x)), 0);
        }
        for (uint32_t dim = 0; dim < kMlaRopeDim; ++dim) {
          ASSERT_EQ(row[kMlaLatentDim + dim], rows.Value(token, kMlaLatentDim + dim));
        }
      }
    }
  }
}

TEST_P(Mla, SealsAndGathersPages) {
  const MlaShape shape{.block_tokens = 32};
  const Rows rows(ElementType::kBf16, 32, false, &random_);
  SealStats stats;
  const auto tile = Seal(shape, rows, {.g = 0x1p-7F}, &stats);
  // Pages of 8 tokens, the first slot in the middle of one.
  const uint32_t table[] = {3, 0, 4, 1, 2};
  std::vector<uint16_t> pages(uint64_t{5} * 8 * kRowDims);
  const Paging paging{.page_table = table,
                      .page_table_count = 5,
                      .page_tokens = 8,
                      .page_stride = 8 * kRowDims,
                      .first_slot = 5};
  const MutableRows latent{.data = pages.data(), .token_stride = kRowDims, .paging = paging};
  MutableRows rope = latent;
  rope.data = pages.data() + kMlaLatentDim;
  ASSERT_TRUE(GatherMlaTile(shape, tile, {.g = 0x1p-7F, .isa = GetParam()}, latent, rope).ok());
  std::vector<std::byte> again(tile.size());
  ASSERT_TRUE(SealMlaTile(shape, {.data = latent.data, .token_stride = kRowDims, .paging = paging},
                          {.data = rope.data, .token_stride = kRowDims, .paging = paging},
                          {.g = 0x1p-7F, .isa = GetParam()}, again, &stats)
                  .ok());
  // Quantized values are quantized to themselves, up to another scale of the same value.
  std::vector<float> values[2];
  for (const bool second : {false, true}) {
    std::vector<float>& target = values[second];
    target.resize(uint64_t{32} * kRowDims);
    ASSERT_TRUE(
        GatherMlaTile(shape, second ? again : tile, {.g = 0x1p-7F},
                      {.type = ElementType::kFp32, .data = target.data(), .token_stride = kRowDims},
                      {.type = ElementType::kFp32,
                       .data = target.data() + kMlaLatentDim,
                       .token_stride = kRowDims})
            .ok());
  }
  EXPECT_EQ(values[0], values[1]);
}

TEST_P(Mla, RefusesScaleBytesThatAreNeverWritten) {
  const MlaShape shape{.block_tokens = 16};
  std::vector<float> out(uint64_t{16} * kRowDims, 3.0F);
  const MutableRows latent{
      .type = ElementType::kFp32, .data = out.data(), .token_stride = kRowDims};
  MutableRows rope = latent;
  rope.data = out.data() + kMlaLatentDim;
  for (const uint32_t byte : {0x00U, 0x7EU, 0x7FU, 0x80U, 0xFFU}) {
    for (const uint64_t at : {MlaScaleOffset(shape), MlaRopeOffset(shape) - 1}) {
      std::vector<std::byte> tile(MlaTileBytes(shape));
      tile[at] = static_cast<std::byte>(byte);
      tile[0] = std::byte{0xFF};  // Codes and ropes are all valid.
      tile.back() = std::byte{0x7F};
      const StatusCode expected = byte <= 0x7E ? StatusCode::kOk : StatusCode::kDataLoss;
      EXPECT_EQ(ValidateMlaTile(shape, tile).code(), expected);
      std::fill(out.begin(), out.end(), 3.0F);
      EXPECT_EQ(GatherMlaTile(shape, tile, {.isa = GetParam()}, latent, rope).code(), expected);
      EXPECT_EQ(out[1] == 3.0F, expected == StatusCode::kDataLoss);
    }
  }
}

TEST_P(Mla, RefusesBadArgumentsAndWritesNothing) {
  const MlaShape shape{.block_tokens = 16};
  std::vector<std::byte> tile(MlaTileBytes(shape), std::byte{0x2B});
  std::vector<float> data(uint64_t{16} * kRowDims, 1.0F);
  const ConstRows good{.type = ElementType::kFp32, .data = data.data(), .token_stride = kRowDims};
  SealStats stats;
  const auto seal = [&](const MlaShape& s, const ConstRows& latent, const ConstRows& rope,
                        const MlaSealOptions& options) {
    return SealMlaTile(s, latent, rope, options, tile, &stats).code();
  };
  const StatusCode invalid = StatusCode::kInvalidArgument;
  ConstRows narrow = good;
  narrow.token_stride = 511;
  ConstRows missing = good;
  missing.data = nullptr;
  EXPECT_EQ(seal({.block_tokens = 48}, good, good, {}), invalid);
  EXPECT_EQ(seal({.block_tokens = 16, .latent_dim = 256}, good, good, {}), invalid);
  EXPECT_EQ(seal({.block_tokens = 16, .rope_dim = 32}, good, good, {}), invalid);
  EXPECT_EQ(seal({.block_tokens = 32}, good, good, {}), invalid);  // dst size
  EXPECT_EQ(seal(shape, narrow, good, {}), invalid);
  narrow.token_stride = 63;
  EXPECT_EQ(seal(shape, good, narrow, {}), invalid);
  EXPECT_EQ(seal(shape, missing, good, {}), invalid);
  EXPECT_EQ(seal(shape, good, missing, {}), invalid);
  EXPECT_EQ(seal(shape, good, good, {.g = 0.3F}), invalid);
  EXPECT_EQ(seal(shape, good, good, {.search = static_cast<ScaleSearch>(9)}), invalid);
  EXPECT_EQ(seal(shape, good, good, {.isa = static_cast<Isa>(99)}), invalid);
  EXPECT_EQ(SealMlaTile(shape, good, good, {}, tile, nullptr).code(), invalid);
  for (const std::byte byte : tile) ASSERT_EQ(byte, std::byte{0x2B});

  const MutableRows target{
      .type = ElementType::kFp32, .data = data.data(), .token_stride = kRowDims};
  MutableRows bad = target;
  bad.scale = 0.0F;
  EXPECT_EQ(GatherMlaTile(shape, tile, {.g = 3.0F}, target, target).code(), invalid);
  EXPECT_EQ(GatherMlaTile(shape, tile, {}, bad, target).code(), invalid);
  EXPECT_EQ(GatherMlaTile(shape, tile, {}, target, bad).code(), invalid);
  EXPECT_EQ(GatherMlaTile(shape, std::span(tile).first(100), {}, target, target).code(), invalid);
  for (const float x : data) ASSERT_EQ(x, 1.0F);
}

}  // namespace
}  // namespace kvtier::kernels
