// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace kvtier {

// A thread that is made before it is needed. Where threads are counted (TasksMax=, a container's
// limit) the one that ends the daemon in order could not be had at the end.
class StandbyThread {
 public:
  explicit StandbyThread(std::function<void()> work)
      : thread_([this, work = std::move(work)] {
          if (AwaitOrder()) work();
        }) {}
  // Waits for work that was begun.
  ~StandbyThread() {
    absl::MutexLock lock(&mutex_);
    if (order_ == Order::kWait) order_ = Order::kEnd;
  }
  StandbyThread(const StandbyThread&) = delete;
  StandbyThread& operator=(const StandbyThread&) = delete;

  // Begins the work, and returns. Once.
  void Begin() {
    absl::MutexLock lock(&mutex_);
    order_ = Order::kWork;
  }

 private:
  enum class Order : uint8_t { kWait, kWork, kEnd };

  bool AwaitOrder() {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(+[](Order* order) { return *order != Order::kWait; }, &order_));
    return order_ == Order::kWork;
  }

  absl::Mutex mutex_;
  Order order_ ABSL_GUARDED_BY(mutex_) = Order::kWait;
  // Joined before the above goes.
  std::jthread thread_;
};

}  // namespace kvtier
