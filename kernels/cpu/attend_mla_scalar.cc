// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/cpu/attend_steps_scalar.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/mla_layout.h"
#include "kernels/nvfp4.h"

// The reference for MLA.

namespace kvtier::kernels::cpu {
namespace {

// A token of a tile: its latent, then its rope. V is the beginning of K.
class MlaTileReader {
 public:
  MlaTileReader(const MlaShape& shape, float g, const std::byte* tile)
      : shape_(shape), g_(g), tile_(tile) {}

  void Load(uint64_t token_idx, float* row) const {
    const auto token = static_cast<uint32_t>(token_idx);
    for (uint32_t vector_idx = 0; vector_idx < kMlaLatentDim / kVectorDims; ++vector_idx) {
      Dequantize16(
          reinterpret_cast<const uint8_t*>(tile_ + MlaCodeOffset(shape_, token, vector_idx)),
          std::to_integer<uint8_t>(tile_[MlaScaleByteOffset(shape_, token, vector_idx)]), g_,
          row + uint64_t{vector_idx} * kVectorDims);
    }
    for (uint32_t dim = 0; dim < kMlaRopeDim; dim += kMlaRopePanelDims) {
      LoadWide(AttendFormat::kBf16, tile_ + MlaRopeElementOffset(shape_, token, dim),
               kMlaRopePanelDims, 1.0F, row + kMlaLatentDim + dim);
    }
  }

  bool Valid() const {
    return AllScalesValid(tile_ + MlaScaleOffset(shape_), MlaScaleBytes(shape_));
  }

 private:
  const MlaShape& shape_;
  float g_;
  const std::byte* tile_;
};

class MlaRowReader {
 public:
  MlaRowReader(const AttendMlaRows& part, uint64_t first_token)
      : latent_(part.latent, kMlaLatentDim, first_token),
        rope_(part.rope, kMlaRopeDim, first_token) {}

  void Load(uint64_t token_idx, float* row) const {
    latent_.Load(token_idx, row);
    rope_.Load(token_idx, row + kMlaLatentDim);
  }

 private:
  RowReader latent_;
  RowReader rope_;
};

}  // namespace

bool AttendMlaTilesScalar(const AttendQuery& query, const AttendMlaTiles& tiles) {
  const MlaShape shape{.block_tokens = tiles.block_tokens};
  ScalarPass pass(query);
  for (uint64_t i = 0; i < tiles.block_count; ++i) {
    const MlaTileReader tile(shape, tiles.g, tiles.blocks[i] + tiles.tile_offset);
    if (!tile.Valid()) return false;
    pass.Add(tile, tile, i * tiles.block_tokens, tiles.block_tokens);
  }
  pass.Finish();
  return true;
}

void AttendMlaRowsScalar(const AttendQuery& query, const AttendMlaRows& part) {
  ScalarPass pass(query);
  for (uint64_t done = 0; done < part.token_count; done += kChunkTokens) {
    const MlaRowReader rows(part, done);
    pass.Add(rows, rows, done,
             static_cast<uint32_t>(std::min<uint64_t>(kChunkTokens, part.token_count - done)));
  }
  pass.Finish();
}

}  // namespace kvtier::kernels::cpu
