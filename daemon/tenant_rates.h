// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/call_rate.h"
#include "daemon/tenants.h"

namespace kvtier {

// How often each tenant may call. Thread-safe; never blocks.
class TenantRates {
 public:
  // `tenants` outlives this.
  explicit TenantRates(const TenantTable* tenants);

  // One call of the tenant. RESOURCE_EXHAUSTED (RATE_LIMITED) that says when to come again.
  absl::Status Take(OwnerIdx owner);

 private:
  const TenantTable* const tenants_;
  // Of each tenant; null: no limit.
  std::vector<std::unique_ptr<CallRate>> rates_;
};

}  // namespace kvtier
