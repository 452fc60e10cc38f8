// SPDX-License-Identifier: Apache-2.0
#include "proto/rpc/grpc_status.h"

#include <gtest/gtest.h>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"

namespace kvtier {
namespace {

google::rpc::Status DetailsOf(const grpc::Status& status) {
  google::rpc::Status details;
  EXPECT_TRUE(details.ParseFromString(status.error_details()));
  return details;
}

TEST(GrpcStatus, OkHasNoDetails) {
  EXPECT_TRUE(ToGrpc(absl::OkStatus()).ok());
  EXPECT_TRUE(ToGrpc(absl::OkStatus()).error_details().empty());
  EXPECT_TRUE(FromGrpc(grpc::Status::OK).ok());
}

TEST(GrpcStatus, EveryCodeComesBackWithMessageAndReason) {
  for (int code = 1; code <= 16; ++code) {
    const absl::Status sent = WithReason(absl::Status(static_cast<absl::StatusCode>(code), "why"),
                                         reason::kSessionUnknown);
    const absl::Status received = FromGrpc(ToGrpc(sent));
    EXPECT_EQ(received, sent);
    EXPECT_EQ(ReasonOf(received), reason::kSessionUnknown);
  }
}

TEST(GrpcStatus, DetailsNameDomainReasonAndMessage) {
  const google::rpc::Status details =
      DetailsOf(ToGrpc(WithReason(NotFound("no context \"a\""), reason::kContextUnknown)));
  EXPECT_EQ(details.code(), 5);
  EXPECT_EQ(details.message(), "no context \"a\"");
  ASSERT_EQ(details.details_size(), 1);
  EXPECT_EQ(details.details(0).type_url(), "type.googleapis.com/google.rpc.ErrorInfo");
  google::rpc::ErrorInfo info;
  ASSERT_TRUE(details.details(0).UnpackTo(&info));
  EXPECT_EQ(info.domain(), "kvtier");
  EXPECT_EQ(info.reason(), "CONTEXT_UNKNOWN");
}

TEST(GrpcStatus, ErrorsWorthRepeatingCarryARetryDelay) {
  for (const absl::Status& status : {Exhausted("full"), Unavailable("stopping")}) {
    const google::rpc::Status details = DetailsOf(ToGrpc(status));
    ASSERT_EQ(details.details_size(), 2);
    google::rpc::RetryInfo retry;
    ASSERT_TRUE(details.details(1).UnpackTo(&retry));
    EXPECT_EQ(retry.retry_delay().seconds(), 0);
    EXPECT_EQ(retry.retry_delay().nanos(), 50'000'000);
  }
}

TEST(GrpcStatus, ARateSaysWhenToComeAgain) {
  for (const uint32_t delay_ms : {1U, 999U, 1500U}) {
    const absl::Status sent =
        WithRetryDelay(WithReason(Exhausted("too fast"), reason::kRateLimited), delay_ms);
    EXPECT_EQ(RetryDelayMsOf(FromGrpc(ToGrpc(sent))), delay_ms);
  }
  EXPECT_EQ(RetryDelayMsOf(FromGrpc(ToGrpc(Exhausted("full")))), std::nullopt);
  EXPECT_EQ(RetryDelayMsOf(absl::OkStatus()), std::nullopt);
}

TEST(GrpcStatus, AnErrorWithoutReasonIsNamedByItsCode) {
  EXPECT_EQ(ReasonOf(FromGrpc(ToGrpc(Invalid("keys")))), reason::kBadArgument);
  EXPECT_EQ(ReasonOf(FromGrpc(ToGrpc(DeadlineExceeded("late")))), "DEADLINE_EXCEEDED");
  EXPECT_EQ(ReasonOf(FromGrpc(ToGrpc(Internal("bug")))), reason::kInternal);
}

TEST(GrpcStatus, ForeignAndBrokenDetailsLeaveTheCode) {
  google::rpc::Status foreign;
  google::rpc::ErrorInfo info;
  info.set_domain("elsewhere");
  info.set_reason("SESSION_UNKNOWN");
  foreign.add_details()->PackFrom(info);
  for (const std::string& details : {std::string("\xff\xff\xff"), foreign.SerializeAsString()}) {
    const absl::Status status =
        FromGrpc(grpc::Status(grpc::StatusCode::ABORTED, "message", details));
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
    EXPECT_EQ(FromAbsl(status.message()), "message");
    EXPECT_EQ(ReasonOf(status), "");
  }
}

}  // namespace
}  // namespace kvtier
