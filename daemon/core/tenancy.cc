// SPDX-License-Identifier: Apache-2.0
//
// Tenants on the tiers: what each has there, what it may have, and whose block leaves for whose.
//
// Room that is not reserved belongs to all alike. So a tenant's fair share of a tier is its reserve
// and as much as every other tenant gets beyond its own, and the one that is most above its share
// is the one that has most beyond its reserve.
#include <algorithm>
#include <tuple>

#include "daemon/core/core_impl.h"
#include "proto/base/check.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"

namespace kvtier::core {
namespace {

// Entries looked at in one event for blocks to claim: some tens of microseconds.
constexpr EntryIdx kClaimStep = 2048;

}  // namespace

AccountIdx StoreCore::Impl::AccountOf(NamespaceIdx ns) const {
  const std::optional<OwnerIdx> owner = namespaces_[ns].owner;
  // Where there is one tenant, everything is its.
  if (!owner.has_value()) return IsUnclaimed(ns) ? kUnclaimed : kUnclaimed + 1;
  return *owner + 1;
}

bool StoreCore::Impl::IsUnclaimed(NamespaceIdx ns) const {
  return !namespaces_[ns].owner.has_value() && options_.tenants.size() != 1;
}

Account& StoreCore::Impl::AccountAt(AccountIdx account) {
  if (account >= accounts_.size()) accounts_.resize(account + 1);
  return accounts_[account];
}

void StoreCore::Impl::Charge(size_t tier, AccountIdx account, uint64_t footprint) {
  AccountAt(account).counters.tiers[tier].used_bytes += footprint;
  last_taker_[tier] = account;
}

void StoreCore::Impl::ChargeAdopted(size_t tier, AccountIdx account, uint64_t footprint) {
  AccountAt(account).counters.tiers[tier].used_bytes += footprint;
  if (OverQuota(tier, {.account = account})) over_quota_ = true;
}

void StoreCore::Impl::GiveBack(size_t tier, ReplicaId replica, AccountIdx account,
                               uint32_t block_bytes) {
  const uint64_t footprint = tiers_[tier]->FootprintBytes(block_bytes);
  uint64_t& used_bytes = AccountAt(account).counters.tiers[tier].used_bytes;
  KVT_CHECK(used_bytes >= footprint);
  used_bytes -= footprint;
  tiers_[tier]->Free(replica);
}

bool StoreCore::Impl::OverQuota(size_t tier, const RoomFor& room) const {
  if (room.account >= accounts_.size()) return false;
  const TenantCounters& counters = accounts_[room.account].counters;
  const uint64_t quota_bytes = counters.limits.quota_bytes[tier];
  return quota_bytes != UINT64_MAX &&
         counters.tiers[tier].used_bytes + room.footprint > quota_bytes;
}

bool StoreCore::Impl::IsProtected(size_t tier, AccountIdx account, uint64_t footprint) const {
  const Account& owner = accounts_[account];
  const uint64_t reserve_bytes = owner.counters.limits.reserve_bytes[tier];
  if (reserve_bytes == 0) return false;
  // Room in segments of its own is of no use to others before it gives up a segment.
  const uint64_t held_bytes =
      std::max(owner.counters.tiers[tier].used_bytes - owner.leaving_bytes[tier],
               tiers_[tier]->OwnerSegmentBytes(account - 1));
  return held_bytes < reserve_bytes + footprint;
}

std::optional<EntryIdx> StoreCore::Impl::PickVictim(size_t tier, const RoomFor& room) const {
  const auto tier_idx = static_cast<policy::TierIdx>(tier);
  const auto victim_of = [&](AccountIdx account) {
    return room.idle_only ? eviction_->IdleVictim(tier_idx, account)
                          : eviction_->Victim(tier_idx, account);
  };
  if (OverQuota(tier, room)) return victim_of(room.account);
  // Of equals it is the taker itself, whose slot can be used at once.
  using Order = std::tuple<int64_t, bool, AccountIdx>;
  std::optional<Order> last;
  while (true) {
    std::optional<Order> next;
    for (AccountIdx account = 0; account < accounts_.size(); ++account) {
      const Account& owner = accounts_[account];
      if (owner.counters.tiers[tier].block_count == 0) continue;
      const bool takes = account == room.account;
      const uint64_t stays_bytes = owner.counters.tiers[tier].used_bytes -
                                   owner.leaving_bytes[tier] + (takes ? room.footprint : 0);
      const Order order(static_cast<int64_t>(stays_bytes) -
                            static_cast<int64_t>(owner.counters.limits.reserve_bytes[tier]),
                        takes, account);
      if ((!last.has_value() || order < *last) && (!next.has_value() || *next < order)) {
        next = order;
      }
    }
    if (!next.has_value()) return std::nullopt;
    last = next;
    const AccountIdx account = std::get<AccountIdx>(*next);
    const std::optional<EntryIdx> victim = victim_of(account);
    if (!victim.has_value()) continue;
    if (account == room.account || !IsProtected(tier, account, Footprint(tier, At(*victim).ns))) {
      return victim;
    }
  }
}

void StoreCore::Impl::CountDisplaced(size_t tier, AccountIdx victim, AccountIdx taker) {
  if (victim != taker) ++AccountAt(victim).counters.tiers[tier].displaced_block_count;
}

void StoreCore::Impl::Claim(EntryIdx idx) {
  Entry& entry = At(idx);
  // The room that a transfer takes is charged already, to nobody.
  if (!entry.is_unclaimed || entry.in_transfer || !namespaces_[entry.ns].owner.has_value()) return;
  const AccountIdx account = AccountOf(entry.ns);
  Account& owner = AccountAt(account);
  Account& nobody = AccountAt(kUnclaimed);
  for (size_t tier = 0; tier < kTierCount; ++tier) {
    if (entry.replica[tier] == kNoReplica) continue;
    TenantTierCounters& from = nobody.counters.tiers[tier];
    TenantTierCounters& to = owner.counters.tiers[tier];
    const uint64_t pinned_bytes = (entry.pinned_mask >> tier & 1) != 0 ? BlockBytes(entry) : 0;
    from.used_bytes -= Footprint(tier, entry.ns);
    to.used_bytes += Footprint(tier, entry.ns);
    from.pinned_bytes -= pinned_bytes;
    to.pinned_bytes += pinned_bytes;
    --from.block_count;
    ++to.block_count;
    if (OverQuota(tier, {.account = account})) over_quota_ = true;
  }
  entry.is_unclaimed = false;
  entry.rank_is_old = true;
  // To the tenant, all of it is new.
  entry.told_mask = 0;
  Refresh(idx);
}

void StoreCore::Impl::ClaimSome() {
  if (claim_next_ == kNoEntry) return;
  const auto count = static_cast<EntryIdx>(index_.size());
  const EntryIdx end = claim_next_ + std::min(kClaimStep, count - std::min(count, claim_next_));
  for (; claim_next_ < end; ++claim_next_) {
    if (At(claim_next_).state != EntryState::kUnused) Claim(claim_next_);
  }
  if (claim_next_ >= count) claim_next_ = kNoEntry;
}

void StoreCore::Impl::PumpQuotas(Effects* effects) {
  if (!over_quota_) return;
  over_quota_ = false;
  for (AccountIdx account = 0; account < accounts_.size(); ++account) {
    const RoomFor room{.account = account};
    for (size_t tier = 0; tier < kTierCount; ++tier) {
      while (tiers_[tier] != nullptr && OverQuota(tier, room)) {
        over_quota_ = true;
        const auto excess_bytes = accounts_[account].counters.tiers[tier].used_bytes -
                                  accounts_[account].counters.limits.quota_bytes[tier];
        if (excess_bytes <= accounts_[account].leaving_bytes[tier]) break;
        const std::optional<EntryIdx> victim = PickVictim(tier, room);
        if (!victim.has_value()) break;
        if (tier == kNvme) {
          EvictReplica(*victim, kNvme);
          continue;
        }
        const Demotion demotion = Demote(tier, *victim, room, 1, effects);
        if (demotion == Demotion::kBlocked || demotion == Demotion::kStuck) break;
      }
    }
  }
}

absl::Status StoreCore::Impl::QuotaReached(AccountIdx account) const {
  const TenantCounters& counters = accounts_[account].counters;
  const auto text = [&](size_t tier) {
    const uint64_t quota_bytes = counters.limits.quota_bytes[tier];
    return absl::StrFormat("%d of %s bytes on %s (%d pinned)", counters.tiers[tier].used_bytes,
                           quota_bytes == UINT64_MAX ? "unlimited" : absl::StrCat(quota_bytes),
                           TierName(static_cast<TierId>(tier)), counters.tiers[tier].pinned_bytes);
  };
  return WithReason(Exhausted("the tenant's quota is used up, and none of its blocks could leave "
                              "in time: it has %s and %s",
                              text(kHbm), text(kHost)),
                    reason::kQuotaReached);
}

TenantsReport StoreCore::Impl::Tenants() const {
  TenantsReport report;
  report.unclaimed = accounts_[kUnclaimed].counters;
  for (AccountIdx account = 1; account < accounts_.size(); ++account) {
    report.tenants.push_back(accounts_[account].counters);
  }
  return report;
}

void StoreCore::Impl::CheckAccounts() const {
  std::vector<Account> found(accounts_.size());
  const auto charge = [&](size_t tier, AccountIdx account, uint32_t block_bytes) {
    found[account].counters.tiers[tier].used_bytes += tiers_[tier]->FootprintBytes(block_bytes);
  };
  for (EntryIdx idx = 0; idx < index_.size(); ++idx) {
    const Entry& entry = At(idx);
    if (entry.state == EntryState::kUnused) continue;
    for (size_t tier = 0; tier < kTierCount; ++tier) {
      if (entry.replica[tier] == kNoReplica) continue;
      const AccountIdx account = AccountOf(entry);
      charge(tier, account, BlockBytes(entry));
      ++found[account].counters.tiers[tier].block_count;
      if (IsPinned(entry, tier)) {
        found[account].counters.tiers[tier].pinned_bytes += BlockBytes(entry);
      }
    }
  }
  for (const auto& [id, job] : jobs_) {
    const Entry& entry = At(job.entry);
    charge(job.target, AccountOf(entry), BlockBytes(entry));
    if (job.purpose == Purpose::kDemote || job.purpose == Purpose::kPause) {
      found[AccountOf(entry)].leaving_bytes[job.source] += job.footprint;
    }
  }
  for (const auto& [id, session] : sessions_) {
    for (const Quarantined& slot : session->quarantine) {
      charge(slot.tier, session->owner + 1, static_cast<uint32_t>(slot.bytes));
    }
  }
  for (AccountIdx account = 0; account < accounts_.size(); ++account) {
    const Account& kept = accounts_[account];
    KVT_CHECK(kept.leaving_bytes == found[account].leaving_bytes);
    for (size_t tier = 0; tier < kTierCount; ++tier) {
      const TenantTierCounters& is = kept.counters.tiers[tier];
      const TenantTierCounters& should = found[account].counters.tiers[tier];
      KVT_CHECK(is.used_bytes == should.used_bytes && is.block_count == should.block_count);
      KVT_CHECK(is.pinned_bytes == should.pinned_bytes);
      KVT_CHECK(over_quota_ || is.used_bytes <= kept.counters.limits.quota_bytes[tier]);
    }
  }
}

}  // namespace kvtier::core
