// SPDX-License-Identifier: Apache-2.0
#include "proto/base/status_util.h"

#include <cerrno>
#include <cstring>

namespace kvtier {
namespace {

absl::StatusCode CodeOfErrno(int error_number) {
  switch (error_number) {
    case ENOENT:
      return absl::StatusCode::kNotFound;
    case EEXIST:
      return absl::StatusCode::kAlreadyExists;
    case EACCES:
    case EPERM:
      return absl::StatusCode::kPermissionDenied;
    case EINVAL:
    case ENAMETOOLONG:
      return absl::StatusCode::kInvalidArgument;
    case ENOSPC:
    case EDQUOT:
    case ENOMEM:
    case EMFILE:
    case ENFILE:
      return absl::StatusCode::kResourceExhausted;
    case EAGAIN:
    case EINTR:
    case EBUSY:
    case EIO:
    case EROFS:
    case ECONNREFUSED:
    case ECONNRESET:
    case EPIPE:
    case ENODEV:
    case ENXIO:
      return absl::StatusCode::kUnavailable;
    case ETIMEDOUT:
      return absl::StatusCode::kDeadlineExceeded;
    case ENOSYS:
    case EOPNOTSUPP:
      return absl::StatusCode::kUnimplemented;
    default:
      return absl::StatusCode::kInternal;
  }
}

}  // namespace

absl::Status ErrnoStatus(int error_number, std::string_view what) {
  return absl::Status(CodeOfErrno(error_number),
                      absl::StrFormat("%s: %s", what, strerrordesc_np(error_number)));
}

absl::Status Annotate(const absl::Status& status, std::string_view context) {
  if (status.ok()) return status;
  absl::Status annotated(status.code(), absl::StrFormat("%s: %s", context, status.message()));
  status.ForEachPayload([&annotated](absl::string_view url, const absl::Cord& payload) {
    annotated.SetPayload(url, payload);
  });
  return annotated;
}

}  // namespace kvtier
