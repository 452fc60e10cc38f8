// SPDX-License-Identifier: Apache-2.0
#include "daemon/live_calls.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "absl/time/time.h"
#include "daemon/monotonic.h"

namespace kvtier {
namespace {

// The first beat of the first call comes no later than this, or its interval.
constexpr uint32_t kIdleBeatMs = 100;

}  // namespace

LiveCalls::LiveCalls(uint32_t beat_interval_ms)
    : beat_interval_ms_(beat_interval_ms), thread_([this] {
        pthread_setname_np(pthread_self(), "kvtier-beat");
        Beat();
      }) {}

LiveCalls::~LiveCalls() {
  stopping_.Notify();
  thread_.join();
}

void LiveCalls::Add(const std::shared_ptr<LiveCall>& call) {
  absl::MutexLock lock(&mutex_);
  calls_.emplace(call.get(), call);
}

void LiveCalls::Remove(const LiveCall* call) {
  // The last owner may be this table: the call ends outside the lock.
  std::shared_ptr<LiveCall> removed;
  absl::MutexLock lock(&mutex_);
  const auto found = calls_.find(call);
  if (found == calls_.end()) return;
  removed = std::move(found->second);
  calls_.erase(found);
}

void LiveCalls::Drain() {
  for (const auto& call : Snapshot()) call->OnDrain();
}

size_t LiveCalls::count() const {
  absl::MutexLock lock(&mutex_);
  return calls_.size();
}

std::vector<std::shared_ptr<LiveCall>> LiveCalls::Snapshot() const {
  std::vector<std::shared_ptr<LiveCall>> calls;
  absl::MutexLock lock(&mutex_);
  calls.reserve(calls_.size());
  for (const auto& [raw, call] : calls_) calls.push_back(call);
  return calls;
}

void LiveCalls::Beat() {
  const auto interval_ms = [this] {
    return count() == 0 ? std::max(beat_interval_ms_, kIdleBeatMs) : beat_interval_ms_;
  };
  while (!stopping_.WaitFor(absl::Milliseconds(interval_ms()))) {
    for (const auto& call : Snapshot()) call->OnBeat(MonotonicMs());
  }
}

}  // namespace kvtier
