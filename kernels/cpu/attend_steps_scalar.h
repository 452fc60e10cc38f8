// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CPU_ATTEND_STEPS_SCALAR_H_
#define KVTIER_KERNELS_CPU_ATTEND_STEPS_SCALAR_H_

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/attend.h"
#include "kernels/nvfp4.h"
#include "kernels/rows.h"
#include "kernels/tile_layout.h"

// Internal to attend_scalar.cc and attend_mla_scalar.cc: the online softmax of the reference.

namespace kvtier::kernels::cpu {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
// Tokens scored before the running maximum is updated: a tile, or as many rows.
constexpr uint32_t kChunkTokens = kBlockTokensMax;

// Sum of products over count values (a multiple of 16) in 16 interleaved partial sums: vectorizes
// without reassociation, and the order of additions is fixed.
inline float Dot(const float* a, const float* b, uint32_t count) {
  float sums[kVectorDims] = {};
  for (uint32_t i = 0; i < count; i += kVectorDims) {
    for (uint32_t lane = 0; lane < kVectorDims; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (uint32_t width = kVectorDims / 2; width > 0; width /= 2) {
    for (uint32_t lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  }
  return sums[0];
}

inline void LoadWide(AttendFormat format, const std::byte* data, uint32_t dim_count,
                     float multiplier, float* row) {
  const ElementType type =
      format == AttendFormat::kFp8 ? ElementType::kFp8E4m3 : ElementType::kBf16;
  LoadRow({.type = type, .data = data, .token_stride = dim_count}, 0, dim_count, row);
  for (uint32_t i = 0; i < dim_count; ++i) row[i] *= multiplier;
}

// Rows from first_token on.
class RowReader {
 public:
  RowReader(const AttendSide& side, uint32_t dim_count, uint64_t first_token)
      : side_(side), dim_count_(dim_count), first_token_(first_token) {}

  void Load(uint64_t token_idx, float* row) const {
    LoadWide(side_.format, side_.data + (first_token_ + token_idx) * side_.stride_bytes, dim_count_,
             side_.multiplier, row);
  }

 private:
  const AttendSide& side_;
  uint32_t dim_count_;
  uint64_t first_token_;
};

inline bool AllScalesValid(const std::byte* scales, uint64_t count) {
  return std::all_of(scales, scales + count, [](std::byte byte) {
    return IsValidScaleByte(std::to_integer<uint8_t>(byte));
  });
}

// Online softmax. Accumulates unnormalized output in the caller's out rows.
class ScalarPass {
 public:
  explicit ScalarPass(const AttendQuery& query) : query_(query) {
    std::fill_n(query.out, uint64_t{query.row_count} * query.value_dim, 0.0F);
    std::fill_n(maximum_, query.row_count, kNegativeInfinity);
    std::fill_n(sum_, query.row_count, 0.0F);
  }

  // Adds token_count <= kChunkTokens tokens; the first is token first_token of the part. A reader
  // has Load(t, row), which writes head_dim floats of K or value_dim floats of V.
  template <typename KReader, typename VReader>
  void Add(const KReader& k, const VReader& v, uint64_t first_token, uint32_t token_count) {
    float row[kAttendDimMax];
    for (uint32_t t = 0; t < token_count; ++t) {
      k.Load(t, row);
      for (uint32_t r = 0; r < query_.row_count; ++r) {
        weights_[r][t] = Score(r, first_token + t, row);
      }
    }
    for (uint32_t r = 0; r < query_.row_count; ++r) ScoresToWeights(r, token_count);
    for (uint32_t t = 0; t < token_count; ++t) {
      v.Load(t, row);
      for (uint32_t r = 0; r < query_.row_count; ++r) {
        const float weight = weights_[r][t];
        if (weight == 0.0F && !Sees(r, first_token + t)) continue;
        float* out = query_.out + uint64_t{r} * query_.value_dim;
        for (uint32_t i = 0; i < query_.value_dim; ++i) out[i] += weight * row[i];
      }
    }
  }

  void Finish() const {
    for (uint32_t r = 0; r < query_.row_count; ++r) {
      float* out = query_.out + uint64_t{r} * query_.value_dim;
      if (sum_[r] == 0.0F) {
        query_.lse[r] = kNegativeInfinity;
        continue;
      }
      for (uint32_t i = 0; i < query_.value_dim; ++i) out[i] /= sum_[r];
      query_.lse[r] = maximum_[r] + std::log(sum_[r]);
    }
  }

 private:
  bool Sees(uint32_t r, uint64_t token) const {
    return token >= query_.begin[r] && token < query_.end[r];
  }

  float Score(uint32_t r, uint64_t token, const float* k) const {
    if (!Sees(r, token)) return kNegativeInfinity;
    const float* query = query_.query + uint64_t{r} * query_.head_dim;
    const float score = query_.scale * Dot(query, k, query_.head_dim) + query_.bias[r];
    return query_.soft_cap > 0.0F ? query_.soft_cap * std::tanh(score / query_.soft_cap) : score;
  }

  void ScoresToWeights(uint32_t r, uint32_t token_count) {
    float maximum = maximum_[r];
    for (uint32_t i = 0; i < token_count; ++i) maximum = std::fmax(maximum, weights_[r][i]);
    // Without a token so far, all scores are -inf or NaN: weights 0 or NaN.
    const float shift = maximum == kNegativeInfinity ? 0.0F : maximum;
    float chunk_sum = 0.0F;
    for (uint32_t i = 0; i < token_count; ++i) {
      weights_[r][i] = std::exp(weights_[r][i] - shift);
      chunk_sum += weights_[r][i];
    }
    if (maximum > maximum_[r]) {
      const float rescale = std::exp(maximum_[r] - maximum);  // 0 for the first chunk.
      float* out = query_.out + uint64_t{r} * query_.value_dim;
      for (uint32_t i = 0; i < query_.value_dim; ++i) out[i] *= rescale;
      sum_[r] *= rescale;
      maximum_[r] = maximum;
    }
    sum_[r] += chunk_sum;
  }

  const AttendQuery& query_;
  float weights_[kAttendRowsMax][kChunkTokens];  // Scores, then their exponentials.
  float maximum_[kAttendRowsMax];
  float sum_[kAttendRowsMax];
};

}  // namespace kvtier::kernels::cpu

#endif  // KVTIER_KERNELS_CPU_ATTEND_STEPS_SCALAR_H_
