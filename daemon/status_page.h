// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "kvtier/v1/admin.pb.h"

namespace kvtier {

// One HTML page without any other resource. It asks /status.json every two seconds, and keeps the
// history that it draws: the daemon keeps none for it. It can change nothing.
extern const char kStatusPage[];

// What the page shows, as {"status": {...}, "tiers": {...}} in protobuf's JSON with names as in the
// .proto. No names of contexts and no keys: whoever reaches the port may read it.
std::string StatusJson(const v1::GetStatusResponse& status, const v1::GetTiersResponse& tiers);

}  // namespace kvtier
