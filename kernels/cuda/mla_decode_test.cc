// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/decode_plan.h"
#include "kernels/cuda/emu/device_buffer.h"
#include "kernels/cuda/emu/launch.h"
#include "kernels/cuda/mla_decode_kernel.h"
#include "kernels/cuda/mla_decode_plan.h"
#include "kernels/mla_sequence.h"

// The MLA decode kernel, executed by the machine of emu/, gives the FP64 answer over the values of
// sealed tiles and tails on every architecture and under every schedule.

namespace kvtier::kernels::cuda {
namespace {

constexpr uint64_t kSeed = 20261129;
constexpr ElementType kFp8 = ElementType::kFp8E4m3;
constexpr uint64_t kTailGap = 16;  // Of elements: what keeps rows at multiples of 16 bytes.
constexpr DeviceLimits kCard{.multiprocessor_count = 2, .shared_bytes_per_block = 101376};

// Sequences that agree in everything but their lengths, in the memory of a device.
class MlaBatch {
 public:
  explicit MlaBatch(const std::vector<MlaCase>& cases) : case_(cases.front()) {
    table_stride_ = 1;
    for (const MlaCase& mla_case : cases) {
      table_stride_ = std::max(table_stride_, mla_case.block_count + 1);
    }
    for (MlaCase mla_case : cases) {
      mla_case.tail_gap = kTailGap;
      Add(sequences.emplace_back(mla_case, Isa::kScalar));
    }
    out.resize(queries.size() / kMlaKeyDim * kMlaLatentDim);
    lse.resize(queries.size() / kMlaKeyDim);
    for (const float x : queries) bf16_queries.push_back(FloatToBf16(x));
    bf16_out.resize(out.size());
    workspace.resize(DecodeMlaBatchWorkspaceBytes(Args()));
  }

  DecodeMlaBatchArgs Args() {
    const DecodeMlaArgs first = sequences.front().Args();
    return {.block_shape = first.block_shape,
            .layer_idx = first.layer_idx,
            .batch_size = static_cast<uint32_t>(sequences.size()),
            .block_table = table.data(),
            .table_stride = table_stride_,
            .sealed_token_counts = sealed_counts.data(),
            .tails = {.token_counts = tail_counts.data(),
                      .latent = latent_addresses.data(),
                      .rope = rope_addresses.data(),
                      .latent_stride = first.tail.latent_stride,
                      .rope_stride = first.tail.rope_stride,
                      .latent_type = first.tail.latent_type,
                      .rope_type = first.tail.rope_type,
                      .latent_scale = first.tail.latent_scale,
                      .rope_scale = first.tail.rope_scale},
            .query_type = ElementType::kFp32,
            .query = queries.data(),
            .query_head_count = case_.heads,
            .query_len = case_.query_len,
            .softmax_scale = first.softmax_scale,
            .soft_cap = case_.soft_cap,
            .window = static_cast<uint32_t>(case_.window),
            .g = g.data(),
            .sinks = first.sinks.empty() ? nullptr : first.sinks.data(),
            .out_type = ElementType::kFp32,
            .out = out.data(),
            .lse = lse.data(),
            .damage_count = damage_count.data(),
            .workspace = workspace.empty() ? nullptr : workspace.data()};
  }

  template <typename Arch>
  emu::Report Execute(uint64_t seed = 0, uint32_t multiprocessors = 2) {
    return Execute<Arch>(Args(), seed, multiprocessors);
  }
  template <typename Arch>
  emu::Report Execute(const DecodeMlaBatchArgs& args, uint64_t seed, uint32_t multiprocessors) {
    DeviceLimits limits = kCard;
    limits.multiprocessor_count = multiprocessors;
    MlaDecodePlan plan;
    const Status status = PlanDecodeMla(args, limits, &plan);
    EXPECT_TRUE(status.ok()) << status.message();
    return emu::Launch({.grid = {plan.grid_size},
                        .block = {32 * kMlaWarps},
                        .shared_bytes = plan.shared_bytes,
                        .seed = seed},
                       MemoryOf(), MlaDecodeBody<Arch>, plan.params);
  }

