// SPDX-License-Identifier: Apache-2.0
#include "kernels/gather.h"

#include <algorithm>

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

Status ValidateTarget(const TileShape& shape, const MutableRows& rows) {
  if (rows.data == nullptr) return Status::InvalidArgument("a target has no data");
  if (rows.type != ElementType::kBf16 && rows.type != ElementType::kFp32) {
    return Status::InvalidArgument("a target must be BF16 or FP32");
  }
  if (rows.token_stride < shape.head_dim) {
    return Status::InvalidArgument("a target's token_stride is less than head_dim");
  }
  return Status();
}

void GatherRows(const TileShape& shape, const std::byte* tile, float g, OffsetFunction code_offset,
                OffsetFunction scale_offset, const MutableRows& rows) {
  for (uint32_t token_idx = 0; token_idx < shape.block_tokens; ++token_idx) {
    for (uint32_t vector_idx = 0; vector_idx < VectorsPerToken(shape); ++vector_idx) {
      float values[kVectorDims];
      Dequantize16(
          reinterpret_cast<const uint8_t*>(tile + code_offset(shape, token_idx, vector_idx)),
          std::to_integer<uint8_t>(tile[scale_offset(shape, token_idx, vector_idx)]), g, values);
      StoreDims(rows, token_idx, vector_idx * kVectorDims, kVectorDims, values);
    }
  }
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

Status GatherTile(const TileShape& shape, std::span<const std::byte> tile, float g_k, float g_v,
                  const MutableRows& k, const MutableRows& v) {
  if (const Status status = Validate(shape); !status.ok()) return status;
  if (const Status status = ValidateTarget(shape, k); !status.ok()) return status;
  if (const Status status = ValidateTarget(shape, v); !status.ok()) return status;
  if (!IsValidGlobalScale(g_k) || !IsValidGlobalScale(g_v)) {
    return Status::InvalidArgument("a global scale is not a power of two in [2^-100, 2^100]");
  }
  if (const Status status = ValidateTile(shape, tile); !status.ok()) return status;
  GatherRows(shape, tile.data(), g_k, KCodeOffset, KScaleByteOffset, k);
  GatherRows(shape, tile.data(), g_v, VCodeOffset, VScaleByteOffset, v);
  return Status();
}

}  // namespace kvtier::kernels
