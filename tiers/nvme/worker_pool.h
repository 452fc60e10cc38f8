// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"

namespace kvtier::nvme {

// Threads for work that would keep the I/O thread from its queue: checksums. First in, first begun;
// the user bounds what is queued. Thread-safe.
class WorkerPool {
 public:
  using Work = absl::AnyInvocable<void() &&>;

  // Requires: thread_count > 0.
  explicit WorkerPool(int thread_count);
  // Does what is queued first.
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Does not block.
  void Submit(Work work);

 private:
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return is_stopping_ || !queue_.empty();
  }
  void Run();

  absl::Mutex mutex_;
  std::deque<Work> queue_ ABSL_GUARDED_BY(mutex_);
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::jthread> threads_;
};

}  // namespace kvtier::nvme