  void ExpectMatchesFp64() const {
    const uint64_t rows = uint64_t{case_.heads} * case_.query_len;
    for (size_t s = 0; s < sequences.size(); ++s) {
      sequences[s].ExpectMatchesFp64(
          std::span(out).subspan(s * rows * kMlaLatentDim, rows * kMlaLatentDim),
          std::span(lse).subspan(s * rows, rows));
    }
  }

  // Of one sequence.
  std::vector<float> Results(uint32_t sequence) const {
    const uint64_t rows = uint64_t{case_.heads} * case_.query_len;
    const auto values =
        std::span(out).subspan(sequence * rows * kMlaLatentDim, rows * kMlaLatentDim);
    std::vector<float> results(values.begin(), values.end());
    const auto sums = std::span(lse).subspan(sequence * rows, rows);
    results.insert(results.end(), sums.begin(), sums.end());
    return results;
  }

  std::deque<MlaSequence> sequences;
  emu::DeviceBuffer<const void*> table, latent_addresses, rope_addresses;
  emu::DeviceBuffer<uint32_t> sealed_counts, tail_counts;
  emu::DeviceBuffer<float> queries, out, lse;
  emu::DeviceBuffer<uint16_t> bf16_queries, bf16_out;
  emu::DeviceBuffer<float> g = {MlaSequence::kG};
  emu::DeviceBuffer<uint32_t> damage_count = emu::DeviceBuffer<uint32_t>(1);
  emu::DeviceBuffer<std::byte> workspace;

 private:
  void Add(MlaSequence& sequence) {
    const DecodeMlaArgs args = sequence.Args();
    table.insert(table.end(), args.block_table.begin(), args.block_table.end());
    table.resize(table_stride_ * sequences.size());
    sealed_counts.push_back(static_cast<uint32_t>(args.sealed_token_count));
    tail_counts.push_back(args.tail.token_count);
    latent_addresses.push_back(args.tail.latent);
    rope_addresses.push_back(args.tail.rope);
    queries.insert(queries.end(), sequence.query().begin(), sequence.query().end());
  }

  emu::Memory MemoryOf() {
    emu::Memory memory;
    for (MlaSequence& sequence : sequences) {
      for (const auto& block : sequence.blocks()) memory.AddInput(std::span(block));
      memory.AddInput(std::span<const std::byte>(sequence.latent_tail()));
      memory.AddInput(std::span<const std::byte>(sequence.rope_tail()));
    }
    if (case_.sinks) memory.AddInput(sequences.front().Args().sinks);
    memory.AddInput(std::span<const void* const>(table));
    memory.AddInput(std::span<const void* const>(latent_addresses));
    memory.AddInput(std::span<const void* const>(rope_addresses));
    memory.AddInput(std::span<const uint32_t>(sealed_counts));
    memory.AddInput(std::span<const uint32_t>(tail_counts));
    memory.AddInput(std::span<const float>(queries));
    memory.AddInput(std::span<const uint16_t>(bf16_queries));
    memory.AddInput(std::span<const float>(g));
    memory.AddOutput(std::span(out));
    memory.AddOutput(std::span(bf16_out));
    memory.AddOutput(std::span(lse));
    memory.AddInOut(std::span(damage_count));
    memory.AddInOut(std::span(workspace));
    return memory;
  }

