// SPDX-License-Identifier: Apache-2.0
#include "policy/hazard_policy.h"
#include "policy/policy.h"
#include "proto/base/status_util.h"

namespace kvtier::policy {

void EvictionPolicy::Use(const BlockUse& /*use*/) {}

void EvictionPolicy::Expect(BlockRef /*block*/, NextStep /*next*/, uint64_t /*now_ms*/,
                            uint64_t /*returns_in_ms*/) {}

void EvictionPolicy::Forget(BlockRef /*block*/, uint64_t /*key*/) {}

bool EvictionPolicy::BeatsIdleVictim(TierIdx /*tier*/, PoolIdx /*pool*/, BlockRef /*block*/) {
  return true;
}

std::string EvictionPolicy::Save() const { return {}; }

absl::Status EvictionPolicy::Restore(std::string_view /*saved*/) {
  return absl::DataLossError("this policy learns nothing");
}

absl::StatusOr<EvictionKind> ParseEviction(std::string_view name) {
  if (name == "lru") return EvictionKind::kLru;
  if (name == "hazard") return EvictionKind::kHazard;
  return Invalid("eviction \"%s\" is unknown; use \"lru\" or \"hazard\"", name);
}

std::unique_ptr<EvictionPolicy> NewEvictionPolicy(EvictionKind kind) {
  if (kind == EvictionKind::kLru) return NewLruPolicy();
  return std::make_unique<HazardPolicy>(HazardOptions{});
}

}  // namespace kvtier::policy
