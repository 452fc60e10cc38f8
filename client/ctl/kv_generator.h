// SPDX-License-Identifier: Apache-2.0
//
// Synthetic keys and values that follow from a block's key alone, so that any process can recompute
// what the bytes of a block must be. docs/replay.md is the specification.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/tile_layout.h"
#include "proto/base/key.h"
#include "proto/base/layout.h"

namespace kvtier::ctl {

// A named block shape for replays: NVFP4, query heads = 4 x kv heads.
struct LayoutPreset {
  std::string_view name;
  kernels::BlockShape shape;
};
// "small": 2 layers, 1 kv head, head dim 64, 16 tokens: 2304 bytes a block.
// "medium": 4 layers, 2 kv heads, head dim 128, 64 tokens: 73,728 bytes a block.
// "large": 8 layers, 8 kv heads, head dim 128, 64 tokens: 589,824 bytes a block.
std::span<const LayoutPreset> LayoutPresets();
absl::StatusOr<LayoutPreset> FindLayoutPreset(std::string_view name);
Layout LayoutOf(const LayoutPreset& preset);

// splitmix64 of the `counter`-th step from `seed`.
uint64_t SplitMix64(uint64_t seed, uint64_t counter);

// The token ids of the block that a trace names `hash_id`: what its key is made from.
std::vector<uint32_t> TokensOfHashId(uint64_t hash_id, uint32_t block_tokens);

// K or V of one (layer, kv head) of one block, BF16, [token][dim], dense. Thread-safe after
// construction; Generate* do not block.
class KvGenerator {
 public:
  // Power-of-two global scales that hold every value this generator makes.
  static constexpr float kGlobalScaleK = 0.0625F;
  static constexpr float kGlobalScaleV = 0.015625F;
  // Channels of each K head with a large constant bias.
  static constexpr uint32_t kOutlierChannelCount = 4;

  // Requires: Validate(shape).ok().
  explicit KvGenerator(const kernels::BlockShape& shape);

  const kernels::BlockShape& shape() const { return shape_; }
  uint64_t block_bytes() const { return kernels::BlockBytes(shape_); }

  // Each output has block_tokens * head_dim elements.
  void GenerateTile(const Key& key, uint32_t layer_idx, uint32_t kv_head_idx, std::span<uint16_t> k,
                    std::span<uint16_t> v) const;

  // Seals the whole block into `out` (block_bytes() long).
  void SealBlock(const Key& key, std::span<std::byte> out) const;

 private:
  kernels::BlockShape shape_;
  // Added to each K dim of (layer, kv head), in units of 2^-15: [layer][kv head][dim].
  std::vector<int32_t> k_bias_;
};

}  // namespace kvtier::ctl
