// SPDX-License-Identifier: Apache-2.0
#include "policy/sim/trace_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <lzma.h>

#include <array>
#include <cstdio>
#include <string>

#include "proto/base/status_util.h"

namespace kvtier::sim {
namespace {

using testing::HasSubstr;

constexpr std::string_view kTwoRequests =
    "{\"timestamp\": 0, \"hash_ids\": [1, 2], \"session\": 4, \"api\": 30}\n"
    "\n"
    "{\"timestamp\": 5, \"hash_ids\": [1, 2, 3], \"session\": 4, \"kind\": \"tool\"}\n";

std::string WriteTemporary(const std::string& name, std::string_view data) {
  const std::string path = testing::TempDir() + name;
  std::FILE* file = std::fopen(path.c_str(), "wb");
  EXPECT_NE(file, nullptr);
  EXPECT_EQ(std::fwrite(data.data(), 1, data.size(), file), data.size());
  EXPECT_EQ(std::fclose(file), 0);
  return path;
}

std::string Compress(std::string_view text) {
  std::array<uint8_t, 4096> packed{};
  size_t packed_bytes = 0;
  EXPECT_EQ(lzma_easy_buffer_encode(6, LZMA_CHECK_CRC64, nullptr,
                                    reinterpret_cast<const uint8_t*>(text.data()), text.size(),
                                    packed.data(), &packed_bytes, packed.size()),
            LZMA_OK);
  return {reinterpret_cast<const char*>(packed.data()), packed_bytes};
}

TEST(TraceFileTest, ReadsRequestsOfOneSession) {
  const auto trace = ParseTrace(kTwoRequests, "two");
  ASSERT_TRUE(trace.ok()) << trace.status();
  ASSERT_EQ(trace->requests.size(), 2U);
  EXPECT_EQ(trace->contexts.size(), 1U);
  EXPECT_EQ(trace->requests[0].api_ms, 30U);
  EXPECT_EQ(trace->requests[1].chain.size(), 3U);
}

TEST(TraceFileTest, RequestsWithoutSessionAreContextsOfTheirOwn) {
  const auto trace = ParseTrace(
      "{\"timestamp\": 0, \"hash_ids\": []}\n{\"timestamp\": 1, \"hash_ids\": [0]}", "chat");
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_EQ(trace->contexts.size(), 2U);
}

TEST(TraceFileTest, StopsAtTheRequestedCount) {
  const auto trace = ParseTrace(kTwoRequests, "two", 1);
  ASSERT_TRUE(trace.ok());
  EXPECT_EQ(trace->requests.size(), 1U);
}

TEST(TraceFileTest, ReadsPlainAndXzFilesAlike) {
  for (const std::string& path :
       {WriteTemporary("kvtier_trace.jsonl", kTwoRequests),
        WriteTemporary("kvtier_trace.jsonl.xz", Compress(kTwoRequests))}) {
    const auto trace = ReadTraceFile(path);
    ASSERT_TRUE(trace.ok()) << trace.status();
    EXPECT_EQ(trace->requests.size(), 2U);
    std::remove(path.c_str());
  }
}

TEST(TraceFileTest, NamesTheBrokenLine) {
  for (const std::string_view bad :
       {"{\"timestamp\": 0}", "[1]", "{", "{\"timestamp\": -1, \"hash_ids\": []}",
        "{\"timestamp\": 0, \"hash_ids\": [-3]}", "{\"timestamp\": 0, \"hash_ids\": [\"a\"]}"}) {
    const auto trace =
        ParseTrace("{\"timestamp\": 0, \"hash_ids\": []}\n" + std::string(bad), "bad.jsonl");
    EXPECT_EQ(trace.status().code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_THAT(std::string(FromAbsl(trace.status().message())), HasSubstr("bad.jsonl:2"));
  }
}

TEST(TraceFileTest, NumbersThatNoClockHasAreNone) {
  for (const char* number : {"1e300", "-1", "1e16", "18446744073709551615", "\"0\""}) {
    const std::string line = absl::StrFormat("{\"timestamp\": %s, \"hash_ids\": [1]}", number);
    EXPECT_THAT(std::string(ParseTrace(line, "t").status().message()),
                HasSubstr("t:1: timestamp is not"));
  }
  const auto trace = ParseTrace(
      "{\"timestamp\": 1e15, \"hash_ids\": [1], \"api\": 1e300, \"input_length\": 1e15}", "t");
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_EQ(trace->requests[0].api_ms, 0U);
  // As many tokens as the largest block could have, and not a shift beyond the number.
  EXPECT_EQ(trace->block_tokens, 1U << 20);
}

TEST(TraceFileTest, ASessionOfManyLevelsIsNone) {
  std::string line = "{\"timestamp\": 0, \"hash_ids\": [1], \"session\": ";
  line.append(1'000'000, '[').append(1'000'000, ']').push_back('}');
  EXPECT_THAT(std::string(ParseTrace(line, "deep").status().message()),
              HasSubstr("session is no number and no string"));
}

TEST(TraceFileTest, TruncatedXzIsDataLoss) {
  const std::string packed = Compress(kTwoRequests);
  const std::string path =
      WriteTemporary("kvtier_cut.jsonl.xz", packed.substr(0, packed.size() - 8));
  EXPECT_EQ(ReadTraceFile(path).status().code(), absl::StatusCode::kDataLoss);
  std::remove(path.c_str());
}

TEST(TraceFileTest, MissingFileIsAnError) {
  EXPECT_EQ(ReadTraceFile("/nonexistent/trace.jsonl").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace kvtier::sim
