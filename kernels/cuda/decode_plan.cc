// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cuda/plan_checks.h"

namespace kvtier::kernels::cuda {
namespace {

constexpr uint64_t kWorkspaceAlignment = 256;
constexpr uint32_t kQueryLenMax = 8;
constexpr uint64_t kTailTokens = uint64_t{1} << 32;  // The host does not know how many.

Status ValidateTails(const DeviceTails& tails, const BlockShape& shape) {
  if (tails.token_counts == nullptr) return Status();
  if (tails.k == nullptr || tails.v == nullptr) {
    return Status::InvalidArgument("tails have no data");
  }
  if (tails.type != ElementType::kBf16 && tails.type != ElementType::kFp8E4m3) {
    return Status::InvalidArgument("tails must be BF16 or FP8");
  }
  if (tails.token_stride < shape.head_dim ||
      (shape.kv_head_count > 1 && tails.head_stride < shape.head_dim)) {
    return Status::InvalidArgument("a stride of the tails is less than head_dim");
  }
  const uint64_t elements = 16 / ElementBytes(tails.type);
  if (tails.token_stride % elements != 0 || tails.head_stride % elements != 0) {
    return Status::InvalidArgument("a stride of the tails is not a multiple of 16 bytes");
  }
  if (!FitsReach(kTailTokens, tails.token_stride, ElementBytes(tails.type)) ||
      !FitsReach(shape.kv_head_count, tails.head_stride, ElementBytes(tails.type))) {
    return Status::InvalidArgument("a stride of the tails is too large");
  }
  if (!IsAligned(tails.k, alignof(void*)) || !IsAligned(tails.v, alignof(void*))) {
    return Status::InvalidArgument("addresses of the tails are not aligned");
  }
  for (const float scale : {tails.k_scale, tails.v_scale}) {
    if (!std::isfinite(scale) || scale <= 0.0F) {
      return Status::InvalidArgument("a scale of the tails is not finite and above 0");
    }
  }
  return Status();
}

Status ValidateQuery(const DecodeBatchArgs& args) {
  const auto is_allowed = [](ElementType type) {
    return type == ElementType::kBf16 || type == ElementType::kFp32;
  };
  if (!is_allowed(args.query_type) || !is_allowed(args.out_type)) {
    return Status::InvalidArgument("query and out must be BF16 or FP32");
  }
  if (args.query == nullptr || args.out == nullptr || !IsAligned(args.query)) {
    return Status::InvalidArgument(
        "query or out is missing, or query not at a multiple of 16 bytes");
  }
  if (!IsAligned(args.out, ElementBytes(args.out_type)) || !IsAligned(args.lse, alignof(float))) {
    return Status::InvalidArgument("out or lse is not aligned");
  }
  if (args.query_head_count == 0 || args.query_head_count % args.block_shape.kv_head_count != 0 ||
      args.query_head_count > 65536) {
    return Status::InvalidArgument("query_head_count is not a multiple of kv_head_count");
  }
  if (args.query_len == 0 || args.query_len > kQueryLenMax) {
    return Status::InvalidArgument("query_len must be in [1, 8]");
  }
  if (!std::isfinite(args.softmax_scale)) {
    return Status::InvalidArgument("softmax_scale is not finite");
  }
  if (!std::isfinite(args.soft_cap) || args.soft_cap < 0.0F) {
    return Status::InvalidArgument("soft_cap is negative or not finite");
  }
  return Status();
}

Status Validate(const DecodeBatchArgs& args) {
  const BlockShape& shape = args.block_shape;
  if (const Status status = kernels::Validate(shape); !status.ok()) return status;
  if (const Status status = kernels::Validate(args.layer_format); !status.ok()) return status;
  const auto dims = {64U, 96U, 128U, 192U, 256U};
  if (std::find(dims.begin(), dims.end(), shape.head_dim) == dims.end()) {
    return Status::InvalidArgument("head_dim must be 64, 96, 128, 192 or 256");
  }
  if (args.g_v == nullptr || !IsAligned(args.g_v, alignof(float))) {
    return Status::InvalidArgument("no global scales, or not aligned");
  }
  if (!IsAligned(args.k_smooth) || !IsAligned(args.k_mean)) {
    return Status::InvalidArgument("a transform does not begin at a multiple of 16 bytes");
  }
  if (const Status status = ValidateTails(args.tails, shape); !status.ok()) return status;
  return ValidateBatch(args);
}

// The largest configuration that fits: bytes in flight are what keeps memory busy.
Status ChooseRings(const DeviceLimits& limits, uint32_t head_dim, uint32_t batch_size,
                   DecodePlan* plan) {
  struct Rings {
    uint32_t warps;
    uint32_t stages;
  };
  for (const Rings rings :
       {Rings{kDecodeWarpsMax, 3}, Rings{kDecodeWarpsMax, 2}, Rings{kDecodeWarpsMin, 2}}) {
    // Without bulk copies the kernel waits for all but the last copy: two stages.
    if (rings.stages == 3 && !limits.copies_bulk) continue;
    const DecodeShared shared =
        SharedLayout(rings.stages * StageBytes(head_dim), rings.warps, rings.stages, batch_size);
    if (shared.bytes > limits.shared_bytes_per_block) continue;
    plan->warp_count = rings.warps;
    plan->params.stage_count = rings.stages;
    plan->params.shared = shared;
    plan->shared_bytes = shared.bytes;
    return Status();
  }
  return Status::InvalidArgument("the device has too little shared memory for decode");
}

void LayOut(const DecodeBatchArgs& args, DecodePlan* plan) {
  const BlockShape& shape = args.block_shape;
  const TileShape tile = TileOf(shape);
  DecodeParams& params = plan->params;
  const uint32_t rows = args.query_head_count / shape.kv_head_count * args.query_len;
  plan->head_dim = shape.head_dim;
  plan->tiles_n = rows <= 8 || DecodeRowsMax(shape.head_dim) == 8 ? 1 : 2;
  // The 8 bits of BF16 fit in FP16; FP32 does not, nor does a product with k_smooth.
  const bool is_short = args.query_type == ElementType::kBf16 && args.k_smooth == nullptr;
  plan->query_parts = is_short ? 1 : 2;
  LayOutBatch(args, 8 * plan->tiles_n, &params);
  params.split_heads = shape.kv_head_count;
  params.layer_offset = args.layer_offset;
  params.tile_bytes = TileBytes(tile, args.layer_format);
  params.v_side_offset = SideBytes(tile, args.layer_format.k);
  params.k_format = args.layer_format.k;
  params.v_format = args.layer_format.v;
  params.g_v = {args.g_v};
  params.k_smooth = {args.k_smooth};
  params.k_mean = {args.k_mean};

  params.tail_k = {reinterpret_cast<const uint64_t*>(args.tails.k)};
  params.tail_v = {reinterpret_cast<const uint64_t*>(args.tails.v)};
  params.tail_token_stride = args.tails.token_stride;
  params.tail_head_stride = args.tails.head_stride;
  const bool fp8 = args.tails.type == ElementType::kFp8E4m3;
  params.tail_format = fp8 ? SideFormat::kFp8 : SideFormat::kBf16;
  params.tail_k_scale = fp8 ? args.tails.k_scale : 1.0F;
  params.tail_v_scale = fp8 ? args.tails.v_scale : 1.0F;
}

DecodeWorkspace WorkspaceOf(const DecodePlan& plan, uint32_t head_dim) {
  return {plan.params, PartialFloats(head_dim, 8 * plan.tiles_n)};
}

}  // namespace

Status ValidateBatch(const DecodeBatchArgs& args) {
  if (args.batch_size == 0 || args.batch_size > kDecodeBatchMax) {
    return Status::InvalidArgument("batch_size must be in [1, 1024]");
  }
  if (args.sealed_token_counts == nullptr ||
      (args.table_stride != 0 && args.block_table == nullptr)) {
    return Status::InvalidArgument("no block table or no sealed_token_counts");
  }
  if (uint64_t{args.table_stride} * args.block_shape.block_tokens > UINT32_MAX / 2) {
    return Status::InvalidArgument("a row of the block table has more than 2^31 tokens");
  }
  if (args.layer_offset % 16 != 0 || args.layer_offset > kReachBytesMax) {
    return Status::InvalidArgument("layer_offset is not a multiple of 16 or too large");
  }
  if (args.g_k == nullptr || !IsAligned(args.g_k, alignof(float))) {
    return Status::InvalidArgument("no global scales, or not aligned");
  }
  if (!IsAligned(args.block_table, alignof(void*)) ||
      !IsAligned(args.sealed_token_counts, alignof(uint32_t)) ||
      !IsAligned(args.tails.token_counts, alignof(uint32_t)) ||
      !IsAligned(args.sinks, alignof(float)) || !IsAligned(args.damage_count, alignof(uint32_t))) {
    return Status::InvalidArgument("a table, counts or sinks are not aligned");
  }
  return ValidateQuery(args);
}

void LayOutBatch(const DecodeBatchArgs& args, uint32_t pass_rows, DecodeParams* params) {
  params->batch_size = args.batch_size;
  params->kv_head_count = args.block_shape.kv_head_count;
  params->group_heads = args.query_head_count / args.block_shape.kv_head_count;
  params->query_len = args.query_len;
  params->pass_count = (params->group_heads * args.query_len + pass_rows - 1) / pass_rows;
  params->block_tokens = args.block_shape.block_tokens;

  params->block_table = {reinterpret_cast<const uint64_t*>(args.block_table)};
  params->table_stride = args.table_stride;
  params->sealed_token_counts = {args.sealed_token_counts};
  params->g_k = {args.g_k};
  params->tail_token_counts = {args.tails.token_counts};

  params->query = {static_cast<const std::byte*>(args.query)};
  params->query_is_bf16 = args.query_type == ElementType::kBf16;
  params->softmax_scale = args.softmax_scale;
  params->soft_cap = args.soft_cap;
  // Finite, also of the least caps: a score of 0 times infinity would be NaN.
  params->soft_cap_inverse =
      args.soft_cap == 0.0F ? 0.0F
                            : std::min(1.0F / args.soft_cap, std::numeric_limits<float>::max());
  params->window = args.window;
  params->sinks = {args.sinks};
  params->out = {static_cast<std::byte*>(args.out)};
  params->out_is_bf16 = args.out_type == ElementType::kBf16;
  params->lse = {args.lse};
  params->damage_count = {args.damage_count};
}

DecodeWorkspace::DecodeWorkspace(const DecodeParams& params, uint32_t partial_floats) {
  const uint64_t streams = uint64_t{params.batch_size} * params.kv_head_count * params.pass_count;
  const auto round_up = [](uint64_t size) {
    return (size + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  };
  split_slots = SplitCountMax(params.table_stride * params.block_tokens, params.split_heads) + 1;
  if (streams * split_slots > INT32_MAX) return;
  arrival_bytes = round_up(streams * sizeof(uint32_t));
  bytes = arrival_bytes + round_up(streams * split_slots * partial_floats * sizeof(float));
}

Status DecodeWorkspace::Place(void* memory, DecodeParams* params) const {
  if (bytes == 0) {
    return Status::InvalidArgument("more splits of sequences, heads and queries than 2^31");
  }
  if (memory == nullptr || !IsAligned(memory, kWorkspaceAlignment)) {
    return Status::InvalidArgument("workspace is missing or not at a multiple of 256 bytes");
  }
  auto* begin = static_cast<std::byte*>(memory);
  params->split_slots = split_slots;
  params->arrivals = {reinterpret_cast<uint32_t*>(begin)};
  params->partials = {reinterpret_cast<float*>(begin + arrival_bytes)};
  return Status();
}

Status PlanDecode(const DecodeBatchArgs& args, const DeviceLimits& limits, DecodePlan* plan) {
  if (const Status status = Validate(args); !status.ok()) return status;
  const uint32_t head_dim = args.block_shape.head_dim;
  LayOut(args, plan);
  if (const Status status = ChooseRings(limits, head_dim, args.batch_size, plan); !status.ok()) {
    return status;
  }
  const Status status = WorkspaceOf(*plan, head_dim).Place(args.workspace, &plan->params);
  if (!status.ok()) return status;
  plan->grid_size = limits.multiprocessor_count;
  return Status();
}

uint64_t DecodeBatchWorkspaceBytes(const DecodeBatchArgs& args) {
  if (!Validate(args).ok()) return 0;
  DecodePlan plan;
  LayOut(args, &plan);
  return WorkspaceOf(plan, args.block_shape.head_dim).bytes;
}

}  // namespace kvtier::kernels::cuda
