// SPDX-License-Identifier: Apache-2.0
//
// What prefetch keeps: blocks that a client said it needs do not leave host until they are used, or
// until nobody is believed to come any more. Bounded, so the earliest deadlines are held; a ticket
// reads no further than it holds, since that would push out what is needed sooner.
#include <algorithm>
#include <utility>

#include "daemon/core/core_impl.h"
#include "proto/base/check.h"

namespace kvtier::core {

uint64_t StoreCore::Impl::HeldBytesMax() const {
  const uint64_t hbm_bytes = tiers_[kHbm]->Usage().capacity_bytes;
  const uint64_t host_bytes = tiers_[kHost]->Usage().capacity_bytes;
  const double share = policy::kHeldShareMax * static_cast<double>(hbm_bytes + host_bytes);
  // Held blocks end up on host: where that is small, the rest must still get through.
  return std::min(static_cast<uint64_t>(share), host_bytes / 4 * 3);
}

void StoreCore::Impl::BeginHold(TicketWork* ticket, TimeMs now_ms) {
  if (ticket->chain.empty()) return;
  ticket->held_until_ms = policy::HeldUntilMs(ticket->deadline_ms, now_ms);
  next_hold_end_ms_ =
      holds_.empty() ? ticket->held_until_ms : std::min(next_hold_end_ms_, ticket->held_until_ms);
  holds_.emplace(ticket->deadline_ms, ticket->id);
  holds_of_last_[ticket->chain.back()].push_back(ticket->id);
  ShareHolds();
}

void StoreCore::Impl::EndHold(TicketWork* ticket) {
  if (holds_.erase({ticket->deadline_ms, ticket->id}) == 0) return;
  while (ticket->held > 0) LetLastGo(ticket);
  const auto others = holds_of_last_.find(ticket->chain.back());
  std::erase(others->second, ticket->id);
  if (others->second.empty()) holds_of_last_.erase(others);
  holds_ended_ = true;
}

bool StoreCore::Impl::HoldNext(TicketWork* ticket, uint64_t held_bytes_max) {
  const EntryIdx idx = ticket->chain[ticket->held];
  Entry& entry = At(idx);
  if (!entry.is_held) {
    if (held_bytes_ + BlockBytes(entry) > held_bytes_max) return false;
    held_bytes_ += BlockBytes(entry);
    entry.is_held = true;
    Refresh(idx);
  }
  ++held_count_[idx];
  ++ticket->held;
  tickets_moved_ = true;
  return true;
}

void StoreCore::Impl::LetLastGo(TicketWork* ticket) {
  const EntryIdx idx = ticket->chain[--ticket->held];
  tickets_moved_ = true;
  const auto count = held_count_.find(idx);
  KVT_CHECK(count != held_count_.end());
  if (--count->second > 0) return;
  held_count_.erase(count);
  held_bytes_ -= BlockBytes(At(idx));
  At(idx).is_held = false;
  Refresh(idx);
}

void StoreCore::Impl::GiveUpLast(TicketWork* ticket) {
  LetLastGo(ticket);
  ticket->next = std::min(ticket->next, ticket->held);
  // Not now: the queue may be what is looked through.
  const bool noted = !gave_up_.empty() && gave_up_.back() == ticket->id;
  if (!ticket->queued && !noted) gave_up_.push_back(ticket->id);
}

void StoreCore::Impl::ShareHolds() {
  const uint64_t held_bytes_max = HeldBytesMax();
  auto latest = holds_.end();
  for (auto earliest = holds_.begin(); earliest != holds_.end(); ++earliest) {
    TicketWork& ticket = tickets_.at(earliest->second);
    while (ticket.held < ticket.chain.size()) {
      if (HoldNext(&ticket, held_bytes_max)) continue;
      if (latest == holds_.end()) --latest;
      while (*earliest < *latest && tickets_.at(latest->second).held == 0) --latest;
      if (!(*earliest < *latest)) return;
      GiveUpLast(&tickets_.at(latest->second));
    }
  }
}

bool StoreCore::Impl::YieldHold(const RoomFor& room) {
  const bool own_only = OverQuota(kHost, room);
  for (auto latest = holds_.rbegin(); latest != holds_.rend(); ++latest) {
    TicketWork& ticket = tickets_.at(latest->second);
    if (ticket.held == 0) continue;
    const AccountIdx account = AccountOf(At(ticket.chain.front()));
    if (account != room.account && (own_only || IsProtected(kHost, account, 0))) continue;
    GiveUpLast(&ticket);
    return true;
  }
  return false;
}

void StoreCore::Impl::EndHolds() {
  const bool expired = !holds_.empty() && now_ms_ >= next_hold_end_ms_;
  if (!expired && used_tickets_.empty() && gave_up_.empty() && !holds_ended_) return;
  for (const TicketId id : std::exchange(gave_up_, {})) {
    const auto ticket = tickets_.find(id);
    if (ticket == tickets_.end() || ticket->second.queued) continue;
    if (holds_.contains({ticket->second.deadline_ms, id})) Enqueue(&ticket->second);
  }
  std::vector<TicketId> ending = std::exchange(used_tickets_, {});
  if (expired) {
    for (const auto& [deadline_ms, id] : holds_) {
      if (tickets_.at(id).held_until_ms <= now_ms_) ending.push_back(id);
    }
  }
  for (const TicketId id : ending) StopTicket(id);
  if (expired) {
    next_hold_end_ms_ = UINT64_MAX;
    for (const auto& [deadline_ms, id] : holds_) {
      next_hold_end_ms_ = std::min(next_hold_end_ms_, tickets_.at(id).held_until_ms);
    }
  }
  holds_ended_ = false;
  ShareHolds();
}

bool StoreCore::Impl::HbmHasRoomFor(NamespaceIdx ns) {
  const RoomFor room{.account = AccountOf(ns), .footprint = Footprint(kHbm, ns), .idle_only = true};
  if (!AboveHighWatermark(kHbm, room.footprint) && !OverQuota(kHbm, room)) return true;
  const auto victim = PickVictim(kHbm, room);
  return victim.has_value() && !At(*victim).is_held;
}

}  // namespace kvtier::core
