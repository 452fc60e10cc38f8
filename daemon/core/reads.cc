// SPDX-License-Identifier: Apache-2.0
//
// Lookup, and leases: reading blocks where they are.
#include <algorithm>

#include "daemon/core/core_impl.h"
#include "proto/base/check.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"

namespace kvtier::core {

absl::StatusOr<LookupResult> StoreCore::Impl::Lookup(SessionId session, NamespaceIdx ns,
                                                     std::span<const Key> keys) {
  KVT_RETURN_IF_ERROR(FindSession(session, ns).status());
  LookupResult result;
  index_.FindEach(ns, keys, [&](EntryIdx idx) {
    if (idx == kNoEntry || !Visible(At(idx))) return false;
    result.residency.push_back(Residency(At(idx)));
    ++counters_.tiers[FastestTier(At(idx))].hit_block_count;
    return true;
  });
  for (const Key& missed : keys.subspan(result.residency.size())) CountRegret(missed);
  counters_.lookup_block_count += keys.size();
  counters_.lookup_hit_block_count += result.residency.size();
  return result;
}

void StoreCore::Impl::Acquire(SessionId session_id, NamespaceIdx ns, std::span<const Key> keys,
                              TimeMs deadline_ms, TimeMs now_ms,
                              std::function<void(absl::StatusOr<AcquireResult>)> done,
                              Effects* effects) {
  const auto session = FindSession(session_id, ns);
  absl::Status refusal = session.ok() ? CheckWaiterRoom() : session.status();
  if (!refusal.ok()) {
    effects->replies.push_back(
        [done = std::move(done), refusal = std::move(refusal)] { done(refusal); });
    return;
  }
  const AcquireWaiterId id = NextId();
  AcquireWaiter waiter{.session = session_id, .deadline_ms = deadline_ms};
  waiter.done = std::move(done);
  waiter.waiting.assign(keys.size(), kNoEntry);
  waiter.result.blocks.resize(keys.size());
  const uint64_t seq = ++use_seq_;
  for (size_t i = 0; i < keys.size(); ++i) {
    const EntryIdx idx = Find(ns, keys[i]);
    if (idx == kNoEntry || !Visible(At(idx))) continue;  // a miss
    Touch(idx, seq, now_ms);
    if (MemoryTier(At(idx)) != kNowhere) {
      waiter.result.blocks[i] = LeaseBlock(idx, &waiter.leased);
      ++counters_.acquired_in_place_block_count;
      continue;
    }
    if (!At(idx).has_readers) {
      reads_wanted_.push_back(idx);
      // It is on nvme alone: what is under way is a read.
      if (At(idx).in_transfer) effects->expedited.push_back(At(idx).replica[kNvme]);
    }
    At(idx).has_readers = true;
    readers_of_[idx].push_back({id, i});
    waiter.waiting[i] = idx;
    ++waiter.remaining;
    Refresh(idx);
  }
  const bool complete = waiter.remaining == 0;
  acquire_waiters_.emplace(id, std::move(waiter));
  if (complete) FinishAcquire(id, BlockStatus::kMiss, effects);
  Pump(now_ms, effects);
}

PlacedBlock StoreCore::Impl::LeaseBlock(EntryIdx idx, std::vector<EntryIdx>* leased) {
  Entry& entry = At(idx);
  const size_t tier = MemoryTier(entry);
  KVT_CHECK(tier != kNowhere);
  ++entry.lease_count;
  leased->push_back(idx);
  Refresh(idx);
  return {.status = BlockStatus::kOk,
          .tier = static_cast<TierId>(tier),
          .replica = entry.replica[tier],
          .crc32c = entry.crc32c};
}

void StoreCore::Impl::WakeReaders(EntryIdx idx, BlockStatus failure, Effects* effects) {
  const auto it = readers_of_.find(idx);
  if (it == readers_of_.end()) return;
  const std::vector<Reader> readers = std::move(it->second);
  readers_of_.erase(it);
  At(idx).has_readers = false;
  const bool readable = Visible(At(idx)) && MemoryTier(At(idx)) != kNowhere;
  for (const Reader& reader : readers) {
    AcquireWaiter& waiter = acquire_waiters_.at(reader.waiter);
    PlacedBlock& block = waiter.result.blocks[reader.position];
    if (readable) {
      block = LeaseBlock(idx, &waiter.leased);
      ++counters_.acquired_after_read_block_count;
    } else {
      block.status = failure;
    }
    waiter.waiting[reader.position] = kNoEntry;
    if (--waiter.remaining == 0) FinishAcquire(reader.waiter, failure, effects);
  }
  Refresh(idx);
}

void StoreCore::Impl::FinishAcquire(AcquireWaiterId id, BlockStatus rest, Effects* effects) {
  auto node = acquire_waiters_.extract(id);
  KVT_CHECK(!node.empty());
  AcquireWaiter& waiter = node.mapped();
  for (size_t i = 0; i < waiter.waiting.size(); ++i) {
    if (waiter.waiting[i] == kNoEntry) continue;
    waiter.result.blocks[i].status = rest;
    StopReading(waiter.waiting[i], id);
  }
  Session* session = sessions_.at(waiter.session).get();
  if (!waiter.leased.empty()) {
    waiter.result.lease = NextId();
    session->leases.emplace(waiter.result.lease, std::move(waiter.leased));
  }
  if (session->ended) {
    effects->replies.push_back([done = std::move(waiter.done)] {
      done(WithReason(Aborted("the session ended"), reason::kSessionUnknown));
    });
    return;
  }
  effects->replies.push_back(
      [done = std::move(waiter.done), result = std::move(waiter.result)] { done(result); });
}

void StoreCore::Impl::StopReading(EntryIdx idx, AcquireWaiterId id) {
  const auto it = readers_of_.find(idx);
  if (it == readers_of_.end()) return;
  std::erase_if(it->second, [id](const Reader& reader) { return reader.waiter == id; });
  if (it->second.empty()) {
    readers_of_.erase(it);
    At(idx).has_readers = false;
  }
  Refresh(idx);
  DropIfDoomed(idx);
  EraseIfUnused(idx);
}

absl::Status StoreCore::Impl::Release(SessionId session_id, std::span<const LeaseId> leases,
                                      TimeMs now_ms, Effects* effects) {
  KVT_ASSIGN_OR_RETURN(Session * session, FindSession(session_id));
  for (const LeaseId lease : leases) {
    const auto it = session->leases.find(lease);
    if (it == session->leases.end()) continue;
    const std::vector<EntryIdx> entries = std::move(it->second);
    session->leases.erase(it);
    for (const EntryIdx idx : entries) Unlease(idx);
  }
  Pump(now_ms, effects);
  return absl::OkStatus();
}

void StoreCore::Impl::Unlease(EntryIdx idx) {
  Entry& entry = At(idx);
  KVT_CHECK(entry.lease_count > 0);
  if (--entry.lease_count > 0) return;
  Refresh(idx);
  DropIfDoomed(idx);
  EraseIfUnused(idx);
}

absl::StatusOr<uint32_t> StoreCore::Impl::ReportBad(SessionId session, NamespaceIdx ns,
                                                    std::span<const Key> keys, TimeMs now_ms,
                                                    Effects* effects) {
  KVT_RETURN_IF_ERROR(FindSession(session, ns).status());
  uint32_t dropped = 0;
  for (const Key& key : keys) {
    const EntryIdx idx = Find(ns, key);
    if (idx == kNoEntry || !Visible(At(idx))) continue;
    ++counters_.tiers[FastestTier(At(idx))].corrupt_block_count;
    At(idx).leaves_for = policy::MissReason::kCorrupt;
    Drop(idx);
    EraseIfUnused(idx);
    ++dropped;
  }
  Pump(now_ms, effects);
  return dropped;
}

}  // namespace kvtier::core
