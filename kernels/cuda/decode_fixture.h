// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_DECODE_FIXTURE_H_
#define KVTIER_KERNELS_CUDA_DECODE_FIXTURE_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kernels/cuda/decode.h"
#include "kernels/cuda/emu/device_buffer.h"
#include "kernels/element.h"
#include "kernels/gather.h"
#include "kernels/nvfp4.h"
#include "kernels/seal.h"
#include "kernels/tile_layout.h"

// A batch for the decode kernel, with its FP64 answer. Shared by the emulation tests and tests/gpu,
// so it knows neither the machine nor the driver.

namespace kvtier::kernels::cuda {

struct DecodeCase {
  uint32_t block_tokens = 64;
  uint32_t head_dim = 128;
  uint32_t kv_heads = 2;
  uint32_t group_heads = 8;
  std::vector<uint32_t> block_counts = {3};  // Of each sequence.
  std::vector<uint32_t> tail_tokens = {5};
  uint32_t query_len = 1;
  uint32_t window = 0;
  float soft_cap = 0.0F;
  bool has_sinks = false;
  bool has_transform = false;
  LayerFormat format = {};
  ElementType tail_type = ElementType::kBf16;
  ElementType query_type = ElementType::kBf16;
  ElementType out_type = ElementType::kFp32;
  float score_spread = 1.0F;   // Multiplies the query: large values make one-hot softmaxes.
  float query_unit = 1.0F;     // A power of two. Multiplies the query, divides softmax_scale.
  float smooth_spread = 1.0F;  // Of log2(k_smooth).
  // Of the scores of a sequence's first sealed token over the others; its values are zeros then, as
  // those of tokens that take up attention that no other token gets.
  float idle_lead = 0.0F;
};

// What decode promises of a case: of out, and of lse, whose error grows with the scores.
inline constexpr double kOutErrorMax = 0x1p-9;
inline double LseErrorMax(const DecodeCase& test_case) {
  return 2e-5 * std::fmax(1.0, static_cast<double>(test_case.score_spread));
}

// Largest errors against FP64: of out relative to the largest |out| of its row, of lse absolute.
struct DecodeErrors {
  double out = 0;
  double lse = 0;
};

// All the memory of one case, on the host. Sealed blocks lie in random order in one buffer; the
// other layer, other sequences' rows of the table and everything behind a tail are poison.
class DecodeData {
 public:
  static constexpr uint32_t kLayers = 2;
  static constexpr uint32_t kLayer = 1;
  static constexpr float kTailScaleK = 0.75F;
  static constexpr float kTailScaleV = 3.0F;
  static constexpr uint32_t kIdleDim = 19;
  static constexpr float kIdleKey = 16.0F;

  DecodeData(const DecodeCase& test_case, uint64_t seed)
      : case_(test_case),
        shape_{kLayers, test_case.kv_heads, test_case.block_tokens, test_case.head_dim},
        formats_(kLayers, test_case.format),
        random_(seed) {
    for (uint32_t h = 0; h < case_.kv_heads; ++h) {
      g_k.push_back(std::ldexp(1.0F, -6 - static_cast<int>(h % 3)));
      g_v.push_back(std::ldexp(1.0F, -7 + static_cast<int>(h % 2)));
    }
    for (uint32_t h = 0; case_.has_sinks && h < QueryHeads(); ++h) sinks.push_back(Normal());
    for (uint32_t i = 0; case_.has_transform && i < case_.kv_heads * case_.head_dim; ++i) {
      k_mean.push_back(0.5F * Normal());
      k_smooth.push_back(std::exp2(case_.smooth_spread * Normal()));
    }
    MakeBlocks();
    MakeTails();
    MakeQueries();
    out.resize(Rows() * case_.head_dim * ElementBytes(case_.out_type));
    lse.resize(Rows());
    workspace.resize(WorkspaceBytes());
  }

