// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/kernel_table.h"
#include "kernels/nvfp4.h"
#include "kernels/rows.h"
#include "kernels/tile_layout.h"

// The reference: FP32, scalar code that any compiler vectorizes where it can.

namespace kvtier::kernels::cpu {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
// Tokens scored before the running maximum is updated: a tile, or as many rows.
constexpr uint32_t kChunkTokens = kBlockTokensMax;

// Sum of products over count values (a multiple of 16) in 16 interleaved partial sums: vectorizes
// without reassociation, and the order of additions is fixed.
float Dot(const float* a, const float* b, uint32_t count) {
  float sums[kVectorDims] = {};
  for (uint32_t i = 0; i < count; i += kVectorDims) {
    for (uint32_t lane = 0; lane < kVectorDims; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (uint32_t width = kVectorDims / 2; width > 0; width /= 2) {
    for (uint32_t lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  }
  return sums[0];
}

void LoadWide(AttendFormat format, const std::byte* data, uint32_t head_dim, float multiplier,
              float* row) {
  const ElementType type =
      format == AttendFormat::kFp8 ? ElementType::kFp8E4m3 : ElementType::kBf16;
  LoadRow({.type = type, .data = data, .token_stride = head_dim}, 0, head_dim, row);
  for (uint32_t i = 0; i < head_dim; ++i) row[i] *= multiplier;
}

// One side of a tile, by token.
class TileReader {
 public:
  TileReader(const TileShape& shape, const TileSide& side, const std::byte* tile, bool is_k)
      : shape_(shape), side_(side), tile_(tile), is_k_(is_k) {}

  void Load(uint64_t token_idx, float* row) const {
    if (side_.format != AttendFormat::kNvfp4) {
      const uint64_t bytes = side_.format == AttendFormat::kFp8 ? 1 : 2;
      LoadWide(side_.format, tile_ + side_.data_offset + token_idx * shape_.head_dim * bytes,
               shape_.head_dim, side_.multiplier, row);
      return;
    }
    const auto token = static_cast<uint32_t>(token_idx);
    for (uint32_t vector_idx = 0; vector_idx < VectorsPerToken(shape_); ++vector_idx) {
      // The address functions give offsets in an all-NVFP4 tile; sections may lie elsewhere here.
      const uint64_t code = is_k_ ? KCodeOffset(shape_, token, vector_idx) - KDataOffset(shape_)
                                  : VCodeOffset(shape_, token, vector_idx) - VDataOffset(shape_);
      const uint64_t scale =
          is_k_ ? KScaleByteOffset(shape_, token, vector_idx) - KScaleOffset(shape_)
                : VScaleByteOffset(shape_, token, vector_idx) - VScaleOffset(shape_);
      Dequantize16(reinterpret_cast<const uint8_t*>(tile_ + side_.data_offset + code),
                   std::to_integer<uint8_t>(tile_[side_.scale_offset + scale]), side_.multiplier,
                   row + uint64_t{vector_idx} * kVectorDims);
    }
  }

  bool Valid() const {
    if (side_.format != AttendFormat::kNvfp4) return true;
    const std::byte* scales = tile_ + side_.scale_offset;
    return std::all_of(scales, scales + ScaleBytes(shape_), [](std::byte byte) {
      return IsValidScaleByte(std::to_integer<uint8_t>(byte));
    });
  }

 private:
  const TileShape& shape_;
  const TileSide& side_;
  const std::byte* tile_;
  bool is_k_;
};

class RowReader {
 public:
  RowReader(const AttendSide& side, uint32_t head_dim, uint64_t first_token)
      : side_(side), head_dim_(head_dim), first_token_(first_token) {}

  void Load(uint64_t token_idx, float* row) const {
    LoadWide(side_.format, side_.data + (first_token_ + token_idx) * side_.stride_bytes, head_dim_,
             side_.multiplier, row);
  }

 private:
  const AttendSide& side_;
  uint32_t head_dim_;
  uint64_t first_token_;
};

// Online softmax. Accumulates unnormalized output in the caller's out rows.
class Pass {
 public:
  explicit Pass(const AttendQuery& query) : query_(query) {
    std::fill_n(query.out, uint64_t{query.row_count} * query.head_dim, 0.0F);
    std::fill_n(maximum_, query.row_count, kNegativeInfinity);
    std::fill_n(sum_, query.row_count, 0.0F);
  }

  // Adds token_count <= kChunkTokens tokens; the first is token first_token of the part.
  template <typename Reader>
  void Add(const Reader& k, const Reader& v, uint64_t first_token, uint32_t token_count) {
    float row[kHeadDimMax];
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
        float* out = query_.out + uint64_t{r} * query_.head_dim;
        for (uint32_t i = 0; i < query_.head_dim; ++i) out[i] += weight * row[i];
      }
    }
  }

  void Finish() const {
    for (uint32_t r = 0; r < query_.row_count; ++r) {
      float* out = query_.out + uint64_t{r} * query_.head_dim;
      if (sum_[r] == 0.0F) {
        query_.lse[r] = kNegativeInfinity;
        continue;
      }
      for (uint32_t i = 0; i < query_.head_dim; ++i) out[i] /= sum_[r];
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
      float* out = query_.out + uint64_t{r} * query_.head_dim;
      for (uint32_t i = 0; i < query_.head_dim; ++i) out[i] *= rescale;
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

}  // namespace

bool AttendTilesScalar(const AttendQuery& query, const AttendTiles& tiles) {
  const TileShape shape{.block_tokens = tiles.block_tokens, .head_dim = query.head_dim};
  Pass pass(query);
  for (uint64_t i = 0; i < tiles.block_count; ++i) {
    const std::byte* tile = tiles.blocks[i] + tiles.tile_offset;
    const TileReader k(shape, tiles.k, tile, true);
    const TileReader v(shape, tiles.v, tile, false);
    if (!k.Valid() || !v.Valid()) return false;
    pass.Add(k, v, i * tiles.block_tokens, tiles.block_tokens);
  }
  pass.Finish();
  return true;
}

void AttendRowsScalar(const AttendQuery& query, const AttendRows& part) {
  Pass pass(query);
  for (uint64_t done = 0; done < part.token_count; done += kChunkTokens) {
    pass.Add(RowReader(part.k, query.head_dim, done), RowReader(part.v, query.head_dim, done), done,
             static_cast<uint32_t>(std::min<uint64_t>(kChunkTokens, part.token_count - done)));
  }
  pass.Finish();
}

}  // namespace kvtier::kernels::cpu
