// SPDX-License-Identifier: Apache-2.0
#include "kernels/seal.h"

#include "kernels/rows.h"

namespace kvtier::kernels {
namespace {

Status ValidateSource(const TileShape& shape, const ConstRows& rows) {
  if (rows.data == nullptr) return Status::InvalidArgument("a source has no data");
  if (ElementBytes(rows.type) == 0) {
    return Status::InvalidArgument("a source has an unknown element type");
  }
  if (rows.token_stride < shape.head_dim) {
    return Status::InvalidArgument("a source's token_stride is less than head_dim");
  }
  return Status();
}

// Quantizes all rows of K or of V; the two differ only in where bytes go.
void SealRows(const TileShape& shape, const ConstRows& rows, float g, ScaleSearch search,
              OffsetFunction code_offset, OffsetFunction scale_offset, std::byte* tile,
              SealStats* stats) {
  float row[kHeadDimMax];
  for (uint32_t token_idx = 0; token_idx < shape.block_tokens; ++token_idx) {
    LoadRow(rows, token_idx, shape.head_dim, row);
    if (rows.type == ElementType::kFp32) {
      for (uint32_t i = 0; i < shape.head_dim; ++i) row[i] = Bf16ToFloat(FloatToBf16(row[i]));
    }
    for (uint32_t vector_idx = 0; vector_idx < VectorsPerToken(shape); ++vector_idx) {
      const QuantizeFlags flags = Quantize16(
          row + uint64_t{vector_idx} * kVectorDims, g,
          reinterpret_cast<uint8_t*>(tile + code_offset(shape, token_idx, vector_idx)),
          reinterpret_cast<uint8_t*>(tile + scale_offset(shape, token_idx, vector_idx)), search);
      stats->nonfinite_count += flags.nonfinite ? 1 : 0;
      stats->saturated_count += flags.saturated ? 1 : 0;
    }
  }
}

}  // namespace

Status SealTile(const TileShape& shape, const ConstRows& k, const ConstRows& v,
                const SealOptions& options, std::span<std::byte> dst, SealStats* stats) {
  if (const Status status = Validate(shape); !status.ok()) return status;
  if (const Status status = ValidateSource(shape, k); !status.ok()) return status;
  if (const Status status = ValidateSource(shape, v); !status.ok()) return status;
  if (!IsValidGlobalScale(options.g_k) || !IsValidGlobalScale(options.g_v)) {
    return Status::InvalidArgument("a global scale is not a power of two in [2^-100, 2^100]");
  }
  if (options.search != ScaleSearch::kAmax6 && options.search != ScaleSearch::kFourOverSix) {
    return Status::InvalidArgument("unknown scale search");
  }
  if (dst.size() != TileBytes(shape)) {
    return Status::InvalidArgument("dst is not TileBytes long");
  }
  if (stats == nullptr) return Status::InvalidArgument("stats is required");
  SealRows(shape, k, options.g_k, options.search, KCodeOffset, KScaleByteOffset, dst.data(), stats);
  SealRows(shape, v, options.g_v, options.search, VCodeOffset, VScaleByteOffset, dst.data(), stats);
  return Status();
}

}  // namespace kvtier::kernels
