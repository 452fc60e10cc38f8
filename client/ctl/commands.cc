// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/commands.h"

#include <cstdio>
#include <nlohmann/json.hpp>

#include "client/ctl/format.h"
#include "proto/base/status_util.h"
#include "proto/base/version.h"

namespace kvtier::ctl {
// One line of JSON would be hard on people, and programs do not mind. Names of files are bytes and
// need not be the UTF-8 that JSON demands.
absl::Status Print(bool json, const Json& data, const std::string& text) {
  const std::string out =
      json ? data.dump(2, ' ', false, Json::error_handler_t::replace) + "\n" : text;
  if (std::fwrite(out.data(), 1, out.size(), stdout) != out.size() || std::fflush(stdout) != 0) {
    return ErrnoStatus(errno, "write to standard output");
  }
  return absl::OkStatus();
}

absl::Status ShowStatus(const GlobalOptions& global) {
  client::AdminClient admin(global.admin());
  KVT_ASSIGN_OR_RETURN(const v1::GetStatusResponse status, admin.GetStatus());
  return Print(global.json, StatusJson(status), StatusText(status));
}

absl::Status ShowTiers(const GlobalOptions& global) {
  client::AdminClient admin(global.admin());
  KVT_ASSIGN_OR_RETURN(const v1::GetTiersResponse tiers, admin.GetTiers());
  return Print(global.json, TiersJson(tiers), TiersText(tiers));
}

absl::Status ShowTenants(const GlobalOptions& global) {
  client::AdminClient admin(global.admin());
  KVT_ASSIGN_OR_RETURN(const v1::ListTenantsResponse tenants, admin.ListTenants());
  return Print(global.json, TenantsJson(tenants), TenantsText(tenants));
}

absl::Status ShowContexts(const GlobalOptions& global, uint32_t limit) {
  client::AdminClient admin(global.admin());
  KVT_ASSIGN_OR_RETURN(const v1::ListContextsResponse contexts, admin.ListContexts(limit));
  return Print(global.json, ContextsJson(contexts), ContextsText(contexts));
}

absl::Status ShowWhere(const GlobalOptions& global, const std::string& context,
                       const std::string& key_hex) {
  client::AdminClient admin(global.admin());
  absl::StatusOr<v1::WhereResponse> where;
  if (key_hex.empty()) {
    where = admin.WhereContext(context);
  } else {
    KVT_ASSIGN_OR_RETURN(const Key key, Key::FromHex(key_hex));
    where = admin.WhereKey(key);
  }
  KVT_RETURN_IF_ERROR(where.status());
  return Print(global.json, WhereJson(*where), WhereText(*where));
}

absl::Status ShowWhyMiss(const GlobalOptions& global, const std::string& key_hex) {
  KVT_ASSIGN_OR_RETURN(const Key key, Key::FromHex(key_hex));
  client::AdminClient admin(global.admin());
  KVT_ASSIGN_OR_RETURN(const v1::WhyMissResponse misses, admin.WhyMiss(key));
  return Print(global.json, WhyMissJson(misses), WhyMissText(misses));
}

absl::Status ShowVersion(const GlobalOptions& global) {
  return Print(global.json, {{"version", kVersion}}, absl::StrFormat("kvtierctl %s\n", kVersion));
}

}  // namespace kvtier::ctl
