// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_MLA_SEQUENCE_H_
#define KVTIER_KERNELS_MLA_SEQUENCE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/mla.h"
#include "kernels/nvfp4.h"

// A random MLA sequence for the tests of decode, with its FP64 answer.

namespace kvtier::kernels {

struct MlaCase {
  uint32_t block_tokens = 16;
  uint32_t heads = 16;
  uint32_t block_count = 0;
  uint32_t tail_tokens = 0;
  uint64_t tail_gap = 3;  // Elements between the rows of the tail.
  uint32_t query_len = 1;
  uint64_t window = 0;
  float soft_cap = 0.0F;
  bool sinks = false;
  ElementType latent_type = ElementType::kBf16;  // Of the tail.
  ElementType rope_type = ElementType::kBf16;
  float sharpness = 1.0F;  // Multiplies the queries.
  bool bf16_queries = true;
  uint32_t seed = 20261129;
};

class MlaSequence {
 public:
  static constexpr uint32_t kLayers = 3;
  static constexpr uint32_t kLayer = 1;
  static constexpr uint32_t kRowDims = kMlaLatentDim + kMlaRopeDim;
  static constexpr float kG = 0x1p-7F;

  MlaSequence(const MlaCase& mla_case, Isa isa)
      : case_(mla_case), isa_(isa), random_(mla_case.seed) {
    shape_ = {.layer_count = kLayers, .tile = {.block_tokens = case_.block_tokens}};
    for (uint32_t i = 0; i < case_.block_count; ++i) AddBlock();
    for (const auto& block : blocks_) table_.push_back(block.data());
    latent_tail_ = AddTail(case_.latent_type, kMlaLatentDim, kLatentScale);
    rope_tail_ = AddTail(case_.rope_type, kMlaRopeDim, kRopeScale);
    const uint64_t sealed = uint64_t{case_.block_count} * case_.block_tokens;
    for (uint32_t t = 0; t < case_.tail_tokens; ++t) {
      for (const uint32_t dims : {kMlaLatentDim, kMlaRopeDim}) {
        const std::vector<float>& source = dims == kMlaRopeDim ? rope_values_ : latent_values_;
        values_.insert(values_.end(), source.begin() + t * dims, source.begin() + (t + 1) * dims);
      }
    }
    EXPECT_EQ(values_.size(), (sealed + case_.tail_tokens) * kRowDims);
    query_.resize(uint64_t{Rows()} * kRowDims);
    for (float& x : query_) {
      x = case_.sharpness * normal_(random_);
      if (case_.bf16_queries) x = Bf16ToFloat(FloatToBf16(x));
    }
    for (uint32_t h = 0; case_.sinks && h < case_.heads; ++h) sinks_.push_back(normal_(random_));
    out_.resize(uint64_t{Rows()} * kMlaLatentDim);
    lse_.resize(Rows());
  }

  uint32_t Rows() const { return case_.heads * case_.query_len; }
  uint64_t TokenCount() const { return values_.size() / kRowDims; }

  DecodeMlaArgs Args() {
    return {.block_shape = shape_,
            .layer_idx = kLayer,
            .query = query_.data(),
            .query_head_count = case_.heads,
            .block_table = table_,
            .sealed_token_count = uint64_t{case_.block_count} * case_.block_tokens,
            .tail = {.latent = latent_tail_.data(),
                     .rope = rope_tail_.data(),
                     .token_count = case_.tail_tokens,
                     .latent_stride = kMlaLatentDim + case_.tail_gap,
                     .rope_stride = kMlaRopeDim + case_.tail_gap,
                     .latent_type = case_.latent_type,
                     .rope_type = case_.rope_type,
                     .latent_scale = kLatentScale,
                     .rope_scale = kRopeScale},
            .softmax_scale = kScale,
            .g = kG,
            .out = out_,
            .lse = lse_,
            .query_len = case_.query_len,
            .window = case_.window,
            .soft_cap = case_.soft_cap,
            .sinks = sinks_,
            .isa = isa_};
  }

  // Errors of out over the largest |out|, and of lse.
  void ExpectMatchesFp64() const { ExpectMatchesFp64(out_, lse_); }
  void ExpectMatchesFp64(std::span<const float> out, std::span<const float> lse) const {
    std::vector<double> expected(kMlaLatentDim);
    double error = 0;
    double largest = 0;
    double lse_error = 0;
    for (uint32_t row = 0; row < Rows(); ++row) {
      const double expected_lse = Attend(row, &expected);
      for (uint32_t i = 0; i < kMlaLatentDim; ++i) {
        const auto actual = static_cast<double>(out[uint64_t{row} * kMlaLatentDim + i]);
        largest = std::fmax(largest, std::fabs(expected[i]));
        // Negated comparison: a NaN fails.
        if (!(std::fabs(actual - expected[i]) <= error)) error = std::fabs(actual - expected[i]);
      }
      const auto actual_lse = static_cast<double>(lse[row]);
      if (actual_lse == expected_lse) continue;  // -inf
      if (!(std::fabs(actual_lse - expected_lse) <= lse_error)) {
        lse_error = std::fabs(actual_lse - expected_lse);
      }
    }
    // The documented bound is 2^-9.
    EXPECT_LE(error, largest * (isa_ == Isa::kAvx512 ? 0x1p-10 : 1e-5)) << Describe();
    EXPECT_LE(lse_error, 3e-5) << Describe();
  }

