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

constexpr uint32_t kDimMax = 256;
using Pass = PassOf<kDimMax, kDimMax>;

// 16 tokens of a side of a tile. Returns the largest byte met among scales, or among magnitudes of
// FP8 numbers: above 0x7E is never written.
__m128i LoadTileSide(const AttendTiles& tiles, const TileSide& side, bool is_k, uint32_t head_dim,
                     uint64_t first, Pass* pass) {
  const std::byte* tile = tiles.blocks[first / tiles.block_tokens] + tiles.tile_offset;
  const auto first_token = static_cast<uint32_t>(first % tiles.block_tokens);
  const std::byte* data = tile + side.data_offset;
  __m128i largest = _mm_setzero_si128();
  if (side.format != AttendFormat::kNvfp4) {
    const uint64_t row_bytes = uint64_t{head_dim} * (side.format == AttendFormat::kFp8 ? 1 : 2);
    for (uint32_t t = 0; t < kChunkTokens; ++t) {
      LoadWide(side.format, data + (first_token + t) * row_bytes, head_dim, side.multiplier,
               pass->values[t]);
      const std::byte* row = data + (first_token + t) * row_bytes;
      for (uint32_t i = 0; side.format == AttendFormat::kFp8 && i < head_dim; i += 16) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + i));
        largest = _mm_max_epu8(largest, _mm_and_si128(bytes, _mm_set1_epi8(0x7F)));
      }
    }
    return largest;
  }
  const uint32_t vector_count = head_dim / 16;
  const std::byte* scales = tile + side.scale_offset + first_token * vector_count;
  for (uint32_t i = 0; i < head_dim; i += 16) {
    largest = _mm_max_epu8(largest, _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + i)));
  }
  for (uint32_t t = 0; t < kChunkTokens; ++t) {
    for (uint32_t vector = 0; vector < vector_count; ++vector) {
      const std::byte* run = data;
      const std::byte* scale = scales;
      if (is_k) {
        const uint32_t panel = vector / 8;
        const uint32_t dims_left = head_dim - panel * 128;
        run += uint64_t{panel} * tiles.block_tokens * 64 +
               (first_token + t) * (dims_left < 128 ? dims_left / 2 : 64) + vector % 8 * 8;
        scale += t * vector_count + vector;
      } else {
        run += uint64_t{first_token} * head_dim / 2 + vector * 128 + t / 4 * 32 +
               16 * ((t % 4 / 2) ^ (vector & 1)) + 8 * (t & 1);
        scale += t / 4 * 4 * vector_count + vector * 4 + t % 4;
      }
      const Vector16 values = DequantizeRun(run, ScaleToFloat(*scale) * side.multiplier);
      _mm256_store_ps(&pass->values[t][vector * 16], values.low);
      _mm256_store_ps(&pass->values[t][vector * 16 + 8], values.high);
    }
  }
  return largest;
}

}  // namespace

bool AttendTilesAvx2(const AttendQuery& query, const AttendTiles& tiles) {
  const uint32_t head_dim = query.head_dim;
  Pass pass;
  InitPass(query, &pass);
  __m128i largest = _mm_setzero_si128();
  const Span span = VisibleSpan(query, tiles.block_count * tiles.block_tokens);
  for (uint64_t first = span.first; first < span.end; first += kChunkTokens) {
    largest = _mm_max_epu8(largest, LoadTileSide(tiles, tiles.k, true, head_dim, first, &pass));
    const bool hidden = Score(query, first, kChunkTokens, &pass);
    ScoresToWeights(query, &pass);
    largest = _mm_max_epu8(largest, LoadTileSide(tiles, tiles.v, false, head_dim, first, &pass));
    if (hidden) SetAsideNonfinite(query, first, kChunkTokens, &pass);
    AddValues(query, kChunkTokens, &pass);
  }
  Finish(query, pass);
  return AllScalesValid(largest);
}

void AttendRowsAvx2(const AttendQuery& query, const AttendRows& part) {
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
