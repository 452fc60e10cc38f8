// SPDX-License-Identifier: Apache-2.0
//
// Owners of what a CudaDevice makes. Each is movable, belongs to the thread that uses it, and gives
// its object back when destroyed; the device outlives it. On a lost device giving back fails, which
// is ignored: the driver takes everything at the end of the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "tiers/cuda/driver.h"

namespace kvtier {

class OwnedStream {
 public:
  static absl::StatusOr<OwnedStream> Create(CudaDevice* device, CudaDevice::Priority priority);
  OwnedStream(OwnedStream&& other) noexcept
      : device_(std::exchange(other.device_, nullptr)), stream_(other.stream_) {}
  OwnedStream& operator=(OwnedStream&&) = delete;
  ~OwnedStream();

  CudaStream get() const { return stream_; }

 private:
  OwnedStream(CudaDevice* device, CudaStream stream) : device_(device), stream_(stream) {}

  CudaDevice* device_;
  CudaStream stream_;
};

class OwnedEvent {
 public:
  static absl::StatusOr<OwnedEvent> Create(CudaDevice* device);
  OwnedEvent(OwnedEvent&& other) noexcept
      : device_(std::exchange(other.device_, nullptr)), event_(other.event_) {}
  OwnedEvent& operator=(OwnedEvent&&) = delete;
  ~OwnedEvent();

  CudaEvent get() const { return event_; }

 private:
  OwnedEvent(CudaDevice* device, CudaEvent event) : device_(device), event_(event) {}

  CudaDevice* device_;
  CudaEvent event_;
};

// Whole pages of zeroed host memory, registered with the device.
class PinnedPages {
 public:
  // Errors: RESOURCE_EXHAUSTED (memory, or RLIMIT_MEMLOCK), those of RegisterHost.
  static absl::StatusOr<PinnedPages> Create(CudaDevice* device, uint64_t bytes);
  PinnedPages(PinnedPages&& other) noexcept
      : device_(other.device_), pages_(std::exchange(other.pages_, {})) {}
  PinnedPages& operator=(PinnedPages&&) = delete;
  ~PinnedPages();

  std::span<std::byte> bytes() const { return pages_; }
  // Leaves the pages mapped for good: the device may still write to them.
  void Abandon() { pages_ = {}; }

 private:
  PinnedPages(CudaDevice* device, std::span<std::byte> pages) : device_(device), pages_(pages) {}

  CudaDevice* device_;
  std::span<std::byte> pages_;
};

// Device memory that processes share, mapped here. Immutable, so thread-safe.
class CudaMemory {
 public:
  // `bytes` is a multiple of the granularity. Errors: those of CudaDevice.
  static absl::StatusOr<std::unique_ptr<CudaMemory>> Allocate(CudaDevice* device, uint64_t bytes);
  // What another process of this machine exported; `fd` stays the caller's.
  static absl::StatusOr<std::unique_ptr<CudaMemory>> Import(CudaDevice* device, int fd,
                                                            uint64_t bytes);
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;
  // Requires: no work that touches it is in flight.
  ~CudaMemory();

  CudaAddress address() const { return address_; }
  uint64_t bytes() const { return bytes_; }
  // A descriptor of the caller's own.
  absl::StatusOr<int> ExportFd() const { return device_->ExportFd(allocation_); }

 private:
  CudaMemory(CudaDevice* device, uint64_t bytes, CudaAllocation allocation)
      : device_(device), bytes_(bytes), allocation_(allocation) {}
  absl::Status MapAnywhere();

  CudaDevice* const device_;
  const uint64_t bytes_;
  const CudaAllocation allocation_;
  CudaAddress address_ = 0;
  bool reserved_ = false;
  bool mapped_ = false;
};

// Polls the event. DEADLINE_EXCEEDED after `timeout`; errors of IsDone.
absl::Status AwaitDone(CudaDevice& device, CudaEvent event, absl::Duration timeout);

}  // namespace kvtier
