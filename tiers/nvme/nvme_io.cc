// SPDX-License-Identifier: Apache-2.0
//
// The I/O thread of NvmeTier: transfers of records and group syncs.
#include <pthread.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/container/flat_hash_set.h"
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

// Operations beside record transfers: two activations, one sync, one heal probe.
constexpr int kUpkeepDepth = 8;
// While callers read, writes and moves get this part of the queue: a read that somebody waits for
// must not queue behind a disk full of them. So do reads ahead while somebody waits for a read.
constexpr int kBackgroundPart = 4;
// Of reads ahead in flight: this keeps a disk busy, and a read that somebody waits for is behind no
// more of them in the disk's own queue, which knows no order.
constexpr uint64_t kAheadBytesMax = 8 << 20;

NvmeFaultPoint FaultPointOf(IoKind kind) {
  switch (kind) {
    case IoKind::kRead:
      return NvmeFaultPoint::kRead;
    case IoKind::kWrite:
      return NvmeFaultPoint::kWrite;
    case IoKind::kSync:
      return NvmeFaultPoint::kSync;
    case IoKind::kAllocate:
      return NvmeFaultPoint::kAllocate;
  }
  KVT_CHECK(false);
}

bool IsPageAligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kPageBytes == 0; }

std::span<std::byte, kPageBytes> HeaderPage(std::byte* pages) {
  return std::span<std::byte, kPageBytes>(pages, kPageBytes);
}

}  // namespace

// The buffers of a record transfer: header page, the caller's whole pages, and a page for the rest
// of the payload, so that nothing beyond the caller's bytes is touched. A caller's buffer that is
// not page-aligned is replaced by `bounce` as a whole.
struct NvmeTier::Impl::ReadJob {
  ReadRequest request;
  Location at;
  // The header page and the page for the rest, from pages_ until the transfer ends.
  std::byte* pages = nullptr;
  std::optional<PageMemory> bounce;
};

struct NvmeTier::Impl::WriteJob {
  WriteRequest request;
  Location at;
  std::byte* pages = nullptr;
  std::optional<PageMemory> bounce;
};

absl::StatusOr<std::unique_ptr<nvme::IoEngine>> NvmeTier::Impl::MakeEngine() {
  const nvme::IoEngineOptions engine_options{.queue_depth = options_.queue_depth + kUpkeepDepth,
                                             .attempt_bytes_max = options_.attempt_bytes_max};
  if (options_.io_engine == NvmeIoEngine::kPread) return nvme::MakePreadEngine(engine_options);
  auto uring = nvme::MakeUringEngine(engine_options);
  if (uring.ok() || options_.io_engine == NvmeIoEngine::kIoUring) return uring;
  spdlog::warn("nvme: no io_uring, using a pool of pread threads: {}", uring.status().ToString());
  engine_note_ = ", without io_uring: " + uring.status().ToString();
  return nvme::MakePreadEngine(engine_options);
}

absl::Status NvmeTier::Impl::StartEngine() {
  KVT_ASSIGN_OR_RETURN(auto engine, MakeEngine());
  engine_ = storage().WrapEngine(std::move(engine));
  if (!dir_->is_direct()) engine_note_ += ", without O_DIRECT: the file system has none";
  // Also shows whether memory can be registered at all.
  pages_ = std::make_unique<nvme::PagePool>(options_.queue_depth);
  registered_.push_back(pages_->memory());
  engine_->RegisterMemory(pages_->memory());
  absl::MutexLock lock(&mutex_);
  engine_name_ = engine_->Description() + engine_note_;
  return absl::OkStatus();
}

void NvmeTier::Impl::IoMain() {
  while (TakeQueues()) {
    ServeMemory();
    LookAround();
    StartReads();
    StartWrites();
    StartMoves();
    StartMoveWrites();
    StartSync();
    MaybeHeal();
    // Everything else that needs this thread wakes it.
    int wait_ms = options_.heal_interval_ms;
    if (!injected_.empty() || std::exchange(wants_another_round_, false)) wait_ms = 0;
    std::vector<nvme::IoEngine::Completion> completed = engine_->Wait(wait_ms);
    for (auto& completion : injected_) completed.push_back(std::move(completion));
    injected_.clear();
    op_count_ -= static_cast<int>(completed.size());
    for (auto& completion : completed) std::move(completion.op->done)(completion.result);
  }
  ReleaseAllMemory();
}

