// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kernels/cuda/mla_decode.h"
#include "kernels/mla.h"
#include "tests/gpu/device_memory.h"
#include "tests/gpu/suite.h"

// Decode of latent attention on the device against DecodeMla, of which each is within 1e-5 of the
// largest output of exact attention.

namespace kvtier::gpu {
namespace {

using kernels::ElementType;
using kernels::kMlaLatentDim;
using kernels::kMlaRopeDim;

constexpr uint64_t kSeed = 20261130;
constexpr uint32_t kRowDims = kMlaLatentDim + kMlaRopeDim;
constexpr uint32_t kLayers = 2;
constexpr uint32_t kLayer = 1;
constexpr float kG = 0x1p-7F;
constexpr float kErrorMax = 2e-5F;
constexpr float kLseErrorMax = 6e-5F;

struct Case {
  uint32_t block_tokens = 64;
  uint32_t heads = 16;
  std::vector<uint32_t> block_counts;  // Of each sequence.
  std::vector<uint32_t> tail_tokens;
  uint32_t query_len = 1;
  uint32_t window = 0;
  float soft_cap = 0.0F;
  bool has_sinks = false;
  ElementType tail_type = ElementType::kBf16;
};

std::string NameOf(const Case& test_case) {
  return "T " + std::to_string(test_case.block_tokens) + " heads " +
         std::to_string(test_case.heads) + " queries " + std::to_string(test_case.query_len) +
         " window " + std::to_string(test_case.window) + " sequences " +
         std::to_string(test_case.block_counts.size());
}

// Sequences in host memory, and the answers of the CPU.
class Batch {
 public:
  explicit Batch(const Case& test_case)
      : case_(test_case),
        random_(kSeed),
        shape_{.layer_count = kLayers, .tile = {.block_tokens = test_case.block_tokens}} {
    for (const uint32_t count : case_.block_counts) stride_ = std::max(stride_, count);
    for (const uint32_t count : case_.tail_tokens) tail_max_ = std::max(tail_max_, count);
    blocks_.assign(SequenceCount() * stride_ * MlaBlockBytes(shape_), std::byte{0x7F});
    for (uint32_t s = 0; s < SequenceCount(); ++s) {
      for (uint32_t i = 0; i < case_.block_counts[s]; ++i) SealBlock(BlockAt(s, i));
    }
    const uint64_t tail_elements = SequenceCount() * tail_max_ * kRowDims;
    for (uint64_t i = 0; i < tail_elements; ++i) AddTailElement(normal_(random_));
    for (uint64_t i = 0; i < RowCount() * kRowDims; ++i) query_.push_back(normal_(random_));
    for (uint32_t i = 0; i < case_.heads; ++i) sinks_.push_back(normal_(random_));
    out_.resize(RowCount() * kMlaLatentDim);
    lse_.resize(RowCount());
    for (uint32_t s = 0; s < SequenceCount(); ++s) DecodeOnCpu(s);
  }

  uint32_t SequenceCount() const { return static_cast<uint32_t>(case_.block_counts.size()); }
  uint64_t RowCount() const { return uint64_t{SequenceCount()} * RowsOfOne(); }

