// SPDX-License-Identifier: Apache-2.0
#include "kernels/engine_pages.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>

#include "kernels/gather.h"
#include "kernels/nvfp4.h"
#include "kernels/rows.h"

namespace kvtier::kernels {
namespace {

constexpr uint64_t kStrideMax = uint64_t{1} << 40;  // Keeps every sum below far from 2^64.
constexpr uint32_t kCountMax = 65536;
constexpr uint32_t kGroupTokens = kVScaleGroupTokens;

Status ValidateRows(const EngineRows& rows, uint64_t row_bytes, const EnginePageLayout& layout) {
  for (const uint64_t bytes :
       {rows.offset, rows.page_stride, rows.head_stride, rows.token_stride}) {
    if (bytes > kStrideMax) return Status::InvalidArgument("a stride or offset is above 2^40");
  }
  const uint64_t last_token = (layout.page_tokens - 1) * rows.token_stride;
  const uint64_t last_head = (layout.kv_head_count - 1) * rows.head_stride;
  // Tokens within a head (HND), or heads within a token (NHD), or only one of a kind.
  const bool tokens_apart = layout.page_tokens == 1 || rows.token_stride >= row_bytes;
  const bool heads_apart = layout.kv_head_count == 1 || rows.head_stride >= row_bytes;
  const bool nested = layout.page_tokens == 1 || layout.kv_head_count == 1 ||
                      rows.head_stride >= last_token + row_bytes ||
                      rows.token_stride >= last_head + row_bytes;
  if (!tokens_apart || !heads_apart || !nested) {
    return Status::InvalidArgument("rows of a page overlap");
  }
  if (rows.page_stride < last_token + last_head + row_bytes) {
    return Status::InvalidArgument("a page_stride is less than a page");
  }
  return Status();
}

Status ValidateSide(const EngineSide& side, const EnginePageLayout& layout) {
  if (side.scale_order != ScaleOrder::kLinear && side.scale_order != ScaleOrder::kInterleaved4) {
    return Status::InvalidArgument("unknown scale order");
  }
  if (side.scale_order == ScaleOrder::kInterleaved4 &&
      (layout.page_tokens % kGroupTokens != 0 || layout.head_dim % 64 != 0)) {
    return Status::InvalidArgument(
        "interleaved scales need page_tokens to be a multiple of 4 and head_dim of 64");
  }
  const Status status = ValidateRows(side.codes, layout.head_dim / 2, layout);
  return status.ok() ? ValidateRows(side.scales, layout.head_dim / kVectorDims, layout) : status;
}

// The tile's rows in an engine's memory, by token.
template <typename Byte>
struct SideRows {
  Byte* codes[kBlockTokensMax];
  Byte* scales[kBlockTokensMax];
};

template <typename Byte>
struct TileRows {
  SideRows<Byte> k;
  SideRows<Byte> v;
};

// Sets rows[t] for each token of the tile. Requires a valid layout. Any first_slot will do: one so
// large that later slots would overflow has its first page outside every buffer already.
// Errors: kInvalidArgument if a row is not in the buffer or has no page.
template <typename Byte>
Status FindRows(const EngineRows& layout, uint64_t row_bytes, uint32_t page_tokens,
                uint32_t token_count, std::span<Byte> buffer, std::span<const uint32_t> page_table,
                const EnginePages<Byte>& pages, Byte** rows) {
  uint64_t page_nr = pages.first_slot / page_tokens;
  auto slot = static_cast<uint32_t>(pages.first_slot % page_tokens);
  for (uint32_t token = 0; token < token_count; ++page_nr, slot = 0) {
    const uint32_t run = std::min(token_count - token, page_tokens - slot);
    if (!page_table.empty() && page_nr >= page_table.size()) {
      return Status::InvalidArgument("the page table is too short");
    }
    const uint64_t page_idx = page_table.empty() ? page_nr : page_table[page_nr];
    const uint64_t first =
        layout.offset + pages.kv_head_idx * layout.head_stride + slot * layout.token_stride;
    const uint64_t end = first + (run - 1) * layout.token_stride + row_bytes;
    if (end > buffer.size() || page_idx > (buffer.size() - end) / layout.page_stride) {
      return Status::InvalidArgument("a page is outside its buffer");
    }
    Byte* row = buffer.data() + page_idx * layout.page_stride + first;
    for (uint32_t i = 0; i < run; ++i) rows[token++] = row + i * layout.token_stride;
  }
  return Status();
}

// Checks all arguments that the three transfers have in common and finds the rows.
template <typename Byte>
Status Find(const TileShape& shape, const EnginePageLayout& layout, const EnginePages<Byte>& pages,
            uint64_t tile_bytes, TileRows<Byte>* rows) {
  if (const Status status = Validate(shape); !status.ok()) return status;
  if (const Status status = Validate(layout); !status.ok()) return status;
  if (layout.head_dim != shape.head_dim) {
    return Status::InvalidArgument("the page and the tile differ in head_dim");
  }
  if (tile_bytes != TileBytes(shape)) {
    return Status::InvalidArgument("tile is not TileBytes long");
  }
  if (AnyIsNull(pages.k_codes, pages.k_scales, pages.v_codes, pages.v_scales, pages.page_table,
                pages.v_page_table)) {
    return NullSpan();
  }
  if (pages.kv_head_idx >= layout.kv_head_count) {
    return Status::InvalidArgument("kv_head_idx is not below kv_head_count");
  }
  const bool interleaved = layout.k.scale_order == ScaleOrder::kInterleaved4 ||
                           layout.v.scale_order == ScaleOrder::kInterleaved4;
  if (interleaved && pages.first_slot % kGroupTokens != 0) {
    return Status::InvalidArgument("interleaved scales need first_slot to be a multiple of 4");
  }
  const std::span<const uint32_t> v_table =
      pages.v_page_table.empty() ? pages.page_table : pages.v_page_table;
  const auto find = [&](const EngineRows& where, uint64_t row_bytes, std::span<Byte> buffer,
                        std::span<const uint32_t> table, Byte** out) {
    return FindRows(where, row_bytes, layout.page_tokens, shape.block_tokens, buffer, table, pages,
                    out);
  };
  const uint64_t code_bytes = shape.head_dim / 2;
  const uint64_t scale_bytes = VectorsPerToken(shape);
  Status status = find(layout.k.codes, code_bytes, pages.k_codes, pages.page_table, rows->k.codes);
  if (status.ok()) {
    status = find(layout.k.scales, scale_bytes, pages.k_scales, pages.page_table, rows->k.scales);
  }
  if (status.ok()) {
    status = find(layout.v.codes, code_bytes, pages.v_codes, v_table, rows->v.codes);
  }
  if (status.ok()) {
    status = find(layout.v.scales, scale_bytes, pages.v_scales, v_table, rows->v.scales);
  }
  return status;
}

// A word with the top bit of each byte of `scales` set that no scale may have: 0x80..0xFF have it,
// and 0x7F gets it by adding 1. The additions do not carry into the next byte.
uint64_t BadScales(uint64_t scales) {
  constexpr uint64_t kLow7 = 0x7F7F7F7F7F7F7F7F;
  return (scales | ((scales & kLow7) + kLow7 / 0x7F)) & ~kLow7;
}

// Rows hold the same bytes in either order. They are short: a word at a time is several times as
// fast as a loop over bytes, which does not vectorize.
bool AllScalesValid(const TileShape& shape, const std::byte* const* rows) {
  const uint32_t row_bytes = VectorsPerToken(shape);
  uint64_t bad = 0;
  for (uint32_t token = 0; token < shape.block_tokens; ++token) {
    uint32_t s = 0;
    for (; s + sizeof(uint64_t) <= row_bytes; s += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, rows[token] + s, sizeof(word));
      bad |= BadScales(word);
    }
    for (; s < row_bytes; ++s) bad |= BadScales(std::to_integer<uint8_t>(rows[token][s]));
  }
  return bad == 0;
}

Status ValidateScales(const TileShape& shape, const TileRows<const std::byte>& rows) {
  if (!AllScalesValid(shape, rows.k.scales)) {
    return Status::DataLoss("a K scale byte of the pages is above 0x7E");
  }
  if (!AllScalesValid(shape, rows.v.scales)) {
    return Status::DataLoss("a V scale byte of the pages is above 0x7E");
  }
  return Status();
}

// The direction of a transfer is in the types: the source is const.
void Move(std::byte* tile, const std::byte* page, uint64_t bytes) {
  std::memcpy(tile, page, bytes);
}
void Move(const std::byte* tile, std::byte* page, uint64_t bytes) {
  std::memcpy(page, tile, bytes);
}

// A row of any length. Rows are too short to call a library for each.
template <typename TileByte, typename PageByte>
void MoveRow(TileByte* tile, PageByte* page, uint64_t bytes) {
  uint64_t i = 0;
  for (; i + kVectorCodeBytes <= bytes; i += kVectorCodeBytes) {
    Move(tile + i, page + i, kVectorCodeBytes);
  }
  for (; i < bytes; ++i) Move(tile + i, page + i, 1);
}

template <typename TileByte, typename PageByte>
void MoveKCodes(const TileShape& shape, TileByte* tile, PageByte* const* rows) {
  constexpr uint32_t kPanelVectors = kKPanelDims / kVectorDims;
  for (uint32_t vector = 0; vector < VectorsPerToken(shape); vector += kPanelVectors) {
    const uint32_t left = VectorsPerToken(shape) - vector;
    const uint64_t row_bytes = std::min(left, kPanelVectors) * kVectorCodeBytes;
    TileByte* panel = tile + KCodeOffset(shape, 0, vector);
    for (uint32_t token = 0; token < shape.block_tokens; ++token) {
      MoveRow(panel + token * row_bytes, rows[token] + vector * kVectorCodeBytes, row_bytes);
    }
  }
}

template <typename TileByte, typename PageByte>
void MoveVCodes(const TileShape& shape, TileByte* tile, PageByte* const* rows) {
  const uint64_t vector_stride = VCodeOffset(shape, 0, 2) - VCodeOffset(shape, 0, 0);  // Of two.
  for (uint32_t token = 0; token < shape.block_tokens; ++token) {
    for (const uint32_t parity : {0U, 1U}) {
      TileByte* run = tile + VCodeOffset(shape, token, parity);
      for (uint32_t vector = parity; vector < VectorsPerToken(shape); vector += 2) {
        Move(run, rows[token] + vector * kVectorCodeBytes, kVectorCodeBytes);
        run += vector_stride;
      }
    }
  }
}

// `tile` is a section of scales, whose rows of S bytes follow each other, in tile_order.
template <typename TileByte, typename PageByte>
void MoveScales(const TileShape& shape, ScaleOrder tile_order, ScaleOrder page_order,
                TileByte* tile, PageByte* const* rows) {
  const uint32_t row_bytes = VectorsPerToken(shape);
  if (tile_order == page_order) {
    for (uint32_t token = 0; token < shape.block_tokens; ++token) {
      MoveRow(tile + uint64_t{token} * row_bytes, rows[token], row_bytes);
    }
    return;
  }
  const uint32_t quarter = row_bytes / kGroupTokens;
  for (uint32_t group = 0; group < shape.block_tokens; group += kGroupTokens) {
    TileByte* tile_group = tile + uint64_t{group} * row_bytes;
    for (uint32_t s = 0; s < row_bytes; ++s) {
      for (uint32_t t = 0; t < kGroupTokens; ++t) {
        if (page_order == ScaleOrder::kLinear) {
          Move(tile_group + s * kGroupTokens + t, rows[group + t] + s, 1);
        } else {
          Move(tile_group + t * row_bytes + s,
               rows[group + s / quarter] + s % quarter * kGroupTokens + t, 1);
        }
      }
    }
  }
}

template <typename TileByte, typename PageByte>
void MoveTile(const TileShape& shape, const EnginePageLayout& layout, TileByte* tile,
              const TileRows<PageByte>& rows) {
  MoveKCodes(shape, tile, rows.k.codes);
  MoveScales(shape, ScaleOrder::kLinear, layout.k.scale_order, tile + KScaleOffset(shape),
             rows.k.scales);
  MoveVCodes(shape, tile, rows.v.codes);
  MoveScales(shape, ScaleOrder::kInterleaved4, layout.v.scale_order, tile + VScaleOffset(shape),
             rows.v.scales);
}

// The scale byte of vector `vector` of a token, in either order.
uint8_t ScaleOf(const TileShape& shape, ScaleOrder order, const std::byte* const* rows,
                uint32_t token, uint32_t vector) {
  const uint32_t row_bytes = VectorsPerToken(shape);
  if (order == ScaleOrder::kLinear) return std::to_integer<uint8_t>(rows[token][vector]);
  const uint32_t byte_idx = vector * kGroupTokens + token % kGroupTokens;
  const std::byte* row = rows[token / kGroupTokens * kGroupTokens + byte_idx / row_bytes];
  return std::to_integer<uint8_t>(row[byte_idx % row_bytes]);
}

// The values of tokens [first_token, first_token + kVGroupTokens) as rows of head_dim.
void DecodeTokens(const TileShape& shape, ScaleOrder order, const SideRows<const std::byte>& rows,
                  uint32_t first_token, float g, float* out) {
  for (uint32_t token = first_token; token < first_token + kVGroupTokens; ++token) {
    for (uint32_t vector = 0; vector < VectorsPerToken(shape); ++vector) {
      uint8_t codes[kVectorCodeBytes];
      std::memcpy(codes, rows.codes[token] + vector * kVectorCodeBytes, sizeof(codes));
      Dequantize16(codes, ScaleOf(shape, order, rows.scales, token, vector), 1.0F, out);
      for (uint32_t i = 0; i < kVectorDims; ++i) *out++ *= g;
    }
  }
}

// Puts a tile of kVGroupTokens tokens where they belong in a longer one.
void PlaceTokens(const TileShape& part_shape, const std::byte* part, const TileShape& shape,
                 uint32_t first_token, std::byte* tile) {
  constexpr uint32_t kPanelVectors = kKPanelDims / kVectorDims;
  for (uint32_t vector = 0; vector < VectorsPerToken(shape); vector += kPanelVectors) {
    const uint32_t left = VectorsPerToken(shape) - vector;
    std::memcpy(tile + KCodeOffset(shape, first_token, vector),
                part + KCodeOffset(part_shape, 0, vector),
                uint64_t{std::min(left, kPanelVectors)} * kVectorCodeBytes * kVGroupTokens);
  }
  std::memcpy(tile + KScaleByteOffset(shape, first_token, 0), part + KScaleOffset(part_shape),
              ScaleBytes(part_shape));
  std::memcpy(tile + VCodeOffset(shape, first_token, 0), part + VDataOffset(part_shape),
              DataBytes(part_shape));
  std::memcpy(tile + VScaleByteOffset(shape, first_token, 0), part + VScaleOffset(part_shape),
              ScaleBytes(part_shape));
}

}  // namespace