// False when the tier closes and nothing is left to do.
bool NvmeTier::Impl::TakeQueues() {
  absl::MutexLock lock(&mutex_);
  for (ReadRequest& request : new_reads_) {
    (request.urgency == Urgency::kDemand ? reads_ : reads_ahead_).push_back(std::move(request));
  }
  new_reads_.clear();
  TakeExpedited();
  ForgetVanished();
  for (WriteRequest& request : new_writes_) writes_.push_back(std::move(request));
  new_writes_.clear();
  if (!is_closing_) return true;
  return op_count_ > 0 || check_count_ > 0 || !reads_.empty() || !reads_ahead_.empty() ||
         !writes_.empty() || !written_.empty() || !sync_group_.empty() || !moves_ready_.empty();
}

void NvmeTier::Impl::TakeExpedited() {
  if (expedited_.empty()) return;
  const absl::flat_hash_set<ReplicaId> expedited(expedited_.begin(), expedited_.end());
  expedited_.clear();
  const auto first = std::stable_partition(
      reads_ahead_.begin(), reads_ahead_.end(),
      [&](const auto& request) { return !expedited.contains(request.replica_id); });
  for (auto request = first; request != reads_ahead_.end(); ++request) {
    request->urgency = Urgency::kDemand;
    reads_.push_back(std::move(*request));
  }
  reads_ahead_.erase(first, reads_ahead_.end());
}

void NvmeTier::Impl::Submit(std::unique_ptr<IoOp> op) {
  ++op_count_;
  if (const int error = Fault(FaultPointOf(op->kind)); error != 0) {
    injected_.push_back({.op = std::move(op), .result = -error});
    return;
  }
  if (op->kind == IoKind::kWrite) CountWritten(op->total_bytes);
  engine_->Submit(std::move(op));
}

int NvmeTier::Impl::BackgroundDepth() const {
  const int read_count = transfer_count_ - background_count_;
  if (reads_.empty() && reads_ahead_.empty() && read_count == 0) return options_.queue_depth;
  return std::min(std::max(1, options_.queue_depth / kBackgroundPart),
                  options_.queue_depth - read_count);
}

int64_t NvmeTier::Impl::ResultInSegment(uint32_t segment_idx, int64_t result) const {
  const bool is_headless =
      std::find(headless_.begin(), headless_.end(), segment_idx) != headless_.end();
  return is_headless && result >= 0 ? -EIO : result;
}

void NvmeTier::Impl::StartReads() {
  // A waiting write, and a waiting read ahead, get at least one place: those that somebody waits
  // for come first, but not alone.
  const int read_depth = std::max(1, options_.queue_depth - (writes_.empty() ? 0 : 1));
  const bool is_ahead_left_out = !reads_ahead_.empty() && ahead_count_ == 0;
  const int demand_depth = std::max(1, read_depth - (is_ahead_left_out ? 1 : 0));
  while (!reads_.empty() && transfer_count_ < demand_depth) StartNextRead(reads_);
  while (!reads_ahead_.empty() && transfer_count_ < read_depth && IsRoomAhead()) {
    StartNextRead(reads_ahead_);
  }
}

bool NvmeTier::Impl::IsRoomAhead() const {
  if (ahead_count_ == 0) return true;
  if (ahead_bytes_ >= kAheadBytesMax) return false;
  const bool does_nobody_wait = reads_.empty() && demand_count() == 0;
  return does_nobody_wait || ahead_count_ < options_.queue_depth / kBackgroundPart;
}

