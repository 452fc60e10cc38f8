// SPDX-License-Identifier: Apache-2.0
//
// Prefetch: blocks on their way to hbm, in chain order, behind demanded reads.
#include <algorithm>

#include "daemon/core/core_impl.h"
#include "proto/base/check.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"

namespace kvtier::core {
namespace {

// Closed tickets a session may still ask about.
constexpr size_t kTicketsKept = 256;
// Below this much measured time a link's speed is not known.
constexpr uint64_t kMeasuredMsMin = 5;

}  // namespace

absl::StatusOr<TicketState> StoreCore::Impl::Prefetch(SessionId session_id, NamespaceIdx ns,
                                                      std::span<const Key> keys, TimeMs now_ms,
                                                      Effects* effects) {
  KVT_ASSIGN_OR_RETURN(Session * session, FindSession(session_id, ns));
  std::vector<EntryIdx> chain;
  for (const Key& key : keys) {
    const EntryIdx idx = Find(ns, key);
    if (idx == kNoEntry || !Visible(At(idx))) break;
    chain.push_back(idx);
  }
  TicketWork* ticket = OpenTicket(session, std::move(chain), static_cast<uint32_t>(keys.size()));
  Pump(now_ms, effects);
  return StateOf(*ticket);
}

TicketWork* StoreCore::Impl::OpenTicket(Session* session, std::vector<EntryIdx> chain,
                                        uint32_t asked_count) {
  while (session->tickets.size() >= kTicketsKept) {
    const TicketId oldest = session->tickets.front();
    StopTicket(oldest);
    tickets_.erase(oldest);
    session->tickets.pop_front();
  }
  const TicketId id = NextId();
  TicketWork& ticket = tickets_[id];
  ticket.id = id;
  ticket.asked_count = asked_count;
  ticket.chain = std::move(chain);
  for (const EntryIdx idx : ticket.chain) ++At(idx).context_refs;
  session->tickets.push_back(id);
  ticket_queue_.push_back(id);
  return &ticket;
}

bool StoreCore::Impl::AdvanceTicket(TicketWork* ticket, Effects* effects) {
  for (; ticket->next < ticket->chain.size(); ++ticket->next) {
    const EntryIdx idx = ticket->chain[ticket->next];
    const Entry& entry = At(idx);
    if (!Visible(entry)) {
      ticket->next = ticket->chain.size();  // what follows a gap is of no use
      return true;
    }
    if (entry.replica[kHbm] != kNoReplica && entry.job == 0) continue;
    if (entry.job != 0) return false;  // look again when that transfer has ended
    if (MemoryTier(entry) == kHost) {
      if (entry.lease_count > 0) continue;  // read in place
      if (LinkFull(kHost, kHbm, true)) return false;
      if (AboveHighWatermark(kHbm, Footprint(kHbm, entry.ns)) &&
          !eviction_->IdleVictim(kHbm).has_value()) {
        continue;
      }
      const SlotOrRoom slot = TakeSlotOrMakeRoom(kHbm, entry.ns, true, 1, effects);
      if (slot.replica == kNoReplica) {
        if (slot.room == Room::kLeaving) return false;
        continue;  // stays on host
      }
      if (MemoryTier(entry) != kHost || entry.job != 0) {
        tiers_[kHbm]->Free(slot.replica);  // making room moved the block itself
        return false;
      }
      StartTransfer({.entry = idx,
                     .purpose = Purpose::kPromote,
                     .source = kHost,
                     .target = kHbm,
                     .target_replica = slot.replica,
                     .ticket = ticket->id},
                    effects);
      ++ticket->inflight;
      continue;
    }
    const ReadStart start = StartRead(idx, Purpose::kPromote, ticket->id, effects);
    if (start == ReadStart::kWait) return false;
    if (start == ReadStart::kStarted) ++ticket->inflight;
  }
  return true;
}

void StoreCore::Impl::CloseTicketIfDone(TicketWork* ticket) {
  if (ticket->closed.has_value() || ticket->next < ticket->chain.size() || ticket->inflight > 0) {
    return;
  }
  ticket->closed = StateOf(*ticket);
  const std::vector<EntryIdx> chain = std::move(ticket->chain);
  ticket->chain.clear();
  ticket->next = 0;
  for (const EntryIdx idx : chain) DropRef(idx);
}

void StoreCore::Impl::StopTicket(TicketId id) {
  const auto it = tickets_.find(id);
  if (it == tickets_.end()) return;
  it->second.next = it->second.chain.size();
  it->second.inflight = 0;  // what is under way arrives, unattended
  CloseTicketIfDone(&it->second);
}

absl::StatusOr<TicketState> StoreCore::Impl::GetTicket(SessionId session_id, TicketId id) {
  KVT_ASSIGN_OR_RETURN(Session * session, FindSession(session_id));
  const auto it = tickets_.find(id);
  if (it == tickets_.end() ||
      std::find(session->tickets.begin(), session->tickets.end(), id) == session->tickets.end()) {
    return WithReason(NotFound("no ticket %d in this session (any more)", id),
                      reason::kTicketUnknown);
  }
  return StateOf(it->second);
}

absl::Status StoreCore::Impl::CancelTicket(SessionId session_id, TicketId id) {
  KVT_ASSIGN_OR_RETURN(Session * session, FindSession(session_id));
  if (std::find(session->tickets.begin(), session->tickets.end(), id) != session->tickets.end()) {
    StopTicket(id);
  }
  return absl::OkStatus();
}

TicketState StoreCore::Impl::StateOf(const TicketWork& ticket) const {
  if (ticket.closed.has_value()) return *ticket.closed;
  TicketState state{.ticket = ticket.id, .block_count = ticket.asked_count};
  std::array<uint64_t, kTierCount> pending{};
  for (size_t i = 0; i < ticket.chain.size(); ++i) {
    const Entry& entry = At(ticket.chain[i]);
    if (!Visible(entry)) break;
    ++state.covered_block_count;
    if (entry.replica[kHbm] != kNoReplica) {
      ++state.ready_block_count;
    } else if (i >= ticket.next || entry.job != 0) {
      pending[FastestTier(entry)] += entry.bytes;
    }
  }
  for (const uint64_t bytes : pending) state.pending_bytes += bytes;
  state.done = ticket.next >= ticket.chain.size() && ticket.inflight == 0;
  EstimateArrival(pending, &state);
  return state;
}

void StoreCore::Impl::EstimateArrival(const std::array<uint64_t, kTierCount>& pending,
                                      TicketState* state) const {
  state->eta_known = true;
  for (size_t source = kHost; source < kTierCount; ++source) {
    if (pending[source] == 0) continue;
    const LinkState& link = links_[source][kHbm];
    if (link.busy_ms < kMeasuredMsMin || link.measured_bytes == 0) {
      state->eta_known = false;
      continue;
    }
    state->eta_ms += static_cast<uint32_t>(
        std::min<uint64_t>(pending[source] * link.busy_ms / link.measured_bytes + 1, 3'600'000));
  }
  if (!state->eta_known) state->eta_ms = 0;
}

}  // namespace kvtier::core
