// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "daemon/core/store_core.h"
#include "daemon/monotonic.h"
#include "proto/base/timed_wait.h"
#include "tiers/tier.h"
#include "tiers/token_bucket.h"

namespace kvtier {

// The tiers of a daemon. Not owned. `nvme` may be null.
struct TierSet {
  MappedTier* hbm = nullptr;
  MappedTier* host = nullptr;
  Tier* nvme = nullptr;

  // Null only for an absent nvme.
  Tier* At(TierId tier) const;
  // Requires: a memory tier.
  MappedTier* Memory(TierId tier) const;
};

// Runs the transfers that the store core asks for. A copy between mapped memory tiers is done by a
// pool of workers, which take what goes to hbm before what leaves it; nvme and the cuda device
// queue their own. Between those two, bytes go through a buffer of one block. The core bounds the
// transfers in flight, and so the queue and the buffers. Thread-safe.
class Movers {
 public:
  // Called exactly once per transfer, from any thread, possibly inside Start. Must not block.
  using Completion = std::function<void(core::JobId, absl::Status)>;

  struct Options {
    uint32_t worker_count = 2;
    // Limits what is copied from hbm on the cpu device to host, so that it leaves memory bandwidth
    // to those who compute; 0: nothing does. Not kept at the end.
    uint64_t demote_bytes_per_second = 0;
    std::function<uint64_t()> now_ms = MonotonicMs;
  };

  Movers(TierSet tiers, const Options& options, Completion on_done);
  // Waits for the transfers in flight.
  ~Movers();
  Movers(const Movers&) = delete;
  Movers& operator=(const Movers&) = delete;

  // Does not block. Both replicas stay put until the completion.
  void Start(const core::Transfer& transfer);
  // See core::Effects::expedited. Does not block.
  void Expedite(ReplicaId nvme_replica) { tiers_.nvme->Expedite(nvme_replica); }

 private:
  void StartCopy(const core::Transfer& transfer);
  void StartNvmeRead(const core::Transfer& transfer);
  void ReadNvme(const core::Transfer& transfer, std::span<std::byte> target, Tier::Done done);
  void StartNvmeWrite(const core::Transfer& transfer);
  void Work();
  // The next copy that may start now. Requires: there is a copy.
  std::optional<core::Transfer> TakeCopy() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Between mapped memory tiers, in the calling thread.
  void Copy(const core::Transfer& transfer);
  Tier::Done FinishOf(core::JobId job);
  // The last step of every transfer.
  void Finish(core::JobId job, absl::Status status);

  const TierSet tiers_;
  const Options options_;
  const Completion on_done_;
  absl::Mutex mutex_;
  // A promotion waits, or the end.
  TimedCondition urgent_;
  std::deque<core::Transfer> promotes_ ABSL_GUARDED_BY(mutex_);
  std::deque<core::Transfer> demotes_ ABSL_GUARDED_BY(mutex_);
  TokenBucket demote_bucket_ ABSL_GUARDED_BY(mutex_);
  // Started and not finished, the queues included.
  uint64_t inflight_count_ ABSL_GUARDED_BY(mutex_) = 0;
  // The last transfers are under way; then nothing is.
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::jthread> workers_;
};

}  // namespace kvtier
