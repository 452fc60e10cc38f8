// SPDX-License-Identifier: Apache-2.0
//
// Correctly locked programs that ThreadSanitizer must not report. Each part fails (the process
// exits with a report) when its interposed function is missing from tsan_absl.cc.

#include <absl/synchronization/mutex.h>
#include <absl/synchronization/notification.h>
#include <absl/time/time.h>
#include <gtest/gtest.h>

#include <thread>

namespace {

constexpr int kRounds = 1000;

TEST(TsanAbslTest, MutexOrdersPlainAccesses) {
  absl::Mutex mu;
  int value = 0;
  {
    auto work = [&] {
      for (int i = 0; i < kRounds; ++i) {
        absl::MutexLock lock(&mu);
        ++value;
      }
    };
    std::jthread first(work);
    std::jthread second(work);
    absl::ReaderMutexLock lock(&mu);
    EXPECT_LE(value, 2 * kRounds);
  }
  EXPECT_EQ(value, 2 * kRounds);
}

TEST(TsanAbslTest, CondVarHandsOverPlainValues) {
  absl::Mutex mu;
  absl::CondVar cv;
  int turn = 0;
  std::jthread other([&] {
    for (int i = 0; i < kRounds; ++i) {
      absl::MutexLock lock(&mu);
      while (turn % 2 == 0) cv.Wait(&mu);
      ++turn;
      cv.SignalAll();
    }
  });
  for (int i = 0; i < kRounds; ++i) {
    absl::MutexLock lock(&mu);
    ++turn;
    cv.SignalAll();
    while (turn % 2 == 1) cv.WaitWithTimeout(&mu, absl::Seconds(10));
  }
}

TEST(TsanAbslTest, ConditionsMayBeEvaluatedByTheUnlockingThread) {
  absl::Mutex mu;
  int turn = 0;
  std::jthread other([&] {
    auto odd = [&turn] { return turn % 2 == 1; };
    for (int i = 0; i < kRounds; ++i) {
      mu.LockWhen(absl::Condition(&odd));
      ++turn;
      mu.Unlock();
    }
  });
  auto even = [&turn] { return turn % 2 == 0; };
  for (int i = 0; i < kRounds; ++i) {
    absl::MutexLock lock(&mu);
    ++turn;
    ASSERT_TRUE(mu.AwaitWithTimeout(absl::Condition(&even), absl::Seconds(10)));
  }
}

TEST(TsanAbslTest, NotificationPublishesPlainValues) {
  absl::Notification ready;
  int value = 0;
  std::jthread writer([&] {
    value = 42;
    ready.Notify();
  });
  while (!ready.HasBeenNotified()) std::this_thread::yield();
  EXPECT_EQ(value, 42);
}

}  // namespace
