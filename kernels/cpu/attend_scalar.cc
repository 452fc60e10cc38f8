// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/cpu/attend_steps_scalar.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/nvfp4.h"
#include "kernels/tile_layout.h"

// The reference: FP32, scalar code that any compiler vectorizes where it can.

namespace kvtier::kernels::cpu {
namespace {

// One side of a tile, by token.
class TileReader {
 public:
  TileReader(const TileShape& shape, const TileSide& side, const std::byte* tile, bool is_k)
      : shape_(shape), side_(side), tile_(tile), is_k_(is_k) {}

  void Load(uint64_t token_idx, float* row) const {
    if (side_.format != AttendFormat::kNvfp4) {
      const uint64_t bytes = side_.format == AttendFormat::kFp8 ? 1 : 2;
      LoadWide(side_.format, tile_ + side_.data_offset + token_idx * shape_.head_dim * bytes,
               shape_.head_dim, side_.multiplier, row);
      return;
    }
    const auto token = static_cast<uint32_t>(token_idx);
    for (uint32_t vector_idx = 0; vector_idx < VectorsPerToken(shape_); ++vector_idx) {
      // The address functions give offsets in an all-NVFP4 tile; sections may lie elsewhere here.
      const uint64_t code = is_k_ ? KCodeOffset(shape_, token, vector_idx) - KDataOffset(shape_)
                                  : VCodeOffset(shape_, token, vector_idx) - VDataOffset(shape_);
      const uint64_t scale =
          is_k_ ? KScaleByteOffset(shape_, token, vector_idx) - KScaleOffset(shape_)
                : VScaleByteOffset(shape_, token, vector_idx) - VScaleOffset(shape_);
      Dequantize16(reinterpret_cast<const uint8_t*>(tile_ + side_.data_offset + code),
                   std::to_integer<uint8_t>(tile_[side_.scale_offset + scale]), side_.multiplier,
                   row + uint64_t{vector_idx} * kVectorDims);
    }
  }

  bool Valid() const {
    if (side_.format == AttendFormat::kBf16) return true;
    if (side_.format == AttendFormat::kNvfp4) {
      return AllScalesValid(tile_ + side_.scale_offset, ScaleBytes(shape_));
    }
    const std::byte* data = tile_ + side_.data_offset;
    return std::none_of(data, data + SideBytes(shape_, SideFormat::kFp8),
                        [](std::byte byte) { return (byte & std::byte{0x7F}) == std::byte{0x7F}; });
  }

 private:
  const TileShape& shape_;
  const TileSide& side_;
  const std::byte* tile_;
  bool is_k_;
};

}  // namespace

bool AttendTilesScalar(const AttendQuery& query, const AttendTiles& tiles) {
  const TileShape shape{.block_tokens = tiles.block_tokens, .head_dim = query.head_dim};
  ScalarPass pass(query);
  for (uint64_t i = 0; i < tiles.block_count; ++i) {
    const std::byte* tile = tiles.blocks[i] + tiles.tile_offset;
    const TileReader k(shape, tiles.k, tile, true);
    const TileReader v(shape, tiles.v, tile, false);
    if (!k.Valid() || !v.Valid()) return false;
    pass.Add(k, v, i * tiles.block_tokens, tiles.block_tokens);
  }
  pass.Finish();
  return true;
}

void AttendRowsScalar(const AttendQuery& query, const AttendRows& part) {
  ScalarPass pass(query);
  for (uint64_t done = 0; done < part.token_count; done += kChunkTokens) {
    pass.Add(RowReader(part.k, query.head_dim, done), RowReader(part.v, query.value_dim, done),
             done,
             static_cast<uint32_t>(std::min<uint64_t>(kChunkTokens, part.token_count - done)));
  }
  pass.Finish();
}

}  // namespace kvtier::kernels::cpu
