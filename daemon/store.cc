// SPDX-License-Identifier: Apache-2.0
#include "daemon/store.h"

#include <pthread.h>

#include "absl/time/time.h"
#include "policy/policy.h"
#include "proto/base/status_util.h"

namespace kvtier {
namespace {

// Deadlines are kept to this; the core asks for 10 ms or less.
constexpr core::TimeMs kTickIntervalMs = 5;

}  // namespace

absl::StatusOr<std::unique_ptr<Store>> Store::Open(const Options& options, TierSet tiers) {
  std::unique_ptr<Store> store(new Store(options, tiers));
  // First what is nearest: of two replicas that differ, that of host stays.
  std::vector<ReplicaId> refused_in_host;
  KVT_RETURN_IF_ERROR(tiers.host->Recover([&](const BlockMeta& meta, ReplicaId replica) {
    absl::MutexLock lock(&store->mutex_);
    if (store->core_.AdoptHost(meta, replica)) {
      ++store->recovered_host_block_count_;
    } else {
      refused_in_host.push_back(replica);
    }
  }));
  for (const ReplicaId replica : refused_in_host) tiers.host->Free(replica);
  if (tiers.nvme != nullptr) {
    std::vector<ReplicaId> refused;
    absl::Status recovered = tiers.nvme->Recover([&](const BlockMeta& meta, ReplicaId replica) {
      absl::MutexLock lock(&store->mutex_);
      if (store->core_.Adopt(meta, replica)) {
        ++store->recovered_block_count_;
      } else {
        refused.push_back(replica);
      }
    });
    if (!recovered.ok()) return recovered;
    for (const ReplicaId replica : refused) tiers.nvme->Free(replica);
  }
  store->last_beat_ms_ = MonotonicMs();
  store->events_ = std::jthread([raw = store.get()](const std::stop_token& stop) {
    pthread_setname_np(pthread_self(), "kvtier-events");
    raw->RunEvents(stop);
  });
  return store;
}

Store::Store(const Options& options, TierSet tiers)
    : tiers_(tiers),
      core_(options.core, tiers.hbm, tiers.host, tiers.nvme,
            policy::NewEvictionPolicy(options.eviction)),
      movers_(std::make_unique<Movers>(
          tiers,
          Movers::Options{.worker_count = options.copy_worker_count,
                          .demote_bytes_per_second = options.demote_bytes_per_second},
          [this](core::JobId job, absl::Status status) {
            OnTransferDone(job, std::move(status));
          })) {}

Store::~Store() {
  // No new transfers: the thread that would start them ends first.
  events_ = std::jthread();
  movers_.reset();
}

void Store::Perform(core::Effects* effects) {
  for (const core::Transfer& transfer : effects->transfers) movers_->Start(transfer);
  for (const ReplicaId replica : effects->expedited) movers_->Expedite(replica);
  for (std::function<void()>& reply : effects->replies) reply();
}

void Store::OnTransferDone(core::JobId job, absl::Status status) {
  absl::MutexLock lock(&completions_mutex_);
  completions_.push_back({job, std::move(status)});
  completed_.NotifyAll();
}

void Store::RunEvents(const std::stop_token& stop) {
  core::TimeMs last_tick_ms = 0;
  while (!stop.stop_requested()) {
    std::vector<Completion> completions;
    {
      absl::MutexLock lock(&completions_mutex_);
      completed_.WaitFor(completions_mutex_, absl::Milliseconds(kTickIntervalMs),
                         [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(completions_mutex_) {
                           return !completions_.empty();
                         });
      completions.swap(completions_);
    }
    Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
      for (const Completion& completion : completions) {
        core.OnTransferDone(completion.job, completion.status, now_ms, effects);
      }
      if (completions.empty() || now_ms - last_tick_ms >= kTickIntervalMs) {
        core.Tick(now_ms, effects);
        last_tick_ms = now_ms;
      }
    });
    last_beat_ms_.store(MonotonicMs(), std::memory_order_relaxed);
  }
}

}  // namespace kvtier
