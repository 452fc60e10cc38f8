// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "policy/policy.h"

namespace kvtier::policy {
namespace {

TEST(Admission, ParsesEveryName) {
  EXPECT_EQ(*ParseAdmission("all"), Admission::kAll);
  EXPECT_EQ(*ParseAdmission("seen_again"), Admission::kSeenAgain);
}

TEST(Admission, RejectsUnknownNamesAndNamesThem) {
  for (const char* name : {"", "ALL", "seen-again", "all "}) {
    const auto admission = ParseAdmission(name);
    EXPECT_EQ(admission.status().code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_NE(admission.status().ToString().find(name), std::string::npos) << name;
  }
}

TEST(Admission, AllAdmitsBlocksNeverUsed) { EXPECT_TRUE(Admit(Admission::kAll, {})); }

TEST(Admission, SeenAgainAsksForASecondUse) {
  EXPECT_FALSE(Admit(Admission::kSeenAgain, {.use_count = 0}));
  EXPECT_FALSE(Admit(Admission::kSeenAgain, {.use_count = 1}));
  EXPECT_TRUE(Admit(Admission::kSeenAgain, {.use_count = 2}));
  EXPECT_TRUE(Admit(Admission::kSeenAgain, {.use_count = 3}));
}

}  // namespace
}  // namespace kvtier::policy
