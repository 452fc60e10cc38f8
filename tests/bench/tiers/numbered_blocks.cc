// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/tiers/numbered_blocks.h"

#include <cstring>

namespace kvtier::bench {

Key NumberedBlocks::KeyOf(uint64_t number) {
  Key key;
  for (uint64_t i = 0; i < 4; ++i) {
    uint64_t word = (number * 4 + i + 1) * 0x9E3779B97F4A7C15ULL;
    word = (word ^ (word >> 31)) * 0xBF58476D1CE4E5B9ULL;
    word ^= word >> 29;
    std::memcpy(key.bytes.data() + 8 * i, &word, sizeof(word));
  }
  return key;
}

BlockMeta NumberedBlocks::MetaOf(uint64_t number) const {
  BlockMeta meta;
  meta.key = KeyOf(number);
  meta.depth = static_cast<uint32_t>(number % chain_block_count_);
  if (meta.depth > 0) meta.parent = KeyOf(number - 1);
  meta.payload_bytes = payload_bytes_;
  return meta;
}

}  // namespace kvtier::bench
