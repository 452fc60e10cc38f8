// SPDX-License-Identifier: Apache-2.0
#include "daemon/standby_thread.h"

#include <gtest/gtest.h>

namespace kvtier {
namespace {

TEST(StandbyThreadTest, WorksOnceItIsTold) {
  bool worked = false;
  std::thread::id worker;
  {
    StandbyThread thread([&] {
      worked = true;
      worker = std::this_thread::get_id();
    });
    thread.Begin();
  }
  EXPECT_TRUE(worked);
  EXPECT_NE(worker, std::this_thread::get_id());
}

TEST(StandbyThreadTest, EndsWithoutWorkWhenItIsNotNeeded) {
  bool worked = false;
  {
    const StandbyThread thread([&] { worked = true; });
  }
  EXPECT_FALSE(worked);
}

}  // namespace
}  // namespace kvtier
