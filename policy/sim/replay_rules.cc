// SPDX-License-Identifier: Apache-2.0
#include "policy/sim/replay_rules.h"

namespace kvtier::sim {
namespace {

double ShareOf(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
}

}  // namespace

double SimHits::HitRate() const {
  uint64_t hit_count = 0;
  for (const uint64_t count : tier_hit_token_count) hit_count += count;
  return ShareOf(hit_count, token_count);
}

double SimHits::TierHitRate(TierIdx tier) const {
  return ShareOf(tier_hit_token_count[tier], token_count);
}

}  // namespace kvtier::sim
