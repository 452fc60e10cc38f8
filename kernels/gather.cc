// SPDX-License-Identifier: Apache-2.0
#include "kernels/gather.h"

#include <algorithm>

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/row_type.h"
#include "kernels/nvfp4.h"
#include "kernels/rows.h"

namespace kvtier::kernels {
namespace {

// The largest byte decides; a maximum vectorizes where an early exit would not.
uint8_t LargestByte(std::span<const std::byte> bytes, uint8_t mask) {
  uint8_t largest = 0;
  for (const std::byte byte : bytes) {
    largest = std::max(largest, static_cast<uint8_t>(std::to_integer<uint8_t>(byte) & mask));
  }
  return largest;
}

bool SideIsValid(const TileShape& shape, SideFormat format, std::span<const std::byte> side) {
  switch (format) {
    case SideFormat::kNvfp4:
      return IsValidScaleByte(LargestByte(side.subspan(DataBytes(shape)), 0xFF));
    case SideFormat::kFp8:
      return LargestByte(side, 0x7F) != 0x7F;
    case SideFormat::kBf16:
      break;
  }
  return true;
}

Status ValidateArgs(const TileShape& shape, const LayerFormat& format, const GatherOptions& options,
                    const MutableRows& k, const MutableRows& v) {
  if (const Status status = Validate(shape); !status.ok()) return status;
  if (const Status status = Validate(format); !status.ok()) return status;
  for (const MutableRows* target : {&k, &v}) {
    const Status status = ValidateRows(*target, shape.block_tokens, shape.head_dim);
    if (!status.ok()) return status;
  }
  if (const Status status = ValidateSideScale(format.k, options.g_k); !status.ok()) return status;
  if (const Status status = ValidateSideScale(format.v, options.g_v); !status.ok()) return status;
  if (!IsaIsAvailable(options.isa)) {
    return Status::InvalidArgument("the instruction set is not available");
  }
  return ValidateTransform(options.k_mean, options.k_smooth, shape.head_dim);
}

// k' * smooth + mean; null pointers: none.
struct Transform {
  const float* mean = nullptr;
  const float* smooth = nullptr;
};

// Converts rows of BF16 or FP8 (times scale) that lie one after the other.
void Widen(const TileShape& shape, const std::byte* data, cpu::RowType type, float scale,
           const Transform& transform, const MutableRows& target, std::byte* const* targets,
           Isa isa) {
  const uint64_t row_bytes = uint64_t{shape.head_dim} * (type == cpu::RowType::kFp8 ? 1 : 2);
  const std::byte* sources[kBlockTokensMax];
  for (uint32_t t = 0; t < shape.block_tokens; ++t) sources[t] = data + t * row_bytes;
  cpu::KernelsOf(isa)->convert_rows({.sources = sources,
                                     .source_type = type,
                                     .source_scale = scale,
                                     .targets = targets,
                                     .target_type = cpu::RowTypeOf(target.type),
                                     .inverse_target_scale = 1.0F / target.scale,
                                     .row_count = shape.block_tokens,
                                     .dim_count = shape.head_dim,
                                     .mean = transform.mean,
                                     .factor = transform.smooth,
                                     .inverse = true,
                                     .seals = false});
}

void GatherSide(const TileShape& shape, SideFormat format, const std::byte* data, float scale,
                const Transform& transform, const GatherOptions& options, cpu::SideOrder order,
                const MutableRows& target) {
  std::byte* targets[kBlockTokensMax];
  for (uint32_t t = 0; t < shape.block_tokens; ++t) targets[t] = RowData(target, t);
  if (format != SideFormat::kNvfp4) {
    const bool fp8 = format == SideFormat::kFp8;
    return Widen(shape, data, fp8 ? cpu::RowType::kFp8 : cpu::RowType::kBf16, scale, transform,
                 target, targets, options.isa);
  }
  cpu::GatherSide side{.codes = data,
                       .scales = data + DataBytes(shape),
                       .order = order,
                       .block_tokens = shape.block_tokens,
                       .head_dim = shape.head_dim,
                       .g = scale,
                       .rows = targets,
                       .type = cpu::RowTypeOf(target.type),
                       .inverse_row_scale = 1.0F / target.scale,
                       .streaming = options.streaming};
  const cpu::GatherSideFunction gather_side = cpu::KernelsOf(options.isa)->gather_side;
  if (transform.mean == nullptr) return gather_side(side);
  // By way of BF16, which holds what is sealed exactly.
  std::byte values[kBlockTokensMax * kHeadDimMax * 2];
  std::byte* rows[kBlockTokensMax];
  for (uint32_t t = 0; t < shape.block_tokens; ++t) {
    rows[t] = values + uint64_t{t} * shape.head_dim * 2;
  }
  side.rows = rows;
  side.type = cpu::RowType::kBf16;
  side.streaming = false;
  gather_side(side);
  Widen(shape, values, cpu::RowType::kBf16, 1.0F, transform, target, targets, options.isa);
}

}  // namespace

Status ValidateTile(const TileShape& shape, const LayerFormat& format,
                    std::span<const std::byte> tile) {
  if (const Status status = Validate(shape); !status.ok()) return status;
  if (const Status status = Validate(format); !status.ok()) return status;
  if (tile.size() != TileBytes(shape, format)) {
    return Status::InvalidArgument("tile is not TileBytes long");
  }
  if (AnyIsNull(tile)) return NullSpan();
  const uint64_t k_bytes = SideBytes(shape, format.k);
  if (!SideIsValid(shape, format.k, tile.first(k_bytes))) {
    return Status::DataLoss("a K scale byte is above 0x7E, or FP8 K is NaN");
  }
  if (!SideIsValid(shape, format.v, tile.subspan(k_bytes))) {
    return Status::DataLoss("a V scale byte is above 0x7E, or FP8 V is NaN");
  }
  return Status();
}

Status ValidateTile(const TileShape& shape, std::span<const std::byte> tile) {
  return ValidateTile(shape, LayerFormat{}, tile);
}

Status GatherTile(const TileShape& shape, const LayerFormat& format,
                  std::span<const std::byte> tile, const GatherOptions& options,
                  const MutableRows& k, const MutableRows& v) {
  if (const Status status = ValidateArgs(shape, format, options, k, v); !status.ok()) return status;
  if (const Status status = ValidateTile(shape, format, tile); !status.ok()) return status;
  float mean[kHeadDimMax] = {};
  float smooth[kHeadDimMax];
  Transform transform;
  if (!options.k_mean.empty() || !options.k_smooth.empty()) {
    std::copy(options.k_mean.begin(), options.k_mean.end(), mean);
    std::fill_n(smooth, shape.head_dim, 1.0F);
    std::copy(options.k_smooth.begin(), options.k_smooth.end(), smooth);
    transform = {.mean = mean, .smooth = smooth};
  }
  GatherSide(shape, format.k, tile.data(), options.g_k, transform, options, cpu::SideOrder::kK, k);
  GatherSide(shape, format.v, tile.data() + SideBytes(shape, format.k), options.g_v, {}, options,
             cpu::SideOrder::kV, v);
  return Status();
}

Status GatherTile(const TileShape& shape, std::span<const std::byte> tile,
                  const GatherOptions& options, const MutableRows& k, const MutableRows& v) {
  return GatherTile(shape, LayerFormat{}, tile, options, k, v);
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
