// SPDX-License-Identifier: Apache-2.0
#include "daemon/tenant_rates.h"

#include "daemon/monotonic.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"

namespace kvtier {

TenantRates::TenantRates(const TenantTable* tenants) : tenants_(tenants) {
  for (OwnerIdx owner = 0; owner < tenants->count(); ++owner) {
    const uint32_t per_second = tenants->CallsPerSecond(owner);
    rates_.push_back(per_second == 0 ? nullptr : std::make_unique<CallRate>(per_second));
  }
}

absl::Status TenantRates::Take(OwnerIdx owner) {
  CallRate* const rate = rates_.at(owner).get();
  if (rate == nullptr) return absl::OkStatus();
  const uint64_t wait_us = rate->TakeUs(MonotonicUs());
  if (wait_us == 0) return absl::OkStatus();
  const auto wait_ms = static_cast<uint32_t>(wait_us / 1000 + 1);
  return WithRetryDelay(
      WithReason(Exhausted("tenant %s makes more than %d calls a second; again in %d ms",
                           tenants_->Name(owner), tenants_->CallsPerSecond(owner), wait_ms),
                 reason::kRateLimited),
      wait_ms);
}

}  // namespace kvtier
