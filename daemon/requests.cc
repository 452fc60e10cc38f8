// SPDX-License-Identifier: Apache-2.0
#include "daemon/requests.h"

#include <algorithm>
#include <chrono>

#include "daemon/monotonic.h"
#include "proto/base/packed.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"

namespace kvtier {
namespace {

constexpr size_t kContextNameBytesMax = 128;
// No call waits longer, whatever its client says.
constexpr int64_t kBudgetMsMax = 3'600'000;

}  // namespace

absl::Status BadArgument(absl::Status status) {
  return WithReason(std::move(status), reason::kBadArgument);
}

absl::StatusOr<std::vector<Key>> ParseKeys(std::string_view packed) {
  if (packed.size() > static_cast<size_t>(kKeysPerCallMax) * Key::kBytes) {
    return BadArgument(
        Invalid("keys: %d bytes, more than %d keys", packed.size(), kKeysPerCallMax));
  }
  auto keys = UnpackRecords<Key>(packed, "keys");
  if (!keys.ok()) return BadArgument(keys.status());
  return keys;
}

absl::StatusOr<std::vector<uint32_t>> ParseCrcs(std::string_view packed, size_t key_count) {
  if (packed.size() != key_count * sizeof(uint32_t)) {
    return BadArgument(
        Invalid("crc32cs: %d bytes, must be 4 for each of the %d keys", packed.size(), key_count));
  }
  return UnpackRecords<uint32_t>(packed, "crc32cs");
}

absl::StatusOr<std::optional<Key>> ParseParentKey(std::string_view packed) {
  if (packed.empty()) return std::optional<Key>();
  auto key = Key::FromBytes(packed);
  if (!key.ok()) {
    return BadArgument(Invalid("parent_key: %d bytes, must be 0 or 32", packed.size()));
  }
  return std::optional<Key>(*key);
}

absl::Status CheckContextName(std::string_view name, std::string_view field) {
  const auto control = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; };
  if (name.empty() || name.size() > kContextNameBytesMax ||
      std::any_of(name.begin(), name.end(), control)) {
    return BadArgument(Invalid("%s: must have 1..%d bytes and no control characters", field,
                               kContextNameBytesMax));
  }
  return absl::OkStatus();
}

absl::Status CheckTextBytes(std::string_view text, size_t bytes_max, std::string_view field) {
  if (text.size() <= bytes_max) return absl::OkStatus();
  return BadArgument(Invalid("%s: %d bytes, more than %d", field, text.size(), bytes_max));
}

absl::StatusOr<TierId> ParseMemoryTier(v1::Tier tier) {
  if (tier == v1::TIER_UNSPECIFIED || tier == v1::TIER_HBM) return TierId::kHbm;
  if (tier == v1::TIER_HOST) return TierId::kHost;
  return BadArgument(Invalid("tier: %d, must be TIER_HBM or TIER_HOST", static_cast<int>(tier)));
}

policy::NextStep NextStepOf(v1::NextStep next) {
  switch (next) {
    case v1::NEXT_STEP_TOOL:
      return policy::NextStep::kTool;
    case v1::NEXT_STEP_USER:
      return policy::NextStep::kUser;
    default:  // or a value of a later version
      return policy::NextStep::kUnknown;
  }
}

v1::Tier TierToProto(TierId tier) {
  switch (tier) {
    case TierId::kHbm:
      return v1::TIER_HBM;
    case TierId::kHost:
      return v1::TIER_HOST;
    case TierId::kNvme:
      return v1::TIER_NVME;
  }
  return v1::TIER_UNSPECIFIED;
}

uint64_t BudgetMs(const grpc::CallbackServerContext& context, uint32_t default_ms) {
  const auto deadline = context.deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) return default_ms;
  const int64_t left_ms = std::chrono::duration_cast<std::chrono::milliseconds>(
                              deadline - std::chrono::system_clock::now())
                              .count();
  const int64_t budget_ms = std::clamp<int64_t>(left_ms, 0, kBudgetMsMax);
  return static_cast<uint64_t>(budget_ms - std::min<int64_t>(20, budget_ms / 10));
}

core::TimeMs DeadlineMs(const grpc::CallbackServerContext& context, uint32_t default_ms) {
  return MonotonicMs() + BudgetMs(context, default_ms);
}

void FillTicket(const core::TicketState& state, v1::Ticket* ticket) {
  ticket->set_ticket_id(state.ticket);
  ticket->set_board_slot(state.board_slot);
  ticket->set_block_count(state.block_count);
  ticket->set_covered_block_count(state.covered_block_count);
  ticket->set_ready_block_count(state.ready_block_count);
  ticket->set_pending_bytes(state.pending_bytes);
  ticket->set_eta_ms(state.eta_ms);
  ticket->set_eta_known(state.eta_known);
  ticket->set_done(state.done);
  ticket->set_recompute_block_count(state.recompute_block_count);
}

std::string PackStatuses(const std::vector<BlockStatus>& statuses) {
  return PackRecords<BlockStatus>(statuses);
}

}  // namespace kvtier
