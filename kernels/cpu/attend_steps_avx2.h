// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CPU_ATTEND_STEPS_AVX2_H_
#define KVTIER_KERNELS_CPU_ATTEND_STEPS_AVX2_H_

#include <immintrin.h>
#include <math.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/attend.h"
#include "kernels/cpu/avx2.h"

// Internal to attend_avx2.cc and attend_mla_avx2.cc: the steps of decode on a chunk of tokens.

namespace kvtier::kernels::cpu {
namespace {

// 16 tokens of K, then of V, are dequantized to FP32 and used by all query rows.
constexpr uint32_t kChunkTokens = 16;
constexpr uint32_t kRowStep = 4;  // Query rows that share loads; 4 x 2 sums hide the latency.
constexpr float kLog2E = 1.44269504F;
constexpr float kLn2 = 0.693147181F;

template <uint32_t kKeyDims, uint32_t kValueDims>
struct alignas(32) PassOf {
  float acc[kAttendRowsMax][kValueDims];
  float query[kAttendRowsMax][kKeyDims];
  float values[kChunkTokens][kKeyDims];
  float p[kAttendRowsMax][kChunkTokens];  // Scores in the log2 domain, then weights.
  float maximum[kAttendRowsMax];
  float sum[kAttendRowsMax];
};

KVTIER_AVX2_INLINE float Sum(__m256 x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

// 2^x for x at most 128, relative error below 3e-7; results below 2^-126 are 0, NaN -> NaN.
KVTIER_AVX2_INLINE __m256 Exp2(__m256 x) {
  const __m256 lowest = _mm256_set1_ps(-126.0F);
  const __m256 tiny = _mm256_cmp_ps(x, lowest, _CMP_LT_OQ);
  const __m256 clamped = _mm256_max_ps(lowest, x);  // NaN if x is.
  const __m256 whole = _mm256_round_ps(clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256 rest = _mm256_sub_ps(clamped, whole);
  __m256 y = _mm256_set1_ps(0x1.5ec866p-10F);
  y = _mm256_fmadd_ps(y, rest, _mm256_set1_ps(0x1.3cbf60p-7F));
  y = _mm256_fmadd_ps(y, rest, _mm256_set1_ps(0x1.c6afeep-5F));
  y = _mm256_fmadd_ps(y, rest, _mm256_set1_ps(0x1.ebfa4cp-3F));
  y = _mm256_fmadd_ps(y, rest, _mm256_set1_ps(0x1.62e430p-1F));
  y = _mm256_fmadd_ps(y, rest, _mm256_set1_ps(1.0F));
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
  const __m256 power =
      _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_castps_si256(_mm256_set1_ps(1.0F))));
  // NaN converts to an integer whose shift is 0: the product stays NaN.
  return _mm256_andnot_ps(tiny, _mm256_mul_ps(y, power));
}

// A row as FP32.
void LoadWide(AttendFormat format, const std::byte* row, uint32_t dim_count, float multiplier,
              float* values) {
  const __m256 factor = _mm256_set1_ps(multiplier);
  for (uint32_t dim = 0; dim < dim_count; dim += 8) {
    const __m256 x =
        format == AttendFormat::kFp8
            ? Fp8ToFloat(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + dim)))
            : Bf16ToFloat8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + dim * 2)));
    _mm256_store_ps(values + dim, _mm256_mul_ps(x, factor));
  }
}

// Rows [first, first + count) of a side, to dims from `first_dim` on.
template <class Pass>
void LoadRows(const AttendSide& side, uint32_t dim_count, uint64_t first, uint32_t count,
              uint32_t first_dim, Pass* pass) {
  for (uint32_t t = 0; t < count; ++t) {
    LoadWide(side.format, side.data + (first + t) * side.stride_bytes, dim_count, side.multiplier,
             pass->values[t] + first_dim);
  }
}

