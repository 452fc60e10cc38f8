// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_DECODE_SEQUENCE_H_
#define KVTIER_KERNELS_DECODE_SEQUENCE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/decode.h"
#include "kernels/nvfp4.h"
#include "kernels/seal.h"

// A random sequence for the tests of decode, with its FP64 answer.

namespace kvtier::kernels {

inline constexpr uint32_t kSeed = 20261106;

struct Shape {
  uint32_t block_tokens;
  uint32_t head_dim;
  uint32_t kv_heads;
  uint32_t group_heads;  // Query heads per kv head.
  uint32_t block_count;
  uint32_t tail_tokens;
};

// What DecodeArgs leaves at its default.
struct Options {
  uint32_t query_len = 1;
  uint64_t window = 0;
  float soft_cap = 0.0F;
  bool sinks = false;
  bool transform = false;  // K is sealed with mean and smoothing vectors.
  ElementType tail_type = ElementType::kBf16;
  // By how much the score of the first sealed token is above the others, about. Its values are
  // zeros then, as those of tokens that take up attention that no other token gets.
  float idle_lead = 0.0F;
};

// The error bound of an implementation, relative to the largest |V|. The documented bound of
// kAvx512 is 2^-9 of the largest |out|; these data stay far below.
inline double DecodeTolerance(Isa isa) { return isa == Isa::kAvx512 ? 0x1p-13 : 2e-6; }

// A sequence in both forms: sealed blocks plus tail for the kernel, and the same values as plain
// FP32 arrays [token][kv head][dim], dequantized vector by vector without any tile, for the FP64
// reference.
class Sequence {
 public:
  static constexpr uint32_t kLayers = 2;
  static constexpr uint32_t kLayer = 1;

  explicit Sequence(const Shape& shape, Isa isa = Isa::kScalar, const Options& options = {})
      : shape_(shape),
        isa_(isa),
        options_(options),
        block_shape_{.layer_count = kLayers,
                     .kv_head_count = shape.kv_heads,
                     .block_tokens = shape.block_tokens,
                     .head_dim = shape.head_dim},
        random_(kSeed) {
    for (uint32_t h = 0; h < shape.kv_heads; ++h) {
      g_k_.push_back(std::ldexp(1.0F, -6 - static_cast<int>(h % 3)));
      g_v_.push_back(std::ldexp(1.0F, -7 + static_cast<int>(h % 2)));
    }
    if (options.sinks) {
      for (uint32_t h = 0; h < QueryHeads(); ++h) sinks_.push_back(normal_(random_));
    }
    if (options.transform) {
      for (uint32_t i = 0; i < shape.kv_heads * shape.head_dim; ++i) {
        k_mean_.push_back(0.5F * normal_(random_));
        k_smooth_.push_back(std::exp2(normal_(random_)));
      }
    }
    for (uint32_t i = 0; i < shape.block_count; ++i) AddBlock();
    for (const auto& block : blocks_) table_.push_back(block.data());
    AddTail();
    query_.resize(uint64_t{Rows()} * shape.head_dim);
    for (size_t i = 0; i < query_.size(); ++i) {
      const bool is_lead = i % shape.head_dim == kIdleDim;
      const float lead =
          options.idle_lead * std::sqrt(static_cast<float>(shape.head_dim)) / kIdleKey;
      query_[i] = Bf16ToFloat(FloatToBf16(normal_(random_) + (is_lead ? lead : 0.0F)));
    }
    out_.resize(query_.size());
    lse_.resize(Rows());
  }

  uint32_t QueryHeads() const { return shape_.kv_heads * shape_.group_heads; }
  uint32_t Rows() const { return QueryHeads() * options_.query_len; }
  uint64_t TokenCount() const { return k_.size() / shape_.kv_heads / shape_.head_dim; }

