// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/decode_sequence.h"
#include "kernels/sanitized.h"

namespace kvtier::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class DecodeOn : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (!IsaIsAvailable(GetParam())) GTEST_SKIP() << "not on this machine";
  }
};

INSTANTIATE_TEST_SUITE_P(Isas, DecodeOn, testing::ValuesIn(kAllIsas),
                         [](const auto& param_info) { return IsaName(param_info.param); });

void CheckDecode(const Shape& shape, Isa isa, const Options& options = {}) {
  Sequence sequence(shape, isa, options);
  const Status status = Decode(sequence.Args());
  ASSERT_TRUE(status.ok()) << status.message();
  sequence.ExpectMatchesReference(sequence.out(), sequence.lse());
}

TEST_P(DecodeOn, MatchesFp64ForEveryTokenCountAndHeadDim) {
  for (const uint32_t block_tokens : {16U, 32U, 64U, 128U}) {
    for (const uint32_t head_dim : {64U, 96U, 128U, 192U, 256U}) {
      CheckDecode({block_tokens, head_dim, 2, 2, 3, block_tokens / 2 + 1}, GetParam());
    }
  }
}

TEST_P(DecodeOn, MatchesFp64ForEveryGroupSize) {
  for (uint32_t group = 1; group <= 17; ++group) CheckDecode({16, 64, 2, group, 2, 3}, GetParam());
  CheckDecode({16, 64, 1, 32, 2, 3}, GetParam());  // MQA, two passes.
  CheckDecode({16, 64, 12, 1, 2, 3}, GetParam());  // MHA.
}

TEST_P(DecodeOn, MatchesFp64ForEveryTailLength) {
  for (uint32_t tail = 0; tail < 64; ++tail) CheckDecode({64, 64, 1, 4, 1, tail}, GetParam());
}

TEST_P(DecodeOn, MatchesFp64ForTailOnlyAndForLongTails) {
  for (const uint32_t tail : {1U, 15U, 128U, 129U, 300U})
    CheckDecode({16, 128, 2, 4, 0, tail}, GetParam());
}

TEST_P(DecodeOn, MatchesFp64OverALongSequence) {
  CheckDecode({128, 128, 1, 8, 32, 77}, GetParam());
}

TEST_P(DecodeOn, MatchesFp64ForEveryQueryLen) {
  for (uint32_t query_len = 1; query_len <= 8; ++query_len) {
    CheckDecode({16, 64, 2, 3, 5, 2}, GetParam(), {.query_len = query_len});
    CheckDecode({16, 128, 1, 8, 2, 9}, GetParam(), {.query_len = query_len});
  }
}

TEST_P(DecodeOn, MatchesFp64ForEveryWindow) {
  for (const uint64_t window : {1U, 2U, 15U, 16U, 17U, 40U, 63U, 64U, 65U, 66U, 112U, 500U}) {
    CheckDecode({16, 64, 2, 2, 7, 3}, GetParam(), {.window = window});
    CheckDecode({64, 64, 1, 2, 2, 1}, GetParam(), {.query_len = 4, .window = window});
  }
}

TEST_P(DecodeOn, MatchesFp64WithSoftCapAndSinks) {
  // The largest ones are caps that nobody reaches: scores stay what they are.
  for (const float soft_cap : {0.0F, 0.5F, 5.0F, 50.0F, 1e3F, 1e9F, 3e38F}) {
    for (const bool sinks : {false, true}) {
      CheckDecode({32, 128, 2, 4, 3, 7}, GetParam(), {.soft_cap = soft_cap, .sinks = sinks});
    }
  }
  CheckDecode({32, 128, 2, 4, 0, 0}, GetParam(), {.sinks = true});
}

TEST_P(DecodeOn, MatchesFp64WithTransformedK) {
  for (const uint32_t head_dim : {64U, 80U, 128U, 192U}) {
    CheckDecode({16, head_dim, 2, 3, 4, 0}, GetParam(), {.transform = true});
    CheckDecode({16, head_dim, 2, 3, 4, 11}, GetParam(), {.transform = true});
    CheckDecode({16, head_dim, 1, 16, 4, 11}, GetParam(), {.soft_cap = 9.0F, .transform = true});
  }
}

