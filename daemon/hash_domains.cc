// SPDX-License-Identifier: Apache-2.0
#include "daemon/hash_domains.h"

#include <utility>

namespace kvtier {

bool HashDomains::Differs(OwnerIdx owner, const LayoutFingerprint& layout,
                          const HashDomain& domain) {
  const Digest place = FieldHasher().AddU32(owner).Add(layout.AsBytes()).Add(domain.name).Finish();
  absl::MutexLock lock(&mutex_);
  const auto known = probes_.find(place);
  if (known != probes_.end()) return std::exchange(known->second, domain.probe) != domain.probe;
  if (probes_.size() < kCountMax) probes_.emplace(place, domain.probe);
  return false;
}

}  // namespace kvtier
