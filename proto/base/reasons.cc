// SPDX-License-Identifier: Apache-2.0
#include "proto/base/reasons.h"

#include "absl/strings/cord.h"
#include "proto/base/status_util.h"

namespace kvtier {
namespace {

constexpr char kReasonUrl[] = "kvtier/reason";

}  // namespace

absl::Status WithReason(absl::Status status, std::string_view reason) {
  if (!status.ok()) status.SetPayload(kReasonUrl, absl::Cord(ToAbsl(reason)));
  return status;
}

std::string ReasonOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kReasonUrl);
  return payload.has_value() ? std::string(*payload) : std::string();
}

}  // namespace kvtier