bool AllScalesValid(__m128i largest) {
  const __m128i bound = _mm_set1_epi8(0x7E);
  return _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_max_epu8(largest, bound), bound)) == 0xFFFF;
}

template <class Pass>
void InitPass(const AttendQuery& query, Pass* pass) {
  // Rows up to the next multiple of kRowStep are computed, and must be numbers.
  std::memset(pass->acc, 0, sizeof(pass->acc));
  std::memset(pass->query, 0, sizeof(pass->query));
  std::memset(pass->p, 0, sizeof(pass->p));
  for (uint32_t row = 0; row < query.row_count; ++row) {
    std::memcpy(pass->query[row], query.query + uint64_t{row} * query.head_dim,
                query.head_dim * sizeof(float));
    pass->maximum[row] = -INFINITY;
    pass->sum[row] = 0.0F;
  }
}

// Scores of a chunk. True if a row does not see every one of its tokens.
template <class Pass>
bool Score(const AttendQuery& query, uint64_t first_token, uint32_t token_count, Pass* pass) {
  for (uint32_t row = 0; row < query.row_count; row += kRowStep) {
    for (uint32_t t = 0; t < kChunkTokens; t += 2) {
      __m256 sums[kRowStep][2];
      for (auto& pair : sums) pair[0] = pair[1] = _mm256_setzero_ps();
      for (uint32_t dim = 0; dim < query.head_dim; dim += 8) {
        const __m256 a = _mm256_load_ps(&pass->values[t][dim]);
        const __m256 b = _mm256_load_ps(&pass->values[t + 1][dim]);
#pragma GCC unroll 4
        for (uint32_t i = 0; i < kRowStep; ++i) {
          const __m256 q = _mm256_load_ps(&pass->query[row + i][dim]);
          sums[i][0] = _mm256_fmadd_ps(q, a, sums[i][0]);
          sums[i][1] = _mm256_fmadd_ps(q, b, sums[i][1]);
        }
      }
      for (uint32_t i = 0; i < kRowStep; ++i) {
        pass->p[row + i][t] = Sum(sums[i][0]);
        pass->p[row + i][t + 1] = Sum(sums[i][1]);
      }
    }
  }
  bool hidden = false;
  for (uint32_t row = 0; row < query.row_count; ++row) {
    for (uint32_t t = 0; t < kChunkTokens; ++t) {
      const uint64_t token = first_token + t;
      float score = query.scale * pass->p[row][t] + query.bias[row];
      if (query.soft_cap > 0.0F) score = query.soft_cap * tanhf(score / query.soft_cap);
      const bool visible = t < token_count && token >= query.begin[row] && token < query.end[row];
      pass->p[row][t] = visible ? score * kLog2E : -INFINITY;
      hidden |= !visible;
    }
  }
  return hidden;
}

template <class Pass>
void ScoresToWeights(const AttendQuery& query, Pass* pass) {
  for (uint32_t row = 0; row < query.row_count; ++row) {
    float* p = pass->p[row];
    float top = pass->maximum[row];
    for (uint32_t t = 0; t < kChunkTokens; ++t) top = p[t] > top ? p[t] : top;
    if (top > pass->maximum[row]) {
      const __m256 factor = Exp2(_mm256_set1_ps(pass->maximum[row] - top));
      for (uint32_t dim = 0; dim < query.value_dim; dim += 8) {
        float* acc = &pass->acc[row][dim];
        _mm256_store_ps(acc, _mm256_mul_ps(_mm256_load_ps(acc), factor));
      }
      pass->sum[row] *= _mm256_cvtss_f32(factor);
      pass->maximum[row] = top;
    }
    // Without a token so far, all scores are -inf or NaN: weights 0 or NaN.
    const __m256 shift = _mm256_set1_ps(top == -INFINITY ? 0.0F : top);
    const __m256 low = Exp2(_mm256_sub_ps(_mm256_load_ps(p), shift));
    const __m256 high = Exp2(_mm256_sub_ps(_mm256_load_ps(p + 8), shift));
    _mm256_store_ps(p, low);
    _mm256_store_ps(p + 8, high);
    pass->sum[row] += Sum(_mm256_add_ps(low, high));
  }
}

