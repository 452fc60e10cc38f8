// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/decode.h"
#include "kernels/mla.h"
#include "kernels/mla_sequence.h"

namespace kvtier::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr ElementType kFp8 = ElementType::kFp8E4m3;

class DecodeMlaOn : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (!IsaIsAvailable(GetParam())) GTEST_SKIP() << "not on this machine";
  }

  static void Check(const MlaCase& mla_case) {
    MlaSequence sequence(mla_case, GetParam());
    const Status status = DecodeMla(sequence.Args());
    ASSERT_TRUE(status.ok()) << status.message();
    sequence.ExpectMatchesFp64();
  }
};

INSTANTIATE_TEST_SUITE_P(Isas, DecodeMlaOn, testing::ValuesIn(kAllIsas),
                         [](const auto& param_info) { return IsaName(param_info.param); });

TEST_P(DecodeMlaOn, MatchesFp64ForEveryTokenCountAndHeadCount) {
  for (const uint32_t block_tokens : {16U, 32U, 64U, 128U}) {
    for (const uint32_t heads : {16U, 128U}) {
      Check({.block_tokens = block_tokens, .heads = heads, .block_count = 2, .tail_tokens = 5});
    }
  }
  for (const uint32_t heads : {1U, 15U, 17U, 40U}) {
    Check({.heads = heads, .block_count = 3, .tail_tokens = 3});
  }
}

TEST_P(DecodeMlaOn, MatchesFp64AroundTheLengthsOfTilesAndChunks) {
  for (const uint32_t blocks : {0U, 1U, 3U, 4U, 5U, 8U}) {
    for (const uint32_t tail : {0U, 1U, 15U, 16U, 17U, 63U, 64U, 65U}) {
      if (blocks > 1 && tail > 17) continue;
      Check({.heads = 2, .block_count = blocks, .tail_tokens = tail});
    }
  }
  Check({.block_tokens = 128, .heads = 2, .tail_tokens = 300});
}

TEST_P(DecodeMlaOn, MatchesFp64AroundEverySplitBoundary) {
  for (const uint32_t blocks : {7U, 8U, 9U, 16U, 17U}) {
    Check({.block_tokens = 128, .heads = 2, .block_count = blocks, .tail_tokens = blocks % 2});
  }
}

TEST_P(DecodeMlaOn, MatchesFp64ForEveryQueryLenAndWindow) {
  for (uint32_t query_len = 1; query_len <= 8; ++query_len) {
    Check({.heads = 3, .block_count = 4, .tail_tokens = 2, .query_len = query_len});
  }
  for (const uint64_t window : {1U, 2U, 16U, 17U, 60U, 65U, 500U}) {
    Check({.heads = 3, .block_count = 5, .tail_tokens = 3, .query_len = 3, .window = window});
  }
}

TEST_P(DecodeMlaOn, MatchesFp64WithSoftCapAndSinks) {
  Check({.block_count = 2, .tail_tokens = 7, .soft_cap = 3.0F});
  Check({.block_count = 2, .tail_tokens = 7, .soft_cap = 1e9F});
  Check({.block_count = 2, .tail_tokens = 7, .sinks = true});
  Check({.block_count = 2, .tail_tokens = 7, .query_len = 2, .soft_cap = 9.0F, .sinks = true});
  Check({.sinks = true});
}

TEST_P(DecodeMlaOn, MatchesFp64WithFp8TailsAndFp32Queries) {
  for (const ElementType latent : {ElementType::kBf16, kFp8}) {
    for (const ElementType rope : {ElementType::kBf16, kFp8}) {
      for (const bool bf16 : {false, true}) {
        Check({.block_count = 1,
               .tail_tokens = 37,
               .latent_type = latent,
               .rope_type = rope,
               .bf16_queries = bf16});
      }
    }
  }
}

TEST_P(DecodeMlaOn, MatchesFp64FromUniformToOneHotSoftmax) {
  for (const float sharpness : {0.0F, 0.3F, 2.0F, 8.0F, 30.0F}) {
    Check({.block_tokens = 64, .block_count = 5, .tail_tokens = 21, .sharpness = sharpness});
  }
}

// Tasks in reverse order: as good as any number of threads.
void RunReversed(void* /*self*/, uint32_t task_count, Executor::Task task, void* context) {
  for (uint32_t i = task_count; i > 0; --i) task(context, i - 1);
}

