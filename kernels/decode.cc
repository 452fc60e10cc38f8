// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/cpu/kernel_table.h"
#include "kernels/decode_splits.h"
#include "kernels/nvfp4.h"
#include "kernels/rows.h"

namespace kvtier::kernels {
namespace {

// A split is long enough that merging costs nothing, and its tiles stay in a core's L2 cache while
// several passes of query rows read them.
constexpr uint64_t kSplitTokensMin = 2048;
constexpr uint64_t kSplitCountMax = 256;

Status ValidateQuery(const DecodeArgs& args) {
  const BlockShape& shape = args.block_shape;
  if (args.query_head_count == 0 || args.query_head_count % shape.kv_head_count != 0) {
    return Status::InvalidArgument("query_head_count is not a multiple of kv_head_count");
  }
  if (!std::isfinite(args.softmax_scale)) {
    return Status::InvalidArgument("softmax_scale is not finite");
  }
  if (!std::isfinite(args.soft_cap) || args.soft_cap < 0.0F) {
    return Status::InvalidArgument("soft_cap is negative or not finite");
  }
  const uint64_t row_count = uint64_t{args.query_len} * args.query_head_count;
  if (row_count > UINT32_MAX) return Status::InvalidArgument("too many query rows");
  if (args.out.size() != row_count * shape.head_dim || args.lse.size() != row_count) {
    return Status::InvalidArgument("out or lse does not have the exact size");
  }
  return ValidateQueryRows(args.query_type, args.query, row_count, shape.head_dim);
}

Positions PositionsOf(const DecodeArgs& args) {
  return {.first_token = args.first_token,
          .token_count = args.sealed_token_count + args.tail.token_count,
          .context_token_count = args.context_token_count,
          .query_len = args.query_len,
          .window = args.window};
}

LayerFormat FormatOf(const DecodeArgs& args) {
  return args.layer_formats.empty() ? LayerFormat{} : args.layer_formats[args.layer_idx];
}

Status ValidateScales(SideFormat format, std::span<const float> scales) {
  for (const float scale : scales) {
    if (format == SideFormat::kNvfp4 && !IsValidGlobalScale(scale)) {
      return Status::InvalidArgument("a global scale is not a power of two in [2^-100, 2^100]");
    }
    if (format == SideFormat::kFp8 && (!std::isfinite(scale) || scale <= 0.0F)) {
      return Status::InvalidArgument("a scale of an FP8 side is not finite and above 0");
    }
  }
  return Status();
}

Status ValidateVectors(const DecodeArgs& args) {
  const BlockShape& shape = args.block_shape;
  if (args.g_k.size() != shape.kv_head_count || args.g_v.size() != shape.kv_head_count) {
    return Status::InvalidArgument("g_k and g_v need one global scale per kv head");
  }
  if (!args.layer_formats.empty() && args.layer_formats.size() != shape.layer_count) {
    return Status::InvalidArgument("layer_formats needs one entry per layer");
  }
  for (const LayerFormat& format : args.layer_formats) {
    if (const Status status = Validate(format); !status.ok()) return status;
  }
  const LayerFormat format = FormatOf(args);
  for (const auto& [side, scales] : {std::pair(format.k, args.g_k), {format.v, args.g_v}}) {
    if (const Status status = ValidateScales(side, scales); !status.ok()) return status;
  }
  const uint64_t channel_count = uint64_t{shape.kv_head_count} * shape.head_dim;
  for (const auto& vector : {args.k_smooth, args.k_mean}) {
    if (vector.empty()) continue;
    if (vector.size() != channel_count || !AllFinite(vector.data(), vector.size())) {
      return Status::InvalidArgument("k_smooth and k_mean need a finite value per channel");
    }
  }
  if (!args.sinks.empty() && (args.sinks.size() != args.query_head_count ||
                              !AllFinite(args.sinks.data(), args.sinks.size()))) {
    return Status::InvalidArgument("sinks need a finite value per query head");
  }
  return Status();
}

Status ValidateTail(const DecodeTail& tail, const BlockShape& shape) {
  if (tail.token_count == 0) return Status();
  if (tail.k == nullptr || tail.v == nullptr) return Status::InvalidArgument("tail has no data");
  if (tail.type != ElementType::kBf16 && tail.type != ElementType::kFp8E4m3) {
    return Status::InvalidArgument("tail must be BF16 or FP8");
  }
  if (tail.token_stride < shape.head_dim ||
      (shape.kv_head_count > 1 && tail.head_stride < shape.head_dim)) {
    return Status::InvalidArgument("a stride of the tail is less than head_dim");
  }
  if (!IsWithinReach(tail.token_count, tail.token_stride) ||
      !IsWithinReach(shape.kv_head_count, tail.head_stride)) {
    return Status::InvalidArgument("a stride of the tail is too large");
  }
  for (const float scale : {tail.k_scale, tail.v_scale}) {
    if (!std::isfinite(scale) || scale <= 0.0F) {
      return Status::InvalidArgument("a scale of the tail is not finite and above 0");
    }
  }
  return Status();
}

Status ValidateArgs(const DecodeArgs& args) {
  if (const Status status = Validate(args.block_shape); !status.ok()) return status;
  if (args.layer_idx >= args.block_shape.layer_count) {
    return Status::InvalidArgument("layer_idx is not below layer_count");
  }
  if (AnyIsNull(args.block_table, args.g_k, args.g_v, args.out, args.lse, args.sinks, args.k_smooth,
                args.k_mean, args.layer_formats)) {
    return NullSpan();
  }
  if (!IsaIsAvailable(args.isa)) {
    return Status::InvalidArgument("the instruction set is not available");
  }
  if (const Status status = ValidatePositions(PositionsOf(args)); !status.ok()) return status;
  if (const Status status = ValidateQuery(args); !status.ok()) return status;
  if (const Status status = ValidateVectors(args); !status.ok()) return status;
  if (const Status status = ValidateTail(args.tail, args.block_shape); !status.ok()) return status;
  return ValidateBlocks(args.block_table, args.sealed_token_count, args.block_shape.block_tokens);
}

// The call as work on splits.
struct Call {
  explicit Call(const DecodeArgs& decode_args)
      : args(decode_args),
        plan(args.sealed_token_count, args.tail.token_count, kSplitTokensMin, kSplitCountMax),
        group_heads(args.query_head_count / args.block_shape.kv_head_count) {}

