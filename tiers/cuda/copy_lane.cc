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

// Between two looks at the events in flight: 1 MiB takes 20 us on a fast link.
constexpr absl::Duration kPollInterval = absl::Microseconds(50);
// Between two looks at the clock, where only that can change something.
constexpr absl::Duration kClockInterval = absl::Milliseconds(1);
// Blocks of 16 KiB then fill a flight of 1 MiB.
constexpr size_t kPiecesMax = 64;

}  // namespace

absl::StatusOr<std::unique_ptr<CopyLane>> CopyLane::Start(CudaDevice* device,
                                                          const Options& options,
                                                          Callbacks callbacks) {
  KVT_ASSIGN_OR_RETURN(PinnedPages pages,
                       PinnedPages::Create(device, options.piece_bytes * options.flight_count));
  std::unique_ptr<CopyLane> lane(
      new CopyLane(device, options, std::move(callbacks), std::move(pages)));
  // Somebody waits for what comes to the device; what leaves it is making room.
  const auto priority = options.direction == Direction::kToDevice ? CudaDevice::Priority::kHigh
                                                                  : CudaDevice::Priority::kLow;
  for (uint32_t i = 0; i < options.stream_count; ++i) {
    KVT_ASSIGN_OR_RETURN(OwnedStream stream, OwnedStream::Create(device, priority));
    lane->streams_.push_back(std::move(stream));
  }
  for (uint32_t i = 0; i < options.flight_count; ++i) {
    KVT_ASSIGN_OR_RETURN(OwnedEvent event, OwnedEvent::Create(device));
    lane->buffers_.push_back(
        {.bytes = lane->pages_.bytes().subspan(i * options.piece_bytes, options.piece_bytes),
         .event = std::move(event)});
  }
  for (Buffer& buffer : lane->buffers_) lane->idle_buffers_.push_back(&buffer);
  lane->checksums_ = std::make_unique<ChecksumPool>(options.checksum_thread_count);
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
      pages_(std::move(pages)),
      bucket_(options.bytes_per_second) {
  buffers_.reserve(options.flight_count);  // flights point into it
}

void CopyLane::Wake() {
  woken_ = true;
  wake_.NotifyAll();
}

void CopyLane::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    Wake();
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
      Wake();
      return;
    }
  }
  callbacks_.released(job.replica);
  std::move(job.done)(std::move(refusal));
}

void CopyLane::Fail(const absl::Status& reason) {
  absl::MutexLock lock(&mutex_);
  if (failure_.ok()) {
    failure_ = Unavailable("the device is lost: %s", FromAbsl(reason.message()));
    hangs_ = absl::IsDeadlineExceeded(reason);
  }
  Wake();
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
    FinishFlights(now_ms);
    if (!lost_) StartFlights(now_ms);
    AnswerLate(now_ms);
    Settle(now_ms);
  }
}

absl::Duration CopyLane::Patience() const {
  if (!flights_.empty()) return kPollInterval;
  for (const Active& active : actives_) {
    if (active.has_pieces_left() || active.abandoned_at_ms > 0) return kClockInterval;
  }
  return absl::InfiniteDuration();
}

bool CopyLane::TakeIncoming() {
  const absl::Duration patience = Patience();
  std::vector<Checked> checked;
  absl::Status failure;
  bool hangs = false;
  bool stopping = false;
  {
    absl::MutexLock lock(&mutex_);
    // The end may have been asked for while the last copies were under way.
    if (!stopping_ || !actives_.empty()) {
      wake_.WaitFor(mutex_, patience,
                    [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return woken_; });
    }
    woken_ = false;
    actives_.splice(actives_.end(), incoming_);
    checked.swap(checked_);
    failure = failure_;
    hangs = hangs_;
    stopping = stopping_;
  }
  for (const Checked& check : checked) FinishCheck(*check.active, check.crc32c);
  if (!failure.ok()) {
    lost_ = true;
    // What hangs may still arrive, but after the end nobody uses that memory.
    DropEverything(failure, hangs && !stopping, NowMs());
  }
  if (!stopping) return true;
  for (Active& active : actives_) {
    active.abandoned_at_ms = 0;
    if (active.started_bytes < active.job.host.size() && active.status.ok()) {
      active.status = Unavailable("block %s: the tier is closing", active.job.name);
    }
  }
  Settle(NowMs());
  return !actives_.empty();
}

