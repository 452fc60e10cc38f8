// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CPU_ATTEND_STEPS_NEON_H_
#define KVTIER_KERNELS_CPU_ATTEND_STEPS_NEON_H_

#include <arm_neon.h>
#include <math.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/attend.h"
#include "kernels/cpu/neon.h"

// Internal to attend_neon.cc and attend_mla_neon.cc: the steps of decode on a chunk of tokens.

namespace kvtier::kernels::cpu {
namespace {

// 16 tokens of K, then of V, are dequantized to FP32 and used by all query rows.
constexpr uint32_t kChunkTokens = 16;
constexpr float kLog2E = 1.44269504F;
constexpr float kLn2 = 0.693147181F;

template <uint32_t kKeyDims, uint32_t kValueDims>
struct PassOf {
  float acc[kAttendRowsMax][kValueDims];
  float values[kChunkTokens][kKeyDims];
  float p[kAttendRowsMax][kChunkTokens];  // Scores in the log2 domain, then weights.
  float maximum[kAttendRowsMax];
  float sum[kAttendRowsMax];
};

// 2^x for x at most 128, relative error below 3e-7; results below 2^-126 are 0, NaN -> NaN.
KVTIER_NEON_INLINE float32x4_t Exp2(float32x4_t x) {
  const float32x4_t lowest = vdupq_n_f32(-126.0F);
  const uint32x4_t tiny = vcltq_f32(x, lowest);
  const float32x4_t clamped = vmaxq_f32(x, lowest);  // NaN if x is.
  const float32x4_t whole = vrndnq_f32(clamped);
  const float32x4_t rest = vsubq_f32(clamped, whole);
  float32x4_t y = vdupq_n_f32(0x1.5ec866p-10F);
  y = vfmaq_f32(vdupq_n_f32(0x1.3cbf60p-7F), y, rest);
  y = vfmaq_f32(vdupq_n_f32(0x1.c6afeep-5F), y, rest);
  y = vfmaq_f32(vdupq_n_f32(0x1.ebfa4cp-3F), y, rest);
  y = vfmaq_f32(vdupq_n_f32(0x1.62e430p-1F), y, rest);
  y = vfmaq_f32(vdupq_n_f32(1.0F), y, rest);
  const uint32x4_t exponent = vshlq_n_u32(vreinterpretq_u32_s32(vcvtq_s32_f32(whole)), 23);
  const uint32x4_t power = vaddq_u32(exponent, vreinterpretq_u32_f32(vdupq_n_f32(1.0F)));
  // NaN converts to 0, whose power is 1: the product stays NaN.
  const float32x4_t result = vmulq_f32(y, vreinterpretq_f32_u32(power));
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(result), tiny));
}

