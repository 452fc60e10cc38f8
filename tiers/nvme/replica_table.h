// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "proto/base/chunked_vector.h"
#include "tiers/nvme/namespace_table.h"
#include "tiers/nvme/record.h"
#include "tiers/nvme/segment_table.h"
#include "tiers/tier.h"

namespace kvtier::nvme {

enum class ReplicaState : uint8_t { kReserved, kWriting, kLive, kLost };

// What the tier holds of a block in memory: one cache line. The key is here although the store core
// has it, too: a block is freed by its replica alone, and RocksDB forgets it by its key.
struct alignas(64) Replica {
  // Since the write began: what it is. `namespace_idx` is of ReplicaTable::NamespaceOf.
  Key key = {};
  uint32_t namespace_idx = UINT32_MAX;
  uint32_t payload_bytes = 0;
  // kLive: where it lies. Changed by the index thread only. The generation has the offset.
  uint64_t generation = 0;
  uint32_t segment_idx = 0;
  // The table's own: the place in the list of its segment, or of the unused ones by `next`.
  uint32_t next = 0;
  uint32_t previous = 0;
  // Counts who was here, so that no id is given out twice.
  uint32_t turn : 24 = 1;
  ReplicaState state : 2 = ReplicaState::kReserved;
  // Given back; stays here until the index has forgotten it durably.
  bool is_freed : 1 = false;
  bool is_moving : 1 = false;

  // Without the nonce, which only the write of a record needs.
  Location at() const {
    return {
        .segment_idx = segment_idx, .offset_bytes = OffsetOf(generation), .generation = generation};
  }
};
static_assert(sizeof(Replica) == 64);

// The tier's replicas by id, and the live ones of each segment in the order in which they came.
// Pointers to a replica are good until it is removed. Memory: 64 bytes for each of the most
// replicas there ever were at once. Thread-compatible.
class ReplicaTable {
 public:
  // An id is the replica's place below the number of its turn there.
  static constexpr uint32_t kTurnMax = (1U << 24) - 1;

  // A place is not used again after its last turn; fewer are for tests.
  explicit ReplicaTable(uint32_t turn_max = kTurnMax) : turn_max_(turn_max) {}

  // A reserved one. The id is not 0, below 2^56, and never given out again.
  ReplicaId Add(uint32_t payload_bytes);
  // Null when it was removed.
  Replica* Find(ReplicaId id);
  const Replica* Find(ReplicaId id) const;
  // Requires: not removed.
  Replica& At(ReplicaId id);
  void Remove(ReplicaId id);
  size_t replica_count() const { return replica_count_; }

  // Says which block it is; the state stays.
  void Name(Replica* replica, const NamespaceHash& namespace_hash, const Key& key);
  // Requires: named.
  const NamespaceHash& NamespaceOf(const Replica& replica) const {
    return namespaces_.HashOf(replica.namespace_idx);
  }

  // It is live and lies at `at`, the last of that segment; no more where it lay before.
  // Requires: named; offset and generation agree.
  void Settle(ReplicaId id, const Location& at);
  // It was live and is lost: no segment's any more.
  void Lose(ReplicaId id);

  // The live ones, freed ones among them.
  std::vector<ReplicaId> MembersOf(uint32_t segment_idx) const;
  // Segments with members, ascending.
  std::vector<uint32_t> SegmentsWithMembers() const;

  uint64_t memory_bytes() const {
    return replicas_.memory_bytes() + first_of_.capacity() * sizeof(first_of_[0]);
  }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;

  ReplicaId IdOf(uint32_t idx) const { return ReplicaId{replicas_[idx].turn} << 32 | idx; }
  uint32_t IdxOf(ReplicaId id) const;
  void Link(uint32_t idx, uint32_t segment_idx);
  void Unlink(uint32_t idx);

  const uint32_t turn_max_;
  ChunkedVector<Replica> replicas_;
  uint32_t first_unused_ = kNone;
  size_t replica_count_ = 0;
  // By segment_idx; the lists are circular.
  std::vector<uint32_t> first_of_;
  NamespaceTable namespaces_;
};

}  // namespace kvtier::nvme
