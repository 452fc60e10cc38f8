// SPDX-License-Identifier: Apache-2.0
#include "proto/base/timed_wait.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <ctime>
#include <thread>

namespace {

std::atomic<int> g_monotonic_wait_count = 0;
std::atomic<int> g_wall_clock_wait_count = 0;

}  // namespace

// What the standard library's waits with a timeout come down to, told by the clock. (pthread_cond_
// timedwait goes by the wall clock unless the condition was made otherwise, which theirs are not.)
extern "C" int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                                      clockid_t clock, const timespec* until) {
  using Function = int (*)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);
  static const auto next = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "pthread_cond_clockwait"));
  ++(clock == CLOCK_MONOTONIC ? g_monotonic_wait_count : g_wall_clock_wait_count);
  return next(condition, mutex, clock, until);
}

extern "C" int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                                      const timespec* until) {
  using Function = int (*)(pthread_cond_t*, pthread_mutex_t*, const timespec*);
  static const auto next = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "pthread_cond_timedwait"));
  ++g_wall_clock_wait_count;
  return next(condition, mutex, until);
}

namespace kvtier {
namespace {

TEST(TimedWaitTest, GoesByTheMonotonicClock) {
  g_monotonic_wait_count = 0;
  g_wall_clock_wait_count = 0;
  TimedNotification never;
  EXPECT_FALSE(never.WaitFor(absl::Milliseconds(1)));
  EXPECT_GT(g_monotonic_wait_count, 0);
  EXPECT_EQ(g_wall_clock_wait_count, 0);
}

TEST(TimedWaitTest, ANotificationEndsTheLongestWait) {
  for (const absl::Duration timeout : {absl::Hours(1), absl::InfiniteDuration()}) {
    TimedNotification notification;
    const std::jthread notifier([&] { notification.Notify(); });
    EXPECT_TRUE(notification.WaitFor(timeout));
    EXPECT_TRUE(notification.HasBeenNotified());
    EXPECT_TRUE(notification.WaitFor(absl::ZeroDuration()));
  }
}

TEST(TimedWaitTest, AConditionIsLookedAtUnderTheMutexFirstAndOnEachWake) {
  absl::Mutex mutex;
  TimedCondition condition;
  int count = 0;
  absl::MutexLock lock(&mutex);
  EXPECT_TRUE(condition.WaitFor(mutex, absl::ZeroDuration(), [&] { return count == 0; }));
  const std::jthread counter([&] {
    for (int i = 0; i < 3; ++i) {
      absl::MutexLock counter_lock(&mutex);
      ++count;
      condition.NotifyAll();
    }
  });
  EXPECT_TRUE(condition.WaitFor(mutex, absl::Hours(1), [&] {
    mutex.AssertHeld();
    return count == 3;
  }));
  EXPECT_FALSE(condition.WaitFor(mutex, absl::Milliseconds(1), [&] { return count > 3; }));
  mutex.AssertHeld();
}

}  // namespace
}  // namespace kvtier
