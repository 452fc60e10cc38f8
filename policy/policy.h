// SPDX-License-Identifier: Apache-2.0
//
// Decisions about blocks as data: no clock, no thread, no I/O. The store core and the simulator
// drive the same objects.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvtier::policy {

// Index of a block in the caller's tables.
using BlockRef = uint32_t;

// Index of a tier, fastest first: 0 hbm, 1 host, 2 nvme.
using TierIdx = uint32_t;
inline constexpr TierIdx kTierCount = 3;

// Whose blocks compete with one another, a tenant's for example: a victim is asked for by pool.
using PoolIdx = uint32_t;
inline constexpr PoolIdx kPoolCountMax = 512;

// What a decision may look at.
struct BlockFacts {
  // Position of the last use in the order of all uses. Blocks of one call share it.
  uint64_t last_use_seq = 0;
  uint64_t last_use_ms = 0;
  // Blocks before this one in its chain: of equally old blocks the deepest goes first.
  uint32_t depth = 0;
  uint32_t use_count = 0;
  uint32_t bytes = 0;
  // An active context holds it.
  bool in_active_context = false;
  // Less than kPoolCountMax. The same on all tiers; what is learned is learned from all pools.
  PoolIdx pool = 0;
};

inline constexpr BlockRef kNoParent = UINT32_MAX;

// What the client said it does next with the context that used a block.
enum class NextStep : uint8_t {
  kUnknown,
  // Runs a tool and comes back with its result.
  kTool,
  // Waits for a person.
  kUser,
  // Does not come back.
  kFinished,
};
inline constexpr size_t kNextStepCount = 4;

// One use of a block: it was found, or filled.
struct BlockUse {
  BlockRef block = 0;
  // The block before it in its chain, or kNoParent.
  BlockRef parent = kNoParent;
  // Names the content, not the place: the same when the block comes back after it was forgotten.
  uint64_t key = 0;
  uint64_t now_ms = 0;
  NextStep next = NextStep::kUnknown;
  // When the context is expected back, from now; 0: the client does not say.
  uint64_t returns_in_ms = 0;
};

// Ranks the blocks that may leave each tier. Single-thread (its owner's lock). A candidate is a
// block with a replica on the tier, not pinned, and with no child on that tier or a faster one: the
// caller adds and removes candidates as these change, so a suffix always goes before its prefix.
//
// Use, Expect and Forget are for policies that learn; the others need not heed them. They take the
// time from their caller. It should not go back; a policy that learns ignores steps back.
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  // Every use of a block that is or will be on some tier, before the Upserts that follow from it.
  // Parents come before their children.
  virtual void Use(const BlockUse& use);
  // What is known since the last use: the context paused, finished, or waits in the engine's queue.
  // Nothing happens to a block that was never used.
  virtual void Expect(BlockRef block, NextStep next, uint64_t now_ms, uint64_t returns_in_ms);
  // The block left its last tier and is no candidate any more; its BlockRef may name another block
  // afterwards.
  virtual void Forget(BlockRef block, uint64_t key);

  // Adds a candidate or changes its facts.
  virtual void Upsert(TierIdx tier, BlockRef block, const BlockFacts& facts) = 0;
  // Removes a candidate; nothing happens if it is none.
  virtual void Erase(TierIdx tier, BlockRef block) = 0;
  // The candidate of the pool that is worth least, which stays a candidate; empty when there is
  // none.
  virtual std::optional<BlockRef> Victim(TierIdx tier, PoolIdx pool) = 0;
  // The same among blocks of no active context.
  virtual std::optional<BlockRef> IdleVictim(TierIdx tier, PoolIdx pool) = 0;

  // Whether a block, of any pool, would be worth more on the tier than what IdleVictim says: only
  // then may a guess take its room. True for policies that cannot tell.
  virtual bool BeatsIdleVictim(TierIdx tier, PoolIdx pool, BlockRef block);

  // What was learned, to be restored after a restart; it names no block. Empty: nothing is learned.
  virtual std::string Save() const;
  // Errors: DATA_LOSS for bytes that Save of such a policy did not write; nothing has changed then.
  virtual absl::Status Restore(std::string_view saved);
};

// Leaf-first LRU: blocks of active contexts last, then by last use, then the deepest first.
std::unique_ptr<EvictionPolicy> NewLruPolicy();

enum class EvictionKind : uint8_t {
  kLru,
  // hazard_policy.h.
  kHazard,
};
absl::StatusOr<EvictionKind> ParseEviction(std::string_view name);
std::unique_ptr<EvictionPolicy> NewEvictionPolicy(EvictionKind kind);

// Which blocks are worth a write to nvme when host memory needs their room.
enum class Admission : uint8_t {
  // Every block.
  kAll,
  // Blocks used at least twice (written and read once).
  kSeenAgain,
};
absl::StatusOr<Admission> ParseAdmission(std::string_view name);
bool Admit(Admission admission, const BlockFacts& facts);

// Demotion starts above `high` and goes on down to `low`; both are shares of capacity, with
// 0 < low <= high <= 1.
struct Watermarks {
  double high = 0.95;
  double low = 0.90;
};

// Bytes that should leave now. `leaving` is what is on its way out already; `draining` says that an
// earlier call asked for bytes and `low` was not reached yet.
uint64_t BytesToDemote(const Watermarks& marks, uint64_t capacity_bytes, uint64_t used_bytes,
                       uint64_t leaving_bytes, bool draining);

}  // namespace kvtier::policy
