// SPDX-License-Identifier: Apache-2.0
#include "tiers/cuda/fake_driver.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "proto/base/check.h"
#include "proto/base/status_util.h"

namespace kvtier {

// All state is the driver's: one process has one view of a card.
class FakeCudaDevice final : public CudaDevice {
 public:
  FakeCudaDevice(FakeCudaDriver* driver, CudaDeviceInfo info)
      : driver_(*driver), info_(std::move(info)) {}

  const CudaDeviceInfo& info() const override { return info_; }
  absl::StatusOr<uint64_t> Granularity() override {
    KVT_RETURN_IF_ERROR(CheckSharable(info_));
    return driver_.options_.granularity_bytes;
  }
  absl::StatusOr<CudaAllocation> Allocate(uint64_t bytes) override {
    KVT_RETURN_IF_ERROR(CheckSharable(info_));
    return driver_.Allocate(bytes);
  }
  absl::StatusOr<int> ExportFd(CudaAllocation allocation) override {
    return driver_.ExportFd(allocation);
  }
  absl::StatusOr<CudaAllocation> ImportFd(int fd) override {
    KVT_RETURN_IF_ERROR(CheckSharable(info_));
    return driver_.ImportFd(fd);
  }
  absl::Status ReleaseAllocation(CudaAllocation allocation) override {
    return driver_.ReleaseAllocation(allocation);
  }
  absl::StatusOr<CudaAddress> ReserveAddresses(uint64_t bytes) override {
    return driver_.ReserveAddresses(bytes);
  }
  absl::Status FreeAddresses(CudaAddress address, uint64_t bytes) override {
    return driver_.FreeAddresses(address, bytes);
  }
  absl::Status Map(CudaAddress address, uint64_t bytes, CudaAllocation allocation) override {
    return driver_.Map(address, bytes, allocation);
  }
  absl::Status Unmap(CudaAddress address, uint64_t bytes) override {
    return driver_.Unmap(address, bytes);
  }
  absl::Status RegisterHost(std::span<std::byte> pages) override {
    return driver_.RegisterHost(pages);
  }
  absl::Status UnregisterHost(std::span<std::byte> pages) override {
    return driver_.UnregisterHost(pages);
  }
  absl::StatusOr<CudaStream> CreateStream(Priority) override { return driver_.CreateStream(); }
  absl::Status DestroyStream(CudaStream stream) override { return driver_.DestroyStream(stream); }
  absl::StatusOr<CudaEvent> CreateEvent() override { return driver_.CreateEvent(); }
  absl::Status DestroyEvent(CudaEvent event) override { return driver_.DestroyEvent(event); }
  absl::Status CopyToDevice(CudaAddress target, std::span<const std::byte> source,
                            CudaStream stream) override {
    // Only read from.
    const std::span<std::byte> host(const_cast<std::byte*>(source.data()), source.size());
    return driver_.CopyAll({{{.address = target, .host = host}}}, true, stream);
  }
  absl::Status CopyToHost(std::span<std::byte> target, CudaAddress source,
                          CudaStream stream) override {
    return driver_.CopyAll({{{.address = source, .host = target}}}, false, stream);
  }
  absl::Status CopyAllToDevice(std::span<const CudaHostCopy> copies, CudaStream stream) override {
    return driver_.CopyAll(copies, true, stream);
  }
  absl::Status CopyAllToHost(std::span<const CudaHostCopy> copies, CudaStream stream) override {
    return driver_.CopyAll(copies, false, stream);
  }
  absl::Status Zero(CudaAddress target, uint64_t bytes, CudaStream stream) override {
    return driver_.Zero(target, bytes, stream);
  }
  absl::Status RecordEvent(CudaEvent event, CudaStream stream) override {
    return driver_.RecordEvent(event, stream);
  }
  absl::Status AwaitEvent(CudaStream stream, CudaEvent event) override {
    return driver_.AwaitEvent(stream, event);
  }
  absl::StatusOr<bool> IsDone(CudaEvent event) override { return driver_.IsDone(event); }

