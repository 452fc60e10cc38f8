// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <compare>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "policy/policy.h"
#include "proto/base/check.h"

namespace kvtier::policy {
namespace {

// Place in the order of leaving. The block itself comes last, so that ranks are unique and the
// order does not depend on that of the calls.
struct Rank {
  bool in_active_context = false;
  uint64_t last_use_seq = 0;
  // Distance from the deepest possible block: deeper blocks rank lower.
  uint32_t shallowness = 0;
  BlockRef block = 0;

  friend auto operator<=>(const Rank&, const Rank&) = default;
};

Rank RankOf(BlockRef block, const BlockFacts& facts) {
  return {.in_active_context = facts.in_active_context,
          .last_use_seq = facts.last_use_seq,
          .shallowness = std::numeric_limits<uint32_t>::max() - facts.depth,
          .block = block};
}

class LruPolicy final : public EvictionPolicy {
 public:
  void Upsert(TierIdx tier, BlockRef block, const BlockFacts& facts) override {
    KVT_CHECK(facts.pool < kPoolCountMax);
    Candidates& candidates = At(tier);
    const Place place{.rank = RankOf(block, facts), .pool = facts.pool};
    auto [known, inserted] = candidates.places.try_emplace(block, place);
    if (!inserted) {
      if (known->second == place) return;
      candidates.orders[known->second.pool].erase(known->second.rank);
      known->second = place;
    }
    if (place.pool >= candidates.orders.size()) candidates.orders.resize(place.pool + 1);
    candidates.orders[place.pool].insert(place.rank);
  }

  void Erase(TierIdx tier, BlockRef block) override {
    Candidates& candidates = At(tier);
    const auto place = candidates.places.find(block);
    if (place == candidates.places.end()) return;
    candidates.orders[place->second.pool].erase(place->second.rank);
    candidates.places.erase(place);
  }

  std::optional<BlockRef> Victim(TierIdx tier, PoolIdx pool) override {
    const std::set<Rank>* order = OrderOf(tier, pool);
    if (order == nullptr) return std::nullopt;
    return order->begin()->block;
  }

  std::optional<BlockRef> IdleVictim(TierIdx tier, PoolIdx pool) override {
    const std::set<Rank>* order = OrderOf(tier, pool);
    // Idle blocks rank before all others: either the first is idle or none is.
    if (order == nullptr || order->begin()->in_active_context) return std::nullopt;
    return order->begin()->block;
  }

 private:
  struct Place {
    Rank rank;
    PoolIdx pool = 0;

    friend bool operator==(const Place&, const Place&) = default;
  };
  struct Candidates {
    std::vector<std::set<Rank>> orders;  // by pool
    absl::flat_hash_map<BlockRef, Place> places;
  };

  // Null: the pool has no candidate there.
  const std::set<Rank>* OrderOf(TierIdx tier, PoolIdx pool) {
    const std::vector<std::set<Rank>>& orders = At(tier).orders;
    return pool < orders.size() && !orders[pool].empty() ? &orders[pool] : nullptr;
  }

  Candidates& At(TierIdx tier) {
    KVT_CHECK(tier < kTierCount);
    return tiers_[tier];
  }

  std::array<Candidates, kTierCount> tiers_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> NewLruPolicy() { return std::make_unique<LruPolicy>(); }

}  // namespace kvtier::policy
