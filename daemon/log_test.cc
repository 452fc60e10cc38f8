// SPDX-License-Identifier: Apache-2.0
#include "daemon/log.h"

#include <gtest/gtest.h>

namespace kvtier {
namespace {

TEST(LogTest, TextQuotesValuesThatAreNotOneWord) {
  EXPECT_EQ(FormatLogLine(false, LogLevel::kInfo, "T", "session opened",
                          {{"session", 7U}, {"client", "rank 0\n"}, {"tenant", "a"}, {"none", ""}}),
            "info T session opened session=7 client=\"rank 0\\n\" tenant=a none=\"\"");
}

TEST(LogTest, JsonKeepsNumbersAndSurvivesInvalidUtf8) {
  EXPECT_EQ(FormatLogLine(true, LogLevel::kWarning, "T", "m", {{"n", -3}, {"s", "\xff{}"}}),
            "{\"time\":\"T\",\"level\":\"warning\",\"message\":\"m\",\"n\":-3,"
            "\"s\":\"\\ufffd{}\"}");
}

}  // namespace
}  // namespace kvtier
