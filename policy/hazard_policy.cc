// SPDX-License-Identifier: Apache-2.0
#include "policy/hazard_policy.h"

#include <algorithm>
#include <limits>

#include "proto/base/check.h"

namespace kvtier::policy {
namespace {

// A longer pause between two events counts as this much: what no event fills says nothing about
// blocks, and a clock that jumps must not make all of them equally old.
constexpr uint64_t kStepMsMax = 3'600'000;
constexpr uint32_t kSampleCount = 16;
// Leaves name blocks in 31 bits.
constexpr BlockRef kBlockMask = (1U << 31) - 1;

// Clients err about their return by about this share of the time away.
constexpr float kPromiseError = 0.25F;
// A promise lapses when the client is later than this share of the time away, plus a second.
constexpr float kPromiseLate = 0.5F;
constexpr Tick kPromiseLateTicks = 1000 / kTickMs;
// Reading ahead of a return takes a moment too: nothing is worth more than one use in 100 ms.
constexpr float kPromiseTicksMin = 6;
// Promises kept of those made, before any is decided; and after how many the past is halved.
constexpr float kKeptPrior = 18;
constexpr float kPromisePrior = 20;
constexpr float kPromiseHalving = 20'000;

// Multiplies what the model says of a block that its chain came back without.
constexpr float kSupersededShare = 1e-6F;

uint64_t NextRandom(uint64_t* state) {  // splitmix64
  *state += 0x9E3779B97F4A7C15;
  uint64_t mixed = *state;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
  return mixed ^ (mixed >> 31);
}

}  // namespace

HazardPolicy::HazardPolicy(const HazardOptions& options)
    : model_(options.model),
      ghosts_(options.ghost_count_max),
      random_(options.seed),
      kept_count_(kKeptPrior),
      promise_count_(kPromisePrior) {}

void HazardPolicy::AdvanceTo(uint64_t now_ms) {
  if (started_ && now_ms > last_ms_) elapsed_ms_ += std::min(now_ms - last_ms_, kStepMsMax);
  started_ = true;
  last_ms_ = now_ms;
  const auto now = static_cast<Tick>(1 + elapsed_ms_ / kTickMs);
  if (now <= now_) return;
  now_ = now;
  model_.Advance(now_);
}

HazardPolicy::Record& HazardPolicy::RecordOf(BlockRef block) {
  KVT_CHECK(block <= kBlockMask);
  const size_t chunk = block / kChunkRecords;
  while (chunk >= chunks_.size()) chunks_.push_back(std::make_unique<Chunk>());
  return (*chunks_[chunk])[block % kChunkRecords];
}

HazardPolicy::Pool& HazardPolicy::PoolOf(const Record& record) {
  while (record.pool >= pools_.size()) pools_.emplace_back();
  std::unique_ptr<Pool>& pool = pools_[record.pool];
  if (pool == nullptr) pool = std::make_unique<Pool>();
  return *pool;
}

void HazardPolicy::Add(TierIdx tier, BlockRef block) {
  Record& record = RecordOf(block);
  LeavesOf(tier, record)
      .Insert(
          static_cast<ClassIdx>(record.class_idx),
          {.last_use = record.last_use,
           .block = block & kBlockMask,
           .announced = record.returns_at != 0 ? 1U : 0U},
          [this, tier](BlockRef moved, uint32_t place) { RecordOf(moved).place[tier] = place; });
  // It may be worth less than what was found before.
  PoolOf(record).found[tier] = {};
}

void HazardPolicy::Remove(TierIdx tier, BlockRef block) {
  Record& record = RecordOf(block);
  LeavesOf(tier, record)
      .Erase(static_cast<ClassIdx>(record.class_idx), record.place[tier],
             [this, tier](BlockRef moved, uint32_t place) { RecordOf(moved).place[tier] = place; });
  record.place[tier] = kNoPlace;
  for (Found& found : PoolOf(record).found[tier]) {
    if (found.block == block) found.now = 0;
  }
}

void HazardPolicy::ResolvePromise(const Record& record) {
  if (record.returns_at == 0) return;
  if (promise_count_ > kPromiseHalving) {
    promise_count_ /= 2;
    kept_count_ /= 2;
  }
  ++promise_count_;
  if (!Lapsed(record)) ++kept_count_;
}

// Sets class and promise of a block that is used now or was used last at record.last_use, and lets
// it begin to age in that class.
void HazardPolicy::Reclassify(BlockRef block, NextStep next, uint64_t returns_in_ms) {
  Record& record = RecordOf(block);
  std::array<bool, kTierCount> candidate{};
  for (TierIdx tier = 0; tier < kTierCount; ++tier) {
    candidate[tier] = IsCandidate(record, tier);
    if (candidate[tier]) Remove(tier, block);
  }
  record.last_use = now_;
  const ClassIdx class_idx =
      ClassOf(next, record.use_count, static_cast<uint8_t>(record.gap_class));
  record.class_idx = class_idx & 511U;
  record.cohort = model_.Enter(class_idx, now_);
  const uint64_t returns_ticks = std::min<uint64_t>(returns_in_ms / kTickMs, UINT32_MAX / 4);
  record.returns_at = returns_in_ms == 0 ? 0 : static_cast<Tick>(now_ + 1 + returns_ticks);
  for (TierIdx tier = 0; tier < kTierCount; ++tier) {
    if (candidate[tier]) Add(tier, block);
  }
}

void HazardPolicy::Use(const BlockUse& use) {
  AdvanceTo(use.now_ms);
  Record& record = RecordOf(use.block);
  if (record.use_count == 0) {
    if (const std::optional<Ghost> ghost = ghosts_.Take(use.key)) {
      record.last_use = ghost->last_use;
      record.cohort = ghost->cohort;
      record.class_idx = ghost->class_idx & 511U;
      record.use_count = ghost->use_count;
      record.gap_class = ghost->gap_class & 31U;
    }
  }
  if (record.use_count > 0) {
    model_.Reuse(static_cast<ClassIdx>(record.class_idx), record.cohort, record.last_use, now_);
    record.gap_class = GapClass(now_ - record.last_use) & 31U;
    ResolvePromise(record);
  }
  if (record.use_count < std::numeric_limits<uint8_t>::max()) ++record.use_count;
  record.parent = use.parent;
  Reclassify(use.block, use.next, use.returns_in_ms);
}

void HazardPolicy::Expect(BlockRef block, NextStep next, uint64_t now_ms, uint64_t returns_in_ms) {
  AdvanceTo(now_ms);
  Record& record = RecordOf(block);
  if (record.use_count == 0) return;
  if (Lapsed(record)) ++promise_count_;
  model_.Censor(static_cast<ClassIdx>(record.class_idx), record.cohort, record.last_use);
  Reclassify(block, next, returns_in_ms);
}

void HazardPolicy::Forget(BlockRef block, uint64_t key) {
  Record& record = RecordOf(block);
  for (TierIdx tier = 0; tier < kTierCount; ++tier) KVT_CHECK(!IsCandidate(record, tier));
  if (record.use_count == 0) return;
  if (Lapsed(record)) ++promise_count_;
  const Ghost ghost = {.last_use = record.last_use,
                       .cohort = record.cohort,
                       .class_idx = static_cast<ClassIdx>(record.class_idx),
                       .use_count = static_cast<uint8_t>(record.use_count),
                       .gap_class = static_cast<uint8_t>(record.gap_class)};
  if (const std::optional<Ghost> displaced = ghosts_.Put(key, ghost)) {
    model_.Censor(displaced->class_idx, displaced->cohort, displaced->last_use);
  }
  record = Record();
}

void HazardPolicy::Upsert(TierIdx tier, BlockRef block, const BlockFacts& facts) {
  KVT_CHECK(tier < kTierCount);
  Record& record = RecordOf(block);
  if (record.use_count == 0) {  // it was here before this policy
    record.use_count = 1;
    Reclassify(block, NextStep::kUnknown, 0);
  }
  KVT_CHECK(facts.pool < kPoolCountMax);
  const uint32_t is_active = facts.in_active_context ? 1 : 0;
  if (record.in_active_context != is_active || record.pool != facts.pool) {
    std::array<bool, kTierCount> candidate{};
    for (TierIdx i = 0; i < kTierCount; ++i) {
      candidate[i] = IsCandidate(record, i);
      if (candidate[i]) Remove(i, block);
    }
    record.in_active_context = is_active & 1U;
    record.pool = facts.pool & 511U;
    for (TierIdx i = 0; i < kTierCount; ++i) {
      if (candidate[i]) Add(i, block);
    }
  }
  if (!IsCandidate(record, tier)) Add(tier, block);
}

void HazardPolicy::Erase(TierIdx tier, BlockRef block) {
  KVT_CHECK(tier < kTierCount);
  if (block >= record_count_max() || !IsCandidate(RecordOf(block), tier)) return;
  Remove(tier, block);
}

bool HazardPolicy::Lapsed(const Record& record) const {
  if (record.returns_at == 0) return false;
  const auto away = static_cast<float>(record.returns_at - record.last_use);
  const auto late = static_cast<float>(now_) - static_cast<float>(record.returns_at);
  return late > kPromiseLate * away + static_cast<float>(kPromiseLateTicks);
}

float HazardPolicy::PromisedWorth(const Record& record) {
  const float learned =
      model_.Worth(static_cast<ClassIdx>(record.class_idx), now_ - record.last_use);
  // What was promised came about for the chain, but without this block.
  const bool superseded =
      record.parent != kNoParent && RecordOf(record.parent).last_use > record.last_use;
  if (superseded) return kSupersededShare * learned;
  if (Lapsed(record)) return learned;
  const auto away = static_cast<float>(record.returns_at - record.last_use);
  const auto remaining = static_cast<float>(record.returns_at) - static_cast<float>(now_);
  const float held = std::max(0.0F, remaining) + kPromiseError * away + kPromiseTicksMin;
  return kept_count_ / promise_count_ / held;
}

const HazardPolicy::Found* HazardPolicy::LeastWorth(TierIdx tier, PoolIdx pool, size_t activity) {
  KVT_CHECK(tier < kTierCount);
  if (pool >= pools_.size() || pools_[pool] == nullptr) return nullptr;
  const LeafPool& leaves = pools_[pool]->leaves[tier][activity];
  if (leaves.leaf_count() == 0) return nullptr;
  Found& found = pools_[pool]->found[tier][activity];
  // Worth changes with age.
  if (found.now == now_) return &found;
  model_.Refresh();
  float least = std::numeric_limits<float>::infinity();
  Leaf victim;
  const auto offset = static_cast<uint32_t>(NextRandom(&random_) >> 32);
  leaves.VisitOldestAndSample(kSampleCount, offset, [&](ClassIdx class_idx, Leaf leaf) {
    const float worth = leaf.announced != 0 ? PromisedWorth(RecordOf(leaf.block))
                                            : model_.Worth(class_idx, now_ - leaf.last_use);
    if (worth < least || (worth == least && leaf < victim)) {
      least = worth;
      victim = leaf;
    }
  });
  found = {.now = now_, .block = victim.block, .worth = least};
  return &found;
}

std::optional<BlockRef> HazardPolicy::Victim(TierIdx tier, PoolIdx pool) {
  const Found* found = LeastWorth(tier, pool, 0);
  if (found == nullptr) found = LeastWorth(tier, pool, 1);
  return found == nullptr ? std::nullopt : std::optional(found->block);
}

std::optional<BlockRef> HazardPolicy::IdleVictim(TierIdx tier, PoolIdx pool) {
  const Found* const found = LeastWorth(tier, pool, 0);
  return found == nullptr ? std::nullopt : std::optional(found->block);
}

bool HazardPolicy::BeatsIdleVictim(TierIdx tier, PoolIdx pool, BlockRef block) {
  const Found* const found = LeastWorth(tier, pool, 0);
  if (found == nullptr) return false;
  const Record& record = RecordOf(block);
  const float worth = record.returns_at != 0 ? PromisedWorth(record)
                                             : model_.Worth(static_cast<ClassIdx>(record.class_idx),
                                                            now_ - record.last_use);
  return worth > found->worth;
}

uint64_t HazardPolicy::memory_bytes() const {
  uint64_t bytes = record_count_max() * sizeof(Record) + ghosts_.memory_bytes();
  for (const std::unique_ptr<Pool>& pool : pools_) {
    if (pool == nullptr) continue;
    bytes += sizeof(Pool);
    for (const auto& tier : pool->leaves) {
      for (const LeafPool& leaves : tier) bytes += leaves.memory_bytes();
    }
  }
  return bytes + model_.memory_bytes();
}

}  // namespace kvtier::policy
