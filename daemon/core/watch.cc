// SPDX-License-Identifier: Apache-2.0
//
// What watchers are told: where the blocks of their tenant can be read, first as a whole, then
// change by change. Nothing here waits for a watcher.
#include <algorithm>

#include "daemon/core/core_impl.h"
#include "proto/base/check.h"

namespace kvtier::core {

EventRing* StoreCore::Impl::RingOf(AccountIdx account) const {
  return account < rings_.size() ? rings_[account].get() : nullptr;
}

void StoreCore::Impl::TellWatchers(EntryIdx idx, uint8_t residency) {
  Entry& entry = At(idx);
  const uint32_t changed = entry.told_mask ^ residency;
  entry.told_mask = residency & kAllTiersMask;
  EventRing* const ring = RingOf(AccountOf(entry));
  if (ring == nullptr) return;
  RingEvent event{.key = entry.key, .parent = {}, .ns = entry.ns};
  if (entry.parent != kNoEntry) {
    event.parent = At(entry.parent).key;
    event.has_parent = true;
  }
  // What is new first, so that a block that moves is always somewhere.
  for (const bool is_stored : {true, false}) {
    for (size_t tier = 0; tier < kTierCount; ++tier) {
      const uint32_t bit = 1U << tier;
      if ((changed & bit) == 0 || ((residency & bit) != 0) != is_stored) continue;
      event.tier = static_cast<TierId>(tier);
      event.is_stored = is_stored;
      ring->Push(event);
    }
  }
}

BlockEvent StoreCore::Impl::Expand(const RingEvent& event) const {
  const NamespaceSpec& spec = namespaces_[event.ns].spec;
  BlockEvent expanded{.namespace_hash = spec.hash, .key = event.key, .tier = event.tier};
  expanded.block_tokens = spec.block_tokens;
  expanded.is_stored = event.is_stored;
  if (event.has_parent) expanded.parent = event.parent;
  return expanded;
}

absl::StatusOr<uint64_t> StoreCore::Impl::BeginWatch(SessionId session_id) {
  KVT_ASSIGN_OR_RETURN(const Session* session, FindSession(session_id));
  const AccountIdx account = session->owner + 1;
  if (account >= rings_.size()) rings_.resize(account + 1);
  if (rings_[account] == nullptr) {
    rings_[account] = std::make_unique<EventRing>(options_.watch_events_max);
  }
  return rings_[account]->last();
}

absl::StatusOr<WatchedEvents> StoreCore::Impl::ReadEvents(SessionId session_id, uint64_t after,
                                                          size_t count_max) {
  KVT_ASSIGN_OR_RETURN(const Session* session, FindSession(session_id));
  const EventRing* const ring = RingOf(session->owner + 1);
  WatchedEvents events{.sequence = after};
  events.lost = ring == nullptr || !ring->HasAllAfter(after);
  if (events.lost) return events;
  events.sequence = after + std::min<uint64_t>(ring->last() - after, count_max);
  for (uint64_t sequence = after + 1; sequence <= events.sequence; ++sequence) {
    events.events.push_back(Expand(ring->At(sequence)));
  }
  return events;
}

absl::StatusOr<WatchedSnapshot> StoreCore::Impl::ReadSnapshot(SessionId session_id,
                                                              uint64_t position, size_t step) {
  KVT_ASSIGN_OR_RETURN(const Session* session, FindSession(session_id));
  const AccountIdx account = session->owner + 1;
  WatchedSnapshot snapshot;
  const uint64_t count = index_.size();
  const uint64_t end = std::min<uint64_t>(count, position + step);
  for (; position < end; ++position) {
    const Entry& entry = At(static_cast<EntryIdx>(position));
    if (entry.state == EntryState::kUnused || entry.told_mask == 0) continue;
    if (AccountOf(entry) != account) continue;
    RingEvent event{.key = entry.key, .parent = {}, .ns = entry.ns, .is_stored = true};
    if (entry.parent != kNoEntry) {
      event.parent = At(entry.parent).key;
      event.has_parent = true;
    }
    for (size_t tier = 0; tier < kTierCount; ++tier) {
      if ((entry.told_mask >> tier & 1) == 0) continue;
      event.tier = static_cast<TierId>(tier);
      snapshot.events.push_back(Expand(event));
    }
  }
  snapshot.position = position;
  snapshot.done = position >= count;
  return snapshot;
}

}  // namespace kvtier::core
