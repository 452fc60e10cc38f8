// SPDX-License-Identifier: Apache-2.0
//
// A memory tier whose contents are gone while the process goes on.
#include "daemon/core/core_impl.h"

namespace kvtier::core {

void StoreCore::Impl::LoseTier(size_t tier, TimeMs now_ms, Effects* effects) {
  lost_tier_[tier] = true;
  for (EntryIdx idx = 0; idx < index_.size(); ++idx) {
    Entry& entry = At(idx);
    if (entry.replica[tier] == kNoReplica || entry.doomed) continue;
    if (entry.state == EntryState::kPending) {
      Session* const filler = sessions_.at(filler_of_.at(idx)).get();
      AbandonFill(filler, idx, filler->mapped);
    } else if (!entry.in_transfer && entry.lease_count == 0) {
      if (Residency(entry) == 1U << tier) entry.leaves_for = policy::MissReason::kTierLost;
      EvictReplica(idx, tier);
    } else {
      // A miss for everybody else, until the last of its readers and its transfer have ended.
      entry.doomed = true;
      entry.keeps_nvme = true;
      Refresh(idx);
    }
  }
  Pump(now_ms, effects);
}

void StoreCore::Impl::LoseNvmeBlock(const NamespaceHash& namespace_hash, const Key& key,
                                    TimeMs now_ms, Effects* effects) {
  const auto ns = namespace_of_hash_.find(namespace_hash);
  if (ns == namespace_of_hash_.end()) return;
  const EntryIdx idx = Find(ns->second, key);
  if (idx == kNoEntry) return;
  const Entry& entry = At(idx);
  if (entry.replica[kNvme] == kNoReplica || entry.state == EntryState::kPending || entry.doomed) {
    return;
  }
  // A read that is under way finds out by itself.
  if (entry.in_transfer) return;
  EvictReplica(idx, kNvme);
  Pump(now_ms, effects);
}

}  // namespace kvtier::core
