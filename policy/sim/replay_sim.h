// SPDX-License-Identifier: Apache-2.0
//
// The calls that `kvtierctl replay` makes for a workload, made to the simulator instead of a
// daemon.
#pragma once

#include <array>
#include <cstdint>

#include "policy/sim/tiered_sim.h"
#include "policy/sim/trace.h"

namespace kvtier::sim {

// What replay and simulation must do alike. Sampling and batching decide what is used when, and so
// what is evicted.
struct ReplayRules {
  ScheduleOptions schedule;
  // Blocks of one Reserve; smaller than any sensible tier.
  uint32_t commit_batch_blocks = 128;
  // Every so many requests, the blocks just committed are acquired too, to decode over the whole
  // chain. 0: never.
  uint32_t decode_every = 64;

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

SimHits SimulateReplay(const Trace& trace, const ReplayRules& rules,
                       const TieredSimOptions& options);

// One prefix cache of `capacity_blocks` with the same policy and no other tier: only leaves leave,
// the blocks of the request being served stay. The setting of published hit rates; hits count as
// host's.
SimHits SimulateSingleCache(const Trace& trace, uint64_t capacity_blocks);

}  // namespace kvtier::sim
