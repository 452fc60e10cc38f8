// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_TILE_LAYOUT_H_
#define KVTIER_KERNELS_TILE_LAYOUT_H_

#include <cstdint>
#include <span>

#include "kernels/nvfp4.h"
#include "kernels/status.h"

// Where every byte of a tile and of a block is. Prose and tables: FORMAT.md, sections 2 and 3.
//
// A tile holds K and V of `block_tokens` tokens for one (layer, kv head), T = block_tokens,
// d = head_dim, contiguous, no padding, no header, single bytes only (so no endianness):
//
//   K data   T * d/2    panels of at most 128 dims; a panel is row-major [T][panel dims / 2]
//   K scales T * d/16   row-major [T][d/16]
//   V data   T * d/2    [T/16] groups of 16 tokens, each [d/16][4][2][2] runs of 8 bytes:
//                       vec*128 + t*32 + 16*(h ^ (vec & 1)) + 8*(tok & 1), t = tok/4, h = tok%4/2
//   V scales T * d/16   [T/4][d/16][4]: the scales of 4 consecutive tokens are one 32-bit word
//
// A block is its tiles ordered [layer][kv head]. Every section and every tile begins at a multiple
// of 16 bytes. All functions are pure and thread-safe; offsets are bytes from the start of the
// tile. The address functions require a shape that Validate accepts and indices in range.

namespace kvtier::kernels {

// Part of a layout's fingerprint. Any change of the map above or of the number recipe changes it.
inline constexpr uint32_t kTileFormatVersion = 1;

inline constexpr uint32_t kBlockTokensMin = 16;
inline constexpr uint32_t kBlockTokensMax = 128;
inline constexpr uint32_t kHeadDimMin = 64;
inline constexpr uint32_t kHeadDimMax = 256;
inline constexpr uint32_t kKPanelDims = 128;       // 64-byte rows: conflict-free 16-byte reads.
inline constexpr uint32_t kVGroupTokens = 16;      // Tokens interleaved in V data.
inline constexpr uint32_t kVScaleGroupTokens = 4;  // Tokens whose V scales are adjacent.

struct TileShape {
  uint32_t block_tokens = 0;  // 16, 32, 64 or 128.
  uint32_t head_dim = 0;      // A multiple of 16 in [64, 256].

  friend constexpr bool operator==(const TileShape&, const TileShape&) = default;
};

// Errors: kInvalidArgument if the format does not define this shape.
constexpr Status Validate(const TileShape& shape) {
  if (shape.block_tokens != 16 && shape.block_tokens != 32 && shape.block_tokens != 64 &&
      shape.block_tokens != 128) {
    return Status::InvalidArgument("block_tokens must be 16, 32, 64 or 128");
  }
  if (shape.head_dim < kHeadDimMin || shape.head_dim > kHeadDimMax ||
      shape.head_dim % kVectorDims != 0) {
    return Status::InvalidArgument("head_dim must be a multiple of 16 in [64, 256]");
  }
  return Status();
}

constexpr uint32_t VectorsPerToken(const TileShape& shape) { return shape.head_dim / kVectorDims; }

constexpr uint64_t DataBytes(const TileShape& shape) {  // Of K, and of V.
  return uint64_t{shape.block_tokens} * shape.head_dim / 2;
}
constexpr uint64_t ScaleBytes(const TileShape& shape) {  // Of K, and of V.
  return uint64_t{shape.block_tokens} * VectorsPerToken(shape);
}

constexpr uint64_t KDataOffset(const TileShape&) { return 0; }
constexpr uint64_t KScaleOffset(const TileShape& shape) { return DataBytes(shape); }
constexpr uint64_t VDataOffset(const TileShape& shape) {
  return KScaleOffset(shape) + ScaleBytes(shape);
}
constexpr uint64_t VScaleOffset(const TileShape& shape) {
  return VDataOffset(shape) + DataBytes(shape);
}
constexpr uint64_t TileBytes(const TileShape& shape) {
  return VScaleOffset(shape) + ScaleBytes(shape);
}

// The 8 code bytes of K's dims [16 * vector_idx, 16 * vector_idx + 16) of one token.
constexpr uint64_t KCodeOffset(const TileShape& shape, uint32_t token_idx, uint32_t vector_idx) {
  constexpr uint32_t kPanelVectors = kKPanelDims / kVectorDims;
  const uint32_t panel_idx = vector_idx / kPanelVectors;
  const uint32_t dims_left = shape.head_dim - panel_idx * kKPanelDims;
  const uint32_t row_bytes = (dims_left < kKPanelDims ? dims_left : kKPanelDims) / 2;
  return KDataOffset(shape) + uint64_t{panel_idx} * shape.block_tokens * (kKPanelDims / 2) +
         uint64_t{token_idx} * row_bytes + uint64_t{vector_idx % kPanelVectors} * kVectorCodeBytes;
}

constexpr uint64_t KScaleByteOffset(const TileShape& shape, uint32_t token_idx,
                                    uint32_t vector_idx) {
  return KScaleOffset(shape) + uint64_t{token_idx} * VectorsPerToken(shape) + vector_idx;
}

// The 8 code bytes of V's dims [16 * vector_idx, 16 * vector_idx + 16) of one token.
constexpr uint64_t VCodeOffset(const TileShape& shape, uint32_t token_idx, uint32_t vector_idx) {
  const uint64_t tok = token_idx % kVGroupTokens;
  const uint64_t t = tok / 4;
  const uint64_t h = tok % 4 / 2;
  const uint64_t group =
      VDataOffset(shape) + uint64_t{token_idx / kVGroupTokens} * kVGroupTokens * shape.head_dim / 2;
  return group + uint64_t{vector_idx} * 128 + t * 32 + 16 * (h ^ (vector_idx & 1)) + 8 * (tok & 1);
}

constexpr uint64_t VScaleByteOffset(const TileShape& shape, uint32_t token_idx,
                                    uint32_t vector_idx) {
  return VScaleOffset(shape) +
         uint64_t{token_idx / kVScaleGroupTokens} * kVScaleGroupTokens * VectorsPerToken(shape) +
         uint64_t{vector_idx} * kVScaleGroupTokens + token_idx % kVScaleGroupTokens;
}

struct BlockShape {
  uint32_t layer_count = 0;    // >= 1.
  uint32_t kv_head_count = 0;  // >= 1, of this rank.
  uint32_t block_tokens = 0;
  uint32_t head_dim = 0;

  friend constexpr bool operator==(const BlockShape&, const BlockShape&) = default;
};

constexpr TileShape TileOf(const BlockShape& shape) {
  return TileShape{.block_tokens = shape.block_tokens, .head_dim = shape.head_dim};
}

// Errors: kInvalidArgument if a count is zero or above 65536 (so that no size overflows 64 bits),
// or the tile shape is not valid.
constexpr Status Validate(const BlockShape& shape) {
  constexpr uint32_t kCountMax = 65536;
  if (shape.layer_count == 0 || shape.layer_count > kCountMax) {
    return Status::InvalidArgument("layer_count must be in [1, 65536]");
  }
  if (shape.kv_head_count == 0 || shape.kv_head_count > kCountMax) {
    return Status::InvalidArgument("kv_head_count must be in [1, 65536]");
  }
  return Validate(TileOf(shape));
}

constexpr uint64_t BlockBytes(const BlockShape& shape) {
  return uint64_t{shape.layer_count} * shape.kv_head_count * TileBytes(TileOf(shape));
}

// Bytes from the start of the block to the tile of (layer, kv head).
constexpr uint64_t TileOffset(const BlockShape& shape, uint32_t layer_idx, uint32_t kv_head_idx) {
  return (uint64_t{layer_idx} * shape.kv_head_count + kv_head_idx) * TileBytes(TileOf(shape));
}

// Mixed formats: a layer that is sensitive to quantization keeps K or V (or both) wider. The tile
// has the same four sections; a wide side is rows [T][d] of FP8 E4M3 (times a scale that is not in
// the tile) or BF16, and has no scale bytes. FORMAT.md, section 4.
enum class SideFormat : uint8_t { kNvfp4 = 0, kFp8 = 1, kBf16 = 2 };

struct LayerFormat {
  SideFormat k = SideFormat::kNvfp4;
  SideFormat v = SideFormat::kNvfp4;

  friend constexpr bool operator==(const LayerFormat&, const LayerFormat&) = default;
};

// Errors: kInvalidArgument for a value outside the enum.
constexpr Status Validate(const LayerFormat& format) {
  if (format.k > SideFormat::kBf16 || format.v > SideFormat::kBf16) {
    return Status::InvalidArgument("unknown side format");
  }
  return Status();
}

constexpr uint64_t SideBytes(const TileShape& shape, SideFormat format) {
  const uint64_t values = uint64_t{shape.block_tokens} * shape.head_dim;
  if (format == SideFormat::kNvfp4) return DataBytes(shape) + ScaleBytes(shape);
  return format == SideFormat::kFp8 ? values : 2 * values;
}
constexpr uint64_t TileBytes(const TileShape& shape, const LayerFormat& format) {
  return SideBytes(shape, format.k) + SideBytes(shape, format.v);
}

// `formats` is [layer_count] or empty, which means NVFP4 everywhere.
constexpr uint64_t LayerOffset(const BlockShape& shape, std::span<const LayerFormat> formats,
                               uint32_t layer_idx) {
  if (formats.empty()) return TileOffset(shape, layer_idx, 0);
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < layer_idx; ++i) bytes += TileBytes(TileOf(shape), formats[i]);
  return bytes * shape.kv_head_count;
}
constexpr uint64_t BlockBytes(const BlockShape& shape, std::span<const LayerFormat> formats) {
  return LayerOffset(shape, formats, shape.layer_count);
}

// The table of FORMAT.md, section 2 for the usual shape.
inline constexpr TileShape kUsualTile{.block_tokens = 64, .head_dim = 128};
static_assert(KScaleOffset(kUsualTile) == 4096);
static_assert(VDataOffset(kUsualTile) == 4608);
static_assert(VScaleOffset(kUsualTile) == 8704);
static_assert(TileBytes(kUsualTile) == 9216);
static_assert(TileBytes(kUsualTile, LayerFormat{}) == 9216);
static_assert(TileBytes(TileShape{.block_tokens = 16, .head_dim = 64}) == 1152);
static_assert(TileBytes(TileShape{.block_tokens = 128, .head_dim = 256}) == 36864);
// A panel of 128 dims is 64 bytes a row; the second panel of d = 256 begins after T rows of it.
static_assert(KCodeOffset(TileShape{.block_tokens = 64, .head_dim = 256}, 0, 8) == 4096);
static_assert(KCodeOffset(TileShape{.block_tokens = 64, .head_dim = 192}, 1, 8) == 4096 + 32);
// V: token 6 of vector 3 is t = 1, h = 1, even: 3*128 + 32 + 16*(1^1) + 0.
static_assert(VCodeOffset(kUsualTile, 6, 3) == 4608 + 416);

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_TILE_LAYOUT_H_
