// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/scales/scale_set_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>

#include "client/ctl/scales/scales_format.h"
#include "client/ctl/tensors/tensor_cases.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

using testing::HasSubstr;

// Any finite float, of any exponent.
float AnyFloat(std::mt19937* random) {
  float value = 0.0F;
  do {
    value = std::bit_cast<float>(static_cast<uint32_t>((*random)()));
  } while (!std::isfinite(value));
  return value;
}

ScaleSetFile MakeFile(uint32_t seed, bool with_transform) {
  std::mt19937 random(seed);
  ScaleSetFile file;
  file.scales = {.layer_count = 2,
                 .kv_head_count = 3,
                 .head_dim = 64,
                 .search = kernels::ScaleSearch::kFourOverSix};
  for (int i = 0; i < 6; ++i) {
    file.scales.g_k.push_back(std::ldexp(1.0F, static_cast<int>(random() % 201) - 100));
    file.scales.g_v.push_back(std::ldexp(1.0F, static_cast<int>(random() % 201) - 100));
  }
  for (int i = 0; with_transform && i < 6 * 64; ++i) {
    file.scales.k_mean.push_back(AnyFloat(&random));
    const float smooth = std::fabs(AnyFloat(&random));
    file.scales.k_smooth.push_back(std::isfinite(1.0F / smooth) ? smooth : 0.1F);
  }
  file.provenance = {.kind = "calibration",
                     .tool = "kvtierctl 0.1.0",
                     .created = "2026-11-29T20:00:00Z",
                     .model = "a \"model\"\n\x1b with \xC3\xA9",
                     .token_count = 4'096,
                     .nonfinite_count = 3,
                     .smooth_alpha = 0.5,
                     .files = {{.name = "k.npy", .bytes = 80, .sha256 = "00"},
                               {.name = "v.npy", .bytes = uint64_t{1} << 40}}};
  return file;
}

class ScaleSetFileTest : public testing::Test {
 protected:
  absl::Status StatusOf(const std::string& text) {
    return ReadScaleSet(folder_.Write("s.json", text)).status();
  }
  // The text of a small file with one part replaced.
  std::string Edited(const std::string& from, const std::string& to) {
    std::string text = FormatScaleSet(MakeFile(1, false));
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.replace(at, from.size(), to);
  }

  TestFolder folder_;
};

TEST_F(ScaleSetFileTest, ComesBackToTheBit) {
  for (uint32_t seed = 0; seed < 40; ++seed) {
    const ScaleSetFile written = MakeFile(seed, seed % 4 != 0);
    ASSERT_TRUE(WriteScaleSet(folder_.File("s.json"), written).ok()) << seed;
    const auto read = ReadScaleSet(folder_.File("s.json"));
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->scales, written.scales);
    // == would take 0 for -0.
    for (const auto member : {&ScaleSetData::k_mean, &ScaleSetData::k_smooth}) {
      const std::vector<float>& a = read->scales.*member;
      const std::vector<float>& b = written.scales.*member;
      ASSERT_EQ(a.size(), b.size());
      EXPECT_EQ(a.empty() ? 0 : std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0);
    }
    EXPECT_EQ(read->provenance, written.provenance);
    EXPECT_EQ(FormatScaleSet(*read), folder_.Read("s.json"));
  }
}

TEST_F(ScaleSetFileTest, KeepsMixedFormats) {
  ScaleSetFile file = MakeFile(2, false);
  file.scales.layer_formats = {{.k = kernels::SideFormat::kFp8, .v = kernels::SideFormat::kBf16},
                               {}};
  for (size_t h = 0; h < 3; ++h) {
    file.scales.g_k[h] = 0.1F;
    file.scales.g_v[h] = 1.0F;
  }
  ASSERT_TRUE(WriteScaleSet(folder_.File("s.json"), file).ok());
  EXPECT_EQ(ReadScaleSet(folder_.File("s.json"))->scales, file.scales);
}

// The identity is what blocks are found by: it must never change for the same scales.
TEST_F(ScaleSetFileTest, IdentityIsStable) {
  const ScaleSetData scales{.layer_count = 1,
                            .kv_head_count = 2,
                            .head_dim = 64,
                            .g_k = {1.0F, 0.5F},
                            .g_v = {0.25F, 2.0F}};
  EXPECT_EQ(ScaleSetId(scales),
            "ss1-1babd113a38e5b6024350369403531c8fa07a76bab165296f97d84ab1efb7edd");
}

TEST_F(ScaleSetFileTest, IdentityIsThatOfTheContentOnly) {
  const ScaleSetFile file = MakeFile(3, true);
  const std::string id = ScaleSetId(file.scales);
  EXPECT_EQ(id.size(), 68U);
  ScaleSetData spelled_out = file.scales;
  spelled_out.layer_formats.resize(2);  // NVFP4 everywhere, as without them.
  EXPECT_EQ(ScaleSetId(spelled_out), id);
  const auto differs = [&](auto&& change) {
    ScaleSetData other = file.scales;
    change(&other);
    EXPECT_NE(ScaleSetId(other), id);
  };
  differs([](ScaleSetData* s) { s->search = kernels::ScaleSearch::kAmax6; });
  differs([](ScaleSetData* s) { s->g_k[5] *= 2; });
  differs([](ScaleSetData* s) { s->g_v[0] *= 2; });
  differs([](ScaleSetData* s) { s->k_mean[7] = std::nextafter(s->k_mean[7], 0.0F); });
  differs([](ScaleSetData* s) { s->k_smooth[7] = std::nextafter(s->k_smooth[7], 0.0F); });
  differs([](ScaleSetData* s) { s->k_mean.clear(); });
  differs([](ScaleSetData* s) { std::swap(s->g_k, s->g_v); });
  differs([](ScaleSetData* s) { std::swap(s->layer_count, s->kv_head_count); });
}

