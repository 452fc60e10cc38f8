// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/attend_pass_avx512.h"
#include "kernels/cpu/attend_steps_avx512.h"
#include "kernels/cpu/avx512.h"
#include "kernels/cpu/kernel_table.h"

// The latents of a group become BF16 rows for the scores, in the word order of LoadTileK, and are
// read again in place as V: two uses of the same bytes in L1. Rows are always padded to 16, because
// models have 16 heads a rank and more.

namespace kvtier::kernels::cpu {
namespace {

constexpr int kRows = kAttendRowsMax;
constexpr uint32_t kRopeDims = kMlaKeyDims - kMlaValueDims;
constexpr uint32_t kRopePanelDims = 32;
constexpr uint64_t kTokenDataBytes = kMlaValueDims / 2;
constexpr uint64_t kTokenScaleBytes = kMlaValueDims / 16;
using Pass = PassOf<kMlaKeyDims, kMlaValueDims>;

struct Group {
  const std::byte* data;
  const std::byte* scales;
  const std::byte* ropes;  // Of the first panel; the second is block_tokens * 64 bytes later.
};

Group GroupAt(const AttendMlaTiles& tiles, uint64_t token) {
  const std::byte* tile = tiles.blocks[token / tiles.block_tokens] + tiles.tile_offset;
  const uint64_t first = token % tiles.block_tokens;
  return {.data = tile + first * kTokenDataBytes,
          .scales = tile + tiles.block_tokens * kTokenDataBytes + first * kTokenScaleBytes,
          .ropes = tile + tiles.block_tokens * (kTokenDataBytes + kTokenScaleBytes) +
                   first * kRopePanelDims * 2};
}

KVTIER_AVX512_INLINE void RequestGroup(const AttendMlaTiles& tiles, uint64_t token) {
  const Group group = GroupAt(tiles, token);
  Prefetch(group.data, kGroupTokens * kTokenDataBytes);
  Prefetch(group.scales, kGroupTokens * kTokenScaleBytes);
  for (uint32_t panel = 0; panel < 2; ++panel) {
    Prefetch(group.ropes + uint64_t{panel} * tiles.block_tokens * kRopePanelDims * 2,
             uint64_t{kGroupTokens} * kRopePanelDims * 2);
  }
}

// Latents of a group -> pass->wide and pass->k_scales, ropes -> pass->wide behind them, scale bytes
// to pass->v_scales of the chunk. Returns the largest scale byte.
__m512i LoadGroup(const AttendMlaTiles& tiles, const Group& group, uint32_t chunk_token,
                  Pass* pass) {
  const __m512i table = E2m1Bf16Table();
  // Of two times two vectors of four tokens each: token a of all four vectors, then token b.
  const __m512i first_pair = _mm512_setr_epi64(0, 6, 8, 14, 1, 7, 9, 15);
  const __m512i second_pair = _mm512_setr_epi64(2, 4, 10, 12, 3, 5, 11, 13);
  for (uint32_t first = 0; first < kMlaValueDims; first += 64) {
    for (uint32_t quad = 0; quad < 4; ++quad) {
      const std::byte* codes = group.data + first / 16 * 128 + quad * 32;
      const auto two = [&](uint32_t vector) {
        const auto* low = reinterpret_cast<const __m256i*>(codes + vector * 128);
        const auto* high = reinterpret_cast<const __m256i*>(codes + (vector + 1) * 128);
        return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(low)),
                                  _mm256_loadu_si256(high), 1);
      };
      const __m512i a = two(0);
      const __m512i b = two(2);
      const __m512i pairs[2] = {_mm512_permutex2var_epi64(a, first_pair, b),
                                _mm512_permutex2var_epi64(a, second_pair, b)};
      for (uint32_t t = 0; t < 4; ++t) {
        const __m512i pair = pairs[t / 2];
        const __m512i index = _mm512_cvtepu8_epi16(t % 2 == 0 ? _mm512_castsi512_si256(pair)
                                                              : _mm512_extracti64x4_epi64(pair, 1));
        uint16_t* target = &pass->wide[quad * 4 + t][first];
        _mm512_store_si512(target, _mm512_permutexvar_epi16(index, table));
        _mm512_store_si512(target + 32,
                           _mm512_permutexvar_epi16(_mm512_srli_epi16(index, 4), table));
      }
    }
  }
  __m128i largest = _mm_setzero_si128();
  for (uint32_t first = 0; first < kMlaValueDims / 16; first += 16) {
    __m512 scales[16];
    for (uint32_t i = 0; i < 16; ++i) {
      const __m128i bytes = _mm_loadu_si128(
          reinterpret_cast<const __m128i*>(group.scales + (first + i) * kGroupTokens));
      largest = _mm_max_epu8(largest, bytes);
      _mm_store_si128(reinterpret_cast<__m128i*>(&pass->v_scales[first + i][chunk_token]), bytes);
      scales[i] = ScalesToFloat(bytes);
    }
    Transpose16(scales);
    for (uint32_t t = 0; t < kGroupTokens; ++t)
      _mm512_storeu_ps(&pass->k_scales[t][first], scales[t]);
  }
  for (uint32_t t = 0; t < kGroupTokens; ++t) {
    const std::byte* row = group.ropes + t * kRopePanelDims * 2;
    uint16_t* target = &pass->wide[t][kMlaValueDims];
    _mm512_store_si512(target, _mm512_loadu_si512(row));
    _mm512_store_si512(target + 32,
                       _mm512_loadu_si512(row + uint64_t{tiles.block_tokens} * kRopePanelDims * 2));
  }
  return _mm512_castsi128_si512(largest);
}

