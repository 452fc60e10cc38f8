// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>

namespace kvtier {

// Told of the memory that a MemoryTier maps, so that others can make it fast to reach: io_uring
// registers it as fixed buffers, CUDA pins it. What an observer fails to do costs speed only.
//
// Called by the thread that changes the tier, under its lock: must not block for long and must not
// call the tier. Outlives the tier.
class SegmentObserver {
 public:
  virtual ~SegmentObserver() = default;

  // Whole pages, mapped and writable. Before any slot in it is given out.
  virtual void OnMapped(std::span<std::byte> segment) = 0;
  // The same span as before; no slot in it is reserved, so that no transfer touches it. When this
  // returns, nothing of the observer's may refer to the pages.
  virtual void OnUnmapping(std::span<std::byte> segment) = 0;
};

}  // namespace kvtier
