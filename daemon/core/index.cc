// SPDX-License-Identifier: Apache-2.0
//
// Entries: where each block is, what it hangs on, and what policy and counters know of it.
#include <cstring>

#include "daemon/core/core_impl.h"
#include "proto/base/check.h"

namespace kvtier::core {
namespace {

// A block that is missed this soon after it left should have stayed.
constexpr TimeMs kRegretMs = 3'600'000;
}  // namespace

EntryIdx StoreCore::Impl::FindOrAdd(NamespaceIdx ns, const Key& key, EntryIdx parent,
                                    uint32_t depth) {
  EntryIdx idx = Find(ns, key);
  if (idx == kNoEntry) {
    idx = index_.Add(ns, key);
    At(idx).depth = depth;
  }
  // Links only lead to smaller depths, whatever chain a client claims: no cycle can arise.
  if (parent != kNoEntry && At(idx).parent == kNoEntry && At(idx).depth == At(parent).depth + 1) {
    LinkParent(idx, parent);
  }
  return idx;
}

std::vector<EntryIdx> StoreCore::Impl::ChainEntries(NamespaceIdx ns, EntryIdx parent,
                                                    std::span<const Key> keys) {
  std::vector<EntryIdx> chain;
  chain.reserve(keys.size());
  uint32_t depth = parent == kNoEntry ? 0 : At(parent).depth + 1;
  for (const Key& key : keys) {
    parent = FindOrAdd(ns, key, parent, depth++);
    chain.push_back(parent);
  }
  return chain;
}

size_t StoreCore::Impl::FastestTier(const Entry& entry) {
  for (size_t tier = 0; tier < kTierCount; ++tier) {
    if (entry.replica[tier] != kNoReplica) return tier;
  }
  return kNowhere;
}

size_t StoreCore::Impl::CountedTier(const Entry& entry) {
  const size_t fastest = FastestTier(entry);
  const bool leaving = entry.leaving_to != kNowhere && fastest < entry.leaving_to;
  return leaving ? entry.leaving_to : fastest;
}

uint8_t StoreCore::Impl::Residency(const Entry& entry) {
  uint8_t bits = 0;
  for (size_t tier = 0; tier < kTierCount; ++tier) {
    if (entry.replica[tier] != kNoReplica) bits = static_cast<uint8_t>(bits | (1U << tier));
  }
  return bits;
}

bool StoreCore::Impl::Visible(const Entry& entry) {
  return entry.state == EntryState::kCommitted && !entry.doomed && FastestTier(entry) != kNowhere;
}

size_t StoreCore::Impl::MemoryTier(const Entry& entry) {
  if (entry.replica[kHbm] != kNoReplica) return kHbm;
  if (entry.replica[kHost] != kNoReplica) return kHost;
  return kNowhere;
}

bool StoreCore::Impl::IsCandidate(const Entry& entry, size_t tier) const {
  // What is held may go from hbm to host, no further.
  return Visible(entry) && entry.replica[tier] != kNoReplica && !IsPinned(entry, tier) &&
         entry.child_count[tier] == 0 && (tier != kHost || !entry.is_held);
}

bool StoreCore::Impl::IsPinned(const Entry& entry, size_t tier) {
  if (entry.replica[tier] == kNoReplica) return false;
  if (entry.in_transfer || entry.state == EntryState::kPending) return true;
  return tier == kNvme ? entry.has_readers : entry.lease_count > 0;
}

policy::BlockFacts StoreCore::Impl::Facts(const Entry& entry) const {
  return {.last_use_seq = entry.last_use_seq,
          .last_use_ms = entry.last_use_ms,
          .depth = entry.depth,
          .use_count = entry.use_count,
          .bytes = BlockBytes(entry),
          .in_active_context = entry.active_count > 0,
          .pool = AccountOf(entry)};
}

BlockMeta StoreCore::Impl::Meta(const Entry& entry) const {
  const NamespaceSpec& spec = namespaces_[entry.ns].spec;
  return {.namespace_hash = spec.hash,
          .key = entry.key,
          .parent = entry.parent == kNoEntry ? Key{} : At(entry.parent).key,
          .layout = spec.layout,
          .depth = entry.depth,
          .payload_bytes = BlockBytes(entry),
          .crc32c = entry.crc32c};
}

void StoreCore::Impl::LinkParent(EntryIdx idx, EntryIdx parent) {
  Entry& entry = At(idx);
  KVT_CHECK(entry.parent == kNoEntry && entry.depth == At(parent).depth + 1);
  entry.parent = parent;
  ++At(parent).child_links;
  CountInParent(parent, kNowhere, CountedTier(entry));
}

void StoreCore::Impl::CountInParent(EntryIdx parent, size_t old_tier, size_t new_tier) {
  if (parent == kNoEntry || old_tier == new_tier) return;
  Entry& entry = At(parent);
  for (size_t tier = 0; tier < kTierCount; ++tier) {
    if (new_tier <= tier && old_tier > tier) ++entry.child_count[tier];
    if (old_tier <= tier && new_tier > tier) {
      KVT_CHECK(entry.child_count[tier] > 0);
      --entry.child_count[tier];
    }
  }
  Refresh(parent);
}

void StoreCore::Impl::SetLeaving(EntryIdx idx, size_t leaving_to) {
  Entry& entry = At(idx);
  const size_t old_tier = CountedTier(entry);
  entry.leaving_to = leaving_to & 3;
  CountInParent(entry.parent, old_tier, CountedTier(entry));
}

void StoreCore::Impl::SetReplica(EntryIdx idx, size_t tier, ReplicaId replica) {
  Entry& entry = At(idx);
  KVT_CHECK((entry.replica[tier] == kNoReplica) != (replica == kNoReplica));
  const size_t old_tier = CountedTier(entry);
  if (FastestTier(entry) == kNowhere) entry.is_unclaimed = IsUnclaimed(entry.ns);
  TenantTierCounters& counters = AccountAt(AccountOf(entry)).counters.tiers[tier];
  if (replica == kNoReplica && ((entry.pinned_mask >> tier) & 1) != 0) {
    counters_.tiers[tier].pinned_bytes -= BlockBytes(entry);
    counters.pinned_bytes -= BlockBytes(entry);
    entry.pinned_mask = entry.pinned_mask & ~(1U << tier) & kAllTiersMask;
  }
  const bool counted_before = old_tier != kNowhere;
  entry.replica[tier] = replica;
  const size_t new_tier = CountedTier(entry);
  if (replica == kNoReplica) {
    --counters_.tiers[tier].block_count;
    --counters.block_count;
  } else {
    ++counters_.tiers[tier].block_count;
    ++counters.block_count;
    if (entry.state == EntryState::kCommitted) tiers_[tier]->OnCommitted(replica, Meta(entry));
  }
  if (counted_before && new_tier == kNowhere) --counters_.block_count;
  if (!counted_before && new_tier != kNowhere) ++counters_.block_count;
  CountInParent(entry.parent, old_tier, new_tier);
  Refresh(idx);
  if (replica != kNoReplica) entry.leaves_for = policy::MissReason::kNone;
  if (entry.prefetched && MemoryTier(entry) == kNowhere) {
    entry.prefetched = false;
    ++counters_.regret.prefetched_unused_block_count;
  }
  if (FastestTier(entry) == kNowhere) {
    eviction_->Forget(idx, PolicyKey(entry.key));
    if (entry.state == EntryState::kCommitted) RecordDeparture(entry, tier);
  }
}

void StoreCore::Impl::RecordDeparture(const Entry& entry, size_t tier) {
  const bool for_room = entry.leaves_for == policy::MissReason::kNone;
  departures_.Put(PolicyKey(entry.key),
                  {.at_ms = now_ms_,
                   .last_use_ms = entry.last_use_ms,
                   .use_count = entry.use_count,
                   .reason = for_room ? policy::MissReason::kEvicted : entry.leaves_for,
                   .tier = static_cast<uint8_t>(tier)});
}

void StoreCore::Impl::CountRegret(const Key& key) {
  std::optional<policy::Departure> left = departures_.Find(PolicyKey(key));
  if (!left.has_value() || left->regretted || now_ms_ > left->at_ms + kRegretMs) return;
  if (left->reason != policy::MissReason::kEvicted &&
      left->reason != policy::MissReason::kNotAdmitted) {
    return;
  }
  ++counters_.regret.evicted_then_missed_block_count;
  left->regretted = true;
  departures_.Put(PolicyKey(key), *left);
}

void StoreCore::Impl::Refresh(EntryIdx idx) {
  Entry& entry = At(idx);
  const bool active = entry.active_count > 0;
  const bool facts_changed = entry.rank_is_old || entry.ranked_active != active;
  for (size_t tier = 0; tier < kTierCount; ++tier) {
    const uint32_t bit = 1U << tier;
    const bool candidate = IsCandidate(entry, tier);
    const bool was_candidate = (entry.candidate_mask & bit) != 0;
    if (candidate && (!was_candidate || facts_changed)) {
      eviction_->Upsert(static_cast<policy::TierIdx>(tier), idx, Facts(entry));
    } else if (!candidate && was_candidate) {
      eviction_->Erase(static_cast<policy::TierIdx>(tier), idx);
    }
    entry.candidate_mask =
        (candidate ? entry.candidate_mask | bit : entry.candidate_mask & ~bit) & kAllTiersMask;
    const bool pinned = IsPinned(entry, tier);
    const bool was_pinned = (entry.pinned_mask & bit) != 0;
    if (pinned != was_pinned) {
      const uint64_t change = pinned ? BlockBytes(entry) : -uint64_t{BlockBytes(entry)};
      counters_.tiers[tier].pinned_bytes += change;
      AccountAt(AccountOf(entry)).counters.tiers[tier].pinned_bytes += change;
    }
    entry.pinned_mask =
        (pinned ? entry.pinned_mask | bit : entry.pinned_mask & ~bit) & kAllTiersMask;
  }
  entry.rank_is_old = false;
  entry.ranked_active = active;
  const uint8_t residency = Visible(entry) ? Residency(entry) : uint8_t{0};
  if (entry.told_mask != residency) TellWatchers(idx, residency);
}

void StoreCore::Impl::Touch(EntryIdx idx, uint64_t seq, TimeMs now_ms) {
  Claim(idx);
  Entry& entry = At(idx);
  SetLastUse(&entry, seq);
  entry.last_use_ms = now_ms;
  ++entry.use_count;
  entry.prefetched = false;
  if (entry.is_held) {
    if (const auto held = holds_of_last_.find(idx); held != holds_of_last_.end()) {
      // One use is that of one ticket: the one that waits longest.
      used_tickets_.push_back(held->second.front());
    }
  }
  eviction_->Use({.block = idx,
                  .parent = entry.parent == kNoEntry ? policy::kNoParent : entry.parent,
                  .key = PolicyKey(entry.key),
                  .now_ms = now_ms});
}

void StoreCore::Impl::SetLastUse(Entry* entry, uint64_t seq) {
  if (entry->last_use_seq == seq) return;
  entry->last_use_seq = seq;
  entry->rank_is_old = true;
}

// Keys are hashes that cover the namespace: any 64 bits of one name the block.
uint64_t StoreCore::Impl::PolicyKey(const Key& key) {
  uint64_t word = 0;
  std::memcpy(&word, key.bytes.data(), sizeof(word));
  return word;
}

void StoreCore::Impl::FreeReplica(EntryIdx idx, size_t tier) {
  const ReplicaId replica = At(idx).replica[tier];
  KVT_CHECK(replica != kNoReplica);
  SetReplica(idx, tier, kNoReplica);
  GiveBack(tier, replica, AccountOf(At(idx)), BlockBytes(At(idx)));
}

void StoreCore::Impl::Drop(EntryIdx idx) {
  Entry& entry = At(idx);
  if (entry.state != EntryState::kCommitted) return;
  entry.doomed = true;
  entry.keeps_nvme = false;
  Refresh(idx);
  DropIfDoomed(idx);
}

void StoreCore::Impl::DropIfDoomed(EntryIdx idx) {
  Entry& entry = At(idx);
  if (!entry.doomed || entry.in_transfer || entry.lease_count > 0 || entry.has_readers) return;
  for (size_t tier = 0; tier < kTierCount; ++tier) {
    const bool stays = tier == kNvme && entry.keeps_nvme;
    if (entry.replica[tier] != kNoReplica && !stays) FreeReplica(idx, tier);
  }
  entry.doomed = false;
  entry.keeps_nvme = false;
  if (FastestTier(entry) == kNowhere) {
    entry.state = EntryState::kGhost;
    entry.use_count = 0;
  }
  Refresh(idx);
}

void StoreCore::Impl::EraseIfUnused(EntryIdx idx) {
  while (idx != kNoEntry) {
    Entry& entry = At(idx);
    if (entry.state == EntryState::kCommitted && FastestTier(entry) == kNowhere &&
        !entry.in_transfer) {
      entry.state = EntryState::kGhost;
      entry.doomed = false;
      entry.keeps_nvme = false;
      entry.use_count = 0;
    }
    if (entry.state != EntryState::kGhost || entry.child_links > 0 || entry.context_refs > 0 ||
        entry.in_transfer || entry.has_readers) {
      return;
    }
    KVT_CHECK(entry.candidate_mask == 0 && entry.pinned_mask == 0 && entry.lease_count == 0);
    const EntryIdx parent = entry.parent;
    index_.Remove(idx);
    if (parent != kNoEntry) --At(parent).child_links;
    idx = parent;
  }
}

}  // namespace kvtier::core
