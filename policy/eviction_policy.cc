// SPDX-License-Identifier: Apache-2.0
#include "policy/policy.h"

namespace kvtier::policy {

void EvictionPolicy::Use(const BlockUse& /*use*/) {}

void EvictionPolicy::Expect(BlockRef /*block*/, NextStep /*next*/, uint64_t /*now_ms*/,
                            uint64_t /*returns_in_ms*/) {}

void EvictionPolicy::Forget(BlockRef /*block*/, uint64_t /*key*/) {}

}  // namespace kvtier::policy
