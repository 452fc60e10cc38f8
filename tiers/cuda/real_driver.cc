// SPDX-License-Identifier: Apache-2.0
#include "tiers/cuda/real_driver.h"

#include <dlfcn.h>

#include <atomic>
#include <bit>
#include <cstring>
#include <utility>

#include "proto/base/status_util.h"
#include "tiers/cuda/driver_abi.h"
#include "tiers/cuda/result.h"

namespace kvtier {
namespace {

using cuda_abi::Functions;

absl::Status Check(const Functions& cuda, CudaResult result, std::string_view what) {
  if (result == CudaResult::kSuccess) return absl::OkStatus();
  const char* name = nullptr;
  if (cuda.error_name(result, &name) != CudaResult::kSuccess || name == nullptr) {
    name = "CUDA_ERROR_?";
  }
  return CudaStatus(result, name, what);
}

bool HasVmmFunctions(const Functions& cuda) {
  return cuda.granularity != nullptr && cuda.mem_create != nullptr && cuda.mem_release != nullptr &&
         cuda.mem_export != nullptr && cuda.mem_import != nullptr &&
         cuda.address_reserve != nullptr && cuda.address_free != nullptr &&
         cuda.mem_map != nullptr && cuda.mem_unmap != nullptr && cuda.mem_set_access != nullptr;
}

absl::StatusOr<CudaDeviceInfo> InfoOf(const Functions& cuda, int ordinal) {
  CudaDeviceInfo info{.ordinal = ordinal};
  cuda_abi::Device device = 0;
  KVT_RETURN_IF_ERROR(Check(cuda, cuda.device_get(&device, ordinal), "cuDeviceGet"));
  char name[256] = {};
  KVT_RETURN_IF_ERROR(
      Check(cuda, cuda.device_name(name, sizeof(name) - 1, device), "cuDeviceGetName"));
  info.name = name;
  size_t total_bytes = 0;
  KVT_RETURN_IF_ERROR(
      Check(cuda, cuda.device_total_bytes(&total_bytes, device), "cuDeviceTotalMem"));
  info.total_bytes = total_bytes;
  // Without its uuid no other process can tell which device it is.
  if (!HasVmmFunctions(cuda) || cuda.device_uuid == nullptr) return info;
  cuda_abi::Uuid uuid{};
  KVT_RETURN_IF_ERROR(Check(cuda, cuda.device_uuid(&uuid, device), "cuDeviceGetUuid"));
  std::memcpy(info.uuid.data(), uuid.bytes, sizeof(uuid.bytes));
  const auto has = [&](int32_t attribute) -> absl::StatusOr<bool> {
    int32_t value = 0;
    KVT_RETURN_IF_ERROR(
        Check(cuda, cuda.device_attribute(&value, attribute, device), "cuDeviceGetAttribute"));
    return value != 0;
  };
  KVT_ASSIGN_OR_RETURN(info.has_vmm, has(cuda_abi::kAttributeVmmSupported));
  KVT_ASSIGN_OR_RETURN(info.has_fd_export, has(cuda_abi::kAttributeFdExportSupported));
  return info;
}

// Makes a context current for one call.
class ContextScope {
 public:
  ContextScope(const Functions& cuda, cuda_abi::Context context)
      : cuda_(cuda), pushed_(cuda.context_push(context)) {}
  ~ContextScope() {
    cuda_abi::Context popped = nullptr;
    if (pushed_ == CudaResult::kSuccess) cuda_.context_pop(&popped);
  }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

  CudaResult result() const { return pushed_; }

 private:
  const Functions& cuda_;
  const CudaResult pushed_;
};

cuda_abi::Stream Raw(CudaStream stream) { return std::bit_cast<cuda_abi::Stream>(stream); }
cuda_abi::Event Raw(CudaEvent event) { return std::bit_cast<cuda_abi::Event>(event); }

class RealDevice final : public CudaDevice {
 public:
  RealDevice(const Functions& cuda, CudaDeviceInfo info, cuda_abi::Context context)
      : cuda_(cuda), info_(std::move(info)), context_(context) {}
  ~RealDevice() override { cuda_.primary_context_release(info_.ordinal); }

  const CudaDeviceInfo& info() const override { return info_; }

