// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/entry_index.h"

#include <bit>

#include "absl/hash/hash.h"
#include "proto/base/check.h"

namespace kvtier::core {

uint64_t EntryIndex::HashOf(NamespaceIdx ns, const Key& key) {
  // As a string: the hash of a Digest is eight bytes of it, which a client can choose.
  return absl::HashOf(ns, key.AsBytes());
}

// Buckets up to a power of two, of which the last ones are not there yet: their keys are in the
// bucket of half that power below.
size_t EntryIndex::BucketOf(uint64_t hash) const {
  const size_t mask = std::bit_ceil(buckets_.size()) - 1;
  const size_t bucket = hash & mask;
  return bucket < buckets_.size() ? bucket : hash & (mask >> 1);
}

EntryIdx EntryIndex::FindIn(size_t bucket, NamespaceIdx ns, const Key& key) const {
  EntryIdx idx = buckets_[bucket];
  while (idx != kNoEntry) {
    const Entry& entry = entries_[idx];
    if (entry.key == key && entry.ns == ns) break;
    idx = entry.next;
  }
  return idx;
}

EntryIdx EntryIndex::Find(NamespaceIdx ns, const Key& key) const {
  if (buckets_.empty()) return kNoEntry;
  return FindIn(BucketOf(HashOf(ns, key)), ns, key);
}

EntryIdx EntryIndex::Add(NamespaceIdx ns, const Key& key) {
  KVT_CHECK(ns < kNamespaceCountMax);
  EntryIdx idx = first_unused_;
  if (idx == kNoEntry) {
    KVT_CHECK(entries_.size() < kNoEntry);
    idx = static_cast<EntryIdx>(entries_.size());
    entries_.emplace_back();
  } else {
    first_unused_ = entries_[idx].next;
  }
  if (++entry_count_ > buckets_.size()) AddBucket();
  EntryIdx& first = buckets_[BucketOf(HashOf(ns, key))];
  Entry& entry = entries_[idx];
  entry = Entry();
  entry.key = key;
  entry.ns = ns & (kNamespaceCountMax - 1);
  entry.state = EntryState::kGhost;
  entry.next = first;
  first = idx;
  return idx;
}

void EntryIndex::Remove(EntryIdx idx) {
  Entry& entry = entries_[idx];
  EntryIdx* link = &buckets_[BucketOf(HashOf(entry.ns, entry.key))];
  while (*link != idx) {
    KVT_CHECK(*link != kNoEntry);
    link = &entries_[*link].next;
  }
  *link = entry.next;
  --entry_count_;
  entry = Entry();
  entry.next = first_unused_;
  first_unused_ = idx;
}

void EntryIndex::AddBucket() {
  const size_t added = buckets_.size();
  buckets_.emplace_back(kNoEntry);
  if (added == 0) return;
  EntryIdx* link = &buckets_[added - std::bit_floor(added)];
  while (*link != kNoEntry) {
    Entry& entry = entries_[*link];
    if (BucketOf(HashOf(entry.ns, entry.key)) != added) {
      link = &entry.next;
      continue;
    }
    const EntryIdx moved = *link;
    *link = entry.next;
    entry.next = buckets_[added];
    buckets_[added] = moved;
  }
}

}  // namespace kvtier::core
