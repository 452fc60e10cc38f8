// SPDX-License-Identifier: Apache-2.0
#include "kernels/gather.h"

#include <algorithm>

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/row_type.h"
#include "kernels/nvfp4.h"
#include "kernels/rows.h"

namespace kvtier::kernels {
namespace {

bool AllScalesValid(const std::byte* scales, uint64_t count) {
  // The largest byte decides; a maximum vectorizes where an early exit would not.
  uint8_t largest = 0;
  for (uint64_t i = 0; i < count; ++i) {
    largest = std::max(largest, std::to_integer<uint8_t>(scales[i]));
  }
  return IsValidScaleByte(largest);
}

}  // namespace

Status ValidateTile(const TileShape& shape, std::span<const std::byte> tile) {
  if (const Status status = Validate(shape); !status.ok()) return status;
  if (tile.size() != TileBytes(shape)) {
    return Status::InvalidArgument("tile is not TileBytes long");
  }
  if (!AllScalesValid(tile.data() + KScaleOffset(shape), ScaleBytes(shape))) {
    return Status::DataLoss("a K scale byte is above 0x7E");
  }
  if (!AllScalesValid(tile.data() + VScaleOffset(shape), ScaleBytes(shape))) {
    return Status::DataLoss("a V scale byte is above 0x7E");
  }
  return Status();
}

Status GatherTile(const TileShape& shape, std::span<const std::byte> tile,
                  const GatherOptions& options, const MutableRows& k, const MutableRows& v) {
  if (const Status status = Validate(shape); !status.ok()) return status;
  for (const MutableRows* target : {&k, &v}) {
    const Status status = ValidateRows(*target, shape.block_tokens, shape.head_dim);
    if (!status.ok()) return status;
  }
  if (!IsValidGlobalScale(options.g_k) || !IsValidGlobalScale(options.g_v)) {
    return Status::InvalidArgument("a global scale is not a power of two in [2^-100, 2^100]");
  }
  if (!IsaIsAvailable(options.isa)) {
    return Status::InvalidArgument("the instruction set is not available");
  }
  if (const Status status = ValidateTile(shape, tile); !status.ok()) return status;
  const auto gather = [&](const MutableRows& target, float g, cpu::SideOrder order,
                          uint64_t data_offset, uint64_t scale_offset) {
    std::byte* rows[kBlockTokensMax];
    for (uint32_t t = 0; t < shape.block_tokens; ++t) {
      rows[t] = RowData(target, t);
    }
    cpu::KernelsOf(options.isa)
        ->gather_side({.codes = tile.data() + data_offset,
                       .scales = tile.data() + scale_offset,
                       .order = order,
                       .block_tokens = shape.block_tokens,
                       .head_dim = shape.head_dim,
                       .g = g,
                       .rows = rows,
                       .type = cpu::RowTypeOf(target.type),
                       .inverse_row_scale = 1.0F / target.scale,
                       .streaming = options.streaming});
  };
  gather(k, options.g_k, cpu::SideOrder::kK, KDataOffset(shape), KScaleOffset(shape));
  gather(v, options.g_v, cpu::SideOrder::kV, VDataOffset(shape), VScaleOffset(shape));
  return Status();
}

Status GatherTile(const TileShape& shape, std::span<const std::byte> tile, float g_k, float g_v,
                  const MutableRows& k, const MutableRows& v) {
  for (const MutableRows* target : {&k, &v}) {
    if (target->type != ElementType::kBf16 && target->type != ElementType::kFp32) {
      return Status::InvalidArgument("a target must be BF16 or FP32");
    }
  }
  return GatherTile(shape, tile, {.g_k = g_k, .g_v = g_v}, k, v);
}

}  // namespace kvtier::kernels