  absl::StatusOr<uint64_t> Granularity() override {
    KVT_RETURN_IF_ERROR(CheckSharable(info_));
    size_t bytes = 0;
    const cuda_abi::AllocationProp prop = Prop();
    KVT_RETURN_IF_ERROR(Call("cuMemGetAllocationGranularity", cuda_.granularity, &bytes, &prop,
                             cuda_abi::kGranularityMinimum));
    return bytes;
  }
  absl::StatusOr<CudaAllocation> Allocate(uint64_t bytes) override {
    KVT_RETURN_IF_ERROR(CheckSharable(info_));
    cuda_abi::AllocationHandle handle = 0;
    const cuda_abi::AllocationProp prop = Prop();
    KVT_RETURN_IF_ERROR(Call("cuMemCreate", cuda_.mem_create, &handle, bytes, &prop, 0ULL));
    return handle;
  }
  absl::StatusOr<int> ExportFd(CudaAllocation allocation) override {
    KVT_RETURN_IF_ERROR(CheckSharable(info_));
    int fd = -1;
    KVT_RETURN_IF_ERROR(Call("cuMemExportToShareableHandle", cuda_.mem_export,
                             static_cast<void*>(&fd), allocation, cuda_abi::kHandleTypePosixFd,
                             0ULL));
    return fd;
  }
  absl::StatusOr<CudaAllocation> ImportFd(int fd) override {
    KVT_RETURN_IF_ERROR(CheckSharable(info_));
    cuda_abi::AllocationHandle handle = 0;
    // The descriptor itself goes in the place of a pointer.
    void* const os_handle = std::bit_cast<void*>(static_cast<uintptr_t>(fd));
    KVT_RETURN_IF_ERROR(Call("cuMemImportFromShareableHandle", cuda_.mem_import, &handle, os_handle,
                             cuda_abi::kHandleTypePosixFd));
    return handle;
  }
  absl::Status ReleaseAllocation(CudaAllocation allocation) override {
    return Call("cuMemRelease", cuda_.mem_release, allocation);
  }
  absl::StatusOr<CudaAddress> ReserveAddresses(uint64_t bytes) override {
    KVT_RETURN_IF_ERROR(CheckSharable(info_));
    cuda_abi::DeviceAddress address = 0;
    KVT_RETURN_IF_ERROR(Call("cuMemAddressReserve", cuda_.address_reserve, &address, bytes,
                             size_t{0}, cuda_abi::DeviceAddress{0}, 0ULL));
    return address;
  }
  absl::Status FreeAddresses(CudaAddress address, uint64_t bytes) override {
    return Call("cuMemAddressFree", cuda_.address_free, address, bytes);
  }
  absl::Status Map(CudaAddress address, uint64_t bytes, CudaAllocation allocation) override {
    KVT_RETURN_IF_ERROR(
        Call("cuMemMap", cuda_.mem_map, address, bytes, size_t{0}, allocation, 0ULL));
    const cuda_abi::AccessDesc desc{.location = {.id = info_.ordinal}};
    absl::Status status =
        Call("cuMemSetAccess", cuda_.mem_set_access, address, bytes, &desc, size_t{1});
    if (!status.ok()) Unmap(address, bytes).IgnoreError();
    return status;
  }
  absl::Status Unmap(CudaAddress address, uint64_t bytes) override {
    return Call("cuMemUnmap", cuda_.mem_unmap, address, bytes);
  }

  absl::Status RegisterHost(std::span<std::byte> pages) override {
    return Call("cuMemHostRegister", cuda_.host_register, static_cast<void*>(pages.data()),
                pages.size(), cuda_abi::kHostRegisterPortable);
  }
  absl::Status UnregisterHost(std::span<std::byte> pages) override {
    return Call("cuMemHostUnregister", cuda_.host_unregister, static_cast<void*>(pages.data()));
  }

