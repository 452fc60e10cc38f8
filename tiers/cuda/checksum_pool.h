// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"

namespace kvtier {

// Threads that take checksums for somebody who has no time for them. Thread-safe.
class ChecksumPool {
 public:
  using Done = absl::AnyInvocable<void(uint32_t crc32c) &&>;

  // Requires: thread_count > 0.
  explicit ChecksumPool(uint32_t thread_count);
  // Takes those that are queued first.
  ~ChecksumPool();
  ChecksumPool(const ChecksumPool&) = delete;
  ChecksumPool& operator=(const ChecksumPool&) = delete;

  // Does not block. The CRC-32C of `bytes`, which stay valid until `done` is called, from a thread
  // of the pool. In the order of submission, but for those that several threads take at once.
  void Submit(std::span<const std::byte> bytes, Done done) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Task {
    std::span<const std::byte> bytes;
    Done done;
  };

  void Work() ABSL_LOCKS_EXCLUDED(mutex_);

  absl::Mutex mutex_;
  std::deque<Task> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::jthread> threads_;
};

}  // namespace kvtier
