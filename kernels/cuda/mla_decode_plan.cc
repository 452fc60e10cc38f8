// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/mla_decode_plan.h"

#include <cmath>

#include "kernels/cuda/decode_plan.h"
#include "kernels/cuda/plan_checks.h"

namespace kvtier::kernels::cuda {
namespace {

Status ValidateTailSide(const void* const* addresses, uint64_t stride, uint32_t dims,
                        ElementType type, float scale) {
  if (addresses == nullptr) return Status::InvalidArgument("tails have no data");
  if (type != ElementType::kBf16 && type != ElementType::kFp8E4m3) {
    return Status::InvalidArgument("tails must be BF16 or FP8");
  }
  if (stride < dims || stride % (16 / ElementBytes(type)) != 0) {
    return Status::InvalidArgument(
        "a stride of the tails is less than its dims or not a multiple of 16 bytes");
  }
  if (!FitsReach(uint64_t{1} << 32, stride, ElementBytes(type))) {
    return Status::InvalidArgument("a stride of the tails is too large");
  }
  if (!IsAligned(addresses, alignof(void*))) {
    return Status::InvalidArgument("addresses of the tails are not aligned");
  }
  if (!std::isfinite(scale) || scale <= 0.0F) {
    return Status::InvalidArgument("a scale of the tails is not finite and above 0");
  }
  return Status();
}

MlaTailSide TailSideOf(const void* const* addresses, uint64_t stride, ElementType type,
                       float scale) {
  return {.addresses = {reinterpret_cast<const uint64_t*>(addresses)},
          .token_stride = stride * ElementBytes(type),
          .is_fp8 = type == ElementType::kFp8E4m3,
          .scale = scale};
}

// What both kinds of decode have.
DecodeBatchArgs BatchArgs(const DecodeMlaBatchArgs& args) {
  return {.block_shape = {.layer_count = args.block_shape.layer_count,
                          .kv_head_count = 1,
                          .block_tokens = args.block_shape.tile.block_tokens,
                          .head_dim = kMlaLatentDim},
          .layer_format = {},
          .layer_offset = MlaTileOffset(args.block_shape, args.layer_idx),
          .batch_size = args.batch_size,
          .block_table = args.block_table,
          .table_stride = args.table_stride,
          .sealed_token_counts = args.sealed_token_counts,
          .tails = {.token_counts = args.tails.token_counts},
          .query_type = args.query_type,
          .query = args.query,
          .query_head_count = args.query_head_count,
          .query_len = args.query_len,
          .softmax_scale = args.softmax_scale,
          .soft_cap = args.soft_cap,
          .window = args.window,
          .g_k = args.g,
          .sinks = args.sinks,
          .out_type = args.out_type,
          .out = args.out,
          .lse = args.lse,
          .damage_count = args.damage_count,
          .workspace = args.workspace};
}

Status Validate(const DecodeMlaBatchArgs& args) {
  if (const Status status = kernels::Validate(args.block_shape); !status.ok()) return status;
  if (args.layer_idx >= args.block_shape.layer_count) {
    return Status::InvalidArgument("layer_idx is not below layer_count");
  }
  const DeviceMlaTails& tails = args.tails;
  if (tails.token_counts != nullptr) {
    if (const Status status = ValidateTailSide(tails.latent, tails.latent_stride, kMlaLatentDim,
                                               tails.latent_type, tails.latent_scale);
        !status.ok()) {
      return status;
    }
    if (const Status status = ValidateTailSide(tails.rope, tails.rope_stride, kMlaRopeDim,
                                               tails.rope_type, tails.rope_scale);
        !status.ok()) {
      return status;
    }
  }
  return ValidateBatch(BatchArgs(args));
}

void LayOut(const DecodeMlaBatchArgs& args, MlaDecodeParams* params) {
  const DecodeBatchArgs batch = BatchArgs(args);
  LayOutBatch(batch, kMlaPassRows, &params->base);
  // Passes side by side read the same tokens; a partial result is 16 KiB.
  params->base.split_heads = params->base.pass_count;
  params->base.layer_offset = batch.layer_offset;
  params->base.tile_bytes = MlaTileBytes(args.block_shape.tile);
  params->base.k_format = SideFormat::kBf16;
  params->base.shared = SharedLayout(kMlaBufferBytes, kMlaWarps, 0, args.batch_size);
  const DeviceMlaTails& tails = args.tails;
  params->latent =
      TailSideOf(tails.latent, tails.latent_stride, tails.latent_type, tails.latent_scale);
  params->rope = TailSideOf(tails.rope, tails.rope_stride, tails.rope_type, tails.rope_scale);
}

DecodeWorkspace WorkspaceOf(const MlaDecodeParams& params) {
  return {params.base, PartialFloats(kMlaLatentDim, kMlaPassRows)};
}

}  // namespace

Status PlanDecodeMla(const DecodeMlaBatchArgs& args, const DeviceLimits& limits,
                     MlaDecodePlan* plan) {
  if (const Status status = Validate(args); !status.ok()) return status;
  LayOut(args, &plan->params);
  plan->grid_size = limits.multiprocessor_count * kMlaBlocksPerMultiprocessor;
  plan->shared_bytes = plan->params.base.shared.bytes;
  if (plan->shared_bytes > limits.shared_bytes_per_block) {
    return Status::InvalidArgument("the device has too little shared memory for decode");
  }
  return WorkspaceOf(plan->params).Place(args.workspace, &plan->params.base);
}

uint64_t DecodeMlaBatchWorkspaceBytes(const DecodeMlaBatchArgs& args) {
  if (!Validate(args).ok()) return 0;
  MlaDecodeParams params;
  LayOut(args, &params);
  return WorkspaceOf(params).bytes;
}

}  // namespace kvtier::kernels::cuda
