// SPDX-License-Identifier: Apache-2.0
//
// What Prometheus is told: the counters of the admin service under names of their own.
#pragma once

#include <string>

#include "kvtier/v1/admin.pb.h"

namespace kvtier {

// The exposition (text format 0.0.4) of one moment. Every series is there from the start, at 0: a
// series that is missing means an old kvtierd, never "nothing happened yet". Blocks are counted,
// not tokens; kvtier_lookup_hit_blocks_total over all tiers and kvtier_lookup_miss_blocks_total add
// up to kvtier_lookup_blocks_total. Names are additive over versions: none changes its meaning.
//
// Series that have a tenant as a label are as many as the configuration has tenants.
std::string MetricsText(const v1::GetStatusResponse& status, const v1::GetTiersResponse& tiers,
                        const v1::ListTenantsResponse& tenants);

}  // namespace kvtier
