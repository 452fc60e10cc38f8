// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/attend_steps_avx512.h"
#include "kernels/cpu/kernel_table.h"

namespace kvtier::kernels::cpu {
namespace {

// FP8 E4M3 (signed) rows -> BF16 rows in pass->wide. Exact; the two NaN bytes become NaN.
void WidenFp8Rows(const std::byte* const* rows, uint32_t head_dim, uint32_t token_count,
                  Pass* pass) {
  const __m512i magnitude_mask = _mm512_set1_epi16(0x7F);
  const __m512 unit = _mm512_set1_ps(kScaleUnit);
  for (uint32_t t = 0; t < token_count; ++t) {
    for (uint32_t dim = 0; dim < head_dim; dim += 32) {
      const auto mask = static_cast<__mmask32>(head_dim - dim >= 32 ? ~0U : 0xFFFFU);
      const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, rows[t] + dim));
      const __m512i magnitude = _mm512_and_si512(bytes, magnitude_mask);
      const __m512i half =
          _mm512_or_si512(_mm512_slli_epi16(magnitude, 7),
                          _mm512_slli_epi16(_mm512_andnot_si512(magnitude_mask, bytes), 8));
      const __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
      const __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
      const __m512i values =
          (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(high, unit), _mm512_mul_ps(low, unit));
      const __mmask32 nan = _mm512_cmpeq_epi16_mask(magnitude, magnitude_mask);
      _mm512_store_si512(&pass->wide[t][dim],
                         _mm512_mask_mov_epi16(values, nan, _mm512_set1_epi16(0x7FC0)));
    }
  }
}

// Replaces rows by their BF16 form if they have another.
void WidenRows(SideFormat format, uint32_t head_dim, uint32_t token_count, const std::byte** rows,
               Pass* pass) {
  if (format != SideFormat::kFp8) return;
  WidenFp8Rows(rows, head_dim, token_count, pass);
  for (uint32_t t = 0; t < token_count; ++t) {
    rows[t] = reinterpret_cast<const std::byte*>(pass->wide[t]);
  }
}

uint32_t ElementBytesOf(SideFormat format) { return format == SideFormat::kFp8 ? 1 : 2; }

template <int kRows>
void ScoreRows(const AttendQuery& query, const std::byte* const* rows, float factor,
               const float* bias, uint32_t token_count, Pass* pass) {
  for (uint32_t t = 0; t < token_count; t += kGroupTokens) {
    const std::byte* group[kGroupTokens];
    for (uint32_t i = 0; i < kGroupTokens; ++i) {
      group[i] = rows[t + i < token_count ? t + i : token_count - 1];
    }
    if (query.is_bf16) {
      ScoreRowGroup<kRows, 1>(group, query.head_dim, factor, bias, t, pass);
    } else {
      ScoreRowGroup<kRows, 2>(group, query.head_dim, factor, bias, t, pass);
    }
  }
}

// The rest of AttendQuery in the log2 domain and padded to kRows.
struct Factors {
  float scale;
  float bias[kAttendRowsMax];
};

Factors MakeFactors(const AttendQuery& query, float multiplier) {
  Factors factors{};
  factors.scale = query.scale * kLog2E * multiplier;
  for (uint32_t row = 0; row < query.row_count; ++row) factors.bias[row] = query.bias[row] * kLog2E;
  return factors;
}

// Tokens that at least one row sees, from a whole chunk on.
struct Span {
  uint64_t first;
  uint64_t end;
};

Span VisibleSpan(const AttendQuery& query, uint64_t token_count) {
  Span span{token_count, 0};
  for (uint32_t row = 0; row < query.row_count; ++row) {
    if (query.begin[row] < span.first) span.first = query.begin[row];
    if (query.end[row] > span.end) span.end = query.end[row];
  }
  if (span.end > token_count) span.end = token_count;
  span.first = span.first / kChunkTokens * kChunkTokens;
  return span;
}

// acc / sum, lanes back to dims, and the log-sum-exp.
void Finish(const AttendQuery& query, SideFormat v_format, float multiplier, const Pass& pass) {
  for (uint32_t row = 0; row < query.row_count; ++row) {
    const float sum = _mm512_reduce_add_ps(_mm512_load_ps(pass.lane_sum[row]));
    float* out = query.out + uint64_t{row} * query.head_dim;
    if (sum == 0.0F) {
      std::memset(out, 0, query.head_dim * sizeof(float));
      query.lse[row] = -INFINITY;
      continue;
    }
    query.lse[row] = pass.maximum[row] * kLn2 + std::log(sum);
    const float factor = multiplier / sum;
    for (uint32_t dim = 0; dim < query.head_dim; ++dim) {
      if (v_format == SideFormat::kNvfp4) {
        const float* lanes = &pass.acc[row][dim / 16 * 32 + dim % 2 * 16 + dim % 16 / 2 * 2];
        out[dim] = (lanes[0] + lanes[1]) * factor;
      } else {
        // unpacklo and unpackhi take 4 dims of each 8 by turns.
        const uint32_t in_step = dim % 32;
        const uint32_t lane = in_step / 8 * 4 + in_step % 4;
        out[dim] = pass.acc[row][dim / 32 * 32 + in_step % 8 / 4 * 16 + lane] * factor;
      }
    }
  }
}

