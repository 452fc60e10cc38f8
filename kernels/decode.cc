// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/gather.h"
#include "kernels/nvfp4.h"
#include "kernels/rows.h"

namespace kvtier::kernels {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Query heads that share one dequantized row. Larger GQA groups take several passes over K and V;
// the bound keeps the state on the stack.
constexpr uint32_t kPassHeads = 16;
// Tokens scored before the running maximum is updated: a tile, or as much of the tail.
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

// Where the rows of K and V of one chunk come from: a tile or the BF16 tail.
class TileRows {
 public:
  TileRows(const TileShape& shape, const std::byte* tile, float g_k, float g_v)
      : shape_(shape), tile_(tile), g_k_(g_k), g_v_(g_v) {}

  void LoadK(uint32_t token_idx, float* row) const {
    for (uint32_t vector_idx = 0; vector_idx < VectorsPerToken(shape_); ++vector_idx) {
      LoadVector(KCodeOffset(shape_, token_idx, vector_idx),
                 KScaleByteOffset(shape_, token_idx, vector_idx), g_k_,
                 row + uint64_t{vector_idx} * kVectorDims);
    }
  }
  void LoadV(uint32_t token_idx, float* row) const {
    for (uint32_t vector_idx = 0; vector_idx < VectorsPerToken(shape_); ++vector_idx) {
      LoadVector(VCodeOffset(shape_, token_idx, vector_idx),
                 VScaleByteOffset(shape_, token_idx, vector_idx), g_v_,
                 row + uint64_t{vector_idx} * kVectorDims);
    }
  }

 private:
  void LoadVector(uint64_t code_offset, uint64_t scale_offset, float g, float* values) const {
    Dequantize16(reinterpret_cast<const uint8_t*>(tile_ + code_offset),
                 std::to_integer<uint8_t>(tile_[scale_offset]), g, values);
  }

  TileShape shape_;
  const std::byte* tile_;
  float g_k_;
  float g_v_;
};

class TailRows {
 public:
  TailRows(const DecodeTail& tail, uint32_t head_dim, uint32_t kv_head_idx, uint64_t first_token)
      : head_dim_(head_dim), first_token_(first_token) {
    const uint64_t head_offset = kv_head_idx * tail.head_stride;
    k_ = {.type = ElementType::kBf16,
          .data = tail.k + head_offset,
          .token_stride = tail.token_stride};
    v_ = {.type = ElementType::kBf16,
          .data = tail.v + head_offset,
          .token_stride = tail.token_stride};
  }

  void LoadK(uint32_t token_idx, float* row) const {
    LoadRow(k_, first_token_ + token_idx, head_dim_, row);
  }
  void LoadV(uint32_t token_idx, float* row) const {
    LoadRow(v_, first_token_ + token_idx, head_dim_, row);
  }

 private:
  uint32_t head_dim_;
  uint64_t first_token_;
  ConstRows k_;
  ConstRows v_;
};

// Online softmax of up to kPassHeads query heads of one kv head. Accumulates unnormalized output in
// the caller's out rows.
class HeadPass {
 public:
  HeadPass(const DecodeArgs& args, uint32_t first_head, uint32_t head_count)
      : head_dim_(args.block_shape.head_dim),
        head_count_(head_count),
        out_(args.out.data() + uint64_t{first_head} * head_dim_) {
    const ConstRows query{.type = args.query_type, .data = args.query, .token_stride = head_dim_};
    for (uint32_t h = 0; h < head_count_; ++h) {
      LoadRow(query, first_head + h, head_dim_, query_[h]);
      for (uint32_t i = 0; i < head_dim_; ++i) query_[h][i] *= args.softmax_scale;
      maximum_[h] = kNegativeInfinity;
      sum_[h] = 0.0F;
    }
    std::fill_n(out_, uint64_t{head_count_} * head_dim_, 0.0F);
  }

  // Adds token_count <= kChunkTokens tokens.
  template <typename Rows>
  void Add(const Rows& rows, uint32_t token_count) {
    float row[kHeadDimMax];
    for (uint32_t token_idx = 0; token_idx < token_count; ++token_idx) {
      rows.LoadK(token_idx, row);
      for (uint32_t h = 0; h < head_count_; ++h) {
        weights_[h][token_idx] = Dot(query_[h], row, head_dim_);
      }
    }
    for (uint32_t h = 0; h < head_count_; ++h) ScoresToWeights(h, token_count);
    for (uint32_t token_idx = 0; token_idx < token_count; ++token_idx) {
      rows.LoadV(token_idx, row);
      for (uint32_t h = 0; h < head_count_; ++h) {
        float* out = out_ + uint64_t{h} * head_dim_;
        const float weight = weights_[h][token_idx];
        for (uint32_t i = 0; i < head_dim_; ++i) out[i] += weight * row[i];
      }
    }
  }

