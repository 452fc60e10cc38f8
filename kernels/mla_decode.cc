// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "kernels/cpu/kernel_table.h"
#include "kernels/decode_splits.h"
#include "kernels/mla.h"
#include "kernels/nvfp4.h"
#include "kernels/rows.h"

namespace kvtier::kernels {
namespace {

constexpr uint32_t kKeyDim = kMlaLatentDim + kMlaRopeDim;
// 416 KiB of tiles: they stay in a core's L2 cache while passes of 16 query rows read them. Fewer
// and longer splits than Decode has, because a row of results is 2 KiB.
constexpr uint64_t kSplitTokensMin = 1024;
constexpr uint64_t kSplitCountMax = 64;

Positions PositionsOf(const DecodeMlaArgs& args) {
  return {.first_token = args.first_token,
          .token_count = args.sealed_token_count + args.tail.token_count,
          .context_token_count = args.context_token_count,
          .query_len = args.query_len,
          .window = args.window};
}

Status ValidateTail(const MlaTail& tail) {
  if (tail.token_count == 0) return Status();
  if (tail.latent == nullptr || tail.rope == nullptr) {
    return Status::InvalidArgument("tail has no data");
  }
  for (const ElementType type : {tail.latent_type, tail.rope_type}) {
    if (type != ElementType::kBf16 && type != ElementType::kFp8E4m3) {
      return Status::InvalidArgument("tail must be BF16 or FP8");
    }
  }
  if (tail.latent_stride < kMlaLatentDim || tail.rope_stride < kMlaRopeDim) {
    return Status::InvalidArgument("a stride of the tail is less than its dims");
  }
  if (!IsWithinReach(tail.token_count, tail.latent_stride) ||
      !IsWithinReach(tail.token_count, tail.rope_stride)) {
    return Status::InvalidArgument("a stride of the tail is too large");
  }
  for (const float scale : {tail.latent_scale, tail.rope_scale}) {
    if (!std::isfinite(scale) || scale <= 0.0F) {
      return Status::InvalidArgument("a scale of the tail is not finite and above 0");
    }
  }
  return Status();
}

Status ValidateArgs(const DecodeMlaArgs& args) {
  if (const Status status = Validate(args.block_shape); !status.ok()) return status;
  if (args.layer_idx >= args.block_shape.layer_count) {
    return Status::InvalidArgument("layer_idx is not below layer_count");
  }
  if (AnyIsNull(args.block_table, args.out, args.lse, args.sinks)) return NullSpan();
  if (!IsaIsAvailable(args.isa)) {
    return Status::InvalidArgument("the instruction set is not available");
  }
  if (args.query_head_count == 0) return Status::InvalidArgument("query_head_count is zero");
  if (!std::isfinite(args.softmax_scale)) {
    return Status::InvalidArgument("softmax_scale is not finite");
  }
  if (!std::isfinite(args.soft_cap) || args.soft_cap < 0.0F) {
    return Status::InvalidArgument("soft_cap is negative or not finite");
  }
  if (!IsValidGlobalScale(args.g)) {
    return Status::InvalidArgument("the global scale is not a power of two in [2^-100, 2^100]");
  }
  if (!args.sinks.empty() && (args.sinks.size() != args.query_head_count ||
                              !AllFinite(args.sinks.data(), args.sinks.size()))) {
    return Status::InvalidArgument("sinks need a finite value per query head");
  }
  if (const Status status = ValidatePositions(PositionsOf(args)); !status.ok()) return status;
  const uint64_t row_count = uint64_t{args.query_len} * args.query_head_count;
  if (row_count > UINT32_MAX) return Status::InvalidArgument("too many query rows");
  if (args.out.size() != row_count * kMlaLatentDim || args.lse.size() != row_count) {
    return Status::InvalidArgument("out or lse does not have the exact size");
  }
  if (const Status status = ValidateTail(args.tail); !status.ok()) return status;
  const Status status =
      ValidateBlocks(args.block_table, args.sealed_token_count, args.block_shape.tile.block_tokens);
  if (!status.ok()) return status;
  return ValidateQueryRows(args.query_type, args.query, row_count, kKeyDim);
}

// The call as work on splits: one group, whose rows are those of the call.
struct Call {
  explicit Call(const DecodeMlaArgs& decode_args)
      : args(decode_args),
        plan(args.sealed_token_count, args.tail.token_count, kSplitTokensMin, kSplitCountMax) {}

  uint32_t rows() const { return args.query_len * args.query_head_count; }