  // Runs the batch on the device and compares.
  void Check(Suite* suite) {
    const DeviceArray<std::byte> blocks{std::span<const std::byte>(blocks_)};
    const DeviceArray<std::byte> tail{std::span<const std::byte>(tail_)};
    std::vector<const void*> table;
    std::vector<const void*> latents;
    std::vector<const void*> ropes;
    std::vector<uint32_t> sealed;
    for (uint32_t s = 0; s < SequenceCount(); ++s) {
      for (uint32_t i = 0; i < stride_; ++i) table.push_back(blocks.data() + BlockAt(s, i));
      latents.push_back(tail.data() + TailAt(s));
      ropes.push_back(tail.data() + TailAt(s) + kMlaLatentDim * ElementBytes(case_.tail_type));
      sealed.push_back(case_.block_counts[s] * case_.block_tokens);
    }
    const DeviceArray<const void*> device_table(table), device_latents(latents),
        device_ropes(ropes);
    const DeviceArray<uint32_t> sealed_counts(sealed), tail_counts(case_.tail_tokens);
    const DeviceArray<float> query(query_), sinks(sinks_), out(out_.size()), lse(lse_.size());
    const DeviceArray<float> g{std::vector<float>{kG}};
    const DeviceArray<uint32_t> damage{std::vector<uint32_t>(1)};
    kernels::cuda::DecodeMlaBatchArgs args{.block_shape = shape_,
                                           .layer_idx = kLayer,
                                           .batch_size = SequenceCount(),
                                           .block_table = device_table.data(),
                                           .table_stride = stride_,
                                           .sealed_token_counts = sealed_counts.data(),
                                           .tails = {.token_counts = tail_counts.data(),
                                                     .latent = device_latents.data(),
                                                     .rope = device_ropes.data(),
                                                     .latent_stride = kRowDims,
                                                     .rope_stride = kRowDims,
                                                     .latent_type = case_.tail_type,
                                                     .rope_type = case_.tail_type,
                                                     .latent_scale = kTailScale,
                                                     .rope_scale = kTailScale},
                                           .query_type = ElementType::kFp32,
                                           .query = query.data(),
                                           .query_head_count = case_.heads,
                                           .query_len = case_.query_len,
                                           .softmax_scale = kSoftmaxScale,
                                           .soft_cap = case_.soft_cap,
                                           .window = case_.window,
                                           .g = g.data(),
                                           .sinks = case_.has_sinks ? sinks.data() : nullptr,
                                           .out_type = ElementType::kFp32,
                                           .out = out.data(),
                                           .lse = lse.data(),
                                           .damage_count = damage.data()};
    DeviceArray<std::byte> workspace{
        std::vector<std::byte>(kernels::cuda::DecodeMlaBatchWorkspaceBytes(args))};
    args.workspace = workspace.data();
    const auto status = DecodeMlaBatch(args, nullptr);
    suite->Expect(status.ok(), status.message());
    CheckCuda(cudaDeviceSynchronize(), "decode latents");
    Compare(out.Download(), lse.Download(), suite);
    suite->Expect(damage.Download()[0] == 0, NameOf(case_) + " damage");
  }

 private:
  static constexpr float kTailScale = 0.75F;
  static constexpr float kSoftmaxScale = 0.05F;

  uint64_t RowsOfOne() const { return uint64_t{case_.heads} * case_.query_len; }
  uint64_t BlockAt(uint32_t sequence, uint32_t idx) const {
    return (uint64_t{sequence} * stride_ + idx) * MlaBlockBytes(shape_);
  }
  uint64_t TailAt(uint32_t sequence) const {
    return uint64_t{sequence} * tail_max_ * kRowDims * ElementBytes(case_.tail_type);
  }

  void SealBlock(uint64_t at) {
    std::vector<float> rows(uint64_t{case_.block_tokens} * kRowDims);
    for (float& x : rows) x = normal_(random_);
    const kernels::ConstRows latent{
        .type = ElementType::kFp32, .data = rows.data(), .token_stride = kRowDims};
    kernels::ConstRows rope = latent;
    rope.data = rows.data() + kMlaLatentDim;
    kernels::SealStats stats;
    const auto tile =
        std::span(blocks_).subspan(at + MlaTileOffset(shape_, kLayer), MlaTileBytes(shape_.tile));
    const auto status = SealMlaTile(shape_.tile, latent, rope, {.g = kG}, tile, &stats);
    if (!status.ok()) std::abort();
  }

  void AddTailElement(float x) {
    if (case_.tail_type == ElementType::kFp8E4m3) {
      const uint8_t magnitude = kernels::EncodeE4m3Scale(std::fabs(x));
      tail_.push_back(static_cast<std::byte>(magnitude | (x < 0.0F ? 0x80 : 0)));
    } else {
      const uint16_t bits = kernels::FloatToBf16(x);
      tail_.push_back(static_cast<std::byte>(bits & 0xFF));
      tail_.push_back(static_cast<std::byte>(bits >> 8));
    }
  }

