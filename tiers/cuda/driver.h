// SPDX-License-Identifier: Apache-2.0
//
// The thin seam to the CUDA driver: what the daemon's hbm tier and the client library ask of a GPU,
// and nothing more. OpenCudaDriver (real_driver.h) is the real one, FakeCudaDriver (fake_driver.h)
// a card in memory for tests.
//
// Errors of every call, mapped in one place (result.h):
//   RESOURCE_EXHAUSTED   out of device memory
//   INVALID_ARGUMENT     the caller's bug, or an object of another device
//   UNIMPLEMENTED        the device, its driver or this container cannot do it
//   FAILED_PRECONDITION  no device, or a driver that does not start
//   INTERNAL             anything else; IsDeviceLost(status) tells the errors that stick: from then
//                        on every call of this process on this device fails, until it ends
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvtier {

using CudaUuid = std::array<uint8_t, 16>;

// "GPU-01020304-0506-...", as nvidia-smi -L prints it.
std::string CudaUuidText(const CudaUuid& uuid);

// Plain value.
struct CudaDeviceInfo {
  int ordinal = 0;
  CudaUuid uuid{};
  std::string name = {};
  uint64_t total_bytes = 0;
  // Virtual memory management: the CuMem calls below.
  bool has_vmm = false;
  // Its allocations can be exported as POSIX file descriptors.
  bool has_fd_export = false;
};

// Names of the driver's objects; the values are its handles. They are no owners.
using CudaAddress = uint64_t;
using CudaAllocation = uint64_t;
enum class CudaStream : uintptr_t {};
enum class CudaEvent : uintptr_t {};

// A range of device memory and the registered host memory that it is copied to or from. A copy may
// not go from one registration into the next.
struct CudaHostCopy {
  CudaAddress address = 0;
  std::span<std::byte> host = {};
};

// One device, with its primary context (the one that the runtime API and so PyTorch use) retained.
// Thread-safe: each call makes that context current for its own duration and leaves the calling
// thread's as it was. Calls named Copy*, Zero, RecordEvent and AwaitEvent only enqueue; none of the
// others waits for work on the device, but allocation and mapping enter the kernel and may take
// milliseconds. Streams run in order; nothing orders two streams but events. Destroyed after
// everything that was made with it; that releases the context.
class CudaDevice {
 public:
  virtual ~CudaDevice() = default;

  virtual const CudaDeviceInfo& info() const = 0;

  // --- memory: allocate or import, reserve addresses, map, allow access; undone in reverse ---
  // Sizes and alignments of all of these are multiples of this.
  virtual absl::StatusOr<uint64_t> Granularity() = 0;
  // Exportable as a file descriptor. Contents are undefined.
  virtual absl::StatusOr<CudaAllocation> Allocate(uint64_t bytes) = 0;
  // A descriptor of the caller's own, which names the allocation in any process of this machine.
  virtual absl::StatusOr<int> ExportFd(CudaAllocation allocation) = 0;
  // `fd` stays the caller's, and may be closed afterwards.
  virtual absl::StatusOr<CudaAllocation> ImportFd(int fd) = 0;
  // The memory is freed once no process holds, maps or has a descriptor of it.
  virtual absl::Status ReleaseAllocation(CudaAllocation allocation) = 0;
  virtual absl::StatusOr<CudaAddress> ReserveAddresses(uint64_t bytes) = 0;
  virtual absl::Status FreeAddresses(CudaAddress address, uint64_t bytes) = 0;
  // All of `allocation`, readable and writable by this device.
  virtual absl::Status Map(CudaAddress address, uint64_t bytes, CudaAllocation allocation) = 0;
  // Requires: no work that touches the range is in flight.
  virtual absl::Status Unmap(CudaAddress address, uint64_t bytes) = 0;

  // Pins whole pages of host memory, so that copies from and to them are asynchronous.
  virtual absl::Status RegisterHost(std::span<std::byte> pages) = 0;
  virtual absl::Status UnregisterHost(std::span<std::byte> pages) = 0;

  // --- work ---
  enum class Priority : uint8_t { kHigh, kLow };
  // Does not synchronise with the legacy default stream.
  virtual absl::StatusOr<CudaStream> CreateStream(Priority priority) = 0;
  virtual absl::Status DestroyStream(CudaStream stream) = 0;
  virtual absl::StatusOr<CudaEvent> CreateEvent() = 0;
  virtual absl::Status DestroyEvent(CudaEvent event) = 0;
  // Host memory is registered, and stays so, unchanged or unread, until the copy is done.
  virtual absl::Status CopyToDevice(CudaAddress target, std::span<const std::byte> source,
                                    CudaStream stream) = 0;
  virtual absl::Status CopyToHost(std::span<std::byte> target, CudaAddress source,
                                  CudaStream stream) = 0;
  // Many copies in one call, of ranges that do not overlap, in any order among themselves. One
  // after the other where the driver has no such call (before CUDA 12.8). After an error some of
  // them may be under way. `stream` is one of CreateStream.
  virtual absl::Status CopyAllToDevice(std::span<const CudaHostCopy> copies, CudaStream stream) = 0;
  virtual absl::Status CopyAllToHost(std::span<const CudaHostCopy> copies, CudaStream stream) = 0;
  virtual absl::Status Zero(CudaAddress target, uint64_t bytes, CudaStream stream) = 0;
  // The event is done once all that `stream` was given before is. `stream` may be one that the
  // caller's program made itself with the CUDA runtime.
  virtual absl::Status RecordEvent(CudaEvent event, CudaStream stream) = 0;
  // What `stream` is given from now on waits for the event.
  virtual absl::Status AwaitEvent(CudaStream stream, CudaEvent event) = 0;
  // Does not wait. An error is one of the device, usually one that sticks.
  virtual absl::StatusOr<bool> IsDone(CudaEvent event) = 0;
};

// Thread-safe. Lives until the process ends, or is destroyed after its devices.
class CudaDriver {
 public:
  virtual ~CudaDriver() = default;

  // In the order of their ordinals. Empty is FAILED_PRECONDITION.
  virtual absl::StatusOr<std::vector<CudaDeviceInfo>> Devices() = 0;
  virtual absl::StatusOr<std::unique_ptr<CudaDevice>> OpenDevice(int ordinal) = 0;
};

// UNIMPLEMENTED, saying what is missing, unless memory of the device can be mapped and exported.
absl::Status CheckSharable(const CudaDeviceInfo& info);

}  // namespace kvtier
