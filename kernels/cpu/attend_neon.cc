// SPDX-License-Identifier: Apache-2.0
#include <arm_neon.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/attend_steps_neon.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/neon.h"

namespace kvtier::kernels::cpu {
namespace {

constexpr uint32_t kDimMax = 256;
using Pass = PassOf<kDimMax, kDimMax>;

// 16 tokens of a side of a tile. Returns the largest bytes met among scales, or among magnitudes of
// FP8 numbers: above 0x7E is never written.
uint8x16_t LoadTileSide(const AttendTiles& tiles, const TileSide& side, SideOrder order,
                        uint32_t head_dim, uint64_t first, Pass* pass) {
  const std::byte* tile = tiles.blocks[first / tiles.block_tokens] + tiles.tile_offset;
  const auto first_token = static_cast<uint32_t>(first % tiles.block_tokens);
  const std::byte* data = tile + side.data_offset;
  uint8x16_t largest = vdupq_n_u8(0);
  if (side.format != AttendFormat::kNvfp4) {
    const uint64_t row_bytes = uint64_t{head_dim} * (side.format == AttendFormat::kFp8 ? 1 : 2);
    for (uint32_t t = 0; t < kChunkTokens; ++t) {
      const std::byte* row = data + (first_token + t) * row_bytes;
      LoadWide(side.format, row, head_dim, side.multiplier, pass->values[t]);
      for (uint32_t i = 0; side.format == AttendFormat::kFp8 && i < head_dim; i += 16) {
        largest = vmaxq_u8(largest, vandq_u8(LoadBytes(row + i), vdupq_n_u8(0x7F)));
      }
    }
    return largest;
  }
  const uint32_t vector_count = head_dim / 16;
  const std::byte* scales = tile + side.scale_offset;
  for (uint32_t i = 0; i < head_dim; i += 16) {
    largest = vmaxq_u8(largest, LoadBytes(scales + uint64_t{first_token} * vector_count + i));
  }
  for (uint32_t t = 0; t < kChunkTokens; t += kQuadTokens) {
    for (uint32_t vector = 0; vector < vector_count; ++vector) {
      const QuadPlace place = PlaceOf(order, tiles.block_tokens, head_dim, first_token + t, vector);
      LoadQuad(data, scales, place, side.multiplier, t, vector, pass);
    }
  }
  return largest;
}

}  // namespace

bool AttendTilesNeon(const AttendQuery& query, const AttendTiles& tiles) {
  Pass pass;
  InitPass(query, &pass);
  uint8x16_t largest = vdupq_n_u8(0);
  const Span span = VisibleSpan(query, tiles.block_count * tiles.block_tokens);
  for (uint64_t first = span.first; first < span.end; first += kChunkTokens) {
    const auto load = [&](const TileSide& side, SideOrder order) {
      largest = vmaxq_u8(largest, LoadTileSide(tiles, side, order, query.head_dim, first, &pass));
    };
    load(tiles.k, SideOrder::kK);
    const bool hidden = Score(query, first, kChunkTokens, &pass);
    ScoresToWeights(query, &pass);
    load(tiles.v, SideOrder::kV);
    if (hidden) SetAsideNonfinite(query, first, kChunkTokens, &pass);
    AddValues(query, kChunkTokens, &pass);
  }
  Finish(query, pass);
  return vmaxvq_u8(largest) <= 0x7E;
}

void AttendRowsNeon(const AttendQuery& query, const AttendRows& part) {
  Pass pass;
  InitPass(query, &pass);
  const Span span = VisibleSpan(query, part.token_count);
  for (uint64_t first = span.first; first < span.end; first += kChunkTokens) {
    const uint64_t left = part.token_count - first;
    const auto count = static_cast<uint32_t>(left < kChunkTokens ? left : uint64_t{kChunkTokens});
    // Scores of the rest of a chunk are computed and masked: they must come from numbers.
    if (count < kChunkTokens) std::memset(pass.values, 0, sizeof(pass.values));
    LoadRows(part.k, query.head_dim, first, count, 0, &pass);
    const bool hidden = Score(query, first, count, &pass);
    ScoresToWeights(query, &pass);
    LoadRows(part.v, query.value_dim, first, count, 0, &pass);
    if (hidden) SetAsideNonfinite(query, first, count, &pass);
    AddValues(query, count, &pass);
  }
  Finish(query, pass);
}

}  // namespace kvtier::kernels::cpu
