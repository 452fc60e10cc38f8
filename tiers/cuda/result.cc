// SPDX-License-Identifier: Apache-2.0
#include "tiers/cuda/result.h"

#include <string>

#include "proto/base/status_util.h"
#include "tiers/cuda/driver.h"

namespace kvtier {
namespace {

// Marks errors that stick; read by IsDeviceLost.
constexpr absl::string_view kLostPayload = "kvtier.cuda/device-lost";

struct Meaning {
  absl::StatusCode code = absl::StatusCode::kInternal;
  bool sticks = false;
};

Meaning MeaningOf(CudaResult result) {
  switch (result) {
    case CudaResult::kSuccess:
      return {.code = absl::StatusCode::kOk};
    case CudaResult::kOutOfMemory:
      return {.code = absl::StatusCode::kResourceExhausted};
    case CudaResult::kInvalidValue:
    case CudaResult::kInvalidDevice:
    case CudaResult::kInvalidContext:
    case CudaResult::kInvalidHandle:
      return {.code = absl::StatusCode::kInvalidArgument};
    case CudaResult::kNotPermitted:
    case CudaResult::kNotSupported:
    case CudaResult::kCallRequiresNewerDriver:
      return {.code = absl::StatusCode::kUnimplemented};
    case CudaResult::kNotInitialized:
    case CudaResult::kStubLibrary:
    case CudaResult::kDeviceUnavailable:
    case CudaResult::kNoDevice:
    case CudaResult::kSystemNotReady:
    case CudaResult::kSystemDriverMismatch:
    case CudaResult::kCompatNotSupportedOnDevice:
    case CudaResult::kMpsConnectionFailed:
    case CudaResult::kMpsServerNotReady:
      return {.code = absl::StatusCode::kFailedPrecondition};
    case CudaResult::kNotReady:
      return {};
    // The context, or the card under it, is corrupted. kUnknown says nothing, and so does not say
    // that going on is safe.
    case CudaResult::kDeinitialized:
    case CudaResult::kEccUncorrectable:
    case CudaResult::kNvlinkUncorrectable:
    case CudaResult::kContained:
    case CudaResult::kIllegalAddress:
    case CudaResult::kLaunchTimeout:
    case CudaResult::kContextIsDestroyed:
    case CudaResult::kAssert:
    case CudaResult::kHardwareStackError:
    case CudaResult::kIllegalInstruction:
    case CudaResult::kMisalignedAddress:
    case CudaResult::kInvalidAddressSpace:
    case CudaResult::kInvalidPc:
    case CudaResult::kLaunchFailed:
    case CudaResult::kMpsRpcFailure:
    case CudaResult::kMpsClientTerminated:
    case CudaResult::kUnknown:
      return {.sticks = true};
  }
  // A number that this table does not have: some other failure of one call.
  return {};
}

}  // namespace

absl::Status CudaStatus(CudaResult result, std::string_view name, std::string_view what) {
  const Meaning meaning = MeaningOf(result);
  if (meaning.code == absl::StatusCode::kOk) return absl::OkStatus();
  absl::Status status =
      StatusOf(meaning.code, "%s: %s (%d)", what, name, static_cast<int32_t>(result));
  if (meaning.sticks) status.SetPayload(kLostPayload, absl::Cord("1"));
  return status;
}

bool IsDeviceLost(const absl::Status& status) {
  return status.GetPayload(kLostPayload).has_value();
}

std::string CudaUuidText(const CudaUuid& uuid) {
  std::string text = "GPU";
  for (size_t i = 0; i < uuid.size(); ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += absl::StrFormat("%02x", uuid[i]);
  }
  return text;
}

absl::Status CheckSharable(const CudaDeviceInfo& info) {
  if (!info.has_vmm) {
    return Unimplemented(
        "CUDA device %d (%s): no virtual memory management; a driver of CUDA 11 or later and a "
        "device that supports it are needed",
        info.ordinal, info.name);
  }
  if (!info.has_fd_export) {
    return Unimplemented(
        "CUDA device %d (%s): its memory cannot be exported as a POSIX file descriptor",
        info.ordinal, info.name);
  }
  return absl::OkStatus();
}

}  // namespace kvtier