  // Query rows of a kv head: [query_len][group heads].
  uint32_t rows() const { return args.query_len * group_heads; }

  // Row `row` of a kv head among all rows of the call.
  uint64_t ResultRow(uint32_t kv_head_idx, uint32_t row) const {
    return uint64_t{row / group_heads} * args.query_head_count +
           uint64_t{kv_head_idx} * group_heads + row % group_heads;
  }

  const DecodeArgs& args;
  SplitPlan plan;
  uint32_t group_heads;
};

cpu::AttendFormat AttendFormatOf(SideFormat format) {
  switch (format) {
    case SideFormat::kNvfp4:
      return cpu::AttendFormat::kNvfp4;
    case SideFormat::kFp8:
      return cpu::AttendFormat::kFp8;
    case SideFormat::kBf16:
      return cpu::AttendFormat::kBf16;
  }
  return cpu::AttendFormat::kNvfp4;
}

// One split for up to kAttendRowsMax query rows of a kv head.
class SplitPass {
 public:
  SplitPass(const Call& call, uint32_t kv_head_idx, uint32_t split_idx, uint32_t first_row)
      : args_(call.args),
        kv_head_idx_(kv_head_idx),
        is_tail_(call.plan.IsTail(split_idx)),
        first_token_(call.plan.first_token(split_idx)),
        token_count_(call.plan.token_count(split_idx)),
        row_count_(std::min(cpu::kAttendRowsMax, call.rows() - first_row)) {
    const Positions positions = PositionsOf(args_);
    for (uint32_t i = 0; i < row_count_; ++i) {
      LoadQuery(call.ResultRow(kv_head_idx, first_row + i), i);
      const Visible visible =
          VisibleTokens(positions, (first_row + i) / call.group_heads, first_token_, token_count_);
      begin_[i] = visible.begin;
      end_[i] = visible.end;
    }
  }

  // Writes out [rows][head_dim] and lse [rows]. False: damaged tile.
  bool Run(float* out, float* lse) const {
    const cpu::KernelTable* kernels = cpu::KernelsOf(args_.isa);
    const uint32_t head_dim = args_.block_shape.head_dim;
    const cpu::AttendQuery query{.query = query_,
                                 .is_bf16 = is_bf16_,
                                 .row_count = row_count_,
                                 .head_dim = head_dim,
                                 .value_dim = head_dim,
                                 .scale = args_.softmax_scale,
                                 .soft_cap = args_.soft_cap,
                                 .bias = bias_,
                                 .begin = begin_,
                                 .end = end_,
                                 .out = out,
                                 .lse = lse};
    if (!is_tail_) return kernels->attend_tiles(query, Tiles());
    const DecodeTail& tail = args_.tail;
    const auto side = [&](const void* data, float scale) {
      const uint64_t bytes = ElementBytes(tail.type);
      const bool fp8 = tail.type == ElementType::kFp8E4m3;
      return cpu::AttendSide{
          .format = fp8 ? cpu::AttendFormat::kFp8 : cpu::AttendFormat::kBf16,
          .data = static_cast<const std::byte*>(data) + kv_head_idx_ * tail.head_stride * bytes,
          .stride_bytes = tail.token_stride * bytes,
          .multiplier = fp8 ? scale : 1.0F};
    };
    kernels->attend_rows(query, {.token_count = token_count_,
                                 .k = side(tail.k, tail.k_scale),
                                 .v = side(tail.v, tail.v_scale)});
    return true;
  }

