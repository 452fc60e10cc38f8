// SPDX-License-Identifier: Apache-2.0
#include "tiers/cuda/owned.h"

#include <sys/mman.h>

#include <cerrno>

#include "proto/base/status_util.h"
#include "proto/base/timed_wait.h"

namespace kvtier {
namespace {

// Between two looks at an event: short against a copy of a block, long against a system call.
constexpr absl::Duration kPollInterval = absl::Microseconds(50);

}  // namespace

absl::StatusOr<OwnedStream> OwnedStream::Create(CudaDevice* device, CudaDevice::Priority priority) {
  KVT_ASSIGN_OR_RETURN(const CudaStream stream, device->CreateStream(priority));
  return OwnedStream(device, stream);
}

OwnedStream::~OwnedStream() {
  if (device_ != nullptr) device_->DestroyStream(stream_).IgnoreError();
}

absl::StatusOr<OwnedEvent> OwnedEvent::Create(CudaDevice* device) {
  KVT_ASSIGN_OR_RETURN(const CudaEvent event, device->CreateEvent());
  return OwnedEvent(device, event);
}

OwnedEvent::~OwnedEvent() {
  if (device_ != nullptr) device_->DestroyEvent(event_).IgnoreError();
}

absl::StatusOr<PinnedPages> PinnedPages::Create(CudaDevice* device, uint64_t bytes) {
  void* const base =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return ErrnoStatus(errno, "mmap of pinned memory");
  const std::span<std::byte> pages(static_cast<std::byte*>(base), bytes);
  if (absl::Status status = device->RegisterHost(pages); !status.ok()) {
    munmap(base, bytes);
    return Annotate(status, absl::StrFormat("pin %d bytes of host memory", bytes));
  }
  return PinnedPages(device, pages);
}

PinnedPages::~PinnedPages() {
  if (pages_.empty()) return;
  device_->UnregisterHost(pages_).IgnoreError();
  munmap(pages_.data(), pages_.size());
}

absl::StatusOr<std::unique_ptr<CudaMemory>> CudaMemory::Allocate(CudaDevice* device,
                                                                 uint64_t bytes) {
  KVT_ASSIGN_OR_RETURN(const CudaAllocation allocation, device->Allocate(bytes));
  std::unique_ptr<CudaMemory> memory(new CudaMemory(device, bytes, allocation));
  KVT_RETURN_IF_ERROR(memory->MapAnywhere());
  return memory;
}

absl::StatusOr<std::unique_ptr<CudaMemory>> CudaMemory::Import(CudaDevice* device, int fd,
                                                               uint64_t bytes) {
  KVT_ASSIGN_OR_RETURN(const CudaAllocation allocation, device->ImportFd(fd));
  std::unique_ptr<CudaMemory> memory(new CudaMemory(device, bytes, allocation));
  KVT_RETURN_IF_ERROR(memory->MapAnywhere());
  return memory;
}

absl::Status CudaMemory::MapAnywhere() {
  KVT_ASSIGN_OR_RETURN(address_, device_->ReserveAddresses(bytes_));
  reserved_ = true;
  KVT_RETURN_IF_ERROR(device_->Map(address_, bytes_, allocation_));
  mapped_ = true;
  return absl::OkStatus();
}

CudaMemory::~CudaMemory() {
  if (mapped_) device_->Unmap(address_, bytes_).IgnoreError();
  if (reserved_) device_->FreeAddresses(address_, bytes_).IgnoreError();
  device_->ReleaseAllocation(allocation_).IgnoreError();
}

absl::Status AwaitDone(CudaDevice& device, CudaEvent event, absl::Duration timeout) {
  const MonotonicTime deadline = MonotonicDeadline(timeout);
  while (true) {
    KVT_ASSIGN_OR_RETURN(const bool done, device.IsDone(event));
    if (done) return absl::OkStatus();
    if (TimeUntil(deadline) <= absl::ZeroDuration()) {
      return DeadlineExceeded("work on the device was not done in %s",
                              FromAbsl(absl::FormatDuration(timeout)));
    }
    absl::SleepFor(kPollInterval);
  }
}

}  // namespace kvtier
