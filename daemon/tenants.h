// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "daemon/config.h"
#include "tiers/tier.h"

namespace kvtier {

// Who is which tenant. A tenant's number is its OwnerIdx: memory of two tenants never shares a
// segment, blocks of two tenants never share a namespace. Immutable.
class TenantTable {
 public:
  // `daemon_uid`: the uid this process runs as.
  TenantTable(const Config& config, uid_t daemon_uid);

  // Empty: this uid may not open sessions.
  std::optional<OwnerIdx> OwnerOf(uid_t uid) const;
  // For the names of one certificate (daemon/peer_names.h). Empty: none of them is a tenant's, or
  // two are of two tenants.
  std::optional<OwnerIdx> OwnerOf(std::span<const std::string> certificate_names) const;
  // The name of the [[admin]] that one of them is; empty: no admin. Lives as long as the table.
  const std::string& AdminOf(std::span<const std::string> certificate_names) const;
  // Calls a second; 0: no limit. Requires: `owner` is below count().
  uint32_t CallsPerSecond(OwnerIdx owner) const { return calls_per_second_.at(owner); }
  // Owners are the numbers below this.
  OwnerIdx count() const { return static_cast<OwnerIdx>(names_.size()); }
  // What each may have on each tier, by number.
  std::vector<TenantBytes> Limits(const Config& config) const;
  // Requires: `owner` came from OwnerOf, or is below count().
  const std::string& Name(OwnerIdx owner) const { return names_.at(owner); }

 private:
  std::vector<std::string> names_;
  // Of each of names_.
  std::vector<uint32_t> calls_per_second_;
  absl::flat_hash_map<uid_t, OwnerIdx> owner_of_uid_;
  absl::flat_hash_map<std::string, OwnerIdx> owner_of_certificate_;
  absl::flat_hash_map<std::string, std::string> admin_of_certificate_;
  const std::string nobody_;
  bool any_uid_is_default_ = false;
};

}  // namespace kvtier
