// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/nvfp4.h"
#include "kernels/seal.h"

namespace kvtier::kernels {
namespace {

constexpr uint32_t kSeed = 20261106;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Shape {
  uint32_t block_tokens;
  uint32_t head_dim;
  uint32_t kv_heads;
  uint32_t group_heads;  // Query heads per kv head.
  uint32_t block_count;
  uint32_t tail_tokens;
};

// A sequence in both forms: sealed blocks plus tail for the kernel, and the same values as plain
// FP32 arrays [token][kv head][dim], dequantized vector by vector without any tile, for the FP64
// reference.
class Sequence {
 public:
  static constexpr uint32_t kLayers = 2;
  static constexpr uint32_t kLayer = 1;

  explicit Sequence(const Shape& shape)
      : shape_(shape),
        block_shape_{.layer_count = kLayers,
                     .kv_head_count = shape.kv_heads,
                     .block_tokens = shape.block_tokens,
                     .head_dim = shape.head_dim},
        random_(kSeed) {
    for (uint32_t h = 0; h < shape.kv_heads; ++h) {
      g_k_.push_back(std::ldexp(1.0F, -6 - static_cast<int>(h % 3)));
      g_v_.push_back(std::ldexp(1.0F, -7 + static_cast<int>(h % 2)));
    }
    for (uint32_t i = 0; i < shape.block_count; ++i) AddBlock();
    for (const auto& block : blocks_) table_.push_back(block.data());
    AddTail();
    query_.resize(uint64_t{QueryHeads()} * shape.head_dim);
    for (float& x : query_) x = Bf16ToFloat(FloatToBf16(normal_(random_)));
    out_.resize(query_.size());
    lse_.resize(QueryHeads());
  }

