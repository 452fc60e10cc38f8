// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CPU_ATTEND_PASS_AVX512_H_
#define KVTIER_KERNELS_CPU_ATTEND_PASS_AVX512_H_

#include <immintrin.h>
#include <math.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/attend.h"
#include "kernels/cpu/avx512.h"

// Internal to attend_avx512.cc and attend_mla_avx512.cc: the state of a pass over a part of a
// sequence, its queries, its online softmax and its end. The steps on a chunk of tokens are in
// attend_steps_avx512.h.

namespace kvtier::kernels::cpu {
namespace {

constexpr uint32_t kGroupTokens = 16;
constexpr uint32_t kChunkTokens = 64;
constexpr float kLog2E = 1.44269504F;
constexpr float kLn2 = 0.693147181F;
constexpr float kScaleUnit = 256.0F;  // ScalesToFloat gives e4m3 / 256.

// Everything a pass needs; on the stack of the entry points. A value row of 512 dims would be a
// multiple of 4096 bytes long: without the padding, the rows of one dim would share a cache set.
template <uint32_t kKeyDims, uint32_t kValueDims>
struct alignas(64) PassOf {
  // [row][32 lanes of 16 dims][...]; which lane is which dim depends on the format of V.
  float acc[kAttendRowsMax][kValueDims * 2 + (kValueDims > 256 ? 16 : 0)];
  // Scores in the log2 domain, then weights relative to the largest of the chunk.
  float p[kAttendRowsMax][kChunkTokens];
  float lane_sum[kAttendRowsMax][16];
  uint16_t weights[kAttendRowsMax][kChunkTokens];  // INT16 or BF16
  // The query as lanes, [part][dim steps][32 words]: for tiles in the order of their nibbles, for
  // rows in the order of dims. Part 1 is what part 0 lost by rounding.
  uint16_t query[2][kKeyDims * kAttendRowsMax];
  uint16_t wide[kChunkTokens][kKeyDims];  // K or V of a group or chunk in BF16.
  float k_scales[kGroupTokens][kKeyDims / 16];
  uint8_t v_scales[kValueDims / 16][kChunkTokens];
  float maximum[kAttendRowsMax];
  float chunk_factor[kAttendRowsMax];  // Weights of the chunk times this are weights of the pass.
};

// 16 tokens of a tile.
struct TokenGroup {
  const std::byte* tile;
  uint32_t first_token;
};

uint16_t ToBf16(float x) {  // Finite x.
  uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16);
}

float FromBf16(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Position `word` of a tile's row in `wide` holds this dim: low nibbles of 32 bytes, then high
// ones.
uint32_t TileDim(uint32_t word) {
  const uint32_t in_group = word % 64;
  return word / 64 * 64 + (in_group < 32 ? in_group * 2 : (in_group - 32) * 2 + 1);
}

// The first `tile_words` words are in the order of a tile's nibbles.
template <class Pass>
void PrepareQuery(const AttendQuery& query, uint32_t rows, uint32_t tile_words, Pass* pass) {
  const uint32_t step_words = 32 / rows;
  const uint32_t word_count = (query.head_dim + 63) / 64 * 64;
  for (uint32_t word = 0; word < word_count; ++word) {
    const uint32_t dim = word < tile_words ? TileDim(word) : word;
    for (uint32_t row = 0; row < rows; ++row) {
      const bool exists = dim < query.head_dim && row < query.row_count;
      const float x = exists ? query.query[row * query.head_dim + dim] : 0.0F;
      const uint32_t at = word / step_words * 32 + row * step_words + word % step_words;
      const uint16_t high = ToBf16(x);
      pass->query[0][at] = high;
      // A value near the largest FP32 rounds to infinity; its rest is then of no use.
      const float rest = x - FromBf16(high);
      pass->query[1][at] = __builtin_isfinite(rest) ? ToBf16(rest) : uint16_t{0};
    }
  }
}

template <class Pass>
void InitPass(const AttendQuery& query, uint32_t rows, Pass* pass) {
  for (uint32_t row = 0; row < rows; ++row) {
    std::memset(pass->acc[row], 0, query.value_dim * 2 * sizeof(float));
    std::memset(pass->p[row], 0, sizeof(pass->p[row]));
    std::memset(pass->lane_sum[row], 0, sizeof(pass->lane_sum[row]));
    pass->maximum[row] = -INFINITY;
    pass->chunk_factor[row] = 0.0F;
  }
  std::memset(pass->v_scales, 0, sizeof(pass->v_scales));
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

// Tokens that a row does not see, and those beyond token_count, get the score -inf.
template <class Pass>
void MaskScores(const AttendQuery& query, uint64_t first_token, uint32_t token_count, Pass* pass) {
  for (uint32_t row = 0; row < query.row_count; ++row) {
    for (uint32_t t = 0; t < (token_count + 15) / 16 * 16; ++t) {
      const uint64_t token = first_token + t;
      const bool visible = t < token_count && token >= query.begin[row] && token < query.end[row];
      if (!visible) pass->p[row][t] = -INFINITY;
    }
  }
}

// Relative error below 1e-6 everywhere. 1 - 2 / (1 + e^2y) alone would lose small y, and large caps
// make small y of all scores.
__m512 Tanh(__m512 y) {
  const __m512 one = _mm512_set1_ps(1.0F);
  const __m512 power = Exp2(_mm512_mul_ps(y, _mm512_set1_ps(2.0F * kLog2E)));
  const __m512 far =
      _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0F), _mm512_add_ps(one, power)));
  // The first terms of its series, up to y^9.
  const __m512 square = _mm512_mul_ps(y, y);
  __m512 near = _mm512_set1_ps(62.0F / 2835.0F);
  near = _mm512_fmadd_ps(near, square, _mm512_set1_ps(-17.0F / 315.0F));
  near = _mm512_fmadd_ps(near, square, _mm512_set1_ps(2.0F / 15.0F));
  near = _mm512_fmadd_ps(near, square, _mm512_set1_ps(-1.0F / 3.0F));
  near = _mm512_fmadd_ps(_mm512_mul_ps(near, square), y, y);
  const __mmask16 is_near = _mm512_cmp_ps_mask(_mm512_abs_ps(y), _mm512_set1_ps(0.25F), _CMP_LT_OQ);
  return _mm512_mask_mov_ps(far, is_near, near);
}