void NvmeTier::Impl::StartNextRead(std::deque<ReadRequest>& queue) {
  ReadRequest request = std::move(queue.front());
  queue.pop_front();
  std::optional<Location> at;
  {
    absl::MutexLock lock(&mutex_);
    const Replica& replica = replicas_.At(request.replica_id);
    if (replica.state == ReplicaState::kLive) {
      at = replica.at();
      segments_->Pin(at->segment_idx);
    }
  }
  if (at) {
    StartRead(std::move(request), *at);
  } else {
    Finish({.done = std::move(request.done),
            .status = DataLoss("nvme: block %s is lost", request.meta.key.Hex())});
  }
}

void NvmeTier::Impl::StartRead(ReadRequest request, const Location& at) {
  auto job = std::make_unique<ReadJob>();
  job->request = std::move(request);
  job->at = at;
  job->pages = pages_->Take();
  const std::span<std::byte> target = job->request.target;
  auto op = std::make_unique<IoOp>();
  op->kind = IoKind::kRead;
  op->fd = dir_->OpenedFd(at.segment_idx);
  op->offset_bytes = at.offset_bytes;
  op->AddBuffer(job->pages, kPageBytes);
  if (IsPageAligned(target.data())) {
    const size_t whole_bytes = target.size() / kPageBytes * kPageBytes;
    op->AddBuffer(target.data(), whole_bytes);
    if (whole_bytes < target.size()) op->AddBuffer(job->pages + kPageBytes, kPageBytes);
  } else {
    job->bounce.emplace(target.size());
    op->AddBuffer(job->bounce->data(), job->bounce->bytes().size());
  }
  ++transfer_count_;
  if (job->request.urgency == Urgency::kAhead) {
    ++ahead_count_;
    ahead_bytes_ += target.size();
  }
  op->done = [this, job = std::move(job)](int64_t result) mutable {
    EndRead(std::move(job), result);
  };
  Submit(std::move(op));
}

void NvmeTier::Impl::EndRead(std::unique_ptr<ReadJob> job, int64_t result) {
  --transfer_count_;
  if (job->request.urgency == Urgency::kAhead) {
    --ahead_count_;
    ahead_bytes_ -= job->request.target.size();
  }
  {
    absl::MutexLock lock(&mutex_);
    segments_->Unpin(job->at.segment_idx);
  }
  absl::Status status = CheckHeader(*job, result);
  const std::span<std::byte> target = job->request.target;
  if (const size_t rest = target.size() % kPageBytes; rest != 0 && !job->bounce) {
    std::memcpy(target.data() + target.size() - rest, job->pages + kPageBytes, rest);
  }
  pages_->Give(std::exchange(job->pages, nullptr));
  if (!status.ok()) {
    Finish({.done = std::move(job->request.done), .status = std::move(status)});
  } else if (target.size() <= kCheckedHereBytesMax) {
    EndCheckedRead(*job);
  } else {
    checkers_->Submit([this, job = std::move(job)] { EndCheckedRead(*job); });
  }
}

absl::Status NvmeTier::Impl::CheckHeader(const ReadJob& job, int64_t result) {
  const BlockMeta& meta = job.request.meta;
  if (result < 0) {
    absl::Status status = Unavailable("nvme: read %s: %s", dir_->SegmentPath(job.at.segment_idx),
                                      std::strerror(static_cast<int>(-result)));
    Degrade(status);
    return status;
  }
  if (static_cast<uint64_t>(result) != nvme::RecordBytes(meta.payload_bytes)) {
    return DataLoss("nvme: block %s: its segment file is cut off", meta.key.Hex());
  }
  const auto header = nvme::ParseRecordHeader(HeaderPage(job.pages));
  if (!header.ok() || header->meta != meta || header->generation != job.at.generation) {
    return DataLoss("nvme: block %s: another record, or none, lies at its place (%s)",
                    meta.key.Hex(), header.status().ToString());
  }
  return absl::OkStatus();
}

// On a checking thread, or on the I/O thread for a small payload.
void NvmeTier::Impl::EndCheckedRead(ReadJob& job) {
  const std::span<std::byte> target = job.request.target;
  if (job.bounce) std::memcpy(target.data(), job.bounce->data(), target.size());
  absl::Status status;
  if (Crc32c(target) != job.request.meta.crc32c) {
    status = DataLoss("nvme: block %s: checksum mismatch", job.request.meta.key.Hex());
  }
  const uint64_t useful_bytes = status.ok() ? target.size() : 0;
  Finish({.done = std::move(job.request.done),
          .status = std::move(status),
          .useful_bytes = useful_bytes});
}

