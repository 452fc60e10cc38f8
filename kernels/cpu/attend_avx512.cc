// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>
#include <math.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/attend_steps_avx512.h"
#include "kernels/cpu/kernel_table.h"

namespace kvtier::kernels::cpu {
namespace {

// FP8 rows -> BF16 rows in pass->wide, exact.
void WidenFp8Rows(const std::byte* const* rows, uint32_t head_dim, uint32_t token_count,
                  Pass* pass) {
  for (uint32_t t = 0; t < token_count; ++t) {
    for (uint32_t dim = 0; dim < head_dim; dim += 16) {
      const __m512 value =
          Fp8ToFloat(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[t] + dim)));
      _mm256_store_si256(reinterpret_cast<__m256i*>(&pass->wide[t][dim]),
                         _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(value), 16)));
    }
  }
}

// Replaces rows by their BF16 form if they have another.
void WidenRows(AttendFormat format, uint32_t head_dim, uint32_t token_count, const std::byte** rows,
               Pass* pass) {
  if (format != AttendFormat::kFp8) return;
  WidenFp8Rows(rows, head_dim, token_count, pass);
  for (uint32_t t = 0; t < token_count; ++t) {
    rows[t] = reinterpret_cast<const std::byte*>(pass->wide[t]);
  }
}

uint32_t ElementBytesOf(AttendFormat format) { return format == AttendFormat::kFp8 ? 1 : 2; }

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