// Scores of a group that LoadGroup left in pass->wide.
void ScoreGroup(const AttendQuery& query, const Factors& rope_factors, float latent_factor,
                uint32_t first_token, Pass* pass) {
  const std::byte* ropes[kGroupTokens];
  for (uint32_t t = 0; t < kGroupTokens; ++t) {
    ropes[t] = reinterpret_cast<const std::byte*>(&pass->wide[t][kMlaValueDims]);
  }
  ScoreRows<kRows, false>(query, ropes, kRopeDims, kMlaValueDims, rope_factors, first_token,
                          kGroupTokens, pass);
  if (query.is_bf16) {
    ScoreTileGroup<kRows, 1, true>(kMlaValueDims, latent_factor, nullptr, first_token, pass);
  } else {
    ScoreTileGroup<kRows, 2, true>(kMlaValueDims, latent_factor, nullptr, first_token, pass);
  }
}

}  // namespace

bool AttendMlaTilesAvx512(const AttendQuery& query, const AttendMlaTiles& tiles) {
  Pass pass;
  PrepareQuery(query, kRows, kMlaValueDims, &pass);
  InitPass(query, kRows, &pass);
  const Factors rope_factors = MakeFactors(query, 1.0F);
  const float latent_factor = rope_factors.scale * tiles.g * kScaleUnit;
  const uint64_t token_count = tiles.block_count * tiles.block_tokens;
  const Span span = VisibleSpan(query, token_count);
  const uint64_t end = (span.end + kGroupTokens - 1) / kGroupTokens * kGroupTokens;
  __m512i largest = _mm512_setzero_si512();
  for (uint64_t first = span.first; first < end; first += kChunkTokens) {
    TokenGroup groups[kChunkTokens / kGroupTokens];
    uint32_t count = 0;
    for (; count < kChunkTokens && first + count < end; count += kGroupTokens) {
      const uint64_t ahead = first + count + kGroupTokens;
      if (ahead < end) RequestGroup(tiles, ahead);
      const Group group = GroupAt(tiles, first + count);
      groups[count / kGroupTokens] = {.tile = group.data, .first_token = 0};
      largest = _mm512_max_epu8(largest, LoadGroup(tiles, group, count, &pass));
      ScoreGroup(query, rope_factors, latent_factor, count, &pass);
    }
    ScoresToWeights(query, first, count, &pass);
    AddTileV<kRows>(0, kMlaValueDims, groups, count / kGroupTokens, &pass);
  }
  Finish(query, AttendFormat::kNvfp4, tiles.g * kScaleUnit / 2, pass);
  return _mm512_cmpgt_epu8_mask(largest, _mm512_set1_epi8(0x7E)) == 0;
}

void AttendMlaRowsAvx512(const AttendQuery& query, const AttendMlaRows& part) {
  Pass pass;
  PrepareQuery(query, kRows, 0, &pass);
  InitPass(query, kRows, &pass);
  const Factors latent_factors = MakeFactors(query, part.latent.multiplier);
  const Factors rope_factors = MakeFactors(query, part.rope.multiplier);
  const Span span = VisibleSpan(query, part.token_count);
  for (uint64_t first = span.first; first < span.end; first += kChunkTokens) {
    const uint64_t left = span.end - first;
    const auto count = static_cast<uint32_t>(left < kChunkTokens ? left : uint64_t{kChunkTokens});
    const std::byte* latents[kChunkTokens];
    const std::byte* ropes[kChunkTokens];
    for (uint32_t t = 0; t < count; ++t) {
      latents[t] = part.latent.data + (first + t) * part.latent.stride_bytes;
      ropes[t] = part.rope.data + (first + t) * part.rope.stride_bytes;
    }
    // An FP8 NaN belongs to the results here.
    WidenRows(part.latent.format, kMlaValueDims, 0, count, latents, &pass);
    WidenRows(part.rope.format, kRopeDims, kMlaValueDims, count, ropes, &pass);
    for (uint32_t t = 0; t < count; t += kGroupTokens) {
      const uint32_t tokens = count - t < kGroupTokens ? count - t : kGroupTokens;
      ScoreRows<kRows, false>(query, ropes + t, kRopeDims, kMlaValueDims, rope_factors, t, tokens,
                              &pass);
      ScoreRows<kRows, true>(query, latents + t, kMlaValueDims, 0, latent_factors, t, tokens,
                             &pass);
    }
    if (ScoresToWeights(query, first, count, &pass)) {
      SetAsideNonfinite(query, first, count, latents, &pass);
    }
    AddRowV<kRows>(latents, kMlaValueDims, count, &pass);
  }
  Finish(query, part.latent.format, part.latent.multiplier, pass);
}

}  // namespace kvtier::kernels::cpu
