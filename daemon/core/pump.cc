// SPDX-License-Identifier: Apache-2.0
//
// What can start now: waiting calls first, then pauses, prefetch, watermarks and flushes.
#include <algorithm>

#include "daemon/core/core_impl.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"

namespace kvtier::core {
namespace {

// Watermark demotion asks the tier below for room for this many blocks at once.
constexpr size_t kWatermarkBlocks = 8;

}  // namespace

void StoreCore::Impl::Pump(TimeMs now_ms, Effects* effects) {
  now_ms_ =
      std::max(now_ms_, now_ms);  // threads may read the clock in another order than they come
  EndHolds();
  ClaimSome();
  PumpReads(effects);
  PumpReserves(effects);
  PumpPauses(effects);
  PumpTickets(effects);
  PumpQuotas(effects);
  PumpWatermarks(effects);
  PumpFlush(effects);
  FinishPauses(effects);
  FinishFlushes(effects);
  ShowOpenTickets();
}

void StoreCore::Impl::PumpReads(Effects* effects) {
  // Those that only their own tenant's quota keeps waiting hold nobody else up.
  std::vector<EntryIdx> limited;
  while (!reads_wanted_.empty()) {
    const EntryIdx idx = reads_wanted_.front();
    const Entry& entry = At(idx);
    if (entry.has_readers && !entry.in_transfer) {
      if (!Visible(entry) || MemoryTier(entry) != kNowhere) {
        WakeReaders(idx, BlockStatus::kMiss, effects);
        DropIfDoomed(idx);
        EraseIfUnused(idx);
      } else if (StartRead(idx, Purpose::kDemandRead, 0, effects) != ReadStart::kStarted) {
        const RoomFor room{.account = AccountOf(entry), .footprint = Footprint(kHost, entry.ns)};
        if (!OverQuota(kHost, room)) break;
        limited.push_back(idx);
      }
    }
    reads_wanted_.pop_front();
  }
  limited_read_count_ = limited.size();
  reads_wanted_.insert(reads_wanted_.begin(), limited.begin(), limited.end());
}

void StoreCore::Impl::PumpReserves(Effects* effects) {
  std::array<bool, kTierCount> blocked{};
  for (auto waiter = reserve_waiters_.begin(); waiter != reserve_waiters_.end();) {
    if (blocked[waiter->tier] || !AdvanceReserve(&*waiter, effects)) {
      blocked[waiter->tier] |= !waiter->stuck;
      ++waiter;
      continue;
    }
    FinishReserve(&*waiter, BlockStatus::kExhausted, effects);
    waiter = reserve_waiters_.erase(waiter);
  }
}

void StoreCore::Impl::PumpPauses(Effects* effects) {
  for (auto& [id, pause] : pauses_) {
    while (!pause.to_demote.empty()) {
      const EntryIdx idx = pause.to_demote.back();
      const Entry& entry = At(idx);
      const bool movable = Visible(entry) && entry.replica[kHbm] != kNoReplica &&
                           entry.lease_count == 0 && entry.active_count == 0;
      if (movable) {
        if (entry.in_transfer) return;  // it moves already, or is being copied to nvme
        const uint64_t bytes = BlockBytes(entry);
        const Demotion demotion =
            DemoteFromHbm(idx, Purpose::kPause, id, pause.to_demote.size(), effects);
        if (demotion == Demotion::kBlocked || demotion == Demotion::kStuck) return;
        if (demotion == Demotion::kStarted) ++pause.inflight;
        if (demotion == Demotion::kFreed) pause.freed_bytes += bytes;
      }
      pause.to_demote.pop_back();
    }
  }
}

void StoreCore::Impl::PumpTickets(Effects* effects) {
  // Demanded reads first.
  if (reads_wanted_.size() > limited_read_count_ || ticket_queue_.empty()) return;
  PlanGuesses();
  for (auto queued = ticket_queue_.begin(); queued != ticket_queue_.end();) {
    TicketWork& ticket = tickets_.at(*queued);
    if (ticket.start_ms > now_ms_) {
      ++queued;
      continue;
    }
    const size_t next = ticket.next;
    const bool is_over = AdvanceTicket(&ticket, effects);
    tickets_moved_ |= ticket.next != next;
    if (!is_over) {
      if (ticket.start_ms <= now_ms_) return;
      continue;  // it found that it is too early
    }
    queued = ticket_queue_.erase(queued);
    ticket.queued = false;
    CloseTicketIfDone(&ticket);
  }
}

void StoreCore::Impl::PumpWatermarks(Effects* effects) {
  // Slowest first: room below is what lets the tier above demote.
  for (size_t tier = kTierCount; tier-- > 0;) {
    if (tiers_[tier] == nullptr) continue;
    while (true) {
      const TierUsage usage = tiers_[tier]->Usage();
      draining_tier_[tier] =
          policy::BytesToDemote(options_.watermarks[tier], usage.capacity_bytes, usage.used_bytes,
                                leaving_bytes_[tier], draining_tier_[tier]) > 0;
      if (!draining_tier_[tier]) break;
      const RoomFor room{.account = last_taker_[tier]};
      const auto victim = PickVictim(tier, room);
      if (!victim.has_value()) break;
      if (tier == kNvme) {
        CountDisplaced(kNvme, AccountOf(At(*victim)), room.account);
        EvictReplica(*victim, kNvme);
        continue;
      }
      const Demotion demotion = Demote(tier, *victim, room, kWatermarkBlocks, effects);
      if (demotion == Demotion::kBlocked || demotion == Demotion::kStuck) break;
    }
  }
}

void StoreCore::Impl::PumpFlush(Effects* effects) {
  for (auto& [id, flush] : flushes_) {
    while (!flush.to_write.empty()) {
      const EntryIdx idx = flush.to_write.front();
      const Entry& entry = At(idx);
      const size_t source = MemoryTier(entry);
      if (Visible(entry) && source != kNowhere && entry.replica[kNvme] == kNoReplica) {
        if (entry.in_transfer || LinkFull(source, kNvme, false)) return;
        const ReplicaId replica = TakeNvmeSlot(idx);
        if (replica != kNoReplica) {
          StartTransfer({.entry = idx,
                         .purpose = Purpose::kFlush,
                         .source = source,
                         .target = kNvme,
                         .target_replica = replica,
                         .flush = id},
                        effects);
          ++flush.inflight;
        }
      }
      flush.to_write.pop_front();
    }
  }
}

void StoreCore::Impl::Flush(TimeMs deadline_ms,
                            std::function<void(absl::StatusOr<uint64_t>)> done) {
  FlushWork flush{.deadline_ms = deadline_ms};
  flush.done = std::move(done);
  if (tiers_[kNvme] != nullptr) {
    for (EntryIdx idx = 0; idx < index_.size(); ++idx) {
      const Entry& entry = At(idx);
      if (Visible(entry) && entry.replica[kNvme] == kNoReplica &&
          policy::Admit(options_.nvme_admission, Facts(entry))) {
        flush.to_write.push_back(idx);
      }
    }
  }
  flushes_.emplace(NextId(), std::move(flush));
}

void StoreCore::Impl::FinishFlushes(Effects* effects) {
  for (auto it = flushes_.begin(); it != flushes_.end();) {
    FlushWork& flush = it->second;
    if (!flush.to_write.empty() || flush.inflight > 0) {
      ++it;
      continue;
    }
    effects->replies.push_back(
        [done = std::move(flush.done), count = flush.written_count] { done(count); });
    it = flushes_.erase(it);
  }
}

void StoreCore::Impl::Tick(TimeMs now_ms, Effects* effects) {
  ExpireWaiters(now_ms, effects);
  Pump(now_ms, effects);
}

void StoreCore::Impl::ExpireWaiters(TimeMs now_ms, Effects* effects) {
  for (auto waiter = reserve_waiters_.begin(); waiter != reserve_waiters_.end();) {
    if (waiter->deadline_ms > now_ms) {
      ++waiter;
      continue;
    }
    FinishReserve(&*waiter, BlockStatus::kExhausted, effects);
    waiter = reserve_waiters_.erase(waiter);
  }
  for (auto it = acquire_waiters_.begin(); it != acquire_waiters_.end();) {
    const AcquireWaiterId id = it->first;
    const bool expired = it->second.deadline_ms <= now_ms;
    ++it;
    if (expired) FinishAcquire(id, BlockStatus::kPending, effects);
  }
  for (auto& [id, pause] : pauses_) {
    if (pause.done && pause.deadline_ms <= now_ms) AnswerPause(&pause, effects);
  }
  for (auto it = flushes_.begin(); it != flushes_.end();) {
    if (it->second.deadline_ms > now_ms) {
      ++it;
      continue;
    }
    effects->replies.push_back([done = std::move(it->second.done)] {
      done(DeadlineExceeded("blocks are left that were not written to nvme in time"));
    });
    it = flushes_.erase(it);
  }
}

void StoreCore::Impl::Drain(Effects* effects) {
  draining_ = true;
  const absl::Status stopping =
      WithReason(Unavailable("the daemon is stopping"), reason::kDraining);
  for (ReserveWaiter& waiter : reserve_waiters_) {
    effects->replies.push_back([done = std::move(waiter.done), stopping] { done(stopping); });
  }
  reserve_waiters_.clear();
  while (!acquire_waiters_.empty()) {
    FinishAcquire(acquire_waiters_.begin()->first, BlockStatus::kUnavailable, effects);
  }
  for (auto& [id, pause] : pauses_) {
    if (pause.done) AnswerPause(&pause, effects);
  }
  for (auto& [id, flush] : flushes_) {
    effects->replies.push_back([done = std::move(flush.done), stopping] { done(stopping); });
  }
  flushes_.clear();
  std::vector<TicketId> tickets;
  for (const auto& [id, ticket] : tickets_) tickets.push_back(id);
  for (const TicketId id : tickets) StopTicket(id);
}

}  // namespace kvtier::core
