// SPDX-License-Identifier: Apache-2.0
//
// The I/O thread of NvmeTier: making segments ready, emptying them, leaving the degraded state.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "proto/base/check.h"
#include "proto/base/crc32c.h"
#include "proto/base/status_util.h"
#include "tiers/nvme/nvme_impl.h"

namespace kvtier {

using nvme::IoKind;
using nvme::IoOp;
using nvme::kPageBytes;
using nvme::PageMemory;

namespace {

constexpr uint64_t kZeroChunkBytes = 1 << 20;
// Buffers of moves in flight; one move may be larger.
constexpr int kMoveCountMax = 64;
constexpr uint64_t kMoveBytesMax = 16 << 20;
// Others write to the file system, too.
constexpr std::chrono::milliseconds kRoomInterval(100);

}  // namespace

struct NvmeTier::Impl::ActivationJob {
  Stream stream = Stream::kWrite;
  nvme::SegmentTable::Activation activation;
  int fd = -1;
  uint64_t zeroed_bytes = 0;
  PageMemory page{kPageBytes};
};

void NvmeTier::Impl::StartActivation(Stream stream,
                                     const nvme::SegmentTable::Activation& activation) {
  auto job = std::make_unique<ActivationJob>();
  job->stream = stream;
  job->activation = activation;
  {
    // It may be one of them.
    absl::MutexLock lock(&mutex_);
    ForgetVanished();
  }
  const auto fd = dir_->SegmentFd(activation.header.segment_idx);
  if (!fd.ok()) {
    FailActivation(*job, fd.status());
    return;
  }
  job->fd = *fd;
  std::erase(headless_, activation.header.segment_idx);
  {
    absl::MutexLock lock(&mutex_);
    if (activation.is_reopened) {
      segments_->EndActivation(stream, /*is_ready=*/true, /*exists=*/true);
      return;
    }
  }
  if (!activation.needs_prepare) {
    WriteSegmentHeader(std::move(job));
    return;
  }
  auto op = std::make_unique<IoOp>();
  op->kind = IoKind::kAllocate;
  op->fd = job->fd;
  op->total_bytes = segment_bytes_;
  op->done = [this, job = std::move(job)](int64_t result) mutable {
    // A file system without fallocate finds out about its room while zeros are written.
    if (result < 0 && result != -EOPNOTSUPP) {
      FailActivation(*job, ErrnoStatus(static_cast<int>(-result), "allocate a segment"));
    } else {
      ZeroNext(std::move(job));
    }
  };
  Submit(std::move(op));
}

// Writing over allocated blocks once makes every later write a plain one, without journal work.
void NvmeTier::Impl::ZeroNext(std::unique_ptr<ActivationJob> job) {
  if (!zeros_) {
    zeros_.emplace(kZeroChunkBytes);
    std::memset(zeros_->data(), 0, kZeroChunkBytes);
  }
  auto op = std::make_unique<IoOp>();
  op->kind = IoKind::kWrite;
  op->fd = job->fd;
  op->offset_bytes = job->zeroed_bytes;
  op->AddBuffer(zeros_->data(), std::min(kZeroChunkBytes, segment_bytes_ - job->zeroed_bytes));
  op->done = [this, job = std::move(job)](int64_t result) mutable {
    if (result < 0) {
      FailActivation(*job, ErrnoStatus(static_cast<int>(-result), "write over a segment"));
      return;
    }
    job->zeroed_bytes += static_cast<uint64_t>(result);
    if (job->zeroed_bytes < segment_bytes_) {
      ZeroNext(std::move(job));
    } else {
      WriteSegmentHeader(std::move(job));
    }
  };
  Submit(std::move(op));
}

// Records follow without waiting for the header: their sync waits for it, and makes it durable with
// them.
void NvmeTier::Impl::WriteSegmentHeader(std::unique_ptr<ActivationJob> job) {
  const uint32_t segment_idx = job->activation.header.segment_idx;
  const Stream stream = job->stream;
  nvme::EncodeSegmentHeader(job->activation.header, job->page.first_page());
  auto op = std::make_unique<IoOp>();
  op->kind = IoKind::kWrite;
  op->fd = job->fd;
  op->AddBuffer(job->page.data(), kPageBytes);
  op->done = [this, job = std::move(job), segment_idx](int64_t result) {
    EndSegmentHeader(segment_idx, result);
  };
  opening_.push_back(segment_idx);
  Submit(std::move(op));
  absl::MutexLock lock(&mutex_);
  // Two headers of one segment must not be under way.
  segments_->Pin(segment_idx);
  segments_->EndActivation(stream, /*is_ready=*/true, /*exists=*/true);
}

void NvmeTier::Impl::EndSegmentHeader(uint32_t segment_idx, int64_t result) {
  std::erase(opening_, segment_idx);
  {
    absl::MutexLock lock(&mutex_);
    if (result < 0) segments_->SealIfHead(segment_idx);
    segments_->Unpin(segment_idx);
  }
  if (result >= 0) return;
  // What is still on its way into the segment fails when it ends.
  headless_.push_back(segment_idx);
  const auto lost = std::stable_partition(
      written_.begin(), written_.end(),
      [segment_idx](const Commit& commit) { return commit.at.segment_idx != segment_idx; });
  std::vector<Commit> group(std::make_move_iterator(lost), std::make_move_iterator(written_.end()));
  written_.erase(lost, written_.end());
  FailGroup(std::move(group),
            Unavailable("nvme: write the header of %s: %s", dir_->SegmentPath(segment_idx),
                        std::strerror(static_cast<int>(-result))));
}

void NvmeTier::Impl::FailActivation(const ActivationJob& job, const absl::Status& status) {
  Degrade(status);
  const uint32_t segment_idx = job.activation.header.segment_idx;
  bool exists = true;
  if (job.activation.needs_prepare) {
    // Nothing lives in it: its space goes back to whoever needs it more.
    has_grow_failed_ = true;
    exists = !dir_->RemoveSegment(segment_idx).ok();
  }
  absl::MutexLock lock(&mutex_);
  segments_->EndActivation(job.stream, /*is_ready=*/false, exists);
}

void NvmeTier::Impl::StartMoves() {
  std::vector<std::pair<std::unique_ptr<Move>, Location>> starting;
  {
    absl::MutexLock lock(&mutex_);
    if (is_closing_ || health_.degraded) return;
    if (!segments_->victim()) {
      move_queue_.clear();
      if (!segments_->wants_reclaim() && !is_write_waiting_) return;
      if (!segments_->PickVictim(is_write_waiting_)) return;
    }
    const uint32_t victim_idx = *segments_->victim();
    if (move_queue_.empty() && move_count_ == 0) RefillMoves(victim_idx);
    while (!move_queue_.empty() && move_count_ < kMoveCountMax &&
           background_count_ + static_cast<int>(starting.size()) < BackgroundDepth() &&
           (move_count_ == 0 || move_bytes_ < kMoveBytesMax)) {
      const ReplicaId replica_id = move_queue_.front();
      move_queue_.pop_front();
      Replica* const replica = replicas_.Find(replica_id);
      if (replica == nullptr || replica->state != ReplicaState::kLive || replica->is_freed ||
          replica->is_moving || replica->segment_idx != victim_idx) {
        continue;
      }
      replica->is_moving = true;
      ++move_count_;
      segments_->Pin(victim_idx);
      const uint64_t record_bytes = nvme::RecordBytes(replica->payload_bytes);
      move_bytes_ += record_bytes;
      auto move = std::make_unique<Move>(replica_id, record_bytes);
      move->meta.namespace_hash = replicas_.NamespaceOf(*replica);
      move->meta.key = replica->key;
      starting.emplace_back(std::move(move), replica->at());
    }
  }
  for (auto& [move, at] : starting) StartMoveRead(std::move(move), at);
}

void NvmeTier::Impl::RefillMoves(uint32_t victim_idx) {
  for (const ReplicaId replica_id : replicas_.MembersOf(victim_idx)) {
    if (!replicas_.At(replica_id).is_freed) move_queue_.push_back(replica_id);
  }
  // Nothing left to move: reads or removals still pin it, and end by themselves.
  if (!move_queue_.empty()) return;
  segments_->ReleaseVictim(/*is_bad=*/false);
  wants_another_round_ = true;
}

void NvmeTier::Impl::StartMoveRead(std::unique_ptr<Move> move, const Location& at) {
  auto op = std::make_unique<IoOp>();
  op->kind = IoKind::kRead;
  op->fd = dir_->OpenedFd(at.segment_idx);
  op->offset_bytes = at.offset_bytes;
  op->AddBuffer(move->record.data(), move->record.bytes().size());
  ++transfer_count_;
  ++background_count_;
  op->done = [this, move = std::move(move), at](int64_t result) mutable {
    EndMoveRead(std::move(move), at, result);
  };
  Submit(std::move(op));
}

void NvmeTier::Impl::EndMoveRead(std::unique_ptr<Move> move, const Location& at, int64_t result) {
  --transfer_count_;
  --background_count_;
  if (result < 0) {
    Degrade(Unavailable("nvme: read %s: %s", dir_->SegmentPath(at.segment_idx),
                        std::strerror(static_cast<int>(-result))));
    absl::MutexLock lock(&mutex_);
    segments_->Unpin(at.segment_idx);
    EndMove(move->replica_id);
    move_bytes_ -= move->record.bytes().size();
    // An error may pass: nothing is deleted, but this segment is left alone.
    StopMoves(segments_->victim() == at.segment_idx);
    return;
  }
  const auto header = nvme::ParseRecordHeader(move->record.first_page());
  const bool is_good =
      static_cast<uint64_t>(result) == move->record.bytes().size() && header.ok() &&
      header->generation == at.generation && header->meta.key == move->meta.key &&
      header->meta.namespace_hash == move->meta.namespace_hash &&
      nvme::RecordBytes(header->meta.payload_bytes) == move->record.bytes().size() &&
      Crc32c(move->record.bytes().subspan(kPageBytes, header->meta.payload_bytes)) ==
          header->meta.crc32c;
  absl::MutexLock lock(&mutex_);
  segments_->Unpin(at.segment_idx);
  if (is_good) {
    move->meta = header->meta;
    moves_ready_.push_back(std::move(move));
    return;
  }
  EndMove(move->replica_id);
  move_bytes_ -= move->record.bytes().size();
  LoseReplica(move->replica_id);
}

// The record is damaged: its entry goes, the room stays reserved until the owner frees it.
void NvmeTier::Impl::LoseReplica(ReplicaId replica_id) {
  const Replica* const replica = replicas_.Find(replica_id);
  if (replica == nullptr || replica->is_freed) return;
  replicas_.Lose(replica_id);
  segments_->Pin(replica->segment_idx);
  segments_->Drop(replica->at(), nvme::RecordBytes(replica->payload_bytes));
  removals_.push_back({.removal = RemovalOf(*replica), .segment_idx = replica->segment_idx});
}

nvme::IndexRemoval NvmeTier::Impl::RemovalOf(const Replica& replica) const {
  return {.namespace_hash = replicas_.NamespaceOf(replica),
          .key = replica.key,
          .generation = replica.generation};
}

void NvmeTier::Impl::StartMoveWrites() {
  while (!moves_ready_.empty() && background_count_ < BackgroundDepth()) {
    const uint64_t record_bytes = moves_ready_.front()->record.bytes().size();
    std::optional<Location> at;
    std::optional<nvme::SegmentTable::Activation> activation;
    {
      absl::MutexLock lock(&mutex_);
      const Replica* const replica = replicas_.Find(moves_ready_.front()->replica_id);
      const bool is_wanted = replica != nullptr && !replica->is_freed;
      if (!is_wanted || health_.degraded || is_closing_) {
        EndMove(moves_ready_.front()->replica_id);
        move_bytes_ -= record_bytes;
        moves_ready_.pop_front();
        continue;
      }
      if (segments_->IsActivating(Stream::kMove)) return;
      at = segments_->Place(Stream::kMove, record_bytes);
      if (!at) activation = segments_->BeginActivation(Stream::kMove, record_bytes, random_());
      if (!at && !activation) {
        StopMoves(segments_->victim().has_value());
        return;
      }
    }
    if (activation) {
      StartActivation(Stream::kMove, *activation);
      continue;
    }
    std::unique_ptr<Move> move = std::move(moves_ready_.front());
    moves_ready_.pop_front();
    StartMoveWrite(std::move(move), *at);
  }
}

void NvmeTier::Impl::StartMoveWrite(std::unique_ptr<Move> move, const Location& at) {
  nvme::EncodeRecordHeader({.meta = move->meta, .generation = at.generation, .nonce = at.nonce},
                           move->record.first_page());
  auto op = std::make_unique<IoOp>();
  op->kind = IoKind::kWrite;
  op->fd = dir_->OpenedFd(at.segment_idx);
  op->offset_bytes = at.offset_bytes;
  op->AddBuffer(move->record.data(), move->record.bytes().size());
  ++transfer_count_;
  ++background_count_;
  op->done = [this, move = std::move(move), at](int64_t engine_result) {
    --transfer_count_;
    --background_count_;
    const int64_t result = ResultInSegment(at.segment_idx, engine_result);
    move_bytes_ -= move->record.bytes().size();
    if (result >= 0) {
      written_.push_back({.replica_id = move->replica_id,
                          .meta = move->meta,
                          .at = at,
                          .is_move = true,
                          .done = {}});
      return;
    }
    Degrade(Unavailable("nvme: write %s: %s", dir_->SegmentPath(at.segment_idx),
                        std::strerror(static_cast<int>(-result))));
    absl::MutexLock lock(&mutex_);
    segments_->Abandon(at, move->record.bytes().size());
    segments_->SealIfHead(at.segment_idx);
    EndMove(move->replica_id);
  };
  Submit(std::move(op));
}

void NvmeTier::Impl::EndMove(ReplicaId replica_id) {
  KVT_CHECK(move_count_ > 0);
  --move_count_;
  if (Replica* const replica = replicas_.Find(replica_id); replica != nullptr) {
    replica->is_moving = false;
  }
}

void NvmeTier::Impl::StopMoves(bool victim_is_bad) {
  for (const auto& move : moves_ready_) {
    EndMove(move->replica_id);
    move_bytes_ -= move->record.bytes().size();
  }
  moves_ready_.clear();
  move_queue_.clear();
  wants_another_round_ = true;
  if (victim_is_bad) segments_->ReleaseVictim(/*is_bad=*/true);
}

void NvmeTier::Impl::ForgetVanished() {
  for (const uint32_t segment_idx : segments_->TakeVanished()) dir_->ForgetSegment(segment_idx);
}

void NvmeTier::Impl::LookAround() {
  const Clock::time_point now = Clock::now();
  if (now >= next_room_) {
    next_room_ = now + kRoomInterval;
    RefreshRoom(/*may_lower=*/false);
  }
  if (now >= next_look_) {
    next_look_ = now + std::chrono::milliseconds(options_.heal_interval_ms);
    absl::MutexLock lock(&mutex_);
    is_look_wanted_ = true;
  }
}

// Segments are made as long as one more would fit: of a file system that is smaller than the
// capacity, or that others fill, the tier uses what there is. The capacity shrinks only when a
// segment that is wanted does not fit: room that somebody takes for a while costs no block.
void NvmeTier::Impl::RefreshRoom(bool may_lower) {
  const auto free_bytes = dir_->FreeBytes();
  if (!free_bytes.ok()) return;
  uint64_t capacity_bytes = 0;
  uint32_t limit = 0;
  {
    absl::MutexLock lock(&mutex_);
    // Before, it is not known how many files there are.
    if (!is_recovered_) return;
    const uint64_t attainable_bytes = *free_bytes + segments_->file_count() * segment_bytes_;
    const uint64_t index_bytes = IndexBytes(std::min(options_.capacity_bytes, attainable_bytes));
    segments_->LimitFiles((*free_bytes - std::min(*free_bytes, index_bytes)) / segment_bytes_,
                          may_lower);
    limit = segments_->file_limit();
    capacity_bytes = segments_->capacity_bytes();
    if (limit >= segment_count_ || std::exchange(has_said_limit_, true)) return;
  }
  spdlog::warn(
      "nvme: {}: the file system has room for {} of the {} segments that the capacity allows: "
      "{} bytes of blocks",
      options_.dir, limit, segment_count_, capacity_bytes);
}

void NvmeTier::Impl::MaybeHeal() {
  {
    absl::MutexLock lock(&mutex_);
    if (!health_.degraded || is_closing_) return;
    if (is_healing_) {
      if (!index_probe_result_) return;
    } else if (Clock::now() < next_heal_) {
      return;
    }
  }
  if (!is_healing_) {
    is_healing_ = true;
    HealProbe();
    return;
  }
  absl::Status result;
  {
    absl::MutexLock lock(&mutex_);
    result = *index_probe_result_;
    index_probe_result_.reset();
  }
  EndHeal(result);
}

void NvmeTier::Impl::HealProbe() {
  if (!probe_page_) {
    probe_page_.emplace(kPageBytes);
    std::memset(probe_page_->data(), 0, kPageBytes);
  }
  auto op = std::make_unique<IoOp>();
  op->kind = IoKind::kWrite;
  op->fd = dir_->probe_fd();
  op->AddBuffer(probe_page_->data(), kPageBytes);
  op->done = [this](int64_t written) {
    if (written < 0) {
      EndHeal(ErrnoStatus(static_cast<int>(-written), "write the probe"));
      return;
    }
    auto sync = std::make_unique<IoOp>();
    sync->kind = IoKind::kSync;
    sync->fd = dir_->probe_fd();
    sync->done = [this](int64_t synced) {
      if (synced < 0) {
        EndHeal(ErrnoStatus(static_cast<int>(-synced), "sync the probe"));
      } else if (has_grow_failed_) {
        HealGrow();
      } else {
        HealIndex();
      }
    };
    Submit(std::move(sync));
  };
  Submit(std::move(op));
}

void NvmeTier::Impl::HealGrow() {
  const auto fd = dir_->OpenGrowProbe();
  if (!fd.ok()) {
    EndHeal(fd.status());
    return;
  }
  auto op = std::make_unique<IoOp>();
  op->kind = IoKind::kAllocate;
  op->fd = *fd;
  op->total_bytes = segment_bytes_;
  op->done = [this, fd = *fd](int64_t result) {
    dir_->RemoveGrowProbe(fd);
    if (result < 0 && result != -EOPNOTSUPP) {
      EndHeal(ErrnoStatus(static_cast<int>(-result), "allocate room for a segment"));
      return;
    }
    has_grow_failed_ = false;
    HealIndex();
  };
  Submit(std::move(op));
}

void NvmeTier::Impl::HealIndex() {
  bool is_index_failed;
  {
    absl::MutexLock lock(&mutex_);
    is_index_failed = is_index_failed_;
    // The index thread answers with index_probe_result_ and wakes this one.
    is_index_probe_wanted_ = is_index_failed;
  }
  if (!is_index_failed) EndHeal(absl::OkStatus());
}

void NvmeTier::Impl::EndHeal(const absl::Status& status) {
  is_healing_ = false;
  next_heal_ = Clock::now() + std::chrono::milliseconds(options_.heal_interval_ms);
  if (!status.ok()) return;
  RefreshRoom(/*may_lower=*/false);
  {
    absl::MutexLock lock(&mutex_);
    // It failed while the rest was probed.
    if (is_index_failed_) return;
    health_ = {};
  }
  wants_another_round_ = true;
  spdlog::info("nvme: healthy again: {}", options_.dir);
}

}  // namespace kvtier
