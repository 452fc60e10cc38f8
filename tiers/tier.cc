// SPDX-License-Identifier: Apache-2.0
#include "tiers/tier.h"

#include "absl/strings/cord.h"
#include "proto/base/check.h"

namespace kvtier {
namespace {

constexpr char kBudgetSpentUrl[] = "kvtier/nvme-write-budget-spent";

}  // namespace

bool IsWriteBudgetSpent(const absl::Status& status) {
  return status.GetPayload(kBudgetSpentUrl).has_value();
}

absl::Status WriteBudgetSpent(absl::Status exhausted) {
  KVT_CHECK(absl::IsResourceExhausted(exhausted));
  exhausted.SetPayload(kBudgetSpentUrl, absl::Cord("1"));
  return exhausted;
}

const char* TierName(TierId tier) {
  switch (tier) {
    case TierId::kHbm:
      return "hbm";
    case TierId::kHost:
      return "host";
    case TierId::kNvme:
      return "nvme";
  }
  KVT_CHECK(false);
}

}  // namespace kvtier
