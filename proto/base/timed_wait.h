// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace kvtier {

// Waits with a timeout, by the monotonic clock. Abseil's own (AwaitWithTimeout and the like, as of
// 20220623) sleep until a time of the wall clock: once that is set back by an hour, whoever sleeps
// for 5 ms sleeps for an hour. Here it may be set to anything.

using MonotonicTime = std::chrono::steady_clock::time_point;

// A timeout of more than a day is a day.
inline MonotonicTime MonotonicDeadline(absl::Duration timeout) {
  return std::chrono::steady_clock::now() +
         absl::ToChronoNanoseconds(std::min(timeout, absl::Hours(24)));
}

// Negative once it is over.
inline absl::Duration TimeUntil(MonotonicTime deadline) {
  return absl::FromChrono(deadline - std::chrono::steady_clock::now());
}

// What a thread waits for under an absl::Mutex. Unlike with absl::Condition, who makes the
// condition true wakes the waiting thread. Thread-safe.
class TimedCondition {
 public:
  TimedCondition() = default;
  TimedCondition(const TimedCondition&) = delete;
  TimedCondition& operator=(const TimedCondition&) = delete;

  // After the change, with the mutex or without it.
  void NotifyAll() { wakes_.notify_all(); }

  // Returns predicate(), which is called with the mutex held, once it is true or when `timeout` is
  // over.
  template <typename Predicate>
  bool WaitFor(absl::Mutex& mutex, absl::Duration timeout, Predicate predicate)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    Lockable lockable(mutex);
    return wakes_.wait_until(lockable, MonotonicDeadline(timeout), std::move(predicate));
  }

 private:
  // The mutex under the names that the standard library calls.
  class Lockable {
   public:
    explicit Lockable(absl::Mutex& mutex) : mutex_(mutex) {}
    // NOLINTNEXTLINE(readability-identifier-naming)
    void lock() ABSL_NO_THREAD_SAFETY_ANALYSIS { mutex_.Lock(); }
    // NOLINTNEXTLINE(readability-identifier-naming)
    void unlock() ABSL_NO_THREAD_SAFETY_ANALYSIS { mutex_.Unlock(); }

   private:
    absl::Mutex& mutex_;
  };

  std::condition_variable_any wakes_;
};

// Something that happens once. Thread-safe; may be destroyed by a thread that was woken by Notify.
class TimedNotification {
 public:
  void Notify() {
    absl::MutexLock lock(&mutex_);
    notified_ = true;
    condition_.NotifyAll();
  }

  bool HasBeenNotified() const {
    absl::MutexLock lock(&mutex_);
    return notified_;
  }

  // Whether it has happened, at the latest after `timeout`; see TimedCondition.
  bool WaitFor(absl::Duration timeout) {
    absl::MutexLock lock(&mutex_);
    return condition_.WaitFor(mutex_, timeout,
                              [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return notified_; });
  }

 private:
  mutable absl::Mutex mutex_;
  TimedCondition condition_;
  bool notified_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvtier
