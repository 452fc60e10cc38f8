// SPDX-License-Identifier: Apache-2.0
#include "tiers/cuda/result.h"

#include <gtest/gtest.h>

#include "tiers/cuda/driver.h"

namespace kvtier {
namespace {

TEST(CudaResultTest, MapsEveryResult) {
  struct Case {
    CudaResult result;
    absl::StatusCode code;
    bool sticks;
  };
  using enum absl::StatusCode;
  for (const Case& expected : {
           Case{CudaResult::kSuccess, kOk, false},
           Case{CudaResult::kInvalidValue, kInvalidArgument, false},
           Case{CudaResult::kOutOfMemory, kResourceExhausted, false},
           Case{CudaResult::kNotInitialized, kFailedPrecondition, false},
           Case{CudaResult::kDeinitialized, kInternal, true},
           Case{CudaResult::kStubLibrary, kFailedPrecondition, false},
           Case{CudaResult::kCallRequiresNewerDriver, kUnimplemented, false},
           Case{CudaResult::kDeviceUnavailable, kFailedPrecondition, false},
           Case{CudaResult::kNoDevice, kFailedPrecondition, false},
           Case{CudaResult::kInvalidDevice, kInvalidArgument, false},
           Case{CudaResult::kInvalidContext, kInvalidArgument, false},
           Case{CudaResult::kEccUncorrectable, kInternal, true},
           Case{CudaResult::kNvlinkUncorrectable, kInternal, true},
           Case{CudaResult::kContained, kInternal, true},
           Case{CudaResult::kInvalidHandle, kInvalidArgument, false},
           Case{CudaResult::kNotReady, kInternal, false},
           Case{CudaResult::kIllegalAddress, kInternal, true},
           Case{CudaResult::kLaunchTimeout, kInternal, true},
           Case{CudaResult::kContextIsDestroyed, kInternal, true},
           Case{CudaResult::kAssert, kInternal, true},
           Case{CudaResult::kHardwareStackError, kInternal, true},
           Case{CudaResult::kIllegalInstruction, kInternal, true},
           Case{CudaResult::kMisalignedAddress, kInternal, true},
           Case{CudaResult::kInvalidAddressSpace, kInternal, true},
           Case{CudaResult::kInvalidPc, kInternal, true},
           Case{CudaResult::kLaunchFailed, kInternal, true},
           Case{CudaResult::kNotPermitted, kUnimplemented, false},
           Case{CudaResult::kNotSupported, kUnimplemented, false},
           Case{CudaResult::kSystemNotReady, kFailedPrecondition, false},
           Case{CudaResult::kSystemDriverMismatch, kFailedPrecondition, false},
           Case{CudaResult::kCompatNotSupportedOnDevice, kFailedPrecondition, false},
           Case{CudaResult::kMpsConnectionFailed, kFailedPrecondition, false},
           Case{CudaResult::kMpsRpcFailure, kInternal, true},
           Case{CudaResult::kMpsServerNotReady, kFailedPrecondition, false},
           Case{CudaResult::kMpsClientTerminated, kInternal, true},
           Case{CudaResult::kUnknown, kInternal, true},
           // CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: not in the table.
           Case{static_cast<CudaResult>(906), kInternal, false},
       }) {
    const absl::Status status = CudaStatus(expected.result, "CUDA_ERROR_X", "copy");
    EXPECT_EQ(status.code(), expected.code) << static_cast<int>(expected.result);
    EXPECT_EQ(IsDeviceLost(status), expected.sticks) << static_cast<int>(expected.result);
  }
}

TEST(CudaResultTest, SaysWhatFailedWithTheDriversName) {
  EXPECT_EQ(
      CudaStatus(CudaResult::kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "cuMemCreate").message(),
      "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (2)");
}

TEST(CudaDeviceInfoTest, UuidsReadLikeThoseOfNvidiaSmi) {
  CudaUuid uuid{};
  for (size_t i = 0; i < uuid.size(); ++i) uuid[i] = static_cast<uint8_t>(0x11 * i);
  EXPECT_EQ(CudaUuidText(uuid), "GPU-00112233-4455-6677-8899-aabbccddeeff");
}

TEST(CudaDeviceInfoTest, SharableMeansMappableAndExportable) {
  CudaDeviceInfo info{.name = "X", .has_vmm = true, .has_fd_export = true};
  EXPECT_EQ(CheckSharable(info), absl::OkStatus());
  info.has_fd_export = false;
  EXPECT_EQ(CheckSharable(info).code(), absl::StatusCode::kUnimplemented);
  info = {.name = "X", .has_fd_export = true};
  EXPECT_EQ(CheckSharable(info).code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace kvtier