  uint32_t QueryHeads() const { return shape_.kv_heads * shape_.group_heads; }

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
                     .head_stride = shape_.head_dim + 3},
            .softmax_scale = 1.0F / std::sqrt(static_cast<float>(shape_.head_dim)),
            .g_k = g_k_,
            .g_v = g_v_,
            .out = out_,
            .lse = lse_};
  }

  // Largest error of out relative to the largest magnitude of V, and of lse absolutely.
  void ExpectMatchesReference(std::span<const float> out, std::span<const float> lse) const {
    const uint64_t row = uint64_t{shape_.kv_heads} * shape_.head_dim;
    const uint64_t token_count = k_.size() / row;
    double v_max = 0;
    for (const float x : v_) v_max = std::fmax(v_max, std::fabs(static_cast<double>(x)));
    const double scale = static_cast<double>(1.0F / std::sqrt(static_cast<float>(shape_.head_dim)));
    double error = 0;
    double lse_error = 0;
    for (uint32_t head = 0; head < QueryHeads(); ++head) {
      const uint64_t kv_offset = uint64_t{head / shape_.group_heads} * shape_.head_dim;
      std::vector<double> scores(token_count);
      for (uint64_t t = 0; t < token_count; ++t) {
        for (uint32_t i = 0; i < shape_.head_dim; ++i) {
          scores[t] += scale * static_cast<double>(query_[head * shape_.head_dim + i]) *
                       static_cast<double>(k_[t * row + kv_offset + i]);
        }
      }
      const double top = *std::max_element(scores.begin(), scores.end());
      double sum = 0;
      std::vector<double> expected(shape_.head_dim);
      for (uint64_t t = 0; t < token_count; ++t) {
        const double weight = std::exp(scores[t] - top);
        sum += weight;
        for (uint32_t i = 0; i < shape_.head_dim; ++i) {
          expected[i] += weight * static_cast<double>(v_[t * row + kv_offset + i]);
        }
      }
      for (uint32_t i = 0; i < shape_.head_dim; ++i) {
        const auto actual = static_cast<double>(out[head * shape_.head_dim + i]);
        // Negated comparison: a NaN fails.
        if (!(std::fabs(actual - expected[i] / sum) <= error)) {
          error = std::fabs(actual - expected[i] / sum);
        }
      }
      const double lse_difference = std::fabs(static_cast<double>(lse[head]) - top - std::log(sum));
      if (!(lse_difference <= lse_error)) lse_error = lse_difference;
    }
    EXPECT_LE(error / v_max, 2e-6) << Describe();
    EXPECT_LE(lse_error, 1e-5) << Describe();
  }

  std::string Describe() const {
    return "T " + std::to_string(shape_.block_tokens) + " d " + std::to_string(shape_.head_dim) +
           " kv heads " + std::to_string(shape_.kv_heads) + " group " +
           std::to_string(shape_.group_heads) + " blocks " + std::to_string(shape_.block_count) +
           " tail " + std::to_string(shape_.tail_tokens) + " seed " + std::to_string(kSeed);
  }

  std::vector<std::vector<std::byte>>& blocks() { return blocks_; }
  std::vector<const std::byte*>& table() { return table_; }
  std::vector<float>& query() { return query_; }
  std::vector<float>& out() { return out_; }
  std::vector<float>& lse() { return lse_; }

 private:
  std::vector<float> RandomRows(uint32_t token_count) {
    std::vector<float> rows(uint64_t{token_count} * shape_.kv_heads * shape_.head_dim);
    for (size_t i = 0; i < rows.size(); ++i) {
      const float outlier = i % shape_.head_dim == 3 ? 8.0F : 1.0F;
      rows[i] = Bf16ToFloat(FloatToBf16(outlier * normal_(random_)));
    }
    return rows;
  }

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

  void AddBlock() {
    const std::vector<float> k = RandomRows(shape_.block_tokens);
    const std::vector<float> v = RandomRows(shape_.block_tokens);
    AppendDequantized(k, g_k_, &k_);
    AppendDequantized(v, g_v_, &v_);
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
          SealTile(tile, rows_of(k), rows_of(v), {.g_k = g_k_[h], .g_v = g_v_[h]},
                   std::span(block).subspan(TileOffset(block_shape_, kLayer, h), TileBytes(tile)),
                   &stats)
              .ok());
    }
    blocks_.push_back(std::move(block));
  }

  // The tail buffer has room for a whole block; all that is no tail token is NaN.
  void AddTail() {
    const uint64_t head_stride = shape_.head_dim + 3;
    tail_stride_ = shape_.kv_heads * head_stride + 5;
    const uint32_t capacity = std::max(shape_.tail_tokens, shape_.block_tokens);
    tail_k_.assign(capacity * tail_stride_, 0x7FC0);
    tail_v_.assign(capacity * tail_stride_, 0xFFC0);
    const std::vector<float> k = RandomRows(shape_.tail_tokens);
    const std::vector<float> v = RandomRows(shape_.tail_tokens);
    for (size_t i = 0; i < k.size(); ++i) {
      const uint64_t token = i / shape_.head_dim / shape_.kv_heads;
      const uint64_t head = i / shape_.head_dim % shape_.kv_heads;
      const uint64_t position = token * tail_stride_ + head * head_stride + i % shape_.head_dim;
      tail_k_[position] = FloatToBf16(k[i]);
      tail_v_[position] = FloatToBf16(v[i]);
    }
    k_.insert(k_.end(), k.begin(), k.end());
    v_.insert(v_.end(), v.begin(), v.end());
  }

  Shape shape_;
  BlockShape block_shape_;
  std::mt19937 random_;
  std::normal_distribution<float> normal_;
  std::vector<float> g_k_, g_v_;
  std::vector<float> k_, v_;  // [token][kv head][dim]
  std::vector<std::vector<std::byte>> blocks_;
  std::vector<const std::byte*> table_;
  std::vector<uint16_t> tail_k_, tail_v_;
  uint64_t tail_stride_ = 0;
  std::vector<float> query_, out_, lse_;
};

void CheckDecode(const Shape& shape) {
  Sequence sequence(shape);
  const Status status = Decode(sequence.Args());
  ASSERT_TRUE(status.ok()) << status.message();
  sequence.ExpectMatchesReference(sequence.out(), sequence.lse());
}

TEST(Decode, MatchesFp64ForEveryTokenCountAndHeadDim) {
  for (const uint32_t block_tokens : {16U, 32U, 64U, 128U}) {
    for (const uint32_t head_dim : {64U, 96U, 128U, 192U, 256U}) {
      CheckDecode({block_tokens, head_dim, 2, 2, 3, block_tokens / 2 + 1});
    }
  }
}

TEST(Decode, MatchesFp64ForEveryGroupSize) {
  for (uint32_t group = 1; group <= 17; ++group) CheckDecode({16, 64, 2, group, 2, 3});
  CheckDecode({16, 64, 1, 32, 2, 3});  // MQA, two passes.
  CheckDecode({16, 64, 12, 1, 2, 3});  // MHA.
}

TEST(Decode, MatchesFp64ForEveryTailLength) {
  for (uint32_t tail = 0; tail < 64; ++tail) CheckDecode({64, 64, 1, 4, 1, tail});
}

TEST(Decode, MatchesFp64ForTailOnlyAndForLongTails) {
  for (const uint32_t tail : {1U, 15U, 128U, 129U, 300U}) CheckDecode({16, 128, 2, 4, 0, tail});
}

TEST(Decode, MatchesFp64OverALongSequence) { CheckDecode({128, 128, 1, 8, 32, 77}); }

