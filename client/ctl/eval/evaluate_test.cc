// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/eval/evaluate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "client/ctl/eval/attention.h"
#include "client/ctl/eval/quantizers.h"

namespace kvtier::ctl::eval {
namespace {

constexpr uint64_t kFirstSeed = 1;
constexpr uint64_t kSeedCount = 2;

std::map<std::string, Errors> Measure(Family family, const std::string& methods,
                                      const SyntheticShape& shape) {
  Evaluation evaluation(*ParseMethods(methods));
  for (uint64_t seed = kFirstSeed; seed < kFirstSeed + kSeedCount; ++seed) {
    Layer layer;
    layer.heads.push_back(MakeSynthetic(family, shape, seed));
    EXPECT_TRUE(evaluation.Add(layer).ok());
  }
  std::map<std::string, Errors> errors;
  for (const MethodResult& result : evaluation.Results()) {
    EXPECT_EQ(result.skipped, "");
    errors[std::string(result.method.name)] = result.errors;
  }
  return errors;
}

class RankingTest : public testing::TestWithParam<Family> {
 protected:
  RankingTest() { RecordProperty("seed", static_cast<int>(kFirstSeed)); }

  bool HasOutlierChannels() const {
    return GetParam() == Family::kOutZm || GetParam() == Family::kOutBias ||
           GetParam() == Family::kStudent3Out;
  }

