// SPDX-License-Identifier: Apache-2.0
#include "kernels/mla.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/row_type.h"
#include "kernels/rows.h"

namespace kvtier::kernels {
namespace {

static_assert(cpu::kMlaValueDims == kMlaLatentDim);
static_assert(cpu::kMlaKeyDims == kMlaLatentDim + kMlaRopeDim);

template <typename Rows>
Status ValidateSides(const MlaShape& shape, const Rows& latent, const Rows& rope) {
  if (const Status status = ValidateRows(latent, shape.block_tokens, shape.latent_dim);
      !status.ok()) {
    return status;
  }
  return ValidateRows(rope, shape.block_tokens, shape.rope_dim);
}

Status ValidateCommon(float g, Isa isa) {
  if (!IsValidGlobalScale(g)) {
    return Status::InvalidArgument("a global scale is not a power of two in [2^-100, 2^100]");
  }
  if (!IsaIsAvailable(isa)) {
    return Status::InvalidArgument("the instruction set is not available");
  }
  return Status();
}

}  // namespace

Status SealMlaTile(const MlaShape& shape, const ConstRows& latent, const ConstRows& rope,
                   const MlaSealOptions& options, std::span<std::byte> dst, SealStats* stats) {
  if (const Status status = Validate(shape); !status.ok()) return status;
  if (const Status status = ValidateSides(shape, latent, rope); !status.ok()) return status;
  if (const Status status = ValidateCommon(options.g, options.isa); !status.ok()) return status;
  if (options.search != ScaleSearch::kAmax6 && options.search != ScaleSearch::kFourOverSix) {
    return Status::InvalidArgument("unknown scale search");
  }
  if (dst.size() != MlaTileBytes(shape)) {
    return Status::InvalidArgument("dst is not MlaTileBytes long");
  }
  if (AnyIsNull(dst)) return NullSpan();
  if (stats == nullptr) return Status::InvalidArgument("stats is required");

  const cpu::KernelTable* kernels = cpu::KernelsOf(options.isa);
  const std::byte* rows[kBlockTokensMax];
  for (uint32_t t = 0; t < shape.block_tokens; ++t) rows[t] = RowData(latent, t);
  const cpu::SealCounts counts =
      kernels->seal_latents({.rows = rows,
                             .is_first = true,
                             .next_rows = nullptr,
                             .type = cpu::RowTypeOf(latent.type),
                             .row_scale = latent.scale,
                             .mean = nullptr,
                             .inverse_smooth = nullptr,
                             .block_tokens = shape.block_tokens,
                             .head_dim = shape.latent_dim,
                             .g = options.g,
                             .four_over_six = options.search == ScaleSearch::kFourOverSix,
                             .order = cpu::SideOrder::kLatent,
                             .codes = dst.data() + MlaDataOffset(shape),
                             .scales = dst.data() + MlaScaleOffset(shape)});
  stats->nonfinite_count += counts.nonfinite_count;
  stats->saturated_count += counts.saturated_count;
  for (uint32_t dim = 0; dim < shape.rope_dim; dim += kMlaRopePanelDims) {
    std::byte* targets[kBlockTokensMax];
    for (uint32_t t = 0; t < shape.block_tokens; ++t) {
      rows[t] = RowData(rope, t) + uint64_t{dim} * ElementBytes(rope.type);
      targets[t] = dst.data() + MlaRopeElementOffset(shape, t, dim);
    }
    kernels->convert_rows({.sources = rows,
                           .source_type = cpu::RowTypeOf(rope.type),
                           .source_scale = rope.scale,
                           .targets = targets,
                           .target_type = cpu::RowType::kBf16,
                           .inverse_target_scale = 1.0F,
                           .row_count = shape.block_tokens,
                           .dim_count = kMlaRopePanelDims,
                           .mean = nullptr,
                           .factor = nullptr,
                           .inverse = false,
                           .seals = true});
  }
  return Status();
}

Status ValidateMlaTile(const MlaShape& shape, std::span<const std::byte> tile) {
  if (const Status status = Validate(shape); !status.ok()) return status;
  if (tile.size() != MlaTileBytes(shape)) {
    return Status::InvalidArgument("tile is not MlaTileBytes long");
  }
  if (AnyIsNull(tile)) return NullSpan();
  const auto scales = tile.subspan(MlaScaleOffset(shape), MlaScaleBytes(shape));
  uint8_t largest = 0;
  for (const std::byte scale : scales) {
    largest = std::max(largest, std::to_integer<uint8_t>(scale));
  }
  if (!IsValidScaleByte(largest)) return Status::DataLoss("a latent scale byte is above 0x7E");
  return Status();
}

Status GatherMlaTile(const MlaShape& shape, std::span<const std::byte> tile,
                     const MlaGatherOptions& options, const MutableRows& latent,
                     const MutableRows& rope) {
  if (const Status status = Validate(shape); !status.ok()) return status;
  if (const Status status = ValidateSides(shape, latent, rope); !status.ok()) return status;
  if (const Status status = ValidateCommon(options.g, options.isa); !status.ok()) return status;
  if (const Status status = ValidateMlaTile(shape, tile); !status.ok()) return status;
  const cpu::KernelTable* kernels = cpu::KernelsOf(options.isa);
  std::byte* rows[kBlockTokensMax];
  for (uint32_t t = 0; t < shape.block_tokens; ++t) rows[t] = RowData(latent, t);
  kernels->gather_latents({.codes = tile.data() + MlaDataOffset(shape),
                           .scales = tile.data() + MlaScaleOffset(shape),
                           .order = cpu::SideOrder::kLatent,
                           .block_tokens = shape.block_tokens,
                           .head_dim = shape.latent_dim,
                           .g = options.g,
                           .rows = rows,
                           .type = cpu::RowTypeOf(latent.type),
                           .inverse_row_scale = 1.0F / latent.scale,
                           .streaming = options.streaming});
  for (uint32_t dim = 0; dim < shape.rope_dim; dim += kMlaRopePanelDims) {
    const std::byte* sources[kBlockTokensMax];
    for (uint32_t t = 0; t < shape.block_tokens; ++t) {
      sources[t] = tile.data() + MlaRopeElementOffset(shape, t, dim);
      rows[t] = RowData(rope, t) + uint64_t{dim} * ElementBytes(rope.type);
    }
    kernels->convert_rows({.sources = sources,
                           .source_type = cpu::RowType::kBf16,
                           .source_scale = 1.0F,
                           .targets = rows,
                           .target_type = cpu::RowTypeOf(rope.type),
                           .inverse_target_scale = 1.0F / rope.scale,
                           .row_count = shape.block_tokens,
                           .dim_count = kMlaRopePanelDims,
                           .mean = nullptr,
                           .factor = nullptr,
                           .inverse = false,
                           .seals = false});
  }
  return Status();
}

}  // namespace kvtier::kernels
