// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "daemon/core/entry.h"
#include "proto/base/chunked_vector.h"

namespace kvtier::core {

// The entries, and the way from a key to one: hash chains that run through the entries themselves
// (Entry::next), from one bucket of 4 bytes for each entry there ever was at once.
//
// It grows by linear hashing: each new bucket takes its share of one old chain. So no call waits
// while millions are hashed anew, and memory is 132 bytes an entry at every size. The hash covers
// the whole key and differs between processes: clients choose keys, and must not be able to make
// one long chain of them. Thread-compatible.
class EntryIndex {
 public:
  Entry& At(EntryIdx idx) { return entries_[idx]; }
  const Entry& At(EntryIdx idx) const { return entries_[idx]; }
  // Indexes are below this; some are unused.
  size_t size() const { return entries_.size(); }
  // In use.
  size_t entry_count() const { return entry_count_; }

  EntryIdx Find(NamespaceIdx ns, const Key& key) const;
  // A ghost without parent. Requires: there is none of this key in this namespace, and `ns` is
  // below kNamespaceCountMax.
  EntryIdx Add(NamespaceIdx ns, const Key& key);
  // Its index may be another's afterwards.
  void Remove(EntryIdx idx);

  // Find for each of `keys` in turn, until `visit(EntryIdx)` returns false. The first cache line of
  // the next ones is under way from memory meanwhile. `visit` neither adds nor removes.
  template <typename Visit>
  void FindEach(NamespaceIdx ns, std::span<const Key> keys, Visit visit) const;

  uint64_t memory_bytes() const { return entries_.memory_bytes() + buckets_.memory_bytes(); }

 private:
  // Keys that FindEach looks ahead, first for their bucket, then for their entry.
  static constexpr size_t kBucketsAhead = 16;
  static constexpr size_t kEntriesAhead = 8;

  static uint64_t HashOf(NamespaceIdx ns, const Key& key);
  size_t BucketOf(uint64_t hash) const;
  EntryIdx FindIn(size_t bucket, NamespaceIdx ns, const Key& key) const;
  void AddBucket();

  ChunkedVector<Entry> entries_;
  ChunkedVector<EntryIdx> buckets_;
  EntryIdx first_unused_ = kNoEntry;
  size_t entry_count_ = 0;
};

template <typename Visit>
void EntryIndex::FindEach(NamespaceIdx ns, std::span<const Key> keys, Visit visit) const {
  if (buckets_.empty()) {
    for (size_t i = 0; i < keys.size() && visit(kNoEntry); ++i) {
    }
    return;
  }
  size_t buckets[kBucketsAhead];  // of the keys i to i + kBucketsAhead, by their number
  size_t hashed_count = 0;
  size_t followed_count = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    for (; hashed_count < keys.size() && hashed_count < i + kBucketsAhead; ++hashed_count) {
      const size_t bucket = BucketOf(HashOf(ns, keys[hashed_count]));
      buckets[hashed_count % kBucketsAhead] = bucket;
      __builtin_prefetch(&buckets_[bucket]);
    }
    for (; followed_count < keys.size() && followed_count < i + kEntriesAhead; ++followed_count) {
      const EntryIdx first = buckets_[buckets[followed_count % kBucketsAhead]];
      if (first == kNoEntry) continue;
      __builtin_prefetch(&entries_[first]);
    }
    if (!visit(FindIn(buckets[i % kBucketsAhead], ns, keys[i]))) return;
  }
}

}  // namespace kvtier::core
