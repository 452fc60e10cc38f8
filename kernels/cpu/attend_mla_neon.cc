// SPDX-License-Identifier: Apache-2.0
#include <arm_neon.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/attend_steps_neon.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/neon.h"
#include "kernels/mla_layout.h"

namespace kvtier::kernels::cpu {
namespace {

using Pass = PassOf<kMlaKeyDims, kMlaValueDims>;

// 16 tokens of a tile: latents, then ropes. Returns the largest scale bytes met.
uint8x16_t LoadTile(const AttendMlaTiles& tiles, uint64_t first, Pass* pass) {
  const MlaShape shape{.block_tokens = tiles.block_tokens};
  const std::byte* tile = tiles.blocks[first / tiles.block_tokens] + tiles.tile_offset;
  const auto first_token = static_cast<uint32_t>(first % tiles.block_tokens);
  const std::byte* scales = tile + MlaScaleOffset(shape);
  uint8x16_t largest = vdupq_n_u8(0);
  for (uint32_t vector = 0; vector < kMlaValueDims / 16; ++vector) {
    largest = vmaxq_u8(largest, LoadBytes(tile + MlaScaleByteOffset(shape, first_token, vector)));
    for (uint32_t t = 0; t < kChunkTokens; t += kQuadTokens) {
      const QuadPlace place =
          PlaceOf(SideOrder::kLatent, tiles.block_tokens, kMlaValueDims, first_token + t, vector);
      LoadQuad(tile, scales, place, tiles.g, t, vector, pass);
    }
  }
  for (uint32_t t = 0; t < kChunkTokens; ++t) {
    for (uint32_t dim = 0; dim < kMlaRopeDim; dim += kMlaRopePanelDims) {
      LoadWide(AttendFormat::kBf16, tile + MlaRopeElementOffset(shape, first_token + t, dim),
               kMlaRopePanelDims, 1.0F, &pass->values[t][kMlaValueDims + dim]);
    }
  }
  return largest;
}

}  // namespace

bool AttendMlaTilesNeon(const AttendQuery& query, const AttendMlaTiles& tiles) {
  Pass pass;
  InitPass(query, &pass);
  uint8x16_t largest = vdupq_n_u8(0);
  const Span span = VisibleSpan(query, tiles.block_count * tiles.block_tokens);
  for (uint64_t first = span.first; first < span.end; first += kChunkTokens) {
    largest = vmaxq_u8(largest, LoadTile(tiles, first, &pass));
    Score(query, first, kChunkTokens, &pass);
    ScoresToWeights(query, &pass);
    AddValues(query, kChunkTokens, &pass);
  }
  Finish(query, pass);
  return vmaxvq_u8(largest) <= 0x7E;
}

void AttendMlaRowsNeon(const AttendQuery& query, const AttendMlaRows& part) {
  Pass pass;
  InitPass(query, &pass);
  const Span span = VisibleSpan(query, part.token_count);
  for (uint64_t first = span.first; first < span.end; first += kChunkTokens) {
    const uint64_t left = part.token_count - first;
    const auto count = static_cast<uint32_t>(left < kChunkTokens ? left : uint64_t{kChunkTokens});
    // Scores of the rest of a chunk are computed and masked: they must come from numbers.
    if (count < kChunkTokens) std::memset(pass.values, 0, sizeof(pass.values));
    LoadRows(part.latent, kMlaValueDims, first, count, 0, &pass);
    LoadRows(part.rope, kMlaRopeDim, first, count, kMlaValueDims, &pass);
    const bool hidden = Score(query, first, count, &pass);
    ScoresToWeights(query, &pass);
    if (hidden) SetAsideNonfinite(query, first, count, &pass);
    AddValues(query, count, &pass);
  }
  Finish(query, pass);
}

}  // namespace kvtier::kernels::cpu
