// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CPU_ATTEND_STEPS_AVX512_H_
#define KVTIER_KERNELS_CPU_ATTEND_STEPS_AVX512_H_

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/attend.h"
#include "kernels/cpu/attend_pass_avx512.h"
#include "kernels/cpu/avx512.h"

// Internal to attend_avx512.cc and attend_mla_avx512.cc: the steps of decode on a chunk of tokens.
//
// Decode with dot products of 16-bit numbers. K: BF16 x BF16 -> FP32.
//   - e2m1 codes become BF16 by one 16-bit permute (the code is the index). K stays unscaled; the
//     partial sum of each 16-dim block is multiplied by its block scale in FP32.
//   - A query that BF16 cannot hold is the sum of two BF16 numbers.
// V: the softmax weights need more than the 8 bits of BF16, whose rounding alone is 2^-8.
//   - NVFP4: weight * block scale becomes an INT16 relative to the largest of the chunk, codes
//   become
//     integers by the same permute, and INT16 x INT16 -> INT32 is exact for a chunk: 15 bits at the
//     price of 8.
//   - BF16 rows: a weight is the sum of two BF16 numbers.
// The rows of a group are lanes of a register, so no lane is idle at 1, 2, 4, 8 or 16 rows and no
// dot product ends in a horizontal sum.

namespace kvtier::kernels::cpu {
namespace {

// The words of one dim step of a token, repeated for each of kRows rows.
template <int kRows>
KVTIER_AVX512_INLINE __m512i LoadStep(const uint16_t* words) {
  if constexpr (kRows == 16) return _mm512_set1_epi32(LoadInt32(words));
  if constexpr (kRows == 8) {
    return _mm512_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(words)));
  }
  if constexpr (kRows == 4) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words)));
  }
  if constexpr (kRows == 2) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)));
  }
  return _mm512_loadu_si512(words);
}

// The block scale of each lane of a unit (see ScoreTileGroup).
template <int kRows>
KVTIER_AVX512_INLINE __m512 LoadBlockScales(const float* scales) {
  if constexpr (kRows >= 4) return _mm512_set1_ps(*scales);
  const __m512i four_each = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  if constexpr (kRows == 2) {
    const __m512i two = _mm512_and_si512(four_each, _mm512_set1_epi32(1));
    return _mm512_permutexvar_ps(two, _mm512_castps128_ps512(_mm_loadu_ps(scales)));
  }
  return _mm512_permutexvar_ps(four_each, _mm512_castps128_ps512(_mm_loadu_ps(scales)));
}

// lanes[t] holds kRows rows of 16 / kRows partial sums; writes kRows rows of 16 scores, or adds
// them to the scores that are there.
template <int kRows, bool kAdd, class Pass>
KVTIER_AVX512_INLINE void StoreScores(__m512 lanes[16], float factor, const float* bias,
                                      uint32_t first_token, Pass* pass) {
  constexpr int kPartials = 16 / kRows;
  Transpose16(lanes);
  for (int row = 0; row < kRows; ++row) {
    __m512 sum = lanes[row * kPartials];
    for (int i = 1; i < kPartials; ++i) sum = _mm512_add_ps(sum, lanes[row * kPartials + i]);
    float* scores = &pass->p[row][first_token];
    const __m512 base = kAdd ? _mm512_load_ps(scores) : _mm512_set1_ps(bias[row]);
    _mm512_store_ps(scores, _mm512_fmadd_ps(sum, _mm512_set1_ps(factor), base));
  }
}