void CopyLane::StartFlights(uint64_t now_ms) {
  for (auto active = actives_.begin(); active != actives_.end(); ++active) {
    while (active->has_pieces_left()) {
      if (idle_buffers_.empty() || !(bucket_.MayGo(now_ms) || limit_is_lifted_)) return;
      if (active->started_bytes == 0) Begin(*active);
      if (active->hold.has_value()) {
        StartDirect(active, now_ms);
      } else {
        StartStaged(*active, now_ms);
      }
      if (lost_) return;
    }
  }
}

void CopyLane::Begin(Active& active) {
  if (active.hold.has_value() || options_.pinned == nullptr) return;
  if (auto hold = options_.pinned->Acquire(active.job.host)) active.hold.emplace(std::move(*hold));
}

void CopyLane::StartStaged(Active& active, uint64_t now_ms) {
  Buffer* const buffer = idle_buffers_.back();
  const uint64_t offset_bytes = active.started_bytes;
  const std::span<std::byte> staged = buffer->bytes.first(
      std::min<uint64_t>(options_.piece_bytes, active.job.host.size() - offset_bytes));
  if (is_to_device()) {
    std::memcpy(staged.data(), active.job.host.data() + offset_bytes, staged.size());
    // Over the copy: the source may be memory that a client can still change.
    active.crc32c = Crc32c(staged, active.crc32c);
    const bool last = offset_bytes + staged.size() == active.job.host.size();
    if (last) FinishCheck(active, active.crc32c);
    if (!active.status.ok()) return;
  }
  active.started_bytes += staged.size();
  Flight flight{.buffer = buffer, .is_staged = true};
  flight.pieces.push_back(
      {.active = &active, .host = staged, .address = active.job.address + offset_bytes});
  Launch(std::move(flight), now_ms);
}

void CopyLane::StartDirect(std::list<Active>::iterator first, uint64_t now_ms) {
  Flight flight{.buffer = idle_buffers_.back()};
  uint64_t bytes_left = bucket_.is_limited() ? options_.piece_bytes : options_.direct_bytes;
  for (auto active = first; active != actives_.end(); ++active) {
    if (bytes_left == 0 || flight.pieces.size() == kPiecesMax) break;
    if (!active->has_pieces_left()) continue;
    if (active->started_bytes == 0) Begin(*active);
    if (!active->hold.has_value()) break;
    AddDirectPieces(*active, flight, bytes_left);
  }
  Launch(std::move(flight), now_ms);
}

void CopyLane::AddDirectPieces(Active& active, Flight& flight, uint64_t& bytes_left) const {
  const std::span<std::byte> host = active.job.host;
  while (bytes_left > 0 && flight.pieces.size() < kPiecesMax &&
         active.started_bytes < host.size()) {
    std::byte* const data = host.data() + active.started_bytes;
    const uint64_t bytes = std::min(
        {active.hold->BytesInOneCopy(data), host.size() - active.started_bytes, bytes_left});
    flight.pieces.push_back({.active = &active,
                             .host = {data, bytes},
                             .address = active.job.address + active.started_bytes});
    active.started_bytes += bytes;
    bytes_left -= bytes;
  }
}

void CopyLane::Launch(Flight flight, uint64_t now_ms) {
  const CudaStream stream = streams_[next_stream_].get();
  next_stream_ = (next_stream_ + 1) % streams_.size();
  uint64_t bytes = 0;
  for (const Piece& piece : flight.pieces) {
    bytes += piece.host.size();
    ++piece.active->inflight_count;
    if (bucket_.is_limited()) piece.active->late_at_ms = now_ms + options_.late_ms;
  }
  flight.hung_at_ms = now_ms + options_.hung_ms;
  const absl::Status copied = Enqueue(flight, stream);
  if (!copied.ok()) {
    if (IsDeviceLost(copied)) return Lose(copied);
    // Some of it may have begun: it ends as if all had.
    for (const Piece& piece : flight.pieces) {
      piece.active->status =
          Unavailable("hbm: block %s: %s", piece.active->job.name, copied.ToString());
    }
  }
  if (absl::Status recorded = device_->RecordEvent(flight.buffer->event.get(), stream);
      !recorded.ok()) {
    // A copy whose end cannot be seen never ends.
    return Lose(recorded);
  }
  bucket_.Take(bytes);
  (flight.is_staged ? staged_bytes_ : direct_bytes_) += bytes;
  idle_buffers_.pop_back();
  flights_.push_back(std::move(flight));
  if (!is_to_device()) return;
  // While the device reads it.
  for (const Piece& piece : flights_.back().pieces) {
    if (piece.active->check == Check::kNone && piece.active->hold.has_value()) {
      StartCheck(*piece.active);
    }
  }
}