TEST_P(DecodeMlaOn, GivesTheSameBitsWithAnyExecutor) {
  MlaSequence sequence(
      {.block_tokens = 128, .heads = 20, .block_count = 9, .tail_tokens = 9, .query_len = 2},
      GetParam());
  DecodeMlaArgs args = sequence.Args();
  ASSERT_TRUE(DecodeMla(args).ok());
  const std::vector<float> out = sequence.out();
  const std::vector<float> lse = sequence.lse();
  ASSERT_TRUE(DecodeMla(args).ok());
  EXPECT_EQ(sequence.out(), out);  // Again the same.
  const Executor executor{.run = RunReversed};
  std::vector<std::byte> workspace(DecodeMlaWorkspaceBytes(args), std::byte{0xFF});
  args.executor = &executor;
  args.workspace = workspace;
  ASSERT_TRUE(DecodeMla(args).ok());
  EXPECT_EQ(sequence.out(), out);
  EXPECT_EQ(sequence.lse(), lse);
  args.workspace = args.workspace.first(workspace.size() - 1);
  EXPECT_EQ(DecodeMla(args).code(), StatusCode::kInvalidArgument);
}

TEST_P(DecodeMlaOn, PartsMergeToTheWhole) {
  for (const uint64_t window : {0U, 40U}) {
    MlaSequence sequence(
        {.heads = 16, .block_count = 4, .tail_tokens = 7, .query_len = 2, .window = window},
        GetParam());
    std::vector<std::vector<float>> outs(5, std::vector<float>(sequence.out().size()));
    std::vector<std::vector<float>> lses(5, std::vector<float>(sequence.Rows()));
    std::vector<DecodePartial> partials;
    for (uint32_t i = 0; i < 5; ++i) {
      DecodeMlaArgs args = sequence.Args();
      args.block_table = i < 4 ? args.block_table.subspan(i, 1) : args.block_table.first(0);
      args.sealed_token_count = args.block_table.size() * 16;
      if (i < 4) args.tail = {};
      args.first_token = uint64_t{i} * 16;
      args.context_token_count = sequence.TokenCount();
      args.out = outs[i];
      args.lse = lses[i];
      ASSERT_TRUE(DecodeMla(args).ok());
      partials.push_back({outs[i], lses[i]});
    }
    ASSERT_TRUE(
        MergeDecode(partials, sequence.Rows(), kMlaLatentDim, sequence.out(), sequence.lse()).ok());
    sequence.ExpectMatchesFp64();
  }
}

TEST_P(DecodeMlaOn, EmptySequenceGivesZerosAndMinusInfinity) {
  MlaSequence sequence({}, GetParam());
  std::fill(sequence.out().begin(), sequence.out().end(), 7.0F);
  ASSERT_TRUE(DecodeMla(sequence.Args()).ok());
  for (const float x : sequence.out()) EXPECT_EQ(x, 0.0F);
  for (const float x : sequence.lse()) EXPECT_EQ(x, -kInfinity);
}

TEST_P(DecodeMlaOn, Bf16QueryEqualsFp32QueryOfTheSameValues) {
  MlaSequence sequence({.block_count = 2, .tail_tokens = 5}, GetParam());
  ASSERT_TRUE(DecodeMla(sequence.Args()).ok());
  const std::vector<float> expected = sequence.out();
  std::vector<uint16_t> bf16;
  for (const float x : sequence.query()) bf16.push_back(FloatToBf16(x));
  DecodeMlaArgs args = sequence.Args();
  args.query_type = ElementType::kBf16;
  args.query = bf16.data();
  ASSERT_TRUE(DecodeMla(args).ok());
  EXPECT_EQ(sequence.out(), expected);
}

TEST_P(DecodeMlaOn, ReportsScaleBytesThatAreNeverWritten) {
  for (const std::byte byte : {std::byte{0x7F}, std::byte{0x80}, std::byte{0xFF}}) {
    for (const uint64_t at : {0U, 300U, 511U}) {
      MlaSequence sequence({.block_count = 3, .tail_tokens = 5}, GetParam());
      const MlaBlockShape shape = sequence.Args().block_shape;
      const uint64_t offset =
          MlaTileOffset(shape, MlaSequence::kLayer) + MlaScaleOffset(shape.tile);
      sequence.blocks()[2][offset + at] = byte;
      EXPECT_EQ(DecodeMla(sequence.Args()).code(), StatusCode::kDataLoss);
    }
  }
}

TEST_P(DecodeMlaOn, NonfiniteTailTokenStaysWithTheQueriesThatSeeIt) {
  for (const ElementType type : {ElementType::kBf16, kFp8}) {
    for (const bool in_rope : {false, true}) {
      MlaSequence sequence({.heads = 5,
                            .block_count = 1,
                            .tail_tokens = 9,
                            .query_len = 3,
                            .latent_type = type,
                            .rope_type = type},
                           GetParam());
      ASSERT_TRUE(DecodeMla(sequence.Args()).ok());
      const std::vector<float> clean = sequence.out();
      auto& tail = in_rope ? sequence.rope_tail() : sequence.latent_tail();
      const DecodeMlaArgs args = sequence.Args();
      const uint64_t stride = in_rope ? args.tail.rope_stride : args.tail.latent_stride;
      const uint64_t row_bytes = stride * ElementBytes(type);
      // The last token: queries 0 and 1 of three do not see it.
      std::fill_n(tail.begin() + static_cast<int64_t>(8 * row_bytes), row_bytes, std::byte{0x7F});
      ASSERT_TRUE(DecodeMla(args).ok());
      const auto unseen = std::ptrdiff_t{2} * 5 * kMlaLatentDim;
      EXPECT_TRUE(std::equal(clean.begin(), clean.begin() + unseen, sequence.out().begin()))
          << sequence.Describe();
      if (type == kFp8 || !in_rope) {
        EXPECT_FALSE(
            std::equal(clean.begin() + unseen, clean.end(), sequence.out().begin() + unseen));
      }
    }
  }
}

