// SPDX-License-Identifier: Apache-2.0
//
// What a replay of a workload does and counts, whether a daemon or a simulated core serves it.
#pragma once

#include <array>
#include <cstdint>

#include "policy/policy.h"
#include "policy/sim/trace.h"

namespace kvtier::sim {

using policy::TierIdx;
inline constexpr TierIdx kHbm = 0;
inline constexpr TierIdx kHost = 1;
inline constexpr TierIdx kNvme = 2;

// What replay and simulation must do alike. Sampling and batching decide what is used when, and so
// what is evicted.
struct ReplayRules {
  ScheduleOptions schedule;
  // Blocks of one Reserve; smaller than any sensible tier.
  uint32_t commit_batch_blocks = 128;
  // Every so many requests, the blocks just committed are acquired too, to decode over the whole
  // chain. 0: never.
  uint32_t decode_every = 64;
  // A pause says when the context comes back, as it will.
  bool say_returns = true;

  bool DecodesAt(uint64_t request_number) const {
    return decode_every != 0 && request_number % decode_every == 0;
  }
};

// Tokens by where their block was found; tokens after the last full block of a prompt are misses.
struct SimHits {
  uint64_t request_count = 0;
  uint64_t token_count = 0;
  // By the fastest tier at lookup.
  std::array<uint64_t, policy::kTierCount> tier_hit_token_count{};
  // Blocks that found no room.
  uint64_t exhausted_block_count = 0;

  double HitRate() const;
  double TierHitRate(TierIdx tier) const;
};

}  // namespace kvtier::sim
