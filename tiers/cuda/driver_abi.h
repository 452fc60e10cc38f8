// SPDX-License-Identifier: Apache-2.0
//
// The part of the CUDA driver's C ABI that real_driver.cc calls, declared here so that kvtier
// builds the same with and without a CUDA toolkit. driver_abi_test.cc holds it against cuda.h where
// there is one. Names follow cuda.h without the prefix; the symbols are looked up with theirs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tiers/cuda/result.h"

namespace kvtier::cuda_abi {

using Device = int32_t;  // an ordinal
using Context = struct ContextObject*;
using Stream = struct StreamObject*;
using Event = struct EventObject*;
using DeviceAddress = uint64_t;
using AllocationHandle = uint64_t;

struct Uuid {
  char bytes[16];
};

//   offset  size  field
//        0     4  type: 1 = device
//        4     4  id: the ordinal
struct MemLocation {
  int32_t type = 1;
  int32_t id = 0;
};
static_assert(sizeof(MemLocation) == 8);

//   offset  size  field
//        0     4  type: 1 = pinned
//        4     4  requestedHandleTypes: 1 = POSIX file descriptor
//        8     8  location
//       16     8  win32HandleMetaData, null
//       24     8  allocFlags, all 0
struct AllocationProp {
  int32_t type = 1;
  int32_t requested_handle_types = 1;
  MemLocation location;
  void* win32_handle_meta_data = nullptr;
  uint8_t alloc_flags[8] = {};
};
static_assert(sizeof(AllocationProp) == 32);

//   offset  size  field
//        0     8  location
//        8     4  flags: 3 = read and write
struct AccessDesc {
  MemLocation location;
  int32_t flags = 3;
};
static_assert(sizeof(AccessDesc) == 12);

//   offset  size  field
//        0     4  srcAccessOrder: 1 = in the order of the stream
//        4     8  srcLocHint, type 0: none
//       12     8  dstLocHint, type 0: none
//       20     4  flags: 1 = prefer to overlap with kernels
struct MemcpyAttributes {
  int32_t source_access_order = 1;
  MemLocation source_hint = {.type = 0};
  MemLocation target_hint = {.type = 0};
  uint32_t flags = 1;
};
static_assert(sizeof(MemcpyAttributes) == 24);

inline constexpr int32_t kHandleTypePosixFd = 1;
inline constexpr int32_t kGranularityMinimum = 0;
inline constexpr int32_t kAttributeVmmSupported = 102;
inline constexpr int32_t kAttributeFdExportSupported = 103;
inline constexpr uint32_t kStreamNonBlocking = 1;
inline constexpr uint32_t kEventDisableTiming = 2;
inline constexpr uint32_t kHostRegisterPortable = 1;

// X(member, symbol, argument types): what must be there. Every function returns a CUresult.
#define KVTIER_CUDA_FUNCTIONS(X)                                                                   \
  X(init, "cuInit", uint32_t flags)                                                                \
  X(driver_version, "cuDriverGetVersion", int32_t* version)                                        \
  X(error_name, "cuGetErrorName", CudaResult result, const char** name)                            \
  X(device_count, "cuDeviceGetCount", int32_t* count)                                              \
  X(device_get, "cuDeviceGet", Device* device, int32_t ordinal)                                    \
  X(device_name, "cuDeviceGetName", char* name, int32_t name_bytes, Device device)                 \
  X(device_total_bytes, "cuDeviceTotalMem_v2", size_t* bytes, Device device)                       \
  X(device_attribute, "cuDeviceGetAttribute", int32_t* value, int32_t attribute, Device device)    \
  X(primary_context_retain, "cuDevicePrimaryCtxRetain", Context* context, Device device)           \
  X(primary_context_release, "cuDevicePrimaryCtxRelease_v2", Device device)                        \
  X(context_push, "cuCtxPushCurrent_v2", Context context)                                          \
  X(context_pop, "cuCtxPopCurrent_v2", Context* context)                                           \
  X(stream_priority_range, "cuCtxGetStreamPriorityRange", int32_t* least, int32_t* greatest)       \
  X(stream_create, "cuStreamCreateWithPriority", Stream* stream, uint32_t flags, int32_t priority) \
  X(stream_destroy, "cuStreamDestroy_v2", Stream stream)                                           \
  X(stream_wait_event, "cuStreamWaitEvent", Stream stream, Event event, uint32_t flags)            \
  X(event_create, "cuEventCreate", Event* event, uint32_t flags)                                   \
  X(event_destroy, "cuEventDestroy_v2", Event event)                                               \
  X(event_record, "cuEventRecord", Event event, Stream stream)                                     \
  X(event_query, "cuEventQuery", Event event)                                                      \
  X(copy_to_device, "cuMemcpyHtoDAsync_v2", DeviceAddress target, const void* source,              \
    size_t bytes, Stream stream)                                                                   \
  X(copy_to_host, "cuMemcpyDtoHAsync_v2", void* target, DeviceAddress source, size_t bytes,        \
    Stream stream)                                                                                 \
  X(fill_bytes, "cuMemsetD8Async", DeviceAddress target, uint8_t value, size_t bytes,              \
    Stream stream)                                                                                 \
  X(host_register, "cuMemHostRegister_v2", void* pages, size_t bytes, uint32_t flags)              \
  X(host_unregister, "cuMemHostUnregister", void* pages)

// What drivers may lack. Without the functions up to CUDA 11.4, a device counts as one without
// these abilities; without those that copy in batches (CUDA 12.8, CUDA 13), copies are made one by
// one.
#define KVTIER_CUDA_OPTIONAL_FUNCTIONS(X)                                                          \
  X(device_uuid, "cuDeviceGetUuid_v2", Uuid* uuid, Device device)                                  \
  X(granularity, "cuMemGetAllocationGranularity", size_t* bytes, const AllocationProp*,            \
    int32_t option)                                                                                \
  X(mem_create, "cuMemCreate", AllocationHandle* handle, size_t bytes, const AllocationProp* prop, \
    unsigned long long flags)                                                                      \
  X(mem_release, "cuMemRelease", AllocationHandle handle)                                          \
  X(mem_export, "cuMemExportToShareableHandle", void* fd, AllocationHandle handle,                 \
    int32_t handle_type, unsigned long long flags)                                                 \
  X(mem_import, "cuMemImportFromShareableHandle", AllocationHandle* handle, void* fd,              \
    int32_t handle_type)                                                                           \
  X(address_reserve, "cuMemAddressReserve", DeviceAddress* address, size_t bytes,                  \
    size_t alignment, DeviceAddress wish, unsigned long long flags)                                \
  X(address_free, "cuMemAddressFree", DeviceAddress address, size_t bytes)                         \
  X(mem_map, "cuMemMap", DeviceAddress address, size_t bytes, size_t offset,                       \
    AllocationHandle handle, unsigned long long flags)                                             \
  X(mem_unmap, "cuMemUnmap", DeviceAddress address, size_t bytes)                                  \
  X(mem_set_access, "cuMemSetAccess", DeviceAddress address, size_t bytes,                         \
    const AccessDesc* descs, size_t desc_count)                                                    \
  X(copy_batch_12, "cuMemcpyBatchAsync", DeviceAddress* targets, DeviceAddress* sources,           \
    size_t* sizes, size_t count, MemcpyAttributes* attributes, size_t* attribute_starts,           \
    size_t attribute_count, size_t* failed_idx, Stream stream)                                     \
  X(copy_batch, "cuMemcpyBatchAsync_v2", DeviceAddress* targets, DeviceAddress* sources,           \
    size_t* sizes, size_t count, MemcpyAttributes* attributes, size_t* attribute_starts,           \
    size_t attribute_count, Stream stream)

struct Functions {
#define KVTIER_DECLARE(member, symbol, ...) CudaResult (*member)(__VA_ARGS__) = nullptr;
  KVTIER_CUDA_FUNCTIONS(KVTIER_DECLARE)
  KVTIER_CUDA_OPTIONAL_FUNCTIONS(KVTIER_DECLARE)
#undef KVTIER_DECLARE
};

}  // namespace kvtier::cuda_abi
