// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/scales/calibration.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <random>

#include "client/ctl/tensors/safetensors.h"
#include "client/ctl/tensors/tensor_cases.h"
#include "kernels/nvfp4.h"
#include "kernels/seal.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

using testing::HasSubstr;

constexpr uint32_t kLayers = 2;
constexpr uint32_t kTokens = 320;
constexpr uint32_t kHeads = 3;
constexpr uint32_t kDims = 64;

// [layer][token][kv head][dim], BF16; every (layer, kv head) has a range of its own, channel 5 a
// bias.
std::vector<uint16_t> MakeValues(uint32_t seed, uint32_t layer_count = kLayers) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> values;
  for (uint32_t i = 0; i < layer_count * kTokens * kHeads * kDims; ++i) {
    const uint32_t head = i / kDims % kHeads + i / (kTokens * kHeads * kDims) * kHeads;
    const float bias = i % kDims == 5 ? 8.0F : 0.0F;
    values.push_back(
        kernels::FloatToBf16(std::ldexp(normal(random) + bias, static_cast<int>(head))));
  }
  return values;
}

std::span<const std::byte> BytesOf(const std::vector<uint16_t>& values) {
  return std::as_bytes(std::span(values));
}

class CalibrationTest : public testing::Test {
 protected:
  // Both sides as .npy files of the shape.
  std::vector<LayerDump> Layers(const std::vector<uint16_t>& k, const std::vector<uint16_t>& v,
                                const std::vector<uint64_t>& shape) {
    EXPECT_TRUE(WriteNpy(folder_.File("k.npy"), TensorType::kBf16, shape, BytesOf(k)).ok());
    EXPECT_TRUE(WriteNpy(folder_.File("v.npy"), TensorType::kBf16, shape, BytesOf(v)).ok());
    auto layers = ReadNpyLayers(folder_.File("k.npy"), folder_.File("v.npy"), {});
    EXPECT_TRUE(layers.ok()) << layers.status();
    return *layers;
  }

  TestFolder folder_;
  const std::vector<uint16_t> k_ = MakeValues(1);
  const std::vector<uint16_t> v_ = MakeValues(2);
};

// g by the definition, from all values of (layer, kv head).
float ExpectedG(const std::vector<uint16_t>& values, uint32_t layer, uint32_t head) {
  float amax = 0.0F;
  for (uint32_t t = 0; t < kTokens; ++t) {
    for (uint32_t d = 0; d < kDims; ++d) {
      const size_t i = ((size_t{layer} * kTokens + t) * kHeads + head) * kDims + d;
      amax = std::max(amax, std::fabs(kernels::Bf16ToFloat(values[i])));
    }
  }
  return std::exp2(std::ceil(std::log2(amax / 448.0F)));
}

TEST_F(CalibrationTest, GlobalScalesAreThoseOfEveryHead) {
  Calibration calibration;
  ASSERT_TRUE(calibration.Add(Layers(k_, v_, {kLayers, kTokens, kHeads, kDims}), {}).ok());
  const auto scales = calibration.Choose({});
  ASSERT_TRUE(scales.ok()) << scales.status();
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    for (uint32_t head = 0; head < kHeads; ++head) {
      EXPECT_EQ(scales->g_k[layer * kHeads + head], ExpectedG(k_, layer, head));
      EXPECT_EQ(scales->g_v[layer * kHeads + head], ExpectedG(v_, layer, head));
    }
  }
  EXPECT_TRUE(kernels::Validate(scales->View()).ok());
  EXPECT_EQ(calibration.token_count(), kTokens);
  EXPECT_EQ(calibration.nonfinite_count(), 0U);
}