bool AllFinite(const float* values, uint32_t dim_count) {
  __m256 special = _mm256_setzero_ps();
  for (uint32_t dim = 0; dim < dim_count; dim += 8) {
    // Infinity and NaN times 0 are NaN.
    const __m256 zero = _mm256_mul_ps(_mm256_load_ps(values + dim), _mm256_setzero_ps());
    special = _mm256_or_ps(special, _mm256_cmp_ps(zero, zero, _CMP_UNORD_Q));
  }
  return _mm256_movemask_ps(special) == 0;
}

// For a chunk with tokens that some row does not see: their weight is 0, but 0 times infinity or
// NaN is NaN. Tokens whose V has such a value are added here to the rows that see them, and are
// zeros for what follows.
template <class Pass>
void SetAsideNonfinite(const AttendQuery& query, uint64_t first_token, uint32_t token_count,
                       Pass* pass) {
  for (uint32_t t = 0; t < token_count; ++t) {
    if (AllFinite(pass->values[t], query.value_dim)) continue;
    const uint64_t token = first_token + t;
    for (uint32_t row = 0; row < query.row_count; ++row) {
      if (token < query.begin[row] || token >= query.end[row]) continue;
      for (uint32_t dim = 0; dim < query.value_dim; ++dim) {
        pass->acc[row][dim] += pass->p[row][t] * pass->values[t][dim];
      }
    }
    std::memset(pass->values[t], 0, query.value_dim * sizeof(float));
  }
}

template <class Pass>
void AddValues(const AttendQuery& query, uint32_t token_count, Pass* pass) {
  for (uint32_t row = 0; row < query.row_count; row += kRowStep) {
    for (uint32_t dim = 0; dim < query.value_dim; dim += 16) {
      __m256 acc[kRowStep][2];
      for (uint32_t i = 0; i < kRowStep; ++i) {
        acc[i][0] = _mm256_load_ps(&pass->acc[row + i][dim]);
        acc[i][1] = _mm256_load_ps(&pass->acc[row + i][dim + 8]);
      }
      for (uint32_t t = 0; t < token_count; ++t) {
        const __m256 low = _mm256_load_ps(&pass->values[t][dim]);
        const __m256 high = _mm256_load_ps(&pass->values[t][dim + 8]);
#pragma GCC unroll 4
        for (uint32_t i = 0; i < kRowStep; ++i) {
          const __m256 weight = _mm256_broadcast_ss(&pass->p[row + i][t]);
          acc[i][0] = _mm256_fmadd_ps(weight, low, acc[i][0]);
          acc[i][1] = _mm256_fmadd_ps(weight, high, acc[i][1]);
        }
      }
      for (uint32_t i = 0; i < kRowStep; ++i) {
        _mm256_store_ps(&pass->acc[row + i][dim], acc[i][0]);
        _mm256_store_ps(&pass->acc[row + i][dim + 8], acc[i][1]);
      }
    }
  }
}

template <class Pass>
void Finish(const AttendQuery& query, const Pass& pass) {
  for (uint32_t row = 0; row < query.row_count; ++row) {
    float* out = query.out + uint64_t{row} * query.value_dim;
    const bool empty = pass.sum[row] == 0.0F;
    const float factor = empty ? 0.0F : 1.0F / pass.sum[row];
    for (uint32_t dim = 0; dim < query.value_dim; ++dim) out[dim] = pass.acc[row][dim] * factor;
    query.lse[row] = empty ? -INFINITY : pass.maximum[row] * kLn2 + logf(pass.sum[row]);
  }
}

// The tokens that at least one row sees, from a whole chunk on.
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

}  // namespace
}  // namespace kvtier::kernels::cpu

#endif  // KVTIER_KERNELS_CPU_ATTEND_STEPS_AVX2_H_
