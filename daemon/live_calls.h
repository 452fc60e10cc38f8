// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "proto/base/timed_wait.h"

namespace kvtier {

// A streaming call that lives longer than one reaction. Thread-safe.
class LiveCall {
 public:
  virtual ~LiveCall() = default;
  // Once a beat, until the call is removed.
  virtual void OnBeat(uint64_t now_ms) = 0;
  // The daemon is stopping: end soon.
  virtual void OnDrain() = 0;
};

// The streaming calls in progress, and the thread that keeps time for them: heartbeats of sessions,
// deadlines of data streams whose client set none. Shares the calls' ownership with gRPC, so that a
// call that ends during a beat outlives it. Thread-safe.
class LiveCalls {
 public:
  explicit LiveCalls(uint32_t beat_interval_ms);
  ~LiveCalls();
  LiveCalls(const LiveCalls&) = delete;
  LiveCalls& operator=(const LiveCalls&) = delete;

  void Add(const std::shared_ptr<LiveCall>& call);
  void Remove(const LiveCall* call);
  // Tells all calls to end.
  void Drain();
  size_t count() const;

 private:
  std::vector<std::shared_ptr<LiveCall>> Snapshot() const;
  void Beat();

  const uint32_t beat_interval_ms_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<const LiveCall*, std::shared_ptr<LiveCall>> calls_ ABSL_GUARDED_BY(mutex_);
  TimedNotification stopping_;
  std::jthread thread_;
};

}  // namespace kvtier