TEST_P(DecodeOn, MatchesFp64WithFp8Tail) {
  for (const uint32_t head_dim : {64U, 80U, 96U, 128U, 192U, 256U}) {
    CheckDecode({16, head_dim, 2, 2, 1, 21}, GetParam(), {.tail_type = ElementType::kFp8E4m3});
  }
}

TEST_P(DecodeOn, MatchesFp64AroundEverySplitBoundary) {
  for (const uint32_t block_count : {127U, 128U, 129U, 255U, 256U, 257U}) {
    CheckDecode({16, 64, 1, 2, block_count, block_count % 2}, GetParam());
  }
}

// Tasks in reverse order: as good as any number of threads.
void RunReversed(void* /*self*/, uint32_t task_count, Executor::Task task, void* context) {
  for (uint32_t i = task_count; i > 0; --i) task(context, i - 1);
}

TEST_P(DecodeOn, GivesTheSameBitsWithAnyExecutor) {
  Sequence sequence({16, 64, 2, 5, 300, 9}, GetParam(), {.query_len = 4, .sinks = true});
  DecodeArgs args = sequence.Args();
  ASSERT_TRUE(Decode(args).ok());
  const std::vector<float> out = sequence.out();
  const std::vector<float> lse = sequence.lse();
  const Executor executor{.run = RunReversed};
  std::vector<std::byte> workspace(DecodeWorkspaceBytes(args), std::byte{0xFF});
  args.executor = &executor;
  args.workspace = workspace;
  ASSERT_TRUE(Decode(args).ok());
  EXPECT_EQ(sequence.out(), out);
  EXPECT_EQ(sequence.lse(), lse);
  args.workspace = args.workspace.first(workspace.size() - 1);
  EXPECT_EQ(Decode(args).code(), StatusCode::kInvalidArgument);
}

TEST_P(DecodeOn, PartsWithPositionsEqualTheWhole) {
  for (const uint64_t window : {0U, 40U, 90U}) {
    Sequence sequence({16, 64, 2, 2, 6, 7}, GetParam(), {.query_len = 3, .window = window});
    const uint32_t rows = sequence.Rows();
    std::vector<std::vector<float>> outs(7, std::vector<float>(sequence.out().size()));
    std::vector<std::vector<float>> lses(7, std::vector<float>(rows));
    std::vector<DecodePartial> partials;
    for (uint32_t i = 0; i < 7; ++i) {
      DecodeArgs args = sequence.Args();
      args.block_table = i < 6 ? args.block_table.subspan(i, 1) : args.block_table.first(0);
      args.sealed_token_count = args.block_table.size() * 16;
      if (i < 6) args.tail = {};
      args.first_token = uint64_t{i} * 16;
      args.context_token_count = sequence.TokenCount();
      args.out = outs[i];
      args.lse = lses[i];
      ASSERT_TRUE(Decode(args).ok());
      partials.push_back({outs[i], lses[i]});
    }
    ASSERT_TRUE(MergeDecode(partials, rows, 64, sequence.out(), sequence.lse()).ok());
    sequence.ExpectMatchesReference(sequence.out(), sequence.lse());
  }
}

TEST_P(DecodeOn, NanInTheTailReachesTheResult) {
  for (const bool in_v : {false, true}) {
    Sequence sequence({16, 64, 1, 2, 1, 3}, GetParam());
    DecodeArgs args = sequence.Args();
    std::vector<uint16_t> nan(3 * args.tail.token_stride, 0x7FC0);
    (in_v ? args.tail.v : args.tail.k) = nan.data();
    ASSERT_TRUE(Decode(args).ok());
    for (const float x : sequence.out()) EXPECT_TRUE(std::isnan(x));
  }
}

