// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "tiers/memory/memory_tier.h"

namespace kvtier::bench {

// Slots of a host tier that is prepared as the daemon prepares it: blocks are written from the
// sources, which have incompressible bytes, and read into the targets. Owns the tier.
struct HostSlots {
  static constexpr int kCount = 64;

  // `observer` may be null; else it outlives this.
  HostSlots(uint32_t block_bytes, SegmentObserver* observer);

  struct Slot {
    std::span<std::byte> bytes;
    uint32_t crc32c = 0;
  };
  std::unique_ptr<MemoryTier> tier;
  std::vector<Slot> sources;
  std::vector<Slot> targets;
};

}  // namespace kvtier::bench
