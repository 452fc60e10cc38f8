// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/replica_table.h"

#include "proto/base/check.h"

namespace kvtier::nvme {

ReplicaId ReplicaTable::Add(uint32_t payload_bytes) {
  uint32_t idx = first_unused_;
  if (idx == kNone) {
    KVT_CHECK(replicas_.size() < kNone);
    idx = static_cast<uint32_t>(replicas_.size());
    replicas_.emplace_back();
  } else {
    first_unused_ = replicas_[idx].next;
  }
  replicas_[idx].payload_bytes = payload_bytes;
  ++replica_count_;
  return IdOf(idx);
}

uint32_t ReplicaTable::IdxOf(ReplicaId id) const {
  const auto idx = static_cast<uint32_t>(id);
  const ReplicaId turn = id >> 32;
  // An unused place has a turn that was not given out yet, or the 0 of no id.
  const bool is_there = turn != 0 && idx < replicas_.size() && replicas_[idx].turn == turn;
  return is_there ? idx : kNone;
}

Replica* ReplicaTable::Find(ReplicaId id) {
  const uint32_t idx = IdxOf(id);
  return idx == kNone ? nullptr : &replicas_[idx];
}

const Replica* ReplicaTable::Find(ReplicaId id) const {
  const uint32_t idx = IdxOf(id);
  return idx == kNone ? nullptr : &replicas_[idx];
}

Replica& ReplicaTable::At(ReplicaId id) {
  Replica* const replica = Find(id);
  KVT_CHECK(replica != nullptr);
  return *replica;
}

void ReplicaTable::Remove(ReplicaId id) {
  Replica& removed = At(id);
  const auto idx = static_cast<uint32_t>(id);
  if (removed.state == ReplicaState::kLive) Unlink(idx);
  if (removed.namespace_idx != kNone) namespaces_.Release(removed.namespace_idx);
  const uint32_t turn = removed.turn;
  removed = Replica();
  --replica_count_;
  if (turn == turn_max_) {
    removed.turn = 0;
    return;
  }
  removed.turn = (turn + 1) & kTurnMax;
  removed.next = first_unused_;
  first_unused_ = idx;
}

void ReplicaTable::Name(Replica* replica, const NamespaceHash& namespace_hash, const Key& key) {
  const uint32_t named_before = replica->namespace_idx;
  replica->namespace_idx = namespaces_.Hold(namespace_hash);
  if (named_before != kNone) namespaces_.Release(named_before);
  replica->key = key;
}

void ReplicaTable::Settle(ReplicaId id, const Location& at) {
  Replica& replica = At(id);
  const auto idx = static_cast<uint32_t>(id);
  KVT_CHECK(OffsetOf(at.generation) == at.offset_bytes && replica.namespace_idx != kNone);
  if (replica.state == ReplicaState::kLive) Unlink(idx);
  replica.state = ReplicaState::kLive;
  replica.generation = at.generation;
  Link(idx, at.segment_idx);
}

void ReplicaTable::Lose(ReplicaId id) {
  Replica& replica = At(id);
  KVT_CHECK(replica.state == ReplicaState::kLive);
  Unlink(static_cast<uint32_t>(id));
  replica.state = ReplicaState::kLost;
}

void ReplicaTable::Link(uint32_t idx, uint32_t segment_idx) {
  if (segment_idx >= first_of_.size()) first_of_.resize(segment_idx + 1, kNone);
  Replica& replica = replicas_[idx];
  replica.segment_idx = segment_idx;
  const uint32_t first = first_of_[segment_idx];
  if (first == kNone) {
    first_of_[segment_idx] = idx;
    replica.next = idx;
    replica.previous = idx;
    return;
  }
  const uint32_t last = replicas_[first].previous;
  replica.next = first;
  replica.previous = last;
  replicas_[last].next = idx;
  replicas_[first].previous = idx;
}

void ReplicaTable::Unlink(uint32_t idx) {
  const Replica& replica = replicas_[idx];
  uint32_t& first = first_of_[replica.segment_idx];
  if (replica.next == idx) {
    first = kNone;
    return;
  }
  if (first == idx) first = replica.next;
  replicas_[replica.next].previous = replica.previous;
  replicas_[replica.previous].next = replica.next;
}

std::vector<ReplicaId> ReplicaTable::MembersOf(uint32_t segment_idx) const {
  std::vector<ReplicaId> members;
  if (segment_idx >= first_of_.size() || first_of_[segment_idx] == kNone) return members;
  const uint32_t first = first_of_[segment_idx];
  uint32_t idx = first;
  do {
    members.push_back(IdOf(idx));
    idx = replicas_[idx].next;
  } while (idx != first);
  return members;
}

std::vector<uint32_t> ReplicaTable::SegmentsWithMembers() const {
  std::vector<uint32_t> segments;
  for (uint32_t i = 0; i < first_of_.size(); ++i) {
    if (first_of_[i] != kNone) segments.push_back(i);
  }
  return segments;
}

}  // namespace kvtier::nvme