template <int kRows>
bool AttendTilesOf(const AttendQuery& query, const AttendTiles& tiles, Pass* pass) {
  const bool k_nvfp4 = tiles.k.format == SideFormat::kNvfp4;
  const bool v_nvfp4 = tiles.v.format == SideFormat::kNvfp4;
  const Factors factors = MakeFactors(query, tiles.k.multiplier * (k_nvfp4 ? kScaleUnit : 1.0F));
  const uint64_t token_count = tiles.block_count * tiles.block_tokens;
  const Span span = VisibleSpan(query, token_count);
  __m512i largest = _mm512_setzero_si512();
  for (uint64_t first = span.first; first < span.end; first += kChunkTokens) {
    const uint64_t left = token_count - first;
    const auto count = static_cast<uint32_t>(left < kChunkTokens ? left : kChunkTokens);
    const uint32_t group_count = count / kGroupTokens;
    TokenGroup groups[kChunkTokens / kGroupTokens];
    const std::byte* rows[kChunkTokens];
    for (uint32_t i = 0; i < group_count; ++i) {
      const uint64_t token = first + i * kGroupTokens;
      groups[i].tile = tiles.blocks[token / tiles.block_tokens] + tiles.tile_offset;
      groups[i].first_token = static_cast<uint32_t>(token % tiles.block_tokens);
    }
    const auto point_at_rows = [&](const TileSide& side) {
      const uint64_t row_bytes = uint64_t{query.head_dim} * ElementBytesOf(side.format);
      for (uint32_t t = 0; t < count; ++t) {
        const TokenGroup& group = groups[t / kGroupTokens];
        rows[t] =
            group.tile + side.data_offset + (group.first_token + t % kGroupTokens) * row_bytes;
      }
      WidenRows(side.format, query.head_dim, count, rows, pass);
    };
    if (k_nvfp4) {
      for (uint32_t i = 0; i < group_count; ++i) {
        largest = _mm512_max_epu8(largest, LoadTileK(tiles, query.head_dim, groups[i], pass));
        if (query.is_bf16) {
          ScoreTileGroup<kRows, 1>(query.head_dim, factors.scale, factors.bias, i * kGroupTokens,
                                   pass);
        } else {
          ScoreTileGroup<kRows, 2>(query.head_dim, factors.scale, factors.bias, i * kGroupTokens,
                                   pass);
        }
      }
    } else {
      point_at_rows(tiles.k);
      ScoreRows<kRows>(query, rows, factors.scale, factors.bias, count, pass);
    }
    ScoresToWeights(query, first, count, pass);
    if (v_nvfp4) {
      largest = _mm512_max_epu8(largest,
                                LoadTileVScales(tiles, query.head_dim, groups, group_count, pass));
      AddTileV<kRows>(tiles, query.head_dim, groups, group_count, pass);
    } else {
      point_at_rows(tiles.v);
      AddRowV<kRows>(rows, query.head_dim, count, pass);
    }
  }
  Finish(query, tiles.v.format, tiles.v.multiplier * (v_nvfp4 ? kScaleUnit : 1.0F), *pass);
  return _mm512_cmpgt_epu8_mask(largest, _mm512_set1_epi8(0x7E)) == 0;
}

template <int kRows>
void AttendRowsOf(const AttendQuery& query, const AttendRows& part, Pass* pass) {
  const Factors factors = MakeFactors(query, part.k.multiplier);
  const Span span = VisibleSpan(query, part.token_count);
  for (uint64_t first = span.first; first < span.end; first += kChunkTokens) {
    const uint64_t left = part.token_count - first;
    const auto count = static_cast<uint32_t>(left < kChunkTokens ? left : kChunkTokens);
    const std::byte* rows[kChunkTokens];
    const auto point_at_rows = [&](const AttendSide& side) {
      for (uint32_t t = 0; t < count; ++t) rows[t] = side.data + (first + t) * side.stride_bytes;
      WidenRows(side.format, query.head_dim, count, rows, pass);
    };
    point_at_rows(part.k);
    ScoreRows<kRows>(query, rows, factors.scale, factors.bias, count, pass);
    ScoresToWeights(query, first, count, pass);
    point_at_rows(part.v);
    AddRowV<kRows>(rows, query.head_dim, count, pass);
  }
  Finish(query, part.v.format, part.v.multiplier, *pass);
}

bool AttendTilesAvx512(const AttendQuery& query, const AttendTiles& tiles) {
  Pass pass;
  const uint32_t rows = PaddedRows(query.row_count);
  PrepareQuery(query, rows, tiles.k.format == SideFormat::kNvfp4, &pass);
  InitPass(query, rows, &pass);
  switch (rows) {
    case 1:
      return AttendTilesOf<1>(query, tiles, &pass);
    case 2:
      return AttendTilesOf<2>(query, tiles, &pass);
    case 4:
      return AttendTilesOf<4>(query, tiles, &pass);
    case 8:
      return AttendTilesOf<8>(query, tiles, &pass);
    default:
      return AttendTilesOf<16>(query, tiles, &pass);
  }
}

void AttendRowsAvx512(const AttendQuery& query, const AttendRows& part) {
  Pass pass;
  const uint32_t rows = PaddedRows(query.row_count);
  PrepareQuery(query, rows, false, &pass);
  InitPass(query, rows, &pass);
  switch (rows) {
    case 1:
      return AttendRowsOf<1>(query, part, &pass);
    case 2:
      return AttendRowsOf<2>(query, part, &pass);
    case 4:
      return AttendRowsOf<4>(query, part, &pass);
    case 8:
      return AttendRowsOf<8>(query, part, &pass);
    default:
      return AttendRowsOf<16>(query, part, &pass);
  }
}

}  // namespace

const KernelTable kAvx512Kernels = {.attend_tiles = AttendTilesAvx512,
                                    .attend_rows = AttendRowsAvx512};

}  // namespace kvtier::kernels::cpu
