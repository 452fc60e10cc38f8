// SPDX-License-Identifier: Apache-2.0
//
// Room for tests of the store core: counts slots, and what was put where.
#pragma once

#include <cstdint>
#include <map>

#include "proto/base/check.h"
#include "proto/base/status_util.h"
#include "tiers/tier.h"

namespace kvtier::core {

// Single-thread. Every block takes one slot; a slot that is freed twice or was never given aborts.
class FakeSlots : public SlotSource {
 public:
  explicit FakeSlots(uint64_t slot_count) : slot_count_(slot_count) {}

  absl::StatusOr<ReplicaId> Reserve(uint32_t payload_bytes, OwnerIdx /*owner*/) override {
    if (degraded) return Unavailable("degraded");
    if (is_budget_spent) return WriteBudgetSpent(Exhausted("written enough today"));
    if (contents.size() >= slot_count_) return Exhausted("no slot of %d bytes", payload_bytes);
    const ReplicaId replica = next_++;
    contents[replica] = Key{};
    return replica;
  }

  void Free(ReplicaId replica) override {
    KVT_CHECK(contents.erase(replica) == 1);
    committed.erase(replica);
    ++free_count;
  }

  void OnCommitted(ReplicaId replica, const BlockMeta& meta) override {
    KVT_CHECK(contents.contains(replica));
    committed.insert_or_assign(replica, meta);
  }

  uint64_t FootprintBytes(uint32_t payload_bytes) const override { return payload_bytes; }

  TierUsage Usage() const override {
    return {.capacity_bytes = slot_count_ * kBlockBytes,
            .used_bytes = contents.size() * kBlockBytes};
  }

  static constexpr uint32_t kBlockBytes = 4096;
  // Which block's bytes each reserved slot holds.
  std::map<ReplicaId, Key> contents;
  std::map<ReplicaId, BlockMeta> committed;
  bool degraded = false;
  bool is_budget_spent = false;
  uint64_t free_count = 0;

 private:
  const uint64_t slot_count_;
  ReplicaId next_ = 1;
};

}  // namespace kvtier::core
