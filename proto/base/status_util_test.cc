// SPDX-License-Identifier: Apache-2.0
#include "proto/base/status_util.h"

#include <gtest/gtest.h>

#include <cerrno>

#include "proto/base/reasons.h"

namespace kvtier {
namespace {

TEST(StatusUtil, ErrnoHasOneMapping) {
  struct Case {
    int error_number;
    absl::StatusCode code;
  };
  for (const Case& c :
       {Case{ENOENT, absl::StatusCode::kNotFound}, Case{EEXIST, absl::StatusCode::kAlreadyExists},
        Case{EACCES, absl::StatusCode::kPermissionDenied},
        Case{EINVAL, absl::StatusCode::kInvalidArgument},
        Case{ENOSPC, absl::StatusCode::kResourceExhausted},
        Case{ENOMEM, absl::StatusCode::kResourceExhausted},
        Case{EMFILE, absl::StatusCode::kResourceExhausted},
        Case{EIO, absl::StatusCode::kUnavailable}, Case{EPIPE, absl::StatusCode::kUnavailable},
        Case{ECONNREFUSED, absl::StatusCode::kUnavailable},
        Case{ETIMEDOUT, absl::StatusCode::kDeadlineExceeded},
        Case{ENOSYS, absl::StatusCode::kUnimplemented},
        Case{ERANGE, absl::StatusCode::kInternal}}) {
    EXPECT_EQ(ErrnoStatus(c.error_number, "x").code(), c.code) << c.error_number;
  }
  EXPECT_EQ(ErrnoStatus(ENOENT, "open /a").message(), "open /a: No such file or directory");
}

TEST(StatusUtil, AnnotateKeepsCodeAndReason) {
  const absl::Status status =
      Annotate(WithReason(NotFound("no %s", "key"), reason::kKeyUnknown), "where");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(), "where: no key");
  EXPECT_EQ(ReasonOf(status), reason::kKeyUnknown);
  EXPECT_TRUE(Annotate(absl::OkStatus(), "where").ok());
}

TEST(StatusUtil, OkHasNoReason) {
  EXPECT_EQ(ReasonOf(WithReason(absl::OkStatus(), reason::kInternal)), "");
  EXPECT_EQ(ReasonOf(Internal("x")), "");
}

absl::StatusOr<int> Half(int value) {
  if (value % 2 != 0) return Invalid("%d is odd", value);
  return value / 2;
}

absl::StatusOr<int> Quarter(int value) {
  KVT_ASSIGN_OR_RETURN(const int half, Half(value));
  KVT_RETURN_IF_ERROR(half == 0 ? OutOfRange("zero") : absl::OkStatus());
  return Half(half);
}

TEST(StatusUtil, MacrosPassErrorsOn) {
  EXPECT_EQ(*Quarter(8), 2);
  EXPECT_EQ(Quarter(3).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Quarter(0).status().code(), absl::StatusCode::kOutOfRange);
}

}  // namespace
}  // namespace kvtier