TEST(Decode, Bf16QueryEqualsFp32QueryOfTheSameValues) {
  Sequence sequence({32, 128, 2, 4, 2, 5});
  ASSERT_TRUE(Decode(sequence.Args()).ok());
  const std::vector<float> expected = sequence.out();
  std::vector<uint16_t> bf16;
  for (const float x : sequence.query()) bf16.push_back(FloatToBf16(x));
  DecodeArgs args = sequence.Args();
  args.query_type = ElementType::kBf16;
  args.query = bf16.data();
  ASSERT_TRUE(Decode(args).ok());
  EXPECT_EQ(sequence.out(), expected);
}

TEST(Decode, EmptySequenceGivesZerosAndMinusInfinity) {
  Sequence sequence({16, 64, 2, 2, 0, 0});
  std::fill(sequence.out().begin(), sequence.out().end(), 7.0F);
  ASSERT_TRUE(Decode(sequence.Args()).ok());
  for (const float x : sequence.out()) EXPECT_EQ(x, 0.0F);
  for (const float x : sequence.lse()) EXPECT_EQ(x, -kInfinity);
}

TEST(Decode, LargeScoresStayFinite) {
  Sequence sequence({16, 64, 1, 2, 3, 5});
  for (float& x : sequence.query()) x *= 1000.0F;
  ASSERT_TRUE(Decode(sequence.Args()).ok());
  for (const float x : sequence.out()) EXPECT_TRUE(std::isfinite(x));
  for (const float x : sequence.lse()) EXPECT_TRUE(std::isfinite(x));
}

TEST(Decode, ReadsOnlyTheCountedTableEntries) {
  Sequence sequence({16, 64, 1, 2, 3, 5});
  sequence.table().push_back(nullptr);  // Engines pad their tables.
  ASSERT_TRUE(Decode(sequence.Args()).ok());
  sequence.ExpectMatchesReference(sequence.out(), sequence.lse());
}

TEST(Decode, ReportsScaleBytesThatAreNeverWritten) {
  for (const std::byte byte : {std::byte{0x7F}, std::byte{0x80}, std::byte{0xFF}}) {
    for (const bool in_v : {false, true}) {
      Sequence sequence({16, 64, 2, 2, 3, 5});
      const BlockShape shape = sequence.Args().block_shape;
      const TileShape tile = TileOf(shape);
      const uint64_t section = in_v ? VScaleOffset(tile) : KScaleOffset(tile);
      sequence.blocks()[2][TileOffset(shape, Sequence::kLayer, 1) + section + 63] = byte;
      EXPECT_EQ(Decode(sequence.Args()).code(), StatusCode::kDataLoss);
    }
  }
}

TEST(Decode, RefusesBadArguments) {
  Sequence sequence({16, 64, 2, 2, 3, 5});
  const auto expect_invalid = [&](const char* what, const auto& change) {
    DecodeArgs args = sequence.Args();
    change(&args);
    EXPECT_EQ(Decode(args).code(), StatusCode::kInvalidArgument) << what;
  };
  ASSERT_TRUE(Decode(sequence.Args()).ok());
  const float bad_g[] = {1.0F, 0.7F};
  std::vector<float> bad_query = sequence.query();
  bad_query.back() = std::nanf("");
  std::vector<const std::byte*> null_table(3, nullptr);
  expect_invalid("shape", [](DecodeArgs* a) { a->block_shape.head_dim = 65; });
  expect_invalid("layer", [](DecodeArgs* a) { a->layer_idx = 2; });
  expect_invalid("no heads", [](DecodeArgs* a) { a->query_head_count = 0; });
  expect_invalid("heads", [](DecodeArgs* a) { a->query_head_count = 3; });
  expect_invalid("query type", [](DecodeArgs* a) { a->query_type = ElementType::kFp16; });
  expect_invalid("query", [](DecodeArgs* a) { a->query = nullptr; });
  expect_invalid("query NaN", [&](DecodeArgs* a) { a->query = bad_query.data(); });
  expect_invalid("table", [](DecodeArgs* a) { a->block_table = a->block_table.first(2); });
  expect_invalid("null block", [&](DecodeArgs* a) { a->block_table = null_table; });
  expect_invalid("part of a block", [](DecodeArgs* a) { a->sealed_token_count = 47; });
  expect_invalid("huge", [](DecodeArgs* a) { a->sealed_token_count = ~uint64_t{15}; });
  expect_invalid("tail", [](DecodeArgs* a) { a->tail.v = nullptr; });
  expect_invalid("tail stride", [](DecodeArgs* a) { a->tail.token_stride = 63; });
  expect_invalid("tail head", [](DecodeArgs* a) { a->tail.head_stride = 63; });
  expect_invalid("softmax", [](DecodeArgs* a) { a->softmax_scale = kInfinity; });
  expect_invalid("g_k count", [](DecodeArgs* a) { a->g_k = a->g_k.first(1); });
  expect_invalid("g_v value", [&](DecodeArgs* a) { a->g_v = bad_g; });
  expect_invalid("out", [](DecodeArgs* a) { a->out = a->out.first(255); });
  expect_invalid("lse", [](DecodeArgs* a) { a->lse = a->lse.first(3); });
}

