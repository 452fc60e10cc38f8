// SPDX-License-Identifier: Apache-2.0
//
// Room and transfers: which replica moves where, and what follows when it has.
#include <algorithm>

#include "daemon/core/core_impl.h"
#include "proto/base/check.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"

namespace kvtier::core {
namespace {

// Room is made for at most this many blocks at once.
constexpr size_t kRoomAheadBlocks = 32;
// Below this much measured time a link's speed is not known.
constexpr uint64_t kMeasuredMsMin = 5;

}  // namespace

uint64_t StoreCore::Impl::Footprint(size_t tier, NamespaceIdx ns) const {
  return tiers_[tier]->FootprintBytes(namespaces_[ns].spec.block_bytes);
}

bool StoreCore::Impl::AboveHighWatermark(size_t tier, uint64_t more_bytes) const {
  const TierUsage usage = tiers_[tier]->Usage();
  return static_cast<double>(usage.used_bytes + more_bytes) >
         options_.watermarks[tier].high * static_cast<double>(usage.capacity_bytes);
}

bool StoreCore::Impl::LinkFull(size_t source, size_t target, bool background) const {
  const uint32_t limit = options_.transfers_per_link_max;
  const LinkState& link = links_[source][target];
  if (!background) return link.counters.inflight_count >= limit;
  const uint64_t block_bytes = link.counters.moved_block_count == 0
                                   ? 0
                                   : link.counters.moved_bytes / link.counters.moved_block_count;
  return link.counters.inflight_count >=
         policy::BackgroundTransfersMax(SpeedOf(source, target), block_bytes, limit);
}

double StoreCore::Impl::SpeedOf(size_t source, size_t target) const {
  const LinkState& link = links_[source][target];
  if (link.busy_ms < kMeasuredMsMin || link.measured_bytes == 0) return 0;
  return static_cast<double>(link.measured_bytes) / static_cast<double>(link.busy_ms);
}

absl::StatusOr<ReplicaId> StoreCore::Impl::TakeSlot(size_t tier, NamespaceIdx ns,
                                                    const RoomFor& room) {
  const NamespaceInfo& info = namespaces_[ns];
  KVT_CHECK(info.owner.has_value());
  if (lost_tier_[tier]) return Unavailable("the tier is lost");
  while (true) {
    const bool own_only = OverQuota(tier, room);
    absl::StatusOr<ReplicaId> slot =
        own_only ? Exhausted("the tenant's quota is used up")
                 : tiers_[tier]->Reserve(info.spec.block_bytes, *info.owner);
    if (slot.ok()) Charge(tier, room.account, room.footprint);
    if (slot.ok() || tier != kHost || !absl::IsResourceExhausted(slot.status())) return slot;
    const auto victim = PickVictim(kHost, room);
    const bool stuck = !victim.has_value() && LeavingBytes(kHost, room) == 0;
    if (stuck && !room.idle_only && YieldHold(room)) continue;
    if (!victim.has_value() || At(*victim).replica[kNvme] == kNoReplica) return slot;
    CountDisplaced(kHost, AccountOf(At(*victim)), room.account);
    EvictReplica(*victim, kHost);
  }
}

StoreCore::Impl::Room StoreCore::Impl::MakeRoom(size_t tier, const RoomFor& room_for,
                                                size_t block_count, Effects* effects) {
  const uint64_t bytes = room_for.footprint * block_count;
  const auto leaving = [&] { return LeavingBytes(tier, room_for); };
  while (leaving() < bytes) {
    const auto victim = PickVictim(tier, room_for);
    if (!victim.has_value()) {
      if (tier == kHost && !room_for.idle_only && leaving() == 0 && YieldHold(room_for)) continue;
      break;
    }
    const size_t blocks_wanted = (bytes - leaving() - 1) / room_for.footprint + 1;
    switch (Demote(tier, *victim, room_for, blocks_wanted, effects)) {
      case Demotion::kFreed:
        return Room::kFreed;
      case Demotion::kStarted:
        continue;
      case Demotion::kBlocked:
        return Room::kLeaving;
      case Demotion::kStuck:
        return leaving() > 0 ? Room::kLeaving : Room::kNone;
    }
  }
  return leaving() > 0 ? Room::kLeaving : Room::kNone;
}

uint64_t StoreCore::Impl::LeavingBytes(size_t tier, const RoomFor& room) const {
  return OverQuota(tier, room) ? accounts_[room.account].leaving_bytes[tier] : leaving_bytes_[tier];
}

StoreCore::Impl::SlotOrRoom StoreCore::Impl::TakeSlotOrMakeRoom(size_t tier, NamespaceIdx ns,
                                                                bool idle_only,
                                                                size_t blocks_wanted,
                                                                Effects* effects) {
  const size_t block_count = std::clamp(blocks_wanted, size_t{1}, kRoomAheadBlocks);
  const RoomFor room_for{
      .account = AccountOf(ns), .footprint = Footprint(tier, ns), .idle_only = idle_only};
  while (true) {
    const absl::StatusOr<ReplicaId> replica = TakeSlot(tier, ns, room_for);
    if (replica.ok()) return {.replica = *replica};
    if (!absl::IsResourceExhausted(replica.status())) return {.room = Room::kNone};
    const Room room = MakeRoom(tier, room_for, block_count, effects);
    if (room != Room::kFreed) return {.room = room};
  }
}

StoreCore::Impl::Demotion StoreCore::Impl::Demote(size_t tier, EntryIdx idx, const RoomFor& room,
                                                  size_t blocks_wanted, Effects* effects) {
  const AccountIdx account = AccountOf(At(idx));
  const Demotion demotion = tier == kHbm
                                ? DemoteFromHbm(idx, Purpose::kDemote, 0, blocks_wanted, effects)
                                : DemoteToNvme(kHost, idx, Purpose::kDemote, 0, effects);
  if (demotion == Demotion::kFreed || demotion == Demotion::kStarted) {
    CountDisplaced(tier, account, room.account);
  }
  return demotion;
}

StoreCore::Impl::Demotion StoreCore::Impl::DemoteFromHbm(EntryIdx idx, Purpose purpose,
                                                         PauseId pause, size_t blocks_wanted,
                                                         Effects* effects) {
  if (LinkFull(kHbm, kHost, false)) return Demotion::kBlocked;
  Claim(idx);
  const SlotOrRoom slot = TakeSlotOrMakeRoom(kHost, At(idx).ns, false, blocks_wanted, effects);
  if (slot.replica == kNoReplica) {
    if (slot.room == Room::kLeaving) return Demotion::kBlocked;
    // Nothing can leave host: it holds leased blocks, or prefixes whose last blocks are on hbm.
    // Those would wait for each other for ever.
    return DemoteToNvme(kHbm, idx, purpose, pause, effects);
  }
  StartTransfer({.entry = idx,
                 .purpose = purpose,
                 .source = kHbm,
                 .target = kHost,
                 .target_replica = slot.replica,
                 .pause = pause},
                effects);
  return Demotion::kStarted;
}

StoreCore::Impl::Demotion StoreCore::Impl::DemoteToNvme(size_t source, EntryIdx idx,
                                                        Purpose purpose, PauseId pause,
                                                        Effects* effects) {
  Entry& entry = At(idx);
  bool admitted = true;
  if (entry.replica[kNvme] != kNoReplica) {
    EvictReplica(idx, source);
    return Demotion::kFreed;
  }
  if (tiers_[kNvme] != nullptr && policy::Admit(options_.nvme_admission, Facts(entry))) {
    if (LinkFull(source, kNvme, false)) return Demotion::kBlocked;
    const ReplicaId replica = TakeNvmeSlot(idx);
    if (replica != kNoReplica) {
      StartTransfer({.entry = idx,
                     .purpose = purpose,
                     .source = source,
                     .target = kNvme,
                     .target_replica = replica,
                     .pause = pause},
                    effects);
      return Demotion::kStarted;
    }
  } else if (tiers_[kNvme] != nullptr) {
    ++counters_.admission_rejected_block_count;
    admitted = false;
  }
  // hbm keeps what nobody below takes, unless it is the end of its chain and its room is needed.
  if (purpose == Purpose::kPause || (source == kHbm && entry.child_count[kNvme] > 0)) {
    return Demotion::kStuck;
  }
  if (!admitted) entry.leaves_for = policy::MissReason::kNotAdmitted;
  EvictReplica(idx, source);
  return Demotion::kFreed;
}

void StoreCore::Impl::EvictReplica(EntryIdx idx, size_t tier) {
  FreeReplica(idx, tier);
  if (FastestTier(At(idx)) == kNowhere) ++counters_.tiers[tier].evicted_block_count;
  EraseIfUnused(idx);
}

ReplicaId StoreCore::Impl::TakeNvmeSlot(EntryIdx idx) {
  Claim(idx);
  const Entry& entry = At(idx);
  const OwnerIdx owner = namespaces_[entry.ns].owner.value_or(0);
  const RoomFor room{.account = AccountOf(entry), .footprint = Footprint(kNvme, entry.ns)};
  while (true) {
    if (!OverQuota(kNvme, room)) {
      const auto slot = tiers_[kNvme]->Reserve(BlockBytes(entry), owner);
      if (slot.ok()) {
        Charge(kNvme, room.account, room.footprint);
        return *slot;
      }
      if (!absl::IsResourceExhausted(slot.status()) || IsWriteBudgetSpent(slot.status())) {
        return kNoReplica;
      }
    }
    const auto victim = PickVictim(kNvme, room);
    if (!victim.has_value()) return kNoReplica;
    CountDisplaced(kNvme, AccountOf(At(*victim)), room.account);
    EvictReplica(*victim, kNvme);
  }
}

StoreCore::Impl::ReadStart StoreCore::Impl::StartRead(EntryIdx idx, Purpose purpose,
                                                      TicketId ticket, Effects* effects) {
  const bool background = purpose != Purpose::kDemandRead;
  Claim(idx);
  const NamespaceIdx ns = At(idx).ns;
  for (size_t tier = purpose == Purpose::kGuess ? kHost : kHbm; tier <= kHost; ++tier) {
    if (LinkFull(kNvme, tier, background)) return ReadStart::kWait;
    // Room on hbm is only for what active contexts, and earlier deadlines, do not need themselves.
    if (background && tier == kHbm && !HbmHasRoomFor(ns)) continue;
    // The read displaces no active context's block, but for a demanded one on its way to host.
    const bool idle_only = background || tier == kHbm;
    const SlotOrRoom slot = TakeSlotOrMakeRoom(tier, ns, idle_only, reads_wanted_.size(), effects);
    if (slot.replica != kNoReplica && (!Visible(At(idx)) || At(idx).in_transfer)) {
      // Making room took the block itself.
      GiveBack(tier, slot.replica, AccountOf(ns), namespaces_[ns].spec.block_bytes);
      return ReadStart::kNoRoom;
    }
    if (slot.replica != kNoReplica) {
      StartTransfer({.entry = idx,
                     .purpose = purpose,
                     .source = kNvme,
                     .target = tier,
                     .target_replica = slot.replica,
                     .ticket = ticket},
                    effects);
      return ReadStart::kStarted;
    }
    if (slot.room == Room::kLeaving) return ReadStart::kWait;
  }
  return ReadStart::kNoRoom;
}

void StoreCore::Impl::StartTransfer(Job job, Effects* effects) {
  Entry& entry = At(job.entry);
  const size_t source = job.source;
  KVT_CHECK(!entry.in_transfer && entry.replica[source] != kNoReplica);
  const JobId id = NextId();
  entry.in_transfer = true;
  job.footprint = tiers_[source]->FootprintBytes(BlockBytes(entry));
  if (job.purpose == Purpose::kDemote || job.purpose == Purpose::kPause) {
    leaving_bytes_[source] += job.footprint;
    AccountAt(AccountOf(entry)).leaving_bytes[source] += job.footprint;
    SetLeaving(job.entry, job.target);
  }
  LinkState& link = links_[source][job.target];
  if (link.counters.inflight_count++ == 0) link.busy_since_ms = now_ms_;
  effects->transfers.push_back(
      {.job = id,
       .meta = Meta(entry),
       .source_tier = static_cast<TierId>(source),
       .source = entry.replica[source],
       .target_tier = static_cast<TierId>(job.target),
       .target = job.target_replica,
       .is_ahead = source == kNvme && job.purpose != Purpose::kDemandRead});
  jobs_.emplace(id, job);
  Refresh(job.entry);
}

}  // namespace kvtier::core
