// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "absl/status/status.h"

namespace kvtier::ctl {

// Exit statuses of kvtierctl; part of its interface.
enum class ExitCode : int {
  kOk = 0,
  kFailed = 1,
  kUsage = 2,
  kUnreachable = 3,
  kNotFound = 4,
  kTimeout = 124,  // as timeout(1)
};

// UNAVAILABLE is a daemon that does not answer, NOT_FOUND a context, key or file that is not there,
// INVALID_ARGUMENT what the user asked for.
inline ExitCode ExitCodeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return ExitCode::kOk;
    case absl::StatusCode::kInvalidArgument:
      return ExitCode::kUsage;
    case absl::StatusCode::kUnavailable:
      return ExitCode::kUnreachable;
    case absl::StatusCode::kNotFound:
      return ExitCode::kNotFound;
    case absl::StatusCode::kDeadlineExceeded:
      return ExitCode::kTimeout;
    default:
      return ExitCode::kFailed;
  }
}

}  // namespace kvtier::ctl