TEST_F(ScaleSetFileTest, RefusesOtherVersionsAndFormats) {
  EXPECT_EQ(StatusOf(Edited("\"version\": 1", "\"version\": 2")).code(),
            absl::StatusCode::kUnimplemented);
  EXPECT_EQ(StatusOf(Edited("kvtier.scale_set", "kvtier.other")).code(),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(StatusOf("[]").code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(StatusOf("{}").code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(StatusOf("").code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ReadScaleSet(folder_.File("none.json")).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(ScaleSetFileTest, SaysWhatIsWrong) {
  const auto expect = [this](const std::string& from, const std::string& to,
                             const std::string& why) {
    const absl::Status status = StatusOf(Edited(from, to));
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << to;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  };
  expect("\"layer_count\": 2", "\"layer_count\": 3", "layers is not an array of 3");
  expect("\"layer_count\": 2", "\"layer_count\": -2", "layer_count is not a whole number");
  expect("\"kv_head_count\": 3", "\"kv_head_count\": 2", "layer 0 heads is not an array of 2");
  expect("\"head_dim\": 64", "\"head_dim\": 63", "head_dim must be a multiple of 16");
  expect("4over6", "5over6", "unknown search");
  expect("\"k\": \"nvfp4\"", "\"k\": \"mxfp4\"", "layer 0 has an unknown k");
  expect("\"version\": 1,", "\"version\": 1, \"version\": 1,", "twice");
  expect("\"version\": 1,", "\"version\": 1, \"more\": 1,", "a field that this version");
  expect("\"token_count\": 4096", "\"token_count\": \"many\"", "provenance token_count");
  expect("\"id\": \"ss1-", "\"id\": \"ss1-0", "the id is not that of its content");
  expect("\"g_k\": ", "\"g_k\": 3, \"g_unknown\": ", "a field that this version");
  // Both numbers of the first head, so that the change reaches the check of the value.
  std::string text = FormatScaleSet(MakeFile(1, false));
  const size_t begin = text.find("\"g_k\": ") + 7;
  text.replace(begin, text.find(',', begin) - begin, "3");
  EXPECT_THAT(std::string(StatusOf(text).message()), HasSubstr("not a power of two"));
  text.replace(begin, 1, "0.1");
  EXPECT_THAT(std::string(StatusOf(text).message()),
              HasSubstr("g_k has a value that is not an FP32"));
  EXPECT_THAT(std::string(StatusOf(std::string(100'000, '[')).message()), HasSubstr("levels"));
}

TEST_F(ScaleSetFileTest, WritesNothingInvalid) {
  ScaleSetFile file = MakeFile(4, false);
  file.scales.g_k[0] = 3.0F;
  EXPECT_EQ(WriteScaleSet(folder_.File("s.json"), file).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(ReadScaleSet(folder_.File("s.json")).ok());
}

TEST_F(ScaleSetFileTest, DamageIsNeverAnotherScaleSet) {
  const ScaleSetFile file = MakeFile(5, true);
  const std::string small = FormatScaleSet(MakeFile(5, false));
  // Without the line break it is whole.
  ExpectEveryTruncationRefused(folder_, std::string_view(small).substr(0, small.size() - 1),
                               [](const std::string& path) { return ReadScaleSet(path).ok(); });
  ReadDamaged(folder_, FormatScaleSet(file), 20'261'129, 100, [&file](const std::string& path) {
    const auto read = ReadScaleSet(path);
    EXPECT_TRUE(!read.ok() || read->scales == file.scales);
  });
}

TEST_F(ScaleSetFileTest, DescribesFiles) {
  const auto file = DescribeFile(folder_.Write("abc", "abc"));
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(file->name, "abc");
  EXPECT_EQ(file->bytes, 3U);
  EXPECT_EQ(file->sha256, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST_F(ScaleSetFileTest, ShowsRangesAndOrigin) {
  ScaleSetFile file = MakeFile(6, false);
  file.scales.g_k = {1.0F, 0.5F, 0.25F, 2.0F, 2.0F, 2.0F};
  const std::string text = ScalesText(file);
  EXPECT_THAT(text, HasSubstr(ScaleSetId(file.scales)));
  EXPECT_THAT(text, HasSubstr("2 layers, 3 kv heads, head dim 64"));
  EXPECT_THAT(text, HasSubstr("2^-2 .. 2^0"));
  EXPECT_THAT(text, HasSubstr("4,096 tokens"));
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
  const nlohmann::json json = ScalesJson(file);
  EXPECT_EQ(json["layers"][0]["g_k"]["min"], 0.25F);
  EXPECT_EQ(json["layers"][1]["g_k"]["max"], 2.0F);
  EXPECT_EQ(json["provenance"]["files"].size(), 2U);
}

}  // namespace
}  // namespace kvtier::ctl