  absl::StatusOr<CudaStream> CreateStream(Priority priority) override {
    int32_t least = 0;
    int32_t greatest = 0;
    KVT_RETURN_IF_ERROR(
        Call("cuCtxGetStreamPriorityRange", cuda_.stream_priority_range, &least, &greatest));
    cuda_abi::Stream stream = nullptr;
    KVT_RETURN_IF_ERROR(Call("cuStreamCreateWithPriority", cuda_.stream_create, &stream,
                             cuda_abi::kStreamNonBlocking,
                             priority == Priority::kHigh ? greatest : least));
    return static_cast<CudaStream>(reinterpret_cast<uintptr_t>(stream));
  }
  absl::Status DestroyStream(CudaStream stream) override {
    return Call("cuStreamDestroy", cuda_.stream_destroy, Raw(stream));
  }
  absl::StatusOr<CudaEvent> CreateEvent() override {
    cuda_abi::Event event = nullptr;
    KVT_RETURN_IF_ERROR(
        Call("cuEventCreate", cuda_.event_create, &event, cuda_abi::kEventDisableTiming));
    return static_cast<CudaEvent>(reinterpret_cast<uintptr_t>(event));
  }
  absl::Status DestroyEvent(CudaEvent event) override {
    return Call("cuEventDestroy", cuda_.event_destroy, Raw(event));
  }
  absl::Status CopyToDevice(CudaAddress target, std::span<const std::byte> source,
                            CudaStream stream) override {
    return Call("cuMemcpyHtoDAsync", cuda_.copy_to_device, target,
                static_cast<const void*>(source.data()), source.size(), Raw(stream));
  }
  absl::Status CopyToHost(std::span<std::byte> target, CudaAddress source,
                          CudaStream stream) override {
    return Call("cuMemcpyDtoHAsync", cuda_.copy_to_host, static_cast<void*>(target.data()), source,
                target.size(), Raw(stream));
  }
  absl::Status CopyAllToDevice(std::span<const CudaHostCopy> copies, CudaStream stream) override {
    return CopyAll(copies, true, stream);
  }
  absl::Status CopyAllToHost(std::span<const CudaHostCopy> copies, CudaStream stream) override {
    return CopyAll(copies, false, stream);
  }
  absl::Status Zero(CudaAddress target, uint64_t bytes, CudaStream stream) override {
    return Call("cuMemsetD8Async", cuda_.fill_bytes, target, uint8_t{0}, bytes, Raw(stream));
  }
  absl::Status RecordEvent(CudaEvent event, CudaStream stream) override {
    return Call("cuEventRecord", cuda_.event_record, Raw(event), Raw(stream));
  }
  absl::Status AwaitEvent(CudaStream stream, CudaEvent event) override {
    return Call("cuStreamWaitEvent", cuda_.stream_wait_event, Raw(stream), Raw(event), uint32_t{0});
  }
  absl::StatusOr<bool> IsDone(CudaEvent event) override {
    const ContextScope scope(cuda_, context_);
    KVT_RETURN_IF_ERROR(Check(cuda_, scope.result(), "cuCtxPushCurrent"));
    const CudaResult result = cuda_.event_query(Raw(event));
    if (result == CudaResult::kNotReady) return false;
    KVT_RETURN_IF_ERROR(Check(cuda_, result, "cuEventQuery"));
    return true;
  }

 private:
  bool CopiesBatches() const {
    return (cuda_.copy_batch != nullptr || cuda_.copy_batch_12 != nullptr) &&
           !batches_refused_.load(std::memory_order_relaxed);
  }

  absl::Status CopyAll(std::span<const CudaHostCopy> copies, bool to_device, CudaStream stream) {
    if (copies.size() > 1 && CopiesBatches()) {
      const absl::Status status = CopyBatch(copies, to_device, stream);
      if (!absl::IsUnimplemented(status)) return status;
      // The function is there, but this device or a layer in between does not support it.
      batches_refused_.store(true, std::memory_order_relaxed);
    }
    for (const CudaHostCopy& copy : copies) {
      KVT_RETURN_IF_ERROR(to_device ? CopyToDevice(copy.address, copy.host, stream)
                                    : CopyToHost(copy.host, copy.address, stream));
    }
    return absl::OkStatus();
  }