  DecodeArgs Args() {
    return {.block_shape = block_shape_,
            .layer_idx = kLayer,
            .query_type = ElementType::kFp32,
            .query = query_.data(),
            .query_head_count = QueryHeads(),
            .block_table = table_,
            .sealed_token_count = uint64_t{shape_.block_count} * shape_.block_tokens,
            .tail = {.k = tail_k_.data(),
                     .v = tail_v_.data(),
                     .token_count = shape_.tail_tokens,
                     .token_stride = tail_stride_,
                     .head_stride = shape_.head_dim + 3,
                     .type = options_.tail_type,
                     .k_scale = kTailScaleK,
                     .v_scale = kTailScaleV},
            .softmax_scale = 1.0F / std::sqrt(static_cast<float>(shape_.head_dim)),
            .g_k = g_k_,
            .g_v = g_v_,
            .out = out_,
            .lse = lse_,
            .query_len = options_.query_len,
            .window = options_.window,
            .soft_cap = options_.soft_cap,
            .sinks = sinks_,
            .k_smooth = k_smooth_,
            .k_mean = k_mean_,
            .isa = isa_};
  }

  // Largest error of out relative to the largest magnitude of V, and of lse absolutely.
  void ExpectMatchesReference(std::span<const float> out, std::span<const float> lse) const {
    double v_max = 0;
    for (const float x : v_) v_max = std::fmax(v_max, std::fabs(static_cast<double>(x)));
    double error = 0;
    double lse_error = 0;
    std::vector<double> expected(shape_.head_dim);
    for (uint32_t row = 0; row < Rows(); ++row) {
      const double expected_lse = Attend(row, &expected);
      for (uint32_t i = 0; i < shape_.head_dim; ++i) {
        const auto actual = static_cast<double>(out[row * shape_.head_dim + i]);
        // Negated comparison: a NaN fails.
        if (!(std::fabs(actual - expected[i]) <= error)) error = std::fabs(actual - expected[i]);
      }
      const auto actual_lse = static_cast<double>(lse[row]);
      if (actual_lse == expected_lse) continue;  // -inf
      if (!(std::fabs(actual_lse - expected_lse) <= lse_error)) {
        lse_error = std::fabs(actual_lse - expected_lse);
      }
    }
    EXPECT_LE(error, v_max * DecodeTolerance(isa_)) << Describe();
    EXPECT_LE(lse_error, 2e-5) << Describe();
  }

  // Largest error of out over the largest |out|.
  double RelativeError() const {
    std::vector<double> expected(shape_.head_dim);
    double error = 0;
    double largest = 0;
    for (uint32_t row = 0; row < Rows(); ++row) {
      Attend(row, &expected);
      for (uint32_t i = 0; i < shape_.head_dim; ++i) {
        const auto actual = static_cast<double>(out_[row * shape_.head_dim + i]);
        error = std::fmax(error, std::fabs(actual - expected[i]));
        largest = std::fmax(largest, std::fabs(expected[i]));
      }
    }
    return error / largest;
  }

  std::string Describe() const {
    return "T " + std::to_string(shape_.block_tokens) + " d " + std::to_string(shape_.head_dim) +
           " kv heads " + std::to_string(shape_.kv_heads) + " group " +
           std::to_string(shape_.group_heads) + " blocks " + std::to_string(shape_.block_count) +
           " tail " + std::to_string(shape_.tail_tokens) + " queries " +
           std::to_string(options_.query_len) + " window " + std::to_string(options_.window) +
           " isa " + IsaName(isa_) + " seed " + std::to_string(kSeed);
  }

  std::vector<std::vector<std::byte>>& blocks() { return blocks_; }
  std::vector<const std::byte*>& table() { return table_; }
  std::vector<float>& query() { return query_; }
  std::vector<float>& out() { return out_; }
  std::vector<float>& lse() { return lse_; }

 private:
  static constexpr float kTailScaleK = 0.75F;
  static constexpr float kTailScaleV = 3.0F;
  static constexpr uint32_t kIdleDim = 19;
  static constexpr float kIdleKey = 16.0F;