  MlaCase case_;
  uint32_t table_stride_ = 0;
};

template <typename Arch>
void ExpectExact(const std::vector<MlaCase>& cases, uint64_t seed = 0) {
  MlaBatch batch(cases);
  const emu::Report report = batch.Execute<Arch>(seed);
  ASSERT_TRUE(report.ok()) << report.ToString() << "seed " << seed;
  batch.ExpectMatchesFp64();
  EXPECT_EQ(batch.damage_count[0], 0U);
}

TEST(MlaDecode, MatchesFp64ForEveryTileAndArchitecture) {
  for (const uint32_t block_tokens : {16U, 32U, 64U, 128U}) {
    const MlaCase mla_case{.block_tokens = block_tokens,
                           .block_count = block_tokens == 16 ? 3U : 1U,
                           .tail_tokens = 5};
    ExpectExact<Sm80>({mla_case}, kSeed);
    ExpectExact<Sm100>({mla_case});
  }
  ExpectExact<Sm90>({{.block_count = 1}}, kSeed + 1);
}

TEST(MlaDecode, MatchesFp64ForEveryHeadCount) {
  for (const uint32_t heads : {1U, 7U, 9U, 128U}) {
    ExpectExact<Sm90>({{.heads = heads, .block_count = 2, .tail_tokens = 3}}, kSeed);
  }
}

TEST(MlaDecode, ServesRaggedBatches) {
  // Empty, of one token, around chunks of 16, with more tokens than a round of the warps.
  std::vector<MlaCase> cases;
  for (const uint32_t blocks : {0U, 1U, 4U, 5U}) {
    for (const uint32_t tail : {0U, 1U, 17U}) {
      cases.push_back({.heads = 3, .block_count = blocks, .tail_tokens = tail});
    }
  }
  ExpectExact<Sm90>(cases, kSeed);
  MlaBatch batch(cases);
  ASSERT_TRUE(batch.Execute<Sm80>().ok());
  for (uint32_t i = 0; i < 3 * kMlaLatentDim; ++i) ASSERT_EQ(batch.out[i], 0.0F);
  EXPECT_EQ(batch.lse[0], -HUGE_VALF);
}

TEST(MlaDecode, MergesSplitsAndTails) {
  // A split has 1024 tokens: one and a tail; two; two and a tail.
  const MlaCase one{.block_tokens = 128, .heads = 2, .block_count = 8, .tail_tokens = 2};
  std::vector<MlaCase> cases(3, one);
  cases[1].block_count = 9;
  cases[1].tail_tokens = 0;
  cases[2].block_count = 9;
  ExpectExact<Sm90>(cases, kSeed);
}

TEST(MlaDecode, MatchesFp64WithOptions) {
  for (const uint32_t query_len : {2U, 8U}) {
    ExpectExact<Sm90>({{.heads = 3, .block_count = 2, .tail_tokens = 9, .query_len = query_len}});
  }
  for (const uint32_t window : {1U, 4U, 9U, 40U, 1000U}) {
    ExpectExact<Sm80>(
        {{.heads = 2, .block_count = 4, .tail_tokens = 5, .query_len = 2, .window = window}});
  }
  for (const float soft_cap : {3.0F, 1e9F}) {
    ExpectExact<Sm90>({{.heads = 5, .block_count = 2, .tail_tokens = 7, .soft_cap = soft_cap}});
  }
  ExpectExact<Sm90>({{.heads = 5, .block_count = 2, .tail_tokens = 7, .sinks = true}});
  ExpectExact<Sm90>({{.heads = 5, .sinks = true}});
  ExpectExact<Sm90>({{.heads = 5, .block_count = 2, .sharpness = 20.0F, .bf16_queries = false}});
}

// A batch of everything that a launch can be given; some sequences are empty.
std::vector<MlaCase> RandomBatch(std::mt19937_64& random) {
  const auto one_of = [&](auto... values) {
    using Value = std::common_type_t<decltype(values)...>;
    const Value all[] = {values...};
    return all[random() % sizeof...(values)];
  };
  MlaCase common{.block_tokens = one_of(16U, 16U, 32U, 64U), .heads = one_of(1U, 2U, 5U, 9U)};
  common.query_len = one_of(1U, 1U, 2U, 3U);
  common.window = one_of(uint64_t{0}, uint64_t{0}, uint64_t{1}, uint64_t{7}, uint64_t{50});
  common.soft_cap = one_of(0.0F, 0.0F, 3.0F, 50.0F);
  common.sinks = one_of(false, true);
  common.latent_type = one_of(ElementType::kBf16, kFp8);
  common.rope_type = one_of(ElementType::kBf16, kFp8);
  common.sharpness = one_of(0.1F, 1.0F, 8.0F);
  common.bf16_queries = one_of(false, true);
  // Sinks are the first sequence's: another seed would have others.
  std::vector<MlaCase> cases(common.sinks ? 1 : 1 + random() % 3, common);
  for (MlaCase& one : cases) {
    one.seed = static_cast<uint32_t>(random());
    one.block_count = static_cast<uint32_t>(random() % (64 / common.block_tokens + 1));
    one.tail_tokens = one_of(0U, 1U, 9U, 18U);
    // A sequence has at least query_len tokens.
    if (one.block_count == 0 && one.tail_tokens < one.query_len) one.tail_tokens = 9;
  }
  return cases;
}

TEST(MlaDecode, MatchesFp64ForRandomBatches) {
  for (uint64_t seed = kSeed; seed < kSeed + 100; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const std::vector<MlaCase> cases = RandomBatch(random);
    if (random() % 2 == 0) {
      ExpectExact<Sm80>(cases, seed);
    } else {
      ExpectExact<Sm100>(cases, seed);
    }
  }
}

TEST(MlaDecode, ReadsFp8Tails) {
  for (const ElementType rope : {ElementType::kBf16, kFp8}) {
    ExpectExact<Sm90>(
        {{.heads = 5, .block_count = 1, .tail_tokens = 7, .latent_type = kFp8, .rope_type = rope}});
  }
}

TEST(MlaDecode, ReadsAndWritesBf16) {
  MlaBatch batch({{.heads = 9, .block_count = 2, .tail_tokens = 3}});
  ASSERT_TRUE(batch.Execute<Sm90>().ok());
  DecodeMlaBatchArgs args = batch.Args();
  args.query_type = ElementType::kBf16;
  args.query = batch.bf16_queries.data();
  args.out_type = ElementType::kBf16;
  args.out = batch.bf16_out.data();
  const std::vector<float> expected(batch.out.begin(), batch.out.end());
  ASSERT_TRUE(batch.Execute<Sm90>(args, 0, 1).ok());
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(batch.bf16_out[i], FloatToBf16(expected[i])) << i;
  }
}

TEST(MlaDecode, DependsOnNothingButTheSequence) {
  const MlaCase own{.block_tokens = 128, .heads = 2, .block_count = 9, .tail_tokens = 2};
  MlaCase other = own;
  other.block_count = 1;
  MlaBatch alone({own});
  ASSERT_TRUE(alone.Execute<Sm90>(0, 1).ok());
  MlaBatch batch({other, own});
  ASSERT_TRUE(batch.Execute<Sm90>(kSeed, 3).ok());
  EXPECT_EQ(batch.Results(1), alone.Results(0));
}

TEST(MlaDecode, ReplaysWithOtherLengths) {
  MlaBatch batch({{.block_tokens = 128, .heads = 1, .block_count = 9}});
  ASSERT_TRUE(batch.Execute<Sm90>().ok());
  const std::vector<float> whole = batch.Results(0);
  batch.sealed_counts[0] = 128;
  ASSERT_TRUE(batch.Execute<Sm90>().ok());
  EXPECT_NE(batch.Results(0), whole);
  batch.sealed_counts[0] = 9 * 128;
  ASSERT_TRUE(batch.Execute<Sm90>().ok());
  EXPECT_EQ(batch.Results(0), whole);
}

TEST(MlaDecode, ReadsNoFurtherThanTheTable) {
  MlaBatch batch({{.heads = 1, .block_count = 2}});
  // The row has 3 entries; the third is made a second use of the first block.
  batch.table[2] = batch.table[0];
  batch.sealed_counts[0] = 3 * 16;
  ASSERT_TRUE(batch.Execute<Sm90>().ok());
  const std::vector<float> full = batch.Results(0);
  batch.sealed_counts[0] = 1 << 20;
  ASSERT_TRUE(batch.Execute<Sm90>().ok());
  EXPECT_EQ(batch.Results(0), full);
}

TEST(MlaDecode, CountsDamagedScales) {
  for (const uint8_t byte : {uint8_t{0x7F}, uint8_t{0x80}, uint8_t{0xFF}}) {
    MlaBatch batch({{.heads = 1, .block_count = 2}});
    std::byte* tile = batch.sequences[0].blocks()[1].data() +
                      MlaTileOffset(batch.Args().block_shape, MlaSequence::kLayer);
    tile[MlaScaleByteOffset({.block_tokens = 16}, 13, 31)] = std::byte{byte};
    ASSERT_TRUE(batch.Execute<Sm80>().ok());
    EXPECT_GT(batch.damage_count[0], 0U) << int{byte};
  }
}

TEST(MlaDecode, KeepsNanWithTheRowsThatSeeIt) {
  MlaBatch batch({{.heads = 2, .block_count = 1, .tail_tokens = 5, .query_len = 2}});
  ASSERT_TRUE(batch.Execute<Sm90>().ok());
  const std::vector<float> clean(batch.out.begin(), batch.out.end());
  const uint64_t row_bytes = (kMlaLatentDim + kTailGap) * 2;
  std::fill_n(batch.sequences[0].latent_tail().begin() + 4 * row_bytes, 4, std::byte{0xFF});
  ASSERT_TRUE(batch.Execute<Sm90>().ok());
  for (uint64_t i = 0; i < 2 * kMlaLatentDim; ++i) ASSERT_EQ(batch.out[i], clean[i]);
  EXPECT_TRUE(std::isnan(batch.out[2 * kMlaLatentDim]));
  EXPECT_TRUE(std::isnan(batch.out[3 * kMlaLatentDim]));
}

TEST(MlaDecode, RefusesWhatTheHostCanSee) {
  MlaBatch batch({{.block_count = 1, .tail_tokens = 1}});
  const DecodeMlaBatchArgs good = batch.Args();
  MlaDecodePlan plan;
  ASSERT_TRUE(PlanDecodeMla(good, kCard, &plan).ok());
  const auto refuses = [&](auto change) {
    DecodeMlaBatchArgs args = good;
    change(&args);
    return PlanDecodeMla(args, kCard, &plan).code() == StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refuses([](auto* a) { a->block_shape.tile.latent_dim = 256; }));
  EXPECT_TRUE(refuses([](auto* a) { a->layer_idx = MlaSequence::kLayers; }));
  EXPECT_TRUE(refuses([](auto* a) { a->batch_size = 0; }));
  EXPECT_TRUE(refuses([](auto* a) { a->batch_size = 1025; }));
  EXPECT_TRUE(refuses([](auto* a) { a->block_table = nullptr; }));
  EXPECT_TRUE(refuses([](auto* a) { a->sealed_token_counts = nullptr; }));
  EXPECT_TRUE(refuses([](auto* a) { a->query_head_count = 0; }));
  EXPECT_TRUE(refuses([](auto* a) { a->query_len = 9; }));
  EXPECT_TRUE(refuses([](auto* a) { a->query_type = ElementType::kFp16; }));
  EXPECT_TRUE(refuses([](auto* a) { a->softmax_scale = HUGE_VALF; }));
  EXPECT_TRUE(refuses([](auto* a) { a->g = nullptr; }));
  EXPECT_TRUE(refuses([](auto* a) { a->tails.rope = nullptr; }));
  EXPECT_TRUE(refuses([](auto* a) { a->tails.latent_type = ElementType::kFp32; }));
  EXPECT_TRUE(refuses([](auto* a) { a->tails.latent_stride = 504; }));
  EXPECT_TRUE(refuses([](auto* a) { a->tails.rope_stride += 4; }));
  EXPECT_TRUE(refuses([](auto* a) { a->tails.rope_scale = 0.0F; }));
  EXPECT_TRUE(refuses([](auto* a) { a->out = nullptr; }));
  EXPECT_TRUE(refuses([](auto* a) { a->workspace = nullptr; }));
  EXPECT_EQ(PlanDecodeMla(good, {.multiprocessor_count = 1, .shared_bytes_per_block = 65536}, &plan)
                .code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvtier::kernels::cuda
