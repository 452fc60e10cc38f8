// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/scales/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>

#include "client/ctl/tensors/safetensors.h"
#include "client/ctl/tensors/tensor_cases.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

using testing::HasSubstr;

using Scales = std::map<std::string, std::vector<float>>;

constexpr const char* kShape =
    R"("num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, )"
    R"("hidden_size": 512)";

class CheckpointTest : public testing::Test {
 protected:
  // A file of FP32 tensors of one dimension.
  void WriteShard(const std::string& name, const Scales& scales) {
    std::vector<Tensor> tensors;
    for (const auto& [tensor_name, values] : scales) {
      tensors.push_back({.name = tensor_name,
                         .type = TensorType::kFp32,
                         .shape = {values.size()},
                         .bytes = std::as_bytes(std::span(values))});
    }
    ASSERT_TRUE(WriteSafetensors(folder_.File(name), tensors).ok());
  }
  void WriteConfig(const std::string& quantization) {
    folder_.Write("config.json",
                  "{" + std::string(kShape) + R"(, "_name_or_path": "m")" +
                      (quantization.empty() ? "" : R"(, "quantization_config": )" + quantization) +
                      "}");
  }
  absl::StatusOr<CheckpointScales> Import(const CheckpointOptions& options = {}) {
    return ImportCheckpoint(folder_.File(""), options);
  }
  void ExpectRefused(const CheckpointOptions& options, absl::StatusCode code,
                     const std::string& why) {
    const absl::Status status = Import(options).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  }

  TestFolder folder_;
};

Scales ModelOptScales(float k0, float v0, float k1, float v1) {
  return {{"model.layers.0.self_attn.k_proj.k_scale", {k0}},
          {"model.layers.0.self_attn.v_proj.v_scale", {v0}},
          {"model.layers.1.self_attn.k_proj.k_scale", {k1}},
          {"model.layers.1.self_attn.v_proj.v_scale", {v1}},
          {"model.layers.0.self_attn.k_proj.weight_scale", {7}},
          {"model.layers.0.mlp.down_proj.input_scale", {7}}};
}

TEST(KvScaleNameTest, KnowsTheNamesThatOccur) {
  const auto expect = [](const char* name, uint32_t layer, bool is_k, bool is_v,
                         const char* prefix) {
    const auto parsed = ParseKvScaleName(name);
    ASSERT_TRUE(parsed.has_value()) << name;
    EXPECT_EQ(parsed->layer_idx, layer);
    EXPECT_EQ(parsed->is_k, is_k);
    EXPECT_EQ(parsed->is_v, is_v);
    EXPECT_EQ(parsed->prefix, prefix);
  };
  expect("model.layers.31.self_attn.k_proj.k_scale", 31, true, false, "model.");
  expect("model.layers.0.self_attn.v_proj.v_scale", 0, false, true, "model.");
  expect("model.layers.5.self_attn.attn.v_scale", 5, false, true, "model.");
  expect("model.layers.5.self_attn.k_scale", 5, true, false, "model.");
  expect("model.language_model.layers.5.self_attn.k_global_scale", 5, true, false,
         "model.language_model.");
  expect("model.layers.5.self_attn.qkv_proj.v_scale", 5, false, true, "model.");
  expect("model.layers.5.self_attn.v_proj.output_scale", 5, false, true, "model.");
  expect("backbone.layers.7.mixer.k_proj.k_scale", 7, true, false, "backbone.");
  expect("layers.7.attention.kv_scale", 7, true, true, "");
  for (const char* name :
       {"model.layers.0.self_attn.k_proj.weight_scale", "model.layers.0.self_attn.q_proj.k_scale",
        "model.layers.0.self_attn.q_scale", "model.layers.x.self_attn.k_scale",
        "model.layers.-1.self_attn.k_scale", "model.layers.99999999999.self_attn.k_scale",
        "model.layers.0", "model.layers.", "layers.0.", "xlayers.0.self_attn.k_scale",
        "model.layers.0.mlp.k_scale", "model.layers.0.self_attn.k_scale.", ""}) {
    EXPECT_FALSE(ParseKvScaleName(name).has_value()) << name;
  }
}