  const DecodeMlaArgs& args;
  SplitPlan plan;
};

cpu::AttendSide SideOf(const void* data, ElementType type, uint64_t stride, float scale) {
  const bool fp8 = type == ElementType::kFp8E4m3;
  return {.format = fp8 ? cpu::AttendFormat::kFp8 : cpu::AttendFormat::kBf16,
          .data = static_cast<const std::byte*>(data),
          .stride_bytes = stride * ElementBytes(type),
          .multiplier = fp8 ? scale : 1.0F};
}

// Attends with up to kAttendRowsMax rows from first_row on over a split. False: damaged tile.
bool RunPass(const Call& call, uint32_t split_idx, uint32_t first_row, float* out, float* lse) {
  const DecodeMlaArgs& args = call.args;
  const uint64_t first_token = call.plan.first_token(split_idx);
  const uint64_t token_count = call.plan.token_count(split_idx);
  const uint32_t row_count = std::min(cpu::kAttendRowsMax, call.rows() - first_row);
  const ConstRows rows{.type = args.query_type, .data = args.query, .token_stride = kKeyDim};
  float queries[cpu::kAttendRowsMax * kKeyDim];
  const float bias[cpu::kAttendRowsMax] = {};
  uint64_t begin[cpu::kAttendRowsMax];
  uint64_t end[cpu::kAttendRowsMax];
  for (uint32_t i = 0; i < row_count; ++i) {
    LoadRow(rows, first_row + i, kKeyDim, queries + uint64_t{i} * kKeyDim);
    const Visible visible = VisibleTokens(
        PositionsOf(args), (first_row + i) / args.query_head_count, first_token, token_count);
    begin[i] = visible.begin;
    end[i] = visible.end;
  }
  const bool is_bf16 = std::all_of(queries, queries + row_count * kKeyDim,
                                   [](float x) { return Bf16ToFloat(FloatToBf16(x)) == x; });
  const cpu::AttendQuery query{.query = queries,
                               .is_bf16 = is_bf16,
                               .row_count = row_count,
                               .head_dim = kKeyDim,
                               .value_dim = kMlaLatentDim,
                               .scale = args.softmax_scale,
                               .soft_cap = args.soft_cap,
                               .bias = bias,
                               .begin = begin,
                               .end = end,
                               .out = out,
                               .lse = lse};
  const cpu::KernelTable* kernels = cpu::KernelsOf(args.isa);
  if (!call.plan.IsTail(split_idx)) {
    const uint32_t block_tokens = args.block_shape.tile.block_tokens;
    return kernels->attend_mla_tiles(
        query, {.blocks = args.block_table.data() + first_token / block_tokens,
                .block_count = token_count / block_tokens,
                .tile_offset = MlaTileOffset(args.block_shape, args.layer_idx),
                .block_tokens = block_tokens,
                .g = args.g});
  }
  const MlaTail& tail = args.tail;
  kernels->attend_mla_rows(
      query,
      {.token_count = token_count,
       .latent = SideOf(tail.latent, tail.latent_type, tail.latent_stride, tail.latent_scale),
       .rope = SideOf(tail.rope, tail.rope_type, tail.rope_stride, tail.rope_scale)});
  return true;
}

SplitWork WorkOf(const Call& call) {
  return {.group_count = 1,
          .split_count = call.plan.split_count(),
          .row_count = call.rows(),
          .value_dim = kMlaLatentDim,
          .run =
              [](const void* self, uint32_t, uint32_t split_idx, uint32_t first_row, float* out,
                 float* lse) {
                return RunPass(*static_cast<const Call*>(self), split_idx, first_row, out, lse);
              },
          .result_row = [](const void*, uint32_t, uint32_t row) { return uint64_t{row}; },
          .self = &call};
}

}  // namespace

Status DecodeMla(const DecodeMlaArgs& args) {
  if (const Status status = ValidateArgs(args); !status.ok()) return status;
  const Call call(args);
  const SplitWork work = WorkOf(call);
  if (args.executor != nullptr) {
    const Status status = ValidateExecutor(work, *args.executor, args.workspace);
    if (!status.ok()) return status;
  }
  return RunSplits(work, args.executor, args.workspace, args.sinks, args.out, args.lse);
}

uint64_t DecodeMlaWorkspaceBytes(const DecodeMlaArgs& args) {
  if (!ValidateArgs(args).ok()) return 0;
  return SplitWorkspaceBytes(WorkOf(Call(args)));
}

}  // namespace kvtier::kernels
