// SPDX-License-Identifier: Apache-2.0
//
// A shared library with the symbols of libcuda.so.1 that real_driver.cc looks up, over the fake
// card: it runs that file's calls where there is no GPU, and is as strict as a driver about flags,
// structures and the current context.
// Compiled with KVTIER_STAND_IN_VERSION: the driver's version, which decides what functions it has.
//   KVTIER_STAND_IN_QUERIES=n   after n queries of events, every call fails like one on a GPU with
//                               an uncorrectable memory error
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

#include "tiers/cuda/driver_abi.h"
#include "tiers/cuda/fake_driver.h"
#include "tiers/cuda/result.h"

namespace {

using kvtier::CudaDevice;
using kvtier::CudaEvent;
using kvtier::CudaResult;
using kvtier::CudaStream;
using kvtier::FakeCudaDriver;
namespace driver = kvtier::cuda_abi;

FakeCudaDriver& Card() {
  static FakeCudaDriver card;
  return card;
}

CudaDevice& Gpu() {
  static const std::unique_ptr<CudaDevice> gpu = Card().OpenDevice(0).value();
  return *gpu;
}

int g_retain_count = 0;
thread_local std::vector<driver::Context> g_contexts;

driver::Context PrimaryContext() {
  static char object;
  return reinterpret_cast<driver::Context>(&object);
}

CudaResult ResultOf(const absl::Status& status) {
  if (status.ok()) return CudaResult::kSuccess;
  if (kvtier::IsDeviceLost(status)) return CudaResult::kEccUncorrectable;
  return absl::IsResourceExhausted(status) ? CudaResult::kOutOfMemory : CudaResult::kInvalidValue;
}

// What a call in the current context answers.
template <typename Function>
CudaResult InContext(Function function) {
  if (g_contexts.empty() || g_contexts.back() != PrimaryContext()) {
    return CudaResult::kInvalidContext;
  }
  return ResultOf(function(Gpu()));
}

template <typename Handle, typename Made>
absl::Status Take(absl::StatusOr<Made> made, Handle* handle) {
  if (made.ok()) {
    if constexpr (std::is_pointer_v<Handle>) {
      *handle = reinterpret_cast<Handle>(static_cast<uintptr_t>(*made));
    } else {
      *handle = *made;
    }
  }
  return made.status();
}

bool IsSharableProp(const driver::AllocationProp* prop) {
  return prop->type == 1 && prop->requested_handle_types == driver::kHandleTypePosixFd &&
         prop->location.type == 1 && prop->location.id == 0 &&
         prop->win32_handle_meta_data == nullptr;
}

CudaStream StreamOf(driver::Stream stream) {
  return static_cast<CudaStream>(reinterpret_cast<uintptr_t>(stream));
}
CudaEvent EventOf(driver::Event event) {
  return static_cast<CudaEvent>(reinterpret_cast<uintptr_t>(event));
}

#if KVTIER_STAND_IN_VERSION >= 12080
bool g_batches_are_supported = true;

// Of one direction; which addresses are the host's is for the card to tell.
CudaResult CopyBatch(const driver::DeviceAddress* targets, const driver::DeviceAddress* sources,
                     std::span<const size_t> sizes,
                     std::span<const driver::MemcpyAttributes> attributes,
                     const size_t* attribute_starts, driver::Stream stream) {
  if (!g_batches_are_supported) return CudaResult::kNotSupported;
  if (attributes.size() != 1 || attribute_starts[0] != 0 || stream == nullptr ||
      attributes[0].source_access_order != 1 || attributes[0].flags > 1) {
    return CudaResult::kInvalidValue;
  }
  std::vector<kvtier::CudaHostCopy> copies;
  const bool to_device = !Card().DeviceBytes(targets[0], 1).empty();
  for (size_t i = 0; i < sizes.size(); ++i) {
    auto* const host = reinterpret_cast<std::byte*>(to_device ? sources[i] : targets[i]);
    copies.push_back({.address = to_device ? targets[i] : sources[i], .host = {host, sizes[i]}});
  }
  return InContext([&](CudaDevice& gpu) {
    return to_device ? gpu.CopyAllToDevice(copies, StreamOf(stream))
                     : gpu.CopyAllToHost(copies, StreamOf(stream));
  });
}
#endif

}  // namespace

