// SPDX-License-Identifier: Apache-2.0
#include "daemon/session_table.h"

#include "daemon/random_bytes.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"

namespace kvtier {
namespace {

absl::Status UnknownSession() {
  return WithReason(Aborted("the session is not known here (any more); open a new one"),
                    reason::kSessionUnknown);
}

}  // namespace

uint64_t SessionTable::Add(const Session& session) {
  absl::MutexLock lock(&mutex_);
  while (true) {
    const uint64_t wire_id = RandomNonZero();
    if (entries_.try_emplace(wire_id, Entry{.session = session, .namespaces = {}}).second) {
      return wire_id;
    }
  }
}

void SessionTable::Remove(uint64_t wire_id) {
  absl::MutexLock lock(&mutex_);
  entries_.erase(wire_id);
}

absl::StatusOr<SessionTable::Session> SessionTable::Find(uint64_t wire_id) const {
  absl::MutexLock lock(&mutex_);
  const auto found = entries_.find(wire_id);
  if (found == entries_.end()) return UnknownSession();
  return found->second.session;
}

absl::Status SessionTable::AddNamespace(uint64_t wire_id, core::NamespaceIdx ns,
                                        const core::NamespaceSpec& spec) {
  absl::MutexLock lock(&mutex_);
  const auto found = entries_.find(wire_id);
  if (found == entries_.end()) return UnknownSession();
  auto& namespaces = found->second.namespaces;
  if (!namespaces.contains(ns) && namespaces.size() >= kNamespacesPerSessionMax) {
    return WithReason(
        Exhausted("%d namespaces are open in this session, which is the limit", namespaces.size()),
        reason::kLimitReached);
  }
  namespaces.emplace(ns, spec);
  return absl::OkStatus();
}

absl::StatusOr<core::NamespaceSpec> SessionTable::FindNamespace(uint64_t wire_id,
                                                                core::NamespaceIdx ns) const {
  absl::MutexLock lock(&mutex_);
  const auto found = entries_.find(wire_id);
  if (found == entries_.end()) return UnknownSession();
  const auto spec = found->second.namespaces.find(ns);
  if (spec == found->second.namespaces.end()) {
    return WithReason(
        FailedPrecondition("namespace %d is not open in this session; call RegisterLayout first",
                           ns),
        reason::kNamespaceUnknown);
  }
  return spec->second;
}

}  // namespace kvtier
