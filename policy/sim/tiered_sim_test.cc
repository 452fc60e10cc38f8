// SPDX-License-Identifier: Apache-2.0
#include "policy/sim/tiered_sim.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <tuple>
#include <vector>

namespace kvtier::sim {
namespace {

using testing::ElementsAre;

constexpr policy::Watermarks kFull{.high = 1.0, .low = 1.0};

TieredSimOptions SizesOf(uint64_t hbm, uint64_t host, uint64_t nvme) {
  TieredSimOptions options;
  options.room_ahead_block_count = 1;
  options.tiers = {TierModel{hbm, 1, kFull}, TierModel{host, 1, kFull}, TierModel{nvme, 1, kFull}};
  return options;
}

// A straight chain of blocks.
std::vector<TraceBlock> Chain(size_t count) {
  std::vector<TraceBlock> blocks(count);
  for (uint32_t i = 0; i < count; ++i) {
    blocks[i] = {.hash_id = i, .parent = i == 0 ? kNoBlock : i - 1, .depth = i};
  }
  return blocks;
}

std::vector<BlockRef> Refs(BlockRef first, BlockRef end) {
  std::vector<BlockRef> refs;
  for (BlockRef block = first; block < end; ++block) refs.push_back(block);
  return refs;
}

class TieredSimTest : public testing::Test {
 protected:
  void Make(const TieredSimOptions& options, size_t block_count = 12) {
    blocks_ = Chain(block_count);
    sim_ = std::make_unique<TieredSim>(options, blocks_, 2, policy::NewLruPolicy());
  }
  // Lets a second chain begin at `first`.
  void SplitAt(BlockRef first) {
    blocks_[first].parent = kNoBlock;
    for (BlockRef block = first; block < blocks_.size(); ++block) {
      blocks_[block].depth = block - first;
    }
  }
  std::vector<TierIdx> Where(BlockRef first, BlockRef end) const {
    return sim_->Lookup(Refs(first, end));
  }