  std::map<std::string, Errors> Run(const std::string& methods, double sigma = 1.0) {
    return Measure(GetParam(), methods, {.token_count = 512, .query_count = 8, .sigma = sigma});
  }
};

TEST_P(RankingTest, CalibrationHelpsAndSavesSmallValues) {
  auto errors = Run("nvfp4_unit,nvfp4");
  EXPECT_LE(errors["nvfp4"].scores, 1.02 * errors["nvfp4_unit"].scores);
  auto small = Run("nvfp4_unit,nvfp4,fp8_unit,fp8_head", 0.001);
  EXPECT_GT(small["nvfp4_unit"].v, 3 * small["nvfp4"].v);
  EXPECT_GT(small["nvfp4_unit"].scores, 1.5 * small["nvfp4"].scores);
  EXPECT_NEAR(small["nvfp4"].scores / errors["nvfp4"].scores, 1.0, 0.1);
  EXPECT_GT(small["fp8_unit"].scores, 1.5 * small["fp8_head"].scores);
}

TEST_P(RankingTest, RotationGainsNothingInGroupsOfSixteen) {
  auto errors = Run("nvfp4,nvfp4_hadamard");
  EXPECT_GE(errors["nvfp4_hadamard"].scores, 0.97 * errors["nvfp4"].scores);
}

TEST_P(RankingTest, StochasticRoundingIsWorse) {
  auto errors = Run("nvfp4,nvfp4_stochastic");
  EXPECT_GT(errors["nvfp4_stochastic"].scores, 1.2 * errors["nvfp4"].scores);
}

TEST_P(RankingTest, TwoBitsAreMuchWorseThanFour) {
  auto errors = Run("int4_kivi,int2_kivi,int4_token");
  EXPECT_GT(errors["int2_kivi"].scores, 4 * errors["int4_kivi"].scores);
  if (HasOutlierChannels()) {
    EXPECT_LT(errors["int4_kivi"].scores, 0.6 * errors["int4_token"].scores);
    EXPECT_LT(errors["int4_kivi"].output, errors["int4_token"].output);
  }
}

TEST_P(RankingTest, EightBitsAreBest) {
  std::string methods;
  for (const Method& method : AllMethods()) {
    if (method.format != Format::kBf16 && method.window_token_count == 0) {
      methods += (methods.empty() ? "" : ",") + std::string(method.name);
    }
  }
  auto errors = Run(methods);
  for (const auto& [name, error] : errors) {
    if (name.starts_with("fp8")) continue;
    EXPECT_GT(error.scores, errors["fp8_head"].scores) << name;
    EXPECT_GT(error.output, errors["fp8_head"].output) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Families, RankingTest, testing::ValuesIn(kAllFamilies),
                         [](const auto& test) { return std::string(FamilyName(test.param)); });

TEST(EvaluateTest, MeanAndSmoothAreBestWhereOnlyChannelsAreOutliers) {
  // Many queries: a peaked softmax makes the output of one a matter of chance.
  for (const Family family : {Family::kOutZm, Family::kOutBias}) {
    SCOPED_TRACE(FamilyName(family));
    auto errors = Measure(family,
                          "nvfp4_mean_smooth_4over6,nvfp4_unit,nvfp4,nvfp4_4over6,nvfp4_mean,"
                          "nvfp4_smooth,nvfp4_smooth_amax,nvfp4_hadamard,nvfp4_stochastic",
                          {.token_count = 512, .query_count = 256});
    const Errors best = errors["nvfp4_mean_smooth_4over6"];
    for (const auto& [name, error] : errors) {
      EXPECT_GE(error.scores, best.scores) << name;
      EXPECT_GE(error.output, best.output) << name;
    }
    EXPECT_LT(best.scores, 0.5 * errors["nvfp4"].scores);
    EXPECT_LT(best.output, 0.5 * errors["nvfp4"].output);
  }
}

// Figures of an independent prototype in NumPy; a normal distribution leaves little to chance.
TEST(EvaluateTest, ScoreErrorsOfNormalDataAreKnown) {
  auto errors = Measure(Family::kGauss,
                        "bf16,fp8_head,nvfp4,nvfp4_4over6,mxfp4,int4_token,int4_kivi,int2_kivi",
                        {.token_count = 1024, .query_count = 8});
  EXPECT_NEAR(errors["bf16"].scores, 0.0017, 0.0002);
  EXPECT_NEAR(errors["fp8_head"].scores, 0.0265, 0.0265 * 0.05);
  EXPECT_NEAR(errors["nvfp4"].scores, 0.0949, 0.0949 * 0.05);
  EXPECT_NEAR(errors["nvfp4_4over6"].scores, 0.0869, 0.0869 * 0.05);
  EXPECT_NEAR(errors["mxfp4"].scores, 0.115, 0.115 * 0.05);
  EXPECT_NEAR(errors["int4_token"].scores, 0.078, 0.078 * 0.05);
  EXPECT_NEAR(errors["int4_kivi"].scores, 0.078, 0.078 * 0.05);
  EXPECT_NEAR(errors["int2_kivi"].scores, 0.393, 0.393 * 0.05);
}

TEST(EvaluateTest, KernelAgreesWithItsBytes) {
  auto errors = Measure(Family::kOutBias, "nvfp4,nvfp4_mean_smooth_4over6,nvfp4_hadamard,fp8_head",
                        {.token_count = 200, .query_count = 17});
  for (const char* name : {"nvfp4", "nvfp4_mean_smooth_4over6"}) {
    ASSERT_TRUE(errors[name].kernel.has_value());
    EXPECT_LT(*errors[name].kernel, 0x1p-9) << name;
  }
  EXPECT_FALSE(errors["nvfp4_hadamard"].kernel.has_value());
  EXPECT_FALSE(errors["fp8_head"].kernel.has_value());
}

TEST(EvaluateTest, BytesCountTheMetadata) {
  auto errors = Measure(Family::kGauss,
                        "bf16,fp8_head,fp8_token,nvfp4,mxfp4,int4_kivi,int4_token,int2_kivi,"
                        "int4_kivi_window",
                        {.token_count = 512, .query_count = 1});
  EXPECT_DOUBLE_EQ(errors["bf16"].bytes_per_value, 2.0);
  EXPECT_DOUBLE_EQ(errors["fp8_head"].bytes_per_value, 1.0);
  EXPECT_DOUBLE_EQ(errors["fp8_token"].bytes_per_value, 1.0 + 4.0 / 128);
  EXPECT_DOUBLE_EQ(errors["nvfp4"].bytes_per_value, 9.0 / 16);
  EXPECT_DOUBLE_EQ(errors["mxfp4"].bytes_per_value, 17.0 / 32);
  EXPECT_DOUBLE_EQ(errors["int4_kivi"].bytes_per_value, 0.625);
  EXPECT_DOUBLE_EQ(errors["int4_token"].bytes_per_value, 0.625);
  EXPECT_DOUBLE_EQ(errors["int2_kivi"].bytes_per_value, 0.375);
  EXPECT_DOUBLE_EQ(errors["int4_kivi_window"].bytes_per_value, 0.75 * 0.625 + 0.25 * 2.0);
}

TEST(EvaluateTest, WindowKeepsTheLastTokens) {
  const Head head =
      MakeSynthetic(Family::kGauss, {.token_count = 300, .query_count = 1}, kFirstSeed);
  const Matrix k = RoundToBf16(head.k);
  const Matrix v = RoundToBf16(head.v);
  const auto stored = Apply(ParseMethods("int2_kivi_window")->front(), k, v, {});
  ASSERT_TRUE(stored.ok()) << stored.status();
  for (size_t t = 0; t < k.rows(); ++t) {
    EXPECT_EQ(std::equal(k.Row(t).begin(), k.Row(t).end(), stored->k.Row(t).begin()), t >= 172);
    EXPECT_EQ(std::equal(v.Row(t).begin(), v.Row(t).end(), stored->v.Row(t).begin()), t >= 172);
  }
  const auto whole =
      Apply(ParseMethods("int2_kivi_window")->front(), k.FirstRows(100), v.FirstRows(100), {});
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(RelativeError(whole->k, k.FirstRows(100)), 0.0);
  EXPECT_EQ(whole->bytes_per_value, 2.0);
}

TEST(EvaluateTest, OutputErrorsAreThoseOfTheSideThatIsStored) {
  // Small integers are exact in E4M3.
  const auto round = [](Matrix* matrix) {
    for (double& value : matrix->values()) value = std::round(value);
  };
  for (const bool exact_k : {true, false}) {
    SCOPED_TRACE(exact_k);
    Layer layer;
    layer.heads.push_back(MakeSynthetic(Family::kGauss, {.token_count = 64}, kFirstSeed));
    round(exact_k ? &layer.heads[0].k : &layer.heads[0].v);
    Evaluation evaluation(*ParseMethods("fp8_unit"));
    ASSERT_TRUE(evaluation.Add(layer).ok());
    const Errors errors = evaluation.Results()[0].errors;
    EXPECT_EQ(errors.k == 0.0, exact_k);
    EXPECT_EQ(errors.v == 0.0, !exact_k);
    EXPECT_GT(errors.output, 0.01);
    EXPECT_EQ(errors.k_only_output, exact_k ? 0.0 : errors.output);
    EXPECT_EQ(errors.v_only_output, exact_k ? errors.output : 0.0);
  }
}

TEST(EvaluateTest, OneScaleForAllHeadsSuffersFromTheLargest) {
  Layer layer;
  layer.heads.push_back(MakeSynthetic(Family::kGauss, {.token_count = 64, .sigma = 1.0}, 1));
  layer.heads.push_back(MakeSynthetic(Family::kGauss, {.token_count = 64, .sigma = 1e-5}, 2));
  Evaluation evaluation(*ParseMethods("fp8_tensor,fp8_head"));
  ASSERT_TRUE(evaluation.Add(layer).ok());
  const auto results = evaluation.Results();
  EXPECT_GT(results[0].errors.scores, 2 * results[1].errors.scores);
}

TEST(EvaluateTest, MethodsThatDoNotExistForAHeadDimAreSkipped) {
  Layer layer;
  layer.heads.push_back(MakeSynthetic(Family::kGauss, {.token_count = 40, .head_dim = 72}, 1));
  Evaluation evaluation(AllMethods());
  ASSERT_TRUE(evaluation.Add(layer).ok());
  for (const MethodResult& result : evaluation.Results()) {
    EXPECT_EQ(!result.skipped.empty(), result.method.format == Format::kNvfp4)
        << result.method.name;
  }
}

TEST(EvaluateTest, NamesOfMethodsAreUniqueAndRead) {
  for (const Method& method : AllMethods()) {
    const auto read = ParseMethods(method.name);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->front().summary, method.summary);
  }
  EXPECT_EQ(ParseMethods("nvfp4,fp7").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(EvaluateTest, WorkedExampleHasItsFigures) {
  const ExampleResult example = RunWorkedExample();
  const auto rounded = [](double x) { return std::round(x * 1000) / 1000; };
  EXPECT_EQ(rounded(example.per_token.max_error), 1.7);
  EXPECT_EQ(rounded(example.per_channel.max_error), 0.067);
  EXPECT_EQ(rounded(100 * example.per_token.k_error), 8.587);
  EXPECT_EQ(rounded(100 * example.per_channel.k_error), 0.59);
  const std::vector<double> exact = {1.2, 0.9, 0.9, 1.6};
  const std::vector<double> per_token = {0.3, -0.1, -0.8, 0.6};
  const std::vector<double> per_channel = {1.233, 0.9, 0.933, 1.667};
  for (size_t t = 0; t < 4; ++t) {
    EXPECT_NEAR(example.exact_scores[t], exact[t], 1e-6);
    EXPECT_NEAR(example.per_token.scores[t], per_token[t], 1e-6);
    EXPECT_NEAR(example.per_channel.scores[t], per_channel[t], 5e-4);
  }
}

}  // namespace
}  // namespace kvtier::ctl::eval
