// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_DECODE_PARAMS_H_
#define KVTIER_KERNELS_CUDA_DECODE_PARAMS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/target.h"
#include "kernels/tile_layout.h"

namespace kvtier::kernels::cuda {

inline constexpr uint32_t kDecodeBatchMax = 1024;
inline constexpr uint32_t kDecodeWarpsMin = 4;
inline constexpr uint32_t kDecodeWarpsMax = 8;

// Shared memory of a block: first the rings (and, of the stages just read, the merge buffers),
// then what all warps share.
struct DecodeShared {
  static constexpr uint32_t kRowsMax = 16;
  uint32_t barriers = 0;  // [warps][stages] mbarriers of 8 bytes
  uint32_t weights = 0;   // [warps][kRowsMax] pairs of floats: maximum, sum
  uint32_t buffers = 0;   // [warps] addresses of the merge buffers
  uint32_t splits = 0;    // [batch_size] items of sequences up to this one
  uint32_t flag = 0;      // One word for the whole block.
  uint32_t bytes = 0;
};

// What the decode kernels are launched with: decode.h's arguments, checked and laid out. Device
// addresses; null where the feature is off.
struct DecodeParams {
  // Shapes.
  uint32_t batch_size = 0;
  uint32_t kv_head_count = 0;
  uint32_t group_heads = 0;  // Query heads of a kv head.
  uint32_t query_len = 0;
  uint32_t pass_count = 0;   // Of DecodeRows query rows each, over the rows of a kv head.
  uint32_t split_heads = 0;  // SplitTokens' kv_head_count.
  uint32_t block_tokens = 0;

  // Sealed tokens.
  Global<const uint64_t> block_table = {};  // [batch_size][table_stride] device addresses
  uint32_t table_stride = 0;
  Global<const uint32_t> sealed_token_counts = {};  // [batch_size]
  uint64_t layer_offset = 0;                        // Of kv head 0's tile in a block.
  uint64_t tile_bytes = 0;
  uint64_t v_side_offset = 0;  // In a tile.
  SideFormat k_format = SideFormat::kNvfp4;
  SideFormat v_format = SideFormat::kNvfp4;
  Global<const float> g_k = {};  // [kv_head_count]
  Global<const float> g_v = {};
  Global<const float> k_smooth = {};  // [kv_head_count][head_dim]
  Global<const float> k_mean = {};

  // Tails.
  Global<const uint32_t> tail_token_counts = {};  // [batch_size]
  Global<const uint64_t> tail_k = {};             // [batch_size] device addresses
  Global<const uint64_t> tail_v = {};
  uint64_t tail_token_stride = 0;  // Elements.
  uint64_t tail_head_stride = 0;
  SideFormat tail_format = SideFormat::kBf16;  // Or kFp8.
  float tail_k_scale = 1.0F;
  float tail_v_scale = 1.0F;

  // Queries, scores and results.
  Global<const std::byte> query = {};  // [batch_size][query_len][query heads][head_dim]
  bool query_is_bf16 = false;          // Else FP32.
  float softmax_scale = 0.0F;
  float soft_cap = 0.0F;  // 0: none.
  float soft_cap_inverse = 0.0F;
  uint32_t window = 0;
  Global<const float> sinks = {};  // [query heads]
  Global<std::byte> out = {};
  bool out_is_bf16 = false;
  Global<float> lse = {};  // [batch_size][query_len][query heads]
  Global<uint32_t> damage_count = {};

  // Workspace.
  uint32_t split_slots = 0;        // Partial results a (sequence, kv head, pass) has room for.
  Global<float> partials = {};     // [batch_size][kv_head_count][pass_count][split_slots][...]
  Global<uint32_t> arrivals = {};  // [batch_size][kv_head_count][pass_count], 0 between launches.

