// SPDX-License-Identifier: Apache-2.0
#include "tiers/cuda/copy_lane.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/time/time.h"
#include "proto/base/crc32c.h"
#include "proto/base/status_util.h"
#include "tiers/cuda/result.h"

namespace kvtier {
namespace {

// Between two looks at the events in flight: a piece of 1 MiB takes 20 us on a fast link.
constexpr absl::Duration kPollInterval = absl::Microseconds(50);

}  // namespace

absl::StatusOr<std::unique_ptr<CopyLane>> CopyLane::Start(CudaDevice* device,
                                                          const Options& options,
                                                          Callbacks callbacks) {
  KVT_ASSIGN_OR_RETURN(PinnedPages pages,
                       PinnedPages::Create(device, options.piece_bytes * options.piece_count));
  std::unique_ptr<CopyLane> lane(
      new CopyLane(device, options, std::move(callbacks), std::move(pages)));
  // Somebody waits for what comes to the device; what leaves it is making room.
  const auto priority = options.direction == Direction::kToDevice ? CudaDevice::Priority::kHigh
                                                                  : CudaDevice::Priority::kLow;
  for (uint32_t i = 0; i < options.stream_count; ++i) {
    KVT_ASSIGN_OR_RETURN(OwnedStream stream, OwnedStream::Create(device, priority));
    lane->streams_.push_back(std::move(stream));
  }
  for (uint32_t i = 0; i < options.piece_count; ++i) {
    KVT_ASSIGN_OR_RETURN(OwnedEvent event, OwnedEvent::Create(device));
    lane->buffers_.push_back(
        {.bytes = lane->pages_.bytes().subspan(i * options.piece_bytes, options.piece_bytes),
         .event = std::move(event)});
  }
  for (Buffer& buffer : lane->buffers_) lane->idle_buffers_.push_back(&buffer);
  lane->thread_ = std::jthread([raw = lane.get()] {
    pthread_setname_np(pthread_self(), raw->options_.direction == Direction::kToDevice
                                           ? "kvtier-to-gpu"
                                           : "kvtier-from-gpu");
    raw->Run();
  });
  return lane;
}

CopyLane::CopyLane(CudaDevice* device, const Options& options, Callbacks callbacks,
                   PinnedPages pages)
    : device_(device),
      options_(options),
      callbacks_(std::move(callbacks)),
      pages_(std::move(pages)) {
  buffers_.reserve(options.piece_count);  // pieces point into it
}

void CopyLane::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    woken_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

CopyLane::~CopyLane() {
  Stop();
  // What a lost or hung device does with these pages is unknown.
  if (lost_) pages_.Abandon();
}

void CopyLane::Submit(CopyJob job) {
  const uint64_t late_at_ms = NowMs() + options_.late_ms;
  absl::Status refusal;
  {
    absl::MutexLock lock(&mutex_);
    if (!failure_.ok()) {
      refusal = failure_;
    } else if (stopping_) {
      refusal = Unavailable("block %s: the tier is closing", job.name);
    } else if (job_count_ >= options_.jobs_max) {
      refusal = Exhausted("block %s: %d copies are waiting, which is the limit", job.name,
                          options_.jobs_max);
    } else {
      ++job_count_;
      Active& active = incoming_.emplace_back();
      active.job = std::move(job);
      active.late_at_ms = late_at_ms;
      woken_ = true;
    }
  }
  if (refusal.ok()) return;
  callbacks_.released(job.replica);
  std::move(job.done)(std::move(refusal));
}

void CopyLane::Fail(const absl::Status& reason) {
  absl::MutexLock lock(&mutex_);
  if (failure_.ok()) failure_ = Unavailable("the device is lost: %s", FromAbsl(reason.message()));
  woken_ = true;
}

uint64_t CopyLane::NowMs() const {
  if (options_.now_ms) return options_.now_ms();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

void CopyLane::Run() {
  while (TakeIncoming()) {
    const uint64_t now_ms = NowMs();
    FinishPieces(now_ms);
    if (!lost_) StartPieces(now_ms);
    AnswerLate(now_ms);
    Settle();
  }
}

bool CopyLane::TakeIncoming() {
  absl::Status failure;
  bool stopping = false;
  {
    absl::MutexLock lock(&mutex_);
    const bool waits_for_device = !pieces_.empty();
    if (waits_for_device || !stopping_) {
      mutex_.AwaitWithTimeout(absl::Condition(&woken_),
                              waits_for_device ? kPollInterval : absl::InfiniteDuration());
    }
    woken_ = false;
    actives_.splice(actives_.end(), incoming_);
    failure = failure_;
    stopping = stopping_;
  }
  if (!failure.ok()) {
    lost_ = true;
    DropEverything(failure);
  }
  if (!stopping) return true;
  for (Active& active : actives_) {
    if (active.started_bytes < active.job.host.size() && active.status.ok()) {
      active.status = Unavailable("block %s: the tier is closing", active.job.name);
    }
  }
  Settle();
  return !pieces_.empty();
}

void CopyLane::StartPieces(uint64_t now_ms) {
  for (Active& active : actives_) {
    while (!active.answered && active.status.ok() &&
           active.started_bytes < active.job.host.size()) {
      if (idle_buffers_.empty()) return;
      StartPiece(active, now_ms);
      if (lost_) return;
    }
  }
}

void CopyLane::StartPiece(Active& active, uint64_t now_ms) {
  const Piece piece{.active = &active,
                    .buffer = idle_buffers_.back(),
                    .offset_bytes = active.started_bytes,
                    .bytes = std::min<uint64_t>(options_.piece_bytes,
                                                active.job.host.size() - active.started_bytes),
                    .hung_at_ms = now_ms + options_.hung_ms};
  if (options_.direction == Direction::kToDevice) {
    const std::span<std::byte> staged = piece.buffer->bytes.first(piece.bytes);
    std::memcpy(staged.data(), active.job.host.data() + piece.offset_bytes, piece.bytes);
    // Over the copy: the source may be memory that a client can still change.
    active.crc32c = Crc32c(staged, active.crc32c);
    const bool last = piece.offset_bytes + piece.bytes == active.job.host.size();
    if (last && active.crc32c != active.job.crc32c) {
      active.status = DataLoss("hbm: block %s: the bytes to write do not match their checksum",
                               active.job.name);
      return;
    }
  }
  const CudaStream stream = streams_[next_stream_].get();
  next_stream_ = (next_stream_ + 1) % streams_.size();
  const absl::Status copied = Enqueue(active, piece, stream);
  if (!copied.ok()) {
    if (IsDeviceLost(copied)) return Lose(copied);
    active.status = Unavailable("hbm: block %s: %s", active.job.name, copied.ToString());
    return;
  }
  if (absl::Status recorded = device_->RecordEvent(piece.buffer->event.get(), stream);
      !recorded.ok()) {
    // A copy whose end cannot be seen never ends.
    return Lose(recorded);
  }
  active.started_bytes += piece.bytes;
  ++active.inflight_count;
  idle_buffers_.pop_back();
  pieces_.push_back(piece);
}

absl::Status CopyLane::Enqueue(const Active& active, const Piece& piece, CudaStream stream) {
  const CudaAddress address = active.job.address + piece.offset_bytes;
  const std::span<std::byte> staged = piece.buffer->bytes.first(piece.bytes);
  if (options_.direction == Direction::kToDevice) {
    return device_->CopyToDevice(address, staged, stream);
  }
  return device_->CopyToHost(staged, address, stream);
}

void CopyLane::FinishPieces(uint64_t now_ms) {
  // All of them, not the first: another stream may be ahead.
  for (auto piece = pieces_.begin(); piece != pieces_.end();) {
    const absl::StatusOr<bool> done = device_->IsDone(piece->buffer->event.get());
    if (!done.ok()) return Lose(done.status());
    if (!*done) {
      if (now_ms >= piece->hung_at_ms) {
        return Lose(DeadlineExceeded("the device hangs: a copy of %d bytes is not done in %d ms",
                                     piece->bytes, options_.hung_ms));
      }
      ++piece;
      continue;
    }
    FinishPiece(*piece);
    piece = pieces_.erase(piece);
  }
}

void CopyLane::FinishPiece(const Piece& piece) {
  Active& active = *piece.active;
  // Once it is answered, the host's bytes are somebody else's.
  if (options_.direction == Direction::kToHost && !active.answered) {
    std::memcpy(active.job.host.data() + piece.offset_bytes, piece.buffer->bytes.data(),
                piece.bytes);
  }
  --active.inflight_count;
  idle_buffers_.push_back(piece.buffer);
}

void CopyLane::AnswerLate(uint64_t now_ms) {
  for (Active& active : actives_) {
    if (active.answered || now_ms < active.late_at_ms) continue;
    const bool complete =
        active.inflight_count == 0 && active.started_bytes == active.job.host.size();
    if (complete) continue;
    active.status =
        Unavailable("hbm: block %s: not copied in %d ms", active.job.name, options_.late_ms);
    if (active.inflight_count > 0) Answer(active);
  }
}

void CopyLane::Settle() {
  uint32_t settled_count = 0;
  for (auto active = actives_.begin(); active != actives_.end();) {
    const bool over = !active->status.ok() || active->answered ||
                      active->started_bytes == active->job.host.size();
    if (!over || active->inflight_count > 0) {
      ++active;
      continue;
    }
    if (active->status.ok() && options_.direction == Direction::kToHost &&
        Crc32c(active->job.host) != active->job.crc32c) {
      active->status = DataLoss("hbm: block %s: checksum mismatch", active->job.name);
    }
    callbacks_.released(active->job.replica);
    if (!active->answered) Answer(*active);
    active = actives_.erase(active);
    ++settled_count;
  }
  if (settled_count == 0) return;
  absl::MutexLock lock(&mutex_);
  job_count_ -= settled_count;
}

void CopyLane::Answer(Active& active) {
  active.answered = true;
  std::move(active.job.done)(active.status);
}

void CopyLane::Lose(const absl::Status& reason) {
  // Everything is dropped at the next turn: callers are in the middle of their lists.
  lost_ = true;
  Fail(reason);
  callbacks_.lost(reason);
}

void CopyLane::DropEverything(const absl::Status& reason) {
  pieces_.clear();
  idle_buffers_.clear();
  for (Active& active : actives_) {
    active.inflight_count = 0;
    if (active.status.ok()) active.status = reason;
  }
  Settle();
}

}  // namespace kvtier
