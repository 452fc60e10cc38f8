// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstring>

#include "kernels/cpu/kernel_table.h"
#include "kernels/mla_layout.h"
#include "kernels/nvfp4.h"
#include "kernels/rows.h"
#include "kernels/tile_layout.h"

// The reference of sealing and gathering: defines the bytes that the others must give.

namespace kvtier::kernels::cpu {
namespace {

ElementType TypeOf(RowType type) {
  switch (type) {
    case RowType::kBf16:
      return ElementType::kBf16;
    case RowType::kFp16:
      return ElementType::kFp16;
    case RowType::kFp32:
      return ElementType::kFp32;
    case RowType::kFp8:
      return ElementType::kFp8E4m3;
  }
  return ElementType::kBf16;
}

uint64_t CodeOffset(const TileShape& shape, SideOrder order, uint32_t token, uint32_t vector) {
  // Latents lie as V does, in a tile of its own shape.
  return order == SideOrder::kK ? KCodeOffset(shape, token, vector) - KDataOffset(shape)
                                : VCodeOffset(shape, token, vector) - VDataOffset(shape);
}

uint64_t ScaleOffset(const TileShape& shape, SideOrder order, uint32_t token, uint32_t vector) {
  switch (order) {
    case SideOrder::kK:
      return KScaleByteOffset(shape, token, vector) - KScaleOffset(shape);
    case SideOrder::kV:
      return VScaleByteOffset(shape, token, vector) - VScaleOffset(shape);
    case SideOrder::kLatent:
      break;
  }
  const MlaShape mla{.block_tokens = shape.block_tokens};
  return MlaScaleByteOffset(mla, token, vector) - MlaScaleOffset(mla);
}

// The values that the format quantizes.
void LoadSource(const SealSide& side, uint32_t token, float* row) {
  LoadRow({.type = TypeOf(side.type), .data = side.rows[token], .token_stride = side.head_dim}, 0,
          side.head_dim, row);
  for (uint32_t i = 0; i < side.head_dim; ++i) {
    if (side.type == RowType::kFp8) row[i] *= side.row_scale;
    if (side.mean != nullptr) row[i] = (row[i] - side.mean[i]) * side.inverse_smooth[i];
    const bool exact = side.type == RowType::kBf16 || side.type == RowType::kFp16;
    if (!exact || side.mean != nullptr) row[i] = Bf16ToFloat(FloatToBf16(row[i]));
  }
}

void StoreElement(const GatherSide& side, float x, std::byte* target) {
  if (side.type == RowType::kFp32) {
    std::memcpy(target, &x, sizeof(x));
    return;
  }
  if (side.type == RowType::kFp8) {
    const float scaled = x * side.inverse_row_scale;
    *target = std::byte{EncodeE4m3Scale(std::fabs(scaled))} |
              (std::signbit(scaled) ? std::byte{0x80} : std::byte{0});
    return;
  }
  const uint16_t bits = side.type == RowType::kBf16 ? FloatToBf16(x) : FloatToFp16(x);
  std::memcpy(target, &bits, sizeof(bits));
}

}  // namespace

SealCounts SealSideScalar(const SealSide& side) {
  const TileShape shape{.block_tokens = side.block_tokens, .head_dim = side.head_dim};
  const ScaleSearch search = side.four_over_six ? ScaleSearch::kFourOverSix : ScaleSearch::kAmax6;
  SealCounts counts{};
  float row[kMlaLatentDim];
  for (uint32_t token = 0; token < side.block_tokens; ++token) {
    LoadSource(side, token, row);
    for (uint32_t vector = 0; vector < VectorsPerToken(shape); ++vector) {
      const QuantizeFlags flags = Quantize16(
          row + uint64_t{vector} * kVectorDims, side.g,
          reinterpret_cast<uint8_t*>(side.codes + CodeOffset(shape, side.order, token, vector)),
          reinterpret_cast<uint8_t*>(side.scales + ScaleOffset(shape, side.order, token, vector)),
          search);
      counts.nonfinite_count += flags.nonfinite ? 1 : 0;
      counts.saturated_count += flags.saturated ? 1 : 0;
    }
  }
  return counts;
}

void GatherSideScalar(const GatherSide& side) {
  const TileShape shape{.block_tokens = side.block_tokens, .head_dim = side.head_dim};
  const uint32_t element_bytes = ElementBytes(TypeOf(side.type));
  for (uint32_t token = 0; token < side.block_tokens; ++token) {
    std::byte* target = side.rows[token];
    for (uint32_t vector = 0; vector < VectorsPerToken(shape); ++vector) {
      float values[kVectorDims];
      Dequantize16(
          reinterpret_cast<const uint8_t*>(side.codes +
                                           CodeOffset(shape, side.order, token, vector)),
          std::to_integer<uint8_t>(side.scales[ScaleOffset(shape, side.order, token, vector)]),
          side.g, values);
      for (const float value : values) {
        StoreElement(side, value, target);
        target += element_bytes;
      }
    }
  }
}

}  // namespace kvtier::kernels::cpu
