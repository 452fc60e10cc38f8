// SPDX-License-Identifier: Apache-2.0
//
// The index thread of NvmeTier: everything that waits for RocksDB. It alone changes where a live
// replica lies, so that puts and removals of one block never cross.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "proto/base/check.h"
#include "proto/base/status_util.h"
#include "tiers/nvme/nvme_impl.h"

namespace kvtier {

namespace {

constexpr std::chrono::seconds kRefreshInterval(1);
// Names of segments that are looked up at once.
constexpr int kLooksAtOnce = 256;

}  // namespace

struct NvmeTier::Impl::CommitBatch {
  std::vector<Commit> commits;
  std::vector<Removal> removals;
  std::vector<Finished> finished;
};

bool NvmeTier::Impl::IndexHasWork() const {
  if (!commits_.empty() || is_index_probe_wanted_ || is_look_wanted_ || is_io_done_) return true;
  return !is_index_failed_ && (!frees_.empty() || !removals_.empty());
}

void NvmeTier::Impl::IndexMain() {
  while (true) {
    CommitBatch batch;
    bool is_probing;
    bool is_empty;
    bool is_looking;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &Impl::IndexHasWork));
      is_looking = std::exchange(is_look_wanted_, false);
      is_probing = std::exchange(is_index_probe_wanted_, false);
      if (!is_probing) batch = TakeBatch();
      is_empty =
          !is_probing && batch.commits.empty() && batch.removals.empty() && batch.finished.empty();
      if (is_empty && is_io_done_) return;
    }
    if (is_looking) LookForMissingSegments();
    if (is_empty) continue;
    if (is_probing) {
      ProbeIndex();
    } else {
      const absl::Status status = ApplyBatch(batch);
      {
        absl::MutexLock lock(&mutex_);
        if (status.ok()) {
          EndBatch(batch);
        } else {
          FailBatch(batch, status);
        }
      }
      if (!status.ok()) Degrade(status);
    }
    for (Finished& finished : batch.finished) Finish(std::move(finished));
    KeepSpent(/*is_due_only=*/true);
    RefreshPhysicalBytes();
    engine_->Wake();
  }
}

NvmeTier::Impl::CommitBatch NvmeTier::Impl::TakeBatch() {
  CommitBatch batch;
  for (Commit& commit : std::exchange(commits_, {})) {
    const uint64_t record_bytes = nvme::RecordBytes(commit.meta.payload_bytes);
    if (commit.is_move) {
      const Replica* const replica = replicas_.Find(commit.replica_id);
      if (replica == nullptr || replica->is_freed) {
        // Freed on the way: the copy never was, unless a failed put left its entry behind.
        if (commit.was_attempted) {
          segments_->Pin(commit.at.segment_idx);
          removals_.push_back({.removal = {.namespace_hash = commit.meta.namespace_hash,
                                           .key = commit.meta.key,
                                           .generation = commit.at.generation},
                               .segment_idx = commit.at.segment_idx});
        }
        segments_->Abandon(commit.at, record_bytes);
        EndMove(commit.replica_id);
        continue;
      }
      if (is_index_failed_) {
        stalled_moves_.push_back(std::move(commit));
        continue;
      }
    } else if (is_index_failed_) {
      segments_->Abandon(commit.at, record_bytes);
      replicas_.At(commit.replica_id).state = ReplicaState::kReserved;
      batch.finished.push_back({.done = std::move(commit.done),
                                .status = Unavailable("nvme: degraded: %s", health_.reason),
                                .is_write = true});
      continue;
    }
    batch.commits.push_back(std::move(commit));
  }
  if (is_index_failed_) return batch;
  batch.removals = std::exchange(removals_, {});
  for (const ReplicaId replica_id : std::exchange(frees_, {})) {
    const Replica& replica = replicas_.At(replica_id);
    batch.removals.push_back({.removal = RemovalOf(replica),
                              .segment_idx = replica.segment_idx,
                              .replica_id = replica_id});
  }
  return batch;
}

absl::Status NvmeTier::Impl::ApplyBatch(const CommitBatch& batch) {
  if (batch.commits.empty() && batch.removals.empty()) return absl::OkStatus();
  std::vector<nvme::IndexEntry> puts;
  std::vector<nvme::IndexRemoval> removals;
  puts.reserve(batch.commits.size());
  removals.reserve(batch.removals.size());
  for (const Commit& commit : batch.commits) puts.push_back({commit.meta, commit.at});
  for (const Removal& removal : batch.removals) removals.push_back(removal.removal);
  if (const int error = Fault(NvmeFaultPoint::kIndexBefore); error != 0) {
    return ErrnoStatus(error, "write to the index");
  }
  nvme::WriteBudget::Spent spent;
  {
    absl::MutexLock lock(&mutex_);
    spent = budget_.spent();
  }
  KVT_RETURN_IF_ERROR(index_->Apply(puts, removals, &spent));
  if (const int error = Fault(NvmeFaultPoint::kIndexAfter); error != 0) {
    return ErrnoStatus(error, "write to the index");
  }
  return absl::OkStatus();
}

void NvmeTier::Impl::EndBatch(CommitBatch& batch) {
  for (Commit& commit : batch.commits) {
    EndCommit(commit);
    batch.finished.push_back(
        {.done = std::move(commit.done), .status = absl::OkStatus(), .is_write = true});
  }
  for (const Removal& removal : batch.removals) {
    segments_->Unpin(removal.segment_idx);
    if (removal.replica_id != kNoReplica) replicas_.Remove(removal.replica_id);
  }
}

