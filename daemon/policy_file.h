// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "daemon/store.h"
#include "proto/base/timed_wait.h"

namespace kvtier {

// Keeps what the eviction policy has learned over a restart, in one file: read at the start,
// replaced now and then and at the end. It holds counts of how soon blocks of a kind were used
// again, and nothing of any block, key or tenant. Without it, or when it is damaged, the policy
// learns anew; a file that cannot be written is said once and tried again. Bytes: EvictionPolicy.
// Owns a thread.
class PolicyFile {
 public:
  static constexpr std::chrono::milliseconds kInterval = std::chrono::minutes(1);

  // Restores. `store` outlives this.
  PolicyFile(std::string path, Store* store, std::chrono::milliseconds interval = kInterval);
  // Keeps a last time.
  ~PolicyFile();
  PolicyFile(const PolicyFile&) = delete;
  PolicyFile& operator=(const PolicyFile&) = delete;

  // Replaces the file as a whole, or leaves it. Blocks for the disk; the store goes on.
  absl::Status Keep() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Restore();
  void KeepAndSay();

  const std::string path_;
  Store* const store_;
  absl::Mutex mutex_;
  // What the file holds, as far as this process knows.
  std::string kept_ ABSL_GUARDED_BY(mutex_);
  bool failed_ ABSL_GUARDED_BY(mutex_) = false;
  TimedNotification ending_;
  std::jthread thread_;
};

}  // namespace kvtier
