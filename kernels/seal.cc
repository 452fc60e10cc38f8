// SPDX-License-Identifier: Apache-2.0
#include "kernels/seal.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/row_type.h"
#include "kernels/rows.h"

namespace kvtier::kernels {
namespace {

Status ValidateTransform(const TileShape& shape, const SealOptions& options) {
  for (const auto& vector : {options.k_mean, options.k_smooth}) {
    if (vector.empty()) continue;
    if (vector.size() != shape.head_dim ||
        !std::all_of(vector.begin(), vector.end(), [](float x) { return std::isfinite(x); })) {
      return Status::InvalidArgument("k_mean and k_smooth need a finite value per channel");
    }
  }
  if (!std::all_of(options.k_smooth.begin(), options.k_smooth.end(),
                   [](float x) { return x > 0.0F && std::isfinite(1.0F / x); })) {
    return Status::InvalidArgument("k_smooth must be above 0 and have a finite reciprocal");
  }
  return Status();
}

void Add(const cpu::SealCounts& counts, SealStats* stats) {
  stats->nonfinite_count += counts.nonfinite_count;
  stats->saturated_count += counts.saturated_count;
}

}  // namespace

Status SealTile(const TileShape& shape, const ConstRows& k, const ConstRows& v,
                const SealOptions& options, std::span<std::byte> dst, SealStats* stats) {
  if (const Status status = Validate(shape); !status.ok()) return status;
  for (const ConstRows* rows : {&k, &v}) {
    const Status status = ValidateRows(*rows, shape.block_tokens, shape.head_dim);
    if (!status.ok()) return status;
  }
  if (!IsValidGlobalScale(options.g_k) || !IsValidGlobalScale(options.g_v)) {
    return Status::InvalidArgument("a global scale is not a power of two in [2^-100, 2^100]");
  }
  if (options.search != ScaleSearch::kAmax6 && options.search != ScaleSearch::kFourOverSix) {
    return Status::InvalidArgument("unknown scale search");
  }
  if (const Status status = ValidateTransform(shape, options); !status.ok()) return status;
  if (!IsaIsAvailable(options.isa)) {
    return Status::InvalidArgument("the instruction set is not available");
  }
  if (dst.size() != TileBytes(shape)) {
    return Status::InvalidArgument("dst is not TileBytes long");
  }
  if (stats == nullptr) return Status::InvalidArgument("stats is required");

  const cpu::SealSideFunction seal_side = cpu::KernelsOf(options.isa)->seal_side;
  const std::byte* k_rows[kBlockTokensMax];
  const std::byte* v_rows[kBlockTokensMax];
  const auto side_of = [&](const ConstRows& source, const std::byte** rows) {
    for (uint32_t t = 0; t < shape.block_tokens; ++t) {
      rows[t] = RowData(source, t);
    }
    cpu::SealSide side{};
    side.rows = rows;
    side.type = cpu::RowTypeOf(source.type);
    side.row_scale = source.scale;
    side.block_tokens = shape.block_tokens;
    side.head_dim = shape.head_dim;
    side.four_over_six = options.search == ScaleSearch::kFourOverSix;
    return side;
  };
  cpu::SealSide side = side_of(k, k_rows);
  const cpu::SealSide v_side = side_of(v, v_rows);
  side.is_first = true;
  side.next_rows = v.type == k.type ? v_rows : nullptr;
  side.g = options.g_k;
  side.order = cpu::SideOrder::kK;
  side.codes = dst.data() + KDataOffset(shape);
  side.scales = dst.data() + KScaleOffset(shape);
  float mean[kHeadDimMax] = {};
  float inverse_smooth[kHeadDimMax];
  if (!options.k_mean.empty() || !options.k_smooth.empty()) {
    std::copy(options.k_mean.begin(), options.k_mean.end(), mean);
    std::fill_n(inverse_smooth, shape.head_dim, 1.0F);
    for (size_t i = 0; i < options.k_smooth.size(); ++i) {
      inverse_smooth[i] = 1.0F / options.k_smooth[i];
    }
    side.mean = mean;
    side.inverse_smooth = inverse_smooth;
  }
  Add(seal_side(side), stats);
  side = v_side;
  side.g = options.g_v;
  side.order = cpu::SideOrder::kV;
  side.codes = dst.data() + VDataOffset(shape);
  side.scales = dst.data() + VScaleOffset(shape);
  Add(seal_side(side), stats);
  return Status();
}

}  // namespace kvtier::kernels