// Decodes with one tail token of `bits` in all dims of K or V, and expects the bits of a clean run
// in the query rows before `first_seeing` and from `end_seeing` on.
void CheckPoisonStaysInPlace(Isa isa, const Options& options, uint32_t token, bool in_v,
                             uint16_t bits, uint32_t first_seeing, uint32_t end_seeing) {
  Sequence sequence({16, 80, 2, 3, 1, 70}, isa, options);
  DecodeArgs args = sequence.Args();
  ASSERT_TRUE(Decode(args).ok());
  const std::vector<float> clean = sequence.out();
  const void*& side = in_v ? args.tail.v : args.tail.k;
  const uint64_t row_bytes = args.tail.token_stride * ElementBytes(args.tail.type);
  const auto* bytes = static_cast<const std::byte*>(side);
  std::vector<std::byte> poisoned(bytes, bytes + args.tail.token_count * row_bytes);
  for (uint64_t i = 0; i + 2 <= row_bytes; i += 2) {
    std::memcpy(&poisoned[token * row_bytes + i], &bits, sizeof(bits));
  }
  side = poisoned.data();
  ASSERT_TRUE(Decode(args).ok());
  const uint64_t query_floats = uint64_t{sequence.QueryHeads()} * 80;
  for (uint32_t query = 0; query < options.query_len; ++query) {
    const auto* expected = &clean[query * query_floats];
    const auto* actual = &sequence.out()[query * query_floats];
    const bool sees = query >= first_seeing && query < end_seeing;
    EXPECT_EQ(std::equal(expected, expected + query_floats, actual), !sees)
        << "query " << query << " token " << token << " in V " << in_v << " bits " << bits << " "
        << sequence.Describe();
    if (!sees) continue;
    EXPECT_FALSE(in_v && std::isfinite(actual[0])) << sequence.Describe();
  }
}

TEST_P(DecodeOn, NonfiniteTailTokenStaysWithTheQueriesThatSeeIt) {
  for (const ElementType type : {ElementType::kBf16, ElementType::kFp8E4m3}) {
    for (const bool in_v : {false, true}) {
      // NaN; in BF16 also infinity. Two FP8 NaN are the bytes 0x7F7F.
      for (const uint32_t bits : {0x7FC0U, 0x7F80U, 0xFF80U, 0x7F7FU}) {
        if ((bits == 0x7F7FU) != (type == ElementType::kFp8E4m3)) continue;
        const auto check = [&](Options options, uint32_t token, uint32_t first, uint32_t end) {
          options.tail_type = type;
          CheckPoisonStaysInPlace(GetParam(), options, token, in_v, static_cast<uint16_t>(bits),
                                  first, end);
        };
        check({.query_len = 4}, 69, 3, 4);  // The last token.
        check({.query_len = 4}, 67, 1, 4);
        check({.query_len = 8}, 64, 2, 8);               // First of a chunk.
        check({.query_len = 4, .window = 5}, 64, 0, 3);  // Leaves the window.
        check({.query_len = 2, .window = 4}, 20, 2, 2);  // Nobody sees it.
      }
    }
  }
}

TEST_P(DecodeOn, DoesNotDependOnTheRestOfABatch) {
  // The same sequence as the only one, and with other heads beside it.
  Sequence sequence({16, 64, 3, 4, 5, 3}, GetParam());
  ASSERT_TRUE(Decode(sequence.Args()).ok());
  const std::vector<float> out = sequence.out();
  DecodeArgs args = sequence.Args();
  std::fill(sequence.query().begin(), sequence.query().begin() + 64, 9.0F);  // Head 0.
  ASSERT_TRUE(Decode(args).ok());
  EXPECT_TRUE(std::equal(out.begin() + 64, out.end(), sequence.out().begin() + 64));
}

