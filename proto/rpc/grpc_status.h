// SPDX-License-Identifier: Apache-2.0
//
// Errors on the wire: absl::Status with a reason (proto/base/reasons.h) <-> grpc::Status whose
// details are a google.rpc.Status, in the trailer `grpc-status-details-bin` (AIP-193).
#pragma once

#include <grpcpp/support/status.h>

#include <cstdint>

#include "absl/status/status.h"

namespace kvtier {

// RetryInfo of RESOURCE_EXHAUSTED and UNAVAILABLE.
inline constexpr uint32_t kRetryDelayMs = 50;

// Puts ErrorInfo {domain "kvtier", reason} into the details; an error without a reason carries
// BAD_ARGUMENT (INVALID_ARGUMENT) or else the name of its code. Pure.
grpc::Status ToGrpc(const absl::Status& status);

// The same code and message, with the reason of the kvtier ErrorInfo, if there is one, and the
// delay of RATE_LIMITED attached. Details that cannot be read are left out: they come from the
// other side, and the code stands. Pure.
absl::Status FromGrpc(const grpc::Status& status);

}  // namespace kvtier