absl::Status NvmeTier::Impl::CheckSource(const WriteRequest& request) {
  if (Crc32c(request.source) == request.meta.crc32c) return absl::OkStatus();
  return DataLoss("nvme: block %s: the bytes to write do not match their checksum",
                  request.meta.key.Hex());
}

void NvmeTier::Impl::StartWrites() {
  is_write_waiting_ = false;
  bool is_room_known = false;
  while (!writes_.empty() && background_count_ < BackgroundDepth()) {
    WriteRequest& front = writes_.front();
    if (!front.check) front.check = CheckSource(front);
    absl::Status refusal = *front.check;
    std::optional<Location> at;
    std::optional<nvme::SegmentTable::Activation> activation;
    bool wants_room = false;
    if (refusal.ok()) {
      const uint64_t record_bytes = nvme::RecordBytes(front.meta.payload_bytes);
      absl::MutexLock lock(&mutex_);
      if (health_.degraded) {
        refusal = Unavailable("nvme: degraded: %s", health_.reason);
      } else if (segments_->IsActivating(Stream::kWrite)) {
        return;
      } else if (at = segments_->Place(Stream::kWrite, record_bytes);
                 !at && !is_room_known && segments_->MayMakeFile()) {
        wants_room = true;
      } else if (!at) {
        activation = segments_->BeginActivation(Stream::kWrite, record_bytes, random_());
        if (!activation && is_closing_) {
          refusal = Unavailable("nvme: closing");
        } else if (!activation && !segments_->victim() && !segments_->CanPickVictim(true) &&
                   !segments_->is_busy()) {
          refusal = Exhausted("nvme: no segment can be emptied");
        } else if (!activation) {
          is_write_waiting_ = true;
          return;
        }
      }
    }
    if (wants_room) {
      RefreshRoom(/*may_lower=*/true);
      is_room_known = true;
      continue;
    }
    if (activation) {
      StartActivation(Stream::kWrite, *activation);
      continue;
    }
    WriteRequest request = std::move(front);
    writes_.pop_front();
    if (refusal.ok()) {
      StartWrite(std::move(request), *at);
    } else {
      RefuseWrite(std::move(request), std::move(refusal));
    }
  }
}

void NvmeTier::Impl::RefuseWrite(WriteRequest request, absl::Status status) {
  {
    absl::MutexLock lock(&mutex_);
    replicas_.At(request.replica_id).state = ReplicaState::kReserved;
  }
  Finish({.done = std::move(request.done), .status = std::move(status), .is_write = true});
}

void NvmeTier::Impl::StartWrite(WriteRequest request, const Location& at) {
  auto job = std::make_unique<WriteJob>();
  job->request = std::move(request);
  job->at = at;
  job->pages = pages_->Take();
  const std::span<const std::byte> source = job->request.source;
  nvme::EncodeRecordHeader(
      {.meta = job->request.meta, .generation = at.generation, .nonce = at.nonce},
      HeaderPage(job->pages));
  auto op = std::make_unique<IoOp>();
  op->kind = IoKind::kWrite;
  op->fd = dir_->OpenedFd(at.segment_idx);
  op->offset_bytes = at.offset_bytes;
  op->AddBuffer(job->pages, kPageBytes);
  const size_t whole_bytes = source.size() / kPageBytes * kPageBytes;
  const size_t rest_bytes = source.size() - whole_bytes;
  std::byte* tail = job->pages + kPageBytes;
  if (IsPageAligned(source.data())) {
    // writev does not write to its buffers.
    op->AddBuffer(const_cast<std::byte*>(source.data()), whole_bytes);
  } else if (whole_bytes > 0) {
    job->bounce.emplace(whole_bytes);
    std::memcpy(job->bounce->data(), source.data(), whole_bytes);
    op->AddBuffer(job->bounce->data(), whole_bytes);
  }
  if (rest_bytes > 0) {
    std::memset(tail, 0, kPageBytes);
    std::memcpy(tail, source.data() + whole_bytes, rest_bytes);
    op->AddBuffer(tail, kPageBytes);
  }
  ++transfer_count_;
  ++background_count_;
  op->done = [this, job = std::move(job)](int64_t result) {
    EndWrite(*job, ResultInSegment(job->at.segment_idx, result));
  };
  Submit(std::move(op));
}

