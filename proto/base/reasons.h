// SPDX-License-Identifier: Apache-2.0
//
// Stable reasons of kvtier errors: google.rpc.ErrorInfo.reason, domain "kvtier". Programs may
// branch on them; messages are for people and may change.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace kvtier {

inline constexpr std::string_view kErrorDomain = "kvtier";

namespace reason {
// INVALID_ARGUMENT: a field is malformed or out of range; the message names it.
inline constexpr std::string_view kBadArgument = "BAD_ARGUMENT";
// ABORTED: the session is not known (daemon restarted, stream ended). Open a new one.
inline constexpr std::string_view kSessionUnknown = "SESSION_UNKNOWN";
// PERMISSION_DENIED: the token is not one the handle socket gave out, or is used already.
inline constexpr std::string_view kTokenUnknown = "TOKEN_UNKNOWN";
// PERMISSION_DENIED: the certificate of a caller on TCP is no tenant's, or not the session's.
inline constexpr std::string_view kIdentityUnknown = "IDENTITY_UNKNOWN";
// FAILED_PRECONDITION: the call gives out mapped memory, and the caller is on TCP.
inline constexpr std::string_view kNotMapped = "NOT_MAPPED";
// FAILED_PRECONDITION: the namespace was not opened in this session.
inline constexpr std::string_view kNamespaceUnknown = "NAMESPACE_UNKNOWN";
// NOT_FOUND.
inline constexpr std::string_view kContextUnknown = "CONTEXT_UNKNOWN";
inline constexpr std::string_view kKeyUnknown = "KEY_UNKNOWN";
inline constexpr std::string_view kTicketUnknown = "TICKET_UNKNOWN";
// OUT_OF_RANGE: a block count beyond the context's chain.
inline constexpr std::string_view kContextRange = "CONTEXT_RANGE";
// RESOURCE_EXHAUSTED: a bound of the daemon is reached (sessions, contexts, queued calls); the
// message names it. Carries RetryInfo.
inline constexpr std::string_view kLimitReached = "LIMIT_REACHED";
// RESOURCE_EXHAUSTED: the tenant's quota; the message has the numbers. Carries RetryInfo.
inline constexpr std::string_view kQuotaReached = "QUOTA_REACHED";
// RESOURCE_EXHAUSTED: the tenant's calls are more than its rate allows; nothing was done. Carries
// RetryInfo with the time after which the next one is served.
inline constexpr std::string_view kRateLimited = "RATE_LIMITED";
// UNAVAILABLE: the daemon is stopping or a part of it cannot answer. Carries RetryInfo.
inline constexpr std::string_view kDraining = "DRAINING";
inline constexpr std::string_view kTierUnavailable = "TIER_UNAVAILABLE";
// INTERNAL.
inline constexpr std::string_view kInternal = "INTERNAL";
}  // namespace reason

// Attaches a reason to an error; it travels as ErrorInfo. No effect on OK.
absl::Status WithReason(absl::Status status, std::string_view reason);
// The attached reason, or empty.
std::string ReasonOf(const absl::Status& status);

// Attaches how long to wait before the same again; it travels as RetryInfo. No effect on OK.
absl::Status WithRetryDelay(absl::Status status, uint32_t delay_ms);
// The attached delay in milliseconds, if there is one.
std::optional<uint32_t> RetryDelayMsOf(const absl::Status& status);

}  // namespace kvtier