// One amax, as every convention stores it.
TEST_F(CheckpointTest, EveryConventionGivesBackAmax) {
  WriteConfig("");
  constexpr float kAmax = 16.0F;
  // g of 16 is 2^ceil(log2(16 / 448)) = 2^-4.
  for (const auto& [convention, stored] :
       {std::pair(ScaleConvention::kModelOpt, kAmax / 448.0F),
        std::pair(ScaleConvention::kModelOpt2688, kAmax / 2688.0F),
        std::pair(ScaleConvention::kAutoRound, kAmax / 2688.0F),
        std::pair(ScaleConvention::kLlmCompressor, kAmax / 6.0F),
        std::pair(ScaleConvention::kTrtllm, kAmax / 448.0F),
        std::pair(ScaleConvention::kFp8, kAmax / 448.0F),
        std::pair(ScaleConvention::kEncode2688, 2688.0F / kAmax)}) {
    WriteShard("model.safetensors", ModelOptScales(stored, stored, stored, stored));
    const auto imported = Import({.convention = convention});
    ASSERT_TRUE(imported.ok()) << imported.status();
    EXPECT_EQ(imported->scales.g_k, std::vector<float>(8, 0x1p-4F));
    EXPECT_EQ(imported->scales.g_v, std::vector<float>(8, 0x1p-4F));
    EXPECT_NEAR(imported->amax_min, kAmax, 1e-5F);
    EXPECT_TRUE(imported->warnings.empty());
    EXPECT_EQ(*ParseConvention(FactsOf(convention).name), convention);
  }
  EXPECT_FALSE(ParseConvention("nvfp4").ok());
}

TEST_F(CheckpointTest, TakesLayersSidesAndHeadsApart) {
  WriteConfig("");
  // amax 448 * stored: g is stored for powers of two.
  WriteShard("model.safetensors", {{"model.layers.0.self_attn.k_scale", {0.5F}},
                                   {"model.layers.0.self_attn.v_scale", {0.25F}},
                                   {"model.layers.1.self_attn.k_scale", {1, 2, 4, 8}},
                                   {"model.layers.1.self_attn.v_scale", {0.125F}}});
  const auto imported = Import({.convention = ScaleConvention::kFp8});
  ASSERT_TRUE(imported.ok()) << imported.status();
  EXPECT_EQ(imported->scales.g_k, (std::vector<float>{0.5F, 0.5F, 0.5F, 0.5F, 1, 2, 4, 8}));
  EXPECT_EQ(imported->scales.g_v,
            (std::vector<float>{0.25F, 0.25F, 0.25F, 0.25F, 0.125F, 0.125F, 0.125F, 0.125F}));
  EXPECT_EQ(imported->scales.head_dim, 64U);
  EXPECT_EQ(imported->model, "m");
  EXPECT_TRUE(kernels::Validate(imported->scales.View()).ok());
}

TEST_F(CheckpointTest, ConfigurationNamesTheConvention) {
  WriteShard("model.safetensors", ModelOptScales(0.5F, 0.5F, 0.5F, 0.5F));
  const auto expect = [&](ScaleConvention convention) {
    const auto imported = Import();
    ASSERT_TRUE(imported.ok()) << imported.status();
    EXPECT_EQ(imported->convention, convention);
  };
  WriteConfig(R"({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}})");
  expect(ScaleConvention::kFp8);
  WriteConfig(R"({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 4}})");
  expect(ScaleConvention::kLlmCompressor);
  WriteConfig(R"({"quant_method": "compressed-tensors", "provider": "auto-round",
                  "kv_cache_scheme": {"num_bits": 4}})");
  expect(ScaleConvention::kAutoRound);
  WriteConfig(R"({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8}})");
  expect(ScaleConvention::kFp8);
  const auto model_opt = [&](const char* version, const char* algorithm) {
    WriteConfig("");
    folder_.Write("hf_quant_config.json",
                  absl::StrFormat(R"({"producer": {"name": "modelopt", "version": "%s"},
                                      "quantization": {"kv_cache_quant_algo": "%s"}})",
                                  version, algorithm));
  };
  model_opt("0.39.0", "FP8");
  expect(ScaleConvention::kFp8);
  model_opt("0.43.0", "NVFP4");
  expect(ScaleConvention::kModelOpt);
  model_opt("1.0", "NVFP4");
  expect(ScaleConvention::kModelOpt);
  model_opt("0.40.0rc1", "NVFP4");
  expect(ScaleConvention::kModelOpt2688);
  // The release that changed the divisor is not known: nobody guesses.
  for (const char* version : {"0.41.0", "0.42.1", "0.4x", ""}) {
    model_opt(version, "NVFP4");
    ExpectRefused({}, absl::StatusCode::kInvalidArgument, "does not say");
  }
}

