// SPDX-License-Identifier: Apache-2.0
//
// What every call of the services does with its request: limits, packed fields, deadlines.
#pragma once

#include <grpcpp/server_context.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/core/store_core.h"
#include "kvtier/v1/context_store.pb.h"
#include "proto/base/key.h"
#include "tiers/tier.h"

namespace kvtier {

inline constexpr uint32_t kKeysPerCallMax = 4096;
inline constexpr uint32_t kChunkBytesMax = 1U << 20;
inline constexpr int kMessageBytesMax = 4 << 20;
// Deadlines of calls that come without one.
inline constexpr uint32_t kDefaultDeadlineMs = 1000;
inline constexpr uint32_t kDefaultTransferDeadlineMs = 10'000;

// `status` with the reason BAD_ARGUMENT.
absl::Status BadArgument(absl::Status status);

// All errors are INVALID_ARGUMENT (BAD_ARGUMENT) naming the field.
absl::StatusOr<std::vector<Key>> ParseKeys(std::string_view packed);
// One per key.
absl::StatusOr<std::vector<uint32_t>> ParseCrcs(std::string_view packed, size_t key_count);
// Empty: the chain begins with the first key.
absl::StatusOr<std::optional<Key>> ParseParentKey(std::string_view packed);
// 1..128 bytes without control characters.
absl::Status CheckContextName(std::string_view name, std::string_view field);
absl::Status CheckTextBytes(std::string_view text, size_t bytes_max, std::string_view field);
// hbm or host; unspecified is hbm.
absl::StatusOr<TierId> ParseMemoryTier(v1::Tier tier);

policy::NextStep NextStepOf(v1::NextStep next);
v1::Tier TierToProto(TierId tier);

// Milliseconds that the call may still take: its own deadline, or else `default_ms`. A little is
// kept back, so that the answer arrives before the client gives up.
uint64_t BudgetMs(const grpc::CallbackServerContext& context, uint32_t default_ms);
// The same as a point on the core's clock.
core::TimeMs DeadlineMs(const grpc::CallbackServerContext& context, uint32_t default_ms);

void FillTicket(const core::TicketState& state, v1::Ticket* ticket);
std::string PackStatuses(const std::vector<BlockStatus>& statuses);

}  // namespace kvtier