void NvmeTier::Impl::EndWrite(WriteJob& job, int64_t result) {
  --transfer_count_;
  --background_count_;
  pages_->Give(job.pages);
  if (result >= 0) {
    written_.push_back({.replica_id = job.request.replica_id,
                        .meta = job.request.meta,
                        .at = job.at,
                        .done = std::move(job.request.done)});
    return;
  }
  const absl::Status status =
      Unavailable("nvme: write %s: %s", dir_->SegmentPath(job.at.segment_idx),
                  std::strerror(static_cast<int>(-result)));
  Degrade(status);
  {
    absl::MutexLock lock(&mutex_);
    segments_->Abandon(job.at, nvme::RecordBytes(job.request.meta.payload_bytes));
    segments_->SealIfHead(job.at.segment_idx);
  }
  RefuseWrite(std::move(job.request), status);
}

// One fdatasync covers all records written until it starts, but for those whose segment's header is
// not written yet; the others form the next group.
void NvmeTier::Impl::StartSync() {
  if (!sync_group_.empty() || written_.empty()) return;
  const auto rest =
      std::stable_partition(written_.begin(), written_.end(), [this](const Commit& commit) {
        return std::find(opening_.begin(), opening_.end(), commit.at.segment_idx) == opening_.end();
      });
  sync_group_.assign(std::make_move_iterator(written_.begin()), std::make_move_iterator(rest));
  written_.erase(written_.begin(), rest);
  if (sync_group_.empty()) return;
  for (const Commit& commit : sync_group_) sync_segments_.push_back(commit.at.segment_idx);
  std::sort(sync_segments_.begin(), sync_segments_.end());
  sync_segments_.erase(std::unique(sync_segments_.begin(), sync_segments_.end()),
                       sync_segments_.end());
  SyncNext();
}

void NvmeTier::Impl::SyncNext() {
  if (sync_segments_.empty()) {
    absl::MutexLock lock(&mutex_);
    for (Commit& commit : sync_group_) commits_.push_back(std::move(commit));
    sync_group_.clear();
    return;
  }
  const uint32_t segment_idx = sync_segments_.back();
  sync_segments_.pop_back();
  auto op = std::make_unique<IoOp>();
  op->kind = IoKind::kSync;
  op->fd = dir_->OpenedFd(segment_idx);
  op->done = [this, segment_idx](int64_t result) {
    if (result >= 0) {
      {
        absl::MutexLock lock(&mutex_);
        ++sync_count_;
      }
      SyncNext();
      return;
    }
    // What the kernel did not write may be gone from its cache: the whole group is given up.
    sync_segments_.clear();
    FailGroup(std::exchange(sync_group_, {}),
              Unavailable("nvme: fdatasync %s: %s", dir_->SegmentPath(segment_idx),
                          std::strerror(static_cast<int>(-result))));
  };
  Submit(std::move(op));
}

void NvmeTier::Impl::FailGroup(std::vector<Commit> group, const absl::Status& status) {
  Degrade(status);
  {
    absl::MutexLock lock(&mutex_);
    for (const Commit& commit : group) {
      segments_->Abandon(commit.at, nvme::RecordBytes(commit.meta.payload_bytes));
      segments_->SealIfHead(commit.at.segment_idx);
      if (commit.is_move) {
        EndMove(commit.replica_id);
      } else {
        replicas_.At(commit.replica_id).state = ReplicaState::kReserved;
      }
    }
  }
  for (Commit& commit : group) {
    Finish({.done = std::move(commit.done), .status = status, .is_write = true});
  }
}

}  // namespace kvtier