  // Arguments over this memory. The device test replaces the pointers.
  DecodeBatchArgs Args() {
    return {.block_shape = shape_,
            .layer_format = case_.format,
            .layer_offset = LayerOffset(shape_, formats_, kLayer),
            .batch_size = BatchSize(),
            .block_table = table.data(),
            .table_stride = table_stride_,
            .sealed_token_counts = sealed_counts.data(),
            .tails = {.token_counts = case_.tail_tokens.data(),
                      .k = tail_k_addresses.data(),
                      .v = tail_v_addresses.data(),
                      .token_stride = tail_stride_,
                      .head_stride = case_.head_dim + 16,
                      .type = case_.tail_type,
                      .k_scale = kTailScaleK,
                      .v_scale = kTailScaleV},
            .query_type = case_.query_type,
            .query = query.data(),
            .query_head_count = QueryHeads(),
            .query_len = case_.query_len,
            .softmax_scale = Scale(),
            .soft_cap = case_.soft_cap,
            .window = case_.window,
            .g_k = g_k.data(),
            .g_v = g_v.data(),
            .k_smooth = k_smooth.empty() ? nullptr : k_smooth.data(),
            .k_mean = k_mean.empty() ? nullptr : k_mean.data(),
            .sinks = sinks.empty() ? nullptr : sinks.data(),
            .out_type = case_.out_type,
            .out = out.data(),
            .lse = lse.data(),
            .damage_count = damage_count.data(),
            .workspace = workspace.empty() ? nullptr : workspace.data()};
  }

  uint32_t BatchSize() const { return static_cast<uint32_t>(case_.block_counts.size()); }
  uint32_t QueryHeads() const { return case_.kv_heads * case_.group_heads; }
  uint64_t Rows() const { return uint64_t{BatchSize()} * case_.query_len * QueryHeads(); }

  float Out(uint64_t index) const {
    if (case_.out_type == ElementType::kFp32) {
      float value = 0;
      std::memcpy(&value, &out[4 * index], sizeof(value));
      return value;
    }
    uint16_t bits = 0;
    std::memcpy(&bits, &out[2 * index], sizeof(bits));
    return Bf16ToFloat(bits);
  }

  // What `out` and `lse` hold against the exact answer. A NaN is an infinite error.
  DecodeErrors Errors() const {
    DecodeErrors errors;
    const auto raise = [](double error, double* largest) {
      if (!(error <= *largest)) *largest = std::isnan(error) ? HUGE_VAL : error;
    };
    std::vector<double> expected(case_.head_dim);
    for (uint64_t row = 0; row < Rows(); ++row) {
      const double expected_lse = Attend(row, &expected);
      double largest = 0;
      for (const double x : expected) largest = std::fmax(largest, std::fabs(x));
      for (uint32_t i = 0; i < case_.head_dim; ++i) {
        const auto actual = static_cast<double>(Out(row * case_.head_dim + i));
        if (actual == expected[i]) continue;
        raise(std::fabs(actual - expected[i]) / largest, &errors.out);
      }
      const auto actual_lse = static_cast<double>(lse[row]);
      if (actual_lse != expected_lse) raise(std::fabs(actual_lse - expected_lse), &errors.lse);
    }
    return errors;
  }

  emu::DeviceBuffer<std::byte> blocks;  // One after the other.
  emu::DeviceBuffer<const void*> table;
  emu::DeviceBuffer<uint32_t> sealed_counts;
  emu::DeviceBuffer<std::byte> tail_k, tail_v;  // Of all sequences.
  emu::DeviceBuffer<const void*> tail_k_addresses, tail_v_addresses;
  emu::DeviceBuffer<float> g_k, g_v, sinks, k_mean, k_smooth;
  emu::DeviceBuffer<std::byte> query, out;
  emu::DeviceBuffer<float> lse;
  emu::DeviceBuffer<uint32_t> damage_count = emu::DeviceBuffer<uint32_t>(1);
  emu::DeviceBuffer<std::byte> workspace;

