// SPDX-License-Identifier: Apache-2.0
#include "kernels/seal.h"

#include <algorithm>

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/row_type.h"
#include "kernels/rows.h"

namespace kvtier::kernels {
namespace {

Status ValidateArgs(const TileShape& shape, const LayerFormat& format, const ConstRows& k,
                    const ConstRows& v, const SealOptions& options) {
  if (const Status status = Validate(shape); !status.ok()) return status;
  if (const Status status = Validate(format); !status.ok()) return status;
  for (const ConstRows* rows : {&k, &v}) {
    const Status status = ValidateRows(*rows, shape.block_tokens, shape.head_dim);
    if (!status.ok()) return status;
  }
  if (const Status status = ValidateSideScale(format.k, options.g_k); !status.ok()) return status;
  if (const Status status = ValidateSideScale(format.v, options.g_v); !status.ok()) return status;
  if (options.search != ScaleSearch::kAmax6 && options.search != ScaleSearch::kFourOverSix) {
    return Status::InvalidArgument("unknown scale search");
  }
  if (!IsaIsAvailable(options.isa)) {
    return Status::InvalidArgument("the instruction set is not available");
  }
  return ValidateTransform(options.k_mean, options.k_smooth, shape.head_dim);
}

// One side of a tile, and where it goes.
struct Side {
  const ConstRows& source;
  const std::byte* rows[kBlockTokensMax];
  SideFormat format;
  float scale;
  std::byte* dst;
};

Side SideOf(const TileShape& shape, const ConstRows& source, SideFormat format, float scale,
            std::byte* dst) {
  Side side{.source = source, .rows = {}, .format = format, .scale = scale, .dst = dst};
  for (uint32_t t = 0; t < shape.block_tokens; ++t) side.rows[t] = RowData(source, t);
  return side;
}

// bf16((x - mean) * inverse_smooth); null pointers: none.
struct Transform {
  const float* mean = nullptr;
  const float* inverse_smooth = nullptr;
};

// An FP8 or BF16 side: rows one after the other.
cpu::SealCounts SealWide(const TileShape& shape, const Side& side, const Transform& transform,
                         const SealOptions& options) {
  const bool fp8 = side.format == SideFormat::kFp8;
  const uint64_t row_bytes = SideBytes(shape, side.format) / shape.block_tokens;
  std::byte* targets[kBlockTokensMax];
  for (uint32_t t = 0; t < shape.block_tokens; ++t) targets[t] = side.dst + t * row_bytes;
  return cpu::KernelsOf(options.isa)
      ->convert_rows({.sources = side.rows,
                      .source_type = cpu::RowTypeOf(side.source.type),
                      .source_scale = side.source.scale,
                      .targets = targets,
                      .target_type = fp8 ? cpu::RowType::kFp8 : cpu::RowType::kBf16,
                      .inverse_target_scale = fp8 ? 1.0F / side.scale : 1.0F,
                      .row_count = shape.block_tokens,
                      .dim_count = shape.head_dim,
                      .mean = transform.mean,
                      .factor = transform.inverse_smooth,
                      .inverse = false,
                      .seals = true});
}

// `next` is the side that is sealed after this one, or null; `is_first` if none was before it.
cpu::SealCounts SealSide(const TileShape& shape, const Side& side, bool is_first, const Side* next,
                         const Transform& transform, const SealOptions& options,
                         cpu::SideOrder order) {
  if (side.format != SideFormat::kNvfp4) return SealWide(shape, side, transform, options);
  const bool prefetch_next = next != nullptr && next->source.type == side.source.type;
  return cpu::KernelsOf(options.isa)
      ->seal_side({.rows = side.rows,
                   .is_first = is_first,
                   .next_rows = prefetch_next ? next->rows : nullptr,
                   .type = cpu::RowTypeOf(side.source.type),
                   .row_scale = side.source.scale,
                   .mean = transform.mean,
                   .inverse_smooth = transform.inverse_smooth,
                   .block_tokens = shape.block_tokens,
                   .head_dim = shape.head_dim,
                   .g = side.scale,
                   .four_over_six = options.search == ScaleSearch::kFourOverSix,
                   .order = order,
                   .codes = side.dst,
                   .scales = side.dst + DataBytes(shape)});
}

}  // namespace

Status SealTile(const TileShape& shape, const LayerFormat& format, const ConstRows& k,
                const ConstRows& v, const SealOptions& options, std::span<std::byte> dst,
                SealStats* stats) {
  if (const Status status = ValidateArgs(shape, format, k, v, options); !status.ok()) return status;
  if (dst.size() != TileBytes(shape, format)) {
    return Status::InvalidArgument("dst is not TileBytes long");
  }
  if (AnyIsNull(dst)) return NullSpan();
  if (stats == nullptr) return Status::InvalidArgument("stats is required");

  float mean[kHeadDimMax] = {};
  float inverse_smooth[kHeadDimMax];
  Transform transform;
  if (!options.k_mean.empty() || !options.k_smooth.empty()) {
    std::copy(options.k_mean.begin(), options.k_mean.end(), mean);
    std::fill_n(inverse_smooth, shape.head_dim, 1.0F);
    for (size_t i = 0; i < options.k_smooth.size(); ++i) {
      inverse_smooth[i] = 1.0F / options.k_smooth[i];
    }
    transform = {.mean = mean, .inverse_smooth = inverse_smooth};
  }
  const Side k_side = SideOf(shape, k, format.k, options.g_k, dst.data());
  const Side v_side =
      SideOf(shape, v, format.v, options.g_v, dst.data() + SideBytes(shape, format.k));
  const cpu::SealCounts counts[] = {
      SealSide(shape, k_side, true, &v_side, transform, options, cpu::SideOrder::kK),
      SealSide(shape, v_side, format.k != SideFormat::kNvfp4, nullptr, {}, options,
               cpu::SideOrder::kV)};
  for (const cpu::SealCounts& side : counts) {
    stats->nonfinite_count += side.nonfinite_count;
    stats->saturated_count += side.saturated_count;
  }
  return Status();
}

Status SealTile(const TileShape& shape, const ConstRows& k, const ConstRows& v,
                const SealOptions& options, std::span<std::byte> dst, SealStats* stats) {
  return SealTile(shape, LayerFormat{}, k, v, options, dst, stats);
}

}  // namespace kvtier::kernels