// Scores of up to 16 rows; the score of token `first_token` of the chunk is the first.
template <int kRows>
void ScoreRows(const AttendQuery& query, const std::byte* const* rows, const Factors& factors,
               uint32_t first_token, uint32_t token_count, Pass* pass) {
  const std::byte* group[kGroupTokens];
  for (uint32_t i = 0; i < kGroupTokens; ++i) {
    group[i] = rows[i < token_count ? i : token_count - 1];
  }
  if (query.is_bf16) {
    ScoreRowGroup<kRows, 1>(group, query.head_dim, factors.scale, factors.bias, first_token, pass);
  } else {
    ScoreRowGroup<kRows, 2>(group, query.head_dim, factors.scale, factors.bias, first_token, pass);
  }
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
void Finish(const AttendQuery& query, AttendFormat v_format, float multiplier, const Pass& pass) {
  for (uint32_t row = 0; row < query.row_count; ++row) {
    const float sum = _mm512_reduce_add_ps(_mm512_load_ps(pass.lane_sum[row]));
    float* out = query.out + uint64_t{row} * query.head_dim;
    if (sum == 0.0F) {
      std::memset(out, 0, query.head_dim * sizeof(float));
      query.lse[row] = -INFINITY;
      continue;
    }
    query.lse[row] = pass.maximum[row] * kLn2 + logf(sum);
    const float factor = multiplier / sum;
    for (uint32_t dim = 0; dim < query.head_dim; ++dim) {
      if (v_format == AttendFormat::kNvfp4) {
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

// Bytes of one side of 16 tokens.
uint64_t GroupBytes(AttendFormat format, uint32_t head_dim) {
  if (format == AttendFormat::kNvfp4) return uint64_t{head_dim} * kGroupTokens / 2;
  return uint64_t{head_dim} * kGroupTokens * ElementBytesOf(format);
}

// Always inlined: GCC 12 takes a function of prefetches only for one without effect and drops it.
KVTIER_AVX512_INLINE void Prefetch(const std::byte* data, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; i += 64) _mm_prefetch(data + i, _MM_HINT_T0);
}

// Sealed tokens by chunks. Hardware prefetchers stop at the end of each tile, so the next chunk is
// requested here while this one is computed.
class TileStream {
 public:
  TileStream(const AttendTiles& tiles, uint32_t head_dim, uint64_t end)
      : tiles_(tiles),
        head_dim_(head_dim),
        end_((end + kGroupTokens - 1) / kGroupTokens * kGroupTokens) {}

  // The groups of the chunk at token `first`; returns how many.
  uint32_t Groups(uint64_t first, TokenGroup* groups) const {
    const uint64_t left = end_ - first;
    const auto count =
        static_cast<uint32_t>((left < kChunkTokens ? left : uint64_t{kChunkTokens}) / kGroupTokens);
    for (uint32_t i = 0; i < count; ++i) groups[i] = Group(first + i * kGroupTokens);
    return count;
  }

  // Requests the group that begins at `token`, if there is one.
  [[gnu::always_inline]] inline void Request(uint64_t token) const {
    if (token >= end_) return;
    const TokenGroup group = Group(token);
    const TileSide* const sides[] = {&tiles_.k, &tiles_.v};
    for (const TileSide* side : sides) {
      const uint64_t bytes = GroupBytes(side->format, head_dim_);
      Prefetch(group.tile + side->data_offset + group.first_token / kGroupTokens * bytes, bytes);
      if (side->format == AttendFormat::kNvfp4) {
        Prefetch(group.tile + side->scale_offset + group.first_token * (head_dim_ / 16), head_dim_);
      }
    }
  }

 private:
  TokenGroup Group(uint64_t token) const {
    return {.tile = tiles_.blocks[token / tiles_.block_tokens] + tiles_.tile_offset,
            .first_token = static_cast<uint32_t>(token % tiles_.block_tokens)};
  }

  const AttendTiles& tiles_;
  uint32_t head_dim_;
  uint64_t end_;
};

// Points rows at the tokens of a side that is not NVFP4.
void PointAtRows(const TileSide& side, uint32_t head_dim, const TokenGroup* groups,
                 uint32_t token_count, const std::byte** rows, Pass* pass) {
  const uint64_t row_bytes = uint64_t{head_dim} * ElementBytesOf(side.format);
  for (uint32_t t = 0; t < token_count; ++t) {
    const TokenGroup& group = groups[t / kGroupTokens];
    rows[t] = group.tile + side.data_offset + (group.first_token + t % kGroupTokens) * row_bytes;
  }
  WidenRows(side.format, head_dim, token_count, rows, pass);
}

template <int kRows>
bool AttendTilesOf(const AttendQuery& query, const AttendTiles& tiles, Pass* pass) {
  const bool k_nvfp4 = tiles.k.format == AttendFormat::kNvfp4;
  const bool v_nvfp4 = tiles.v.format == AttendFormat::kNvfp4;
  const Factors factors = MakeFactors(query, tiles.k.multiplier * (k_nvfp4 ? kScaleUnit : 1.0F));
  const Span span = VisibleSpan(query, tiles.block_count * tiles.block_tokens);
  const TileStream stream(tiles, query.head_dim, span.end);
  for (uint32_t t = 0; t < kChunkTokens; t += kGroupTokens) stream.Request(span.first + t);
  __m512i largest = _mm512_setzero_si512();
  for (uint64_t first = span.first; first < span.end; first += kChunkTokens) {
    TokenGroup groups[kChunkTokens / kGroupTokens];
    const std::byte* rows[kChunkTokens];
    const uint32_t group_count = stream.Groups(first, groups);
    const uint32_t count = group_count * kGroupTokens;
    if (!k_nvfp4) PointAtRows(tiles.k, query.head_dim, groups, count, rows, pass);
    for (uint32_t i = 0; i < group_count; ++i) {
      stream.Request(first + kChunkTokens + i * kGroupTokens);
      if (!k_nvfp4) {
        ScoreRows<kRows>(query, rows + i * kGroupTokens, factors, i * kGroupTokens, kGroupTokens,
                         pass);
        continue;
      }
      largest = _mm512_max_epu8(largest, LoadTileK(tiles, query.head_dim, groups[i], pass));
      if (query.is_bf16) {
        ScoreTileGroup<kRows, 1>(query.head_dim, factors.scale, factors.bias, i * kGroupTokens,
                                 pass);
      } else {
        ScoreTileGroup<kRows, 2>(query.head_dim, factors.scale, factors.bias, i * kGroupTokens,
                                 pass);
      }
    }
    ScoresToWeights(query, first, count, pass);
    if (v_nvfp4) {
      largest = _mm512_max_epu8(largest,
                                LoadTileVScales(tiles, query.head_dim, groups, group_count, pass));
      AddTileV<kRows>(tiles, query.head_dim, groups, group_count, pass);
    } else {
      PointAtRows(tiles.v, query.head_dim, groups, count, rows, pass);
      AddRowV<kRows>(rows, query.head_dim, count, pass);
    }
  }
  Finish(query, tiles.v.format, tiles.v.multiplier * (v_nvfp4 ? kScaleUnit / 2 : 1.0F), *pass);
  return _mm512_cmpgt_epu8_mask(largest, _mm512_set1_epi8(0x7E)) == 0;
}

// Requests up to 16 rows of both sides from token `first` on.
KVTIER_AVX512_INLINE void RequestRows(const AttendRows& part, uint32_t head_dim, uint64_t first) {
  for (uint64_t t = first; t < first + kGroupTokens && t < part.token_count; ++t) {
    const AttendSide* const sides[] = {&part.k, &part.v};
    for (const AttendSide* side : sides) {
      Prefetch(side->data + t * side->stride_bytes,
               uint64_t{head_dim} * ElementBytesOf(side->format));
    }
  }
}

template <int kRows>
void AttendRowsOf(const AttendQuery& query, const AttendRows& part, Pass* pass) {
  const Factors factors = MakeFactors(query, part.k.multiplier);
  const Span span = VisibleSpan(query, part.token_count);
  for (uint64_t first = span.first; first < span.end; first += kChunkTokens) {
    const uint64_t left = span.end - first;
    const auto count = static_cast<uint32_t>(left < kChunkTokens ? left : uint64_t{kChunkTokens});
    const std::byte* rows[kChunkTokens];
    const auto point_at_rows = [&](const AttendSide& side) {
      for (uint32_t t = 0; t < count; ++t) rows[t] = side.data + (first + t) * side.stride_bytes;
      WidenRows(side.format, query.head_dim, count, rows, pass);
    };
    point_at_rows(part.k);
    for (uint32_t t = 0; t < count; t += kGroupTokens) {
      RequestRows(part, query.head_dim, first + kChunkTokens + t);
      ScoreRows<kRows>(query, rows + t, factors, t,
                       count - t < kGroupTokens ? count - t : kGroupTokens, pass);
    }
    ScoresToWeights(query, first, count, pass);
    point_at_rows(part.v);
    AddRowV<kRows>(rows, query.head_dim, count, pass);
  }
  Finish(query, part.v.format, part.v.multiplier, *pass);
}

}  // namespace

bool AttendTilesAvx512(const AttendQuery& query, const AttendTiles& tiles) {
  Pass pass;
  const uint32_t rows = PaddedRows(query.row_count);
  PrepareQuery(query, rows, tiles.k.format == AttendFormat::kNvfp4, &pass);
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

}  // namespace kvtier::kernels::cpu