TEST_F(CheckpointTest, ComplainsAboutContradictions) {
  WriteShard("model.safetensors", ModelOptScales(0.5F, 0.5F, 0.5F, 0.5F));
  WriteConfig(R"({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}})");
  ExpectRefused({.convention = ScaleConvention::kLlmCompressor},
                absl::StatusCode::kFailedPrecondition, "means fp8");
  EXPECT_TRUE(Import({.convention = ScaleConvention::kLlmCompressor, .force = true}).ok());
  // Another name for the same division is none.
  EXPECT_TRUE(Import({.convention = ScaleConvention::kTrtllm}).ok());
}

TEST_F(CheckpointTest, ComplainsAboutImplausibleMagnitudes) {
  WriteConfig("");
  // An inverse: 2688 / 16, read as amax / 2688.
  WriteShard("model.safetensors", ModelOptScales(1e-3F, 168.0F, 1e-3F, 1e-3F));
  ExpectRefused({.convention = ScaleConvention::kAutoRound}, absl::StatusCode::kFailedPrecondition,
                "model.layers.0.self_attn.v_proj.v_scale: 168 means values up to 451584");
  WriteShard("model.safetensors", ModelOptScales(1e-3F, 1e-6F, 1e-3F, 1e-3F));
  ExpectRefused({.convention = ScaleConvention::kLlmCompressor},
                absl::StatusCode::kFailedPrecondition, "implausible");
  EXPECT_TRUE(Import({.convention = ScaleConvention::kLlmCompressor, .force = true}).ok());
  for (const float bad : {0.0F, -1.0F, std::numeric_limits<float>::quiet_NaN()}) {
    WriteShard("model.safetensors", ModelOptScales(1, 1, bad, 1));
    ExpectRefused({.convention = ScaleConvention::kFp8, .force = true},
                  absl::StatusCode::kFailedPrecondition, "is no scale");
  }
}

TEST_F(CheckpointTest, WarnsOfPlaceholders) {
  WriteConfig("");
  // Of 4 kv heads each.
  for (const auto& [v1, warning] :
       {std::pair(1.0F, "16 of 16 scales"), std::pair(2.0F, "12 of 16")}) {
    WriteShard("model.safetensors", ModelOptScales(1, 1, 1, v1));
    const auto imported = Import({.convention = ScaleConvention::kModelOpt});
    ASSERT_TRUE(imported.ok()) << imported.status();
    ASSERT_EQ(imported->warnings.size(), 1U);
    EXPECT_THAT(imported->warnings[0], HasSubstr(warning));
  }
}

TEST_F(CheckpointTest, OpensOnlyTheShardsThatTheIndexNames) {
  WriteConfig("");
  const CheckpointOptions options{.convention = ScaleConvention::kFp8};
  Scales scales = ModelOptScales(1, 2, 4, 8);
  Scales second;
  second.insert(scales.extract("model.layers.1.self_attn.v_proj.v_scale"));
  WriteShard("a.safetensors", scales);
  WriteShard("b.safetensors", second);
  folder_.Write("c.safetensors", "not opened");
  const auto index = [&](const std::string& v_file) {
    std::string map = R"("w": "c.safetensors")";
    for (const auto& [name, values] : scales) map += ", \"" + name + R"(": "a.safetensors")";
    folder_.Write("model.safetensors.index.json",
                  R"({"weight_map": {)" + map +
                      R"(, "model.layers.1.self_attn.v_proj.v_scale": ")" + v_file + "\"}}");
  };
  index("b.safetensors");
  const auto imported = Import(options);
  ASSERT_TRUE(imported.ok()) << imported.status();
  EXPECT_EQ(imported->scales.g_v, (std::vector<float>{2, 2, 2, 2, 8, 8, 8, 8}));
  EXPECT_EQ(imported->files.size(), 4U);  // config, index, two shards
  for (const char* outside : {"../b.safetensors", "/etc/passwd", "..", "", "x/b.safetensors"}) {
    index(outside);
    ExpectRefused(options, absl::StatusCode::kDataLoss, "in no file of this folder");
  }
  index("missing.safetensors");
  ExpectRefused(options, absl::StatusCode::kNotFound, "missing.safetensors");
  folder_.Write("model.safetensors.index.json", "[]");
  ExpectRefused(options, absl::StatusCode::kDataLoss, "no weight_map");
}