  std::vector<TraceBlock> blocks_;
  std::unique_ptr<TieredSim> sim_;
};

TEST_F(TieredSimTest, FullHbmDemotesTheLeastRecentlyUsedSuffixFirst) {
  Make(SizesOf(4, 4, 100), 8);
  SplitAt(4);
  EXPECT_EQ(sim_->Commit(Refs(0, 4), kHbm, 0), 4U);
  EXPECT_EQ(sim_->Commit(Refs(4, 6), kHbm, 0), 2U);
  EXPECT_THAT(Where(0, 4), ElementsAre(kHbm, kHbm, kHost, kHost));
  EXPECT_THAT(Where(4, 6), ElementsAre(kHbm, kHbm));
}

TEST_F(TieredSimTest, ChainLongerThanHbmContinuesOnHost) {
  Make(SizesOf(2, 4, 100));
  EXPECT_EQ(sim_->Commit(Refs(0, 5), kHbm, 0), 5U);
  EXPECT_THAT(Where(0, 5), ElementsAre(kHbm, kHbm, kHost, kHost, kHost));
}

// Leaves on hbm, all their prefixes on host: neither tier alone has a way out.
TEST_F(TieredSimTest, HbmBypassesAHostFullOfPrefixes) {
  Make(SizesOf(2, 2, 100), 6);
  SplitAt(4);
  ASSERT_EQ(sim_->Commit(Refs(0, 2), kHost, 0), 2U);
  ASSERT_EQ(sim_->Commit(Refs(2, 4), kHbm, 0), 2U);
  EXPECT_EQ(sim_->Commit(Refs(4, 6), kHbm, 0), 2U);
  EXPECT_THAT(Where(0, 4), ElementsAre(kHost, kHost, kNvme, kNvme));
}

TEST_F(TieredSimTest, ChainLongerThanMemoryIsCutShort) {
  Make(SizesOf(2, 2, 100));
  EXPECT_EQ(sim_->Commit(Refs(0, 6), kHbm, 0), 4U);
}

TEST_F(TieredSimTest, HostWritesItsVictimsToNvmeOnce) {
  Make(SizesOf(4, 4, 100), 8);
  SplitAt(4);
  ASSERT_EQ(sim_->Commit(Refs(0, 4), kHost, 0), 4U);
  ASSERT_EQ(sim_->Commit(Refs(4, 8), kHost, 0), 4U);
  EXPECT_THAT(Where(0, 4), ElementsAre(kNvme, kNvme, kNvme, kNvme));
  sim_->Release(sim_->Acquire(Refs(0, 4), 0));
  EXPECT_THAT(Where(0, 4), ElementsAre(kHbm, kHbm, kHbm, kHbm));
  EXPECT_EQ(sim_->used_bytes(kNvme), 4U);
}

TEST_F(TieredSimTest, PauseMovesOnlyWhatNoOtherActiveContextHolds) {
  Make(SizesOf(8, 8, 0));
  ASSERT_EQ(sim_->Commit(Refs(0, 4), kHbm, 0), 4U);
  sim_->SetChain(0, Refs(0, 4));
  sim_->SetChain(1, Refs(0, 2));
  sim_->Pause(0);
  EXPECT_THAT(Where(0, 4), ElementsAre(kHbm, kHbm, kHost, kHost));
  sim_->Pause(1);
  EXPECT_THAT(Where(0, 4), ElementsAre(kHost, kHost, kHost, kHost));
  sim_->Resume(0);
  EXPECT_THAT(Where(0, 4), ElementsAre(kHbm, kHbm, kHbm, kHbm));
}

TEST_F(TieredSimTest, ResumeDoesNotPushOutActiveBlocks) {
  Make(SizesOf(4, 8, 0), 8);
  SplitAt(4);
  ASSERT_EQ(sim_->Commit(Refs(0, 4), kHbm, 0), 4U);
  sim_->SetChain(0, Refs(0, 4));
  sim_->Pause(0);
  ASSERT_EQ(sim_->Commit(Refs(4, 7), kHbm, 0), 3U);
  sim_->SetChain(1, Refs(4, 7));
  sim_->Resume(0);
  EXPECT_THAT(Where(0, 4), ElementsAre(kHbm, kHost, kHost, kHost));
}

TEST_F(TieredSimTest, LeasedBlocksStayUntilReleased) {
  Make(SizesOf(2, 2, 100), 6);
  SplitAt(2);
  ASSERT_EQ(sim_->Commit(Refs(0, 2), kHbm, 0), 2U);
  const SimLease lease = sim_->Acquire(Refs(0, 2), 0);
  EXPECT_EQ(lease.ok_prefix_count, 2U);
  EXPECT_EQ(sim_->Commit(Refs(2, 6), kHbm, 0), 2U);
  EXPECT_THAT(Where(2, 4), ElementsAre(kHost, kHost));
  EXPECT_THAT(Where(0, 2), ElementsAre(kHbm, kHbm));
  sim_->Release(lease);
  EXPECT_EQ(sim_->Commit(Refs(2, 6), kHbm, 0), 4U);
}

TEST_F(TieredSimTest, SeenAgainAdmissionForgetsOneShotBlocks) {
  TieredSimOptions options = SizesOf(1, 4, 100);
  options.nvme_admission = policy::Admission::kSeenAgain;
  Make(options, 8);
  SplitAt(4);
  ASSERT_EQ(sim_->Commit(Refs(0, 4), kHost, 0), 4U);
  ASSERT_EQ(sim_->Commit(Refs(4, 8), kHost, 0), 4U);
  EXPECT_EQ(sim_->used_bytes(kNvme), 0U);
  EXPECT_TRUE(Where(0, 4).empty());
}

TEST_F(TieredSimTest, WatermarksLeaveRoom) {
  TieredSimOptions options = SizesOf(10, 10, 0);
  options.tiers[kHbm].marks = {.high = 0.8, .low = 0.5};
  Make(options);
  ASSERT_EQ(sim_->Commit(Refs(0, 8), kHbm, 0), 8U);
  EXPECT_EQ(sim_->used_bytes(kHbm), 8U);
  ASSERT_EQ(sim_->Commit(Refs(8, 9), kHbm, 0), 1U);
  EXPECT_EQ(sim_->used_bytes(kHbm), 5U);
  EXPECT_EQ(sim_->used_bytes(kHost), 4U);
}

// The same rules by looking at every block each time: no policy object, no counts, no sets.
class NaiveTiers {
 public:
  NaiveTiers(std::array<size_t, 3> sizes, std::span<const TraceBlock> blocks)
      : sizes_(sizes), blocks_(blocks), state_(blocks.size()) {}

