// SPDX-License-Identifier: Apache-2.0
#include "kernels/workspace.h"

#include <atomic>
#include <limits>

#include "kernels/decode_splits.h"
#include "kernels/gather.h"
#include "kernels/rows.h"

namespace kvtier::kernels {
namespace {

constexpr uint64_t kTokensMax = std::numeric_limits<uint32_t>::max();

LayerFormat FormatOf(const GatherPrefixArgs& args) {
  return args.layer_formats.empty() ? LayerFormat{} : args.layer_formats[args.layer_idx];
}

// Rows of K (or V) of a kv head from `first_token` on.
MutableRows RowsOf(const WorkspaceRows& target, bool is_v, uint32_t kv_head_idx,
                   uint64_t first_token) {
  MutableRows rows{.type = target.type,
                   .data = is_v ? target.v : target.k,
                   .token_stride = target.token_stride,
                   .scale = is_v ? target.v_scale : target.k_scale,
                   .paging = target.paging};
  uint64_t elements = kv_head_idx * target.head_stride;
  if (rows.paging.page_tokens != 0) {
    rows.paging.first_slot += first_token;
  } else {
    elements += first_token * target.token_stride;
  }
  rows.data = static_cast<std::byte*>(rows.data) + elements * ElementBytes(target.type);
  return rows;
}

std::span<const float> ChannelsOf(const GatherPrefixArgs& args, std::span<const float> vector,
                                  uint32_t kv_head_idx) {
  if (vector.empty()) return {};
  const uint64_t head_dim = args.block_shape.head_dim;
  return vector.subspan(kv_head_idx * head_dim, head_dim);
}

Status ValidateTarget(const GatherPrefixArgs& args) {
  const WorkspaceRows& target = args.target;
  const BlockShape& shape = args.block_shape;
  if (args.sealed_token_count > kTokensMax) {
    return Status::InvalidArgument("sealed_token_count is above 2^32 - 1");
  }
  const auto token_count = static_cast<uint32_t>(args.sealed_token_count);
  for (const bool is_v : {false, true}) {
    // Before any pointer is moved: head 0 stands for all.
    const MutableRows rows{.type = target.type,
                           .data = is_v ? target.v : target.k,
                           .token_stride = target.token_stride,
                           .scale = is_v ? target.v_scale : target.k_scale,
                           .paging = target.paging};
    if (const Status status = ValidateRows(rows, token_count, shape.head_dim); !status.ok()) {
      return status;
    }
  }
  if (shape.kv_head_count > 1 && target.head_stride < shape.head_dim) {
    return Status::InvalidArgument("head_stride is less than head_dim");
  }
  if (!IsWithinReach(shape.kv_head_count, target.head_stride)) {
    return Status::InvalidArgument("a head_stride is too large");
  }
  return Status();
}

Status ValidateArgs(const GatherPrefixArgs& args) {
  const BlockShape& shape = args.block_shape;
  if (const Status status = Validate(shape); !status.ok()) return status;
  if (args.layer_idx >= shape.layer_count) {
    return Status::InvalidArgument("layer_idx is not below layer_count");
  }
  if (AnyIsNull(args.block_table, args.g_k, args.g_v, args.layer_formats, args.k_mean,
                args.k_smooth)) {
    return NullSpan();
  }
  if (!args.layer_formats.empty() && args.layer_formats.size() != shape.layer_count) {
    return Status::InvalidArgument("layer_formats needs one entry per layer");
  }
  for (const LayerFormat& format : args.layer_formats) {
    if (const Status status = Validate(format); !status.ok()) return status;
  }
  if (args.g_k.size() != shape.kv_head_count || args.g_v.size() != shape.kv_head_count) {
    return Status::InvalidArgument("g_k and g_v need one scale per kv head");
  }
  for (const auto& vector : {args.k_mean, args.k_smooth}) {
    if (!vector.empty() && vector.size() != uint64_t{shape.kv_head_count} * shape.head_dim) {
      return Status::InvalidArgument("k_mean and k_smooth need a value per channel");
    }
  }
  const LayerFormat format = FormatOf(args);
  for (uint32_t head = 0; head < shape.kv_head_count; ++head) {
    for (const Status& status :
         {ValidateSideScale(format.k, args.g_k[head]), ValidateSideScale(format.v, args.g_v[head]),
          ValidateTransform(ChannelsOf(args, args.k_mean, head),
                            ChannelsOf(args, args.k_smooth, head), shape.head_dim)}) {
      if (!status.ok()) return status;
    }
  }
  if (!IsaIsAvailable(args.isa)) {
    return Status::InvalidArgument("the instruction set is not available");
  }
  if (args.executor != nullptr && args.executor->run == nullptr) {
    return Status::InvalidArgument("executor has no run");
  }
  if (const Status status = ValidateTarget(args); !status.ok()) return status;
  return ValidateBlocks(args.block_table, args.sealed_token_count, shape.block_tokens);
}

class PrefixGather {
 public:
  explicit PrefixGather(const GatherPrefixArgs& args)
      : args_(args),
        format_(FormatOf(args)),
        tile_bytes_(TileBytes(TileOf(args.block_shape), format_)),
        layer_offset_(LayerOffset(args.block_shape, args.layer_formats, args.layer_idx)) {}

