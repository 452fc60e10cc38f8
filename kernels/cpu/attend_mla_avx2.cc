// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/attend_steps_avx2.h"
#include "kernels/cpu/avx2.h"
#include "kernels/cpu/kernel_table.h"

namespace kvtier::kernels::cpu {
namespace {

constexpr uint32_t kRopePanelDims = 32;
using Pass = PassOf<kMlaKeyDims, kMlaValueDims>;

// 16 tokens of a tile: latents, then ropes. Returns the largest scale byte met.
__m128i LoadTile(const AttendMlaTiles& tiles, uint64_t first, Pass* pass) {
  constexpr uint64_t kTokenDataBytes = kMlaValueDims / 2;
  constexpr uint64_t kTokenScaleBytes = kMlaValueDims / 16;
  const std::byte* tile = tiles.blocks[first / tiles.block_tokens] + tiles.tile_offset;
  const uint64_t first_token = first % tiles.block_tokens;
  const std::byte* data = tile + first_token * kTokenDataBytes;
  const std::byte* scales =
      tile + tiles.block_tokens * kTokenDataBytes + first_token * kTokenScaleBytes;
  const std::byte* ropes = tile + tiles.block_tokens * (kTokenDataBytes + kTokenScaleBytes) +
                           first_token * kRopePanelDims * 2;
  __m128i largest = _mm_setzero_si128();
  for (uint32_t vector = 0; vector < kMlaValueDims / 16; ++vector) {
    const std::byte* scale = scales + vector * kChunkTokens;
    largest = _mm_max_epu8(largest, _mm_loadu_si128(reinterpret_cast<const __m128i*>(scale)));
    for (uint32_t t = 0; t < kChunkTokens; ++t) {
      const std::byte* run =
          data + vector * 128 + t / 4 * 32 + 16 * ((t % 4 / 2) ^ (vector & 1)) + 8 * (t & 1);
      const Vector16 values = DequantizeRun(run, ScaleToFloat(scale[t]) * tiles.g);
      _mm256_store_ps(&pass->values[t][vector * 16], values.low);
      _mm256_store_ps(&pass->values[t][vector * 16 + 8], values.high);
    }
  }
  for (uint32_t t = 0; t < kChunkTokens; ++t) {
    for (uint32_t panel = 0; panel < 2; ++panel) {
      const std::byte* row =
          ropes + (uint64_t{panel} * tiles.block_tokens + t) * kRopePanelDims * 2;
      LoadWide(AttendFormat::kBf16, row, kRopePanelDims, 1.0F,
               &pass->values[t][kMlaValueDims + panel * kRopePanelDims]);
    }
  }
  return largest;
}

}  // namespace

bool AttendMlaTilesAvx2(const AttendQuery& query, const AttendMlaTiles& tiles) {
  Pass pass;
  InitPass(query, &pass);
  __m128i largest = _mm_setzero_si128();
  const Span span = VisibleSpan(query, tiles.block_count * tiles.block_tokens);
  for (uint64_t first = span.first; first < span.end; first += kChunkTokens) {
    largest = _mm_max_epu8(largest, LoadTile(tiles, first, &pass));
    Score(query, first, kChunkTokens, &pass);
    ScoresToWeights(query, &pass);
    AddValues(query, kChunkTokens, &pass);
  }
  Finish(query, pass);
  return AllScalesValid(largest);
}

void AttendMlaRowsAvx2(const AttendQuery& query, const AttendMlaRows& part) {
  Pass pass;
  InitPass(query, &pass);
  const Span span = VisibleSpan(query, part.token_count);
  for (uint64_t first = span.first; first < span.end; first += kChunkTokens) {
    const uint64_t left = part.token_count - first;
    const auto count = static_cast<uint32_t>(left < kChunkTokens ? left : uint64_t{kChunkTokens});
    // Scores of the rest of a chunk are computed and masked: they must come from numbers.
    if (count < kChunkTokens) std::memset(pass.values, 0, sizeof(pass.values));
    LoadRows(part.latent, kMlaValueDims, first, count, 0, &pass);
    LoadRows(part.rope, kMlaKeyDims - kMlaValueDims, first, count, kMlaValueDims, &pass);
    const bool hidden = Score(query, first, count, &pass);
    ScoresToWeights(query, &pass);
    if (hidden) SetAsideNonfinite(query, first, count, &pass);
    AddValues(query, count, &pass);
  }
  Finish(query, pass);
}

}  // namespace kvtier::kernels::cpu