TEST_F(CalibrationTest, PartsAddUpToTheWhole) {
  const std::vector<uint16_t> k = MakeValues(3, 1);
  const std::vector<uint16_t> v = MakeValues(4, 1);
  const ScaleChoice choice{.search = kernels::ScaleSearch::kFourOverSix,
                           .transform = {.mean = true, .smooth_alpha = 0.5F}};
  Calibration whole;
  ASSERT_TRUE(whole.Add(Layers(k, v, {kTokens, kHeads, kDims}), {}).ok());
  Calibration parts;
  for (uint32_t begin = 0; begin < kTokens; begin += 64) {
    const auto part = [&](const std::vector<uint16_t>& values) {
      const auto start = values.begin() + begin * kHeads * kDims;
      return std::vector<uint16_t>(start, start + 64 * kHeads * kDims);
    };
    ASSERT_TRUE(parts.Add(Layers(part(k), part(v), {64, kHeads, kDims}), {}).ok());
  }
  EXPECT_EQ(*whole.Choose(choice), *parts.Choose(choice));
  EXPECT_EQ(parts.token_count(), kTokens);
}

TEST_F(CalibrationTest, SafetensorsGiveTheSameAsNpy) {
  Calibration npy;
  ASSERT_TRUE(npy.Add(Layers(k_, v_, {kLayers, kTokens, kHeads, kDims}), {}).ok());
  const ScaleSetData expected = *npy.Choose({});
  const std::vector<uint64_t> all = {kLayers, kTokens, kHeads, kDims};
  const std::vector<uint64_t> one = {kTokens, kHeads, kDims};
  const size_t half = BytesOf(k_).size() / 2;
  const auto tensor = [](const char* name, const std::vector<uint64_t>& shape,
                         std::span<const std::byte> bytes) {
    return Tensor{.name = name, .type = TensorType::kBf16, .shape = shape, .bytes = bytes};
  };
  const std::vector<std::vector<Tensor>> files = {
      {tensor("k", all, BytesOf(k_)), tensor("v", all, BytesOf(v_))},
      {tensor("layers.0.k", one, BytesOf(k_).first(half)),
       tensor("layers.0.v", one, BytesOf(v_).first(half)),
       tensor("layers.1.k", one, BytesOf(k_).subspan(half)),
       tensor("layers.1.v", one, BytesOf(v_).subspan(half)),
       tensor("layers.1.q", one, BytesOf(v_).subspan(half))}};
  for (const std::vector<Tensor>& tensors : files) {
    ASSERT_TRUE(WriteSafetensors(folder_.File("a"), tensors).ok());
    const auto layers = ReadSafetensorsLayers(folder_.File("a"));
    ASSERT_TRUE(layers.ok()) << layers.status();
    Calibration calibration;
    ASSERT_TRUE(calibration.Add(*layers, {}).ok());
    EXPECT_EQ(*calibration.Choose({}), expected);
  }
}

TEST_F(CalibrationTest, TransformedKeysNeverSaturateAndAreCloser) {
  Calibration calibration;
  const auto layers = Layers(k_, v_, {kLayers, kTokens, kHeads, kDims});
  ASSERT_TRUE(calibration.Add(layers, {}).ok());
  const auto plain = calibration.Choose({});
  const auto transformed = calibration.Choose({.transform = {.mean = true, .smooth_alpha = 0.5F}});
  ASSERT_TRUE(transformed.ok()) << transformed.status();
  const kernels::ConstRows rows{.type = kernels::ElementType::kBf16,
                                .data = layers[1].k.bytes.data(),
                                .token_stride = kHeads * kDims};
  const kernels::TileShape shape{.block_tokens = 64, .head_dim = kDims};
  std::vector<std::byte> tile(kernels::TileBytes(shape));
  for (const ScaleSetData* scales : {&*plain, &*transformed}) {
    kernels::SealStats stats;
    ASSERT_TRUE(kernels::SealTile(shape, rows, rows, kernels::SealOptionsOf(scales->View(), 1, 0),
                                  tile, &stats)
                    .ok());
    EXPECT_EQ(stats.saturated_count, 0U);
  }
  // The bias of channel 5 is gone, so that the largest magnitude is about halved.
  EXPECT_LT(transformed->g_k[3], plain->g_k[3]);
  EXPECT_EQ(transformed->g_v, plain->g_v);
}

TEST_F(CalibrationTest, CountsWhatIsNotFinite) {
  std::vector<uint16_t> k = k_;
  k[1] = 0x7F80;
  Calibration calibration;
  ASSERT_TRUE(calibration.Add(Layers(k, v_, {kLayers, kTokens, kHeads, kDims}), {}).ok());
  EXPECT_EQ(calibration.nonfinite_count(), 1U);
  EXPECT_TRUE(calibration.Choose({}).ok());
}