 private:
  FakeCudaDriver& driver_;
  const CudaDeviceInfo info_;
};

FakeCudaDriver::~FakeCudaDriver() {
  absl::MutexLock lock(&mutex_);
  for (const auto& [address, mapping] : mappings_) munmap(mapping.shadow, mapping.bytes);
  for (const auto& [address, range] : ranges_) munmap(range.base, range.base_bytes);
  for (const auto& [id, allocation] : allocations_) close(allocation.fd);
}

absl::StatusOr<std::vector<CudaDeviceInfo>> FakeCudaDriver::Devices() {
  absl::MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(Enter("list devices"));
  if (options_.device_count == 0) return Refuse(CudaResult::kNoDevice, "list devices");
  std::vector<CudaDeviceInfo> devices;
  for (int ordinal = 0; ordinal < options_.device_count; ++ordinal) {
    CudaDeviceInfo& info = devices.emplace_back(
        CudaDeviceInfo{.ordinal = ordinal, .total_bytes = options_.total_bytes});
    info.name = "Fake GPU";
    info.uuid.front() = options_.uuid_seed;
    info.uuid.back() = static_cast<uint8_t>(ordinal);
    info.has_vmm = options_.has_vmm;
    info.has_fd_export = options_.has_fd_export;
  }
  return devices;
}

absl::StatusOr<std::unique_ptr<CudaDevice>> FakeCudaDriver::OpenDevice(int ordinal) {
  KVT_ASSIGN_OR_RETURN(const std::vector<CudaDeviceInfo> devices, Devices());
  if (ordinal < 0 || ordinal >= options_.device_count) {
    return Refuse(CudaResult::kInvalidDevice, "open a device");
  }
  return std::make_unique<FakeCudaDevice>(this, devices[static_cast<size_t>(ordinal)]);
}

void FakeCudaDriver::Fail(Call call, int skip_count, int count, CudaResult result) {
  absl::MutexLock lock(&mutex_);
  failures_[call] = {.skip_count = skip_count, .count = count, .result = result};
}

void FakeCudaDriver::CorruptCopies(int count) {
  absl::MutexLock lock(&mutex_);
  corrupt_copy_count_ = count;
}

void FakeCudaDriver::LoseDevice(CudaResult result) {
  absl::MutexLock lock(&mutex_);
  lost_ = result;
  for (auto& [id, stream] : streams_) stream.queue.clear();
}

void FakeCudaDriver::SetForeignBytes(uint64_t bytes) {
  absl::MutexLock lock(&mutex_);
  foreign_bytes_ = bytes;
}

void FakeCudaDriver::HoldWork() {
  absl::MutexLock lock(&mutex_);
  is_holding_ = true;
  for (auto& [id, stream] : streams_) stream.is_held = true;
}

void FakeCudaDriver::ReleaseWork() {
  absl::MutexLock lock(&mutex_);
  is_holding_ = false;
  for (auto& [id, stream] : streams_) stream.is_held = false;
  RunAll();
}

void FakeCudaDriver::ReleaseStream(CudaStream stream) {
  absl::MutexLock lock(&mutex_);
  const auto found = streams_.find(stream);
  KVT_CHECK(found != streams_.end());
  found->second.is_held = false;
  RunAll();
}

std::vector<CudaStream> FakeCudaDriver::BusyStreams() const {
  absl::MutexLock lock(&mutex_);
  std::vector<CudaStream> busy;
  for (const auto& [id, stream] : streams_) {
    if (!stream.queue.empty()) busy.push_back(id);
  }
  return busy;
}

void FakeCudaDriver::AwaitBusyStreams(size_t count) const {
  const auto enough = [this, count]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return static_cast<size_t>(std::ranges::count_if(
               streams_, [](const auto& stream) { return !stream.second.queue.empty(); })) >= count;
  };
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&enough));
}

std::span<std::byte> FakeCudaDriver::DeviceBytes(CudaAddress address, uint64_t bytes) {
  absl::MutexLock lock(&mutex_);
  const auto shadow = Shadow(address, bytes);
  return shadow.ok() ? std::span(*shadow, bytes) : std::span<std::byte>();
}

FakeCudaDriver::Counts FakeCudaDriver::counts() const {
  absl::MutexLock lock(&mutex_);
  return {.allocation = allocations_.size(),
          .address_range = ranges_.size(),
          .mapping = mappings_.size(),
          .registered = registered_.size(),
          .stream = streams_.size() - streams_.count(CudaStream{}),
          .event = events_.size(),
          .unpinned_copy = unpinned_copy_count_};
}

