// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "daemon/core/store_core.h"

namespace kvtier::core {

using EntryIdx = uint32_t;
inline constexpr EntryIdx kNoEntry = UINT32_MAX;
inline constexpr size_t kHbm = 0;
inline constexpr size_t kHost = 1;
inline constexpr size_t kNvme = 2;
// "On no tier" where the fastest tier of an entry is asked for.
inline constexpr size_t kNowhere = kTierCount;

// A bit for each tier.
inline constexpr uint32_t kAllTiersMask = (1U << kTierCount) - 1;

enum class EntryState : uint8_t { kUnused, kGhost, kPending, kCommitted };

// Namespaces are numbered below this.
inline constexpr uint32_t kNamespaceCountMax = 1U << 24;

// What the core knows of a block. There are millions: two cache lines, of which the first is all
// that Lookup reads, which waits for memory more than for anything else. What few blocks have at a
// time (a filler, a transfer, readers) is kept beside them, and a bit here; what all blocks of a
// namespace share is in its NamespaceSpec.
struct alignas(64) Entry {
  Key key = {};
  std::array<ReplicaId, kTierCount> replica{};
  uint32_t ns : 24 = 0;
  EntryState state : 2 = EntryState::kUnused;
  // To be dropped as soon as no lease and no transfer touches it; invisible until then.
  bool doomed : 1 = false;
  // Only its memory replica is bad: dropping it leaves the one on nvme.
  bool keeps_nvme : 1 = false;
  // Read ahead and not used since.
  bool prefetched : 1 = false;
  // Tickets keep it in memory (held_count_).
  bool is_held : 1 = false;
  // A transfer of it is under way (jobs_).
  bool in_transfer : 1 = false;
  // Acquire calls wait for it to come from nvme (readers_of_).
  bool has_readers : 1 = false;
  // The next one of its chain in the index, or of the unused ones.
  EntryIdx next = kNoEntry;

  // Children with a replica (or a fill) on tier t or a faster one. A child on its way down counts
  // as there already: so a chain leaves suffix first without waiting for each block.
  std::array<uint32_t, kTierCount> child_count{};
  uint32_t child_links = 0;
  EntryIdx parent = kNoEntry;
  uint32_t depth = 0;
  uint64_t last_use_seq = 0;
  TimeMs last_use_ms = 0;
  uint32_t crc32c = 0;
  uint32_t context_refs = 0;
  // Active contexts that hold it.
  uint32_t active_count = 0;
  uint32_t lease_count = 0;
  uint32_t use_count = 0;
  // What the policy was last told: an older use; an active context.
  bool rank_is_old : 1 = false;
  bool ranked_active : 1 = false;
  // Bits: is a candidate / is pinned on tier t, as last told to policy and counters.
  uint32_t candidate_mask : kTierCount = 0;
  uint32_t pinned_mask : kTierCount = 0;
  // Where a demotion under way takes it.
  uint32_t leaving_to : 2 = kNowhere;
  // Recovered, and not yet of a tenant's account (tenancy.cc).
  bool is_unclaimed : 1 = false;
  // Where it can be read, as last told to watchers.
  uint32_t told_mask : kTierCount = 0;
  // Why its last replica is about to go, if not for room.
  policy::MissReason leaves_for : 4 = policy::MissReason::kNone;
};
static_assert(sizeof(Entry) == 128 && offsetof(Entry, child_count) == 64);
static_assert(kNowhere < 4 && policy::kMissReasonCount <= 16, "they fit their bits");

}  // namespace kvtier::core
