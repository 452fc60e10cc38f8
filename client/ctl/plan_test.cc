// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace kvtier::ctl {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr double kKiB = 0x1p10;
constexpr double kGiB = 0x1p30;

Plan PlanOf(const PlanInput& input) {
  auto plan = MakePlan(input);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.value_or(Plan());
}

const PlanRow& Row(const Plan& plan, const std::string& codec) {
  for (const PlanRow& row : plan.rows) {
    if (row.codec == codec) return row;
  }
  ADD_FAILURE() << "no row " << codec;
  return plan.rows.front();
}

PlanInput Large() {
  return {.layer_count = 80,
          .kv_head_count = 8,
          .head_dim = 128,
          .card_bytes = 96 * kGiB,
          .card_share = 0.9};
}

PlanInput Small() {
  return {.layer_count = 32,
          .kv_head_count = 8,
          .head_dim = 128,
          .card_bytes = 80e9,
          .runtime_bytes = 6e9,
          .weight_bytes = 16e9,
          .bandwidth = 3352e9};
}

TEST(PlanTest, EightyLayersOnA96GibCard) {
  PlanInput input = Large();
  input.total_tokens = 3e6;
  const Plan plan = PlanOf(input);
  EXPECT_EQ(Row(plan, "bf16").token_bytes, 320 * kKiB);
  EXPECT_EQ(Row(plan, "fp8").token_bytes, 160 * kKiB);
  EXPECT_EQ(Row(plan, "nvfp4").token_bytes, 90 * kKiB);
  EXPECT_EQ(Row(plan, "bf16").context_bytes, 40 * kGiB);
  EXPECT_EQ(Row(plan, "fp8").context_bytes, 20 * kGiB);
  EXPECT_EQ(Row(plan, "nvfp4").context_bytes, 11.25 * kGiB);
  EXPECT_EQ(Row(plan, "bf16").ideal_contexts, 2u);
  EXPECT_EQ(Row(plan, "fp8").ideal_contexts, 4u);
  EXPECT_EQ(Row(plan, "nvfp4").ideal_contexts, 7u);
  EXPECT_NEAR(Row(plan, "fp8").total_bytes / kGiB, 458, 0.5);
  EXPECT_EQ(Row(plan, "fp8").total_cards, 6u);
  EXPECT_NEAR(Row(plan, "nvfp4").total_bytes / kGiB, 257.5, 0.5);
  EXPECT_EQ(Row(plan, "nvfp4").total_cards, 3u);
}

TEST(PlanTest, ThirtyTwoLayersOnAn80GbCard) {
  const Plan plan = PlanOf(Small());
  EXPECT_EQ(Row(plan, "bf16").token_bytes, 128 * kKiB);
  EXPECT_EQ(Row(plan, "fp8").token_bytes, 64 * kKiB);
  EXPECT_EQ(Row(plan, "int4").token_bytes, 40 * kKiB);
  EXPECT_EQ(Row(plan, "int2").token_bytes, 24 * kKiB);
  EXPECT_EQ(Row(plan, "bf16").ideal_contexts, 3u);
  EXPECT_EQ(Row(plan, "fp8").ideal_contexts, 6u);
  EXPECT_EQ(Row(plan, "int4").ideal_contexts, 10u);
  PlanInput fewer_weights = Small();
  fewer_weights.weight_bytes = 8.5e9;
  const Plan roomier = PlanOf(fewer_weights);
  EXPECT_EQ(Row(roomier, "bf16").ideal_contexts, 3u);
  EXPECT_EQ(Row(roomier, "fp8").ideal_contexts, 7u);
  EXPECT_EQ(Row(roomier, "int4").ideal_contexts, 12u);
}

TEST(PlanTest, StepReadsWeightsAndContextsOnce) {
  const Plan plan = PlanOf(Small());
  EXPECT_EQ(plan.input.step_contexts, 3u);
  // (16e9 + 3 x 131072 x 128 KiB) / 3352e9 is 20.149 ms, often quoted as 20.2.
  EXPECT_NEAR(*Row(plan, "bf16").step_seconds, 20.15e-3, 0.01e-3);
  EXPECT_NEAR(*Row(plan, "fp8").step_seconds, 12.5e-3, 0.05e-3);
  EXPECT_NEAR(*Row(plan, "int4").step_seconds, 9.6e-3, 0.05e-3);
}

TEST(PlanTest, PracticalFiguresAreThoseOfStoredBlocks) {
  PlanInput input = Large();
  input.host_bytes = 512 * kGiB;
  input.nvme_bytes = 4096 * kGiB;
  const Plan plan = PlanOf(input);
  // 86.4 GiB x 0.95 / 11.25 GiB is 7.3.
  EXPECT_EQ(Row(plan, "nvfp4").practical_contexts, 7u);
  EXPECT_EQ(Row(plan, "nvfp4").host_contexts, 43u);
  EXPECT_EQ(Row(plan, "nvfp4").nvme_contexts, 345u);
  EXPECT_EQ(Row(plan, "int4").practical_contexts, std::nullopt);
  EXPECT_EQ(Row(plan, "int4").host_contexts, std::nullopt);
  // A context of one token takes a whole block.
  input.context_tokens = 1;
  const Plan tiny = PlanOf(input);
  EXPECT_LT(*Row(tiny, "nvfp4").practical_contexts * 60, Row(tiny, "nvfp4").ideal_contexts);
}