absl::Status FakeCudaDriver::Refuse(CudaResult result, std::string_view what) {
  return CudaStatus(result, "fake result", what);
}

absl::Status FakeCudaDriver::Enter(std::string_view what) { return Refuse(lost_, what); }

absl::Status FakeCudaDriver::Enter(Call call, std::string_view what) {
  KVT_RETURN_IF_ERROR(Enter(what));
  const auto failure = failures_.find(call);
  if (failure == failures_.end()) return absl::OkStatus();
  if (failure->second.skip_count > 0) {
    --failure->second.skip_count;
    return absl::OkStatus();
  }
  if (failure->second.count == 0) return absl::OkStatus();
  --failure->second.count;
  return Refuse(failure->second.result, what);
}

absl::StatusOr<std::byte*> FakeCudaDriver::Shadow(CudaAddress address, uint64_t bytes) {
  auto found = mappings_.upper_bound(address);
  if (found == mappings_.begin()) return Refuse(CudaResult::kInvalidValue, "device address");
  --found;
  const uint64_t offset = address - found->first;
  if (offset > found->second.bytes || bytes > found->second.bytes - offset) {
    return Refuse(CudaResult::kInvalidValue, "device address");
  }
  return found->second.shadow + offset;
}

uint64_t FakeCudaDriver::OwnBytes() const {
  uint64_t bytes = 0;
  for (const auto& [id, allocation] : allocations_) bytes += allocation.own ? allocation.bytes : 0;
  return bytes;
}

bool FakeCudaDriver::IsRegistered(const std::byte* data, uint64_t bytes) const {
  auto found = registered_.upper_bound(data);
  if (found == registered_.begin()) return false;
  --found;
  return data + bytes <= found->first + found->second;
}

absl::StatusOr<CudaAllocation> FakeCudaDriver::Allocate(uint64_t bytes) {
  absl::MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(Enter(Call::kAllocate, "allocate"));
  if (bytes == 0 || bytes % options_.granularity_bytes != 0) {
    return Refuse(CudaResult::kInvalidValue, "allocate");
  }
  if (OwnBytes() + foreign_bytes_ + bytes > options_.total_bytes) {
    return Refuse(CudaResult::kOutOfMemory, "allocate");
  }
  const int fd = memfd_create("fake-gpu", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  KVT_CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(bytes)) == 0);
  // As undefined as the contents of fresh device memory are.
  const std::byte junk{0xDB};
  for (uint64_t at = 0; at < bytes; at += 64 << 10) {
    KVT_CHECK(pwrite(fd, &junk, 1, static_cast<off_t>(at)) == 1);
  }
  allocations_[next_] = {.fd = fd, .bytes = bytes, .own = true};
  return next_++;
}

absl::StatusOr<int> FakeCudaDriver::ExportFd(CudaAllocation allocation) {
  absl::MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(Enter(Call::kExport, "export"));
  const auto found = allocations_.find(allocation);
  if (found == allocations_.end()) return Refuse(CudaResult::kInvalidValue, "export");
  return fcntl(found->second.fd, F_DUPFD_CLOEXEC, 0);
}

absl::StatusOr<CudaAllocation> FakeCudaDriver::ImportFd(int fd) {
  absl::MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(Enter(Call::kImport, "import"));
  struct stat info{};
  // Only memfds have seals.
  if (fcntl(fd, F_GET_SEALS) < 0 || fstat(fd, &info) != 0) {
    return Refuse(CudaResult::kInvalidValue, "import");
  }
  const int own_fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  KVT_CHECK(own_fd >= 0);
  allocations_[next_] = {.fd = own_fd, .bytes = static_cast<uint64_t>(info.st_size)};
  return next_++;
}

void FakeCudaDriver::DropIfUnused(CudaAllocation allocation) {
  const auto found = allocations_.find(allocation);
  if (found->second.held || found->second.map_count > 0) return;
  close(found->second.fd);
  allocations_.erase(found);
}

absl::Status FakeCudaDriver::ReleaseAllocation(CudaAllocation allocation) {
  absl::MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(Enter("release"));
  const auto found = allocations_.find(allocation);
  if (found == allocations_.end() || !found->second.held) {
    return Refuse(CudaResult::kInvalidValue, "release");
  }
  found->second.held = false;
  DropIfUnused(allocation);
  return absl::OkStatus();
}