// A row of BF16 or FP8 as FP32.
void LoadWide(AttendFormat format, const std::byte* row, uint32_t dim_count, float multiplier,
              float* values) {
  for (uint32_t dim = 0; dim < dim_count; dim += 16) {
    const Floats16 x = format == AttendFormat::kFp8
                           ? WidenFp8(LoadBytes(row + dim))
                           : WidenBf16(vreinterpretq_u16_u8(LoadBytes(row + dim * 2)),
                                       vreinterpretq_u16_u8(LoadBytes(row + dim * 2 + 16)));
    for (uint32_t i = 0; i < 4; ++i) {
      vst1q_f32(values + dim + i * 4, vmulq_n_f32(x.part[i], multiplier));
    }
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

// A quad of a tile.
template <class Pass>
KVTIER_NEON_INLINE void LoadQuad(const std::byte* codes, const std::byte* scales,
                                 const QuadPlace& place, float g, uint32_t t, uint32_t vector,
                                 Pass* pass) {
  float steps[kQuadTokens];
  vst1q_f32(steps, LoadSteps(scales, place, g));
  for (uint32_t i = 0; i < kQuadTokens; ++i) {
    const Floats16 x = Dequantize(UnpackRun(codes + place.Run(i)), steps[i]);
    float* values = &pass->values[t + i][vector * 16];
    for (uint32_t part = 0; part < 4; ++part) vst1q_f32(values + part * 4, x.part[part]);
  }
}

template <class Pass>
void InitPass(const AttendQuery& query, Pass* pass) {
  for (uint32_t row = 0; row < query.row_count; ++row) {
    std::memset(pass->acc[row], 0, query.value_dim * sizeof(float));
    pass->maximum[row] = -INFINITY;
    pass->sum[row] = 0.0F;
  }
}

// Runs step<4>, step<2> or step<1>(row) over all rows: rows that share the loads of the values.
template <typename Step>
KVTIER_NEON_INLINE void ForRows(uint32_t row_count, const Step& step) {
  uint32_t row = 0;
  for (; row + 4 <= row_count; row += 4) step.template operator()<4>(row);
  for (; row + 2 <= row_count; row += 2) step.template operator()<2>(row);
  if (row < row_count) step.template operator()<1>(row);
}

// Dot products of kRows query rows and 4 tokens, the 4 tokens of a row in pass->p.
template <uint32_t kRows, class Pass>
KVTIER_NEON_INLINE void Dot(const AttendQuery& query, uint32_t row, uint32_t t, Pass* pass) {
  const float* rows = query.query + uint64_t{row} * query.head_dim;
  float32x4_t sums[kRows][4];
  for (auto& quad : sums) {
    for (float32x4_t& sum : quad) sum = vdupq_n_f32(0.0F);
  }
  for (uint32_t dim = 0; dim < query.head_dim; dim += 4) {
    float32x4_t k[4];
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; ++i) k[i] = vld1q_f32(&pass->values[t + i][dim]);
#pragma GCC unroll 4
    for (uint32_t r = 0; r < kRows; ++r) {
      const float32x4_t q = vld1q_f32(rows + r * query.head_dim + dim);
#pragma GCC unroll 4
      for (uint32_t i = 0; i < 4; ++i) sums[r][i] = vfmaq_f32(sums[r][i], q, k[i]);
    }
  }
  for (uint32_t r = 0; r < kRows; ++r) {
    const float32x4_t pairs = vpaddq_f32(sums[r][0], sums[r][1]);
    vst1q_f32(&pass->p[row + r][t], vpaddq_f32(pairs, vpaddq_f32(sums[r][2], sums[r][3])));
  }
}

// Scores of a chunk. True if a row does not see every one of its tokens.
template <class Pass>
bool Score(const AttendQuery& query, uint64_t first_token, uint32_t token_count, Pass* pass) {
  for (uint32_t t = 0; t < kChunkTokens; t += 4) {
    ForRows(query.row_count,
            [&]<uint32_t kRows>(uint32_t row) { Dot<kRows>(query, row, t, pass); });
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
    // The maximum of the numbers: a NaN score makes the sum NaN by its weight.
    float32x4_t largest = vdupq_n_f32(pass->maximum[row]);
    for (uint32_t t = 0; t < kChunkTokens; t += 4) largest = vmaxnmq_f32(largest, vld1q_f32(p + t));
    const float top = vmaxnmvq_f32(largest);
    if (top > pass->maximum[row]) {
      const float32x4_t factor = Exp2(vdupq_n_f32(pass->maximum[row] - top));
      for (uint32_t dim = 0; dim < query.value_dim; dim += 4) {
        float* acc = &pass->acc[row][dim];
        vst1q_f32(acc, vmulq_f32(vld1q_f32(acc), factor));
      }
      pass->sum[row] *= vgetq_lane_f32(factor, 0);
      pass->maximum[row] = top;
    }
    // Without a token so far, all scores are -inf or NaN: weights 0 or NaN.
    const float32x4_t shift = vdupq_n_f32(top == -INFINITY ? 0.0F : top);
    float32x4_t sum = vdupq_n_f32(0.0F);
    for (uint32_t t = 0; t < kChunkTokens; t += 4) {
      const float32x4_t weights = Exp2(vsubq_f32(vld1q_f32(p + t), shift));
      vst1q_f32(p + t, weights);
      sum = vaddq_f32(sum, weights);
    }
    pass->sum[row] += vaddvq_f32(sum);
  }
}

KVTIER_NEON_INLINE bool AllFinite(const float* values, uint32_t dim_count) {
  uint32x4_t largest = vdupq_n_u32(0);
  for (uint32_t dim = 0; dim < dim_count; dim += 4) {
    const float32x4_t magnitude = vabsq_f32(vld1q_f32(values + dim));
    largest = vmaxq_u32(largest, vreinterpretq_u32_f32(magnitude));
  }
  return vmaxvq_u32(largest) < 0x7F800000;
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

// Adds the weighted values of 16 dims to kRows rows.
template <uint32_t kRows, class Pass>
KVTIER_NEON_INLINE void AddDims(uint32_t row, uint32_t dim, uint32_t token_count, Pass* pass) {
  float32x4_t acc[kRows][4];
  for (uint32_t r = 0; r < kRows; ++r) {
    for (uint32_t i = 0; i < 4; ++i) acc[r][i] = vld1q_f32(&pass->acc[row + r][dim + i * 4]);
  }
  for (uint32_t t = 0; t < token_count; ++t) {
    float32x4_t v[4];
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; ++i) v[i] = vld1q_f32(&pass->values[t][dim + i * 4]);
#pragma GCC unroll 4
    for (uint32_t r = 0; r < kRows; ++r) {
      const float weight = pass->p[row + r][t];
#pragma GCC unroll 4
      for (uint32_t i = 0; i < 4; ++i) acc[r][i] = vfmaq_n_f32(acc[r][i], v[i], weight);
    }
  }
  for (uint32_t r = 0; r < kRows; ++r) {
    for (uint32_t i = 0; i < 4; ++i) vst1q_f32(&pass->acc[row + r][dim + i * 4], acc[r][i]);
  }
}

template <class Pass>
void AddValues(const AttendQuery& query, uint32_t token_count, Pass* pass) {
  for (uint32_t dim = 0; dim < query.value_dim; dim += 16) {
    ForRows(query.row_count,
            [&]<uint32_t kRows>(uint32_t row) { AddDims<kRows>(row, dim, token_count, pass); });
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
KVTIER_NEON_INLINE Span VisibleSpan(const AttendQuery& query, uint64_t token_count) {
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

#endif  // KVTIER_KERNELS_CPU_ATTEND_STEPS_NEON_H_
