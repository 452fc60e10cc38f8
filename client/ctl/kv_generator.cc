// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/kv_generator.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/nvfp4.h"
#include "kernels/seal.h"
#include "proto/base/check.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

constexpr std::array<LayoutPreset, 3> kPresets = {{
    {"small", {.layer_count = 2, .kv_head_count = 1, .block_tokens = 16, .head_dim = 64}},
    {"medium", {.layer_count = 4, .kv_head_count = 2, .block_tokens = 64, .head_dim = 128}},
    {"large", {.layer_count = 8, .kv_head_count = 8, .block_tokens = 64, .head_dim = 128}},
}};

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ULL;
constexpr uint64_t kOutlierSeed = 0x6B7674696572ULL;  // "kvtier"
constexpr int32_t kOne = 1 << 15;                     // 1.0 in units of 2^-15

// Sum of the four 16-bit lanes, centred: approximately normal, standard deviation 1.156 in units of
// 2^-15.
int32_t CentredSum(uint64_t word) {
  const auto lane = [word](int shift) { return static_cast<int32_t>((word >> shift) & 0xFFFF); };
  return lane(0) + lane(16) + lane(32) + lane(48) - 131'070;
}

// Exact: below 2^24 in magnitude, so that only the rounding to BF16 rounds.
uint16_t ToBf16(int32_t units) {
  return kernels::FloatToBf16(static_cast<float>(units) * (1.0F / static_cast<float>(kOne)));
}

}  // namespace

std::span<const LayoutPreset> LayoutPresets() { return kPresets; }

absl::StatusOr<LayoutPreset> FindLayoutPreset(std::string_view name) {
  for (const LayoutPreset& preset : kPresets) {
    if (preset.name == name) return preset;
  }
  return Invalid("layout \"%s\" is unknown; use small, medium or large", name);
}

Layout LayoutOf(const LayoutPreset& preset) {
  Layout layout;
  layout.model = "kvtier-replay";
  layout.weights_revision = "1";
  layout.tokenizer = "none";
  layout.layer_count = preset.shape.layer_count;
  layout.kv_head_count = preset.shape.kv_head_count;
  layout.head_dim = preset.shape.head_dim;
  layout.block_tokens = preset.shape.block_tokens;
  layout.codec = Codec::kNvfp4;
  layout.scale_set = "replay-1";
  return layout;
}

uint64_t SplitMix64(uint64_t seed, uint64_t counter) {
  uint64_t z = seed + (counter + 1) * kGolden;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

std::vector<uint32_t> TokensOfHashId(uint64_t hash_id, uint32_t block_tokens) {
  std::vector<uint32_t> tokens(block_tokens);
  for (uint32_t i = 0; i < block_tokens; ++i) {
    tokens[i] = static_cast<uint32_t>(SplitMix64(hash_id, i) >> 32);
  }
  return tokens;
}

KvGenerator::KvGenerator(const kernels::BlockShape& shape) : shape_(shape) {
  KVT_CHECK(kernels::Validate(shape).ok());
  const uint32_t dims = shape.head_dim;
  const uint32_t head_count = shape.layer_count * shape.kv_head_count;
  k_bias_.assign(size_t{head_count} * dims, 0);
  for (uint32_t head_idx = 0; head_idx < head_count; ++head_idx) {
    for (uint32_t n = 0; n < kOutlierChannelCount; ++n) {
      const uint64_t word = SplitMix64(kOutlierSeed + head_idx, n);
      // One channel in each quarter of the head, so that they differ.
      const uint32_t quarter = dims / kOutlierChannelCount;
      const uint32_t dim = n * quarter + static_cast<uint32_t>(word % quarter);
      const auto magnitude = static_cast<int32_t>(10 + (word >> 32) % 11);
      const int32_t sign = (word >> 63) != 0 ? -1 : 1;
      k_bias_[size_t{head_idx} * dims + dim] = sign * magnitude * kOne;
    }
  }
}

void KvGenerator::GenerateTile(const Key& key, uint32_t layer_idx, uint32_t kv_head_idx,
                               std::span<uint16_t> k, std::span<uint16_t> v) const {
  const uint32_t dims = shape_.head_dim;
  const size_t value_count = size_t{shape_.block_tokens} * dims;
  KVT_CHECK(k.size() == value_count && v.size() == value_count);
  uint64_t key_hash = 0;
  for (size_t at = 0; at < Key::kBytes; at += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, &key.bytes[at], sizeof(word));
    key_hash = SplitMix64(key_hash ^ word, 0);
  }
  const uint32_t head_idx = layer_idx * shape_.kv_head_count + kv_head_idx;
  const uint64_t k_seed = SplitMix64(key_hash, 2 * uint64_t{head_idx});
  const uint64_t v_seed = SplitMix64(key_hash, 2 * uint64_t{head_idx} + 1);
  const int32_t* bias = &k_bias_[size_t{head_idx} * dims];
  for (uint32_t token = 0; token < shape_.block_tokens; ++token) {
    for (uint32_t dim = 0; dim < dims; ++dim) {
      const size_t i = size_t{token} * dims + dim;
      k[i] = ToBf16(CentredSum(SplitMix64(k_seed, i)) + bias[dim]);
      v[i] = ToBf16(CentredSum(SplitMix64(v_seed, i)));
    }
  }
}

void KvGenerator::SealBlock(const Key& key, std::span<std::byte> out) const {
  const kernels::TileShape tile = kernels::TileOf(shape_);
  const uint64_t tile_bytes = kernels::TileBytes(tile);
  KVT_CHECK(out.size() == block_bytes());
  std::vector<uint16_t> k(size_t{tile.block_tokens} * tile.head_dim);
  std::vector<uint16_t> v(k.size());
  const kernels::SealOptions options{.g_k = kGlobalScaleK, .g_v = kGlobalScaleV};
  for (uint32_t layer_idx = 0; layer_idx < shape_.layer_count; ++layer_idx) {
    for (uint32_t head_idx = 0; head_idx < shape_.kv_head_count; ++head_idx) {
      GenerateTile(key, layer_idx, head_idx, k, v);
      kernels::SealStats stats;
      const kernels::Status status = kernels::SealTile(
          tile,
          {.type = kernels::ElementType::kBf16, .data = k.data(), .token_stride = tile.head_dim},
          {.type = kernels::ElementType::kBf16, .data = v.data(), .token_stride = tile.head_dim},
          options, out.subspan(kernels::TileOffset(shape_, layer_idx, head_idx), tile_bytes),
          &stats);
      KVT_CHECK(status.ok() && stats.nonfinite_count == 0 && stats.saturated_count == 0);
    }
  }
}

}  // namespace kvtier::ctl
