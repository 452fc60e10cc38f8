// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "tiers/cuda/driver.h"
#include "tiers/memory/segment_observer.h"

namespace kvtier {

// Pins the segments of a memory tier, so that a device copies from and to them directly. That
// happens in the background, chunk by chunk: pinning faults every page in and takes about a second
// for some gigabytes. Until a block's memory is pinned, and where it cannot be, it is copied
// through buffers, which costs a pass of a CPU core and nothing else.
//
// A segment that is to be unmapped is unpinned first, once the last Hold on it has ended. Thread-
// safe. Outlives the tier; destroyed when no segment is left.
class PinnedSegments final : public SegmentObserver {
 public:
  struct Options {
    // Whole pages. What a caller of OnUnmapping may have to wait for.
    uint64_t chunk_bytes = 64ULL << 20;
    // Called once, from a thread of this object, when memory cannot be pinned for the first time.
    std::function<void(const absl::Status&)> on_failure = {};
  };
  struct Progress {
    // Of the segments that are mapped now.
    uint64_t mapped_bytes = 0;
    uint64_t pinned_bytes = 0;
  };

  // The device outlives this.
  PinnedSegments(CudaDevice* device, Options options);
  ~PinnedSegments() override;
  PinnedSegments(const PinnedSegments&) = delete;
  PinnedSegments& operator=(const PinnedSegments&) = delete;

  void OnMapped(std::span<std::byte> segment) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnUnmapping(std::span<std::byte> segment) override ABSL_LOCKS_EXCLUDED(mutex_);

  // Memory that stays pinned while this lives.
  class Hold {
   public:
    Hold(Hold&& other) noexcept
        : owner_(std::exchange(other.owner_, nullptr)), base_(other.base_) {}
    Hold& operator=(Hold&&) = delete;
    ~Hold() {
      if (owner_ != nullptr) owner_->End(base_);
    }

    // How many bytes from `data` on are in one registration, which no copy may leave. Requires:
    // `data` is in the memory that is held.
    uint64_t BytesInOneCopy(const std::byte* data) const {
      const uint64_t chunk_bytes = owner_->options_.chunk_bytes;
      return chunk_bytes - static_cast<uint64_t>(data - base_) % chunk_bytes;
    }

   private:
    friend class PinnedSegments;
    Hold(PinnedSegments* owner, const std::byte* base) : owner_(owner), base_(base) {}

    PinnedSegments* owner_;
    // Of the segment.
    const std::byte* base_;
  };
  // None unless all of `bytes` is pinned now.
  std::optional<Hold> Acquire(std::span<const std::byte> bytes) ABSL_LOCKS_EXCLUDED(mutex_);

  // The device is lost: nothing is pinned, unpinned or waited for any more. What is pinned stays so
  // until the process ends.
  void Abandon() ABSL_LOCKS_EXCLUDED(mutex_);

  Progress progress() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Segment {
    std::span<std::byte> bytes;
    // From the segment's start: whole chunks, or everything.
    uint64_t pinned_bytes = 0;
    uint32_t hold_count = 0;
    // Its next chunk is being pinned.
    bool is_pinning = false;
    // No more of it can be pinned, or it is about to be unmapped.
    bool is_closed = false;
  };

  void End(const std::byte* base) ABSL_LOCKS_EXCLUDED(mutex_);
  // The thread that pins.
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  // The next segment that has something to pin, or null.
  Segment* FindUnpinned() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  CudaDevice* const device_;
  const Options options_;

  mutable absl::Mutex mutex_;
  // By their addresses.
  std::map<const std::byte*, Segment> segments_ ABSL_GUARDED_BY(mutex_);
  bool abandoned_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  // Of the thread.
  bool has_failed_ = false;

  std::jthread thread_;
};

}  // namespace kvtier
