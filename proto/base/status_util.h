// SPDX-License-Identifier: Apache-2.0
//
// Building and passing on absl::Status. Debian's Abseil has a string_view of its own that does not
// convert from std::string_view; everything that meets that difference is in this header.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"

namespace kvtier {

inline absl::string_view ToAbsl(std::string_view text) {
  return absl::string_view(text.data(), text.size());
}

inline std::string_view FromAbsl(absl::string_view text) {
  return std::string_view(text.data(), text.size());
}

// StatusOf(code, "block %d: bad length %d", idx, length).
template <typename... Args>
absl::Status StatusOf(absl::StatusCode code, const absl::FormatSpec<Args...>& format,
                      const Args&... args) {
  return absl::Status(code, absl::StrFormat(format, args...));
}

// Each names its code: INVALID_ARGUMENT is the caller's bug, FAILED_PRECONDITION a state to mend
// first, UNAVAILABLE worth repeating as it is, ABORTED worth repeating from the start of the
// sequence, RESOURCE_EXHAUSTED full, DATA_LOSS a failed checksum.
#define KVTIER_STATUS_FUNCTION(Name, kCode)                                         \
  template <typename... Args>                                                       \
  absl::Status Name(const absl::FormatSpec<Args...>& format, const Args&... args) { \
    return absl::Status(absl::StatusCode::kCode, absl::StrFormat(format, args...)); \
  }
KVTIER_STATUS_FUNCTION(Invalid, kInvalidArgument)
KVTIER_STATUS_FUNCTION(FailedPrecondition, kFailedPrecondition)
KVTIER_STATUS_FUNCTION(NotFound, kNotFound)
KVTIER_STATUS_FUNCTION(Unavailable, kUnavailable)
KVTIER_STATUS_FUNCTION(Aborted, kAborted)
KVTIER_STATUS_FUNCTION(Exhausted, kResourceExhausted)
KVTIER_STATUS_FUNCTION(DataLoss, kDataLoss)
KVTIER_STATUS_FUNCTION(OutOfRange, kOutOfRange)
KVTIER_STATUS_FUNCTION(Internal, kInternal)
KVTIER_STATUS_FUNCTION(DeadlineExceeded, kDeadlineExceeded)
KVTIER_STATUS_FUNCTION(PermissionDenied, kPermissionDenied)
KVTIER_STATUS_FUNCTION(Unimplemented, kUnimplemented)
#undef KVTIER_STATUS_FUNCTION

// Maps an errno value; `what` says what was being done, with the path or number it was done to.
absl::Status ErrnoStatus(int error_number, std::string_view what);

// The same error with context put in front of its message.
absl::Status Annotate(const absl::Status& status, std::string_view context);

}  // namespace kvtier

#define KVT_RETURN_IF_ERROR(expression)        \
  do {                                         \
    absl::Status kvt_status_ = (expression);   \
    if (!kvt_status_.ok()) return kvt_status_; \
  } while (false)

#define KVT_CONCAT_INNER(a, b) a##b
#define KVT_CONCAT(a, b) KVT_CONCAT_INNER(a, b)
#define KVT_ASSIGN_OR_RETURN(declaration, expression) \
  KVT_ASSIGN_OR_RETURN_INNER(KVT_CONCAT(kvt_statusor_, __LINE__), declaration, expression)
#define KVT_ASSIGN_OR_RETURN_INNER(temporary, declaration, expression) \
  auto temporary = (expression);                                       \
  if (!temporary.ok()) return std::move(temporary).status();           \
  declaration = std::move(temporary).value()
