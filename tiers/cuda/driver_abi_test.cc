// SPDX-License-Identifier: Apache-2.0
//
// Holds driver_abi.h and result.h against cuda.h, where there is a CUDA toolkit.
#include "tiers/cuda/driver_abi.h"

#include <cuda.h>
#include <cudaTypedefs.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <string>
#include <type_traits>

namespace kvtier {
namespace {

// Passed and returned alike: both pointers, or both whole numbers of one size.
template <typename Ours, typename Theirs>
constexpr bool kSamePassing =
    std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> && sizeof(Ours) == sizeof(Theirs);

template <typename Ours, typename Theirs>
struct SameCall : std::false_type {};
template <typename... Ours, typename... Theirs>
  requires(sizeof...(Ours) == sizeof...(Theirs))
struct SameCall<CudaResult (*)(Ours...), CUresult (*)(Theirs...)>
    : std::bool_constant<(kSamePassing<Ours, Theirs> && ...)> {};

#define KVTIER_TEXT_INNER(text) #text
#define KVTIER_TEXT(text) KVTIER_TEXT_INNER(text)

// cuda.h defines the names that programs write as the versioned symbols.
#define KVTIER_SAME_FUNCTION(member, name)                                               \
  static_assert(SameCall<decltype(cuda_abi::Functions::member), decltype(&name)>::value, \
                #name " is called with other arguments")
KVTIER_SAME_FUNCTION(init, cuInit);
KVTIER_SAME_FUNCTION(driver_version, cuDriverGetVersion);
KVTIER_SAME_FUNCTION(error_name, cuGetErrorName);
KVTIER_SAME_FUNCTION(device_count, cuDeviceGetCount);
KVTIER_SAME_FUNCTION(device_get, cuDeviceGet);
KVTIER_SAME_FUNCTION(device_name, cuDeviceGetName);
KVTIER_SAME_FUNCTION(device_total_bytes, cuDeviceTotalMem);
KVTIER_SAME_FUNCTION(device_attribute, cuDeviceGetAttribute);
KVTIER_SAME_FUNCTION(device_uuid, cuDeviceGetUuid);
KVTIER_SAME_FUNCTION(primary_context_retain, cuDevicePrimaryCtxRetain);
KVTIER_SAME_FUNCTION(primary_context_release, cuDevicePrimaryCtxRelease);
KVTIER_SAME_FUNCTION(context_push, cuCtxPushCurrent);
KVTIER_SAME_FUNCTION(context_pop, cuCtxPopCurrent);
KVTIER_SAME_FUNCTION(stream_priority_range, cuCtxGetStreamPriorityRange);
KVTIER_SAME_FUNCTION(stream_create, cuStreamCreateWithPriority);
KVTIER_SAME_FUNCTION(stream_destroy, cuStreamDestroy);
KVTIER_SAME_FUNCTION(stream_wait_event, cuStreamWaitEvent);
KVTIER_SAME_FUNCTION(event_create, cuEventCreate);
KVTIER_SAME_FUNCTION(event_destroy, cuEventDestroy);
KVTIER_SAME_FUNCTION(event_record, cuEventRecord);
KVTIER_SAME_FUNCTION(event_query, cuEventQuery);
KVTIER_SAME_FUNCTION(copy_to_device, cuMemcpyHtoDAsync);
KVTIER_SAME_FUNCTION(copy_to_host, cuMemcpyDtoHAsync);
KVTIER_SAME_FUNCTION(fill_bytes, cuMemsetD8Async);
KVTIER_SAME_FUNCTION(host_register, cuMemHostRegister);
KVTIER_SAME_FUNCTION(host_unregister, cuMemHostUnregister);
KVTIER_SAME_FUNCTION(granularity, cuMemGetAllocationGranularity);
KVTIER_SAME_FUNCTION(mem_create, cuMemCreate);
KVTIER_SAME_FUNCTION(mem_release, cuMemRelease);
KVTIER_SAME_FUNCTION(mem_export, cuMemExportToShareableHandle);
KVTIER_SAME_FUNCTION(mem_import, cuMemImportFromShareableHandle);
KVTIER_SAME_FUNCTION(address_reserve, cuMemAddressReserve);
KVTIER_SAME_FUNCTION(address_free, cuMemAddressFree);
KVTIER_SAME_FUNCTION(mem_map, cuMemMap);
KVTIER_SAME_FUNCTION(mem_unmap, cuMemUnmap);
KVTIER_SAME_FUNCTION(mem_set_access, cuMemSetAccess);
#if CUDA_VERSION >= 13000
KVTIER_SAME_FUNCTION(copy_batch, cuMemcpyBatchAsync);
static_assert(
    SameCall<decltype(cuda_abi::Functions::copy_batch_12), PFN_cuMemcpyBatchAsync_v12080>::value);
static_assert(sizeof(cuda_abi::MemcpyAttributes) == sizeof(CUmemcpyAttributes));
static_assert(offsetof(cuda_abi::MemcpyAttributes, source_hint) ==
              offsetof(CUmemcpyAttributes, srcLocHint));
static_assert(offsetof(cuda_abi::MemcpyAttributes, target_hint) ==
              offsetof(CUmemcpyAttributes, dstLocHint));
static_assert(offsetof(cuda_abi::MemcpyAttributes, flags) == offsetof(CUmemcpyAttributes, flags));
#endif

static_assert(sizeof(cuda_abi::Uuid) == sizeof(CUuuid));
static_assert(sizeof(cuda_abi::MemLocation) == sizeof(CUmemLocation));
static_assert(offsetof(cuda_abi::MemLocation, id) == offsetof(CUmemLocation, id));
static_assert(sizeof(cuda_abi::AllocationProp) == sizeof(CUmemAllocationProp));
static_assert(offsetof(cuda_abi::AllocationProp, requested_handle_types) ==
              offsetof(CUmemAllocationProp, requestedHandleTypes));
static_assert(offsetof(cuda_abi::AllocationProp, location) ==
              offsetof(CUmemAllocationProp, location));
static_assert(offsetof(cuda_abi::AllocationProp, alloc_flags) ==
              offsetof(CUmemAllocationProp, allocFlags));
static_assert(sizeof(cuda_abi::AccessDesc) == sizeof(CUmemAccessDesc));
static_assert(offsetof(cuda_abi::AccessDesc, flags) == offsetof(CUmemAccessDesc, flags));

TEST(DriverAbiTest, ConstantsAreThoseOfCudaH) {
  EXPECT_EQ(cuda_abi::MemLocation().type, CU_MEM_LOCATION_TYPE_DEVICE);
  EXPECT_EQ(cuda_abi::AllocationProp().type, CU_MEM_ALLOCATION_TYPE_PINNED);
  EXPECT_EQ(cuda_abi::AllocationProp().requested_handle_types,
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  EXPECT_EQ(cuda_abi::AccessDesc().flags, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  EXPECT_EQ(cuda_abi::kHandleTypePosixFd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  EXPECT_EQ(cuda_abi::kGranularityMinimum, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  EXPECT_EQ(cuda_abi::kAttributeVmmSupported,
            CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
  EXPECT_EQ(cuda_abi::kAttributeFdExportSupported,
            CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
  EXPECT_EQ(cuda_abi::kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
  EXPECT_EQ(cuda_abi::kEventDisableTiming, CU_EVENT_DISABLE_TIMING);
  EXPECT_EQ(cuda_abi::kHostRegisterPortable, CU_MEMHOSTREGISTER_PORTABLE);
#if CUDA_VERSION >= 13000
  EXPECT_EQ(cuda_abi::MemcpyAttributes().source_access_order, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
  EXPECT_EQ(cuda_abi::MemcpyAttributes().source_hint.type, CU_MEM_LOCATION_TYPE_INVALID);
  EXPECT_EQ(cuda_abi::MemcpyAttributes().flags, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE);
#endif
}

TEST(DriverAbiTest, ResultsAreThoseOfCudaH) {
  const auto number = [](CudaResult result) { return static_cast<CUresult>(result); };
  EXPECT_EQ(number(CudaResult::kSuccess), CUDA_SUCCESS);
  EXPECT_EQ(number(CudaResult::kInvalidValue), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(number(CudaResult::kOutOfMemory), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(number(CudaResult::kNotInitialized), CUDA_ERROR_NOT_INITIALIZED);
  EXPECT_EQ(number(CudaResult::kDeinitialized), CUDA_ERROR_DEINITIALIZED);
  EXPECT_EQ(number(CudaResult::kStubLibrary), CUDA_ERROR_STUB_LIBRARY);
  EXPECT_EQ(number(CudaResult::kCallRequiresNewerDriver), CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER);
  EXPECT_EQ(number(CudaResult::kDeviceUnavailable), CUDA_ERROR_DEVICE_UNAVAILABLE);
  EXPECT_EQ(number(CudaResult::kNoDevice), CUDA_ERROR_NO_DEVICE);
  EXPECT_EQ(number(CudaResult::kInvalidDevice), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_EQ(number(CudaResult::kInvalidContext), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(number(CudaResult::kEccUncorrectable), CUDA_ERROR_ECC_UNCORRECTABLE);
  EXPECT_EQ(number(CudaResult::kNvlinkUncorrectable), CUDA_ERROR_NVLINK_UNCORRECTABLE);
  EXPECT_EQ(number(CudaResult::kContained), CUDA_ERROR_CONTAINED);
  EXPECT_EQ(number(CudaResult::kInvalidHandle), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(number(CudaResult::kNotReady), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(number(CudaResult::kIllegalAddress), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_EQ(number(CudaResult::kLaunchTimeout), CUDA_ERROR_LAUNCH_TIMEOUT);
  EXPECT_EQ(number(CudaResult::kContextIsDestroyed), CUDA_ERROR_CONTEXT_IS_DESTROYED);
  EXPECT_EQ(number(CudaResult::kAssert), CUDA_ERROR_ASSERT);
  EXPECT_EQ(number(CudaResult::kHardwareStackError), CUDA_ERROR_HARDWARE_STACK_ERROR);
  EXPECT_EQ(number(CudaResult::kIllegalInstruction), CUDA_ERROR_ILLEGAL_INSTRUCTION);
  EXPECT_EQ(number(CudaResult::kMisalignedAddress), CUDA_ERROR_MISALIGNED_ADDRESS);
  EXPECT_EQ(number(CudaResult::kInvalidAddressSpace), CUDA_ERROR_INVALID_ADDRESS_SPACE);
  EXPECT_EQ(number(CudaResult::kInvalidPc), CUDA_ERROR_INVALID_PC);
  EXPECT_EQ(number(CudaResult::kLaunchFailed), CUDA_ERROR_LAUNCH_FAILED);
  EXPECT_EQ(number(CudaResult::kNotPermitted), CUDA_ERROR_NOT_PERMITTED);
  EXPECT_EQ(number(CudaResult::kNotSupported), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(number(CudaResult::kSystemNotReady), CUDA_ERROR_SYSTEM_NOT_READY);
  EXPECT_EQ(number(CudaResult::kSystemDriverMismatch), CUDA_ERROR_SYSTEM_DRIVER_MISMATCH);
  EXPECT_EQ(number(CudaResult::kCompatNotSupportedOnDevice),
            CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE);
  EXPECT_EQ(number(CudaResult::kMpsConnectionFailed), CUDA_ERROR_MPS_CONNECTION_FAILED);
  EXPECT_EQ(number(CudaResult::kMpsRpcFailure), CUDA_ERROR_MPS_RPC_FAILURE);
  EXPECT_EQ(number(CudaResult::kMpsServerNotReady), CUDA_ERROR_MPS_SERVER_NOT_READY);
  EXPECT_EQ(number(CudaResult::kMpsClientTerminated), CUDA_ERROR_MPS_CLIENT_TERMINATED);
  EXPECT_EQ(number(CudaResult::kUnknown), CUDA_ERROR_UNKNOWN);
}

// The symbols that are looked up are those that cuda.h makes of the names.
TEST(DriverAbiTest, SymbolsAreThoseOfCudaH) {
  const std::string looked_up[] = {
#define KVTIER_SYMBOL(member, symbol, ...) symbol,
      KVTIER_CUDA_FUNCTIONS(KVTIER_SYMBOL) KVTIER_CUDA_OPTIONAL_FUNCTIONS(KVTIER_SYMBOL)
#undef KVTIER_SYMBOL
  };
  const auto count = [&](const std::string& symbol) {
    return std::count(std::begin(looked_up), std::end(looked_up), symbol);
  };
  for (const char* const symbol : {
           KVTIER_TEXT(cuDeviceTotalMem),
           KVTIER_TEXT(cuDeviceGetUuid),
           KVTIER_TEXT(cuDevicePrimaryCtxRelease),
           KVTIER_TEXT(cuCtxPushCurrent),
           KVTIER_TEXT(cuCtxPopCurrent),
           KVTIER_TEXT(cuStreamDestroy),
           KVTIER_TEXT(cuEventDestroy),
           KVTIER_TEXT(cuMemcpyHtoDAsync),
           KVTIER_TEXT(cuMemcpyDtoHAsync),
           KVTIER_TEXT(cuMemHostRegister),
           KVTIER_TEXT(cuStreamCreateWithPriority),
           KVTIER_TEXT(cuMemsetD8Async),
           KVTIER_TEXT(cuEventRecord),
           KVTIER_TEXT(cuMemCreate),
#if CUDA_VERSION >= 13000
           KVTIER_TEXT(cuMemcpyBatchAsync),
#endif
       }) {
    EXPECT_EQ(count(symbol), 1) << symbol;
  }
}

}  // namespace
}  // namespace kvtier
