// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/decode_fixture.h"
#include "kernels/cuda/decode_kernel.h"
#include "kernels/cuda/decode_plan.h"
#include "kernels/cuda/emu/launch.h"
#include "kernels/sanitized.h"

namespace kvtier::kernels::cuda {
namespace {

constexpr uint64_t kSeed = 20261129;
constexpr DeviceLimits kHopper{
    .multiprocessor_count = 4, .shared_bytes_per_block = 232448, .copies_bulk = true};
constexpr DeviceLimits kAmpere{.multiprocessor_count = 4, .shared_bytes_per_block = 166912};
constexpr DeviceLimits kAda{.multiprocessor_count = 3, .shared_bytes_per_block = 101376};

emu::Memory MemoryOf(DecodeData& data) {
  emu::Memory memory;
  const auto input = [&](const auto& buffer) {
    if (!buffer.empty()) memory.AddInput(std::span(buffer));
  };
  input(data.blocks);
  input(data.table);
  input(data.sealed_counts);
  memory.AddInput(std::span(data.test_case().tail_tokens));
  input(data.tail_k);
  input(data.tail_v);
  input(data.tail_k_addresses);
  input(data.tail_v_addresses);
  for (const auto* buffer : {&data.g_k, &data.g_v, &data.sinks, &data.k_mean, &data.k_smooth}) {
    input(*buffer);
  }
  input(data.query);
  memory.AddOutput(std::span(data.out));
  memory.AddOutput(std::span(data.lse));
  memory.AddInOut(std::span(data.damage_count));
  memory.AddInOut(std::span(data.workspace));
  return memory;
}

using Body = void (*)(const DecodeParams&);

template <typename Arch>
emu::Report LaunchOn(const DecodePlan& plan, const emu::Memory& memory, uint64_t seed) {
  const Body body = ChooseDecode(plan, []<uint32_t kHeadDim, uint32_t kTilesN, uint32_t kParts>(
                                           DecodeShape<kHeadDim, kTilesN, kParts>) {
    return Body{&DecodeBody<Arch, kHeadDim, kTilesN, kParts>};
  });
  return emu::Launch({.grid = {plan.grid_size},
                      .block = {32 * plan.warp_count},
                      .shared_bytes = plan.shared_bytes,
                      .seed = seed},
                     memory, body, plan.params);
}

template <typename Arch>
emu::Report Execute(DecodeData& data, const DeviceLimits& limits, uint64_t seed = 0) {
  DecodePlan plan;
  const Status status = PlanDecode(data.Args(), limits, &plan);
  EXPECT_TRUE(status.ok()) << status.message();
  return LaunchOn<Arch>(plan, MemoryOf(data), seed);
}

template <typename Arch>
void ExpectExact(const DecodeCase& test_case, const DeviceLimits& limits, uint64_t seed = 0) {
  DecodeData data(test_case, seed == 0 ? kSeed : seed);
  const emu::Report report = Execute<Arch>(data, limits, seed);
  ASSERT_TRUE(report.ok()) << report.ToString() << "seed " << seed;
  const DecodeErrors errors = data.Errors();
  EXPECT_LE(errors.out, kOutErrorMax)
      << "d " << test_case.head_dim << " T " << test_case.block_tokens;
  EXPECT_LE(errors.lse, LseErrorMax(test_case));
  EXPECT_EQ(data.damage_count[0], 0U);
}

// The same case on the three ways of copying and converting.
void ExpectExactEverywhere(const DecodeCase& test_case) {
  ExpectExact<Sm80>(test_case, kAmpere, kSeed);
  ExpectExact<Sm89>(test_case, kAda);
  ExpectExact<Sm90>(test_case, kHopper, kSeed + 1);
  ExpectExact<Sm100>(test_case, kHopper);
}

std::vector<std::byte> Bits(const DecodeData& data) {
  std::vector<std::byte> bits(data.out.begin(), data.out.end());
  const auto lse = std::as_bytes(std::span(data.lse));
  bits.insert(bits.end(), lse.begin(), lse.end());
  return bits;
}

TEST(Decode, MatchesFp64ForEveryShape) {
  for (const uint32_t head_dim : {64U, 96U, 128U, 192U, 256U}) {
    for (const uint32_t block_tokens : {16U, 32U, 64U, 128U}) {
      ExpectExactEverywhere({.block_tokens = block_tokens,
                             .head_dim = head_dim,
                             .kv_heads = 1,
                             .block_counts = {208 / block_tokens},
                             .tail_tokens = {block_tokens / 2 + 1}});
    }
  }
}

TEST(Decode, MatchesFp64ForEveryGroup) {
  for (const uint32_t group_heads : {1U, 2U, 3U, 4U, 7U, 9U, 12U, 16U, 17U, 32U}) {
    ExpectExact<Sm90>({.group_heads = group_heads}, kHopper);
    ExpectExact<Sm80>({.head_dim = 192, .kv_heads = 1, .group_heads = group_heads}, kAmpere);
  }
}

TEST(Decode, ServesRaggedBatches) {
  // Empty sequences, single tokens, lengths around tiles, stages and splits.
  const DecodeCase ragged{.block_tokens = 16,
                          .head_dim = 64,
                          .kv_heads = 1,
                          .group_heads = 4,
                          .block_counts = {0, 1, 0, 3, 4, 5, 63, 64, 65, 0},
                          .tail_tokens = {0, 0, 1, 15, 16, 17, 1, 0, 3, 40}};
  ExpectExactEverywhere(ragged);
  DecodeData data(ragged, kSeed);
  ASSERT_TRUE(Execute<Sm90>(data, kHopper).ok());
  for (uint32_t i = 0; i < 4 * 64; ++i) EXPECT_EQ(data.Out(i), 0.0F);
  EXPECT_EQ(data.lse[0], -HUGE_VALF);
}

TEST(Decode, MergesSplitsAndTails) {
  // A split has 1024 tokens here.
  for (const uint32_t blocks : {15U, 16U, 17U, 32U, 33U, 40U}) {
    for (const uint32_t tail : {0U, 1U, 64U}) {
      ExpectExact<Sm90>(
          {.kv_heads = 1, .group_heads = 8, .block_counts = {blocks}, .tail_tokens = {tail}},
          kHopper, kSeed);
    }
  }
  ExpectExactEverywhere({.head_dim = 96,
                         .kv_heads = 1,
                         .group_heads = 12,
                         .block_counts = {18, 33},
                         .tail_tokens = {9, 0}});
}

TEST(Decode, MatchesFp64WithOptions) {
  for (const uint32_t query_len : {2U, 4U, 8U}) {
    ExpectExactEverywhere({.group_heads = 2, .query_len = query_len});
  }
  // Windows that begin in a tile, at one, behind the sealed tokens; with several queries.
  for (const uint32_t window : {1U, 4U, 5U, 6U, 69U, 70U, 133U, 1000U}) {
    ExpectExact<Sm90>({.group_heads = 4, .query_len = 2, .window = window}, kHopper);
    ExpectExact<Sm80>({.block_tokens = 16,
                       .head_dim = 64,
                       .group_heads = 1,
                       .block_counts = {9},
                       .query_len = 3,
                       .window = window},
                      kAmpere);
  }
  ExpectExactEverywhere({.soft_cap = 3.0F, .has_sinks = true});
  for (const float soft_cap : {1e-3F, 30.0F, 1e6F, 3e38F}) {
    ExpectExact<Sm90>({.soft_cap = soft_cap}, kHopper);
  }
  // Below what has a reciprocal, and scores of 0.
  ExpectExact<Sm90>({.soft_cap = 1e-40F, .score_spread = 0.0F}, kHopper);
  ExpectExactEverywhere({.block_counts = {0, 2}, .tail_tokens = {0, 0}, .has_sinks = true});
  ExpectExactEverywhere({.head_dim = 256, .has_transform = true});
  ExpectExactEverywhere({.tail_type = ElementType::kFp8E4m3, .query_type = ElementType::kFp32});
}

TEST(Decode, MatchesFp64FromUniformToOneHot) {
  for (const float spread : {0.0F, 0.01F, 4.0F, 16.0F, 64.0F, 4e7F}) {
    ExpectExact<Sm90>({.score_spread = spread}, kHopper);
    ExpectExact<Sm100>({.score_spread = spread}, kHopper);
  }
}

TEST(Decode, HoldsTheBoundForQueriesThatFp16DoesNotHold) {
  for (const float spread : {16.0F, 64.0F}) {
    ExpectExactEverywhere({.query_type = ElementType::kFp32, .score_spread = spread});
    ExpectExactEverywhere({.has_transform = true, .score_spread = spread});
    ExpectExactEverywhere({.group_heads = 12,
                           .has_transform = true,
                           .query_type = ElementType::kFp32,
                           .score_spread = spread});
  }
  // Far beyond the range of FP16 and far below it, and channels that the queries hardly have.
  for (const ElementType type : {ElementType::kBf16, ElementType::kFp32}) {
    for (const float unit : {0x1p-96F, 0x1p-40F, 0x1p40F, 0x1p100F}) {
      ExpectExact<Sm90>({.query_type = type, .score_spread = 24.0F, .query_unit = unit}, kHopper);
    }
    for (const float spread : {4.0F, 6.0F}) {
      ExpectExact<Sm80>({.has_transform = true,
                         .query_type = type,
                         .score_spread = 24.0F,
                         .smooth_spread = spread},
                        kAmpere);
    }
  }
}

TEST(Decode, HoldsTheBoundBesideATokenWithoutValues) {
  // The others' weights are what the result is made of, however small.
  for (const float lead : {4.0F, 12.0F, 20.0F}) {
    for (const float spread : {0.01F, 1.0F}) {
      const DecodeCase test_case{
          .kv_heads = 1, .block_counts = {10}, .score_spread = spread, .idle_lead = lead};
      ExpectExact<Sm90>(test_case, kHopper);
      ExpectExact<Sm100>(test_case, kHopper);
    }
  }
}

// Of everything that a launch can be given. Scores up to hundreds.
DecodeCase RandomCase(std::mt19937_64& random) {
  const auto one_of = [&](auto... values) {
    using Value = std::common_type_t<decltype(values)...>;
    const Value all[] = {values...};
    return all[random() % sizeof...(values)];
  };
  const auto format = [&] {
    return one_of(SideFormat::kNvfp4, SideFormat::kNvfp4, SideFormat::kNvfp4, SideFormat::kFp8,
                  SideFormat::kBf16);
  };
  DecodeCase test_case{.block_tokens = one_of(16U, 32U, 64U, 128U),
                       .head_dim = one_of(64U, 96U, 128U, 192U, 256U),
                       .kv_heads = one_of(1U, 2U),
                       .group_heads = one_of(1U, 2U, 5U, 8U, 12U)};
  const auto count = static_cast<uint32_t>(1 + random() % (256 / test_case.block_tokens));
  test_case.block_counts = {count};
  test_case.tail_tokens = {one_of(0U, 1U, 9U, 40U)};
  test_case.query_len = one_of(1U, 1U, 2U, 4U);
  test_case.window = one_of(0U, 0U, 1U, 7U, 60U, 150U);
  test_case.soft_cap = one_of(0.0F, 0.0F, 15.0F, 50.0F);
  test_case.has_sinks = one_of(false, true);
  test_case.has_transform = one_of(false, true);
  test_case.format = {format(), format()};
  test_case.tail_type = one_of(ElementType::kBf16, ElementType::kFp8E4m3);
  test_case.query_type = one_of(ElementType::kBf16, ElementType::kFp32);
  test_case.score_spread = one_of(0.1F, 1.0F, 8.0F, 16.0F, 32.0F, 64.0F);
  test_case.query_unit = one_of(1.0F, 1.0F, 0x1p-60F, 0x1p60F);
  test_case.smooth_spread = one_of(1.0F, 4.0F);
  test_case.idle_lead = one_of(0.0F, 0.0F, 10.0F);
  return test_case;
}

TEST(Decode, HoldsTheBoundForRandomCases) {
  for (uint64_t seed = kSeed; seed < kSeed + (kIsSanitized ? 10 : 50); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const DecodeCase test_case = RandomCase(random);
    switch (random() % 3) {
      case 0:
        ExpectExact<Sm80>(test_case, kAmpere, seed);
        break;
      case 1:
        ExpectExact<Sm90>(test_case, kHopper, seed);
        break;
      default:
        ExpectExact<Sm100>(test_case, kHopper, seed);
    }
  }
}

TEST(Decode, RoundsBf16Results) {
  DecodeData data({.out_type = ElementType::kBf16}, kSeed);
  ASSERT_TRUE(Execute<Sm90>(data, kHopper).ok());
  EXPECT_LE(data.Errors().out, 0x1p-8);
}

TEST(Decode, ReadsWideSides) {
  for (const SideFormat k : {SideFormat::kNvfp4, SideFormat::kFp8, SideFormat::kBf16}) {
    for (const SideFormat v : {SideFormat::kNvfp4, SideFormat::kFp8, SideFormat::kBf16}) {
      ExpectExact<Sm90>({.group_heads = 4, .format = {k, v}}, kHopper);
      ExpectExact<Sm80>({.block_tokens = 16,
                         .head_dim = 96,
                         .kv_heads = 1,
                         .group_heads = 9,
                         .block_counts = {kIsSanitized ? 7U : 70U},
                         .has_transform = true,
                         .format = {k, v}},
                        kAmpere, kSeed);
    }
  }
}

TEST(Decode, DependsOnNothingButTheSequence) {
  const DecodeCase alone{.kv_heads = 1, .block_counts = {20}, .tail_tokens = {7}};
  DecodeData reference(alone, kSeed);
  ASSERT_TRUE(Execute<Sm90>(reference, kHopper).ok());
  // Schedules and cards.
  for (uint64_t seed = 1; seed < 4; ++seed) {
    DecodeData data(alone, kSeed);
    DeviceLimits limits = kHopper;
    limits.multiprocessor_count = static_cast<uint32_t>(1 + 2 * seed);
    const emu::Report report = Execute<Sm90>(data, limits, seed);
    ASSERT_TRUE(report.ok()) << report.ToString() << "seed " << seed;
    EXPECT_EQ(Bits(data), Bits(reference)) << "seed " << seed;
  }
  // A batch that begins with the same sequence: the fixture draws the same values for it.
  DecodeData batch({.kv_heads = 1, .block_counts = {20, 20, 20}, .tail_tokens = {7, 7, 7}}, kSeed);
  const uint64_t row_bytes = uint64_t{8} * 128 * 4;
  DecodeBatchArgs args = batch.Args();
  const DecodeBatchArgs first = reference.Args();
  // Sequence 1 of the batch is the reference's: its table, tail and queries.
  std::copy_n(static_cast<const void* const*>(first.block_table), 20, batch.table.begin() + 21);
  batch.tail_k_addresses[1] = reference.tail_k_addresses[0];
  batch.tail_v_addresses[1] = reference.tail_v_addresses[0];
  std::copy_n(reference.query.begin(), reference.query.size(),
              batch.query.begin() + static_cast<std::ptrdiff_t>(reference.query.size()));
  DecodePlan plan;
  ASSERT_TRUE(PlanDecode(args, kHopper, &plan).ok());
  emu::Memory memory = MemoryOf(batch);
  memory.AddInput(std::span<const std::byte>(reference.blocks));
  memory.AddInput(std::span<const std::byte>(reference.tail_k));
  memory.AddInput(std::span<const std::byte>(reference.tail_v));
  const emu::Report report = LaunchOn<Sm90>(plan, memory, kSeed);
  ASSERT_TRUE(report.ok()) << report.ToString();
  EXPECT_TRUE(std::equal(reference.out.begin(), reference.out.end(),
                         batch.out.begin() + static_cast<std::ptrdiff_t>(row_bytes)));
}

TEST(Decode, LeavesTheWorkspaceForTheNextLaunch) {
  // As a captured launch that is replayed with other lengths.
  DecodeData data({.kv_heads = 1, .block_counts = {20, 3}, .tail_tokens = {7, 0}}, kSeed);
  ASSERT_TRUE(Execute<Sm90>(data, kHopper).ok());
  EXPECT_LE(data.Errors().out, kOutErrorMax);
  const std::vector<std::byte> before = Bits(data);
  const uint32_t whole = data.sealed_counts[0];
  data.sealed_counts[0] = 64;
  ASSERT_TRUE(Execute<Sm90>(data, kHopper).ok());
  EXPECT_NE(Bits(data), before);
  data.sealed_counts[0] = whole;
  ASSERT_TRUE(Execute<Sm90>(data, kHopper).ok());
  EXPECT_EQ(Bits(data), before);
}

TEST(Decode, ReadsNoFurtherThanTheTable) {
  DecodeData data({.kv_heads = 1, .block_counts = {3}, .tail_tokens = {0}}, kSeed);
  ASSERT_TRUE(Execute<Sm90>(data, kHopper).ok());
  const std::vector<std::byte> before = Bits(data);
  // The row has 4 entries; the fourth is made a second use of the first block.
  data.table[3] = data.table[0];
  data.sealed_counts[0] = 256;
  ASSERT_TRUE(Execute<Sm90>(data, kHopper).ok());
  const std::vector<std::byte> full = Bits(data);
  EXPECT_NE(full, before);
  data.sealed_counts[0] = 1 << 20;
  ASSERT_TRUE(Execute<Sm90>(data, kHopper).ok());
  EXPECT_EQ(Bits(data), full);
}

TEST(Decode, CountsDamagedScales) {
  for (const uint32_t head_dim : {64U, 96U, 128U, 192U, 256U}) {
    for (const bool is_v : {false, true}) {
      for (const uint8_t byte : {uint8_t{0x7F}, uint8_t{0x80}, uint8_t{0xFF}}) {
        DecodeData data({.head_dim = head_dim, .kv_heads = 1}, kSeed);
        const TileShape tile{64, head_dim};
        const auto at = static_cast<uint64_t>(static_cast<const std::byte*>(data.table[1]) -
                                              data.blocks.data());
        const uint64_t offset =
            data.Args().layer_offset + (is_v ? VScaleByteOffset(tile, 37, head_dim / 16 - 1)
                                             : KScaleByteOffset(tile, 37, head_dim / 16 - 1));
        data.blocks[at + offset] = std::byte{byte};
        ASSERT_TRUE(Execute<Sm80>(data, kAmpere).ok());
        EXPECT_GT(data.damage_count[0], 0U) << head_dim << " " << is_v << " " << int{byte};
      }
    }
  }
}

TEST(Decode, CountsFp8NanInTilesAndNotInTails) {
  for (const bool is_v : {false, true}) {
    const LayerFormat format{is_v ? SideFormat::kBf16 : SideFormat::kFp8,
                             is_v ? SideFormat::kFp8 : SideFormat::kNvfp4};
    for (const uint8_t byte : {uint8_t{0x7E}, uint8_t{0x7F}, uint8_t{0xFE}, uint8_t{0xFF}}) {
      for (const uint64_t dim : {uint64_t{0}, uint64_t{38}, uint64_t{63}}) {
        DecodeData data({.head_dim = 64,
                         .kv_heads = 1,
                         .group_heads = 1,
                         .format = format,
                         .tail_type = ElementType::kFp8E4m3},
                        kSeed);
        const auto at = static_cast<uint64_t>(static_cast<const std::byte*>(data.table[1]) -
                                              data.blocks.data());
        const uint64_t side = is_v ? SideBytes({64, 64}, format.k) : 0;
        data.blocks[at + data.Args().layer_offset + side + 37 * 64 + dim] = std::byte{byte};
        ASSERT_TRUE(Execute<Sm80>(data, kAmpere).ok());
        EXPECT_EQ(data.damage_count[0] > 0, (byte & 0x7F) == 0x7F) << is_v << dim << int{byte};
      }
    }
    // Of a tail NaN is a value; and with BF16 sides no byte is damage.
    DecodeData data({.head_dim = 64,
                     .kv_heads = 1,
                     .group_heads = 1,
                     .format = format,
                     .tail_type = ElementType::kFp8E4m3},
                    kSeed);
    (is_v ? data.tail_v : data.tail_k)[0] = std::byte{0x7F};
    ASSERT_TRUE(Execute<Sm80>(data, kAmpere).ok());
    EXPECT_EQ(data.damage_count[0], 0U) << is_v;
  }
}

TEST(Decode, KeepsNanWithTheRowsThatSeeIt) {
  for (const uint32_t query_len : {1U, 3U}) {
    DecodeData data({.kv_heads = 1, .group_heads = 2, .tail_tokens = {5}, .query_len = query_len},
                    kSeed);
    const DecodeErrors clean = [&] {
      EXPECT_TRUE(Execute<Sm90>(data, kHopper).ok());
      return data.Errors();
    }();
    EXPECT_LE(clean.out, kOutErrorMax);
    const std::vector<std::byte> before = Bits(data);
    const auto nan = std::byte{0xFF};
    for (uint32_t i = 0; i < 4; ++i) data.tail_v[(4 * (144 + 32)) * 2 + i] = nan;
    ASSERT_TRUE(Execute<Sm90>(data, kHopper).ok());
    const uint64_t last_rows = (query_len - 1) * 2 * 128;
    for (uint64_t i = 0; i < last_rows; ++i) {
      float old = 0;
      std::memcpy(&old, &before[4 * i], 4);
      EXPECT_EQ(data.Out(i), old);
    }
    EXPECT_TRUE(std::isnan(data.Out(last_rows)));
    EXPECT_TRUE(std::isnan(data.Out(last_rows + 128)));
  }
}

TEST(Decode, HasNoBankConflictsInKAndV) {
  for (const uint32_t head_dim : {64U, 96U, 128U, 192U, 256U}) {
    DecodeData data({.head_dim = head_dim, .kv_heads = 1, .tail_tokens = {0}}, kSeed);
    for (const bool hardware : {false, true}) {
      const emu::Report report =
          hardware ? Execute<Sm100>(data, kHopper) : Execute<Sm80>(data, kAmpere);
      ASSERT_TRUE(report.ok()) << report.ToString();
      EXPECT_EQ(report.BankConflicts(), 0U) << head_dim << report.ToString();
    }
  }
}

TEST(Decode, RefusesWhatTheHostCanSee) {
  DecodeData data({}, kSeed);
  const DecodeBatchArgs good = data.Args();
  DecodePlan plan;
  ASSERT_TRUE(PlanDecode(good, kHopper, &plan).ok());
  const auto refuses = [&](auto change) {
    DecodeBatchArgs args = good;
    change(&args);
    return PlanDecode(args, kHopper, &plan).code() == StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refuses([](auto* a) { a->block_shape.head_dim = 80; }));
  EXPECT_TRUE(refuses([](auto* a) { a->batch_size = 0; }));
  EXPECT_TRUE(refuses([](auto* a) { a->batch_size = 1025; }));
  EXPECT_TRUE(refuses([](auto* a) { a->block_table = nullptr; }));
  EXPECT_TRUE(refuses([](auto* a) { a->table_stride = 1U << 30; }));
  EXPECT_TRUE(refuses([](auto* a) { a->sealed_token_counts = nullptr; }));
  EXPECT_TRUE(refuses([](auto* a) { a->layer_offset = 8; }));
  EXPECT_TRUE(refuses([](auto* a) { a->query_head_count = 3; }));
  EXPECT_TRUE(refuses([](auto* a) { a->query_len = 9; }));
  EXPECT_TRUE(refuses([](auto* a) { a->query_type = ElementType::kFp16; }));
  EXPECT_TRUE(refuses([](auto* a) { a->softmax_scale = HUGE_VALF; }));
  EXPECT_TRUE(refuses([](auto* a) { a->soft_cap = -1.0F; }));
  EXPECT_TRUE(refuses([](auto* a) { a->g_v = nullptr; }));
  EXPECT_TRUE(refuses([](auto* a) { a->tails.type = ElementType::kFp32; }));
  EXPECT_TRUE(refuses([](auto* a) { a->tails.token_stride += 1; }));
  EXPECT_TRUE(refuses([](auto* a) { a->tails.k = nullptr; }));
  EXPECT_TRUE(refuses([](auto* a) { a->workspace = nullptr; }));
  EXPECT_TRUE(refuses([](auto* a) { a->out = nullptr; }));
  EXPECT_EQ(
      PlanDecode(good, {.multiprocessor_count = 1, .shared_bytes_per_block = 49152}, &plan).code(),
      StatusCode::kInvalidArgument);
}

TEST(Decode, CutsSequencesTheSameWayAtEveryLength) {
  // The capacity of a launch covers every length up to its own.
  for (const uint32_t heads : {1U, 2U, 8U, 128U, 300U}) {
    for (uint32_t tokens = 1; tokens < 5'000'000; tokens += tokens / 7 + 1) {
      const uint32_t count = SplitCount(tokens, heads);
      ASSERT_LE(count, SplitCountMax(tokens, heads)) << tokens << " " << heads;
      ASSERT_LE(count, SplitCountMax(tokens + tokens / 3, heads)) << tokens << " " << heads;
      ASSERT_EQ(SplitTokens(tokens, heads) % kSplitGranuleTokens, 0U);
    }
  }
}

}  // namespace
}  // namespace kvtier::kernels::cuda
