// SPDX-License-Identifier: Apache-2.0
#include "daemon/tenants.h"

#include <algorithm>

namespace kvtier {
namespace {

constexpr char kDefaultTenant[] = "default";

}  // namespace

TenantTable::TenantTable(const Config& config, uid_t daemon_uid)
    : names_{kDefaultTenant}, calls_per_second_{config.server.tenant_calls_per_second} {
  for (const TenantConfig& tenant : config.tenants) {
    // A [[tenant]] named "default" adds uids to it.
    const auto found = std::find(names_.begin(), names_.end(), tenant.name);
    const auto owner = static_cast<OwnerIdx>(found - names_.begin());
    if (found == names_.end()) {
      names_.push_back(tenant.name);
      calls_per_second_.push_back(config.server.tenant_calls_per_second);
    }
    if (tenant.calls_per_second != 0) calls_per_second_[owner] = tenant.calls_per_second;
    for (const uint32_t uid : tenant.uids) owner_of_uid_.emplace(uid, owner);
    for (const std::string& name : tenant.certificates) owner_of_certificate_.emplace(name, owner);
  }
  for (const AdminConfig& admin : config.admins) {
    for (const std::string& name : admin.certificates) {
      admin_of_certificate_.emplace(name, admin.name);
    }
  }
  owner_of_uid_.emplace(0, 0);
  owner_of_uid_.emplace(daemon_uid, 0);
  any_uid_is_default_ = config.server.default_tenant_uids == "any";
}

std::vector<TenantBytes> TenantTable::Limits(const Config& config) const {
  std::vector<TenantBytes> limits(names_.size(), BytesOf({.name = ""}, config));
  for (const TenantConfig& tenant : config.tenants) {
    const auto found = std::find(names_.begin(), names_.end(), tenant.name);
    limits[static_cast<size_t>(found - names_.begin())] = BytesOf(tenant, config);
  }
  return limits;
}

std::optional<OwnerIdx> TenantTable::OwnerOf(uid_t uid) const {
  const auto found = owner_of_uid_.find(uid);
  if (found != owner_of_uid_.end()) return found->second;
  if (any_uid_is_default_) return OwnerIdx{0};
  return std::nullopt;
}

std::optional<OwnerIdx> TenantTable::OwnerOf(std::span<const std::string> certificate_names) const {
  std::optional<OwnerIdx> owner;
  for (const std::string& name : certificate_names) {
    const auto found = owner_of_certificate_.find(name);
    if (found == owner_of_certificate_.end()) continue;
    if (owner.has_value() && *owner != found->second) return std::nullopt;
    owner = found->second;
  }
  return owner;
}

const std::string& TenantTable::AdminOf(std::span<const std::string> certificate_names) const {
  for (const std::string& name : certificate_names) {
    const auto found = admin_of_certificate_.find(name);
    if (found != admin_of_certificate_.end()) return found->second;
  }
  return nobody_;
}

}  // namespace kvtier