absl::StatusOr<CudaAddress> FakeCudaDriver::ReserveAddresses(uint64_t bytes) {
  absl::MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(Enter(Call::kReserveAddresses, "reserve addresses"));
  if (bytes == 0 || bytes % options_.granularity_bytes != 0) {
    return Refuse(CudaResult::kInvalidValue, "reserve addresses");
  }
  // Never accessible: the CPU does not reach device memory.
  AddressRange range{.base_bytes = bytes + options_.granularity_bytes, .bytes = bytes};
  range.base = mmap(nullptr, range.base_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  KVT_CHECK(range.base != MAP_FAILED);
  const auto base = reinterpret_cast<CudaAddress>(range.base);
  const CudaAddress address = (base + options_.granularity_bytes - 1) / options_.granularity_bytes *
                              options_.granularity_bytes;
  ranges_[address] = range;
  return address;
}

absl::Status FakeCudaDriver::FreeAddresses(CudaAddress address, uint64_t bytes) {
  absl::MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(Enter("free addresses"));
  const auto found = ranges_.find(address);
  if (found == ranges_.end() || found->second.bytes != bytes || mappings_.contains(address)) {
    return Refuse(CudaResult::kInvalidValue, "free addresses");
  }
  munmap(found->second.base, found->second.base_bytes);
  ranges_.erase(found);
  return absl::OkStatus();
}

absl::Status FakeCudaDriver::Map(CudaAddress address, uint64_t bytes, CudaAllocation allocation) {
  absl::MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(Enter(Call::kMap, "map"));
  const auto range = ranges_.find(address);
  const auto memory = allocations_.find(allocation);
  if (range == ranges_.end() || range->second.bytes < bytes || mappings_.contains(address) ||
      memory == allocations_.end() || !memory->second.held || memory->second.bytes != bytes) {
    return Refuse(CudaResult::kInvalidValue, "map");
  }
  void* const shadow =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory->second.fd, 0);
  KVT_CHECK(shadow != MAP_FAILED);
  ++memory->second.map_count;
  mappings_[address] = {
      .bytes = bytes, .allocation = allocation, .shadow = static_cast<std::byte*>(shadow)};
  return absl::OkStatus();
}

absl::Status FakeCudaDriver::Unmap(CudaAddress address, uint64_t bytes) {
  absl::MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(Enter("unmap"));
  const auto found = mappings_.find(address);
  if (found == mappings_.end() || found->second.bytes != bytes) {
    return Refuse(CudaResult::kInvalidValue, "unmap");
  }
  munmap(found->second.shadow, bytes);
  const CudaAllocation allocation = found->second.allocation;
  mappings_.erase(found);
  --allocations_.at(allocation).map_count;
  DropIfUnused(allocation);
  return absl::OkStatus();
}

absl::Status FakeCudaDriver::RegisterHost(std::span<std::byte> pages) {
  absl::MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(Enter(Call::kRegisterHost, "register"));
  if (pages.empty() || reinterpret_cast<uintptr_t>(pages.data()) % 4096 != 0 ||
      pages.size() % 4096 != 0 || !registered_.emplace(pages.data(), pages.size()).second) {
    return Refuse(CudaResult::kInvalidValue, "register");
  }
  return absl::OkStatus();
}

absl::Status FakeCudaDriver::UnregisterHost(std::span<std::byte> pages) {
  absl::MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(Enter("unregister"));
  if (registered_.erase(pages.data()) == 0) return Refuse(CudaResult::kInvalidValue, "unregister");
  return absl::OkStatus();
}

absl::StatusOr<CudaStream> FakeCudaDriver::CreateStream() {
  absl::MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(Enter(Call::kCreateStream, "create a stream"));
  const auto stream = static_cast<CudaStream>(next_++);
  streams_[stream].is_held = is_holding_;
  return stream;
}

absl::Status FakeCudaDriver::DestroyStream(CudaStream stream) {
  absl::MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(Enter("destroy a stream"));
  if (streams_.erase(stream) == 0) return Refuse(CudaResult::kInvalidHandle, "destroy a stream");
  return absl::OkStatus();
}

absl::StatusOr<CudaEvent> FakeCudaDriver::CreateEvent() {
  absl::MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(Enter(Call::kCreateEvent, "create an event"));
  const auto event = static_cast<CudaEvent>(next_++);
  events_[event] = {};
  return event;
}

