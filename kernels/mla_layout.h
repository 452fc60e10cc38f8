// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_MLA_LAYOUT_H_
#define KVTIER_KERNELS_MLA_LAYOUT_H_

#include <cstdint>

#include "kernels/nvfp4.h"
#include "kernels/status.h"
#include "kernels/tile_layout.h"

// Where every byte of a tile of multi-head latent attention is (MLA: DeepSeek V2 and later, Kimi
// K2). Prose and reasons: FORMAT.md, section 5. Part of format version 1.
//
// All heads share one latent row of 512 dims per token, NVFP4, and one rope row of 64 dims, BF16.
// The latent is both what queries meet (with the rope) and what their weights sum. A tile holds
// T = block_tokens tokens of one layer:
//
//   latent data    T * 256  [T/16] groups of 16 tokens, each [32 vectors][4][2][2] runs of 8 bytes:
//                           vec*128 + t*32 + 16*(h ^ (vec & 1)) + 8*(tok & 1), as V of section 2.2
//   latent scales  T * 32   [T/16][32 vectors][16 tokens]
//   rope           T * 128  two panels [T][32 dims] of BF16, little endian
//
// A block is its tiles ordered [layer]. Sections and tiles begin at multiples of 16 bytes. All
// functions are pure and thread-safe; the address functions require a shape that Validate accepts
// and indices in range.

namespace kvtier::kernels {

inline constexpr uint32_t kMlaLatentDim = 512;
inline constexpr uint32_t kMlaRopeDim = 64;
inline constexpr uint32_t kMlaGroupTokens = 16;    // Tokens interleaved in latent data and scales.
inline constexpr uint32_t kMlaRopePanelDims = 32;  // 64-byte rows: conflict-free 16-byte reads.

struct MlaShape {
  uint32_t block_tokens = 0;  // 16, 32, 64 or 128.
  uint32_t latent_dim = kMlaLatentDim;
  uint32_t rope_dim = kMlaRopeDim;

  friend constexpr bool operator==(const MlaShape&, const MlaShape&) = default;
};

// Errors: kInvalidArgument if the format does not define this shape. 512 and 64 are the only dims.
constexpr Status Validate(const MlaShape& shape) {
  if (shape.latent_dim != kMlaLatentDim || shape.rope_dim != kMlaRopeDim) {
    return Status::InvalidArgument("latent_dim must be 512 and rope_dim 64");
  }
  return Validate(TileShape{.block_tokens = shape.block_tokens, .head_dim = kHeadDimMin});
}

constexpr uint64_t MlaDataBytes(const MlaShape& shape) {
  return uint64_t{shape.block_tokens} * shape.latent_dim / 2;
}
constexpr uint64_t MlaScaleBytes(const MlaShape& shape) {
  return uint64_t{shape.block_tokens} * shape.latent_dim / kVectorDims;
}
constexpr uint64_t MlaRopeBytes(const MlaShape& shape) {
  return uint64_t{shape.block_tokens} * shape.rope_dim * 2;
}

constexpr uint64_t MlaDataOffset(const MlaShape&) { return 0; }
constexpr uint64_t MlaScaleOffset(const MlaShape& shape) { return MlaDataBytes(shape); }
constexpr uint64_t MlaRopeOffset(const MlaShape& shape) {
  return MlaScaleOffset(shape) + MlaScaleBytes(shape);
}
constexpr uint64_t MlaTileBytes(const MlaShape& shape) {
  return MlaRopeOffset(shape) + MlaRopeBytes(shape);
}

// The 8 code bytes of latent dims [16 * vector_idx, 16 * vector_idx + 16) of one token.
constexpr uint64_t MlaCodeOffset(const MlaShape& shape, uint32_t token_idx, uint32_t vector_idx) {
  const uint64_t tok = token_idx % kMlaGroupTokens;
  const uint64_t t = tok / 4;
  const uint64_t h = tok % 4 / 2;
  const uint64_t group_bytes = uint64_t{kMlaGroupTokens} * shape.latent_dim / 2;
  return MlaDataOffset(shape) + token_idx / kMlaGroupTokens * group_bytes +
         uint64_t{vector_idx} * 128 + t * 32 + 16 * (h ^ (vector_idx & 1)) + 8 * (tok & 1);
}

constexpr uint64_t MlaScaleByteOffset(const MlaShape& shape, uint32_t token_idx,
                                      uint32_t vector_idx) {
  const uint64_t group_bytes = uint64_t{kMlaGroupTokens} * shape.latent_dim / kVectorDims;
  return MlaScaleOffset(shape) + token_idx / kMlaGroupTokens * group_bytes +
         uint64_t{vector_idx} * kMlaGroupTokens + token_idx % kMlaGroupTokens;
}

// The two bytes of one rope dim; the 32 dims of a panel follow each other.
constexpr uint64_t MlaRopeElementOffset(const MlaShape& shape, uint32_t token_idx,
                                        uint32_t dim_idx) {
  const uint64_t panel_bytes = uint64_t{shape.block_tokens} * kMlaRopePanelDims * 2;
  return MlaRopeOffset(shape) + dim_idx / kMlaRopePanelDims * panel_bytes +
         uint64_t{token_idx} * kMlaRopePanelDims * 2 + uint64_t{dim_idx % kMlaRopePanelDims} * 2;
}

struct MlaBlockShape {
  uint32_t layer_count = 0;  // >= 1.
  MlaShape tile = {};

  friend constexpr bool operator==(const MlaBlockShape&, const MlaBlockShape&) = default;
};

// Errors: kInvalidArgument if layer_count is not in [1, 65536] or the tile shape is not valid.
constexpr Status Validate(const MlaBlockShape& shape) {
  if (shape.layer_count == 0 || shape.layer_count > 65536) {
    return Status::InvalidArgument("layer_count must be in [1, 65536]");
  }
  return Validate(shape.tile);
}

constexpr uint64_t MlaBlockBytes(const MlaBlockShape& shape) {
  return shape.layer_count * MlaTileBytes(shape.tile);
}

// Bytes from the start of the block to the tile of a layer.
constexpr uint64_t MlaTileOffset(const MlaBlockShape& shape, uint32_t layer_idx) {
  return layer_idx * MlaTileBytes(shape.tile);
}

// The table of FORMAT.md, section 5.
inline constexpr MlaShape kUsualMlaTile{.block_tokens = 64};
static_assert(MlaScaleOffset(kUsualMlaTile) == 16384);
static_assert(MlaRopeOffset(kUsualMlaTile) == 18432);
static_assert(MlaTileBytes(kUsualMlaTile) == 26624);  // 416 bytes a token.
static_assert(MlaTileBytes(MlaShape{.block_tokens = 16}) == 6656);
static_assert(MlaTileBytes(MlaShape{.block_tokens = 128}) == 53248);
// Token 22 of vector 3: second group, t = 1, h = 1, even.
static_assert(MlaCodeOffset(kUsualMlaTile, 22, 3) == 4096 + 3 * 128 + 32 + 0 + 0);
static_assert(MlaScaleByteOffset(kUsualMlaTile, 22, 3) == 16384 + 512 + 3 * 16 + 6);
static_assert(MlaRopeElementOffset(kUsualMlaTile, 1, 33) == 18432 + 4096 + 64 + 2);

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_MLA_LAYOUT_H_
