// SPDX-License-Identifier: Apache-2.0
//
// What the bytes of replayed blocks must be, and what attention over them must give.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/ctl/kv_generator.h"
#include "proto/base/key.h"

namespace kvtier::ctl {

// Compares blocks with what the generator makes of their keys, bit for bit. Keeps recomputed blocks
// in memory up to a bound, first in first out. Single-thread.
class BlockOracle {
 public:
  // `generator` outlives the object. Blocks are numbered from 0 to block_count - 1.
  BlockOracle(const KvGenerator* generator, size_t block_count, uint64_t cache_bytes_max);

  // Offset of the first byte that is wrong, or nothing. `actual` has block_bytes() bytes.
  std::optional<uint64_t> FirstWrongByte(uint32_t block, const Key& key,
                                         std::span<const std::byte> actual);

 private:
  const std::byte* Expected(uint32_t block, const Key& key);

  const KvGenerator* generator_;
  const size_t cached_count_max_;
  std::vector<std::unique_ptr<std::byte[]>> expected_;  // by block
  std::deque<uint32_t> cached_;                         // oldest first
};

// One decode step over sealed blocks and a BF16 tail.
struct DecodeSample {
  uint32_t layer_idx = 0;
  // Fixes the query and the tail.
  uint64_t seed = 0;
  // In chain order; entry i of `table` is where the block of keys[i] lies.
  std::span<const Key> keys;
  std::span<const std::byte* const> table;
};

// Runs kernels::Decode in place over `sample.table`, and attention in FP64 over values recomputed
// from the keys; returns the largest difference relative to the largest magnitude of the output.
// Errors: INTERNAL or DATA_LOSS when the kernel refuses.
absl::StatusOr<double> DecodeError(const KvGenerator& generator, const DecodeSample& sample);

// The largest error that passes.
inline constexpr double kDecodeTolerance = 1.0 / 512;
// Query heads for each kv head in replays.
inline constexpr uint32_t kQueryHeadsPerKvHead = 4;

}  // namespace kvtier::ctl