void NvmeTier::Impl::EndCommit(const Commit& commit) {
  const uint64_t record_bytes = nvme::RecordBytes(commit.meta.payload_bytes);
  const Replica& replica = replicas_.At(commit.replica_id);
  const Location from = replica.at();
  replicas_.Settle(commit.replica_id, commit.at);
  if (commit.is_move) {
    moved_bytes_ += record_bytes;
    EndMove(commit.replica_id);
    if (replica.is_freed) {
      // Freed while the put was under way: Free pinned and dropped the old place, and the removal
      // that is still to come is now about the new one.
      segments_->Pin(commit.at.segment_idx);
      segments_->Abandon(commit.at, record_bytes);
      segments_->Unpin(from.segment_idx);
      return;
    }
    segments_->Drop(from, record_bytes);
  }
  segments_->Commit(commit.at);
}

// Any part of the batch may be in the index. Writes are undone by removals that are retried until
// they are durable; moves and removals are retried as they are.
void NvmeTier::Impl::FailBatch(CommitBatch& batch, const absl::Status& status) {
  is_index_failed_ = true;
  for (Commit& commit : batch.commits) {
    if (commit.is_move) {
      commit.was_attempted = true;
      stalled_moves_.push_back(std::move(commit));
      continue;
    }
    segments_->Pin(commit.at.segment_idx);
    removals_.push_back({.removal = {.namespace_hash = commit.meta.namespace_hash,
                                     .key = commit.meta.key,
                                     .generation = commit.at.generation},
                         .segment_idx = commit.at.segment_idx});
    segments_->Abandon(commit.at, nvme::RecordBytes(commit.meta.payload_bytes));
    replicas_.At(commit.replica_id).state = ReplicaState::kReserved;
    batch.finished.push_back({.done = std::move(commit.done),
                              .status = Unavailable("nvme: %s", status.ToString()),
                              .is_write = true});
  }
  for (Removal& removal : batch.removals) {
    if (removal.replica_id != kNoReplica) {
      frees_.push_back(removal.replica_id);
    } else {
      removals_.push_back(removal);
    }
  }
}

void NvmeTier::Impl::ProbeIndex() {
  const int error = Fault(NvmeFaultPoint::kIndexBefore);
  const absl::Status status =
      error != 0 ? ErrnoStatus(error, "write to the index") : index_->Probe();
  absl::MutexLock lock(&mutex_);
  index_probe_result_ = status;
  is_index_failed_ = !status.ok();
  if (!status.ok()) return;
  for (Commit& move : std::exchange(stalled_moves_, {})) commits_.push_back(std::move(move));
}

void NvmeTier::Impl::RefreshPhysicalBytes() {
  const Clock::time_point now = Clock::now();
  if (now < next_refresh_) return;
  next_refresh_ = now + kRefreshInterval;
  const uint64_t physical_bytes = dir_->PhysicalBytes();
  absl::MutexLock lock(&mutex_);
  physical_bytes_ = physical_bytes;
}

// Somebody may delete files of a running tier. What they held can still be read, but not after the
// next start: it is dropped while its owner can still write it again.
void NvmeTier::Impl::LookForMissingSegments() {
  std::vector<uint32_t> looked_at;
  {
    absl::MutexLock lock(&mutex_);
    if (!is_recovered_ || is_closing_) return;
    const uint32_t count = segments_->segment_count();
    for (uint32_t i = 0; i < std::min<uint32_t>(count, kLooksAtOnce); ++i) {
      next_looked_at_ = (next_looked_at_ + 1) % count;
      if (segments_->HasFile(next_looked_at_)) looked_at.push_back(next_looked_at_);
    }
  }
  std::erase_if(looked_at, [this](uint32_t segment_idx) { return dir_->HasSegment(segment_idx); });
  std::vector<std::pair<NamespaceHash, Key>> lost;
  uint32_t missing_count = 0;
  for (const uint32_t segment_idx : looked_at) {
    absl::MutexLock lock(&mutex_);
    // It may be on its way to be made anew.
    if (!segments_->HasFile(segment_idx)) continue;
    for (auto& block : LoseSegment(segment_idx)) lost.push_back(block);
    if (segments_->LoseFile(segment_idx)) ++missing_count;
  }
  if (missing_count > 0) {
    spdlog::error("nvme: {}: {} segment files were deleted by somebody; {} blocks are dropped",
                  options_.dir, missing_count, lost.size());
  }
  if (!options_.on_lost) return;
  for (const auto& [namespace_hash, key] : lost) options_.on_lost(namespace_hash, key);
}

std::vector<std::pair<NamespaceHash, Key>> NvmeTier::Impl::LoseSegment(uint32_t segment_idx) {
  std::vector<std::pair<NamespaceHash, Key>> lost;
  for (const ReplicaId replica_id : replicas_.MembersOf(segment_idx)) {
    const Replica& replica = replicas_.At(replica_id);
    // One that moves comes to another segment, or is met again.
    if (!IsScrubbable(replica, segment_idx)) continue;
    lost.emplace_back(replicas_.NamespaceOf(replica), replica.key);
    LoseReplica(replica_id);
  }
  return lost;
}

// The index has it too, with every batch: this is for the case that the index is lost.
void NvmeTier::Impl::KeepSpent(bool is_due_only) {
  nvme::WriteBudget::Spent spent;
  {
    absl::MutexLock lock(&mutex_);
    // Before, nothing is known of what earlier processes spent.
    if (!is_recovered_ || health_.degraded || !budget_.has_unkept() ||
        (is_due_only && !budget_.is_keeping_due())) {
      return;
    }
    spent = budget_.spent();
    // Also of an attempt that fails: the next one is made when as much was spent again.
    budget_.NoteKept();
  }
  const absl::Status kept = dir_->KeepSpent(spent);
  if (!kept.ok()) spdlog::warn("nvme: what was written today is not kept: {}", kept.ToString());
}

}  // namespace kvtier