// K codes and scales of a group -> pass->wide and pass->k_scales. Returns the largest scale byte.
template <class Pass>
__m512i LoadTileK(const AttendTiles& tiles, uint32_t head_dim, const TokenGroup& group,
                  Pass* pass) {
  const __m512i table = E2m1Bf16Table();
  const uint32_t block_count = head_dim / 16;
  const __mmask16 scale_mask = static_cast<__mmask16>((1U << block_count) - 1);
  const std::byte* scales = group.tile + tiles.k.scale_offset + group.first_token * block_count;
  __m128i largest = _mm_setzero_si128();
  for (uint32_t t = 0; t < kGroupTokens; ++t) {
    const __m128i bytes = _mm_maskz_loadu_epi8(scale_mask, scales + t * block_count);
    largest = _mm_max_epu8(largest, bytes);
    _mm512_store_ps(pass->k_scales[t], ScalesToFloat(bytes));
  }
  for (uint32_t first = 0; first < head_dim; first += 64) {
    const uint32_t panel = first / 128;
    const uint32_t panel_dims = head_dim - panel * 128 < 128 ? head_dim - panel * 128 : 128;
    const uint32_t code_bytes = head_dim - first < 64 ? (head_dim - first) / 2 : 32;
    const auto mask = static_cast<__mmask32>(~0U >> (32 - code_bytes));
    const std::byte* codes = group.tile + tiles.k.data_offset +
                             panel * uint64_t{tiles.block_tokens} * 64 +
                             group.first_token * (panel_dims / 2) + first % 128 / 2;
    for (uint32_t t = 0; t < kGroupTokens; ++t) {
      const __m512i index =
          _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, codes + t * (panel_dims / 2)));
      uint16_t* target = &pass->wide[t][first];
      _mm512_store_si512(target, _mm512_permutexvar_epi16(index, table));
      _mm512_store_si512(target + 32, _mm512_permutexvar_epi16(_mm512_srli_epi16(index, 4), table));
    }
  }
  return _mm512_castsi128_si512(largest);
}

// Scores of 16 tokens of a tile. A unit is the least number of blocks that fills a register: one
// block for 4 rows and more, 2 for 2 rows, 4 for 1 row. With kAdd, adds to the scores at hand.
template <int kRows, int kParts, bool kAdd, class Pass>
void ScoreTileGroup(uint32_t head_dim, float factor, const float* bias, uint32_t first_token,
                    Pass* pass) {
  constexpr int kStepWords = 32 / kRows;
  constexpr int kUnitBlocks = kStepWords > 8 ? kStepWords / 8 : 1;
  constexpr int kSteps = kStepWords < 8 ? 8 / kStepWords : 1;  // In each half of a unit.
  constexpr int kTokens = 8;
  __m512 lanes[kGroupTokens];
  for (uint32_t first = 0; first < kGroupTokens; first += kTokens) {
    __m512 acc[kTokens];
    for (auto& x : acc) x = _mm512_setzero_ps();
    for (uint32_t block = 0; block * 16 < head_dim; block += kUnitBlocks) {
      const uint32_t word = block / 4 * 64 + block % 4 * 8;
      __m512i query[kParts][2 * kSteps];
      for (int part = 0; part < kParts; ++part) {
        for (int i = 0; i < kSteps; ++i) {
          const uint16_t* low = &pass->query[part][(word / kStepWords + i) * 32];
          query[part][i] = _mm512_load_si512(low);
          query[part][kSteps + i] = _mm512_load_si512(low + 32 / kStepWords * 32);
        }
      }
      // Steps outside, tokens inside: eight sums in flight hide the latency of a dot product.
      __m512 sums[kTokens];
      for (auto& x : sums) x = _mm512_setzero_ps();
#pragma GCC unroll 8
      for (int i = 0; i < 2 * kSteps; ++i) {
        const uint32_t offset = word + i % kSteps * kStepWords + (i < kSteps ? 0 : 32);
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) {
          const __m512i step = LoadStep<kRows>(&pass->wide[first + t][offset]);
          for (int part = 0; part < kParts; ++part)
            sums[t] = DotBf16(sums[t], step, query[part][i]);
        }
      }
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        const __m512 scales = LoadBlockScales<kRows>(&pass->k_scales[first + t][block]);
        acc[t] = _mm512_fmadd_ps(sums[t], scales, acc[t]);
      }
    }
    for (int t = 0; t < kTokens; ++t) lanes[first + t] = acc[t];
  }
  StoreScores<kRows, kAdd>(lanes, factor, bias, first_token, pass);
}