  const DecodeCase& test_case() const { return case_; }

 private:
  // K and V of a sequence as the kernel should see them: [token][kv head][dim].
  struct Values {
    std::vector<float> k;
    std::vector<float> v;
  };

  float Normal() { return std::normal_distribution<float>()(random_); }
  float Scale() const {
    return 1.0F / std::sqrt(static_cast<float>(case_.head_dim)) / case_.query_unit;
  }

  uint64_t WorkspaceBytes() { return DecodeBatchWorkspaceBytes(Args()); }

  std::vector<float> RandomRow() {
    std::vector<float> row(case_.head_dim);
    for (uint32_t i = 0; i < case_.head_dim; ++i) {
      row[i] = Bf16ToFloat(FloatToBf16((i == 3 ? 8.0F : 1.0F) * Normal()));
    }
    return row;
  }

  static uint8_t ToFp8(float value) {
    return static_cast<uint8_t>(EncodeE4m3Scale(std::fabs(value)) | (value < 0.0F ? 0x80 : 0));
  }

  void MakeBlocks() {
    uint64_t block_count = 0;
    table_stride_ = 1;
    for (const uint32_t count : case_.block_counts) {
      block_count += count;
      table_stride_ = std::max(table_stride_, count + 1);
      sealed_counts.push_back(count * case_.block_tokens);
    }
    const uint64_t block_bytes = BlockBytes(shape_, formats_);
    blocks.assign(block_count * block_bytes + 16, std::byte{0x7F});
    std::vector<uint64_t> order(block_count);
    for (uint64_t i = 0; i < block_count; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random_);
    table.assign(uint64_t{table_stride_} * BatchSize(), nullptr);
    uint64_t next = 0;
    for (uint32_t s = 0; s < BatchSize(); ++s) {
      values_.emplace_back();
      for (uint32_t b = 0; b < case_.block_counts[s]; ++b) {
        std::byte* block = &blocks[order[next++] * block_bytes];
        table[uint64_t{s} * table_stride_ + b] = block;
        FillBlock(block, b == 0, &values_.back());
      }
    }
  }

  // One side of one (block, kv head): rows to bytes, and what they decode to.
  void FillSide(SideFormat format, const std::vector<std::vector<float>>& rows, bool is_v,
                uint32_t head, std::byte* side, std::vector<float>* values) {
    const TileShape tile = TileOf(shape_);
    const float g = is_v ? g_v[head] : g_k[head];
    for (uint32_t t = 0; t < case_.block_tokens; ++t) {
      for (uint32_t i = 0; i < case_.head_dim; i += kVectorDims) {
        float x[kVectorDims];
        for (uint32_t j = 0; j < kVectorDims; ++j)
          x[j] = Transformed(rows[t][i + j], head, i + j, is_v);
        float decoded[kVectorDims];
        if (format == SideFormat::kNvfp4) {
          uint8_t codes[kVectorCodeBytes];
          uint8_t scale = 0;
          Quantize16(x, g, codes, &scale);
          const uint64_t v_side = is_v ? VDataOffset(tile) : 0;
          std::memcpy(
              side + (is_v ? VCodeOffset(tile, t, i / 16) : KCodeOffset(tile, t, i / 16)) - v_side,
              codes, sizeof(codes));
          side[(is_v ? VScaleByteOffset(tile, t, i / 16) : KScaleByteOffset(tile, t, i / 16)) -
               v_side] = std::byte{scale};
          Dequantize16(codes, scale, g, decoded);
        }
        for (uint32_t j = 0; j < kVectorDims; ++j) {
          const uint64_t at = uint64_t{t} * case_.head_dim + i + j;
          if (format == SideFormat::kBf16) {
            const uint16_t bits = FloatToBf16(x[j]);
            std::memcpy(side + 2 * at, &bits, sizeof(bits));
            decoded[j] = Bf16ToFloat(bits);
          } else if (format == SideFormat::kFp8) {
            side[at] = std::byte{ToFp8(x[j] / g)};
            decoded[j] = DecodeE4m3Scale(static_cast<uint8_t>(side[at])) * g;
          }
          values->push_back(Restored(decoded[j], head, i + j, is_v));
        }
      }
    }
  }

