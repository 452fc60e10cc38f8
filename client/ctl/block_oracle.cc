// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/block_oracle.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/decode.h"
#include "kernels/nvfp4.h"
#include "proto/base/check.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

// A key of no block, for the values of a tail.
Key TailKey(uint64_t seed) {
  Key key;
  for (size_t word = 0; word < 4; ++word) {
    const uint64_t value = SplitMix64(seed, word);
    std::memcpy(&key.bytes[word * sizeof(value)], &value, sizeof(value));
  }
  return key;
}

// Keys and values of one kv head as they are after quantization, token by token.
struct HeadValues {
  std::vector<double> k;  // [token][dim]
  std::vector<double> v;
};

// The number format applied to `row` without going through a tile: an independent path to the
// values that the kernel reads.
void AppendQuantized(std::span<const uint16_t> row, float g, std::vector<double>* out) {
  for (size_t first = 0; first < row.size(); first += kernels::kVectorDims) {
    float x[kernels::kVectorDims];
    for (size_t i = 0; i < kernels::kVectorDims; ++i) {
      x[i] = kernels::Bf16ToFloat(row[first + i]);
    }
    uint8_t codes[kernels::kVectorCodeBytes];
    uint8_t scale = 0;
    kernels::Quantize16(x, g, codes, &scale);
    for (size_t i = 0; i < kernels::kVectorDims; ++i) {
      const auto code = static_cast<uint8_t>(codes[i / 2] >> (i % 2 * 4));
      out->push_back(double{kernels::DecodeE2m1(code)} * double{kernels::DecodeE4m3Scale(scale)} *
                     double{g});
    }
  }
}

// Softmax attention in FP64 of one query row over all tokens.
void AttendExactly(std::span<const float> query, const HeadValues& values, double softmax_scale,
                   std::span<double> out) {
  const size_t dims = query.size();
  const size_t token_count = values.k.size() / dims;
  std::vector<double> logits(token_count);
  double top = -std::numeric_limits<double>::infinity();
  for (size_t token = 0; token < token_count; ++token) {
    double dot = 0;
    for (size_t i = 0; i < dims; ++i) dot += query[i] * values.k[token * dims + i];
    logits[token] = dot * softmax_scale;
    top = std::max(top, logits[token]);
  }
  double total = 0;
  std::fill(out.begin(), out.end(), 0.0);
  for (size_t token = 0; token < token_count; ++token) {
    const double weight = std::exp(logits[token] - top);
    total += weight;
    for (size_t i = 0; i < dims; ++i) out[i] += weight * values.v[token * dims + i];
  }
  for (double& value : out) value /= total;
}

// The inputs of one step beside the sealed blocks.
struct StepInput {
  std::vector<float> query;      // [query head][dim]
  std::vector<uint16_t> tail_k;  // [kv head][token][dim]
  std::vector<uint16_t> tail_v;
  uint32_t tail_token_count = 0;
};

StepInput MakeInput(const KvGenerator& generator, const DecodeSample& sample) {
  const kernels::BlockShape& shape = generator.shape();
  const size_t tile_values = size_t{shape.block_tokens} * shape.head_dim;
  StepInput input;
  const uint32_t query_head_count = shape.kv_head_count * kQueryHeadsPerKvHead;
  for (size_t i = 0; i < size_t{query_head_count} * shape.head_dim; ++i) {
    // Uniform steps of 1/128 in [-1, 1): exact in BF16, as an engine's queries are.
    const auto step = static_cast<int32_t>(SplitMix64(~sample.seed, i) >> 56);
    input.query.push_back(static_cast<float>(step - 128) / 128.0F);
  }
  input.tail_k.resize(shape.kv_head_count * tile_values);
  input.tail_v.resize(input.tail_k.size());
  for (uint32_t head_idx = 0; head_idx < shape.kv_head_count; ++head_idx) {
    generator.GenerateTile(TailKey(sample.seed), sample.layer_idx, head_idx,
                           std::span(input.tail_k).subspan(head_idx * tile_values, tile_values),
                           std::span(input.tail_v).subspan(head_idx * tile_values, tile_values));
  }
  input.tail_token_count = static_cast<uint32_t>(sample.seed % shape.block_tokens);
  // A step needs at least one token to attend to.
  if (sample.keys.empty()) input.tail_token_count = shape.block_tokens - 1;
  return input;
}

HeadValues ExactValues(const KvGenerator& generator, const DecodeSample& sample,
                       const StepInput& input, uint32_t head_idx) {
  const kernels::BlockShape& shape = generator.shape();
  const size_t tile_values = size_t{shape.block_tokens} * shape.head_dim;
  HeadValues values;
  std::vector<uint16_t> k(tile_values);
  std::vector<uint16_t> v(tile_values);
  for (const Key& key : sample.keys) {
    generator.GenerateTile(key, sample.layer_idx, head_idx, k, v);
    AppendQuantized(k, KvGenerator::kGlobalScaleK, &values.k);
    AppendQuantized(v, KvGenerator::kGlobalScaleV, &values.v);
  }
  const size_t first = head_idx * tile_values;
  for (size_t i = 0; i < size_t{input.tail_token_count} * shape.head_dim; ++i) {
    values.k.push_back(kernels::Bf16ToFloat(input.tail_k[first + i]));
    values.v.push_back(kernels::Bf16ToFloat(input.tail_v[first + i]));
  }
  return values;
}