  void DecodeOnCpu(uint32_t s) {
    std::vector<const std::byte*> table;
    for (uint32_t i = 0; i < case_.block_counts[s]; ++i) {
      table.push_back(blocks_.data() + BlockAt(s, i));
    }
    const std::byte* latent = tail_.data() + TailAt(s);
    const auto status = kernels::DecodeMla(
        {.block_shape = shape_,
         .layer_idx = kLayer,
         .query = query_.data() + s * RowsOfOne() * kRowDims,
         .query_head_count = case_.heads,
         .block_table = table,
         .sealed_token_count = uint64_t{case_.block_counts[s]} * case_.block_tokens,
         .tail = {.latent = latent,
                  .rope = latent + kMlaLatentDim * ElementBytes(case_.tail_type),
                  .token_count = case_.tail_tokens[s],
                  .latent_stride = kRowDims,
                  .rope_stride = kRowDims,
                  .latent_type = case_.tail_type,
                  .rope_type = case_.tail_type,
                  .latent_scale = kTailScale,
                  .rope_scale = kTailScale},
         .softmax_scale = kSoftmaxScale,
         .g = kG,
         .out =
             std::span(out_).subspan(s * RowsOfOne() * kMlaLatentDim, RowsOfOne() * kMlaLatentDim),
         .lse = std::span(lse_).subspan(s * RowsOfOne(), RowsOfOne()),
         .query_len = case_.query_len,
         .window = case_.window,
         .soft_cap = case_.soft_cap,
         .sinks = case_.has_sinks ? std::span<const float>(sinks_) : std::span<const float>(),
         .isa = kernels::Isa::kScalar});
    if (!status.ok()) std::abort();
  }

  void Compare(const std::vector<float>& out, const std::vector<float>& lse, Suite* suite) const {
    float largest = 0.0F;
    float error = 0.0F;
    // Negated comparisons: a NaN fails.
    for (size_t i = 0; i < out.size(); ++i) {
      largest = std::max(largest, std::fabs(out_[i]));
      if (!(std::fabs(out[i] - out_[i]) <= error)) error = std::fabs(out[i] - out_[i]);
    }
    float lse_error = 0.0F;
    for (size_t i = 0; i < lse.size(); ++i) {
      if (lse[i] == lse_[i]) continue;  // -inf
      if (!(std::fabs(lse[i] - lse_[i]) <= lse_error)) lse_error = std::fabs(lse[i] - lse_[i]);
    }
    suite->Expect(error <= kErrorMax * largest,
                  NameOf(case_) + " error " + std::to_string(error / largest));
    suite->Expect(lse_error <= kLseErrorMax,
                  NameOf(case_) + " lse error " + std::to_string(lse_error));
  }

  Case case_;
  std::mt19937_64 random_;
  std::normal_distribution<float> normal_;
  kernels::MlaBlockShape shape_;
  uint32_t stride_ = 1;
  uint32_t tail_max_ = 1;
  std::vector<std::byte> blocks_;
  std::vector<std::byte> tail_;  // [sequence][token][latent, rope]
  std::vector<float> query_;
  std::vector<float> sinks_;
  std::vector<float> out_;
  std::vector<float> lse_;
};

}  // namespace

void CheckMlaDecode(Suite* suite) {
  suite->Begin("MLA: decode");
  if (suite->options().is_sanitized) {
    Batch({.block_tokens = 16,
           .heads = 9,
           .block_counts = {0, 2, 1},
           .tail_tokens = {0, 3, 0},
           .has_sinks = true})
        .Check(suite);
    Batch({.block_tokens = 32,
           .heads = 3,
           .block_counts = {1},
           .tail_tokens = {5},
           .query_len = 2,
           .window = 20,
           .soft_cap = 3.0F,
           .tail_type = ElementType::kFp8E4m3})
        .Check(suite);
    return;
  }
  for (const uint32_t block_tokens : {16U, 32U, 64U, 128U}) {
    for (const uint32_t heads : {1U, 8U, 16U, 20U, 128U}) {
      Batch({.block_tokens = block_tokens,
             .heads = heads,
             .block_counts = {0, 1, 257 / block_tokens, 2600 / block_tokens},
             .tail_tokens = {0, 1, block_tokens, 3}})
          .Check(suite);
    }
  }
  for (const uint32_t query_len : {2U, 8U}) {
    for (const uint32_t window : {0U, 1U, 70U, 1000U}) {
      Batch({.heads = 4,
             .block_counts = {3, 30},
             .tail_tokens = {9, 0},
             .query_len = query_len,
             .window = window})
          .Check(suite);
    }
  }
  Batch({.block_counts = {20}, .tail_tokens = {5}, .soft_cap = 3.0F, .has_sinks = true})
      .Check(suite);
  Batch({.block_counts = {2, 20}, .tail_tokens = {5, 70}, .tail_type = ElementType::kFp8E4m3})
      .Check(suite);
}

}  // namespace kvtier::gpu
