// SPDX-License-Identifier: Apache-2.0
#include "policy/sim/tiered_sim.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "proto/base/check.h"

namespace kvtier::sim {

TieredSim::TieredSim(const TieredSimOptions& options, std::span<const TraceBlock> blocks,
                     size_t context_count, std::unique_ptr<policy::EvictionPolicy> eviction)
    : options_(options),
      blocks_(blocks),
      eviction_(std::move(eviction)),
      entries_(blocks.size()),
      contexts_(context_count) {}

bool TieredSim::Holds(TierIdx tier, BlockRef block) const { return entries_[block].held[tier]; }

std::vector<TierIdx> TieredSim::Lookup(std::span<const BlockRef> chain) const {
  std::vector<TierIdx> tiers;
  for (const BlockRef block : chain) {
    const auto& held = entries_[block].held;
    const auto best = std::find(held.begin(), held.end(), true);
    if (best == held.end()) break;
    tiers.push_back(static_cast<TierIdx>(best - held.begin()));
  }
  return tiers;
}

SimLease TieredSim::Acquire(std::span<const BlockRef> chain, uint64_t now_ms) {
  SimLease lease;
  const uint64_t seq = ++use_seq_;
  std::vector<bool> delivered(chain.size(), false);
  std::vector<bool> reading(chain.size(), false);
  // What is in memory is leased first, so that room for the rest is made elsewhere.
  for (size_t i = 0; i < chain.size(); ++i) {
    const Entry& entry = entries_[chain[i]];
    if (!Stored(chain[i])) continue;
    Touch(chain[i], seq, now_ms);
    delivered[i] = entry.held[kHbm] || entry.held[kHost];
    reading[i] = !delivered[i];
    if (delivered[i]) SetLeased(chain[i], true);
    if (reading[i]) SetBusy(chain[i], true);
  }
  for (size_t i = 0; i < chain.size(); ++i) {
    if (!reading[i]) continue;
    delivered[i] = Promote(chain[i], kHbm, /*idle_only=*/true) ||
                   Promote(chain[i], kHost, /*idle_only=*/false);
    SetBusy(chain[i], false);
    if (delivered[i]) SetLeased(chain[i], true);
  }
  for (size_t i = 0; i < chain.size(); ++i) {
    if (delivered[i]) lease.blocks.push_back(chain[i]);
  }
  lease.ok_prefix_count =
      static_cast<size_t>(std::find(delivered.begin(), delivered.end(), false) - delivered.begin());
  ApplyWatermarks();
  return lease;
}

void TieredSim::Release(const SimLease& lease) {
  for (const BlockRef block : lease.blocks) SetLeased(block, false);
  ApplyWatermarks();
}

size_t TieredSim::Commit(std::span<const BlockRef> batch, TierIdx tier, uint64_t now_ms) {
  KVT_CHECK(tier == kHbm || tier == kHost);
  size_t stored_count = 0;
  std::vector<BlockRef> filled;
  for (const BlockRef block : batch) {
    if (!Stored(block)) {
      TierIdx target = tier;
      while (target <= kHost && !TakeRoom(target, /*idle_only=*/false)) ++target;
      const BlockRef parent = blocks_[block].parent;
      if (target > kHost || (parent != kNoBlock && !Stored(parent))) break;
      SetBusy(block, true);
      Put(target, block);
      filled.push_back(block);
    }
    ++stored_count;
  }
  const uint64_t seq = ++use_seq_;
  for (const BlockRef block : filled) {
    Touch(block, seq, now_ms);
    SetBusy(block, false);
  }
  ApplyWatermarks();
  return stored_count;
}

void TieredSim::SetActive(Context* context, bool active) {
  if (context->active == active) return;
  context->active = active;
  for (const BlockRef block : context->chain) {
    entries_[block].active_context_count += active ? 1U : -1U;
    Refresh(block);
  }
}

void TieredSim::SetChain(uint32_t context_idx, std::span<const BlockRef> chain) {
  Context& context = contexts_[context_idx];
  SetActive(&context, false);
  context.chain.assign(chain.begin(), chain.end());
  SetActive(&context, true);
}

void TieredSim::Pause(uint32_t context_idx) {
  Context& context = contexts_[context_idx];
  SetActive(&context, false);
  for (size_t i = context.chain.size(); i-- > 0;) {
    const BlockRef block = context.chain[i];
    const Entry& entry = entries_[block];
    if (!entry.held[kHbm] || entry.active_context_count > 0 || entry.lease_count > 0) continue;
    MoveOut(kHbm, block);
  }
  ApplyWatermarks();
}

void TieredSim::Resume(uint32_t context_idx) {
  Context& context = contexts_[context_idx];
  SetActive(&context, true);
  const TierModel& hbm = options_.tiers[kHbm];
  for (const BlockRef block : context.chain) {
    const Entry& entry = entries_[block];
    if (!Stored(block)) break;
    if (entry.held[kHbm] || (entry.held[kHost] && entry.lease_count > 0)) continue;
    const bool above_high = static_cast<double>(used_bytes_[kHbm] + hbm.footprint_bytes) >
                            hbm.marks.high * static_cast<double>(hbm.capacity_bytes);
    const bool may_promote = !above_high || eviction_->IdleVictim(kHbm).has_value();
    if (may_promote && Promote(block, kHbm, /*idle_only=*/true)) continue;
    if (!entry.held[kHost]) Promote(block, kHost, /*idle_only=*/true);
  }
  ApplyWatermarks();
}

void TieredSim::Close(uint32_t context_idx) {
  Context& context = contexts_[context_idx];
  SetActive(&context, false);
  context.chain.clear();
}

policy::BlockFacts TieredSim::FactsOf(BlockRef block) const {
  const Entry& entry = entries_[block];
  return {.last_use_seq = entry.last_use_seq,
          .last_use_ms = entry.last_use_ms,
          .depth = blocks_[block].depth,
          .use_count = entry.use_count,
          .bytes = options_.block_bytes,
          .in_active_context = entry.active_context_count > 0};
}

void TieredSim::Touch(BlockRef block, uint64_t seq, uint64_t now_ms) {
  Entry& entry = entries_[block];
  entry.last_use_seq = seq;
  entry.last_use_ms = now_ms;
  ++entry.use_count;
  Refresh(block);
}

bool TieredSim::Stored(BlockRef block) const {
  return std::ranges::any_of(entries_[block].held, [](bool held) { return held; });
}

void TieredSim::SetBusy(BlockRef block, bool busy) {
  KVT_CHECK(busy || entries_[block].busy_count > 0);
  entries_[block].busy_count += busy ? 1U : -1U;
  Refresh(block);
}

void TieredSim::SetLeased(BlockRef block, bool leased) {
  KVT_CHECK(leased || entries_[block].lease_count > 0);
  entries_[block].lease_count += leased ? 1U : -1U;
  Refresh(block);
}

void TieredSim::Refresh(BlockRef block) {
  const Entry& entry = entries_[block];
  uint32_t near_child_count = 0;
  for (TierIdx tier = 0; tier < policy::kTierCount; ++tier) {
    near_child_count += entry.child_count[tier];
    const bool pinned = entry.busy_count > 0 || (tier != kNvme && entry.lease_count > 0);
    if (entry.held[tier] && !pinned && near_child_count == 0) {
      eviction_->Upsert(tier, block, FactsOf(block));
    } else {
      eviction_->Erase(tier, block);
    }
  }
}

void TieredSim::Put(TierIdx tier, BlockRef block) {
  KVT_CHECK(!entries_[block].held[tier]);
  entries_[block].held[tier] = true;
  used_bytes_[tier] += options_.tiers[tier].footprint_bytes;
  Refresh(block);
  if (const BlockRef parent = blocks_[block].parent; parent != kNoBlock) {
    ++entries_[parent].child_count[tier];
    Refresh(parent);
  }
}

void TieredSim::Remove(TierIdx tier, BlockRef block) {
  KVT_CHECK(entries_[block].held[tier]);
  entries_[block].held[tier] = false;
  used_bytes_[tier] -= options_.tiers[tier].footprint_bytes;
  Refresh(block);
  if (const BlockRef parent = blocks_[block].parent; parent != kNoBlock) {
    --entries_[parent].child_count[tier];
    Refresh(parent);
  }
}

bool TieredSim::TakeRoom(TierIdx tier, bool idle_only) {
  while (!HasRoom(tier, idle_only)) {
    if (!MakeRoom(tier, idle_only)) return false;
  }
  return true;
}

bool TieredSim::HasRoom(TierIdx tier, bool idle_only) {
  const TierModel& model = options_.tiers[tier];
  while (used_bytes_[tier] + model.footprint_bytes > model.capacity_bytes) {
    if (tier != kHost) return false;
    const std::optional<BlockRef> victim =
        idle_only ? eviction_->IdleVictim(kHost) : eviction_->Victim(kHost);
    if (!victim || !entries_[*victim].held[kNvme]) return false;
    Remove(kHost, *victim);
  }
  return true;
}

bool TieredSim::MakeRoom(TierIdx tier, bool idle_only) {
  uint32_t moved_count = 0;
  while (moved_count < options_.room_ahead_block_count) {
    const std::optional<BlockRef> victim =
        idle_only ? eviction_->IdleVictim(tier) : eviction_->Victim(tier);
    if (!victim) break;
    if (MoveOut(tier, *victim) == Exit::kDropped) return true;
    ++moved_count;
  }
  return moved_count > 0;
}

TieredSim::Exit TieredSim::MoveOut(TierIdx tier, BlockRef block) {
  // Nothing that makes room for the block may take it away.
  SetBusy(block, true);
  const Entry& entry = entries_[block];
  Exit exit = Exit::kDropped;
  if (tier == kHbm && TakeRoom(kHost, /*idle_only=*/false)) {
    Put(kHost, block);
    exit = Exit::kMoved;
  } else if (tier != kNvme && !entry.held[kNvme] &&
             policy::Admit(options_.nvme_admission, FactsOf(block)) &&
             TakeRoom(kNvme, /*idle_only=*/false)) {
    Put(kNvme, block);
    exit = Exit::kMoved;
  }
  Remove(tier, block);
  SetBusy(block, false);
  return exit;
}

bool TieredSim::Promote(BlockRef block, TierIdx tier, bool idle_only) {
  SetBusy(block, true);
  const bool room = TakeRoom(tier, idle_only);
  if (room) {
    if (tier == kHbm && entries_[block].held[kHost]) Remove(kHost, block);
    Put(tier, block);
  }
  SetBusy(block, false);
  return room;
}

void TieredSim::ApplyWatermarks() {
  // Slowest first, as the daemon: room below lets the tier above demote.
  for (TierIdx tier = policy::kTierCount; tier-- > 0;) {
    const TierModel& model = options_.tiers[tier];
    while (true) {
      draining_[tier] = policy::BytesToDemote(model.marks, model.capacity_bytes, used_bytes_[tier],
                                              /*leaving_bytes=*/0, draining_[tier]) > 0;
      if (!draining_[tier]) break;
      const std::optional<BlockRef> victim = eviction_->Victim(tier);
      if (!victim) break;
      MoveOut(tier, *victim);
    }
  }
}

}  // namespace kvtier::sim
