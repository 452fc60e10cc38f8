// SPDX-License-Identifier: Apache-2.0
//
// Sessions and namespaces: who may ask, and what ends with him.
#include <algorithm>

#include "daemon/core/core_impl.h"
#include "proto/base/check.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"

namespace kvtier::core {

absl::StatusOr<Session*> StoreCore::Impl::FindSession(SessionId session) {
  const auto it = sessions_.find(session);
  if (it == sessions_.end() || it->second->ended) {
    return WithReason(Aborted("session %d is not known here (any more); open a new one", session),
                      reason::kSessionUnknown);
  }
  return it->second.get();
}

absl::StatusOr<Session*> StoreCore::Impl::FindSession(SessionId session, NamespaceIdx ns) {
  KVT_ASSIGN_OR_RETURN(Session * found, FindSession(session));
  if (!found->namespaces.contains(ns)) {
    return WithReason(FailedPrecondition("namespace %d is not open in this session; call "
                                         "RegisterLayout first",
                                         ns),
                      reason::kNamespaceUnknown);
  }
  return found;
}

absl::StatusOr<SessionId> StoreCore::Impl::OpenSession(OwnerIdx owner) {
  if (draining_) return WithReason(Unavailable("the daemon is stopping"), reason::kDraining);
  if (sessions_.size() >= options_.sessions_max) {
    return WithReason(Exhausted("%d sessions are open, which is the limit (server.sessions_max)",
                                sessions_.size()),
                      reason::kLimitReached);
  }
  auto session = std::make_unique<Session>();
  session->id = NextId();
  session->owner = owner;
  const SessionId id = session->id;
  sessions_.emplace(id, std::move(session));
  ++counters_.session_count;
  return id;
}

void StoreCore::Impl::EndSession(SessionId id, TimeMs now_ms, Effects* effects) {
  const auto it = sessions_.find(id);
  if (it == sessions_.end() || it->second->ended) return;
  Session* session = it->second.get();
  session->ended = true;
  --counters_.session_count;
  const absl::Status gone = WithReason(Aborted("the session ended"), reason::kSessionUnknown);
  for (auto waiter = reserve_waiters_.begin(); waiter != reserve_waiters_.end();) {
    if (waiter->session != id) {
      ++waiter;
      continue;
    }
    effects->replies.push_back([done = std::move(waiter->done), gone] { done(gone); });
    waiter = reserve_waiters_.erase(waiter);
  }
  for (auto waiter = acquire_waiters_.begin(); waiter != acquire_waiters_.end();) {
    const auto next = std::next(waiter);
    if (waiter->second.session == id) {
      FinishAcquire(waiter->first, BlockStatus::kPending, effects);
    }
    waiter = next;
  }
  // In an order of their own, so that the same events have the same effects.
  std::vector<EntryIdx> fills(session->fills.begin(), session->fills.end());
  std::sort(fills.begin(), fills.end());
  for (const EntryIdx idx : fills) AbandonFill(session, idx, session->mapped);
  for (const TicketId ticket : session->tickets) StopTicket(ticket);
  for (const TicketId ticket : session->tickets) tickets_.erase(ticket);
  session->tickets.clear();
  for (auto& [pause_id, pause] : pauses_) {
    if (pause.session == id && pause.done) {
      effects->replies.push_back([done = std::move(pause.done), gone] { done(gone); });
      pause.done = nullptr;
    }
  }
  if (!session->mapped) {
    EndLeases(session);
    sessions_.erase(it);
  }
  Pump(now_ms, effects);
}

void StoreCore::Impl::DetachMapping(SessionId id, TimeMs now_ms, Effects* effects) {
  const auto it = sessions_.find(id);
  if (it == sessions_.end() || !it->second->mapped) return;
  Session* session = it->second.get();
  session->mapped = false;
  FreeQuarantine(session);
  if (session->ended) {
    EndLeases(session);
    sessions_.erase(it);
  }
  Pump(now_ms, effects);
}

void StoreCore::Impl::EndLeases(Session* session) {
  std::vector<LeaseId> leases;
  for (const auto& [lease, entries] : session->leases) leases.push_back(lease);
  std::sort(leases.begin(), leases.end());
  for (const LeaseId lease : leases) {
    for (const EntryIdx idx : session->leases.at(lease)) Unlease(idx);
  }
  session->leases.clear();
}

void StoreCore::Impl::FreeQuarantine(Session* session) {
  for (const Quarantined& slot : session->quarantine) {
    counters_.tiers[slot.tier].quarantined_bytes -= slot.bytes;
    GiveBack(slot.tier, slot.replica, session->owner + 1, static_cast<uint32_t>(slot.bytes));
  }
  session->quarantine.clear();
}

absl::StatusOr<NamespaceIdx> StoreCore::Impl::AddNamespace(const NamespaceSpec& spec) {
  const auto known = namespace_of_hash_.find(spec.hash);
  if (known != namespace_of_hash_.end()) return known->second;
  if (namespaces_.size() >= std::min(options_.namespaces_max, kNamespaceCountMax)) {
    return WithReason(Exhausted("%d namespaces are known, which is the limit", namespaces_.size()),
                      reason::kLimitReached);
  }
  const auto ns = static_cast<NamespaceIdx>(namespaces_.size());
  namespace_of_hash_.emplace(spec.hash, ns);
  namespaces_.push_back({spec, std::nullopt});
  return ns;
}

absl::StatusOr<NamespaceIdx> StoreCore::Impl::OpenNamespace(SessionId id,
                                                            const NamespaceSpec& spec) {
  KVT_ASSIGN_OR_RETURN(Session * session, FindSession(id));
  // A block that no segment can hold would wait for room for ever.
  for (const size_t tier : {kHbm, kHost}) {
    const auto slot = tiers_[tier]->Reserve(spec.block_bytes, session->owner);
    if (slot.ok()) tiers_[tier]->Free(*slot);
    if (slot.status().code() == absl::StatusCode::kInvalidArgument) {
      return WithReason(Annotate(slot.status(), "this layout's blocks fit no segment"),
                        reason::kBadArgument);
    }
  }
  KVT_ASSIGN_OR_RETURN(const NamespaceIdx ns, AddNamespace(spec));
  NamespaceInfo& known = namespaces_[ns];
  if (known.spec.layout != spec.layout || known.spec.block_bytes != spec.block_bytes) {
    return WithReason(
        Invalid("namespace %s holds blocks of %d bytes under layout %s; this layout has %d bytes "
                "and fingerprint %s",
                spec.hash.Hex(), known.spec.block_bytes, known.spec.layout.Hex(), spec.block_bytes,
                spec.layout.Hex()),
        reason::kBadArgument);
  }
  if (!known.owner.has_value()) {
    known.owner = session->owner;
    for (const TenantTierCounters& tier : accounts_[kUnclaimed].counters.tiers) {
      if (tier.block_count > 0) claim_next_ = 0;
    }
  }
  KVT_CHECK(*known.owner == session->owner);    // the tenant's name is part of the hash
  known.spec.block_tokens = spec.block_tokens;  // recovered blocks do not tell
  session->namespaces.insert(ns);
  return ns;
}

absl::Status StoreCore::Impl::CheckWaiterRoom() const {
  if (draining_) return WithReason(Unavailable("the daemon is stopping"), reason::kDraining);
  if (reserve_waiters_.size() + acquire_waiters_.size() + pauses_.size() >= options_.waiters_max) {
    return WithReason(Exhausted("%d calls are waiting for room or reads, which is the limit",
                                options_.waiters_max),
                      reason::kLimitReached);
  }
  return absl::OkStatus();
}

}  // namespace kvtier::core