Status Validate(const EnginePageLayout& layout) {
  if (layout.kv_head_count == 0 || layout.kv_head_count > kCountMax) {
    return Status::InvalidArgument("kv_head_count must be in [1, 65536]");
  }
  if (layout.page_tokens == 0 || layout.page_tokens > kCountMax) {
    return Status::InvalidArgument("page_tokens must be in [1, 65536]");
  }
  const TileShape tile{.block_tokens = kBlockTokensMin, .head_dim = layout.head_dim};
  if (const Status status = Validate(tile); !status.ok()) return status;
  const Status status = ValidateSide(layout.k, layout);
  return status.ok() ? ValidateSide(layout.v, layout) : status;
}

Status ImportTile(const TileShape& shape, const EnginePageLayout& layout,
                  const ConstEnginePages& pages, const GlobalScales& scales,
                  std::span<std::byte> tile) {
  TileRows<const std::byte> rows;
  if (const Status status = Find(shape, layout, pages, tile.size(), &rows); !status.ok()) {
    return status;
  }
  if (AnyIsNull(tile)) return NullSpan();
  if (!IsValidGlobalScale(scales.k)) {
    return Status::InvalidArgument(
        "scales.k is not a power of two in [2^-100, 2^100]: only RequantizeTile can take it");
  }
  if (!IsValidGlobalScale(scales.v)) {
    return Status::InvalidArgument(
        "scales.v is not a power of two in [2^-100, 2^100]: only RequantizeTile can take it");
  }
  if (const Status status = ValidateScales(shape, rows); !status.ok()) return status;
  MoveTile(shape, layout, tile.data(), rows);
  return Status();
}