  // FP64 attention of one query row over the dequantized values; returns the log-sum-exp.
  double Attend(uint32_t row, std::vector<double>* mean) const {
    const uint32_t head = row % QueryHeads();
    const uint64_t stride = uint64_t{shape_.kv_heads} * shape_.head_dim;
    const uint64_t kv_offset = uint64_t{head / shape_.group_heads} * shape_.head_dim;
    const double scale = static_cast<double>(1.0F / std::sqrt(static_cast<float>(shape_.head_dim)));
    const uint64_t end = TokenCount() - (options_.query_len - 1 - row / QueryHeads());
    const bool windowed = options_.window != 0 && options_.window < end;
    const uint64_t begin = windowed ? end - options_.window : 0;
    std::fill(mean->begin(), mean->end(), 0.0);
    double sum = 0;
    double top = -std::numeric_limits<double>::infinity();
    if (options_.sinks) {
      top = static_cast<double>(sinks_[head]);
      sum = 1;
    }
    for (uint64_t t = begin; t < end; ++t) {
      double score = 0;
      for (uint32_t i = 0; i < shape_.head_dim; ++i) {
        score += scale * static_cast<double>(query_[row * shape_.head_dim + i]) *
                 static_cast<double>(k_[t * stride + kv_offset + i]);
      }
      if (options_.soft_cap > 0.0F) {
        const auto cap = static_cast<double>(options_.soft_cap);
        score = cap * std::tanh(score / cap);
      }
      if (score > top) {
        const double rescale = std::exp(top - score);
        for (double& x : *mean) x *= rescale;
        sum *= rescale;
        top = score;
      }
      const double weight = std::exp(score - top);
      sum += weight;
      for (uint32_t i = 0; i < shape_.head_dim; ++i) {
        (*mean)[i] += weight * static_cast<double>(v_[t * stride + kv_offset + i]);
      }
    }
    if (sum == 0) return top;
    for (double& x : *mean) x /= sum;
    return top + std::log(sum);
  }

  std::vector<float> RandomRows(uint32_t token_count) {
    std::vector<float> rows(uint64_t{token_count} * shape_.kv_heads * shape_.head_dim);
    for (size_t i = 0; i < rows.size(); ++i) {
      const float outlier = i % shape_.head_dim == 3 ? 8.0F : 1.0F;
      rows[i] = Bf16ToFloat(FloatToBf16(outlier * normal_(random_)));
    }
    return rows;
  }

  // What the blocks will say of `rows`, without any tile.
  void AppendDequantized(const std::vector<float>& rows, const std::vector<float>& g,
                         std::vector<float>* values) const {
    for (size_t i = 0; i < rows.size(); i += kVectorDims) {
      const float scale = g[i / shape_.head_dim % shape_.kv_heads];
      uint8_t codes[kVectorCodeBytes];
      uint8_t scale_byte = 0;
      float out[kVectorDims];
      Quantize16(&rows[i], scale, codes, &scale_byte);
      Dequantize16(codes, scale_byte, scale, out);
      values->insert(values->end(), out, out + kVectorDims);
    }
  }

  std::span<const float> Channels(const std::vector<float>& vector, uint32_t kv_head_idx) const {
    if (vector.empty()) return {};
    return std::span(vector).subspan(uint64_t{kv_head_idx} * shape_.head_dim, shape_.head_dim);
  }

