// SPDX-License-Identifier: Apache-2.0
#include "tiers/cuda/real_driver.h"

#include <gtest/gtest.h>

#include <string>

namespace kvtier {
namespace {

TEST(RealDriverTest, SaysWhatToDoWithoutADriver) {
  const auto driver = OpenCudaDriver("libcuda-that-is-not-there.so.1");
  EXPECT_EQ(driver.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(driver.status().ToString().find("libcuda-that-is-not-there.so.1 not found"),
            std::string::npos)
      << driver.status();
  EXPECT_NE(driver.status().ToString().find("use the cpu device"), std::string::npos)
      << driver.status();
}

TEST(RealDriverTest, NamesTheFunctionThatALibraryLacks) {
  const auto driver = OpenCudaDriver("libc.so.6");
  EXPECT_EQ(driver.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(driver.status().ToString().find("no function cuInit"), std::string::npos)
      << driver.status();
}

}  // namespace
}  // namespace kvtier