TEST_F(CalibrationTest, Fp8NeedsItsScale) {
  const std::vector<std::byte> bytes(kTokens * kDims, std::byte{0x38});  // 1
  const std::vector<uint64_t> shape = {kTokens, kDims};
  ASSERT_TRUE(WriteNpy(folder_.File("k"), TensorType::kFp8E4m3, shape, bytes).ok());
  const auto layers =
      ReadNpyLayers(folder_.File("k"), folder_.File("k"), {.uint8_is_fp8_e4m3 = true});
  ASSERT_TRUE(layers.ok()) << layers.status();
  Calibration calibration;
  EXPECT_EQ(calibration.Add(*layers, {.k = 448.0F}).code(), absl::StatusCode::kInvalidArgument);
  Calibration scaled;
  ASSERT_TRUE(scaled.Add(*layers, {.k = 448.0F, .v = 1792.0F}).ok());
  EXPECT_EQ(scaled.Choose({})->g_k, std::vector<float>{1.0F});
  EXPECT_EQ(scaled.Choose({})->g_v, std::vector<float>{4.0F});
}

TEST_F(CalibrationTest, SaysWhatDoesNotFit) {
  Calibration calibration;
  ASSERT_TRUE(calibration.Add(Layers(k_, v_, {kLayers, kTokens, kHeads, kDims}), {}).ok());
  const auto refused = [&](const std::vector<uint64_t>& shape) {
    return std::string(calibration.Add(Layers(k_, v_, shape), {}).message());
  };
  EXPECT_THAT(refused({kLayers * kTokens, kHeads, kDims}), HasSubstr("but the first had 2 of 3"));
  EXPECT_THAT(refused({kLayers, kTokens * kHeads, 1, kDims}), HasSubstr("k.npy"));
  EXPECT_THAT(refused({kLayers, kTokens, kHeads * 2, kDims / 2}), HasSubstr("head_dim must be"));
  // Too few tokens for a mean: 320 are enough for 256, not for 321.
  EXPECT_EQ(
      calibration.Choose({.transform = {.mean = true, .token_count_min = 321}}).status().code(),
      absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(calibration.Choose({.transform = {.smooth_alpha = 1.5F}}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(Calibration().Choose({}).ok());
  // Not a dump.
  const std::vector<uint64_t> flat = {k_.size()};
  ASSERT_TRUE(WriteNpy(folder_.File("flat"), TensorType::kBf16, flat, BytesOf(k_)).ok());
  EXPECT_EQ(ReadNpyLayers(folder_.File("flat"), folder_.File("flat"), {}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReadNpyLayers(folder_.File("flat"), folder_.File("k.npy"), {}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// A file of holes has as many layers as it likes.
TEST_F(CalibrationTest, ShapesBeyondAnyModelAreRefusedAtOnce) {
  for (const std::string shape : {"(1048576, 1, 1, 64)", "(65536, 1, 128, 256)"}) {
    const uint64_t value_count =
        shape == "(1048576, 1, 1, 64)" ? uint64_t{1} << 26 : uint64_t{1} << 31;
    const std::string header =
        "{'descr': '<V2', 'fortran_order': False, 'shape': " + shape + ", }\n";
    const std::string path = folder_.Write("holes.npy", std::string("\x93NUMPY\x01\x00", 8) +
                                                            static_cast<char>(header.size()) +
                                                            std::string(1, '\0') + header);
    std::filesystem::resize_file(path, 10 + header.size() + value_count * 2);
    const auto layers = ReadNpyLayers(path, path, {});
    EXPECT_EQ(layers.status().code(), absl::StatusCode::kInvalidArgument) << layers.status();
  }
}

TEST_F(CalibrationTest, OnlyNonfiniteValuesAreNoCalibration) {
  const std::vector<uint16_t> values(kTokens * kDims, 0x7FC0);
  Calibration calibration;
  ASSERT_TRUE(calibration.Add(Layers(values, values, {kTokens, kDims}), {}).ok());
  const absl::Status status = calibration.Choose({}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("layer 0, kv head 0 (320 tokens)"));
}

}  // namespace
}  // namespace kvtier::ctl