  float Transformed(float x, uint32_t head, uint32_t dim, bool is_v) const {
    if (is_v || k_mean.empty()) return x;
    const uint64_t channel = uint64_t{head} * case_.head_dim + dim;
    return Bf16ToFloat(FloatToBf16((x - k_mean[channel]) * (1.0F / k_smooth[channel])));
  }
  float Restored(float x, uint32_t head, uint32_t dim, bool is_v) const {
    if (is_v || k_mean.empty()) return x;
    const uint64_t channel = uint64_t{head} * case_.head_dim + dim;
    return x * k_smooth[channel] + k_mean[channel];
  }

  void FillBlock(std::byte* block, bool is_first, Values* values) {
    const TileShape tile = TileOf(shape_);
    // Heads are contiguous in a tile, tokens in `values`: collect per head, then interleave.
    std::vector<std::vector<float>> k(case_.kv_heads), v(case_.kv_heads);
    for (uint32_t h = 0; h < case_.kv_heads; ++h) {
      std::byte* side =
          block + LayerOffset(shape_, formats_, kLayer) + h * TileBytes(tile, case_.format);
      for (const bool is_v : {false, true}) {
        std::vector<std::vector<float>> rows(case_.block_tokens);
        for (auto& row : rows) row = RandomRow();
        if (is_first && case_.idle_lead != 0.0F) MakeIdle(is_v, &rows[0]);
        FillSide(is_v ? case_.format.v : case_.format.k, rows, is_v, h,
                 side + (is_v ? SideBytes(tile, case_.format.k) : 0), is_v ? &v[h] : &k[h]);
      }
    }
    for (uint32_t t = 0; t < case_.block_tokens; ++t) {
      for (uint32_t h = 0; h < case_.kv_heads; ++h) {
        const auto at = static_cast<std::ptrdiff_t>(uint64_t{t} * case_.head_dim);
        values->k.insert(values->k.end(), k[h].begin() + at, k[h].begin() + at + case_.head_dim);
        values->v.insert(values->v.end(), v[h].begin() + at, v[h].begin() + at + case_.head_dim);
      }
    }
  }

  void MakeIdle(bool is_v, std::vector<float>* row) const {
    std::fill(row->begin(), row->end(), 0.0F);
    if (!is_v) (*row)[kIdleDim] = kIdleKey;
  }

  void MakeTails() {
    const uint64_t head_stride = case_.head_dim + 16;
    tail_stride_ = case_.kv_heads * head_stride + 32;
    const uint32_t element_bytes = ElementBytes(case_.tail_type);
    const uint64_t capacity =
        *std::max_element(case_.tail_tokens.begin(), case_.tail_tokens.end()) + 1;
    const uint64_t tail_bytes = capacity * tail_stride_ * element_bytes;
    tail_k.assign(BatchSize() * tail_bytes, std::byte{0xFF});
    tail_v.assign(BatchSize() * tail_bytes, std::byte{0xFF});
    for (uint32_t s = 0; s < BatchSize(); ++s) {
      tail_k_addresses.push_back(&tail_k[s * tail_bytes]);
      tail_v_addresses.push_back(&tail_v[s * tail_bytes]);
      for (uint32_t i = 0; i < 2 * case_.tail_tokens[s] * case_.kv_heads; ++i) {
        const bool is_v = i % 2 != 0;
        const uint32_t head = i / 2 % case_.kv_heads;
        const uint32_t token = i / 2 / case_.kv_heads;
        std::byte* to =
            &(is_v ? tail_v : tail_k)[s * tail_bytes +
                                      (token * tail_stride_ + head * head_stride) * element_bytes];
        for (const float x : RandomRow()) {
          float stored = x;
          if (case_.tail_type == ElementType::kFp8E4m3) {
            *to = std::byte{ToFp8(x)};
            stored =
                DecodeE4m3Scale(static_cast<uint8_t>(*to)) * (is_v ? kTailScaleV : kTailScaleK);
          } else {
            const uint16_t bits = FloatToBf16(x);
            std::memcpy(to, &bits, sizeof(bits));
          }
          to += element_bytes;
          (is_v ? values_[s].v : values_[s].k).push_back(stored);
        }
      }
    }
  }