TEST_F(CheckpointTest, SaysWhatIsMissingOrTooMuch) {
  const CheckpointOptions fp8{.convention = ScaleConvention::kFp8};
  WriteShard("model.safetensors", ModelOptScales(1, 1, 1, 1));
  ExpectRefused(fp8, absl::StatusCode::kInvalidArgument, "the number of layers is neither");
  CheckpointOptions given = fp8;
  given.layer_count = 2;
  given.kv_head_count = 1;
  ExpectRefused(given, absl::StatusCode::kInvalidArgument, "the head dim is neither");
  given.head_dim = 100;
  ExpectRefused(given, absl::StatusCode::kInvalidArgument, "head_dim must be");
  given.head_dim = 128;
  EXPECT_TRUE(Import(given).ok());
  EXPECT_TRUE(ImportCheckpoint(folder_.File("model.safetensors"), given).ok());
  given.layer_count = 3;
  ExpectRefused(given, absl::StatusCode::kFailedPrecondition, "layer 2 of 3 has no scale of K");
  given.layer_count = 1;
  ExpectRefused(given, absl::StatusCode::kFailedPrecondition, "has no layer 1");

  WriteConfig("");
  ExpectRefused({}, absl::StatusCode::kInvalidArgument, "which convention");
  Scales scales = ModelOptScales(1, 1, 1, 1);
  scales["model.layers.1.self_attn.k_scale"] = {1};
  WriteShard("model.safetensors", scales);
  ExpectRefused(fp8, absl::StatusCode::kFailedPrecondition, "two scales of one layer");
  scales = ModelOptScales(1, 1, 1, 1);
  scales["model.layers.1.self_attn.k_proj.k_scale"] = {1, 1};
  WriteShard("model.safetensors", scales);
  ExpectRefused(fp8, absl::StatusCode::kFailedPrecondition, "2 values, neither one");
  WriteShard("model.safetensors", {{"w", {1}}});
  ExpectRefused(fp8, absl::StatusCode::kNotFound, "no scales of K and V");
}

TEST_F(CheckpointTest, PrefixChoosesAmongModels) {
  WriteConfig("");
  Scales scales = ModelOptScales(1, 1, 1, 1);
  scales["vision.layers.0.self_attn.k_scale"] = {64};
  WriteShard("model.safetensors", scales);
  ExpectRefused({.convention = ScaleConvention::kFp8}, absl::StatusCode::kFailedPrecondition,
                R"(choose a prefix: "model.", "vision.")");
  EXPECT_TRUE(Import({.convention = ScaleConvention::kFp8, .prefix = "model."}).ok());
  ExpectRefused({.convention = ScaleConvention::kFp8, .prefix = "x."}, absl::StatusCode::kNotFound,
                "there are");
}

TEST_F(CheckpointTest, CountsBeyondAnyModelAreRefusedAtOnce) {
  WriteShard("model.safetensors", ModelOptScales(1, 1, 1, 1));
  folder_.Write("config.json",
                R"({"num_hidden_layers": 65536, "num_key_value_heads": 65536, "head_dim": 64})");
  ExpectRefused({.convention = ScaleConvention::kFp8}, absl::StatusCode::kInvalidArgument,
                "channels");
}

TEST_F(CheckpointTest, StrangeConfigurationsAreIgnored) {
  WriteShard("model.safetensors", ModelOptScales(1, 1, 1, 1));
  for (const char* text :
       {"[]", "7", R"({"num_hidden_layers": -1, "quantization_config": []})",
        R"({"num_hidden_layers": "two", "quantization_config": {"quant_method": 7}})",
        R"({"num_attention_heads": 0, "hidden_size": 64})"}) {
    folder_.Write("config.json", text);
    EXPECT_EQ(Import({.convention = ScaleConvention::kFp8}).status().code(),
              absl::StatusCode::kInvalidArgument)
        << text;
  }
  std::string deep;
  for (int i = 0; i < 1000; ++i) deep += R"({"a":)";
  folder_.Write("config.json", deep);
  ExpectRefused({.convention = ScaleConvention::kFp8}, absl::StatusCode::kDataLoss,
                "too many levels");
  folder_.Write("config.json", "{");
  EXPECT_EQ(Import({.convention = ScaleConvention::kFp8}).status().code(),
            absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace kvtier::ctl
