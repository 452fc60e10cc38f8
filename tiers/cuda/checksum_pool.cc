// SPDX-License-Identifier: Apache-2.0
#include "tiers/cuda/checksum_pool.h"

#include <pthread.h>

#include <utility>

#include "proto/base/check.h"
#include "proto/base/crc32c.h"

namespace kvtier {

ChecksumPool::ChecksumPool(uint32_t thread_count) {
  KVT_CHECK(thread_count > 0);
  for (uint32_t i = 0; i < thread_count; ++i) {
    threads_.emplace_back([this] {
      pthread_setname_np(pthread_self(), "kvtier-crc");
      Work();
    });
  }
}

ChecksumPool::~ChecksumPool() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  threads_.clear();
}

void ChecksumPool::Submit(std::span<const std::byte> bytes, Done done) {
  absl::MutexLock lock(&mutex_);
  queue_.push_back({.bytes = bytes, .done = std::move(done)});
}

void ChecksumPool::Work() {
  const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stopping_ || !queue_.empty();
  };
  while (true) {
    Task task;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&ready));
      if (queue_.empty()) return;
      task = std::move(queue_.front());
      queue_.pop_front();
    }
    std::move(task.done)(Crc32c(task.bytes));
  }
}

}  // namespace kvtier
