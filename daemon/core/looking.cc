// SPDX-License-Identifier: Apache-2.0
//
// Recovery, counters, summaries, and the rules that hold after every event.
#include <algorithm>

#include "daemon/core/core_impl.h"
#include "proto/base/check.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"

namespace kvtier::core {

bool StoreCore::Impl::Adopt(const BlockMeta& meta, size_t tier, ReplicaId replica) {
  const auto added = AddNamespace(
      {.hash = meta.namespace_hash, .layout = meta.layout, .block_bytes = meta.payload_bytes});
  if (!added.ok()) return false;
  const NamespaceIdx ns = *added;
  const NamespaceSpec& spec = namespaces_[ns].spec;
  if (spec.layout != meta.layout || spec.block_bytes != meta.payload_bytes) return false;
  if (const EntryIdx known = Find(ns, meta.key);
      known != kNoEntry && At(known).state != EntryState::kGhost) {
    if (At(known).replica[tier] != kNoReplica || At(known).crc32c != meta.crc32c) return false;
    SetReplica(known, tier, replica);
    ChargeAdopted(tier, AccountOf(At(known)), Footprint(tier, ns));
    return true;
  }
  EntryIdx parent = kNoEntry;
  if (meta.depth > 0) parent = FindOrAdd(ns, meta.parent, kNoEntry, meta.depth - 1);
  const EntryIdx idx = FindOrAdd(ns, meta.key, parent, meta.depth);
  Entry& entry = At(idx);
  entry.state = EntryState::kCommitted;
  entry.crc32c = meta.crc32c;
  SetReplica(idx, tier, replica);
  ChargeAdopted(tier, AccountOf(entry), Footprint(tier, ns));
  return true;
}

bool StoreCore::Impl::AdoptLate(const BlockMeta& meta, ReplicaId nvme_replica) {
  const auto ns = namespace_of_hash_.find(meta.namespace_hash);
  if (ns != namespace_of_hash_.end()) {
    const EntryIdx known = Find(ns->second, meta.key);
    if (known != kNoEntry && At(known).state != EntryState::kGhost) return false;
  }
  return Adopt(meta, kNvme, nvme_replica);
}

bool StoreCore::Impl::Waits() const {
  return !reserve_waiters_.empty() || !acquire_waiters_.empty() || !pauses_.empty() ||
         !flushes_.empty() || !ticket_queue_.empty();
}

CoreCounters StoreCore::Impl::Counters() const {
  CoreCounters counters = counters_;
  for (size_t source = 0; source < kTierCount; ++source) {
    for (size_t target = 0; target < kTierCount; ++target) {
      counters.links[source][target] = links_[source][target].counters;
    }
  }
  counters.lease_count = 0;
  counters.pending_fill_count = 0;
  for (const auto& [id, session] : sessions_) {
    counters.lease_count += session->leases.size();
    counters.pending_fill_count += session->fills.size();
  }
  counters.context_count = static_cast<uint32_t>(contexts_.size());
  return counters;
}

std::vector<ContextSummary> StoreCore::Impl::Contexts(size_t limit) const {
  std::vector<const Context*> newest;
  newest.reserve(contexts_.size());
  for (const auto& [key, context] : contexts_) newest.push_back(&context);
  std::stable_sort(newest.begin(), newest.end(), [](const Context* a, const Context* b) {
    return a->last_use_ms > b->last_use_ms;
  });
  newest.resize(std::min(newest.size(), limit));
  std::vector<ContextSummary> summaries;
  summaries.reserve(newest.size());
  for (const Context* context : newest) {
    ContextSummary summary{.name = context->name,
                           .owner = context->owner,
                           .active = context->active,
                           .block_count = static_cast<uint32_t>(context->chain.size())};
    summary.last_use_ms = context->last_use_ms;
    for (const EntryIdx idx : context->chain) {
      if (Visible(At(idx))) {
        ++summary.tier_block_count[FastestTier(At(idx))];
      } else {
        ++summary.missing_block_count;
      }
    }
    summaries.push_back(std::move(summary));
  }
  return summaries;
}

BlockSummary StoreCore::Impl::Summary(const Entry& entry) const {
  return {.key = entry.key,
          .depth = entry.depth,
          .bytes = BlockBytes(entry),
          .residency = Visible(entry) ? Residency(entry) : uint8_t{0},
          .lease_count = entry.lease_count,
          .use_count = entry.use_count,
          .pending = entry.state == EntryState::kPending};
}

absl::StatusOr<std::vector<BlockSummary>> StoreCore::Impl::WhereContext(
    std::string_view name) const {
  for (const auto& [key, context] : contexts_) {
    if (context.name != name) continue;
    std::vector<BlockSummary> blocks;
    blocks.reserve(context.chain.size());
    for (const EntryIdx idx : context.chain) blocks.push_back(Summary(At(idx)));
    return blocks;
  }
  return WithReason(NotFound("no context \"%s\"", name), reason::kContextUnknown);
}

absl::StatusOr<std::vector<BlockSummary>> StoreCore::Impl::WhereKey(const Key& key) const {
  std::vector<BlockSummary> blocks;
  for (NamespaceIdx ns = 0; ns < namespaces_.size(); ++ns) {
    const EntryIdx idx = Find(ns, key);
    if (idx != kNoEntry) blocks.push_back(Summary(At(idx)));
  }
  if (blocks.empty()) {
    return WithReason(NotFound("no block %s", key.Hex()), reason::kKeyUnknown);
  }
  return blocks;
}

MissAnswer StoreCore::Impl::WhyMiss(const std::optional<NamespaceHash>& asked,
                                    const Key& key) const {
  MissAnswer answer;
  for (NamespaceIdx ns = 0; ns < namespaces_.size(); ++ns) {
    const EntryIdx idx = Find(ns, key);
    if (idx == kNoEntry || At(idx).state == EntryState::kGhost) continue;
    answer.state = At(idx).state == EntryState::kPending ? MissAnswer::State::kPending
                                                         : MissAnswer::State::kStored;
    answer.residency = Visible(At(idx)) ? Residency(At(idx)) : uint8_t{0};
    answer.other_namespace = asked.has_value() && *asked != namespaces_[ns].spec.hash;
    return answer;
  }
  if (const auto left = departures_.Find(PolicyKey(key)); left.has_value()) {
    answer.state = MissAnswer::State::kLeft;
    answer.departure = *left;
  }
  return answer;
}

void StoreCore::Impl::CheckInvariants() const {
  std::vector<std::array<uint32_t, kTierCount>> child_count(index_.size());
  std::vector<uint32_t> child_links(index_.size());
  std::array<uint64_t, kTierCount> block_count{};
  std::array<uint64_t, kTierCount> pinned_bytes{};
  uint64_t used = 0;
  uint64_t in_transfer_count = 0;
  uint64_t pending_count = 0;
  for (EntryIdx idx = 0; idx < index_.size(); ++idx) {
    const Entry& entry = At(idx);
    if (entry.state == EntryState::kUnused) continue;
    ++used;
    if (entry.in_transfer) ++in_transfer_count;
    if (entry.state == EntryState::kPending) ++pending_count;
    for (size_t tier = 0; tier < kTierCount; ++tier) {
      if (entry.replica[tier] != kNoReplica) ++block_count[tier];
      if (IsPinned(entry, tier)) pinned_bytes[tier] += BlockBytes(entry);
      if (entry.parent != kNoEntry && CountedTier(entry) <= tier) {
        ++child_count[entry.parent][tier];
      }
    }
    if (entry.parent != kNoEntry) ++child_links[entry.parent];
  }
  KVT_CHECK(used == index_.entry_count());
  for (size_t tier = 0; tier < kTierCount; ++tier) {
    KVT_CHECK(block_count[tier] == counters_.tiers[tier].block_count);
    KVT_CHECK(pinned_bytes[tier] == counters_.tiers[tier].pinned_bytes);
  }
  for (EntryIdx idx = 0; idx < index_.size(); ++idx) CheckEntry(idx, child_count, child_links);
  std::array<uint64_t, kTierCount> leaving{};
  absl::flat_hash_set<EntryIdx> transferred;
  for (const auto& [id, job] : jobs_) {
    KVT_CHECK(transferred.insert(job.entry).second && At(job.entry).in_transfer);
    KVT_CHECK(At(job.entry).replica[job.source] != kNoReplica);
    KVT_CHECK(At(job.entry).replica[job.target] == kNoReplica);
    if (job.purpose == Purpose::kDemote || job.purpose == Purpose::kPause) {
      leaving[job.source] += job.footprint;
    }
  }
  KVT_CHECK(leaving == leaving_bytes_);
  KVT_CHECK(in_transfer_count == jobs_.size() && pending_count == filler_of_.size());
  CheckHolds();
  CheckAccounts();
}

void StoreCore::Impl::CheckHolds() const {
  absl::flat_hash_map<EntryIdx, uint32_t> held_count;
  uint64_t held_bytes = 0;
  for (const auto& [id, ticket] : tickets_) {
    const bool holds = holds_.contains({ticket.deadline_ms, id});
    KVT_CHECK(holds || ticket.held == 0);
    KVT_CHECK(!holds || !ticket.closed.has_value());
    for (size_t i = 0; i < ticket.held; ++i) {
      if (held_count[ticket.chain[i]]++ == 0) held_bytes += BlockBytes(At(ticket.chain[i]));
    }
  }
  for (EntryIdx idx = 0; idx < index_.size(); ++idx) {
    KVT_CHECK(At(idx).is_held == held_count.contains(idx));
  }
  KVT_CHECK(held_count == held_count_);
  KVT_CHECK(held_bytes == held_bytes_ && held_bytes <= HeldBytesMax());
}

void StoreCore::Impl::CheckEntry(EntryIdx idx,
                                 const std::vector<std::array<uint32_t, kTierCount>>& child_count,
                                 const std::vector<uint32_t>& child_links) const {
  const Entry& entry = At(idx);
  if (entry.state == EntryState::kUnused) return;
  KVT_CHECK(Find(entry.ns, entry.key) == idx);
  KVT_CHECK(entry.child_count == child_count[idx]);
  KVT_CHECK(entry.child_links == child_links[idx]);
  KVT_CHECK(entry.has_readers == readers_of_.contains(idx));
  KVT_CHECK(entry.told_mask == (Visible(entry) ? Residency(entry) : 0U));
  const bool in_memory = MemoryTier(entry) != kNowhere;
  KVT_CHECK(entry.lease_count == 0 || (entry.state == EntryState::kCommitted && in_memory));
  KVT_CHECK(entry.replica[kHbm] == kNoReplica || entry.replica[kHost] == kNoReplica);
  switch (entry.state) {
    case EntryState::kUnused:
      break;
    case EntryState::kGhost:
      KVT_CHECK(FastestTier(entry) == kNowhere && !entry.in_transfer);
      KVT_CHECK(entry.child_links > 0 || entry.context_refs > 0 || entry.has_readers);
      break;
    case EntryState::kPending:
      KVT_CHECK(in_memory && entry.replica[kNvme] == kNoReplica && !entry.in_transfer);
      KVT_CHECK(sessions_.at(filler_of_.at(idx))->fills.contains(idx));
      break;
    case EntryState::kCommitted:
      KVT_CHECK(FastestTier(entry) != kNowhere);
      KVT_CHECK(entry.doomed || !entry.keeps_nvme);
      KVT_CHECK(!entry.doomed || entry.in_transfer || entry.lease_count > 0 || entry.has_readers);
      break;
  }
  for (size_t tier = 0; tier < kTierCount; ++tier) {
    const bool listed = ((entry.candidate_mask >> tier) & 1) != 0;
    KVT_CHECK(listed == IsCandidate(entry, tier));
    // Readable by nobody new; its holders and copies are yet to end.
    KVT_CHECK(!lost_tier_[tier] || entry.replica[tier] == kNoReplica || entry.doomed);
  }
}

}  // namespace kvtier::core
