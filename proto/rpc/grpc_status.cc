// SPDX-License-Identifier: Apache-2.0
#include "proto/rpc/grpc_status.h"

#include <algorithm>
#include <string>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"

namespace kvtier {
namespace {

// Both enumerations carry the numbers of google.rpc.Code.
static_assert(static_cast<int>(absl::StatusCode::kUnauthenticated) ==
              static_cast<int>(grpc::StatusCode::UNAUTHENTICATED));

// What the other side may ask for.
constexpr int64_t kDelayMsMax = 60'000;

std::string ReasonOnWire(const absl::Status& status) {
  std::string reason = ReasonOf(status);
  if (!reason.empty()) return reason;
  if (status.code() == absl::StatusCode::kInvalidArgument) {
    return std::string(reason::kBadArgument);
  }
  return absl::StatusCodeToString(status.code());
}

bool IsWorthRepeating(absl::StatusCode code) {
  return code == absl::StatusCode::kResourceExhausted || code == absl::StatusCode::kUnavailable;
}

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const std::string message(status.message());

  google::rpc::Status details;
  details.set_code(static_cast<int>(status.code()));
  details.set_message(message);
  google::rpc::ErrorInfo info;
  info.set_reason(ReasonOnWire(status));
  info.set_domain(std::string(kErrorDomain));
  details.add_details()->PackFrom(info);
  if (IsWorthRepeating(status.code())) {
    google::rpc::RetryInfo retry;
    const uint32_t delay_ms = RetryDelayMsOf(status).value_or(kRetryDelayMs);
    retry.mutable_retry_delay()->set_seconds(delay_ms / 1000);
    retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(delay_ms % 1000) * 1'000'000);
    details.add_details()->PackFrom(retry);
  }
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), message,
                      details.SerializeAsString());
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  absl::Status result(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) return result;
  for (const auto& any : details.details()) {
    google::rpc::ErrorInfo info;
    if (any.UnpackTo(&info) && info.domain() == kErrorDomain) {
      result = WithReason(std::move(result), info.reason());
      break;
    }
  }
  // Of other errors the delay is a constant, which says nothing.
  if (ReasonOf(result) != reason::kRateLimited) return result;
  for (const auto& any : details.details()) {
    google::rpc::RetryInfo retry;
    if (!any.UnpackTo(&retry)) continue;
    const int64_t delay_ms =
        retry.retry_delay().seconds() * 1000 + retry.retry_delay().nanos() / 1'000'000;
    return WithRetryDelay(std::move(result),
                          static_cast<uint32_t>(std::clamp<int64_t>(delay_ms, 0, kDelayMsMax)));
  }
  return result;
}

}  // namespace kvtier
