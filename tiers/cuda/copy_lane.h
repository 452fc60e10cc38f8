// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "tiers/cuda/driver.h"
#include "tiers/cuda/owned.h"
#include "tiers/tier.h"

namespace kvtier {

// One block between host memory and its slot on the device.
struct CopyJob {
  ReplicaId replica = kNoReplica;
  CudaAddress address = 0;
  // Exactly the payload. Valid until `done`; read by copies to the device, else written.
  std::span<std::byte> host;
  uint32_t crc32c = 0;
  // For messages.
  std::string name;
  Tier::Done done;
};

// The copies of one direction: a thread, streams of its own, and pinned buffers through which every
// block goes piece by piece, so that host memory needs no pinning and the checksum is taken over
// exactly the bytes that were moved. Copies are begun in the order of their arrival; pieces on
// different streams may be done in any order.
//
// A job is answered when all its pieces are done, or by its deadline. What is late then still
// occupies its buffers and its slot until the device says that it is done (`released`). Work that
// stays undone much longer means a device that hangs, which is treated like one that is lost:
// everything is answered UNAVAILABLE, at once and from then on. Thread-safe.
class CopyLane {
 public:
  enum class Direction : uint8_t { kToDevice, kToHost };

  struct Options {
    Direction direction = Direction::kToDevice;
    uint32_t stream_count = 2;
    // Whole pages.
    uint64_t piece_bytes = 1ULL << 20;
    // Pieces in flight, and buffers.
    uint32_t piece_count = 8;
    // A job that is not done this long after its submission is answered UNAVAILABLE.
    uint64_t late_ms = 10'000;
    // A piece that is not done this long after its start means that the device hangs.
    uint64_t hung_ms = 30'000;
    // Jobs waiting and in flight; more are answered RESOURCE_EXHAUSTED.
    uint32_t jobs_max = 1024;
    // Milliseconds of a clock that does not go back; the monotonic one when not set.
    std::function<uint64_t()> now_ms = {};
  };
  // Called from the lane's thread or from within Submit; must not block or destroy the lane.
  struct Callbacks {
    // Exactly once per job: nothing of it touches its slot any more. Before `done`, unless it was
    // late.
    std::function<void(ReplicaId)> released;
    // A device error that sticks, or a device that hangs. At most once.
    std::function<void(const absl::Status&)> lost;
  };

  // Errors: those of CudaDevice.
  static absl::StatusOr<std::unique_ptr<CopyLane>> Start(CudaDevice* device, const Options& options,
                                                         Callbacks callbacks);
  ~CopyLane();
  CopyLane(const CopyLane&) = delete;
  CopyLane& operator=(const CopyLane&) = delete;

  // Does not block. `done` gets DATA_LOSS (the checksum does not match), RESOURCE_EXHAUSTED,
  // UNAVAILABLE (late, failed, lost or closing).
  void Submit(CopyJob job) ABSL_LOCKS_EXCLUDED(mutex_);
  // Answers what waits with UNAVAILABLE, and waits for the pieces in flight (at most hung_ms).
  // Idempotent; the destructor does it, too.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);
  // The device is lost: answers everything.
  void Fail(const absl::Status& reason) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // A job under way. Pieces point to it: it lives until it is answered and none is in flight.
  struct Active {
    CopyJob job;
    uint64_t late_at_ms = 0;
    uint64_t started_bytes = 0;
    uint32_t inflight_count = 0;
    uint32_t crc32c = 0;
    // The first failure; no piece is started after it.
    absl::Status status;
    bool answered = false;
  };
  struct Buffer {
    std::span<std::byte> bytes;
    OwnedEvent event;
  };
  struct Piece {
    Active* active = nullptr;
    Buffer* buffer = nullptr;
    uint64_t offset_bytes = 0;
    uint64_t bytes = 0;
    uint64_t hung_at_ms = 0;
  };

  CopyLane(CudaDevice* device, const Options& options, Callbacks callbacks, PinnedPages pages);

  void Run();
  uint64_t NowMs() const;
  // Takes new jobs over; false when the lane is to end.
  bool TakeIncoming() ABSL_LOCKS_EXCLUDED(mutex_);
  void StartPieces(uint64_t now_ms);
  // One more piece of the job, which has some left.
  void StartPiece(Active& active, uint64_t now_ms);
  absl::Status Enqueue(const Active& active, const Piece& piece, CudaStream stream);
  void FinishPieces(uint64_t now_ms);
  void FinishPiece(const Piece& piece);
  void AnswerLate(uint64_t now_ms);
  void Settle();
  void Answer(Active& active);
  void Lose(const absl::Status& reason);
  void DropEverything(const absl::Status& reason);

  CudaDevice* const device_;
  const Options options_;
  const Callbacks callbacks_;

  // Of the lane's thread alone.
  PinnedPages pages_;
  std::vector<OwnedStream> streams_;
  std::vector<Buffer> buffers_;
  std::vector<Buffer*> idle_buffers_;
  size_t next_stream_ = 0;
  std::list<Active> actives_;
  std::deque<Piece> pieces_;
  bool lost_ = false;

  absl::Mutex mutex_;
  std::list<Active> incoming_ ABSL_GUARDED_BY(mutex_);
  // Accepted and not yet answered or still in flight.
  uint32_t job_count_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  // Anything above changed.
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;

  std::jthread thread_;
};

}  // namespace kvtier