  void MakeQueries() {
    for (uint64_t i = 0; i < Rows() * case_.head_dim; ++i) {
      float x = case_.score_spread * Normal() * case_.query_unit;
      if (i % case_.head_dim == kIdleDim) x += case_.idle_lead / Scale() / kIdleKey;
      const uint16_t bits = FloatToBf16(x);
      const auto* from = case_.query_type == ElementType::kFp32
                             ? reinterpret_cast<const std::byte*>(&x)
                             : reinterpret_cast<const std::byte*>(&bits);
      query.insert(query.end(), from, from + ElementBytes(case_.query_type));
      query_values_.push_back(case_.query_type == ElementType::kFp32 ? x : Bf16ToFloat(bits));
    }
  }

  // FP64 attention of one row; returns the log-sum-exp.
  double Attend(uint64_t row, std::vector<double>* mean) const {
    const uint64_t head = row % QueryHeads();
    const uint64_t position = row / QueryHeads() % case_.query_len;
    const Values& values = values_[row / QueryHeads() / case_.query_len];
    const uint64_t stride = uint64_t{case_.kv_heads} * case_.head_dim;
    const uint64_t kv_offset = head / case_.group_heads * case_.head_dim;
    const uint64_t token_count = values.k.size() / stride;
    const uint64_t hidden = case_.query_len - 1 - position;
    const uint64_t end = token_count > hidden ? token_count - hidden : 0;
    const uint64_t begin = case_.window != 0 && case_.window < end ? end - case_.window : 0;
    std::vector<double> scores;
    double top = case_.has_sinks ? static_cast<double>(sinks[head]) : -HUGE_VAL;
    for (uint64_t t = begin; t < end; ++t) {
      double score = 0;
      for (uint32_t i = 0; i < case_.head_dim; ++i) {
        score += static_cast<double>(query_values_[row * case_.head_dim + i]) *
                 static_cast<double>(values.k[t * stride + kv_offset + i]);
      }
      score *= static_cast<double>(Scale());
      const auto cap = static_cast<double>(case_.soft_cap);
      if (cap > 0) score = cap * std::tanh(score / cap);
      scores.push_back(score);
      top = std::fmax(top, score);
    }
    std::fill(mean->begin(), mean->end(), 0.0);
    double sum = case_.has_sinks ? std::exp(static_cast<double>(sinks[head]) - top) : 0.0;
    for (uint64_t t = begin; t < end; ++t) {
      const double weight = std::exp(scores[t - begin] - top);
      sum += weight;
      for (uint32_t i = 0; i < case_.head_dim; ++i) {
        (*mean)[i] += weight * static_cast<double>(values.v[t * stride + kv_offset + i]);
      }
    }
    if (sum == 0) return -HUGE_VAL;
    for (double& x : *mean) x /= sum;
    return top + std::log(sum);
  }

  DecodeCase case_;
  BlockShape shape_;
  std::vector<LayerFormat> formats_;
  std::mt19937_64 random_;
  std::vector<Values> values_;
  std::vector<float> query_values_;
  uint32_t table_stride_ = 0;
  uint64_t tail_stride_ = 0;
};

}  // namespace kvtier::kernels::cuda

#endif  // KVTIER_KERNELS_CUDA_DECODE_FIXTURE_H_
