// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "tiers/tier.h"

namespace kvtier::bench {

// Blocks named by numbers, in chains of `chain_block_count` that follow each other, of one
// namespace.
class NumberedBlocks {
 public:
  NumberedBlocks(uint64_t chain_block_count, uint32_t payload_bytes)
      : chain_block_count_(chain_block_count), payload_bytes_(payload_bytes) {}

  // Evenly distributed, as hashes are.
  static Key KeyOf(uint64_t number);
  BlockMeta MetaOf(uint64_t number) const;

 private:
  const uint64_t chain_block_count_;
  const uint32_t payload_bytes_;
};

}  // namespace kvtier::bench