absl::StatusOr<std::vector<float>> RunKernel(const KvGenerator& generator,
                                             const DecodeSample& sample, const StepInput& input,
                                             float softmax_scale) {
  const kernels::BlockShape& shape = generator.shape();
  const std::vector<float> g_k(shape.kv_head_count, KvGenerator::kGlobalScaleK);
  const std::vector<float> g_v(shape.kv_head_count, KvGenerator::kGlobalScaleV);
  const uint32_t query_head_count = shape.kv_head_count * kQueryHeadsPerKvHead;
  std::vector<float> out(size_t{query_head_count} * shape.head_dim);
  std::vector<float> lse(query_head_count);
  kernels::DecodeArgs args;
  args.block_shape = shape;
  args.layer_idx = sample.layer_idx;
  args.query_type = kernels::ElementType::kFp32;
  args.query = input.query.data();
  args.query_head_count = query_head_count;
  args.block_table = sample.table;
  args.sealed_token_count = uint64_t{shape.block_tokens} * sample.table.size();
  args.tail = {.k = input.tail_k.data(),
               .v = input.tail_v.data(),
               .token_count = input.tail_token_count,
               .token_stride = shape.head_dim,
               .head_stride = uint64_t{shape.block_tokens} * shape.head_dim};
  args.softmax_scale = softmax_scale;
  args.g_k = g_k;
  args.g_v = g_v;
  args.out = out;
  args.lse = lse;
  const kernels::Status status = kernels::Decode(args);
  if (status.code() == kernels::StatusCode::kDataLoss) return DataLoss("%s", status.message());
  if (!status.ok()) return Internal("decode refused its arguments: %s", status.message());
  return out;
}

}  // namespace

BlockOracle::BlockOracle(const KvGenerator* generator, size_t block_count, uint64_t cache_bytes_max)
    : generator_(generator),
      cached_count_max_(std::max<size_t>(1, cache_bytes_max / generator->block_bytes())),
      expected_(block_count) {}

const std::byte* BlockOracle::Expected(uint32_t block, const Key& key) {
  std::unique_ptr<std::byte[]>& expected = expected_[block];
  if (expected == nullptr) {
    if (cached_.size() == cached_count_max_) {
      expected = std::move(expected_[cached_.front()]);
      cached_.pop_front();
    } else {
      expected = std::make_unique<std::byte[]>(generator_->block_bytes());
    }
    generator_->SealBlock(key, {expected.get(), generator_->block_bytes()});
    cached_.push_back(block);
  }
  return expected.get();
}

std::optional<uint64_t> BlockOracle::FirstWrongByte(uint32_t block, const Key& key,
                                                    std::span<const std::byte> actual) {
  KVT_CHECK(actual.size() == generator_->block_bytes());
  const std::byte* expected = Expected(block, key);
  if (std::memcmp(expected, actual.data(), actual.size()) == 0) return std::nullopt;
  const auto place = std::mismatch(actual.begin(), actual.end(), expected).first;
  return static_cast<uint64_t>(place - actual.begin());
}

absl::StatusOr<double> DecodeError(const KvGenerator& generator, const DecodeSample& sample) {
  KVT_CHECK(sample.keys.size() == sample.table.size());
  const kernels::BlockShape& shape = generator.shape();
  const StepInput input = MakeInput(generator, sample);
  const float softmax_scale = 1.0F / std::sqrt(static_cast<float>(shape.head_dim));
  KVT_ASSIGN_OR_RETURN(const std::vector<float> out,
                       RunKernel(generator, sample, input, softmax_scale));
  double error = 0;
  double magnitude = 0;
  std::vector<double> exact(shape.head_dim);
  for (uint32_t head_idx = 0; head_idx < shape.kv_head_count; ++head_idx) {
    const HeadValues values = ExactValues(generator, sample, input, head_idx);
    for (uint32_t n = 0; n < kQueryHeadsPerKvHead; ++n) {
      const size_t row = size_t{head_idx * kQueryHeadsPerKvHead + n} * shape.head_dim;
      AttendExactly(std::span(input.query).subspan(row, shape.head_dim), values,
                    double{softmax_scale}, exact);
      for (uint32_t i = 0; i < shape.head_dim; ++i) {
        error = std::max(error, std::abs(double{out[row + i]} - exact[i]));
        magnitude = std::max(magnitude, std::abs(exact[i]));
      }
    }
  }
  // A NaN of the kernel must not pass as a small error.
  for (const float value : out) {
    if (!std::isfinite(value)) return DataLoss("decode gave a value that is not finite");
  }
  return magnitude > 0 ? error / magnitude : error;
}

}  // namespace kvtier::ctl