  std::string Describe() const {
    return "T " + std::to_string(case_.block_tokens) + " heads " + std::to_string(case_.heads) +
           " blocks " + std::to_string(case_.block_count) + " tail " +
           std::to_string(case_.tail_tokens) + " queries " + std::to_string(case_.query_len) +
           " window " + std::to_string(case_.window) + " isa " + IsaName(isa_) + " seed " +
           std::to_string(case_.seed);
  }

  std::vector<std::vector<std::byte>>& blocks() { return blocks_; }
  std::vector<float>& query() { return query_; }
  std::vector<std::byte>& latent_tail() { return latent_tail_; }
  std::vector<std::byte>& rope_tail() { return rope_tail_; }
  std::vector<float>& out() { return out_; }
  std::vector<float>& lse() { return lse_; }

 private:
  static constexpr float kLatentScale = 0.75F;
  static constexpr float kRopeScale = 3.0F;
  static constexpr float kScale = 0.05F;

  // FP64 attention of one query row over the dequantized values; returns the log-sum-exp.
  double Attend(uint32_t row, std::vector<double>* mean) const {
    const uint64_t end = TokenCount() - (case_.query_len - 1 - row / case_.heads);
    const uint64_t begin = case_.window != 0 && case_.window < end ? end - case_.window : 0;
    std::fill(mean->begin(), mean->end(), 0.0);
    double sum = 0;
    double top = -std::numeric_limits<double>::infinity();
    if (case_.sinks) {
      top = static_cast<double>(sinks_[row % case_.heads]);
      sum = 1;
    }
    for (uint64_t t = begin; t < end; ++t) {
      const float* token = &values_[t * kRowDims];
      double score = 0;
      for (uint32_t i = 0; i < kRowDims; ++i) {
        score += static_cast<double>(query_[uint64_t{row} * kRowDims + i]) *
                 static_cast<double>(token[i]);
      }
      score *= static_cast<double>(kScale);
      if (case_.soft_cap > 0.0F) {
        const auto cap = static_cast<double>(case_.soft_cap);
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
      for (uint32_t i = 0; i < kMlaLatentDim; ++i) {
        (*mean)[i] += weight * static_cast<double>(token[i]);
      }
    }
    if (sum == 0) return top;
    for (double& x : *mean) x /= sum;
    return top + std::log(sum);
  }

  void AddBlock() {
    std::vector<float> rows(uint64_t{case_.block_tokens} * kRowDims);
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i] = Bf16ToFloat(FloatToBf16((i % kRowDims == 3 ? 6.0F : 1.0F) * normal_(random_)));
    }
    // The other layers hold poison: reading it would be noticed.
    std::vector<std::byte> block(MlaBlockBytes(shape_), std::byte{0x7F});
    const ConstRows latent{
        .type = ElementType::kFp32, .data = rows.data(), .token_stride = kRowDims};
    ConstRows rope = latent;
    rope.data = rows.data() + kMlaLatentDim;
    SealStats stats;
    const auto tile =
        std::span(block).subspan(MlaTileOffset(shape_, kLayer), MlaTileBytes(shape_.tile));
    EXPECT_TRUE(SealMlaTile(shape_.tile, latent, rope, {.g = kG}, tile, &stats).ok());
    // What the block says of the rows, without any tile.
    for (size_t i = 0; i < rows.size(); i += kVectorDims) {
      if (i % kRowDims >= kMlaLatentDim) continue;
      uint8_t codes[kVectorCodeBytes];
      uint8_t scale = 0;
      Quantize16(&rows[i], kG, codes, &scale);
      Dequantize16(codes, scale, kG, &rows[i]);
    }
    values_.insert(values_.end(), rows.begin(), rows.end());
    blocks_.push_back(std::move(block));
  }

  // The buffer has room for a block more; all that is no tail token is NaN.
  std::vector<std::byte> AddTail(ElementType type, uint32_t dims, float scale) {
    const uint32_t element_bytes = ElementBytes(type);
    const uint64_t stride = dims + case_.tail_gap;
    std::vector<std::byte> rows(
        (uint64_t{case_.tail_tokens} + case_.block_tokens) * stride * element_bytes,
        std::byte{0xFF});
    std::vector<float>& values = dims == kMlaRopeDim ? rope_values_ : latent_values_;
    for (uint64_t i = 0; i < uint64_t{case_.tail_tokens} * dims; ++i) {
      const uint64_t at = i / dims * stride + i % dims;
      float value = Bf16ToFloat(FloatToBf16(normal_(random_)));
      if (type == ElementType::kFp8E4m3) {
        const auto byte =
            static_cast<uint8_t>(EncodeE4m3Scale(std::fabs(value)) | (value < 0.0F ? 0x80 : 0));
        rows[at] = std::byte{byte};
        value = DecodeE4m3Scale(byte) * scale;
      } else {
        const uint16_t bits = FloatToBf16(value);
        std::memcpy(&rows[at * 2], &bits, sizeof(bits));
      }
      values.push_back(value);
    }
    return rows;
  }

  MlaCase case_;
  Isa isa_;
  MlaBlockShape shape_;
  std::mt19937 random_;
  std::normal_distribution<float> normal_;
  std::vector<float> values_;  // [token][576]
  std::vector<float> latent_values_, rope_values_;
  std::vector<std::vector<std::byte>> blocks_;
  std::vector<const std::byte*> table_;
  std::vector<std::byte> latent_tail_, rope_tail_;
  std::vector<float> query_, sinks_, out_, lse_;
};

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_MLA_SEQUENCE_H_
