// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "proto/base/key.h"
#include "tiers/tier.h"

namespace kvtier {

// Notices engines that hash the same tokens differently under one name: each has a namespace of its
// own (HashNamespace), which is right and easily taken for a cache that does not work. Of this
// process's time, and of the tenants alone. Thread-safe.
class HashDomains {
 public:
  // What is remembered; beyond that nothing is noticed.
  static constexpr size_t kCountMax = 4096;

  // Whether this tenant's last registration of the layout and the domain had another probe.
  // Requires: a domain with a name.
  bool Differs(OwnerIdx owner, const LayoutFingerprint& layout, const HashDomain& domain);

 private:
  absl::Mutex mutex_;
  // By tenant, layout and name.
  absl::flat_hash_map<Digest, std::string> probes_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtier
