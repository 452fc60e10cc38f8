// SPDX-License-Identifier: Apache-2.0
#include "policy/sim/cache_rules.h"

#include <algorithm>
#include <array>
#include <deque>
#include <set>
#include <vector>

#include "proto/base/check.h"

namespace kvtier::sim {
namespace {

constexpr std::array<std::string_view, kCachePolicyCount> kNames = {
    "FIFO", "LRU", "LRU-2", "S3-FIFO", "ARC", "hazard", "MIN"};

// Leaves in the order of leaving. The deepest of equals goes first.
struct LeafKey {
  uint64_t major = 0;
  uint64_t minor = 0;
  uint32_t shallowness = 0;
  BlockRef block = 0;

  friend auto operator<=>(const LeafKey&, const LeafKey&) = default;
};
using LeafOrder = std::set<LeafKey>;

uint32_t ShallownessOf(const Trace& trace, BlockRef block) {
  return UINT32_MAX - trace.blocks[block].depth;
}

// The rules that are one number per block: oldest insertion, last use, last use but one, next use.
class KeyedRule final : public CacheRule {
 public:
  KeyedRule(CachePolicy policy, const Trace& trace)
      : policy_(policy), trace_(trace), keys_(trace.blocks.size()) {
    if (policy == CachePolicy::kMin) FindNextUses();
  }

  void Begin(uint32_t request_idx) override {
    request_idx_ = request_idx;
    position_ = 0;
  }
  void Hit(BlockRef block) override { Touch(block, /*inserted=*/false); }
  void Insert(BlockRef block) override { Touch(block, /*inserted=*/true); }
  void AddLeaf(BlockRef block) override { order_.insert(KeyOf(block)); }
  void RemoveLeaf(BlockRef block) override { order_.erase(KeyOf(block)); }
  BlockRef Victim() override { return order_.begin()->block; }
  void Evict(BlockRef /*block*/) override {}

 private:
  struct Keys {
    uint64_t major = 0;
    uint64_t minor = 0;
  };

  void FindNextUses() {
    std::vector<uint32_t> next_of(trace_.blocks.size(), kNoRequest);
    next_uses_.resize(trace_.requests.size());
    for (size_t i = trace_.requests.size(); i-- > 0;) {
      const std::vector<BlockRef>& chain = trace_.requests[i].chain;
      next_uses_[i].reserve(chain.size());
      for (const BlockRef block : chain) {
        next_uses_[i].push_back(next_of[block]);
        next_of[block] = static_cast<uint32_t>(i);
      }
    }
  }

  void Touch(BlockRef block, bool inserted) {
    Keys& keys = keys_[block];
    const uint64_t seq = uint64_t{request_idx_} + 1;
    switch (policy_) {
      case CachePolicy::kFifo:
        if (inserted) keys.major = seq;
        break;
      case CachePolicy::kLru2:
        // The history outlives the block.
        keys = {.major = keys.minor, .minor = seq};
        break;
      case CachePolicy::kMin:
        keys.major = UINT32_MAX - next_uses_[request_idx_][position_];
        break;
      default:
        keys.major = seq;
    }
    ++position_;
  }

  LeafKey KeyOf(BlockRef block) const {
    const Keys& keys = keys_[block];
    return {keys.major, keys.minor, ShallownessOf(trace_, block), block};
  }

  const CachePolicy policy_;
  const Trace& trace_;
  std::vector<Keys> keys_;
  // kMin: of each request, the next one that uses each block of its chain.
  std::vector<std::vector<uint32_t>> next_uses_;
  uint32_t request_idx_ = 0;
  size_t position_ = 0;
  LeafOrder order_;
};

// S3-FIFO (Yang et al., SOSP 2023): a small queue that most blocks do not outlive, a main queue,
// and the names of those that left the small one. A block moves to the main queue with its second
// hit, not when its turn to leave comes: here that turn never comes while other blocks follow it.
class S3FifoRule final : public CacheRule {
 public:
  S3FifoRule(const Trace& trace, uint64_t capacity_blocks)
      : trace_(trace),
        small_max_(std::max<uint64_t>(1, capacity_blocks / 10)),
        ghost_max_(capacity_blocks - std::min(capacity_blocks, small_max_)),
        states_(trace.blocks.size()) {}

  void Begin(uint32_t /*request_idx*/) override {}
  void Hit(BlockRef block) override {
    State& state = states_[block];
    state.freq = std::min(kFreqMax, state.freq + 1);
    if (state.queue != kSmall || state.freq < kPromoteFreq) return;
    --counts_[kSmall];
    Enter(block, kMain);
  }
  void Insert(BlockRef block) override {
    State& state = states_[block];
    Enter(block, state.ghost ? kMain : kSmall);
    state.ghost = false;
  }
  void AddLeaf(BlockRef block) override { leaves_[states_[block].queue].insert(KeyOf(block)); }
  void RemoveLeaf(BlockRef block) override { leaves_[states_[block].queue].erase(KeyOf(block)); }

  BlockRef Victim() override {
    const bool small_is_full = counts_[kSmall] >= small_max_ || leaves_[kMain].empty();
    if (small_is_full && !leaves_[kSmall].empty()) return leaves_[kSmall].begin()->block;
    while (true) {
      const BlockRef block = leaves_[kMain].begin()->block;
      State& state = states_[block];
      if (state.freq == 0) return block;
      --state.freq;
      RemoveLeaf(block);
      state.seq = ++seq_;
      AddLeaf(block);
    }
  }

  void Evict(BlockRef block) override {
    State& state = states_[block];
    --counts_[state.queue];
    if (state.queue != kSmall) return;
    state.ghost = true;
    state.seq = ++seq_;
    ghosts_.push_back({block, seq_});
    while (ghosts_.size() > ghost_max_) {
      const Ghost ghost = ghosts_.front();
      ghosts_.pop_front();
      if (states_[ghost.block].seq == ghost.seq) states_[ghost.block].ghost = false;
    }
  }

 private:
  enum Queue : uint8_t { kSmall, kMain };
  static constexpr int kFreqMax = 3;
  static constexpr int kPromoteFreq = 2;

  struct State {
    uint64_t seq = 0;
    int freq = 0;
    Queue queue = kSmall;
    bool ghost = false;
  };
  struct Ghost {
    BlockRef block = 0;
    uint64_t seq = 0;
  };

  void Enter(BlockRef block, Queue queue) {
    State& state = states_[block];
    state.queue = queue;
    state.seq = ++seq_;
    state.freq = 0;
    ++counts_[queue];
  }
  LeafKey KeyOf(BlockRef block) const {
    return {states_[block].seq, 0, ShallownessOf(trace_, block), block};
  }

  const Trace& trace_;
  const uint64_t small_max_;
  const uint64_t ghost_max_;
  std::vector<State> states_;
  std::array<uint64_t, 2> counts_{};
  std::array<LeafOrder, 2> leaves_;
  std::deque<Ghost> ghosts_;
  uint64_t seq_ = 0;
};

// ARC (Megiddo and Modha, FAST 2003): blocks used once and blocks used again, each with a list of
// those that left, which say which of the two deserves more room.
class ArcRule final : public CacheRule {
 public:
  ArcRule(const Trace& trace, uint64_t capacity_blocks)
      : trace_(trace), capacity_(capacity_blocks), states_(trace.blocks.size()) {}

  void Begin(uint32_t /*request_idx*/) override { ++seq_; }
  void Hit(BlockRef block) override {
    State& state = states_[block];
    --counts_[state.list];
    Enter(block, kAgain);
  }
  void Insert(BlockRef block) override {
    State& state = states_[block];
    if (!state.ghost) {
      Enter(block, kOnce);
      return;
    }
    const auto once = static_cast<double>(ghosts_[kOnce].size());
    const auto again = static_cast<double>(ghosts_[kAgain].size());
    if (state.list == kOnce) {
      once_target_ =
          std::min(static_cast<double>(capacity_), once_target_ + std::max(1.0, again / once));
    } else {
      once_target_ = std::max(0.0, once_target_ - std::max(1.0, once / again));
    }
    ghosts_[state.list].erase({state.seq, block});
    state.ghost = false;
    Enter(block, kAgain);
  }
  void AddLeaf(BlockRef block) override { leaves_[states_[block].list].insert(KeyOf(block)); }
  void RemoveLeaf(BlockRef block) override { leaves_[states_[block].list].erase(KeyOf(block)); }
  BlockRef Victim() override {
    const bool once_is_large = static_cast<double>(counts_[kOnce]) > once_target_;
    const bool from_once = !leaves_[kOnce].empty() && (once_is_large || leaves_[kAgain].empty());
    return leaves_[from_once ? kOnce : kAgain].begin()->block;
  }
  void Evict(BlockRef block) override {
    State& state = states_[block];
    --counts_[state.list];
    state.ghost = true;
    state.seq = ++evict_seq_;
    ghosts_[state.list].insert({state.seq, block});
    while (ghosts_[kOnce].size() + counts_[kOnce] > capacity_ && DropGhost(kOnce)) {
    }
    while (ghosts_[kOnce].size() + ghosts_[kAgain].size() > capacity_ &&
           (DropGhost(kAgain) || DropGhost(kOnce))) {
    }
  }

 private:
  enum List : uint8_t { kOnce, kAgain };
  struct State {
    uint64_t seq = 0;
    List list = kOnce;
    bool ghost = false;
  };

  void Enter(BlockRef block, List list) {
    states_[block].list = list;
    states_[block].seq = seq_;
    ++counts_[list];
  }
  // Forgets the oldest; false when there is none.
  bool DropGhost(List list) {
    if (ghosts_[list].empty()) return false;
    const auto oldest = ghosts_[list].begin();
    states_[oldest->second].ghost = false;
    ghosts_[list].erase(oldest);
    return true;
  }
  LeafKey KeyOf(BlockRef block) const {
    return {states_[block].seq, 0, ShallownessOf(trace_, block), block};
  }

  const Trace& trace_;
  const uint64_t capacity_;
  std::vector<State> states_;
  std::array<uint64_t, 2> counts_{};
  std::array<LeafOrder, 2> leaves_;
  std::array<std::set<std::pair<uint64_t, BlockRef>>, 2> ghosts_;
  double once_target_ = 0;
  uint64_t seq_ = 0;
  uint64_t evict_seq_ = 0;
};

// The daemon's policy object.
class HazardRule final : public CacheRule {
 public:
  HazardRule(const Trace& trace, const CacheRuleOptions& options)
      : trace_(trace), hints_(options.hints), policy_(options.hazard) {
    KVT_CHECK(hints_.empty() || hints_.size() == trace.requests.size());
  }

  void Begin(uint32_t request_idx) override {
    now_ms_ = trace_.requests[request_idx].arrival_ms;
    hint_ = hints_.empty() ? RequestHint() : hints_[request_idx];
  }
  void Hit(BlockRef block) override { Use(block); }
  void Insert(BlockRef block) override { Use(block); }
  void AddLeaf(BlockRef block) override { policy_.Upsert(kTier, block, {}); }
  void RemoveLeaf(BlockRef block) override { policy_.Erase(kTier, block); }
  BlockRef Victim() override { return *policy_.Victim(kTier, 0); }
  void Evict(BlockRef block) override { policy_.Forget(block, KeyOf(block)); }

 private:
  static constexpr policy::TierIdx kTier = 1;

  static uint64_t KeyOf(BlockRef block) {
    uint64_t key = (uint64_t{block} + 1) * 0x9E3779B97F4A7C15;
    return key ^ (key >> 32);
  }
  void Use(BlockRef block) {
    policy_.Use({.block = block,
                 .parent = trace_.blocks[block].parent,
                 .key = KeyOf(block),
                 .now_ms = now_ms_,
                 .next = hint_.next,
                 .returns_in_ms = hint_.returns_in_ms});
  }

  const Trace& trace_;
  const std::span<const RequestHint> hints_;
  policy::HazardPolicy policy_;
  uint64_t now_ms_ = 0;
  RequestHint hint_;
};

}  // namespace

std::string_view CachePolicyName(CachePolicy policy) { return kNames[static_cast<size_t>(policy)]; }

std::unique_ptr<CacheRule> NewCacheRule(CachePolicy policy, const Trace& trace,
                                        const CacheRuleOptions& options) {
  switch (policy) {
    case CachePolicy::kS3Fifo:
      return std::make_unique<S3FifoRule>(trace, options.capacity_blocks);
    case CachePolicy::kArc:
      return std::make_unique<ArcRule>(trace, options.capacity_blocks);
    case CachePolicy::kHazard:
      return std::make_unique<HazardRule>(trace, options);
    default:
      return std::make_unique<KeyedRule>(policy, trace);
  }
}

}  // namespace kvtier::sim
