// SPDX-License-Identifier: Apache-2.0
//
// Two-phase writes: Reserve -> fill -> Commit. Nobody sees a block before its commit.
#include <algorithm>

#include "daemon/core/core_impl.h"
#include "proto/base/check.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"

namespace kvtier::core {

void StoreCore::Impl::Reserve(ReserveWaiter waiter, TimeMs now_ms, Effects* effects) {
  const auto refuse = [&](absl::Status status) {
    effects->replies.push_back(
        [done = std::move(waiter.done), status = std::move(status)] { done(status); });
  };
  if (const auto session = FindSession(waiter.session, waiter.ns); !session.ok()) {
    return refuse(session.status());
  }
  if (draining_) return refuse(CheckWaiterRoom());
  if (waiter.tier == kNvme) {
    return refuse(
        WithReason(Invalid("blocks are filled on hbm or host, not on nvme"), reason::kBadArgument));
  }
  const bool queued_before = std::any_of(
      reserve_waiters_.begin(), reserve_waiters_.end(),
      [&](const ReserveWaiter& other) { return other.tier == waiter.tier && !other.stuck; });
  if (!queued_before && AdvanceReserve(&waiter, effects)) {
    FinishReserve(&waiter, BlockStatus::kExhausted, effects);
  } else if (absl::Status room = CheckWaiterRoom(); !room.ok()) {
    // What was taken stays reserved: the caller learns of it as of any other answer.
    FinishReserve(&waiter, BlockStatus::kExhausted, effects);
  } else {
    reserve_waiters_.push_back(std::move(waiter));
  }
  Pump(now_ms, effects);
}

bool StoreCore::Impl::AdvanceReserve(ReserveWaiter* waiter, Effects* effects) {
  while (waiter->next < waiter->keys.size()) {
    if (const auto answer = AnswerWithoutSlot(*waiter); answer.has_value()) {
      waiter->blocks.push_back({.status = *answer});
    } else {
      const PlacedBlock slot = TakeFillSlot(waiter, effects);
      if (slot.replica == kNoReplica) return false;
      // Making room may have evicted the parent.
      if (const auto changed = AnswerWithoutSlot(*waiter); changed.has_value()) {
        GiveBack(static_cast<size_t>(slot.tier), slot.replica, AccountOf(waiter->ns),
                 namespaces_[waiter->ns].spec.block_bytes);
        waiter->blocks.push_back({.status = *changed});
      } else {
        BeginFill(waiter, slot);
      }
    }
    ++waiter->next;
  }
  return true;
}

EntryIdx StoreCore::Impl::ParentOfNext(const ReserveWaiter& waiter) const {
  if (waiter.next > 0) return Find(waiter.ns, waiter.keys[waiter.next - 1]);
  return waiter.parent.has_value() ? Find(waiter.ns, *waiter.parent) : kNoEntry;
}

std::optional<BlockStatus> StoreCore::Impl::AnswerWithoutSlot(const ReserveWaiter& waiter) const {
  const EntryIdx idx = Find(waiter.ns, waiter.keys[waiter.next]);
  if (idx != kNoEntry) {
    const Entry& entry = At(idx);
    if (Visible(entry)) return BlockStatus::kExists;
    if (entry.state == EntryState::kPending || entry.doomed) return BlockStatus::kPending;
  }
  if (waiter.next == 0 && !waiter.parent.has_value()) return std::nullopt;
  const EntryIdx parent = ParentOfNext(waiter);
  const bool parent_stored = parent != kNoEntry && parent != idx &&
                             (Visible(At(parent)) || At(parent).state == EntryState::kPending);
  if (!parent_stored) return BlockStatus::kPrecondition;
  return std::nullopt;
}

PlacedBlock StoreCore::Impl::TakeFillSlot(ReserveWaiter* waiter, Effects* effects) {
  waiter->stuck = false;
  const size_t blocks_wanted = waiter->keys.size() - waiter->next;
  for (size_t tier = waiter->tier; tier <= kHost; ++tier) {
    const SlotOrRoom slot = TakeSlotOrMakeRoom(tier, waiter->ns, false, blocks_wanted, effects);
    if (slot.replica != kNoReplica) {
      return {
          .status = BlockStatus::kOk, .tier = static_cast<TierId>(tier), .replica = slot.replica};
    }
    if (slot.room == Room::kLeaving) {
      // What its own tenant's quota waits for is nobody else's matter.
      waiter->stuck = OverQuota(
          tier, {.account = AccountOf(waiter->ns), .footprint = Footprint(tier, waiter->ns)});
      return {.status = BlockStatus::kExhausted};
    }
  }
  waiter->stuck = true;
  return {.status = BlockStatus::kExhausted};
}

void StoreCore::Impl::BeginFill(ReserveWaiter* waiter, const PlacedBlock& slot) {
  const EntryIdx parent = ParentOfNext(*waiter);
  const uint32_t depth = parent == kNoEntry ? 0 : At(parent).depth + 1;
  const EntryIdx idx = FindOrAdd(waiter->ns, waiter->keys[waiter->next], parent, depth);
  Entry& entry = At(idx);
  KVT_CHECK(entry.state == EntryState::kGhost || entry.state == EntryState::kCommitted);
  entry.state = EntryState::kPending;
  filler_of_.emplace(idx, waiter->session);
  SetReplica(idx, static_cast<size_t>(slot.tier), slot.replica);
  sessions_.at(waiter->session)->fills.insert(idx);
  waiter->blocks.push_back(slot);
}

void StoreCore::Impl::FinishReserve(ReserveWaiter* waiter, BlockStatus rest,
                                    Effects* effects) const {
  const AccountIdx account = AccountOf(waiter->ns);
  if (rest == BlockStatus::kExhausted && waiter->blocks.empty() && !waiter->keys.empty() &&
      OverQuota(kHost, {.account = account, .footprint = Footprint(kHost, waiter->ns)})) {
    effects->replies.push_back(
        [done = std::move(waiter->done), status = QuotaReached(account)] { done(status); });
    return;
  }
  waiter->blocks.resize(waiter->keys.size(), PlacedBlock{.status = rest});
  effects->replies.push_back(
      [done = std::move(waiter->done), blocks = std::move(waiter->blocks)] { done(blocks); });
}

absl::StatusOr<std::vector<BlockStatus>> StoreCore::Impl::Commit(SessionId session_id,
                                                                 NamespaceIdx ns,
                                                                 std::span<const Key> keys,
                                                                 std::span<const uint32_t> crc32cs,
                                                                 TimeMs now_ms, Effects* effects) {
  KVT_ASSIGN_OR_RETURN(Session * session, FindSession(session_id, ns));
  if (keys.size() != crc32cs.size()) {
    return WithReason(
        Invalid("%d keys but %d checksums; each block has one", keys.size(), crc32cs.size()),
        reason::kBadArgument);
  }
  const uint64_t seq = ++use_seq_;
  std::vector<BlockStatus> statuses;
  statuses.reserve(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    const EntryIdx idx = Find(ns, keys[i]);
    if (idx == kNoEntry || !session->fills.contains(idx)) {
      statuses.push_back(BlockStatus::kPrecondition);
      continue;
    }
    Entry& entry = At(idx);
    session->fills.erase(idx);
    entry.state = EntryState::kCommitted;
    departures_.Erase(PolicyKey(entry.key));
    filler_of_.erase(idx);
    entry.crc32c = crc32cs[i];
    const size_t tier = MemoryTier(entry);
    tiers_[tier]->OnCommitted(entry.replica[tier], Meta(entry));
    Touch(idx, seq, now_ms);
    Refresh(idx);
    ++counters_.committed_block_count;
    counters_.committed_bytes += BlockBytes(entry);
    statuses.push_back(BlockStatus::kOk);
  }
  Pump(now_ms, effects);
  return statuses;
}

absl::Status StoreCore::Impl::Abort(SessionId session_id, NamespaceIdx ns,
                                    std::span<const Key> keys, TimeMs now_ms, Effects* effects) {
  KVT_ASSIGN_OR_RETURN(Session * session, FindSession(session_id, ns));
  for (const Key& key : keys) {
    const EntryIdx idx = Find(ns, key);
    if (idx != kNoEntry && session->fills.contains(idx)) AbandonFill(session, idx, false);
  }
  Pump(now_ms, effects);
  return absl::OkStatus();
}

void StoreCore::Impl::AbandonFill(Session* session, EntryIdx idx, bool quarantine) {
  Entry& entry = At(idx);
  KVT_CHECK(entry.state == EntryState::kPending && filler_of_.at(idx) == session->id);
  session->fills.erase(idx);
  filler_of_.erase(idx);
  const size_t tier = MemoryTier(entry);
  if (quarantine) {
    session->quarantine.push_back({tier, entry.replica[tier], BlockBytes(entry)});
    counters_.tiers[tier].quarantined_bytes += BlockBytes(entry);
    SetReplica(idx, tier, kNoReplica);
  } else {
    FreeReplica(idx, tier);
  }
  entry.state = EntryState::kGhost;
  EraseIfUnused(idx);
}

}  // namespace kvtier::core