TEST_P(DecodeMlaOn, RefusesBadArguments) {
  MlaSequence sequence({.block_count = 3, .tail_tokens = 5}, GetParam());
  const auto expect_invalid = [&](const char* what, const auto& change) {
    DecodeMlaArgs args = sequence.Args();
    change(&args);
    EXPECT_EQ(DecodeMla(args).code(), StatusCode::kInvalidArgument) << what;
    EXPECT_EQ(DecodeMlaWorkspaceBytes(args), 0U) << what;
  };
  ASSERT_TRUE(DecodeMla(sequence.Args()).ok());
  std::vector<float> bad_query = sequence.query();
  bad_query.back() = std::nanf("");
  const std::vector<const std::byte*> null_table(3, nullptr);
  const float bad_sinks[] = {1.0F, 2.0F};
  expect_invalid("shape", [](DecodeMlaArgs* a) { a->block_shape.tile.block_tokens = 17; });
  expect_invalid("dim", [](DecodeMlaArgs* a) { a->block_shape.tile.latent_dim = 256; });
  expect_invalid("layers", [](DecodeMlaArgs* a) { a->block_shape.layer_count = 0; });
  expect_invalid("layer", [](DecodeMlaArgs* a) { a->layer_idx = 3; });
  expect_invalid("heads", [](DecodeMlaArgs* a) { a->query_head_count = 0; });
  expect_invalid("query type", [](DecodeMlaArgs* a) { a->query_type = ElementType::kFp16; });
  expect_invalid("query", [](DecodeMlaArgs* a) { a->query = nullptr; });
  expect_invalid("query NaN", [&](DecodeMlaArgs* a) { a->query = bad_query.data(); });
  expect_invalid("table", [](DecodeMlaArgs* a) { a->block_table = a->block_table.first(2); });
  expect_invalid("null block", [&](DecodeMlaArgs* a) { a->block_table = null_table; });
  expect_invalid("part of a block", [](DecodeMlaArgs* a) { a->sealed_token_count = 47; });
  expect_invalid("huge", [](DecodeMlaArgs* a) { a->sealed_token_count = ~uint64_t{15}; });
  expect_invalid("tail", [](DecodeMlaArgs* a) { a->tail.latent = nullptr; });
  expect_invalid("tail", [](DecodeMlaArgs* a) { a->tail.rope = nullptr; });
  expect_invalid("tail stride", [](DecodeMlaArgs* a) { a->tail.latent_stride = 511; });
  expect_invalid("tail stride", [](DecodeMlaArgs* a) { a->tail.rope_stride = 63; });
  expect_invalid("tail type", [](DecodeMlaArgs* a) { a->tail.latent_type = ElementType::kFp32; });
  expect_invalid("tail type", [](DecodeMlaArgs* a) { a->tail.rope_type = ElementType::kFp16; });
  expect_invalid("tail scale", [](DecodeMlaArgs* a) { a->tail.latent_scale = 0.0F; });
  expect_invalid("tail scale", [](DecodeMlaArgs* a) { a->tail.rope_scale = kInfinity; });
  expect_invalid("softmax", [](DecodeMlaArgs* a) { a->softmax_scale = kInfinity; });
  expect_invalid("g", [](DecodeMlaArgs* a) { a->g = 0.7F; });
  expect_invalid("query_len", [](DecodeMlaArgs* a) { a->query_len = 0; });
  expect_invalid("query_len", [](DecodeMlaArgs* a) { a->query_len = 9; });
  expect_invalid("soft cap", [](DecodeMlaArgs* a) { a->soft_cap = -1.0F; });
  expect_invalid("sinks", [&](DecodeMlaArgs* a) { a->sinks = bad_sinks; });
  expect_invalid("context", [](DecodeMlaArgs* a) { a->context_token_count = 5; });
  expect_invalid("position", [](DecodeMlaArgs* a) { a->first_token = uint64_t{1} << 49; });
  expect_invalid("isa", [](DecodeMlaArgs* a) { a->isa = static_cast<Isa>(99); });
  expect_invalid("out", [](DecodeMlaArgs* a) { a->out = a->out.first(511); });
  expect_invalid("lse", [](DecodeMlaArgs* a) { a->lse = a->lse.first(3); });
}

}  // namespace
}  // namespace kvtier::kernels
