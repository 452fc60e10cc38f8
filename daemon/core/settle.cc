// SPDX-License-Identifier: Apache-2.0
//
// Completions: what a finished or failed transfer changes.
#include "daemon/core/core_impl.h"
#include "proto/base/check.h"
#include "proto/base/status_util.h"

namespace kvtier::core {

void StoreCore::Impl::OnTransferDone(JobId id, const absl::Status& reported, TimeMs now_ms,
                                     Effects* effects) {
  const auto node = jobs_.extract(id);
  KVT_CHECK(!node.empty());
  const Job& job = node.mapped();
  // It may have arrived before its tier was lost.
  const absl::Status status = lost_tier_[job.target] ? Unavailable("the tier is lost") : reported;
  Entry& entry = At(job.entry);
  KVT_CHECK(entry.in_transfer);
  entry.in_transfer = false;
  if (job.purpose == Purpose::kDemote || job.purpose == Purpose::kPause) {
    leaving_bytes_[job.source] -= job.footprint;
    AccountAt(AccountOf(entry)).leaving_bytes[job.source] -= job.footprint;
    SetLeaving(job.entry, kNowhere);
  }
  CountTransfer(job, status, now_ms);
  const bool was_in_hbm = entry.replica[kHbm] != kNoReplica;
  if (job.target == kNvme) {
    FinishNvmeWrite(job, status);
  } else if (job.source == kNvme) {
    FinishNvmeRead(job, status, effects);
  } else {
    FinishMemoryMove(job, status);
  }
  Refresh(job.entry);
  SettleJob(job, was_in_hbm && entry.replica[kHbm] == kNoReplica);
  Claim(job.entry);
  DropIfDoomed(job.entry);
  EraseIfUnused(job.entry);
  Pump(now_ms, effects);
}

void StoreCore::Impl::FinishMemoryMove(const Job& job, const absl::Status& status) {
  Entry& entry = At(job.entry);
  // A reader took a lease meanwhile, or the context came back: the block stays where it is.
  const bool wanted_here =
      entry.lease_count > 0 || (job.purpose == Purpose::kPause && entry.active_count > 0);
  if (status.ok() && !wanted_here && !entry.doomed) {
    SetReplica(job.entry, job.target, job.target_replica);
    FreeReplica(job.entry, job.source);
    return;
  }
  GiveBack(job.target, job.target_replica, AccountOf(entry), BlockBytes(entry));
  if (status.code() == absl::StatusCode::kDataLoss) OnBadSource(job.entry, job.source);
}

void StoreCore::Impl::OnBadSource(EntryIdx idx, size_t tier) {
  ++counters_.tiers[tier].corrupt_block_count;
  if (Residency(At(idx)) == 1U << tier) At(idx).leaves_for = policy::MissReason::kCorrupt;
  if (At(idx).lease_count == 0) {
    FreeReplica(idx, tier);  // an nvme replica, if there is one, has a checksum of its own
  } else {
    At(idx).doomed = true;
  }
}

void StoreCore::Impl::FinishNvmeWrite(const Job& job, const absl::Status& status) {
  Entry& entry = At(job.entry);
  if (status.ok() && !entry.doomed) {
    SetReplica(job.entry, kNvme, job.target_replica);
    Refresh(job.entry);
  } else {
    GiveBack(kNvme, job.target_replica, AccountOf(entry), BlockBytes(entry));
    if (status.code() == absl::StatusCode::kDataLoss) {
      OnBadSource(job.entry, job.source);
      return;
    }
  }
  // Its room was wanted: it goes whether nvme took it or not, unless it is in use again. A pause
  // alone is no reason to lose a block.
  const bool leaves = job.purpose == Purpose::kPause
                          ? entry.replica[kNvme] != kNoReplica && !entry.doomed &&
                                entry.lease_count == 0 && entry.active_count == 0
                          : job.purpose == Purpose::kDemote && IsCandidate(entry, job.source);
  if (leaves) {
    FreeReplica(job.entry, job.source);
    if (FastestTier(entry) == kNowhere) ++counters_.tiers[job.source].evicted_block_count;
  }
}

void StoreCore::Impl::FinishNvmeRead(const Job& job, const absl::Status& status, Effects* effects) {
  Entry& entry = At(job.entry);
  BlockStatus failure = BlockStatus::kMiss;
  if (status.ok() && !entry.doomed) {
    SetReplica(job.entry, job.target, job.target_replica);
    if (job.purpose != Purpose::kDemandRead && !entry.has_readers) {
      entry.prefetched = true;
      SetLastUse(&entry, ++use_seq_);  // else it would be the next to leave
      ++counters_.regret.prefetched_block_count;
    }
  } else {
    GiveBack(job.target, job.target_replica, AccountOf(entry), BlockBytes(entry));
    if (status.code() == absl::StatusCode::kDataLoss) {
      ++counters_.tiers[kNvme].corrupt_block_count;
      entry.leaves_for = policy::MissReason::kCorrupt;
      FreeReplica(job.entry, kNvme);
      failure = BlockStatus::kCorrupt;
    } else if (!status.ok()) {
      failure = BlockStatus::kUnavailable;
    }
  }
  WakeReaders(job.entry, failure, effects);
}

void StoreCore::Impl::CountTransfer(const Job& job, const absl::Status& status, TimeMs now_ms) {
  LinkState& link = links_[job.source][job.target];
  KVT_CHECK(link.counters.inflight_count > 0);
  --link.counters.inflight_count;
  if (status.ok()) {
    ++link.counters.moved_block_count;
    link.counters.moved_bytes += BlockBytes(At(job.entry));
    link.measured_bytes += BlockBytes(At(job.entry));
  } else {
    ++link.counters.failed_block_count;
  }
  if (link.counters.inflight_count == 0) link.busy_ms += now_ms - link.busy_since_ms;
}

void StoreCore::Impl::SettleJob(const Job& job, bool left_hbm) {
  if (const auto pause = pauses_.find(job.pause); pause != pauses_.end()) {
    --pause->second.inflight;
    if (left_hbm) pause->second.freed_bytes += BlockBytes(At(job.entry));
  }
  if (const auto ticket = tickets_.find(job.ticket); ticket != tickets_.end()) {
    --ticket->second.inflight;
    if (At(job.entry).replica[job.target] != kNoReplica) ++ticket->second.moved_count;
    tickets_moved_ = true;
    CloseTicketIfDone(&ticket->second);
  }
  if (const auto flush = flushes_.find(job.flush); flush != flushes_.end()) {
    --flush->second.inflight;
    if (At(job.entry).replica[kNvme] != kNoReplica) ++flush->second.written_count;
  }
}

}  // namespace kvtier::core
