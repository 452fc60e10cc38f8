// SPDX-License-Identifier: Apache-2.0
//
// When to read what ahead: earliest deadline first on each link, as late as its bandwidth allows
// for guesses, and not at all where recomputing is faster.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "policy/policy.h"

namespace kvtier::policy {

// Bytes per millisecond from each tier towards hbm; 0: not measured yet.
using ReadSpeeds = std::array<double, kTierCount>;

struct PrefetchTask {
  uint64_t id = 0;
  uint64_t deadline_ms = 0;
  // A guess holds room until it comes true: it begins as late as it can. What a client asked for
  // begins at once.
  bool is_guess = false;
  // How much earlier than its deadline a guess may come true.
  uint64_t early_ms = 0;
  // Still to be read, by the tier that has it.
  std::array<uint64_t, kTierCount> pending_bytes{};
};

struct PrefetchSlot {
  uint64_t id = 0;
  // The time from which it may read. In the past or now: it may.
  uint64_t start_ms = 0;
  // When the last byte is there, if nothing comes between. Meaningful where `eta_known`.
  uint64_t ready_ms = 0;
  // The speed of every link that it needs is known, for it and all before it.
  bool eta_known = true;
};

// The tasks by earliest deadline, of equal ones by id. Each link serves one after the other; a
// guess starts so that it and all that are due after it are in time, and once more as long before.
std::vector<PrefetchSlot> PlanPrefetch(std::span<const PrefetchTask> tasks,
                                       const ReadSpeeds& speeds, uint64_t now_ms);

// What an engine says of itself: tokens it prefills per second where there is no context yet; 0:
// it does not say. After `kAttentionTokens` tokens of context a token takes twice as long.
inline constexpr double kAttentionTokens = 53'000;

struct LoadOrRecompute {
  // Of a chain in order: the blocks that would be read.
  uint64_t first_position_tokens = 0;
  uint64_t block_count = 0;
  uint64_t block_tokens = 0;
  uint64_t block_bytes = 0;
};

// Whether reading the blocks takes less time than recomputing them. True where either is not known.
// Blocks can only be read from the front and recomputed to the end, a read takes as long anywhere
// and recomputing longer the deeper: so it is all of them or none.
bool ReadingIsFaster(const LoadOrRecompute& blocks, double bytes_per_ms,
                     double prefill_tokens_per_second);

// Of memory, hbm and host together, so much may be kept for what clients said they need soon.
inline constexpr double kHeldShareMax = 0.5;

// Until when a block is kept for a client that said at `said_ms` that it needs it at `deadline_ms`:
// late by half the time, and by no less than ten seconds, which an engine's queue can take.
uint64_t HeldUntilMs(uint64_t deadline_ms, uint64_t said_ms);

// Background transfers that may be under way on a link at once, so that a demanded read waits for
// no more than `kBehindMs` of them: at least two, which keep the link busy.
inline constexpr double kBehindMs = 20;
uint32_t BackgroundTransfersMax(double bytes_per_ms, uint64_t block_bytes,
                                uint32_t transfers_per_link_max);

}  // namespace kvtier::policy