TEST(MergeDecode, EveryTwoWaySplitEqualsTheWhole) {
  constexpr uint32_t kBlocks = 6;
  Sequence sequence({16, 64, 2, 3, kBlocks, 7});
  const uint32_t heads = sequence.QueryHeads();
  for (uint32_t cut = 0; cut <= kBlocks; ++cut) {
    std::vector<float> out[2];
    std::vector<float> lse[2];
    for (const uint32_t part : {0U, 1U}) {
      out[part].resize(sequence.out().size());
      lse[part].resize(heads);
      DecodeArgs args = sequence.Args();
      args.out = out[part];
      args.lse = lse[part];
      args.block_table = part == 0 ? args.block_table.first(cut) : args.block_table.subspan(cut);
      args.sealed_token_count = args.block_table.size() * 16;
      if (part == 0) args.tail = {};
      ASSERT_TRUE(Decode(args).ok());
    }
    if (cut == 0) std::fill(out[0].begin(), out[0].end(), std::nanf(""));  // Must not be read.
    const DecodePartial partials[] = {{out[0], lse[0]}, {out[1], lse[1]}};
    std::vector<float> merged(sequence.out().size());
    std::vector<float> merged_lse(heads);
    ASSERT_TRUE(MergeDecode(partials, heads, 64, merged, merged_lse).ok());
    sequence.ExpectMatchesReference(merged, merged_lse);
    std::vector<float> again(merged.size());
    std::vector<float> again_lse(heads);
    ASSERT_TRUE(MergeDecode(partials, heads, 64, again, again_lse).ok());
    EXPECT_EQ(merged, again);
    EXPECT_EQ(merged_lse, again_lse);
  }
}

TEST(MergeDecode, OneSplitPerBlockEqualsTheWhole) {
  Sequence sequence({16, 128, 1, 4, 9, 11});
  const uint32_t heads = sequence.QueryHeads();
  std::vector<std::vector<float>> outs(10, std::vector<float>(sequence.out().size()));
  std::vector<std::vector<float>> lses(10, std::vector<float>(heads));
  std::vector<DecodePartial> partials;
  for (uint32_t i = 0; i < 10; ++i) {
    DecodeArgs args = sequence.Args();
    args.block_table = i < 9 ? args.block_table.subspan(i, 1) : args.block_table.first(0);
    args.sealed_token_count = args.block_table.size() * 16;
    if (i < 9) args.tail = {};
    args.out = outs[i];
    args.lse = lses[i];
    ASSERT_TRUE(Decode(args).ok());
    partials.push_back({outs[i], lses[i]});
  }
  ASSERT_TRUE(MergeDecode(partials, heads, 128, sequence.out(), sequence.lse()).ok());
  sequence.ExpectMatchesReference(sequence.out(), sequence.lse());
}

TEST(MergeDecode, NothingOrOnlyEmptyPartialsGiveZeros) {
  std::vector<float> out(64, 1.0F);
  std::vector<float> lse(1, 1.0F);
  ASSERT_TRUE(MergeDecode({}, 1, 64, out, lse).ok());
  EXPECT_EQ(out, std::vector<float>(64, 0.0F));
  EXPECT_EQ(lse[0], -kInfinity);
  const std::vector<float> nan_out(64, std::nanf(""));
  const std::vector<float> empty_lse(1, -kInfinity);
  const DecodePartial partials[] = {{nan_out, empty_lse}, {nan_out, empty_lse}};
  ASSERT_TRUE(MergeDecode(partials, 1, 64, out, lse).ok());
  EXPECT_EQ(out, std::vector<float>(64, 0.0F));
  EXPECT_EQ(lse[0], -kInfinity);
}

TEST(MergeDecode, RefusesWrongSizes) {
  std::vector<float> out(64);
  std::vector<float> lse(1);
  const std::vector<float> part_out(63);
  const DecodePartial partials[] = {{part_out, lse}};
  EXPECT_FALSE(MergeDecode(partials, 1, 64, out, lse).ok());
  EXPECT_FALSE(MergeDecode({}, 0, 64, out, lse).ok());
  EXPECT_FALSE(MergeDecode({}, 1, 0, out, lse).ok());
  EXPECT_FALSE(MergeDecode({}, 2, 64, out, lse).ok());
}

}  // namespace
}  // namespace kvtier::kernels