  uint32_t stage_count = 0;  // Of a warp's ring.
  DecodeShared shared;
};

// How a sequence is cut. A split is read by one block of threads. It depends on the tokens to read
// and the kv heads only, never on the batch, the card or the capacity of the launch, so the same
// sequence gives the same bits in any batch, eager or captured. At most about 128 splits of a
// sequence's heads keep a big card busy; a split of less than 1024 tokens would spend its time
// on being set up and merged.
inline constexpr uint32_t kSplitGranuleTokens = 512;
inline constexpr uint32_t kSplitTokensMin = 1024;
inline constexpr uint32_t kSplitTokensMax = 16384;
inline constexpr uint32_t kSplitsOfAllHeads = 128;

KVTIER_HOST_DEVICE uint32_t SplitTarget(uint32_t kv_head_count) {
  const uint32_t target = (kSplitsOfAllHeads + kv_head_count - 1) / kv_head_count;
  return target;
}
KVTIER_HOST_DEVICE uint32_t SplitTokens(uint32_t token_count, uint32_t kv_head_count) {
  const uint32_t target = SplitTarget(kv_head_count);
  const uint32_t even = token_count / target + (token_count % target != 0 ? 1 : 0);
  if (even >= kSplitTokensMax) return kSplitTokensMax;
  if (even <= kSplitTokensMin) return kSplitTokensMin;
  return (even + kSplitGranuleTokens - 1) / kSplitGranuleTokens * kSplitGranuleTokens;
}
KVTIER_HOST_DEVICE uint32_t SplitCount(uint32_t token_count, uint32_t kv_head_count) {
  const uint32_t tokens = SplitTokens(token_count, kv_head_count);
  return token_count / tokens + (token_count % tokens != 0 ? 1 : 0);
}
// No sequence of up to token_count_max tokens has more splits.
KVTIER_HOST_DEVICE uint32_t SplitCountMax(uint32_t token_count_max, uint32_t kv_head_count) {
  const uint32_t target = SplitTarget(kv_head_count);
  const uint32_t by_least = token_count_max / kSplitTokensMin + 1;
  const uint32_t by_most = token_count_max / kSplitTokensMax + 1;
  const uint32_t usual = by_least < target ? by_least : target;
  return usual > by_most ? usual : by_most;
}

// Tokens of one stage of a warp's ring: what the softmax runs over at a time. Larger head dims
// take half, for the registers and for shared memory.
KVTIER_HOST_DEVICE constexpr uint32_t StageTokens(uint32_t head_dim) {
  return head_dim <= 128 ? 64 : 32;
}
KVTIER_HOST_DEVICE constexpr uint32_t StageBytes(uint32_t head_dim) {
  return StageTokens(head_dim) * head_dim * 9 / 8;
}
// Query rows of one pass; wide head dims have no registers for 16.
KVTIER_HOST_DEVICE constexpr uint32_t DecodeRowsMax(uint32_t head_dim) {
  return head_dim <= 128 ? 16 : 8;
}

// `ring_bytes` of a warp, a multiple of 8.
inline DecodeShared SharedLayout(uint32_t ring_bytes, uint32_t warp_count, uint32_t stage_count,
                                 uint32_t batch_size) {
  DecodeShared shared;
  shared.barriers = warp_count * ring_bytes;
  shared.weights = (shared.barriers + warp_count * stage_count * 8 + 15) / 16 * 16;
  shared.buffers = shared.weights + warp_count * DecodeShared::kRowsMax * 8;
  shared.splits = shared.buffers + warp_count * 4;
  shared.flag = shared.splits + batch_size * 4;
  shared.bytes = shared.flag + 4;
  return shared;
}

// Floats of one partial result: the accumulators in the order of the lanes' fragments, then the
// log-sum-exps (base 2) of the rows.
KVTIER_HOST_DEVICE uint32_t PartialFloats(uint32_t head_dim, uint32_t rows) {
  return rows * head_dim + rows;
}

}  // namespace kvtier::kernels::cuda

#endif  // KVTIER_KERNELS_CUDA_DECODE_PARAMS_H_