Status ExportTile(const TileShape& shape, std::span<const std::byte> tile,
                  const EnginePageLayout& layout, const MutableEnginePages& pages) {
  TileRows<std::byte> rows;
  if (const Status status = Find(shape, layout, pages, tile.size(), &rows); !status.ok()) {
    return status;
  }
  if (AnyIsNull(tile)) return NullSpan();
  if (const Status status = ValidateTile(shape, tile); !status.ok()) return status;
  MoveTile(shape, layout, tile.data(), rows);
  return Status();
}

Status RequantizeTile(const TileShape& shape, const EnginePageLayout& layout,
                      const ConstEnginePages& pages, const GlobalScales& scales,
                      const SealOptions& options, std::span<std::byte> tile, SealStats* stats) {
  TileRows<const std::byte> rows;
  if (const Status status = Find(shape, layout, pages, tile.size(), &rows); !status.ok()) {
    return status;
  }
  if (AnyIsNull(tile)) return NullSpan();
  for (const float scale : {scales.k, scales.v}) {
    if (!std::isfinite(scale) || scale <= 0.0F) {
      return Status::InvalidArgument("a global scale of the pages is not finite and above 0");
    }
  }
  if (const Status status = ValidateScales(shape, rows); !status.ok()) return status;
  // 16 tokens at a time, so that the values fit on the stack.
  const TileShape part_shape{.block_tokens = kVGroupTokens, .head_dim = shape.head_dim};
  float k[kVGroupTokens * kHeadDimMax];
  float v[kVGroupTokens * kHeadDimMax];
  std::byte part[TileBytes(TileShape{.block_tokens = kVGroupTokens, .head_dim = kHeadDimMax})];
  for (uint32_t token = 0; token < shape.block_tokens; token += kVGroupTokens) {
    DecodeTokens(shape, layout.k.scale_order, rows.k, token, scales.k, k);
    DecodeTokens(shape, layout.v.scale_order, rows.v, token, scales.v, v);
    // SealTile depends on the options in the same way every time: only the first call can fail.
    const Status status = SealTile(
        part_shape, {.type = ElementType::kFp32, .data = k, .token_stride = shape.head_dim},
        {.type = ElementType::kFp32, .data = v, .token_stride = shape.head_dim}, options,
        std::span(part).first(TileBytes(part_shape)), stats);
    if (!status.ok()) return status;
    PlaceTokens(part_shape, part, shape, token, tile.data());
  }
  return Status();
}

}  // namespace kvtier::kernels