TEST(PlanTest, CardsShareHeadsAndWeights) {
  PlanInput one = Small();
  PlanInput two = Small();
  two.card_count = 2;
  const Plan plan = PlanOf(two);
  EXPECT_EQ(plan.kv_bytes, 2 * (80e9 - 6e9) - 16e9);
  EXPECT_EQ(Row(plan, "bf16").context_bytes, Row(PlanOf(one), "bf16").context_bytes);
  two.step_contexts = 3;
  EXPECT_DOUBLE_EQ(*Row(PlanOf(two), "bf16").step_seconds * 2,
                   *Row(PlanOf(one), "bf16").step_seconds);
  two.card_count = 3;
  EXPECT_FALSE(MakePlan(two).ok());
}

TEST(PlanTest, RefusesWhatCannotBe) {
  EXPECT_THAT(std::string(MakePlan({}).status().message()), HasSubstr("--layers"));
  PlanInput input = Small();
  input.weight_bytes = 80e9;
  EXPECT_THAT(std::string(MakePlan(input).status().message()), HasSubstr("no room"));
  input = Small();
  input.context_tokens = 0;
  EXPECT_FALSE(MakePlan(input).ok());
}

TEST(PlanTest, ParsesSizesAndTokens) {
  EXPECT_EQ(*ParsePlanBytes("96 GiB"), 96 * kGiB);
  EXPECT_EQ(*ParsePlanBytes("80GB"), 80e9);
  EXPECT_EQ(*ParsePlanBytes("1.5TB"), 1.5e12);
  EXPECT_EQ(*ParsePlanBytes("4096"), 4096);
  for (const char* bad : {"", "GB", "-1GB", "0", "1 gb", "nan", "inf", "1e99", "1GBs", "0x10"}) {
    EXPECT_FALSE(ParsePlanBytes(bad).ok()) << bad;
    EXPECT_FALSE(ParsePlanTokens(bad).ok()) << bad;
  }
  EXPECT_EQ(*ParsePlanTokens("128K"), 131'072);
  EXPECT_EQ(*ParsePlanTokens("3M"), 3e6);
  EXPECT_FALSE(ParsePlanTokens("0.5").ok());
}

TEST(PlanTest, ReadsModelConfigurations) {
  PlanInput input;
  ASSERT_TRUE(ReadModelConfig(R"({"num_hidden_layers": 80, "num_key_value_heads": 8,
                                  "num_attention_heads": 64, "hidden_size": 8192})",
                              &input)
                  .ok());
  EXPECT_THAT((std::vector<uint32_t>{input.layer_count, input.kv_head_count, input.head_dim}),
              ElementsAre(80, 8, 128));
  ASSERT_TRUE(ReadModelConfig(R"({"text_config": {"num_hidden_layers": 36, "head_dim": 64,
                                  "num_attention_heads": 32}})",
                              &input)
                  .ok());
  EXPECT_THAT((std::vector<uint32_t>{input.layer_count, input.kv_head_count, input.head_dim}),
              ElementsAre(36, 32, 64));
  EXPECT_EQ(ReadModelConfig(R"({"kv_lora_rank": 512})", &input).code(),
            absl::StatusCode::kUnimplemented);
  for (const char* bad : {"", "[]", "{}", "{", R"({"num_hidden_layers": -1})"}) {
    EXPECT_EQ(ReadModelConfig(bad, &input).code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

TEST(PlanTest, PrintsOnlyWhatWasAskedFor) {
  const std::string bare =
      PlanText(PlanOf({.layer_count = 80, .kv_head_count = 8, .head_dim = 128}));
  EXPECT_THAT(bare, HasSubstr("320 KiB"));
  EXPECT_THAT(bare, HasSubstr("11.25 GiB"));
  EXPECT_THAT(bare, testing::Not(HasSubstr("STEP")));
  EXPECT_THAT(PlanText(PlanOf(Small())), HasSubstr("12.5 ms"));
  const nlohmann::ordered_json json = PlanJson(PlanOf(Large()));
  EXPECT_EQ(json["rows"][2]["codec"], "nvfp4");
  EXPECT_EQ(json["rows"][2]["token_bytes"].dump(), "92160");
  EXPECT_TRUE(json["rows"][2]["step_seconds"].is_null());
  const nlohmann::ordered_json bare_json =
      PlanJson(PlanOf({.layer_count = 80, .kv_head_count = 8, .head_dim = 128}));
  EXPECT_TRUE(bare_json["kv_bytes"].is_null());
  EXPECT_TRUE(bare_json["rows"][2]["total_bytes"].is_null());
}

}  // namespace
}  // namespace kvtier::ctl