  void AddBlock() {
    std::vector<float> k = RandomRows(shape_.block_tokens);
    std::vector<float> v = RandomRows(shape_.block_tokens);
    if (options_.idle_lead != 0.0F && blocks_.empty()) MakeFirstIdle(&k, &v);
    const size_t before = k_.size();
    std::vector<float> transformed = k;
    for (size_t i = 0; options_.transform && i < k.size(); ++i) {
      const size_t channel = i % k_mean_.size();
      const float inverse = 1.0F / k_smooth_[channel];
      transformed[i] = Bf16ToFloat(FloatToBf16((k[i] - k_mean_[channel]) * inverse));
    }
    AppendDequantized(transformed, g_k_, &k_);
    AppendDequantized(v, g_v_, &v_);
    for (size_t i = before; options_.transform && i < k_.size(); ++i) {
      const size_t channel = i % k_mean_.size();
      k_[i] = k_[i] * k_smooth_[channel] + k_mean_[channel];
    }
    // The other layer holds poison: reading it would be noticed.
    std::vector<std::byte> block(BlockBytes(block_shape_), std::byte{0x7F});
    const TileShape tile = TileOf(block_shape_);
    const uint64_t stride = uint64_t{shape_.kv_heads} * shape_.head_dim;
    SealStats stats;
    for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
      const auto rows_of = [&](const std::vector<float>& rows) {
        return ConstRows{.type = ElementType::kFp32,
                         .data = &rows[uint64_t{h} * shape_.head_dim],
                         .token_stride = stride};
      };
      ASSERT_TRUE(
          SealTile(tile, rows_of(k), rows_of(v),
                   {.g_k = g_k_[h],
                    .g_v = g_v_[h],
                    .k_mean = Channels(k_mean_, h),
                    .k_smooth = Channels(k_smooth_, h)},
                   std::span(block).subspan(TileOffset(block_shape_, kLayer, h), TileBytes(tile)),
                   &stats)
              .ok());
    }
    blocks_.push_back(std::move(block));
  }

  void MakeFirstIdle(std::vector<float>* k, std::vector<float>* v) const {
    const size_t token_dims = size_t{shape_.kv_heads} * shape_.head_dim;
    for (size_t i = 0; i < token_dims; ++i) {
      (*k)[i] = i % shape_.head_dim == kIdleDim ? kIdleKey : 0.0F;
      (*v)[i] = 0.0F;
    }
  }

  // The tail buffer has room for a whole block; all that is no tail token is NaN.
  void AddTail() {
    const bool fp8 = options_.tail_type == ElementType::kFp8E4m3;
    const uint32_t element_bytes = ElementBytes(options_.tail_type);
    const uint64_t head_stride = shape_.head_dim + 3;
    tail_stride_ = shape_.kv_heads * head_stride + 5;
    const uint32_t capacity = std::max(shape_.tail_tokens, shape_.block_tokens);
    const std::vector<float> rows[] = {RandomRows(shape_.tail_tokens),
                                       RandomRows(shape_.tail_tokens)};
    for (const bool is_v : {false, true}) {
      auto& tail = is_v ? tail_v_ : tail_k_;
      tail.assign(capacity * tail_stride_ * element_bytes, std::byte{0xFF});
      for (size_t i = 0; i < rows[is_v].size(); ++i) {
        const uint64_t token = i / shape_.head_dim / shape_.kv_heads;
        const uint64_t head = i / shape_.head_dim % shape_.kv_heads;
        const uint64_t at = token * tail_stride_ + head * head_stride + i % shape_.head_dim;
        float value = rows[is_v][i];
        if (fp8) {
          const auto byte =
              static_cast<uint8_t>(EncodeE4m3Scale(std::fabs(value)) | (value < 0.0F ? 0x80 : 0));
          tail[at] = std::byte{byte};
          value = DecodeE4m3Scale(byte) * (is_v ? kTailScaleV : kTailScaleK);
        } else {
          const uint16_t bits = FloatToBf16(value);
          std::memcpy(&tail[at * 2], &bits, sizeof(bits));
        }
        (is_v ? v_ : k_).push_back(value);
      }
    }
  }

  Shape shape_;
  Isa isa_;
  Options options_;
  BlockShape block_shape_;
  std::mt19937 random_;
  std::normal_distribution<float> normal_;
  std::vector<float> g_k_, g_v_, sinks_, k_mean_, k_smooth_;
  std::vector<float> k_, v_;  // [token][kv head][dim]
  std::vector<std::vector<std::byte>> blocks_;
  std::vector<const std::byte*> table_;
  std::vector<std::byte> tail_k_, tail_v_;
  uint64_t tail_stride_ = 0;
  std::vector<float> query_, out_, lse_;
};

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_DECODE_SEQUENCE_H_