// Scores of 16 tokens in BF16 rows, which meet the query from word `first_word` on (a multiple of
// 32). With kAdd, adds to the scores at hand.
template <int kRows, int kParts, bool kAdd, class Pass>
void ScoreRowGroup(const std::byte* const* rows, uint32_t head_dim, uint32_t first_word,
                   float factor, const float* bias, uint32_t first_token, Pass* pass) {
  constexpr uint32_t kStepWords = 32 / kRows;
  constexpr uint32_t kTokens = kParts == 1 ? 16 : 8;
  __m512 lanes[kGroupTokens];
  for (uint32_t first = 0; first < kGroupTokens; first += kTokens) {
    __m512 acc[kTokens];
    for (auto& x : acc) x = _mm512_setzero_ps();
    uint32_t word = 0;
    for (; word + kStepWords <= head_dim; word += kStepWords) {
      __m512i query[kParts];
      for (int part = 0; part < kParts; ++part) {
        query[part] = _mm512_load_si512(&pass->query[part][(first_word + word) * kRows]);
      }
#pragma GCC unroll 16
      for (uint32_t t = 0; t < kTokens; ++t) {
        const auto* k = reinterpret_cast<const uint16_t*>(rows[first + t]) + word;
        const __m512i step = LoadStep<kRows>(k);
        for (int part = 0; part < kParts; ++part) acc[t] = DotBf16(acc[t], step, query[part]);
      }
    }
    if (word < head_dim) {  // One row, and 16 dims left.
      for (uint32_t t = 0; t < kTokens; ++t) {
        const __m512i step = _mm512_maskz_loadu_epi16(
            0xFFFF, reinterpret_cast<const uint16_t*>(rows[first + t]) + word);
        for (int part = 0; part < kParts; ++part) {
          acc[t] = DotBf16(acc[t], step,
                           _mm512_load_si512(&pass->query[part][(first_word + word) * kRows]));
        }
      }
    }
    for (uint32_t t = 0; t < kTokens; ++t) lanes[first + t] = acc[t];
  }
  StoreScores<kRows, kAdd>(lanes, factor, bias, first_token, pass);
}

// Scores of up to 16 tokens in rows; the score of token `first_token` of the chunk is the first.
template <int kRows, bool kAdd, class Pass>
void ScoreRows(const AttendQuery& query, const std::byte* const* rows, uint32_t dim_count,
               uint32_t first_word, const Factors& factors, uint32_t first_token,
               uint32_t token_count, Pass* pass) {
  const std::byte* group[kGroupTokens];
  for (uint32_t i = 0; i < kGroupTokens; ++i) {
    group[i] = rows[i < token_count ? i : token_count - 1];
  }
  if (query.is_bf16) {
    ScoreRowGroup<kRows, 1, kAdd>(group, dim_count, first_word, factors.scale, factors.bias,
                                  first_token, pass);
  } else {
    ScoreRowGroup<kRows, 2, kAdd>(group, dim_count, first_word, factors.scale, factors.bias,
                                  first_token, pass);
  }
}

// Weights of a chunk in BF16; with `rest`, what that rounding lost.
template <class Pass>
void StoreBf16Weights(uint32_t rows, uint32_t token_count, bool rest, Pass* pass) {
  for (uint32_t row = 0; row < rows; ++row) {
    const __m512 factor = _mm512_set1_ps(pass->chunk_factor[row]);
    for (uint32_t t = 0; t < token_count; t += 32) {
      __m512 low = _mm512_mul_ps(_mm512_load_ps(&pass->p[row][t]), factor);
      __m512 high = _mm512_mul_ps(_mm512_load_ps(&pass->p[row][t + 16]), factor);
      if (rest) {
        low = _mm512_sub_ps(low, RoundToBf16(low));
        high = _mm512_sub_ps(high, RoundToBf16(high));
      }
      StoreBf16(&pass->weights[row][t], high, low);
    }
  }
}

