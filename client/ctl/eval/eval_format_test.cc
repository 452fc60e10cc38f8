// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/eval/eval_format.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

namespace kvtier::ctl::eval {
namespace {

std::vector<DatasetReport> MakeReports() {
  DatasetReport report{.name = "gauss",
                       .synthetic = true,
                       .synthetic_queries = true,
                       .token_count = 4096,
                       .head_dim = 72,
                       .kv_head_count = 1,
                       .query_count = 16,
                       .seed_count = 6};
  report.results.push_back({.method = AllMethods()[0],
                            .errors = {.bytes_per_value = 2.0,
                                       .k = 0.0016,
                                       .v = 0.0017,
                                       .scores = 0.125,
                                       .output = 0.25,
                                       .k_only_output = 0.5,
                                       .v_only_output = 0.0625,
                                       .kernel = 0.0001}});
  report.results.push_back({.method = AllMethods()[6], .skipped = "nvfp4: not for 72"});
  return {report};
}

// A change of this text is a change of the interface: docs/accuracy.md.
TEST(EvalFormatTest, JsonKeepsItsSchema) {
  EXPECT_EQ(EvalJson(MakeReports()).dump(2), R"({
  "datasets": [
    {
      "dataset": "gauss",
      "synthetic": true,
      "synthetic_queries": true,
      "token_count": 4096,
      "head_dim": 72,
      "kv_head_count": 1,
      "query_count": 16,
      "seed_count": 6,
      "methods": [
        {
          "method": "bf16",
          "bytes_per_value": 2.0,
          "k_error": 0.0016,
          "v_error": 0.0017,
          "score_error": 0.125,
          "output_error": 0.25,
          "k_only_output_error": 0.5,
          "v_only_output_error": 0.0625,
          "kernel_error": 0.0001
        },
        {
          "method": "nvfp4",
          "skipped": "nvfp4: not for 72"
        }
      ]
    }
  ]
})");
}

TEST(EvalFormatTest, JsonHasNullForWhatIsNotMeasured) {
  auto reports = MakeReports();
  reports[0].results[0].errors.kernel.reset();
  EXPECT_TRUE(EvalJson(reports)["datasets"][0]["methods"][0]["kernel_error"].is_null());
}

TEST(EvalFormatTest, TextIsOneTableADataset) {
  EXPECT_EQ(EvalText(MakeReports()),
            "gauss: 4096 tokens, head_dim 72, 16 queries, mean of 6 seeds\n"
            "METHOD  B/VALUE       K       V  SCORES  OUTPUT  K ONLY  V ONLY   KERNEL  WHAT\n"
            "bf16     2.0000  0.0016  0.0017  0.1250  0.2500  0.5000  0.0625  1.0e-04  as it is\n"
            "nvfp4         -       -       -       -       -       -       -        -  nvfp4: not "
            "for 72\n");
  auto reports = MakeReports();
  reports[0].synthetic = false;
  reports[0].name = "k.npy";
  reports[0].kv_head_count = 8;
  EXPECT_EQ(
      EvalText(reports).substr(0, EvalText(reports).find('\n')),
      "k.npy: 4096 tokens, head_dim 72, 16 queries (synthetic) a kv head, mean of 8 kv heads");
}

TEST(EvalFormatTest, PlotHasABarForEachMeasuredMethod) {
  auto reports = MakeReports();
  reports.push_back(reports[0]);
  reports[1].name = "a<b";
  const std::string svg = EvalPlot(reports);
  const auto count = [&svg](const std::string& part) {
    size_t found = 0;
    for (size_t at = svg.find(part); at != std::string::npos; at = svg.find(part, at + 1)) ++found;
    return found;
  };
  EXPECT_EQ(count("<title>bf16, gauss: 0.125</title>"), 1U);
  EXPECT_EQ(count("<title>bf16, a&lt;b: 0.25</title>"), 1U);
  EXPECT_EQ(count("<title>"), 4U);
}

TEST(EvalFormatTest, ExampleIsTheWorkedOne) {
  EXPECT_EQ(ExampleText(RunWorkedExample()),
            "K of 4 tokens, channel 3 an outlier, and one query; 2 bits, min and max exact\n"
            "  k[0]   0.1  -0.2   0.4   9.0\n"
            "  k[1]  -0.4   0.5  -0.3  11.0\n"
            "  k[2]   0.3  -0.6   0.2  10.0\n"
            "  k[3]  -0.2   0.1   0.5  12.0\n"
            "  q      1.0   1.0   1.0   0.1\n"
            "\n"
            "SCORES             0       1       2      3  MAX ERROR  K ERROR\n"
            "exact          1.200   0.900   0.900  1.600\n"
            "K per token    0.300  -0.100  -0.800  0.600      1.700  8.587 %\n"
            "K per channel  1.233   0.900   0.933  1.667      0.067  0.590 %\n");
  const Json json = ExampleJson(RunWorkedExample());
  EXPECT_NEAR(json["per_channel"]["max_error"].get<double>(), 0.0667, 1e-4);
  EXPECT_EQ(json["k"].size(), 4U);
}

}  // namespace
}  // namespace kvtier::ctl::eval
