// SPDX-License-Identifier: Apache-2.0
#include "client/src/device_map.h"

#include <algorithm>
#include <string>
#include <utility>

#include "proto/base/crc32c.h"
#include "proto/base/status_util.h"
#include "tiers/cuda/real_driver.h"

namespace kvtier::client {
namespace {

constexpr uint64_t kReaderBytes = 4ULL << 20;

}  // namespace

absl::StatusOr<DeviceMap::Device*> DeviceMap::Find(const CudaUuid& uuid) {
  absl::MutexLock lock(&mutex_);
  for (const auto& [ordinal, device] : devices_) {
    if (device->uuid == uuid) return device.get();
  }
  if (driver_ == nullptr) {
    auto driver = OpenCudaDriver();
    if (!driver.ok()) {
      return Annotate(driver.status(), "hbm of this daemon is in the memory of " +
                                           CudaUuidText(uuid) + ", which must be mapped");
    }
    driver_ = std::move(driver).value();
  }
  KVT_ASSIGN_OR_RETURN(const std::vector<CudaDeviceInfo> infos, driver_->Devices());
  for (const CudaDeviceInfo& info : infos) {
    if (info.uuid != uuid) continue;
    KVT_RETURN_IF_ERROR(CheckSharable(info));
    auto device = std::make_unique<Device>();
    device->uuid = uuid;
    KVT_ASSIGN_OR_RETURN(device->device, driver_->OpenDevice(info.ordinal));
    return devices_.emplace(info.ordinal, std::move(device)).first->second.get();
  }
  return FailedPrecondition(
      "hbm of this daemon is in the memory of %s, which this process does not see "
      "(CUDA_VISIBLE_DEVICES?)",
      CudaUuidText(uuid));
}

absl::StatusOr<DeviceMap::Mapped> DeviceMap::Map(const CudaUuid& uuid, int fd, uint64_t bytes) {
  KVT_ASSIGN_OR_RETURN(Device* const device, Find(uuid));
  Mapped mapped{.device_ordinal = device->device->info().ordinal};
  KVT_ASSIGN_OR_RETURN(mapped.memory, CudaMemory::Import(device->device.get(), fd, bytes));
  return mapped;
}

absl::StatusOr<std::vector<uint32_t>> DeviceMap::Crc32cs(int device_ordinal, CudaStream stream,
                                                         std::span<const CudaAddress> addresses,
                                                         uint64_t bytes, absl::Duration timeout) {
  const MonotonicTime deadline = MonotonicDeadline(timeout);
  Device* device = nullptr;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = devices_.find(device_ordinal);
    if (found == devices_.end()) return Invalid("nothing of device %d is mapped", device_ordinal);
    device = found->second.get();
  }
  absl::MutexLock lock(&device->reader_mutex);
  auto crc32cs = Read(*device, stream, addresses, bytes, deadline);
  if (!crc32cs.ok() && device->reader.has_value()) {
    // A copy may still be on its way into the buffer.
    device->reader->pages.Abandon();
    device->reader.reset();
  }
  return crc32cs;
}

absl::StatusOr<std::vector<uint32_t>> DeviceMap::Read(Device& device, CudaStream stream,
                                                      std::span<const CudaAddress> addresses,
                                                      uint64_t bytes, MonotonicTime deadline) {
  CudaDevice& gpu = *device.device;
  if (!device.reader.has_value()) {
    KVT_ASSIGN_OR_RETURN(OwnedStream own, OwnedStream::Create(&gpu, CudaDevice::Priority::kHigh));
    KVT_ASSIGN_OR_RETURN(OwnedEvent event, OwnedEvent::Create(&gpu));
    KVT_ASSIGN_OR_RETURN(PinnedPages pages, PinnedPages::Create(&gpu, kReaderBytes));
    device.reader.emplace(
        Reader{.stream = std::move(own), .event = std::move(event), .pages = std::move(pages)});
  }
  const Reader& reader = *device.reader;
  KVT_RETURN_IF_ERROR(gpu.RecordEvent(reader.event.get(), stream));
  KVT_RETURN_IF_ERROR(gpu.AwaitEvent(reader.stream.get(), reader.event.get()));
  std::vector<uint32_t> crc32cs;
  crc32cs.reserve(addresses.size());
  for (const CudaAddress address : addresses) {
    uint32_t crc32c = 0;
    for (uint64_t at = 0; at < bytes; at += kReaderBytes) {
      const auto part = reader.pages.bytes().first(std::min(kReaderBytes, bytes - at));
      KVT_RETURN_IF_ERROR(gpu.CopyToHost(part, address + at, reader.stream.get()));
      KVT_RETURN_IF_ERROR(gpu.RecordEvent(reader.event.get(), reader.stream.get()));
      KVT_RETURN_IF_ERROR(AwaitDone(gpu, reader.event.get(), TimeUntil(deadline)));
      crc32c = Crc32c(part, crc32c);
    }
    crc32cs.push_back(crc32c);
  }
  return crc32cs;
}

}  // namespace kvtier::client
