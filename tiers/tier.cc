// SPDX-License-Identifier: Apache-2.0
#include "tiers/tier.h"

#include "proto/base/check.h"

namespace kvtier {

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
