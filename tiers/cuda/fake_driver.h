// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "tiers/cuda/driver.h"
#include "tiers/cuda/result.h"

namespace kvtier {

// One process's view of a card, in host memory, for tests: allocations are memfds, so that what one
// fake exports another one (of the same uuid seed) imports. The CPU cannot touch device addresses,
// as on a card: a stray access faults; DeviceBytes is the test's way in. Thread-safe, and may be
// scripted while in use. Work runs inside the call that enqueues it, until HoldWork.
class FakeCudaDriver final : public CudaDriver {
 public:
  struct Options {
    int device_count = 1;
    // Of each device; allocations beyond it are out of memory.
    uint64_t total_bytes = 256ULL << 20;
    uint64_t granularity_bytes = 64ULL << 10;
    bool has_vmm = true;
    bool has_fd_export = true;
    // First byte of the uuids; the ordinal is the last.
    uint8_t uuid_seed = 0xA0;
  };
  FakeCudaDriver() : FakeCudaDriver(Options{}) {}
  explicit FakeCudaDriver(const Options& options) : options_(options) {}
  // Unmaps what is left; the counts below say what that is.
  ~FakeCudaDriver() override;

  absl::StatusOr<std::vector<CudaDeviceInfo>> Devices() override;
  absl::StatusOr<std::unique_ptr<CudaDevice>> OpenDevice(int ordinal) override;

  enum class Call : uint8_t {
    kAllocate,
    kExport,
    kImport,
    kReserveAddresses,
    kMap,
    kRegisterHost,
    kCreateStream,
    kCreateEvent,
    kCopy,
    kZero,
    kRecordEvent,
    kIsDone,
  };
  // Lets `skip_count` calls of this kind pass, then fails `count` of them.
  void Fail(Call call, int skip_count, int count, CudaResult result);
  // The next `count` copies flip a byte and say nothing.
  void CorruptCopies(int count);
  // Every call from now on answers `result`, one that sticks; queued work is never done.
  void LoseDevice(CudaResult result = CudaResult::kIllegalAddress);
  // Memory that other processes hold.
  void SetForeignBytes(uint64_t bytes);

  // Streams keep what they are given, until they are released.
  void HoldWork();
  // Runs everything held, and holds no more.
  void ReleaseWork();
  // The same for one stream, which still waits for the events it was told to.
  void ReleaseStream(CudaStream stream);
  // Streams with held work, in the order of their creation.
  std::vector<CudaStream> BusyStreams() const;
  // Blocks until that many streams have held work.
  void AwaitBusyStreams(size_t count) const;

  // The memory behind mapped addresses, for a test that plays a kernel. Empty when not mapped.
  std::span<std::byte> DeviceBytes(CudaAddress address, uint64_t bytes);

  struct Counts {
    size_t allocation = 0;
    size_t address_range = 0;
    size_t mapping = 0;
    size_t registered = 0;
    size_t stream = 0;
    size_t event = 0;
    // Copies from or to host memory that was not registered: they would not be asynchronous.
    size_t unpinned_copy = 0;
    friend bool operator==(const Counts&, const Counts&) = default;
  };
  Counts counts() const;
  // Calls so far that copied more than one range.
  size_t batch_count() const;

 private:
  friend class FakeCudaDevice;

  struct Allocation {
    int fd = -1;
    uint64_t bytes = 0;
    // Counts against total_bytes.
    bool own = false;
    bool held = true;
    int map_count = 0;
  };
  struct Mapping {
    uint64_t bytes = 0;
    CudaAllocation allocation = 0;
    // The fake's own way to the memory.
    std::byte* shadow = nullptr;
  };
  struct AddressRange {
    void* base = nullptr;
    uint64_t base_bytes = 0;
    uint64_t bytes = 0;
  };
  struct Event {
    // Counts RecordEvent calls, and the last one that was reached.
    uint64_t recorded = 0;
    uint64_t reached = 0;
  };
  // Runs one piece of work; false: not yet, the stream waits.
  using Work = std::function<bool()>;
  struct Stream {
    std::deque<Work> queue;
    bool is_held = false;
  };
  struct Failure {
    int skip_count = 0;
    int count = 0;
    CudaResult result = CudaResult::kSuccess;
  };

  // The status with which a call begins: lost, scripted, or OK.
  absl::Status Enter(std::string_view what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Enter(Call call, std::string_view what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static absl::Status Refuse(CudaResult result, std::string_view what);
  absl::StatusOr<std::byte*> Shadow(CudaAddress address, uint64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  uint64_t OwnBytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsRegistered(const std::byte* data, uint64_t bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropIfUnused(CudaAllocation allocation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Enqueue(CudaStream stream, Work work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whatever streams that are not held can run now.
  void RunAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // CudaDevice, by ordinal where it matters.
  absl::StatusOr<CudaAllocation> Allocate(uint64_t bytes);
  absl::StatusOr<int> ExportFd(CudaAllocation allocation);
  absl::StatusOr<CudaAllocation> ImportFd(int fd);
  absl::Status ReleaseAllocation(CudaAllocation allocation);
  absl::StatusOr<CudaAddress> ReserveAddresses(uint64_t bytes);
  absl::Status FreeAddresses(CudaAddress address, uint64_t bytes);
  absl::Status Map(CudaAddress address, uint64_t bytes, CudaAllocation allocation);
  absl::Status Unmap(CudaAddress address, uint64_t bytes);
  absl::Status RegisterHost(std::span<std::byte> pages);
  absl::Status UnregisterHost(std::span<std::byte> pages);
  absl::StatusOr<CudaStream> CreateStream();
  absl::Status DestroyStream(CudaStream stream);
  absl::StatusOr<CudaEvent> CreateEvent();
  absl::Status DestroyEvent(CudaEvent event);
  absl::Status CopyAll(std::span<const CudaHostCopy> copies, bool to_device, CudaStream stream);
  absl::Status EnqueueCopy(const CudaHostCopy& copy, bool to_device, CudaStream stream)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Zero(CudaAddress target, uint64_t bytes, CudaStream stream);
  absl::Status RecordEvent(CudaEvent event, CudaStream stream);
  absl::Status AwaitEvent(CudaStream stream, CudaEvent event);
  absl::StatusOr<bool> IsDone(CudaEvent event);

  const Options options_;
  mutable absl::Mutex mutex_;
  CudaResult lost_ ABSL_GUARDED_BY(mutex_) = CudaResult::kSuccess;
  std::map<Call, Failure> failures_ ABSL_GUARDED_BY(mutex_);
  int corrupt_copy_count_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t foreign_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  // Of streams that are yet to be made.
  bool is_holding_ ABSL_GUARDED_BY(mutex_) = false;
  size_t unpinned_copy_count_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t batch_count_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<CudaAllocation, Allocation> allocations_ ABSL_GUARDED_BY(mutex_);
  std::map<CudaAddress, AddressRange> ranges_ ABSL_GUARDED_BY(mutex_);
  std::map<CudaAddress, Mapping> mappings_ ABSL_GUARDED_BY(mutex_);
  std::map<const std::byte*, uint64_t> registered_ ABSL_GUARDED_BY(mutex_);
  std::map<CudaStream, Stream> streams_ ABSL_GUARDED_BY(mutex_);
  std::map<CudaEvent, Event> events_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtier
