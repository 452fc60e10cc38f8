// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_ENGINE_PAGES_H_
#define KVTIER_KERNELS_ENGINE_PAGES_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/engine_pages_scale.h"
#include "kernels/seal.h"
#include "kernels/status.h"
#include "kernels/tile_layout.h"

// Tiles from and to the NVFP4 pages of other engines. Codes and scale bytes are the same numbers
// everywhere; only their order differs. So a transfer is a permutation of runs of 8 bytes (the
// codes of one vector) and of single scale bytes, and nothing is quantized again.
//
// The descriptor states where the bytes of a page lie; engine_pages_layouts.h has those of the
// engines we know. Covered is every page with two codes of adjacent dims in a byte, the first in
// the low nibble, and an E4M3 scale for 16 adjacent dims of a token. llama.cpp's block_nvfp4, which
// pairs dim j with dim j + 8 in a byte, is out of scope.

namespace kvtier::kernels {

// The order of the scale bytes of one head in a page. S = head_dim / 16 bytes are a row.
enum class ScaleOrder : uint8_t {
  kLinear = 0,  // Scale s of token t is byte s of row t.
  // Rows 4q..4q+3, laid end to end, hold [S][4 tokens]: scale s of token t is byte 4 s + t % 4 of
  // them, which is byte (4 s + t % 4) % S of row 4 (t / 4) + (4 s + t % 4) / S. Defined for S % 4
  // == 0 and page_tokens % 4 == 0, as in all engines that use it.
  kInterleaved4 = 1,
};

// Where the rows of one kind (codes or scales, of K or V) lie in a buffer, in bytes:
//   row(page, head, token) = offset + page * page_stride + head * head_stride + token *
//   token_stride
// A row is head_dim / 2 bytes of codes or head_dim / 16 bytes of scales, contiguous.
struct EngineRows {
  uint64_t offset = 0;
  uint64_t page_stride = 0;
  uint64_t head_stride = 0;
  uint64_t token_stride = 0;

  friend constexpr bool operator==(const EngineRows&, const EngineRows&) = default;
};

struct EngineSide {
  EngineRows codes;
  EngineRows scales;
  ScaleOrder scale_order = ScaleOrder::kLinear;

  friend constexpr bool operator==(const EngineSide&, const EngineSide&) = default;
};

struct EnginePageLayout {
  uint32_t kv_head_count = 0;  // In a page: of this rank and layer.
  uint32_t head_dim = 0;
  uint32_t page_tokens = 0;  // Need not be related to block_tokens.
  EngineSide k;
  EngineSide v;

  friend constexpr bool operator==(const EnginePageLayout&, const EnginePageLayout&) = default;
};

// Errors: kInvalidArgument if a count is 0 or above 65536, head_dim is not one of a tile, rows of
// one page overlap, a page reaches into the next, a stride or offset is above 2^40, the scale order
// is unknown, or scales are interleaved and page_tokens is not a multiple of 4 or head_dim of 64.
Status Validate(const EnginePageLayout& layout);

// The tokens of one tile in an engine's memory: token t of the tile is slot
// (first_slot + t) % page_tokens of page table[(first_slot + t) / page_tokens]. Does not own what
// it points to. All four buffers may be the same one (OneBuffer). No alignment is needed.
template <typename Byte>
struct EnginePages {
  // Whole buffers of one layer: every access is checked against their sizes.
  std::span<Byte> k_codes = {};
  std::span<Byte> k_scales = {};
  std::span<Byte> v_codes = {};
  std::span<Byte> v_scales = {};
  // Indices of pages in their buffers. Empty: pages follow each other from the first.
  std::span<const uint32_t> page_table = {};
  // For engines that number the pages of V on their own (TRT-LLM). Empty: that of K.
  std::span<const uint32_t> v_page_table = {};
  uint64_t first_slot = 0;
  uint32_t kv_head_idx = 0;

  // The same tokens, to read.
  constexpr EnginePages<const std::byte> AsConst() const {
    return {.k_codes = k_codes,
            .k_scales = k_scales,
            .v_codes = v_codes,
            .v_scales = v_scales,
            .page_table = page_table,
            .v_page_table = v_page_table,
            .first_slot = first_slot,
            .kv_head_idx = kv_head_idx};
  }
};
using ConstEnginePages = EnginePages<const std::byte>;
using MutableEnginePages = EnginePages<std::byte>;

// Pages whose codes and scales of K and V share one buffer.
template <typename Byte>
constexpr EnginePages<Byte> OneBuffer(std::span<Byte> buffer) {
  return {.k_codes = buffer, .k_scales = buffer, .v_codes = buffer, .v_scales = buffer};
}

// Fills `tile` with the codes and scales of block_tokens tokens, bit for bit. `scales` are the
// multipliers the pages were written with (ToDequantMultiplier). They become the tile's g, so they
// must be what every reader of the layer uses, and powers of two as FORMAT.md, 1.2 demands: an
// engine whose calibrated scales are not has to be given such ones, or needs RequantizeTile.
// Scale bytes 0 with codes other than 0, which some encoders write, are kept. Nor is K transformed:
// a scale set with k_mean or k_smooth needs RequantizeTile too.
// `tile` is exactly TileBytes(shape) long, any alignment, and must not overlap the pages. Allocates
// nothing; thread-safe for disjoint tiles.
// Errors: kInvalidArgument for a bad shape, layout, scale, view or size, for a page outside its
// buffer, and for interleaved scales if first_slot is not a multiple of 4; kDataLoss if a scale
// byte is above 0x7E (NaN, sign bit, poison). Nothing is written on an error.
Status ImportTile(const TileShape& shape, const EnginePageLayout& layout,
                  const ConstEnginePages& pages, const GlobalScales& scales,
                  std::span<std::byte> tile);

// The inverse: writes the tile's codes and scales to the slots of its tokens and nothing else. The
// engine must multiply with the tile's g; FromDequantMultiplier says which number to give it. K
// sealed with a transform (SealOptions) arrives transformed. The table must not name a page twice.
// `tile` must not overlap the pages. Allocates nothing; thread-safe for disjoint slots. Errors: as
// ImportTile (kDataLoss for the tile's scale bytes). Nothing is written on an error.
Status ExportTile(const TileShape& shape, std::span<const std::byte> tile,
                  const EnginePageLayout& layout, const MutableEnginePages& pages);

// The lossy way in, for pages whose global scale is not a power of two or not that of the layer:
// values = e2m1 * e4m3 * scales in FP32, then SealTile with `options`, so rounded to BF16 and
// quantized a second time. Not the identity even if the global scales are equal: a vector whose
// largest code is below 6 gets a new scale. Adds to `stats` as SealTile does. Uses 42 KiB of stack,
// allocates nothing; thread-safe for disjoint tiles and stats.
// Errors: as ImportTile, except that scales only need to be finite and above 0; as SealTile for
// options and stats. Nothing is written on an error.
Status RequantizeTile(const TileShape& shape, const EnginePageLayout& layout,
                      const ConstEnginePages& pages, const GlobalScales& scales,
                      const SealOptions& options, std::span<std::byte> tile, SealStats* stats);

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_ENGINE_PAGES_H_
