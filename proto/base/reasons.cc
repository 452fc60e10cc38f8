// SPDX-License-Identifier: Apache-2.0
#include "proto/base/reasons.h"

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "proto/base/status_util.h"

namespace kvtier {
namespace {

constexpr char kReasonUrl[] = "kvtier/reason";
constexpr char kRetryDelayUrl[] = "kvtier/retry-delay-ms";

}  // namespace

absl::Status WithReason(absl::Status status, std::string_view reason) {
  if (!status.ok()) status.SetPayload(kReasonUrl, absl::Cord(ToAbsl(reason)));
  return status;
}

std::string ReasonOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kReasonUrl);
  return payload.has_value() ? std::string(*payload) : std::string();
}

absl::Status WithRetryDelay(absl::Status status, uint32_t delay_ms) {
  // From a string, clang calls a constructor by a name that Abseil built by GCC does not have.
  const std::string text = std::to_string(delay_ms);
  if (!status.ok()) status.SetPayload(kRetryDelayUrl, absl::Cord(ToAbsl(text)));
  return status;
}

std::optional<uint32_t> RetryDelayMsOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kRetryDelayUrl);
  uint32_t delay_ms = 0;
  if (!payload.has_value() || !absl::SimpleAtoi(std::string(*payload), &delay_ms)) {
    return std::nullopt;
  }
  return delay_ms;
}

}  // namespace kvtier