// Weights times the V scales of a block as INT16. Returns the unit: what 1 stands for.
template <class Pass>
KVTIER_AVX512_INLINE float StoreIntWeights(uint32_t rows, uint32_t block, uint32_t token_count,
                                           Pass* pass) {
  // The largest scale is below 2^(exponent - 6), also for exponent 0.
  const __m512i bytes = _mm512_load_si512(pass->v_scales[block]);
  const uint32_t exponent = MaxByte(bytes) >> 3;
  const float unit = Power2(static_cast<int>(exponent) - 14) / 32767.0F;
  const __m512 inverse = _mm512_set1_ps(32767.0F * Power2(14 - static_cast<int>(exponent)));
  for (uint32_t t = 0; t < token_count; t += 32) {
    const uint8_t* scales = &pass->v_scales[block][t];
    const __m512 low_scale = _mm512_mul_ps(
        ScalesToFloat(_mm_load_si128(reinterpret_cast<const __m128i*>(scales))), inverse);
    const __m512 high_scale = _mm512_mul_ps(
        ScalesToFloat(_mm_load_si128(reinterpret_cast<const __m128i*>(scales + 16))), inverse);
    for (uint32_t row = 0; row < rows; ++row) {
      const __m512 low = _mm512_mul_ps(_mm512_load_ps(&pass->p[row][t]), low_scale);
      const __m512 high = _mm512_mul_ps(_mm512_load_ps(&pass->p[row][t + 16]), high_scale);
      // Fours of tokens 0 4 1 5 2 6 3 7: a pack works on 128-bit lanes.
      _mm512_store_si512(&pass->weights[row][t],
                         _mm512_packs_epi32(_mm512_cvtps_epi32(low), _mm512_cvtps_epi32(high)));
    }
  }
  return unit;
}

// Adds one 16-dim block of V of up to 64 tokens. Four tokens a, b, c, d make a register: lanes
// 2k and 2k + 1 are (a, b) and (c, d) of dim 2k (low nibbles) or 2k + 1 (high nibbles). Sums of
// 64 * 32767 * 12 fit INT32.
template <int kRows, bool kLow, bool kHigh, class Pass>
KVTIER_AVX512_INLINE void AddTileBlock(const TokenGroup* groups, uint32_t group_count,
                                       uint64_t v_offset, uint32_t block, float unit, Pass* pass) {
  const __m512i table = E2m1Int16Table();
  const __m512i quads[2] = {VQuadIndex(block % 2 != 0, false), VQuadIndex(block % 2 != 0, true)};
  // Few rows are few sums: spread the tokens over several of each to hide the latency.
  constexpr int kSpread = kRows <= 2 ? 4 : (kRows == 4 ? 2 : 1);
  __m512i low_acc[kSpread][kRows];
  __m512i high_acc[kSpread][kRows];
  for (int row = 0; row < kRows; ++row) {
    for (int i = 0; i < kSpread; ++i) low_acc[i][row] = high_acc[i][row] = _mm512_setzero_si512();
  }
  for (uint32_t group = 0; group < group_count; ++group) {
    const std::byte* codes = groups[group].tile + v_offset + block * 128;
    const uint16_t* weights = &pass->weights[0][group / 2 * 32 + group % 2 * 4];
#pragma GCC unroll 4
    for (int quad = 0; quad < 4; ++quad) {
      const __m512i eight = _mm512_loadu_si512(codes + quad / 2 * 64);
      const __m512i index = _mm512_permutexvar_epi8(quads[quad % 2], eight);
      const __m512i low = _mm512_permutexvar_epi16(index, table);
      const __m512i high = _mm512_permutexvar_epi16(_mm512_srli_epi16(index, 4), table);
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) {
        const __m512i weight = LoadStep<8>(weights + row * kChunkTokens + quad * 8);
        __m512i& low_sum = low_acc[quad % kSpread][row];
        __m512i& high_sum = high_acc[quad % kSpread][row];
        if constexpr (kLow) low_sum = _mm512_dpwssd_epi32(low_sum, low, weight);
        if constexpr (kHigh) high_sum = _mm512_dpwssd_epi32(high_sum, high, weight);
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int i = 1; i < kSpread; ++i) {
      low_acc[0][row] = _mm512_add_epi32(low_acc[0][row], low_acc[i][row]);
      high_acc[0][row] = _mm512_add_epi32(high_acc[0][row], high_acc[i][row]);
    }
    const __m512 factor = _mm512_set1_ps(pass->chunk_factor[row] * unit);
    const auto add = [&](__m512i sum, float* acc) {
      _mm512_store_ps(acc, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), factor, _mm512_load_ps(acc)));
    };
    if constexpr (kLow) add(low_acc[0][row], &pass->acc[row][block * 32]);
    if constexpr (kHigh) add(high_acc[0][row], &pass->acc[row][block * 32 + 16]);
  }
}

