// SPDX-License-Identifier: Apache-2.0
//
// What the daemon's tiers hold, as plain bookkeeping: the same policy objects, the same rules,
// moves that take no time. It is written apart from the store core, so that the two can be
// compared.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "policy/policy.h"
#include "policy/sim/trace.h"

namespace kvtier::sim {

using policy::TierIdx;
inline constexpr TierIdx kHbm = 0;
inline constexpr TierIdx kHost = 1;
inline constexpr TierIdx kNvme = 2;

struct TierModel {
  uint64_t capacity_bytes = 0;
  // What one block takes of it, with padding and header.
  uint64_t footprint_bytes = 1;
  policy::Watermarks marks;
};

struct TieredSimOptions {
  std::array<TierModel, policy::kTierCount> tiers;
  policy::Admission nvme_admission = policy::Admission::kAll;
  // Payload of one block, for the policy.
  uint32_t block_bytes = 1;
  // Blocks that leave at once when a tier is full and one must go.
  uint32_t room_ahead_block_count = 16;
};

// Blocks pinned by one Acquire.
struct SimLease {
  std::vector<BlockRef> blocks;
  // Blocks from the start of the chain that were delivered.
  size_t ok_prefix_count = 0;
};

// Rules, the daemon's:
//   * hbm and host are exclusive of each other; nvme is inclusive: its replica stays on promotion.
//   * A block may leave a tier when it is not pinned and has no child there or on a faster tier.
//   * hbm makes room by moving victims to host; host by dropping victims that nvme has, writing the
//     others to nvme if admitted, else forgetting them; nvme by dropping. Where host can make no
//     room, because it holds only prefixes of what is on hbm, hbm does as host does. Room is made
//     for several blocks at once.
//   * A lease pins the replica in memory, not the one on nvme.
//   * After each call, a tier above its high watermark is emptied down to the low one.
// Single-thread.
class TieredSim {
 public:
  // `blocks` outlives the object.
  TieredSim(const TieredSimOptions& options, std::span<const TraceBlock> blocks,
            size_t context_count, std::unique_ptr<policy::EvictionPolicy> eviction);

  // The fastest tier of each block from the start of the chain up to the first that is stored
  // nowhere.
  std::vector<TierIdx> Lookup(std::span<const BlockRef> chain) const;

  SimLease Acquire(std::span<const BlockRef> chain, uint64_t now_ms);
  void Release(const SimLease& lease);

  // Reserves and commits one batch on `tier` (hbm, or host where hbm can make no room). Returns the
  // blocks from its start that are stored now: the rest found no room.
  size_t Commit(std::span<const BlockRef> batch, TierIdx tier, uint64_t now_ms);

  // Gives a context this chain and marks it active.
  void SetChain(uint32_t context_idx, std::span<const BlockRef> chain);
  void Pause(uint32_t context_idx);
  void Resume(uint32_t context_idx);
  // Forgets the context; its blocks stay.
  void Close(uint32_t context_idx);

  uint64_t used_bytes(TierIdx tier) const { return used_bytes_[tier]; }
  bool Holds(TierIdx tier, BlockRef block) const;

 private:
  struct Entry {
    std::array<bool, policy::kTierCount> held{};
    // Children with a replica on each tier.
    std::array<uint32_t, policy::kTierCount> child_count{};
    uint32_t lease_count = 0;
    // Being filled, moved or read: stays on every tier.
    uint32_t busy_count = 0;
    uint32_t active_context_count = 0;
    uint64_t last_use_seq = 0;
    uint64_t last_use_ms = 0;
    uint32_t use_count = 0;
  };
  struct Context {
    bool active = false;
    std::vector<BlockRef> chain;
  };

  policy::BlockFacts FactsOf(BlockRef block) const;
  void Touch(BlockRef block, uint64_t seq, uint64_t now_ms);
  bool Stored(BlockRef block) const;
  void SetBusy(BlockRef block, bool busy);
  void SetLeased(BlockRef block, bool leased);
  void SetActive(Context* context, bool active);
  // Tells the policy whether the block is a candidate of each tier.
  void Refresh(BlockRef block);
  void Put(TierIdx tier, BlockRef block);
  void Remove(TierIdx tier, BlockRef block);
  // True when the tier has room for one more block, made if need be. `idle_only`: only victims of
  // no active context may go.
  bool TakeRoom(TierIdx tier, bool idle_only);
  // Room without a move: host drops what nvme has.
  bool HasRoom(TierIdx tier, bool idle_only);
  // Moves candidates out, several at once; false when none could go.
  bool MakeRoom(TierIdx tier, bool idle_only);
  enum class Exit : uint8_t { kDropped, kMoved };
  Exit MoveOut(TierIdx tier, BlockRef block);
  // Brings a block to a memory tier.
  bool Promote(BlockRef block, TierIdx tier, bool idle_only);
  void ApplyWatermarks();

  TieredSimOptions options_;
  std::span<const TraceBlock> blocks_;
  std::unique_ptr<policy::EvictionPolicy> eviction_;
  std::vector<Entry> entries_;
  std::vector<Context> contexts_;
  std::array<uint64_t, policy::kTierCount> used_bytes_{};
  std::array<bool, policy::kTierCount> draining_{};
  uint64_t use_seq_ = 0;
};

}  // namespace kvtier::sim
