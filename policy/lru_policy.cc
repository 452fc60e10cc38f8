// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <compare>
#include <limits>
#include <memory>
#include <optional>
#include <set>

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
    Candidates& candidates = At(tier);
    const Rank rank = RankOf(block, facts);
    auto [place, inserted] = candidates.ranks.try_emplace(block, rank);
    if (!inserted) {
      if (place->second == rank) return;
      candidates.order.erase(place->second);
      place->second = rank;
    }
    candidates.order.insert(rank);
  }

  void Erase(TierIdx tier, BlockRef block) override {
    Candidates& candidates = At(tier);
    const auto place = candidates.ranks.find(block);
    if (place == candidates.ranks.end()) return;
    candidates.order.erase(place->second);
    candidates.ranks.erase(place);
  }

  std::optional<BlockRef> Victim(TierIdx tier) override {
    const Candidates& candidates = At(tier);
    if (candidates.order.empty()) return std::nullopt;
    return candidates.order.begin()->block;
  }

  std::optional<BlockRef> IdleVictim(TierIdx tier) override {
    const Candidates& candidates = At(tier);
    // Idle blocks rank before all others: either the first is idle or none is.
    if (candidates.order.empty() || candidates.order.begin()->in_active_context) {
      return std::nullopt;
    }
    return candidates.order.begin()->block;
  }

 private:
  struct Candidates {
    std::set<Rank> order;
    absl::flat_hash_map<BlockRef, Rank> ranks;
  };

  Candidates& At(TierIdx tier) {
    KVT_CHECK(tier < kTierCount);
    return tiers_[tier];
  }

  std::array<Candidates, kTierCount> tiers_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> NewLruPolicy() { return std::make_unique<LruPolicy>(); }

}  // namespace kvtier::policy