// V scales of a chunk, one run of tokens a block. Returns the largest scale byte.
template <class Pass>
__m512i LoadTileVScales(const AttendTiles& tiles, uint32_t head_dim, const TokenGroup* groups,
                        uint32_t group_count, Pass* pass) {
  const uint32_t block_count = head_dim / 16;
  __m512i largest = _mm512_setzero_si512();
  for (uint32_t group = 0; group < group_count; ++group) {
    const std::byte* scales =
        groups[group].tile + tiles.v.scale_offset + groups[group].first_token * block_count;
    for (uint32_t quad = 0; quad < 4; ++quad) {
      const std::byte* four = scales + quad * 4 * block_count;
      for (uint32_t block = 0; block < block_count; ++block) {
        std::memcpy(&pass->v_scales[block][group * 16 + quad * 4], four + block * 4, 4);
      }
    }
    for (uint32_t block = 0; block < block_count; ++block) {
      largest = _mm512_max_epu8(largest, _mm512_castsi128_si512(_mm_loadu_si128(
                                             reinterpret_cast<const __m128i*>(scales) + block)));
    }
  }
  return largest;
}

template <int kRows, class Pass>
void AddTileV(uint64_t v_offset, uint32_t head_dim, const TokenGroup* groups, uint32_t group_count,
              Pass* pass) {
  // Offsets inside a group of 16 tokens; the group itself is at first_token * head_dim / 2.
  TokenGroup v_groups[kChunkTokens / kGroupTokens];
  for (uint32_t i = 0; i < group_count; ++i) {
    v_groups[i].tile = groups[i].tile + uint64_t{groups[i].first_token} * head_dim / 2;
  }
  for (uint32_t block = 0; block < head_dim / 16; ++block) {
    const float unit = StoreIntWeights(kRows, block, group_count * kGroupTokens, pass);
    if constexpr (kRows <= 8) {
      AddTileBlock<kRows, true, true>(v_groups, group_count, v_offset, block, unit, pass);
    } else {
      AddTileBlock<kRows, true, false>(v_groups, group_count, v_offset, block, unit, pass);
      AddTileBlock<kRows, false, true>(v_groups, group_count, v_offset, block, unit, pass);
    }
  }
}

// Adds V in BF16 rows with the weights at hand. Registers of 32 dims of two tokens, interleaved.
template <int kRows, class Pass>
void AddWeightedRows(const std::byte* const* rows, uint32_t head_dim, uint32_t token_count,
                     Pass* pass) {
  constexpr int kStep = kRows < 8 ? kRows : 8;
  for (uint32_t dim = 0; dim < head_dim; dim += 32) {
    const auto mask = static_cast<__mmask32>(head_dim - dim >= 32 ? ~0U : 0xFFFFU);
    for (int first = 0; first < kRows; first += kStep) {
      __m512 acc[kStep][2];
      for (int row = 0; row < kStep; ++row) {
        acc[row][0] = _mm512_load_ps(&pass->acc[first + row][dim]);
        acc[row][1] = _mm512_load_ps(&pass->acc[first + row][dim + 16]);
      }
      for (uint32_t t = 0; t < token_count; t += 2) {
        // The weight of a token beyond token_count is 0; it stands for the last one.
        const std::byte* second = rows[t + 1 < token_count ? t + 1 : t];
        const __m512i a = _mm512_maskz_loadu_epi16(mask, rows[t] + dim * 2);
        const __m512i b = _mm512_maskz_loadu_epi16(mask, second + dim * 2);
        const __m512i low = _mm512_unpacklo_epi16(a, b);
        const __m512i high = _mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 8
        for (int row = 0; row < kStep; ++row) {
          const __m512i weight = _mm512_set1_epi32(LoadInt32(&pass->weights[first + row][t]));
          acc[row][0] = DotBf16(acc[row][0], low, weight);
          acc[row][1] = DotBf16(acc[row][1], high, weight);
        }
      }
      for (int row = 0; row < kStep; ++row) {
        _mm512_store_ps(&pass->acc[first + row][dim], acc[row][0]);
        _mm512_store_ps(&pass->acc[first + row][dim + 16], acc[row][1]);
      }
    }
  }
}