  // All heads of a block. False: damaged tile.
  bool GatherBlock(uint32_t block_idx) const {
    const uint64_t first_token = uint64_t{block_idx} * args_.block_shape.block_tokens;
    for (uint32_t head = 0; head < args_.block_shape.kv_head_count; ++head) {
      const std::span tile(args_.block_table[block_idx] + layer_offset_ + head * tile_bytes_,
                           tile_bytes_);
      const GatherOptions options{.g_k = args_.g_k[head],
                                  .g_v = args_.g_v[head],
                                  .streaming = args_.streaming,
                                  .isa = args_.isa,
                                  .k_mean = ChannelsOf(args_, args_.k_mean, head),
                                  .k_smooth = ChannelsOf(args_, args_.k_smooth, head)};
      const Status status = GatherTile(TileOf(args_.block_shape), format_, tile, options,
                                       RowsOf(args_.target, false, head, first_token),
                                       RowsOf(args_.target, true, head, first_token));
      if (!status.ok()) return false;  // Arguments are valid: the tile is not.
    }
    return true;
  }

  bool Run() {
    const auto block_count =
        static_cast<uint32_t>(args_.sealed_token_count / args_.block_shape.block_tokens);
    if (args_.executor == nullptr) {
      for (uint32_t i = 0; i < block_count; ++i) {
        if (!GatherBlock(i)) return false;
      }
      return true;
    }
    args_.executor->run(
        args_.executor->self, block_count,
        [](void* self, uint32_t block_idx) {
          auto* gather = static_cast<PrefixGather*>(self);
          if (!gather->GatherBlock(block_idx)) {
            gather->damaged_.store(true, std::memory_order_relaxed);
          }
        },
        this);
    // The executor's return orders the tasks' stores before this load.
    return !damaged_.load(std::memory_order_relaxed);
  }

 private:
  const GatherPrefixArgs& args_;
  LayerFormat format_;
  uint64_t tile_bytes_;
  uint64_t layer_offset_;
  std::atomic<bool> damaged_{false};
};

}  // namespace

uint64_t WorkspaceBytes(const BlockShape& shape, uint64_t token_count, ElementType type) {
  if (!Validate(shape).ok() || token_count > kTokensMax) return 0;
  return 2 * token_count * shape.kv_head_count * shape.head_dim * ElementBytes(type);
}

WorkspaceRows DenseWorkspace(const BlockShape& shape, uint64_t token_capacity, ElementType type,
                             void* data) {
  const uint64_t token_stride = uint64_t{shape.kv_head_count} * shape.head_dim;
  auto* bytes = static_cast<std::byte*>(data);
  return {.type = type,
          .k = bytes,
          .v = bytes + token_capacity * token_stride * ElementBytes(type),
          .token_stride = token_stride,
          .head_stride = shape.head_dim};
}

Status GatherPrefix(const GatherPrefixArgs& args) {
  if (const Status status = ValidateArgs(args); !status.ok()) return status;
  if (!PrefixGather(args).Run()) {
    return Status::DataLoss("a tile holds a byte that is never written");
  }
  return Status();
}

}  // namespace kvtier::kernels
