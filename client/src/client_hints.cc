// SPDX-License-Identifier: Apache-2.0
//
// Hints, as the JSON that engines and routers exchange.
#include <google/protobuf/util/json_util.h>

#include "client/src/client_impl.h"
#include "proto/base/reasons.h"

namespace kvtier::client {

absl::StatusOr<std::vector<HintOutcome>> Client::ApplyHints(const Namespace& ns,
                                                            std::string_view envelope_json) {
  v1::ApplyHintsRequest request;
  google::protobuf::util::JsonParseOptions options;
  // Envelopes of later versions may have more.
  options.ignore_unknown_fields = true;
  const auto parsed = google::protobuf::util::JsonStringToMessage(
      std::string(envelope_json), request.mutable_envelope(), options);
  if (!parsed.ok()) {
    return WithReason(Invalid("envelope: %s", parsed.ToString()), reason::kBadArgument);
  }
  KVT_ASSIGN_OR_RETURN(
      const v1::ApplyHintsResponse response,
      impl_->Call(&Stub::ApplyHints, &ns, std::move(request), impl_->options().control_timeout_ms));
  std::vector<HintOutcome> outcomes;
  for (const v1::KvHintOutcome& outcome : response.outcomes()) {
    outcomes.push_back({.action_id = outcome.action_id(),
                        .outcome = outcome.outcome(),
                        .detail = outcome.detail(),
                        .ticket_id = outcome.ticket().ticket_id()});
  }
  return outcomes;
}

}  // namespace kvtier::client
