// SPDX-License-Identifier: Apache-2.0
//
// What kvtierctl prints of the daemon's answers: tables for people, JSON for programs. The JSON
// schema is stable: snake_case, bytes and counts as numbers, keys and epochs as hexadecimal text,
// tiers as "hbm", "host", "nvme". Fields are added, never renamed.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "kvtier/v1/admin.pb.h"

namespace kvtier::ctl {

using Json = nlohmann::ordered_json;

std::string TierText(v1::Tier tier);
// Epochs are random 64-bit numbers: programs in languages without them get text.
std::string EpochText(uint64_t epoch);

Json StatusJson(const v1::GetStatusResponse& status);
std::string StatusText(const v1::GetStatusResponse& status);

Json TiersJson(const v1::GetTiersResponse& tiers);
std::string TiersText(const v1::GetTiersResponse& tiers);

Json TenantsJson(const v1::ListTenantsResponse& tenants);
std::string TenantsText(const v1::ListTenantsResponse& tenants);

Json ContextsJson(const v1::ListContextsResponse& contexts);
std::string ContextsText(const v1::ListContextsResponse& contexts);

Json WhyMissJson(const v1::WhyMissResponse& misses);
std::string WhyMissText(const v1::WhyMissResponse& misses);
Json WhereJson(const v1::WhereResponse& where);
std::string WhereText(const v1::WhereResponse& where);

}  // namespace kvtier::ctl
