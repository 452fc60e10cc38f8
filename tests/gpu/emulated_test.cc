// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "gtest/gtest.h"
#include "tests/gpu/suite.h"

// The suite over emulated_runtime.cc: what passes here can only fail on a GPU for what the GPU
// does.

namespace kvtier::gpu {
namespace {

Suite EmulatedSuite() {
  return Suite({.name = "emulated \"GPU\"", .major = 9, .minor = 0},
               {.is_sanitized = true, .has_benchmarks = false, .compute_sanitizer = ""});
}

TEST(GpuSuite, ChecksPrimitives) {
  Suite suite = EmulatedSuite();
  CheckPrimitives(&suite);
  EXPECT_TRUE(suite.ok()) << suite.ToJson();
}

TEST(GpuSuite, ChecksTheEncoder) {
  Suite suite = EmulatedSuite();
  CheckEncoder(&suite);
  EXPECT_TRUE(suite.ok()) << suite.ToJson();
}

TEST(GpuSuite, ChecksTransfers) {
  Suite suite = EmulatedSuite();
  CheckTransfers(&suite);
  EXPECT_TRUE(suite.ok()) << suite.ToJson();
}

TEST(GpuSuite, ChecksDecode) {
  Suite suite = EmulatedSuite();
  CheckDecode(&suite);
  EXPECT_TRUE(suite.ok()) << suite.ToJson();
}

TEST(GpuSuite, ChecksMla) {
  Suite suite = EmulatedSuite();
  CheckMlaTransfers(&suite);
  CheckMlaDecode(&suite);
  EXPECT_TRUE(suite.ok()) << suite.ToJson();
}

TEST(GpuSuite, WritesWhatFailed) {
  Suite suite = EmulatedSuite();
  suite.Begin("one");
  EXPECT_FALSE(suite.Expect(false, "a \\ and a \" fail"));
  suite.AddBenchmark("speed", 0.5, "of light", "");
  EXPECT_EQ(suite.missed_must_count(), 0U);
  suite.AddBenchmark("slow", 0.5, "of light", "", 0.6);
  suite.AddBenchmark("fast", 0.7, "of light", "", 0.6);
  EXPECT_EQ(suite.missed_must_count(), 1U);
  EXPECT_FALSE(suite.ok());
  const std::string json = suite.ToJson();
  EXPECT_NE(json.find(R"("status": "failed")"), std::string::npos) << json;
  EXPECT_NE(json.find(R"("card": "emulated \"GPU\"")"), std::string::npos) << json;
  EXPECT_NE(json.find(R"("first_failure": "a \\ and a \" fail")"), std::string::npos) << json;
  EXPECT_NE(json.find(R"("value": 0.5)"), std::string::npos) << json;
  EXPECT_NE(json.find(R"("must": 0.6, "met": false)"), std::string::npos) << json;
  EXPECT_NE(json.find(R"("must": 0.6, "met": true)"), std::string::npos) << json;
  EXPECT_NE(json.find(R"("missed_musts": 1)"), std::string::npos) << json;
}

TEST(GpuSuite, CannotPassAfterAnEarlierFailure) {
  Suite suite({.name = "GPU"}, {.earlier_failure = "memcheck failed"});
  suite.Begin("one");
  EXPECT_TRUE(suite.Expect(true, ""));
  EXPECT_FALSE(suite.ok());
  const std::string json = suite.ToJson();
  EXPECT_NE(json.find(R"("status": "failed")"), std::string::npos) << json;
  EXPECT_NE(json.find(R"("reason": "memcheck failed")"), std::string::npos) << json;
}

}  // namespace
}  // namespace kvtier::gpu
