// SPDX-License-Identifier: Apache-2.0
//
// Eviction by learned reuse hazard: of the blocks that may leave, the one goes that is least likely
// to be used again for the time it would be held.
//
//   * Blocks fall into classes by what the client does next, by how often they were used and by the
//     gap before the last use. Each class has a life table, learned from every use of a block,
//     stored or not (hazard_model.h). Untaught, blocks rank as under LRU.
//   * A context that says when it comes back is believed until well after that time: its blocks are
//     worth the share of such promises that were kept, over the time until then. Blocks that their
//     chain came back without are worth next to nothing.
//   * The victim is the least worth among the oldest leaf of each class and 16 others, drawn by a
//     seeded generator: the same events give the same victims.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "policy/ghost_table.h"
#include "policy/hazard_model.h"
#include "policy/leaf_pool.h"
#include "policy/policy.h"

namespace kvtier::policy {

struct HazardOptions {
  uint64_t seed = 1;
  // Blocks remembered after they left every tier, 20 bytes each, allocated at once.
  uint32_t ghost_count_max = 1U << 18;
  HazardModel::Options model = {};
};

// Single-thread. Memory: 32 bytes per block and 8 for each tier that it may leave, the ghosts, 60
// KB for each pool that had a block, and less than 4 MB for what was learned.
class HazardPolicy final : public EvictionPolicy {
 public:
  explicit HazardPolicy(const HazardOptions& options);

  void Use(const BlockUse& use) override;
  void Expect(BlockRef block, NextStep next, uint64_t now_ms, uint64_t returns_in_ms) override;
  void Forget(BlockRef block, uint64_t key) override;
  void Upsert(TierIdx tier, BlockRef block, const BlockFacts& facts) override;
  void Erase(TierIdx tier, BlockRef block) override;
  std::optional<BlockRef> Victim(TierIdx tier, PoolIdx pool) override;
  std::optional<BlockRef> IdleVictim(TierIdx tier, PoolIdx pool) override;
  bool BeatsIdleVictim(TierIdx tier, PoolIdx pool, BlockRef block) override;

  // See HazardModel.
  std::string Save() const override { return model_.Save(); }
  absl::Status Restore(std::string_view saved) override { return model_.Restore(saved); }

  // Of policy state: blocks and candidates, ghosts, the model.
  uint64_t memory_bytes() const;

 private:
  static constexpr uint32_t kNoPlace = UINT32_MAX;
  static constexpr size_t kActivityCount = 2;

  struct Record {
    Tick last_use = 0;
    // When it is expected back; 0: nobody said.
    Tick returns_at = 0;
    BlockRef parent = kNoParent;
    CohortIdx cohort = kNoCohort;
    // In the heap of its class, where it may leave the tier.
    std::array<uint32_t, kTierCount> place = {kNoPlace, kNoPlace, kNoPlace};
    uint32_t class_idx : 9 = 0;
    uint32_t use_count : 8 = 0;  // 255 and more; 0: not known
    uint32_t gap_class : 5 = 0;
    uint32_t in_active_context : 1 = 0;
    uint32_t pool : 9 = 0;
  };
  static_assert(kClassCount <= 512 && kPoolCountMax <= 512, "they fit their bits");
  static_assert(sizeof(Record) == 32);
  static_assert(sizeof(Record) + 2 * sizeof(Leaf) <= 48, "a block on memory and on nvme");

  static constexpr size_t kChunkRecords = 1U << 14;
  using Chunk = std::array<Record, kChunkRecords>;

  // A victim that was found; it stands as long as `now` is the time and nothing changed.
  struct Found {
    Tick now = 0;  // 0: none was found
    BlockRef block = 0;
    float worth = 0;
  };

  // What the blocks of one pool may leave, by tier and by whether their context is active.
  struct Pool {
    std::array<std::array<LeafPool, kActivityCount>, kTierCount> leaves;
    std::array<std::array<Found, kActivityCount>, kTierCount> found{};
  };

  void AdvanceTo(uint64_t now_ms);
  Record& RecordOf(BlockRef block);
  size_t record_count_max() const { return chunks_.size() * kChunkRecords; }
  bool IsCandidate(const Record& record, TierIdx tier) const {
    return record.place[tier] != kNoPlace;
  }
  Pool& PoolOf(const Record& record);
  LeafPool& LeavesOf(TierIdx tier, const Record& record) {
    return PoolOf(record).leaves[tier][record.in_active_context];
  }
  void Add(TierIdx tier, BlockRef block);
  void Remove(TierIdx tier, BlockRef block);
  void Reclassify(BlockRef block, NextStep next, uint64_t returns_in_ms);
  void ResolvePromise(const Record& record);
  bool Lapsed(const Record& record) const;
  // Requires: the client said when it comes back.
  float PromisedWorth(const Record& record);
  // Null: the pool has no candidate there.
  const Found* LeastWorth(TierIdx tier, PoolIdx pool, size_t activity);

  HazardModel model_;
  GhostTable ghosts_;
  std::vector<std::unique_ptr<Chunk>> chunks_;  // records by BlockRef; growing moves none
  std::vector<std::unique_ptr<Pool>> pools_;    // null: it had no candidate yet
  uint64_t random_;

  bool started_ = false;
  uint64_t last_ms_ = 0;
  uint64_t elapsed_ms_ = 0;
  Tick now_ = 1;  // 0 means never
  // Promises to come back that were kept, of those that are decided, both decaying.
  float kept_count_;
  float promise_count_;
};

}  // namespace kvtier::policy