  absl::Status CopyBatch(std::span<const CudaHostCopy> copies, bool to_device, CudaStream stream) {
    std::vector<cuda_abi::DeviceAddress> device;
    // Registered memory has one address, for the host and for devices.
    std::vector<cuda_abi::DeviceAddress> host;
    std::vector<size_t> sizes;
    for (const CudaHostCopy& copy : copies) {
      device.push_back(copy.address);
      host.push_back(reinterpret_cast<uintptr_t>(copy.host.data()));
      sizes.push_back(copy.host.size());
    }
    cuda_abi::DeviceAddress* const targets = to_device ? device.data() : host.data();
    cuda_abi::DeviceAddress* const sources = to_device ? host.data() : device.data();
    cuda_abi::MemcpyAttributes attributes;
    size_t start = 0;
    if (cuda_.copy_batch != nullptr) {
      return Call("cuMemcpyBatchAsync", cuda_.copy_batch, targets, sources, sizes.data(),
                  sizes.size(), &attributes, &start, size_t{1}, Raw(stream));
    }
    size_t failed_idx = 0;
    return Call("cuMemcpyBatchAsync", cuda_.copy_batch_12, targets, sources, sizes.data(),
                sizes.size(), &attributes, &start, size_t{1}, &failed_idx, Raw(stream));
  }

  cuda_abi::AllocationProp Prop() const { return {.location = {.id = info_.ordinal}}; }

  template <typename... Parameters, typename... Arguments>
  absl::Status Call(std::string_view what, CudaResult (*function)(Parameters...),
                    Arguments... arguments) {
    const ContextScope scope(cuda_, context_);
    KVT_RETURN_IF_ERROR(Check(cuda_, scope.result(), "cuCtxPushCurrent"));
    return Check(cuda_, function(arguments...), what);
  }

  const Functions& cuda_;
  const CudaDeviceInfo info_;
  const cuda_abi::Context context_;
  std::atomic<bool> batches_refused_ = false;
};

class RealDriver final : public CudaDriver {
 public:
  explicit RealDriver(const Functions& cuda) : cuda_(cuda) {}

  absl::StatusOr<std::vector<CudaDeviceInfo>> Devices() override {
    int32_t count = 0;
    KVT_RETURN_IF_ERROR(Check(cuda_, cuda_.device_count(&count), "cuDeviceGetCount"));
    if (count == 0) return FailedPrecondition("the CUDA driver sees no device");
    std::vector<CudaDeviceInfo> devices;
    for (int ordinal = 0; ordinal < count; ++ordinal) {
      KVT_ASSIGN_OR_RETURN(CudaDeviceInfo info, InfoOf(cuda_, ordinal));
      devices.push_back(std::move(info));
    }
    return devices;
  }

  absl::StatusOr<std::unique_ptr<CudaDevice>> OpenDevice(int ordinal) override {
    KVT_ASSIGN_OR_RETURN(CudaDeviceInfo info, InfoOf(cuda_, ordinal));
    cuda_abi::Context context = nullptr;
    KVT_RETURN_IF_ERROR(
        Check(cuda_, cuda_.primary_context_retain(&context, ordinal), "cuDevicePrimaryCtxRetain"));
    return std::make_unique<RealDevice>(cuda_, std::move(info), context);
  }

 private:
  // The devices refer to it as well.
  const Functions cuda_;
};

// Fills the table. FAILED_PRECONDITION names the first required function that is missing.
absl::Status LookUp(void* library, const std::string& path, Functions& cuda) {
#define KVTIER_LOOK_UP(member, symbol, ...) \
  cuda.member = reinterpret_cast<decltype(cuda.member)>(dlsym(library, symbol));
#define KVTIER_REQUIRE(member, symbol, ...)                                                  \
  KVTIER_LOOK_UP(member, symbol)                                                             \
  if (cuda.member == nullptr) {                                                              \
    return FailedPrecondition("%s has no function %s: the driver is too old", path, symbol); \
  }
  KVTIER_CUDA_FUNCTIONS(KVTIER_REQUIRE)
  KVTIER_CUDA_OPTIONAL_FUNCTIONS(KVTIER_LOOK_UP)
#undef KVTIER_REQUIRE
#undef KVTIER_LOOK_UP
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaDriver>> OpenCudaDriver(const std::string& library) {
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* const reason = dlerror();  // Names the library.
    return FailedPrecondition(
        "%s: install the NVIDIA driver and let this process see it, or set hbm.device=cpu",
        reason == nullptr ? library.c_str() : reason);
  }
  Functions cuda;
  KVT_RETURN_IF_ERROR(LookUp(handle, library, cuda));
  KVT_RETURN_IF_ERROR(Check(cuda, cuda.init(0), "start the CUDA driver (cuInit)"));
  return std::make_unique<RealDriver>(cuda);
}

}  // namespace kvtier
