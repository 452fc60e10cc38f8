// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <pthread.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <optional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "proto/base/check.h"
#include "proto/base/timed_wait.h"
#include "tiers/nvme/io_engine.h"

namespace kvtier::nvme {
namespace {

// Enough to keep a device busy at blocks of 64 KiB and more.
constexpr int kThreadCountMax = 16;

class PreadEngine final : public IoEngine {
 public:
  explicit PreadEngine(const IoEngineOptions& options) : options_(options) {
    for (int i = 0; i < std::min(options.queue_depth, kThreadCountMax); ++i) {
      threads_.emplace_back([this] { Work(); });
    }
  }

  ~PreadEngine() override {
    {
      absl::MutexLock lock(&mutex_);
      is_stopping_ = true;
    }
    threads_.clear();
  }

  std::string_view name() const override { return "pread"; }

  void Submit(std::unique_ptr<IoOp> op) override {
    KVT_CHECK(pending_count_ < options_.queue_depth);
    ++pending_count_;
    absl::MutexLock lock(&mutex_);
    queue_.push_back(std::move(op));
  }

  std::vector<Completion> Wait(int timeout_ms) override {
    std::vector<Completion> completed;
    {
      absl::MutexLock lock(&mutex_);
      news_.WaitFor(mutex_, absl::Milliseconds(timeout_ms),
                    [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return HasNews(); });
      is_woken_ = false;
      completed.swap(completed_);
    }
    pending_count_ -= static_cast<int>(completed.size());
    return completed;
  }

  void Wake() override {
    absl::MutexLock lock(&mutex_);
    is_woken_ = true;
    news_.NotifyAll();
  }

 private:
  bool HasNews() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return is_woken_ || !completed_.empty();
  }
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return is_stopping_ || !queue_.empty();
  }

  void Work() {
    pthread_setname_np(pthread_self(), "kvt-nvme-pread");
    while (true) {
      std::unique_ptr<IoOp> op;
      {
        absl::MutexLock lock(&mutex_);
        mutex_.Await(absl::Condition(this, &PreadEngine::HasWork));
        // What was submitted is finished even when stopping.
        if (queue_.empty()) return;
        op = std::move(queue_.front());
        queue_.pop_front();
      }
      std::optional<int64_t> result;
      while (!result) result = op->Advance(Attempt(*op));
      absl::MutexLock lock(&mutex_);
      completed_.push_back({.op = std::move(op), .result = *result});
      news_.NotifyAll();
    }
  }

  int64_t Attempt(const IoOp& op) const {
    iovec attempt[IoOp::kBufferCountMax];
    int count = 0;
    uint64_t allowed_bytes =
        options_.attempt_bytes_max == 0 ? UINT64_MAX : options_.attempt_bytes_max;
    for (int i = op.first_buffer; i < op.buffer_count && allowed_bytes > 0; ++i) {
      attempt[count] = op.buffers[i];
      attempt[count].iov_len = std::min<uint64_t>(attempt[count].iov_len, allowed_bytes);
      allowed_bytes -= attempt[count].iov_len;
      ++count;
    }
    const auto offset_bytes = static_cast<off_t>(op.offset_bytes + op.moved_bytes);
    ssize_t result = -1;
    switch (op.kind) {
      case IoKind::kRead:
        result = preadv(op.fd, attempt, count, offset_bytes);
        break;
      case IoKind::kWrite:
        result = pwritev(op.fd, attempt, count, offset_bytes);
        break;
      case IoKind::kSync:
        result = fdatasync(op.fd);
        break;
      case IoKind::kAllocate:
        result = fallocate(op.fd, 0, offset_bytes, static_cast<off_t>(op.total_bytes));
        break;
    }
    return result < 0 ? -static_cast<int64_t>(errno) : result;
  }

  const IoEngineOptions options_;
  int pending_count_ = 0;
  absl::Mutex mutex_;
  TimedCondition news_;
  std::deque<std::unique_ptr<IoOp>> queue_ ABSL_GUARDED_BY(mutex_);
  std::vector<Completion> completed_ ABSL_GUARDED_BY(mutex_);
  bool is_woken_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::jthread> threads_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<IoEngine>> MakePreadEngine(const IoEngineOptions& options) {
  return std::unique_ptr<IoEngine>(std::make_unique<PreadEngine>(options));
}

}  // namespace kvtier::nvme
