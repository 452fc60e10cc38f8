// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_TRANSFER_PARAMS_H_
#define KVTIER_KERNELS_CUDA_TRANSFER_PARAMS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/blocks.h"
#include "kernels/cuda/gather.h"
#include "kernels/cuda/seal.h"
#include "kernels/cuda/target.h"
#include "kernels/status.h"
#include "kernels/tile_layout.h"

// Internal: what the host hands to the seal and gather kernels, and how it makes that.

namespace kvtier::kernels::cuda {

inline constexpr uint32_t kTransferThreadsMax = 256;

struct LaunchShape {
  uint32_t grid_x = 0;
  uint32_t grid_y = 0;
  uint32_t grid_z = 0;
  uint32_t block_x = 0;
  uint32_t block_y = 0;
  uint32_t shared_bytes = 0;
};

// Bytes and divisors, precomputed.
struct RowsParams {
  Global<std::byte> data;
  Global<void* const> layer_data;
  uint64_t layer_stride = 0;  // Strides in bytes.
  uint64_t head_stride = 0;
  uint64_t token_stride = 0;
  uint64_t page_stride = 0;
  Global<const float> scales;
};

// s / page_tokens = (s * multiplier) >> shift, for s < 2^31.
struct PagesParams {
  Global<const uint32_t> page_table;
  uint32_t page_tokens = 0;
  uint32_t multiplier = 0;
  uint32_t shift = 0;
};

// Sides that are not NVFP4 have no scales; their data are rows.
struct TileParams {
  uint32_t block_tokens = 0;
  uint32_t vector_count = 0;  // Of a token: head_dim / 16.
  uint32_t k_scale_offset = 0;
  uint32_t v_data_offset = 0;
  uint32_t v_scale_offset = 0;
  uint32_t tile_bytes = 0;
  LayerFormat format = {};
};

struct TransferParams {
  Global<const BlockEntry> entries;
  Global<const uint32_t> entry_count;  // May be null.
  uint64_t first_layer_offset = 0;
  TileParams tile;
  RowsParams k;
  RowsParams v;
  PagesParams pages;
  Global<const float> g_k;  // Null for BF16 sides.
  Global<const float> g_v;
  uint32_t kv_head_count = 0;
};

struct SealParams {
  TransferParams transfer;
  Global<const float> k_mean;  // Null: no transform.
  Global<const float> k_inverse_smooth;
  Global<uint32_t> counters;
  uint32_t counter_stride = 0;  // Words from block to block.
  bool four_over_six = false;
};

struct GatherParams {
  TransferParams transfer;
  Global<uint32_t> counters;
  uint32_t counter_stride = 0;
};

struct SealPlan {
  SealParams params;
  LaunchShape shape;
};
struct GatherPlan {
  GatherParams params;
  LaunchShape shape;
};

// Checks the arguments and plans the launch, of the kernels for NVFP4 (seal_kernel.h,
// gather_kernel.h) or of those for any format (mixed_transfer_kernel.h). Pure. Errors:
// kInvalidArgument.
Status PlanSeal(const SealBlocksArgs& args, SealPlan* plan);
Status PlanGather(const GatherBlocksArgs& args, GatherPlan* plan);

}  // namespace kvtier::kernels::cuda

#endif  // KVTIER_KERNELS_CUDA_TRANSFER_PARAMS_H_
