// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/worker_pool.h"

#include <pthread.h>

#include <utility>

#include "proto/base/check.h"

namespace kvtier::nvme {

WorkerPool::WorkerPool(int thread_count) {
  KVT_CHECK(thread_count > 0);
  for (int i = 0; i < thread_count; ++i) threads_.emplace_back([this] { Run(); });
}

WorkerPool::~WorkerPool() {
  {
    absl::MutexLock lock(&mutex_);
    is_stopping_ = true;
  }
  threads_.clear();
}

void WorkerPool::Submit(Work work) {
  absl::MutexLock lock(&mutex_);
  queue_.push_back(std::move(work));
}

void WorkerPool::Run() {
  pthread_setname_np(pthread_self(), "kvt-nvme-check");
  while (true) {
    Work work;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &WorkerPool::HasWork));
      if (queue_.empty()) return;
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    std::move(work)();
  }
}

}  // namespace kvtier::nvme
