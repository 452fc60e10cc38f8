// SPDX-License-Identifier: Apache-2.0
//
// One prefix cache of equal blocks under some rule: a block hits only if all before it hit, and
// only leaves are evicted. Fast enough to compare rules over sizes on whole traces.
#pragma once

#include <cstdint>
#include <span>

#include "policy/sim/cache_rules.h"
#include "policy/sim/trace.h"

namespace kvtier::sim {

struct CacheSimOptions {
  uint64_t capacity_blocks = 0;
  // false: the blocks of the request being served lie beside the cache, and what is worth least
  // leaves afterwards, of the others and of these. Belady's bound is exact in this setting.
  // true: room is made for each block before it comes, of which those of the request being served
  // are exempt; what finds none is not stored.
  bool make_room_first = false;
  std::span<const RequestHint> hints = {};
  policy::HazardOptions hazard = {};
};

struct CacheHits {
  uint64_t token_count = 0;
  uint64_t hit_token_count = 0;
  uint64_t inserted_block_count = 0;
  uint64_t evicted_block_count = 0;

  double HitRate() const {
    if (token_count == 0) return 0;
    return static_cast<double>(hit_token_count) / static_cast<double>(token_count);
  }
};

CacheHits SimulateCache(const Trace& trace, CachePolicy policy, const CacheSimOptions& options);

}  // namespace kvtier::sim