  bool Holds(TierIdx tier, BlockRef block) const { return state_[block].held[tier]; }
  bool Stored(BlockRef block) const {
    return std::ranges::any_of(state_[block].held, [](bool held) { return held; });
  }

  void Request(std::span<const BlockRef> chain) {
    size_t found = 0;
    while (found < chain.size() && Stored(chain[found])) ++found;
    ++seq_;
    for (size_t i = 0; i < found; ++i) {
      State& state = state_[chain[i]];
      const bool in_memory = state.held[kHbm] || state.held[kHost];
      state.leased = in_memory;
      state.busy = !in_memory;
      state.seq = seq_;
    }
    for (size_t i = 0; i < found; ++i) {
      State& state = state_[chain[i]];
      if (!state.busy) continue;
      // No context is active here: every block is idle.
      const bool to_hbm = Room(kHbm);
      if (to_hbm || Room(kHost)) {
        state.held[to_hbm ? kHbm : kHost] = true;
        state.leased = true;
      }
      state.busy = false;
    }
    for (size_t i = found; i < chain.size(); ++i) {
      if (Stored(chain[i])) continue;  // it outlived its parent
      const bool to_hbm = Room(kHbm);
      if (!to_hbm && !Room(kHost)) break;
      if (i > 0 && !Stored(chain[i - 1])) break;
      state_[chain[i]].held[to_hbm ? kHbm : kHost] = true;
      state_[chain[i]].seq = ++seq_;
    }
    for (State& state : state_) state.leased = false;
  }

 private:
  struct State {
    std::array<bool, 3> held{};
    bool leased = false;
    bool busy = false;
    uint64_t seq = 0;
  };

  size_t Used(TierIdx tier) const {
    return static_cast<size_t>(
        std::ranges::count_if(state_, [tier](const State& state) { return state.held[tier]; }));
  }

  bool HasNearChild(TierIdx tier, BlockRef block) const {
    for (BlockRef child = 0; child < blocks_.size(); ++child) {
      if (blocks_[child].parent != block) continue;
      for (TierIdx near = 0; near <= tier; ++near) {
        if (Holds(near, child)) return true;
      }
    }
    return false;
  }

  std::optional<BlockRef> Victim(TierIdx tier) const {
    std::optional<BlockRef> best;
    const auto rank = [this](BlockRef block) {
      return std::tuple(state_[block].seq, UINT32_MAX - blocks_[block].depth, block);
    };
    for (BlockRef block = 0; block < blocks_.size(); ++block) {
      const State& state = state_[block];
      const bool pinned = state.busy || (tier != kNvme && state.leased);
      if (!Holds(tier, block) || pinned || HasNearChild(tier, block)) continue;
      if (!best || rank(block) < rank(*best)) best = block;
    }
    return best;
  }

  bool Room(TierIdx tier) {
    while (Used(tier) >= sizes_[tier]) {
      const std::optional<BlockRef> victim = Victim(tier);
      if (!victim) return false;
      State& state = state_[*victim];
      state.busy = true;
      if (tier == kHbm && Room(kHost)) {
        state.held[kHost] = true;
      } else if (tier != kNvme && !state.held[kNvme] && Room(kNvme)) {
        state.held[kNvme] = true;
      }
      state.held[tier] = false;
      state.busy = false;
    }
    return true;
  }

