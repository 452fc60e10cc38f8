// SPDX-License-Identifier: Apache-2.0
//
// Replacement rules for one prefix cache: the textbook ones, for comparison, and the daemon's.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "policy/hazard_policy.h"
#include "policy/sim/hints.h"
#include "policy/sim/trace.h"

namespace kvtier::sim {

enum class CachePolicy : uint8_t { kFifo, kLru, kLru2, kS3Fifo, kArc, kHazard, kMin };
inline constexpr size_t kCachePolicyCount = 7;
std::string_view CachePolicyName(CachePolicy policy);

// One rule at work on one trace. The caller keeps the tree: it says which blocks are leaves, and
// only leaves leave. Single-thread.
class CacheRule {
 public:
  virtual ~CacheRule() = default;

  virtual void Begin(uint32_t request_idx) = 0;
  // Uses of the request's blocks, in the order of its chain.
  virtual void Hit(BlockRef block) = 0;
  virtual void Insert(BlockRef block) = 0;
  virtual void AddLeaf(BlockRef block) = 0;
  virtual void RemoveLeaf(BlockRef block) = 0;
  // The leaf that should go; there is one. It is removed as a leaf and then evicted.
  virtual BlockRef Victim() = 0;
  virtual void Evict(BlockRef block) = 0;
};

struct CacheRuleOptions {
  uint64_t capacity_blocks = 0;
  // Of each request, for kHazard; empty: none.
  std::span<const RequestHint> hints = {};
  policy::HazardOptions hazard = {};
};

// `trace` and the hints outlive the rule.
std::unique_ptr<CacheRule> NewCacheRule(CachePolicy policy, const Trace& trace,
                                        const CacheRuleOptions& options);

}  // namespace kvtier::sim