absl::Status CopyLane::Enqueue(const Flight& flight, CudaStream stream) {
  std::vector<CudaHostCopy> copies;
  copies.reserve(flight.pieces.size());
  for (const Piece& piece : flight.pieces) {
    copies.push_back({.address = piece.address, .host = piece.host});
  }
  return is_to_device() ? device_->CopyAllToDevice(copies, stream)
                        : device_->CopyAllToHost(copies, stream);
}

void CopyLane::FinishFlights(uint64_t now_ms) {
  // All of them, not the first: another stream may be ahead.
  for (auto flight = flights_.begin(); flight != flights_.end();) {
    const absl::StatusOr<bool> done = device_->IsDone(flight->buffer->event.get());
    if (!done.ok()) return Lose(done.status());
    if (!*done) {
      if (now_ms >= flight->hung_at_ms) {
        return Lose(
            DeadlineExceeded("the device hangs: a copy is not done in %d ms", options_.hung_ms));
      }
      ++flight;
      continue;
    }
    FinishFlight(*flight);
    flight = flights_.erase(flight);
  }
}

void CopyLane::FinishFlight(const Flight& flight) {
  for (const Piece& piece : flight.pieces) {
    Active& active = *piece.active;
    --active.inflight_count;
    // Once it is answered, the host's bytes are somebody else's.
    if (!flight.is_staged || is_to_device() || active.answered) continue;
    std::memcpy(active.job.host.data() + (piece.address - active.job.address), piece.host.data(),
                piece.host.size());
  }
  idle_buffers_.push_back(flight.buffer);
}

void CopyLane::AnswerLate(uint64_t now_ms) {
  for (Active& active : actives_) {
    if (active.answered || !active.status.ok() || now_ms < active.late_at_ms) continue;
    // The limit holds it back, not the device.
    if (bucket_.is_limited() && active.inflight_count == 0) continue;
    // The device may be at work on its host memory.
    if (active.started_bytes > 0 && active.hold.has_value()) continue;
    if (active.inflight_count == 0 && !active.has_pieces_left()) continue;
    active.status =
        Unavailable("hbm: block %s: not copied in %d ms", active.job.name, options_.late_ms);
    if (active.inflight_count > 0) Answer(active);
  }
}

void CopyLane::StartCheck(Active& active) {
  active.check = Check::kRunning;
  checksums_->Submit(active.job.host, [this, &active](uint32_t crc32c) {
    absl::MutexLock lock(&mutex_);
    checked_.push_back({.active = &active, .crc32c = crc32c});
    Wake();
  });
}

void CopyLane::FinishCheck(Active& active, uint32_t crc32c) {
  active.check = Check::kDone;
  if (crc32c == active.job.crc32c || !active.status.ok()) return;
  active.status = is_to_device()
                      ? DataLoss("hbm: block %s: the bytes to write do not match their checksum",
                                 active.job.name)
                      : DataLoss("hbm: block %s: checksum mismatch", active.job.name);
}

bool CopyLane::IsOver(Active& active, uint64_t now_ms) {
  if (active.inflight_count > 0 || active.check == Check::kRunning || active.has_pieces_left()) {
    return false;
  }
  if (active.abandoned_at_ms > now_ms) return false;
  if (active.check == Check::kDone || active.answered || !active.status.ok()) return true;
  StartCheck(active);
  return false;
}

void CopyLane::Settle(uint64_t now_ms) {
  uint32_t settled_count = 0;
  for (auto active = actives_.begin(); active != actives_.end();) {
    if (!IsOver(*active, now_ms)) {
      ++active;
      continue;
    }
    callbacks_.released(active->job.replica);
    // Before its owner hears of it: the memory may then be unmapped.
    active->hold.reset();
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

void CopyLane::DropEverything(const absl::Status& reason, bool hangs, uint64_t now_ms) {
  flights_.clear();
  idle_buffers_.clear();
  for (Active& active : actives_) {
    if (hangs && !is_to_device() && active.hold.has_value() && active.inflight_count > 0) {
      active.abandoned_at_ms = now_ms + options_.abandon_ms;
    }
    active.inflight_count = 0;
    if (active.status.ok()) active.status = reason;
  }
  Settle(now_ms);
}

}  // namespace kvtier