bool AllFinite(const std::byte* row, uint32_t dim_count) {
  const __m512i exponent = _mm512_set1_epi16(0x7F80);
  __mmask32 special = 0;
  for (uint32_t dim = 0; dim < dim_count; dim += 16) {
    const __m512i words = _mm512_maskz_loadu_epi16(0xFFFF, row + dim * 2);
    special |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(words, exponent), exponent);
  }
  return special == 0;
}

// For a chunk with tokens that some row does not see: their weight is 0, but 0 times infinity or
// NaN is NaN. Tokens whose V has such a value are added here to the rows that see them, and read
// as zeros by what follows.
template <class Pass>
void SetAsideNonfinite(const AttendQuery& query, uint64_t first_token, uint32_t token_count,
                       const std::byte** rows, Pass* pass) {
  alignas(64) static constexpr std::byte kZeros[sizeof(pass->wide[0])] = {};
  for (uint32_t t = 0; t < token_count; ++t) {
    if (AllFinite(rows[t], query.value_dim)) continue;
    const uint64_t token = first_token + t;
    for (uint32_t row = 0; row < query.row_count; ++row) {
      if (token < query.begin[row] || token >= query.end[row]) continue;
      const float weight = pass->p[row][t] * pass->chunk_factor[row];
      for (uint32_t dim = 0; dim < query.value_dim; ++dim) {
        uint16_t value = 0;
        std::memcpy(&value, rows[t] + dim * 2, sizeof(value));
        pass->acc[row][RowLane(dim)] += weight * FromBf16(value);
      }
    }
    rows[t] = kZeros;
  }
}

template <int kRows, class Pass>
void AddRowV(const std::byte* const* rows, uint32_t head_dim, uint32_t token_count, Pass* pass) {
  for (int part = 0; part < 2; ++part) {
    StoreBf16Weights(kRows, token_count, part == 1, pass);
    AddWeightedRows<kRows>(rows, head_dim, token_count, pass);
  }
}

// Replaces rows by their BF16 form in pass->wide, from word `first_word` on, if they have another;
// exact. False if an FP8 row holds a NaN.
template <class Pass>
bool WidenRows(AttendFormat format, uint32_t dim_count, uint32_t first_word, uint32_t token_count,
               const std::byte** rows, Pass* pass) {
  if (format != AttendFormat::kFp8) return true;
  __mmask16 nan = 0;
  for (uint32_t t = 0; t < token_count; ++t) {
    uint16_t* target = pass->wide[t] + first_word;
    for (uint32_t dim = 0; dim < dim_count; dim += 16) {
      const __m512 value =
          Fp8ToFloat(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[t] + dim)));
      nan |= _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
      _mm256_store_si256(reinterpret_cast<__m256i*>(target + dim),
                         _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(value), 16)));
    }
    rows[t] = reinterpret_cast<const std::byte*>(target);
  }
  return nan == 0;
}

// Always inlined: GCC 12 takes a function of prefetches only for one without effect and drops it.
KVTIER_AVX512_INLINE void Prefetch(const std::byte* data, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; i += 64) _mm_prefetch(data + i, _MM_HINT_T0);
}

}  // namespace
}  // namespace kvtier::kernels::cpu

#endif  // KVTIER_KERNELS_CPU_ATTEND_STEPS_AVX512_H_