template <class Pass>
void CapScores(const AttendQuery& query, uint32_t token_count, Pass* pass) {
  // cap * tanh(x / cap), scores and cap in the log2 domain, where the largest caps would overflow.
  const float log2_cap = query.soft_cap * kLog2E;
  const __m512 cap = _mm512_set1_ps(log2_cap < __FLT_MAX__ ? log2_cap : __FLT_MAX__);
  for (uint32_t row = 0; row < query.row_count; ++row) {
    for (uint32_t t = 0; t < token_count; t += 16) {
      const __m512 y = _mm512_div_ps(_mm512_load_ps(&pass->p[row][t]), cap);
      _mm512_store_ps(&pass->p[row][t], _mm512_mul_ps(cap, Tanh(y)));
    }
  }
}

// Scores -> weights relative to the running maximum; rescales what was accumulated when it rises.
// True if a row does not see every token.
template <class Pass>
bool ScoresToWeights(const AttendQuery& query, uint64_t first_token, uint32_t token_count,
                     Pass* pass) {
  if (query.soft_cap > 0.0F) CapScores(query, token_count, pass);
  bool mask = token_count % 16 != 0;
  for (uint32_t row = 0; row < query.row_count; ++row) {
    mask |= query.begin[row] > first_token || query.end[row] < first_token + token_count;
  }
  if (mask) MaskScores(query, first_token, token_count, pass);
  for (uint32_t row = 0; row < query.row_count; ++row) {
    float* p = pass->p[row];
    __m512 largest = _mm512_load_ps(p);
    for (uint32_t t = 16; t < token_count; t += 16) {
      largest = _mm512_max_ps(largest, _mm512_load_ps(p + t));
    }
    const float top = _mm512_reduce_max_ps(largest);
    float maximum = pass->maximum[row];
    __m512 sum = _mm512_load_ps(pass->lane_sum[row]);
    if (top > maximum) {
      if (maximum != -INFINITY) {
        const __m512 factor = Exp2(_mm512_set1_ps(maximum - top));
        sum = _mm512_mul_ps(sum, factor);
        for (uint32_t i = 0; i < query.value_dim * 2; i += 16) {
          float* acc = &pass->acc[row][i];
          _mm512_store_ps(acc, _mm512_mul_ps(_mm512_load_ps(acc), factor));
        }
      }
      pass->maximum[row] = maximum = top;
    }
    // Without a token in the chunk, all scores are -inf or NaN: weights 0 or NaN.
    const bool empty = top == -INFINITY;
    const __m512 shift = _mm512_set1_ps(empty ? 0.0F : top);
    __m512 chunk_sum = _mm512_setzero_ps();
    for (uint32_t t = 0; t < token_count; t += 16) {
      const __m512 weight = Exp2(_mm512_sub_ps(_mm512_load_ps(p + t), shift));
      chunk_sum = _mm512_add_ps(chunk_sum, weight);
      _mm512_store_ps(p + t, weight);
    }
    const __m512 factor =
        empty ? _mm512_setzero_ps() : Exp2(_mm512_set1_ps(top - pass->maximum[row]));
    _mm512_store_ps(pass->lane_sum[row], _mm512_fmadd_ps(chunk_sum, factor, sum));
    pass->chunk_factor[row] = _mm512_cvtss_f32(factor);
  }
  return mask;
}

// Where a dim is in acc: after NVFP4 values it is the sum of two lanes from here, after rows one.
uint32_t TileLane(uint32_t dim) { return dim / 16 * 32 + dim % 2 * 16 + dim % 16 / 2 * 2; }
uint32_t RowLane(uint32_t dim) {
  // unpacklo and unpackhi take 4 dims of each 8 by turns.
  const uint32_t in_step = dim % 32;
  return dim / 32 * 32 + in_step % 8 / 4 * 16 + in_step / 8 * 4 + in_step % 4;
}

// acc / sum, lanes back to dims, and the log-sum-exp.
template <class Pass>
void Finish(const AttendQuery& query, AttendFormat v_format, float multiplier, const Pass& pass) {
  for (uint32_t row = 0; row < query.row_count; ++row) {
    const float sum = _mm512_reduce_add_ps(_mm512_load_ps(pass.lane_sum[row]));
    float* out = query.out + uint64_t{row} * query.value_dim;
    if (sum == 0.0F) {
      std::memset(out, 0, query.value_dim * sizeof(float));
      query.lse[row] = -INFINITY;
      continue;
    }
    query.lse[row] = pass.maximum[row] * kLn2 + logf(sum);
    const float factor = multiplier / sum;
    for (uint32_t dim = 0; dim < query.value_dim; ++dim) {
      if (v_format == AttendFormat::kNvfp4) {
        const float* lanes = &pass.acc[row][TileLane(dim)];
        out[dim] = (lanes[0] + lanes[1]) * factor;
      } else {
        out[dim] = pass.acc[row][RowLane(dim)] * factor;
      }
    }
  }
}

}  // namespace
}  // namespace kvtier::kernels::cpu

#endif  // KVTIER_KERNELS_CPU_ATTEND_PASS_AVX512_H_