  void Finish(float* lse) const {
    for (uint32_t h = 0; h < head_count_; ++h) {
      float* out = out_ + uint64_t{h} * head_dim_;
      for (uint32_t i = 0; i < head_dim_; ++i) out[i] /= sum_[h];
      lse[h] = maximum_[h] + std::log(sum_[h]);
    }
  }

 private:
  void ScoresToWeights(uint32_t h, uint32_t token_count) {
    float maximum = maximum_[h];
    for (uint32_t i = 0; i < token_count; ++i) maximum = std::fmax(maximum, weights_[h][i]);
    float chunk_sum = 0.0F;
    for (uint32_t i = 0; i < token_count; ++i) {
      weights_[h][i] = std::exp(weights_[h][i] - maximum);
      chunk_sum += weights_[h][i];
    }
    if (maximum > maximum_[h]) {
      const float rescale = std::exp(maximum_[h] - maximum);  // 0 for the first chunk.
      float* out = out_ + uint64_t{h} * head_dim_;
      for (uint32_t i = 0; i < head_dim_; ++i) out[i] *= rescale;
      sum_[h] *= rescale;
      maximum_[h] = maximum;
    }
    sum_[h] += chunk_sum;
  }

  uint32_t head_dim_;
  uint32_t head_count_;
  float* out_;
  float query_[kPassHeads][kHeadDimMax];
  float weights_[kPassHeads][kChunkTokens];  // Scores, then their exponentials.
  float maximum_[kPassHeads];
  float sum_[kPassHeads];
};

Status ValidateQuery(const DecodeArgs& args) {
  const BlockShape& shape = args.block_shape;
  if (args.query_head_count == 0 || args.query_head_count % shape.kv_head_count != 0) {
    return Status::InvalidArgument("query_head_count is not a multiple of kv_head_count");
  }
  if (args.query_type != ElementType::kBf16 && args.query_type != ElementType::kFp32) {
    return Status::InvalidArgument("query must be BF16 or FP32");
  }
  if (args.query == nullptr) return Status::InvalidArgument("query is missing");
  if (!std::isfinite(args.softmax_scale)) {
    return Status::InvalidArgument("softmax_scale is not finite");
  }
  const uint64_t out_count = uint64_t{args.query_head_count} * shape.head_dim;
  if (args.out.size() != out_count || args.lse.size() != args.query_head_count) {
    return Status::InvalidArgument("out or lse does not have the exact size");
  }
  const ConstRows query{
      .type = args.query_type, .data = args.query, .token_stride = shape.head_dim};
  for (uint32_t h = 0; h < args.query_head_count; ++h) {
    float row[kHeadDimMax];
    LoadRow(query, h, shape.head_dim, row);
    if (!std::all_of(row, row + shape.head_dim, [](float x) { return std::isfinite(x); })) {
      return Status::InvalidArgument("query has a value that is not finite");
    }
  }
  return Status();
}

Status ValidateSequence(const DecodeArgs& args) {
  const BlockShape& shape = args.block_shape;
  if (args.g_k.size() != shape.kv_head_count || args.g_v.size() != shape.kv_head_count) {
    return Status::InvalidArgument("g_k and g_v need one global scale per kv head");
  }
  if (!std::all_of(args.g_k.begin(), args.g_k.end(), IsValidGlobalScale) ||
      !std::all_of(args.g_v.begin(), args.g_v.end(), IsValidGlobalScale)) {
    return Status::InvalidArgument("a global scale is not a power of two in [2^-100, 2^100]");
  }
  if (args.sealed_token_count % shape.block_tokens != 0) {
    return Status::InvalidArgument("sealed_token_count is not a multiple of block_tokens");
  }
  const uint64_t block_count = args.sealed_token_count / shape.block_tokens;
  if (block_count > args.block_table.size()) {
    return Status::InvalidArgument("block_table is shorter than sealed_token_count");
  }
  const auto blocks = args.block_table.first(block_count);
  if (std::find(blocks.begin(), blocks.end(), nullptr) != blocks.end()) {
    return Status::InvalidArgument("block_table has a null entry");
  }
  const DecodeTail& tail = args.tail;
  if (tail.token_count == 0) return Status();
  if (tail.k == nullptr || tail.v == nullptr) return Status::InvalidArgument("tail has no data");
  if (tail.token_stride < shape.head_dim ||
      (shape.kv_head_count > 1 && tail.head_stride < shape.head_dim)) {
    return Status::InvalidArgument("a stride of the tail is less than head_dim");
  }
  return Status();
}

Status DecodeKvHead(const DecodeArgs& args, uint32_t kv_head_idx) {
  const BlockShape& shape = args.block_shape;
  const TileShape tile_shape = TileOf(shape);
  const uint64_t tile_offset = TileOffset(shape, args.layer_idx, kv_head_idx);
  const auto blocks = args.block_table.first(args.sealed_token_count / shape.block_tokens);
  for (const std::byte* block : blocks) {
    const Status status =
        ValidateTile(tile_shape, std::span(block + tile_offset, TileBytes(tile_shape)));
    if (!status.ok()) return status;
  }
  const uint32_t group_heads = args.query_head_count / shape.kv_head_count;
  for (uint32_t first = 0; first < group_heads; first += kPassHeads) {
    const uint32_t first_head = kv_head_idx * group_heads + first;
    HeadPass pass(args, first_head, std::min(kPassHeads, group_heads - first));
    for (const std::byte* block : blocks) {
      pass.Add(
          TileRows(tile_shape, block + tile_offset, args.g_k[kv_head_idx], args.g_v[kv_head_idx]),
          shape.block_tokens);
    }
    for (uint64_t done = 0; done < args.tail.token_count; done += kChunkTokens) {
      pass.Add(
          TailRows(args.tail, shape.head_dim, kv_head_idx, done),
          static_cast<uint32_t>(std::min<uint64_t>(kChunkTokens, args.tail.token_count - done)));
    }
    pass.Finish(args.lse.data() + first_head);
  }
  return Status();
}

}  // namespace