absl::Status FakeCudaDriver::DestroyEvent(CudaEvent event) {
  absl::MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(Enter("destroy an event"));
  if (events_.erase(event) == 0) return Refuse(CudaResult::kInvalidHandle, "destroy an event");
  return absl::OkStatus();
}

absl::Status FakeCudaDriver::CopyAll(std::span<const CudaHostCopy> copies, bool to_device,
                                     CudaStream stream) {
  absl::MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(Enter(Call::kCopy, "copy"));
  if (copies.size() > 1) ++batch_count_;
  for (const CudaHostCopy& copy : copies) {
    KVT_RETURN_IF_ERROR(EnqueueCopy(copy, to_device, stream));
  }
  return absl::OkStatus();
}

absl::Status FakeCudaDriver::EnqueueCopy(const CudaHostCopy& copy, bool to_device,
                                         CudaStream stream) {
  const size_t bytes = copy.host.size();
  std::byte* const host = copy.host.data();
  KVT_ASSIGN_OR_RETURN(std::byte* const shadow, Shadow(copy.address, bytes));
  if (!IsRegistered(host, bytes)) ++unpinned_copy_count_;
  const bool corrupt = corrupt_copy_count_ > 0;
  if (corrupt) --corrupt_copy_count_;
  return Enqueue(stream, [=] {
    std::byte* const target = to_device ? shadow : host;
    std::memcpy(target, to_device ? host : shadow, bytes);
    if (corrupt) target[bytes / 2] ^= std::byte{1};
    return true;
  });
}

size_t FakeCudaDriver::batch_count() const {
  absl::MutexLock lock(&mutex_);
  return batch_count_;
}

absl::Status FakeCudaDriver::Zero(CudaAddress target, uint64_t bytes, CudaStream stream) {
  absl::MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(Enter(Call::kZero, "zero"));
  KVT_ASSIGN_OR_RETURN(std::byte* const shadow, Shadow(target, bytes));
  return Enqueue(stream, [=] {
    std::memset(shadow, 0, bytes);
    return true;
  });
}

absl::Status FakeCudaDriver::RecordEvent(CudaEvent event, CudaStream stream) {
  absl::MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(Enter(Call::kRecordEvent, "record an event"));
  const auto found = events_.find(event);
  if (found == events_.end()) return Refuse(CudaResult::kInvalidHandle, "record an event");
  const uint64_t recorded = ++found->second.recorded;
  return Enqueue(stream, [this, event, recorded]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (const auto reached = events_.find(event); reached != events_.end()) {
      reached->second.reached = recorded;
    }
    return true;
  });
}

absl::Status FakeCudaDriver::AwaitEvent(CudaStream stream, CudaEvent event) {
  absl::MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(Enter("await an event"));
  const auto found = events_.find(event);
  if (found == events_.end()) return Refuse(CudaResult::kInvalidHandle, "await an event");
  const uint64_t recorded = found->second.recorded;
  return Enqueue(stream, [this, event, recorded]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    const auto waited = events_.find(event);
    return waited == events_.end() || waited->second.reached >= recorded;
  });
}

absl::StatusOr<bool> FakeCudaDriver::IsDone(CudaEvent event) {
  absl::MutexLock lock(&mutex_);
  KVT_RETURN_IF_ERROR(Enter(Call::kIsDone, "query an event"));
  const auto found = events_.find(event);
  if (found == events_.end()) return Refuse(CudaResult::kInvalidHandle, "query an event");
  return found->second.reached == found->second.recorded;
}

absl::Status FakeCudaDriver::Enqueue(CudaStream stream, Work work) {
  // The legacy default stream is always there.
  if (stream == CudaStream{}) streams_[stream].is_held = is_holding_;
  const auto found = streams_.find(stream);
  if (found == streams_.end()) return Refuse(CudaResult::kInvalidHandle, "enqueue");
  found->second.queue.push_back(std::move(work));
  RunAll();
  return absl::OkStatus();
}

void FakeCudaDriver::RunAll() {
  for (bool progress = true; progress;) {
    progress = false;
    for (auto& [id, stream] : streams_) {
      if (stream.is_held || stream.queue.empty() || !stream.queue.front()()) continue;
      stream.queue.pop_front();
      progress = true;
    }
  }
}

}  // namespace kvtier