TEST_P(DecodeOn, Bf16QueryEqualsFp32QueryOfTheSameValues) {
  Sequence sequence({32, 128, 2, 4, 2, 5}, GetParam());
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

TEST_P(DecodeOn, PeakedSoftmaxStaysFarWithinTheBound) {
  // From uniform weights to a single token, tokens of equal weight in between.
  for (const float sharpness : {0.0F, 0.3F, 1.0F, 2.0F, 4.0F, 8.0F, 30.0F}) {
    for (const uint32_t group : {1U, 2U, 4U, 8U, 16U}) {
      Sequence sequence({64, 128, 1, group, kIsSanitized ? 4U : 40U, 21}, GetParam());
      for (float& x : sequence.query()) x *= sharpness;
      ASSERT_TRUE(Decode(sequence.Args()).ok());
      EXPECT_LE(sequence.RelativeError(), 0x1p-10) << sharpness << " " << sequence.Describe();
    }
  }
}

// Where the token that takes nearly all attention has no values, as the first token of many models,
// the small weights beside it are the result.
TEST_P(DecodeOn, SmallWeightsBesideAnIdleTokenStayWithinTheBound) {
  if (GetParam() == Isa::kAvx512) GTEST_SKIP() << "weights in 15 bits lose them: see decode.h";
  for (const float lead : {4.0F, 12.0F, 20.0F}) {
    for (const uint32_t group : {1U, 8U}) {
      for (const uint32_t block_count : {1U, 5U}) {
        Sequence sequence({64, 128, 1, group, block_count, 0}, GetParam(), {.idle_lead = lead});
        ASSERT_TRUE(Decode(sequence.Args()).ok());
        EXPECT_LE(sequence.RelativeError(), 0x1p-9) << lead << " " << sequence.Describe();
      }
    }
  }
}

TEST_P(DecodeOn, EmptySequenceGivesZerosAndMinusInfinity) {
  Sequence sequence({16, 64, 2, 2, 0, 0}, GetParam());
  std::fill(sequence.out().begin(), sequence.out().end(), 7.0F);
  ASSERT_TRUE(Decode(sequence.Args()).ok());
  for (const float x : sequence.out()) EXPECT_EQ(x, 0.0F);
  for (const float x : sequence.lse()) EXPECT_EQ(x, -kInfinity);
}

TEST_P(DecodeOn, LargeScoresStayFinite) {
  Sequence sequence({16, 64, 1, 2, 3, 5}, GetParam());
  for (float& x : sequence.query()) x *= 1000.0F;
  ASSERT_TRUE(Decode(sequence.Args()).ok());
  for (const float x : sequence.out()) EXPECT_TRUE(std::isfinite(x));
  for (const float x : sequence.lse()) EXPECT_TRUE(std::isfinite(x));
}

TEST_P(DecodeOn, ReadsOnlyTheCountedTableEntries) {
  Sequence sequence({16, 64, 1, 2, 3, 5}, GetParam());
  sequence.table().push_back(nullptr);  // Engines pad their tables.
  ASSERT_TRUE(Decode(sequence.Args()).ok());
  sequence.ExpectMatchesReference(sequence.out(), sequence.lse());
}

TEST_P(DecodeOn, ReportsScaleBytesThatAreNeverWritten) {
  for (const std::byte byte : {std::byte{0x7F}, std::byte{0x80}, std::byte{0xFF}}) {
    for (const bool in_v : {false, true}) {
      Sequence sequence({16, 64, 2, 2, 3, 5}, GetParam());
      const BlockShape shape = sequence.Args().block_shape;
      const TileShape tile = TileOf(shape);
      const uint64_t section = in_v ? VScaleOffset(tile) : KScaleOffset(tile);
      sequence.blocks()[2][TileOffset(shape, Sequence::kLayer, 1) + section + 63] = byte;
      EXPECT_EQ(Decode(sequence.Args()).code(), StatusCode::kDataLoss);
    }
  }
}

TEST_P(DecodeOn, RefusesBadArguments) {
  Sequence sequence({16, 64, 2, 2, 3, 5}, GetParam());
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
  expect_invalid("query_len", [](DecodeArgs* a) { a->query_len = 0; });
  expect_invalid("query_len", [](DecodeArgs* a) { a->query_len = 9; });
  expect_invalid("soft cap", [](DecodeArgs* a) { a->soft_cap = -1.0F; });
  expect_invalid("sinks", [&](DecodeArgs* a) { a->sinks = bad_g; });
  expect_invalid("mean", [&](DecodeArgs* a) { a->k_mean = bad_g; });
  expect_invalid("smooth", [&](DecodeArgs* a) { a->k_smooth = bad_query; });
  expect_invalid("tail type", [](DecodeArgs* a) { a->tail.type = ElementType::kFp16; });
  expect_invalid("tail scale", [](DecodeArgs* a) { a->tail.v_scale = 0.0F; });
  expect_invalid("context", [](DecodeArgs* a) { a->context_token_count = 5; });
  expect_invalid("isa", [](DecodeArgs* a) { a->isa = static_cast<Isa>(99); });
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