Status Decode(const DecodeArgs& args) {
  if (const Status status = Validate(args.block_shape); !status.ok()) return status;
  if (args.layer_idx >= args.block_shape.layer_count) {
    return Status::InvalidArgument("layer_idx is not below layer_count");
  }
  if (const Status status = ValidateQuery(args); !status.ok()) return status;
  if (const Status status = ValidateSequence(args); !status.ok()) return status;
  if (args.sealed_token_count == 0 && args.tail.token_count == 0) {
    std::fill(args.out.begin(), args.out.end(), 0.0F);
    std::fill(args.lse.begin(), args.lse.end(), kNegativeInfinity);
    return Status();
  }
  for (uint32_t kv_head_idx = 0; kv_head_idx < args.block_shape.kv_head_count; ++kv_head_idx) {
    if (const Status status = DecodeKvHead(args, kv_head_idx); !status.ok()) return status;
  }
  return Status();
}

Status MergeDecode(std::span<const DecodePartial> partials, uint32_t query_head_count,
                   uint32_t head_dim, std::span<float> out, std::span<float> lse) {
  if (query_head_count == 0 || head_dim == 0) {
    return Status::InvalidArgument("query_head_count and head_dim must not be zero");
  }
  const uint64_t out_count = uint64_t{query_head_count} * head_dim;
  if (out.size() != out_count || lse.size() != query_head_count) {
    return Status::InvalidArgument("out or lse does not have the exact size");
  }
  for (const DecodePartial& partial : partials) {
    if (partial.out.size() != out_count || partial.lse.size() != query_head_count) {
      return Status::InvalidArgument("a partial does not have the exact size");
    }
  }
  std::fill(out.begin(), out.end(), 0.0F);
  for (uint32_t h = 0; h < query_head_count; ++h) {
    float maximum = kNegativeInfinity;
    for (const DecodePartial& partial : partials) maximum = std::fmax(maximum, partial.lse[h]);
    float sum = 0.0F;
    for (const DecodePartial& partial : partials) {
      // An empty split is skipped, not multiplied by zero: its out may be anything.
      if (partial.lse[h] == kNegativeInfinity) continue;
      const float weight = std::exp(partial.lse[h] - maximum);
      sum += weight;
      for (uint64_t i = uint64_t{h} * head_dim; i < uint64_t{h + 1} * head_dim; ++i) {
        out[i] += weight * partial.out[i];
      }
    }
    if (sum == 0.0F) {
      lse[h] = kNegativeInfinity;
      continue;
    }
    for (uint64_t i = uint64_t{h} * head_dim; i < uint64_t{h + 1} * head_dim; ++i) out[i] /= sum;
    lse[h] = maximum + std::log(sum);
  }
  return Status();
}

}  // namespace kvtier::kernels
