// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "daemon/core/store_core.h"

namespace kvtier {

// The sessions as the wire names them. A wire id is random: it is all that a call shows of its
// session, so one tenant must not be able to guess another's. Thread-safe; never blocks.
class SessionTable {
 public:
  struct Session {
    core::SessionId core_id = 0;
    OwnerIdx owner = 0;
  };

  // The wire id.
  uint64_t Add(const Session& session);
  // No effect when it is gone already.
  void Remove(uint64_t wire_id);

  // ABORTED (SESSION_UNKNOWN).
  absl::StatusOr<Session> Find(uint64_t wire_id) const;

  // ABORTED, RESOURCE_EXHAUSTED (LIMIT_REACHED).
  absl::Status AddNamespace(uint64_t wire_id, core::NamespaceIdx ns,
                            const core::NamespaceSpec& spec);
  // ABORTED, FAILED_PRECONDITION (NAMESPACE_UNKNOWN).
  absl::StatusOr<core::NamespaceSpec> FindNamespace(uint64_t wire_id, core::NamespaceIdx ns) const;

  static constexpr size_t kNamespacesPerSessionMax = 1024;

 private:
  struct Entry {
    Session session;
    absl::flat_hash_map<core::NamespaceIdx, core::NamespaceSpec> namespaces;
  };

  mutable absl::Mutex mutex_;
  absl::flat_hash_map<uint64_t, Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtier
