// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "proto/base/timed_wait.h"
#include "tiers/cuda/checksum_pool.h"
#include "tiers/cuda/driver.h"
#include "tiers/cuda/owned.h"
#include "tiers/cuda/pinned_segments.h"
#include "tiers/tier.h"
#include "tiers/token_bucket.h"

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

// The copies of one direction: a thread that gives work to streams of its own, and threads that
// take checksums. Copies are begun in the order of their arrival; those on different streams may be
// done in any order.
//
// Direct: a block whose host memory is pinned (pinned_segments.h) is copied between there and its
// slot, many small blocks in one call. Its checksum is taken by another thread: of what came from
// the device once it is there, of what goes to it from the host memory while the device reads that,
// too. The lane's thread touches no byte.
// Staged: other blocks go piece by piece through pinned buffers. The lane's thread copies between
// those and the host memory. What goes to the device is checked in the buffers, what came from it
// at the end, by another thread.
//
// A job is answered OK when its copies are done and the checksum is right. A staged job that is
// late is answered by its deadline: it then still occupies buffers and its slot until the device
// says that it is done (`released`). A direct job that has begun is answered when the device has
// done with its host memory, and not before. Work that stays undone much longer means a device that
// hangs, which is treated like one that is lost: everything is answered UNAVAILABLE, at once and
// from then on; only direct copies to the host, which may still arrive there, are given
// `abandon_ms`, in which the owner stops to use that memory. Thread-safe.
class CopyLane {
 public:
  enum class Direction : uint8_t { kToDevice, kToHost };

  struct Options {
    Direction direction = Direction::kToDevice;
    uint32_t stream_count = 2;
    // Whole pages.
    uint64_t piece_bytes = 1ULL << 20;
    // Flights at once: what is in flight has a buffer and an event.
    uint32_t flight_count = 8;
    // Direct: in one flight, whatever the number of blocks. With a limit of the rate, piece_bytes.
    uint64_t direct_bytes = 4ULL << 20;
    uint32_t checksum_thread_count = 2;
    // Limits what is begun; 0: nothing does.
    uint64_t bytes_per_second = 0;
    // A job that is not done this long after its submission is answered UNAVAILABLE; with a limit
    // of the rate, this long after its last piece was begun, if that is not done.
    uint64_t late_ms = 10'000;
    // A flight that is not done this long after its start means that the device hangs.
    uint64_t hung_ms = 30'000;
    uint64_t abandon_ms = 5'000;
    // Says what host memory is pinned. Null: none. Not owned.
    PinnedSegments* pinned = nullptr;
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
  // The device is lost: answers everything. DEADLINE_EXCEEDED: it hangs.
  void Fail(const absl::Status& reason) ABSL_LOCKS_EXCLUDED(mutex_);
  // From now on the rate has no limit.
  void LiftLimit() { limit_is_lifted_ = true; }

  // Payload that was given to the device so far.
  struct Traffic {
    uint64_t direct_bytes = 0;
    uint64_t staged_bytes = 0;
  };
  Traffic traffic() const { return {.direct_bytes = direct_bytes_, .staged_bytes = staged_bytes_}; }

 private:
  enum class Check : uint8_t { kNone, kRunning, kDone };
  // A job under way. Pieces and checks point to it: it lives until it is answered and there are
  // none.
  struct Active {
    CopyJob job;
    // Set when the first piece is begun, if the job is direct.
    std::optional<PinnedSegments::Hold> hold = std::nullopt;
    uint64_t late_at_ms = 0;
    uint64_t started_bytes = 0;
    uint32_t inflight_count = 0;
    // Of the bytes staged so far, or as the check found it.
    uint32_t crc32c = 0;
    Check check = Check::kNone;
    // On a device that hangs: when its host memory is answered for.
    uint64_t abandoned_at_ms = 0;
    // The first failure; no piece is started after it.
    absl::Status status;
    bool answered = false;

    bool has_pieces_left() const {
      return !answered && status.ok() && started_bytes < job.host.size();
    }
  };
  struct Buffer {
    std::span<std::byte> bytes;
    OwnedEvent event;
  };
  struct Piece {
    Active* active = nullptr;
    std::span<std::byte> host;
    CudaAddress address = 0;
  };
  // What was given to a stream at once.
  struct Flight {
    Buffer* buffer = nullptr;
    bool is_staged = false;
    std::vector<Piece> pieces = {};
    uint64_t hung_at_ms = 0;
  };
  struct Checked {
    Active* active = nullptr;
    uint32_t crc32c = 0;
  };

  CopyLane(CudaDevice* device, const Options& options, Callbacks callbacks, PinnedPages pages);

  bool is_to_device() const { return options_.direction == Direction::kToDevice; }
  void Run();
  uint64_t NowMs() const;
  // Waits for something to do, and takes new jobs and checksums over; false when the lane is to
  // end.
  bool TakeIncoming() ABSL_LOCKS_EXCLUDED(mutex_);
  // How long there may be nothing to do.
  absl::Duration Patience() const;
  void StartFlights(uint64_t now_ms);
  void Begin(Active& active);
  // Requires: the job has pieces left.
  void StartStaged(Active& active, uint64_t now_ms);
  // From this job and those behind it.
  void StartDirect(std::list<Active>::iterator first, uint64_t now_ms);
  void AddDirectPieces(Active& active, Flight& flight, uint64_t& bytes_left) const;
  void Launch(Flight flight, uint64_t now_ms);
  absl::Status Enqueue(const Flight& flight, CudaStream stream);
  void FinishFlights(uint64_t now_ms);
  void FinishFlight(const Flight& flight);
  void AnswerLate(uint64_t now_ms);
  void StartCheck(Active& active) ABSL_LOCKS_EXCLUDED(mutex_);
  void FinishCheck(Active& active, uint32_t crc32c);
  void Settle(uint64_t now_ms);
  // Lets the lane's thread look at what has changed.
  void Wake() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Nothing of it is under way any more, and it has its status.
  bool IsOver(Active& active, uint64_t now_ms);
  void Answer(Active& active);
  void Lose(const absl::Status& reason);
  void DropEverything(const absl::Status& reason, bool hangs, uint64_t now_ms);

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
  std::deque<Flight> flights_;
  TokenBucket bucket_;
  bool lost_ = false;

  absl::Mutex mutex_;
  std::list<Active> incoming_ ABSL_GUARDED_BY(mutex_);
  std::vector<Checked> checked_ ABSL_GUARDED_BY(mutex_);
  // Accepted and not yet answered or still in flight.
  uint32_t job_count_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  // The failure is that the device hangs: what it was given may still be done.
  bool hangs_ ABSL_GUARDED_BY(mutex_) = false;
  // Anything above changed.
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
  TimedCondition wake_;
  std::atomic<bool> limit_is_lifted_ = false;
  std::atomic<uint64_t> direct_bytes_ = 0;
  std::atomic<uint64_t> staged_bytes_ = 0;

  // Calls back into the lane: destroyed before all of the above.
  std::unique_ptr<ChecksumPool> checksums_;
  std::jthread thread_;
};

}  // namespace kvtier