 private:
  cpu::AttendTiles Tiles() const {
    const BlockShape& shape = args_.block_shape;
    const TileShape tile = TileOf(shape);
    const LayerFormat format = FormatOf(args_);
    const auto side = [&](SideFormat side_format, uint64_t offset, float scale) {
      return cpu::TileSide{.format = AttendFormatOf(side_format),
                           .data_offset = offset,
                           .scale_offset = offset + DataBytes(tile),
                           .multiplier = side_format == SideFormat::kBf16 ? 1.0F : scale};
    };
    return {.blocks = args_.block_table.data() + first_token_ / shape.block_tokens,
            .block_count = token_count_ / shape.block_tokens,
            .tile_offset = LayerOffset(shape, args_.layer_formats, args_.layer_idx) +
                           kv_head_idx_ * TileBytes(tile, format),
            .block_tokens = shape.block_tokens,
            .k = side(format.k, 0, args_.g_k[kv_head_idx_]),
            .v = side(format.v, SideBytes(tile, format.k), args_.g_v[kv_head_idx_])};
  }

  void LoadQuery(uint64_t call_row, uint32_t i) {
    const uint32_t head_dim = args_.block_shape.head_dim;
    float* row = query_ + uint64_t{i} * head_dim;
    LoadRow({.type = args_.query_type, .data = args_.query, .token_stride = head_dim}, call_row,
            head_dim, row);
    bias_[i] = 0.0F;
    const uint64_t channels = uint64_t{kv_head_idx_} * head_dim;
    if (!is_tail_ && !args_.k_mean.empty()) {
      double dot = 0;
      for (uint32_t d = 0; d < head_dim; ++d) {
        dot += static_cast<double>(row[d]) * static_cast<double>(args_.k_mean[channels + d]);
      }
      bias_[i] = static_cast<float>(dot * static_cast<double>(args_.softmax_scale));
    }
    if (!is_tail_ && !args_.k_smooth.empty()) {
      for (uint32_t d = 0; d < head_dim; ++d) row[d] *= args_.k_smooth[channels + d];
    }
    is_bf16_ = is_bf16_ && std::all_of(row, row + head_dim,
                                       [](float x) { return Bf16ToFloat(FloatToBf16(x)) == x; });
  }

  const DecodeArgs& args_;
  uint32_t kv_head_idx_;
  bool is_tail_;
  uint64_t first_token_;  // Of the split, relative to the call.
  uint64_t token_count_;
  uint32_t row_count_;
  bool is_bf16_ = true;
  float query_[cpu::kAttendRowsMax * kHeadDimMax];
  float bias_[cpu::kAttendRowsMax];
  uint64_t begin_[cpu::kAttendRowsMax];
  uint64_t end_[cpu::kAttendRowsMax];
};

SplitWork WorkOf(const Call& call) {
  return {.group_count = call.args.block_shape.kv_head_count,
          .split_count = call.plan.split_count(),
          .row_count = call.rows(),
          .value_dim = call.args.block_shape.head_dim,
          .run =
              [](const void* self, uint32_t kv_head_idx, uint32_t split_idx, uint32_t first_row,
                 float* out, float* lse) {
                const auto& of = *static_cast<const Call*>(self);
                return SplitPass(of, kv_head_idx, split_idx, first_row).Run(out, lse);
              },
          .result_row =
              [](const void* self, uint32_t kv_head_idx, uint32_t row) {
                return static_cast<const Call*>(self)->ResultRow(kv_head_idx, row);
              },
          .self = &call};
}

}  // namespace

Status Decode(const DecodeArgs& args) {
  if (const Status status = ValidateArgs(args); !status.ok()) return status;
  const Call call(args);
  const SplitWork work = WorkOf(call);
  if (args.executor != nullptr) {
    const Status status = ValidateExecutor(work, *args.executor, args.workspace);
    if (!status.ok()) return status;
  }
  return RunSplits(work, args.executor, args.workspace, args.sinks, args.out, args.lse);
}

uint64_t DecodeWorkspaceBytes(const DecodeArgs& args) {
  if (!ValidateArgs(args).ok()) return 0;
  return SplitWorkspaceBytes(WorkOf(Call(args)));
}

}  // namespace kvtier::kernels
