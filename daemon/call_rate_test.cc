// SPDX-License-Identifier: Apache-2.0
#include "daemon/call_rate.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace kvtier {
namespace {

constexpr uint64_t kStartUs = 1'000'000'000;

TEST(CallRateTest, GivesABurstOfOneSecondAndThenItsRate) {
  CallRate rate(10);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(rate.TakeUs(kStartUs), 0U) << i;
  EXPECT_EQ(rate.TakeUs(kStartUs), 100'000U);
  EXPECT_EQ(rate.TakeUs(kStartUs + 99'999), 1U);
  EXPECT_EQ(rate.TakeUs(kStartUs + 100'000), 0U) << "what is refused takes nothing";
  EXPECT_EQ(rate.TakeUs(kStartUs + 100'000), 100'000U);
}

TEST(CallRateTest, SavesNoMoreThanASecond) {
  CallRate rate(3);
  const uint64_t later_us = kStartUs + 3'600'000'000;
  EXPECT_EQ(rate.TakeUs(kStartUs), 0U);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(rate.TakeUs(later_us), 0U) << i;
  EXPECT_GT(rate.TakeUs(later_us), 0U);
}

TEST(CallRateTest, OneASecondIsOneAtATime) {
  CallRate rate(1);
  EXPECT_EQ(rate.TakeUs(kStartUs), 0U);
  EXPECT_EQ(rate.TakeUs(kStartUs), 1'000'000U);
  EXPECT_EQ(rate.TakeUs(kStartUs + 1'000'000), 0U);
}

TEST(CallRateTest, ThreadsShareIt) {
  CallRate rate(1000);
  std::atomic<int> taken{0};
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&] {
        for (int i = 0; i < 1000; ++i) taken += rate.TakeUs(kStartUs) == 0;
      });
    }
  }
  EXPECT_EQ(taken, 1000);
}

}  // namespace
}  // namespace kvtier
