// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>
#include <math.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/attend_pass_avx512.h"
#include "kernels/cpu/attend_steps_avx512.h"
#include "kernels/cpu/kernel_table.h"

namespace kvtier::kernels::cpu {
namespace {

constexpr uint32_t kDimMax = 256;

uint32_t PaddedRows(uint32_t row_count) {
  uint32_t rows = 1;
  while (rows < row_count) rows *= 2;
  return rows;
}

uint32_t ElementBytesOf(AttendFormat format) { return format == AttendFormat::kFp8 ? 1 : 2; }

// Bytes of one side of 16 tokens.
uint64_t GroupBytes(AttendFormat format, uint32_t head_dim) {
  if (format == AttendFormat::kNvfp4) return uint64_t{head_dim} * kGroupTokens / 2;
  return uint64_t{head_dim} * kGroupTokens * ElementBytesOf(format);
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

// Points rows at the tokens of a side that is not NVFP4. False if it holds an FP8 NaN.
template <class Pass>
bool PointAtRows(const TileSide& side, uint32_t head_dim, const TokenGroup* groups,
                 uint32_t token_count, const std::byte** rows, Pass* pass) {
  const uint64_t row_bytes = uint64_t{head_dim} * ElementBytesOf(side.format);
  for (uint32_t t = 0; t < token_count; ++t) {
    const TokenGroup& group = groups[t / kGroupTokens];
    rows[t] = group.tile + side.data_offset + (group.first_token + t % kGroupTokens) * row_bytes;
  }
  return WidenRows(side.format, head_dim, 0, token_count, rows, pass);
}

template <int kRows, class Pass>
bool AttendTilesOf(const AttendQuery& query, const AttendTiles& tiles, Pass* pass) {
  const uint32_t head_dim = query.head_dim;
  const bool k_nvfp4 = tiles.k.format == AttendFormat::kNvfp4;
  const bool v_nvfp4 = tiles.v.format == AttendFormat::kNvfp4;
  const Factors factors = MakeFactors(query, tiles.k.multiplier * (k_nvfp4 ? kScaleUnit : 1.0F));
  const Span span = VisibleSpan(query, tiles.block_count * tiles.block_tokens);
  const TileStream stream(tiles, head_dim, span.end);
  for (uint32_t t = 0; t < kChunkTokens; t += kGroupTokens) stream.Request(span.first + t);
  __m512i largest = _mm512_setzero_si512();
  bool valid = true;
  for (uint64_t first = span.first; first < span.end; first += kChunkTokens) {
    TokenGroup groups[kChunkTokens / kGroupTokens];
    const std::byte* rows[kChunkTokens];
    const uint32_t group_count = stream.Groups(first, groups);
    const uint32_t count = group_count * kGroupTokens;
    if (!k_nvfp4) valid &= PointAtRows(tiles.k, head_dim, groups, count, rows, pass);
    for (uint32_t i = 0; i < group_count; ++i) {
      const uint32_t at = i * kGroupTokens;
      stream.Request(first + kChunkTokens + at);
      if (!k_nvfp4) {
        ScoreRows<kRows, false>(query, rows + at, head_dim, 0, factors, at, kGroupTokens, pass);
        continue;
      }
      largest = _mm512_max_epu8(largest, LoadTileK(tiles, head_dim, groups[i], pass));
      if (query.is_bf16) {
        ScoreTileGroup<kRows, 1, false>(head_dim, factors.scale, factors.bias, at, pass);
      } else {
        ScoreTileGroup<kRows, 2, false>(head_dim, factors.scale, factors.bias, at, pass);
      }
    }
    const bool hidden = ScoresToWeights(query, first, count, pass);
    if (v_nvfp4) {
      largest =
          _mm512_max_epu8(largest, LoadTileVScales(tiles, head_dim, groups, group_count, pass));
      AddTileV<kRows>(tiles.v.data_offset, head_dim, groups, group_count, pass);
    } else {
      valid &= PointAtRows(tiles.v, head_dim, groups, count, rows, pass);
      if (hidden) SetAsideNonfinite(query, first, count, rows, pass);
      AddRowV<kRows>(rows, head_dim, count, pass);
    }
  }
  Finish(query, tiles.v.format, tiles.v.multiplier * (v_nvfp4 ? kScaleUnit / 2 : 1.0F), *pass);
  return valid && _mm512_cmpgt_epu8_mask(largest, _mm512_set1_epi8(0x7E)) == 0;
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

template <int kRows, class Pass>
void AttendRowsOf(const AttendQuery& query, const AttendRows& part, Pass* pass) {
  const uint32_t head_dim = query.head_dim;
  const Factors factors = MakeFactors(query, part.k.multiplier);
  const Span span = VisibleSpan(query, part.token_count);
  for (uint64_t first = span.first; first < span.end; first += kChunkTokens) {
    const uint64_t left = span.end - first;
    const auto count = static_cast<uint32_t>(left < kChunkTokens ? left : uint64_t{kChunkTokens});
    const std::byte* rows[kChunkTokens];
    const auto point_at_rows = [&](const AttendSide& side) {
      for (uint32_t t = 0; t < count; ++t) rows[t] = side.data + (first + t) * side.stride_bytes;
      WidenRows(side.format, head_dim, 0, count, rows, pass);  // NaN belongs to the results here.
    };
    point_at_rows(part.k);
    for (uint32_t t = 0; t < count; t += kGroupTokens) {
      RequestRows(part, head_dim, first + kChunkTokens + t);
      ScoreRows<kRows, false>(query, rows + t, head_dim, 0, factors, t,
                              count - t < kGroupTokens ? count - t : kGroupTokens, pass);
    }
    const bool hidden = ScoresToWeights(query, first, count, pass);
    point_at_rows(part.v);
    if (hidden) SetAsideNonfinite(query, first, count, rows, pass);
    AddRowV<kRows>(rows, head_dim, count, pass);
  }
  Finish(query, part.v.format, part.v.multiplier, *pass);
}

}  // namespace

bool AttendTilesAvx512(const AttendQuery& query, const AttendTiles& tiles) {
  PassOf<kDimMax, kDimMax> pass;
  const uint32_t rows = PaddedRows(query.row_count);
  PrepareQuery(query, rows, tiles.k.format == AttendFormat::kNvfp4 ? kDimMax : 0, &pass);
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
  PassOf<kDimMax, kDimMax> pass;
  const uint32_t rows = PaddedRows(query.row_count);
  PrepareQuery(query, rows, 0, &pass);
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