extern "C" {

// For tests: contexts that this thread has left current, and times the primary one is retained.
int StandInContextDepth() { return static_cast<int>(g_contexts.size()); }
int StandInRetainCount() { return g_retain_count; }
// For tests: copies in batches that came so far; and batches are supported no more.
int StandInBatchCount() { return static_cast<int>(Card().batch_count()); }
#if KVTIER_STAND_IN_VERSION >= 12080
int StandInRefuseBatches() {
  g_batches_are_supported = false;
  return 0;
}
#endif

CudaResult cuInit(uint32_t flags) {
  return flags == 0 ? CudaResult::kSuccess : CudaResult::kInvalidValue;
}
CudaResult cuDriverGetVersion(int32_t* version) {
  *version = KVTIER_STAND_IN_VERSION;
  return CudaResult::kSuccess;
}
CudaResult cuGetErrorName(CudaResult result, const char** name) {
  *name = result == CudaResult::kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_STAND_IN";
  return CudaResult::kSuccess;
}
CudaResult cuDeviceGetCount(int32_t* count) {
  *count = 1;
  return CudaResult::kSuccess;
}
CudaResult cuDeviceGet(driver::Device* device, int32_t ordinal) {
  *device = ordinal;
  return ordinal == 0 ? CudaResult::kSuccess : CudaResult::kInvalidDevice;
}
CudaResult cuDeviceGetName(char* name, int32_t name_bytes, driver::Device) {
  std::strncpy(name, "Stand-in", static_cast<size_t>(name_bytes));
  return CudaResult::kSuccess;
}
CudaResult cuDeviceTotalMem_v2(size_t* bytes, driver::Device) {
  *bytes = Gpu().info().total_bytes;
  return CudaResult::kSuccess;
}
CudaResult cuDeviceGetAttribute(int32_t* value, int32_t attribute, driver::Device) {
  *value = attribute == driver::kAttributeVmmSupported ||
           attribute == driver::kAttributeFdExportSupported;
  return CudaResult::kSuccess;
}
CudaResult cuDeviceGetUuid_v2(driver::Uuid* uuid, driver::Device) {
  std::memcpy(uuid->bytes, Gpu().info().uuid.data(), sizeof(uuid->bytes));
  return CudaResult::kSuccess;
}
CudaResult cuDevicePrimaryCtxRetain(driver::Context* context, driver::Device) {
  ++g_retain_count;
  *context = PrimaryContext();
  return CudaResult::kSuccess;
}
CudaResult cuDevicePrimaryCtxRelease_v2(driver::Device) {
  --g_retain_count;
  return CudaResult::kSuccess;
}
CudaResult cuCtxPushCurrent_v2(driver::Context context) {
  g_contexts.push_back(context);
  return CudaResult::kSuccess;
}
CudaResult cuCtxPopCurrent_v2(driver::Context* context) {
  if (g_contexts.empty()) return CudaResult::kInvalidContext;
  *context = g_contexts.back();
  g_contexts.pop_back();
  return CudaResult::kSuccess;
}
CudaResult cuCtxGetStreamPriorityRange(int32_t* least, int32_t* greatest) {
  *least = 0;
  *greatest = -5;
  return CudaResult::kSuccess;
}

CudaResult cuStreamCreateWithPriority(driver::Stream* stream, uint32_t flags, int32_t priority) {
  if (flags != driver::kStreamNonBlocking || priority > 0 || priority < -5) {
    return CudaResult::kInvalidValue;
  }
  return InContext(
      [&](CudaDevice& gpu) { return Take(gpu.CreateStream(CudaDevice::Priority::kHigh), stream); });
}
CudaResult cuStreamDestroy_v2(driver::Stream stream) {
  return InContext([&](CudaDevice& gpu) { return gpu.DestroyStream(StreamOf(stream)); });
}
CudaResult cuStreamWaitEvent(driver::Stream stream, driver::Event event, uint32_t flags) {
  if (flags != 0) return CudaResult::kInvalidValue;
  return InContext(
      [&](CudaDevice& gpu) { return gpu.AwaitEvent(StreamOf(stream), EventOf(event)); });
}
CudaResult cuEventCreate(driver::Event* event, uint32_t flags) {
  if (flags != driver::kEventDisableTiming) return CudaResult::kInvalidValue;
  return InContext([&](CudaDevice& gpu) { return Take(gpu.CreateEvent(), event); });
}
CudaResult cuEventDestroy_v2(driver::Event event) {
  return InContext([&](CudaDevice& gpu) { return gpu.DestroyEvent(EventOf(event)); });
}
CudaResult cuEventRecord(driver::Event event, driver::Stream stream) {
  return InContext(
      [&](CudaDevice& gpu) { return gpu.RecordEvent(EventOf(event), StreamOf(stream)); });
}
CudaResult cuEventQuery(driver::Event event) {
  static const char* const limit = std::getenv("KVTIER_STAND_IN_QUERIES");
  static std::atomic<long> query_count = 0;
  if (limit != nullptr && ++query_count > std::strtol(limit, nullptr, 10)) Card().LoseDevice();
  bool done = false;
  const CudaResult result =
      InContext([&](CudaDevice& gpu) { return Take(gpu.IsDone(EventOf(event)), &done); });
  if (result != CudaResult::kSuccess) return result;
  return done ? CudaResult::kSuccess : CudaResult::kNotReady;
}

CudaResult cuMemcpyHtoDAsync_v2(driver::DeviceAddress target, const void* source, size_t bytes,
                                driver::Stream stream) {
  const std::span<const std::byte> host(static_cast<const std::byte*>(source), bytes);
  return InContext(
      [&](CudaDevice& gpu) { return gpu.CopyToDevice(target, host, StreamOf(stream)); });
}
CudaResult cuMemcpyDtoHAsync_v2(void* target, driver::DeviceAddress source, size_t bytes,
                                driver::Stream stream) {
  const std::span<std::byte> host(static_cast<std::byte*>(target), bytes);
  return InContext([&](CudaDevice& gpu) { return gpu.CopyToHost(host, source, StreamOf(stream)); });
}
#if KVTIER_STAND_IN_VERSION >= 12080
CudaResult cuMemcpyBatchAsync(driver::DeviceAddress* targets, driver::DeviceAddress* sources,
                              size_t* sizes, size_t count, driver::MemcpyAttributes* attributes,
                              size_t* attribute_starts, size_t attribute_count,
                              size_t* /*failed_idx*/, driver::Stream stream) {
  return CopyBatch(targets, sources, {sizes, count}, {attributes, attribute_count},
                   attribute_starts, stream);
}
#endif
#if KVTIER_STAND_IN_VERSION >= 13000
CudaResult cuMemcpyBatchAsync_v2(driver::DeviceAddress* targets, driver::DeviceAddress* sources,
                                 size_t* sizes, size_t count, driver::MemcpyAttributes* attributes,
                                 size_t* attribute_starts, size_t attribute_count,
                                 driver::Stream stream) {
  return CopyBatch(targets, sources, {sizes, count}, {attributes, attribute_count},
                   attribute_starts, stream);
}
#endif
CudaResult cuMemsetD8Async(driver::DeviceAddress target, uint8_t value, size_t bytes,
                           driver::Stream stream) {
  if (value != 0) return CudaResult::kInvalidValue;
  return InContext([&](CudaDevice& gpu) { return gpu.Zero(target, bytes, StreamOf(stream)); });
}
CudaResult cuMemHostRegister_v2(void* pages, size_t bytes, uint32_t flags) {
  if (flags != driver::kHostRegisterPortable) return CudaResult::kInvalidValue;
  return InContext(
      [&](CudaDevice& gpu) { return gpu.RegisterHost({static_cast<std::byte*>(pages), bytes}); });
}
CudaResult cuMemHostUnregister(void* pages) {
  return InContext(
      [&](CudaDevice& gpu) { return gpu.UnregisterHost({static_cast<std::byte*>(pages), 1}); });
}

CudaResult cuMemGetAllocationGranularity(size_t* bytes, const driver::AllocationProp* prop,
                                         int32_t option) {
  if (!IsSharableProp(prop) || option != driver::kGranularityMinimum)
    return CudaResult::kInvalidValue;
  return InContext([&](CudaDevice& gpu) { return Take(gpu.Granularity(), bytes); });
}
CudaResult cuMemCreate(driver::AllocationHandle* handle, size_t bytes,
                       const driver::AllocationProp* prop, unsigned long long flags) {
  if (!IsSharableProp(prop) || flags != 0) return CudaResult::kInvalidValue;
  return InContext([&](CudaDevice& gpu) { return Take(gpu.Allocate(bytes), handle); });
}
CudaResult cuMemRelease(driver::AllocationHandle handle) {
  return InContext([&](CudaDevice& gpu) { return gpu.ReleaseAllocation(handle); });
}
CudaResult cuMemExportToShareableHandle(void* fd, driver::AllocationHandle handle,
                                        int32_t handle_type, unsigned long long flags) {
  if (handle_type != driver::kHandleTypePosixFd || flags != 0) return CudaResult::kInvalidValue;
  return InContext(
      [&](CudaDevice& gpu) { return Take(gpu.ExportFd(handle), static_cast<int*>(fd)); });
}
CudaResult cuMemImportFromShareableHandle(driver::AllocationHandle* handle, void* fd,
                                          int32_t handle_type) {
  if (handle_type != driver::kHandleTypePosixFd) return CudaResult::kInvalidValue;
  const int number = static_cast<int>(reinterpret_cast<uintptr_t>(fd));
  return InContext([&](CudaDevice& gpu) { return Take(gpu.ImportFd(number), handle); });
}
CudaResult cuMemAddressReserve(driver::DeviceAddress* address, size_t bytes, size_t alignment,
                               driver::DeviceAddress wish, unsigned long long flags) {
  if (alignment != 0 || wish != 0 || flags != 0) return CudaResult::kInvalidValue;
  return InContext([&](CudaDevice& gpu) { return Take(gpu.ReserveAddresses(bytes), address); });
}
CudaResult cuMemAddressFree(driver::DeviceAddress address, size_t bytes) {
  return InContext([&](CudaDevice& gpu) { return gpu.FreeAddresses(address, bytes); });
}
CudaResult cuMemMap(driver::DeviceAddress address, size_t bytes, size_t offset,
                    driver::AllocationHandle handle, unsigned long long flags) {
  if (offset != 0 || flags != 0) return CudaResult::kInvalidValue;
  return InContext([&](CudaDevice& gpu) { return gpu.Map(address, bytes, handle); });
}
CudaResult cuMemUnmap(driver::DeviceAddress address, size_t bytes) {
  return InContext([&](CudaDevice& gpu) { return gpu.Unmap(address, bytes); });
}
CudaResult cuMemSetAccess(driver::DeviceAddress address, size_t bytes,
                          const driver::AccessDesc* descs, size_t desc_count) {
  const bool good = desc_count == 1 && descs->location.type == 1 && descs->location.id == 0 &&
                    descs->flags == 3 && !Card().DeviceBytes(address, bytes).empty();
  return good ? CudaResult::kSuccess : CudaResult::kInvalidValue;
}

}  // extern "C"
