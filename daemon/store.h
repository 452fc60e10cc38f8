// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "daemon/core/store_core.h"
#include "daemon/monotonic.h"
#include "daemon/movers.h"
#include "proto/base/timed_wait.h"

namespace kvtier {

// The store core at work: its lock, its clock, its movers. Owns them; the tiers are the caller's
// and outlive it. Thread-safe.
//
// One lock, held only while the core runs; nothing else is locked, called or logged under it.
// Completions of transfers are queued and given to the core by one thread (which also ticks), so a
// transfer that ends at once never recurses into the caller that started it.
class Store {
 public:
  struct Options {
    core::CoreOptions core;
    policy::EvictionKind eviction = policy::EvictionKind::kLru;
    uint32_t copy_worker_count = 2;
    // See Movers::Options.
    uint64_t demote_bytes_per_second = 0;
  };

  // Recovers host and nvme into the core. Errors: those of Tier::Recover.
  static absl::StatusOr<std::unique_ptr<Store>> Open(const Options& options, TierSet tiers);
  // Requires: no call is in progress or will come. Waits for the transfers in flight; replies not
  // given by then (Drain first) never are.
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // Runs `event(core, now_ms, effects)` under the lock and returns what it returns; then, without
  // the lock, starts the transfers and runs the replies it caused. `event` must not block or call
  // back.
  template <typename Event>
  auto Run(Event&& event) ABSL_LOCKS_EXCLUDED(mutex_) {
    core::Effects effects;
    using Result = std::invoke_result_t<Event, core::StoreCore&, core::TimeMs, core::Effects*>;
    if constexpr (std::is_void_v<Result>) {
      Locked(std::forward<Event>(event), &effects);
      Perform(&effects);
    } else {
      Result result = Locked(std::forward<Event>(event), &effects);
      Perform(&effects);
      return result;
    }
  }

  const TierSet& tiers() const { return tiers_; }
  // Replicas on nvme, and on host, that the core took over from the last process.
  uint64_t recovered_block_count() const { return recovered_block_count_; }
  uint64_t recovered_host_block_count() const { return recovered_host_block_count_; }

  // When the thread that takes completions and ticks last came round (MonotonicMs): every few
  // milliseconds, unless the core, a reply or the start of a transfer does not end.
  core::TimeMs last_beat_ms() const { return last_beat_ms_.load(std::memory_order_relaxed); }

 private:
  struct Completion {
    core::JobId job;
    absl::Status status;
  };

  Store(const Options& options, TierSet tiers);

  template <typename Event>
  auto Locked(Event&& event, core::Effects* effects) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return std::forward<Event>(event)(core_, MonotonicMs(), effects);
  }

  void Perform(core::Effects* effects);
  void RunEvents(const std::stop_token& stop);
  void OnTransferDone(core::JobId job, absl::Status status);

  const TierSet tiers_;
  // Of nvme.
  uint64_t recovered_block_count_ = 0;
  uint64_t recovered_host_block_count_ = 0;
  absl::Mutex mutex_;
  core::StoreCore core_ ABSL_GUARDED_BY(mutex_);
  absl::Mutex completions_mutex_;
  TimedCondition completed_;
  std::vector<Completion> completions_ ABSL_GUARDED_BY(completions_mutex_);
  std::unique_ptr<Movers> movers_;
  std::atomic<core::TimeMs> last_beat_ms_ = 0;
  std::jthread events_;
};

}  // namespace kvtier