  std::array<size_t, 3> sizes_;
  std::span<const TraceBlock> blocks_;
  std::vector<State> state_;
  uint64_t seq_ = 0;
};

// A random forest, and requests for random root-to-block paths.
struct RandomWorkload {
  std::vector<TraceBlock> blocks;
  std::vector<std::vector<BlockRef>> chains;
};

RandomWorkload MakeWorkload(std::mt19937* random) {
  RandomWorkload workload;
  const auto pick = [random](uint32_t below) { return static_cast<uint32_t>((*random)() % below); };
  for (BlockRef block = 0; block < 40; ++block) {
    const bool root = block < 3 || pick(10) == 0;
    const BlockRef parent = root ? kNoBlock : block - 1 - pick(std::min<uint32_t>(block, 4));
    const uint32_t depth = root ? 0 : workload.blocks[parent].depth + 1;
    workload.blocks.push_back({.hash_id = block, .parent = parent, .depth = depth});
  }
  for (int i = 0; i < 120; ++i) {
    std::vector<BlockRef> chain;
    for (BlockRef block = pick(40); block != kNoBlock; block = workload.blocks[block].parent) {
      chain.insert(chain.begin(), block);
    }
    workload.chains.push_back(chain);
  }
  return workload;
}

TEST(TieredSimModelTest, AgreesWithTheNaiveModelOnRandomWorkloads) {
  for (uint32_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const RandomWorkload workload = MakeWorkload(&random);
    const std::array<size_t, 3> sizes = {2 + random() % 10, random() % 12, random() % 20};
    NaiveTiers naive(sizes, workload.blocks);
    TieredSim sim(SizesOf(sizes[0], sizes[1], sizes[2]), workload.blocks, 0,
                  policy::NewLruPolicy());
    for (const std::vector<BlockRef>& refs : workload.chains) {
      const std::span<const BlockRef> chain(refs);
      const size_t found = sim.Lookup(chain).size();
      const SimLease lease = sim.Acquire(chain.first(found), 0);
      for (size_t i = found; i < chain.size(); ++i) {
        if (sim.Commit(chain.subspan(i, 1), kHbm, 0) == 0) break;
      }
      sim.Release(lease);
      naive.Request(chain);
      for (BlockRef block = 0; block < workload.blocks.size(); ++block) {
        for (TierIdx tier = 0; tier < policy::kTierCount; ++tier) {
          ASSERT_EQ(sim.Holds(tier, block), naive.Holds(tier, block))
              << "block " << block << " tier " << tier;
        }
      }
    }
  }
}

TEST(TieredSimModelTest, KeepsItsPromisesWithContexts) {
  for (uint32_t seed = 1; seed <= 50; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const RandomWorkload workload = MakeWorkload(&random);
    const std::array<size_t, 3> sizes = {3 + random() % 10, 1 + random() % 12, random() % 20};
    TieredSim sim(SizesOf(sizes[0], sizes[1], sizes[2]), workload.blocks, 4,
                  policy::NewLruPolicy());
    for (const std::vector<BlockRef>& refs : workload.chains) {
      const auto context_idx = static_cast<uint32_t>(random() % 4);
      switch (random() % 4) {
        case 0:
          sim.Pause(context_idx);
          break;
        case 1:
          sim.Resume(context_idx);
          break;
        default: {
          const size_t found = sim.Lookup(refs).size();
          const SimLease lease = sim.Acquire(std::span(refs).first(found), 0);
          const size_t stored = sim.Commit(std::span(refs).subspan(found), kHbm, 0);
          sim.SetChain(context_idx, std::span(refs).first(found + stored));
          sim.Release(lease);
        }
      }
      std::array<size_t, 3> used{};
      for (BlockRef block = 0; block < workload.blocks.size(); ++block) {
        for (TierIdx tier = 0; tier < policy::kTierCount; ++tier) {
          used[tier] += sim.Holds(tier, block) ? 1 : 0;
        }
        EXPECT_FALSE(sim.Holds(kHbm, block) && sim.Holds(kHost, block));
      }
      for (TierIdx tier = 0; tier < policy::kTierCount; ++tier) {
        ASSERT_LE(used[tier], sizes[tier]);
        ASSERT_EQ(used[tier], sim.used_bytes(tier));
      }
    }
  }
}

}  // namespace
}  // namespace kvtier::sim
