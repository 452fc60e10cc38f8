// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/mla_transfer_plan.h"

#include "kernels/element.h"

namespace kvtier::kernels::cuda {
namespace {

// One head whose V are the ropes: what the plans of K and V check and lay out is right for it but
// for the tile and the dims of the latents.
DeviceBlocks BlocksOf(const MlaDeviceBlocks& blocks) {
  return {.entries = blocks.entries,
          .entry_count_max = blocks.entry_count_max,
          .entry_count = blocks.entry_count,
          .shape = {.layer_count = blocks.shape.layer_count,
                    .kv_head_count = 1,
                    .block_tokens = blocks.shape.tile.block_tokens,
                    .head_dim = kMlaRopeDim},
          .first_layer_offset = blocks.first_layer_offset};
}

DeviceRows RowsOf(DeviceRows rows) {
  rows.head_stride = 0;
  return rows;
}

Status Validate(const MlaDeviceBlocks& blocks) {
  if (const Status status = kernels::Validate(blocks.shape); !status.ok()) return status;
  if (blocks.latent.token_stride < kMlaLatentDim ||
      (blocks.pages.page_tokens != 0 && blocks.latent.page_stride < kMlaLatentDim)) {
    return Status::InvalidArgument("a stride of the latents is less than 512");
  }
  return Status();
}

TileParams TileOf(const MlaShape& shape) {
  return {.block_tokens = shape.block_tokens,
          .vector_count = kMlaLatentDim / kVectorDims,
          .k_scale_offset = static_cast<uint32_t>(MlaScaleOffset(shape)),
          .v_data_offset = static_cast<uint32_t>(MlaRopeOffset(shape)),
          .v_scale_offset = 0,
          .tile_bytes = static_cast<uint32_t>(MlaTileBytes(shape))};
}

}  // namespace

Status PlanSealMla(const SealMlaBlocksArgs& args, SealPlan* plan) {
  const MlaDeviceBlocks& blocks = args.blocks;
  if (const Status status = Validate(blocks); !status.ok()) return status;
  const Status status = PlanSeal({.blocks = BlocksOf(blocks),
                                  .k = RowsOf(blocks.latent),
                                  .v = RowsOf(blocks.rope),
                                  .pages = blocks.pages,
                                  .g_k = blocks.g,
                                  .g_v = blocks.g,
                                  .k_mean = nullptr,
                                  .k_inverse_smooth = nullptr,
                                  .search = args.search,
                                  .counters = args.counters,
                                  .counters_per_block = args.counters_per_block},
                                 plan);
  if (!status.ok()) return status;
  plan->params.transfer.tile = TileOf(blocks.shape.tile);
  plan->shape.block_x = kMlaLatentDim / kVectorDims;
  plan->shape.block_y = kTransferThreadsMax / plan->shape.block_x;
  plan->shape.shared_bytes = static_cast<uint32_t>(MlaScaleBytes(blocks.shape.tile));
  return Status();
}

Status PlanGatherMla(const GatherMlaBlocksArgs& args, GatherPlan* plan) {
  const MlaDeviceBlocks& blocks = args.blocks;
  if (const Status status = Validate(blocks); !status.ok()) return status;
  const Status status = PlanGather({.blocks = BlocksOf(blocks),
                                    .k = RowsOf(blocks.latent),
                                    .v = RowsOf(blocks.rope),
                                    .pages = blocks.pages,
                                    .g_k = blocks.g,
                                    .g_v = blocks.g,
                                    .counters = args.counters,
                                    .counters_per_block = args.counters_per_block},
                                   plan);
  if (!status.ok()) return status;
  plan->params.transfer.tile = TileOf(blocks.shape.tile);
  plan->shape.block_x = kMlaLatentDim * ElementBytes(blocks.latent.type) / 16;
  plan->shape.block_y = kTransferThreadsMax / plan->shape.block_x;
  return Status();
}

}  // namespace kvtier::kernels::cuda
