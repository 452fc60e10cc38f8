// SPDX-License-Identifier: Apache-2.0
#include "kernels/workspace.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/gather.h"
#include "kernels/nvfp4.h"
#include "kernels/seal.h"

namespace kvtier::kernels {
namespace {

constexpr uint32_t kSeed = 20261129;
constexpr BlockShape kShape{
    .layer_count = 2, .kv_head_count = 3, .block_tokens = 16, .head_dim = 80};
constexpr uint32_t kBlocks = 5;
constexpr uint32_t kTokens = kBlocks * 16;

// A prefix whose second layer is sealed in a format of its own; the first holds poison.
class Prefix {
 public:
  Prefix(const LayerFormat& format, bool transform) : formats_{{}, format} {
    std::mt19937 random(kSeed);
    std::normal_distribution<float> normal;
    for (uint32_t h = 0; h < kShape.kv_head_count; ++h) {
      g_k_.push_back(format.k == SideFormat::kFp8 ? 0.013F : std::ldexp(1.0F, -6 - int(h)));
      g_v_.push_back(format.v == SideFormat::kFp8 ? 0.017F : std::ldexp(1.0F, -7 + int(h)));
    }
    for (uint32_t i = 0; transform && i < kShape.kv_head_count * kShape.head_dim; ++i) {
      mean_.push_back(normal(random));
      smooth_.push_back(std::exp2(normal(random)));
    }
    std::vector<float> rows(uint64_t{16} * kShape.head_dim);
    for (uint32_t i = 0; i < kBlocks; ++i) {
      blocks_.emplace_back(BlockBytes(kShape, formats_), std::byte{0xFF});
      for (uint32_t h = 0; h < kShape.kv_head_count; ++h) {
        for (float& x : rows) x = normal(random);
        const ConstRows source{
            .type = ElementType::kFp32, .data = rows.data(), .token_stride = kShape.head_dim};
        SealStats stats;
        EXPECT_TRUE(SealTile(TileOf(kShape), format, source, source,
                             {.g_k = g_k_[h],
                              .g_v = g_v_[h],
                              .k_mean = Channels(mean_, h),
                              .k_smooth = Channels(smooth_, h)},
                             Tile(i, h), &stats)
                        .ok());
      }
    }
    for (const auto& block : blocks_) table_.push_back(block.data());
  }

  GatherPrefixArgs Args(const WorkspaceRows& target) const {
    return {.block_shape = kShape,
            .layer_idx = 1,
            .block_table = table_,
            .sealed_token_count = kTokens,
            .g_k = g_k_,
            .g_v = g_v_,
            .layer_formats = formats_,
            .k_mean = mean_,
            .k_smooth = smooth_,
            .target = target};
  }

  std::span<std::byte> Tile(uint32_t block_idx, uint32_t kv_head_idx) {
    const uint64_t bytes = TileBytes(TileOf(kShape), formats_[1]);
    return std::span(blocks_[block_idx])
        .subspan(LayerOffset(kShape, formats_, 1) + kv_head_idx * bytes, bytes);
  }

  // One (block, kv head) by GatherTile, dense.
  void Gather(uint32_t block_idx, uint32_t kv_head_idx, ElementType type, void* k, void* v) {
    const MutableRows k_rows{
        .type = type, .data = k, .token_stride = kShape.head_dim, .scale = kKScale};
    const MutableRows v_rows{
        .type = type, .data = v, .token_stride = kShape.head_dim, .scale = kVScale};
    EXPECT_TRUE(GatherTile(TileOf(kShape), formats_[1], Tile(block_idx, kv_head_idx),
                           {.g_k = g_k_[kv_head_idx],
                            .g_v = g_v_[kv_head_idx],
                            .k_mean = Channels(mean_, kv_head_idx),
                            .k_smooth = Channels(smooth_, kv_head_idx)},
                           k_rows, v_rows)
                    .ok());
  }

  static constexpr float kKScale = 0.4F;
  static constexpr float kVScale = 0.3F;

 private:
  static std::span<const float> Channels(const std::vector<float>& vector, uint32_t head) {
    if (vector.empty()) return {};
    return std::span(vector).subspan(head * kShape.head_dim, kShape.head_dim);
  }

  LayerFormat formats_[2];
  std::vector<float> g_k_, g_v_, mean_, smooth_;
  std::vector<std::vector<std::byte>> blocks_;
  std::vector<const std::byte*> table_;
};

// Tasks in reverse order: as good as any number of threads.
void RunReversed(void* /*self*/, uint32_t task_count, Executor::Task task, void* context) {
  for (uint32_t i = task_count; i > 0; --i) task(context, i - 1);
}
constexpr Executor kExecutor{.run = RunReversed};

void ExpectRow(const std::byte* actual, const std::vector<std::byte>& tile_rows, uint32_t token,
               uint64_t row_bytes) {
  ASSERT_EQ(std::memcmp(actual, &tile_rows[token % 16 * row_bytes], row_bytes), 0) << token;
}

TEST(GatherPrefix, GivesTheRowsOfGatherTileDenseAndPaged) {
  for (const LayerFormat format : {LayerFormat{}, LayerFormat{SideFormat::kFp8, SideFormat::kNvfp4},
                                   LayerFormat{SideFormat::kBf16, SideFormat::kFp8}}) {
    for (const bool transform : {false, true}) {
      Prefix prefix(format, transform);
      for (const ElementType type :
           {ElementType::kFp8E4m3, ElementType::kBf16, ElementType::kFp32}) {
        const uint64_t row_bytes = uint64_t{kShape.head_dim} * ElementBytes(type);
        // Room for a chunk behind the prefix, which stays as it is.
        const uint64_t capacity = kTokens + 7;
        std::vector<std::byte> dense(WorkspaceBytes(kShape, capacity, type), std::byte{0x5A});
        WorkspaceRows rows = DenseWorkspace(kShape, capacity, type, dense.data());
        rows.k_scale = Prefix::kKScale;
        rows.v_scale = Prefix::kVScale;
        ASSERT_TRUE(GatherPrefix(prefix.Args(rows)).ok());
        // HND pages [page][K, V][kv head][slot][dim] of 8 tokens; the prefix begins at slot 5.
        const uint32_t table[] = {7, 3, 0, 1, 2, 9, 8, 4, 6, 5, 10};
        const uint64_t side_stride = uint64_t{kShape.kv_head_count} * 8 * kShape.head_dim;
        std::vector<std::byte> pages(11 * 2 * side_stride * ElementBytes(type), std::byte{0x5A});
        WorkspaceRows paged = rows;
        paged.k = pages.data();
        paged.v = pages.data() + side_stride * ElementBytes(type);
        paged.token_stride = kShape.head_dim;
        paged.head_stride = uint64_t{8} * kShape.head_dim;
        paged.paging = {.page_table = table,
                        .page_table_count = 11,
                        .page_tokens = 8,
                        .page_stride = 2 * side_stride,
                        .first_slot = 5};
        GatherPrefixArgs args = prefix.Args(paged);
        args.executor = &kExecutor;
        ASSERT_TRUE(GatherPrefix(args).ok());
        for (uint32_t block = 0; block < kBlocks; ++block) {
          for (uint32_t head = 0; head < kShape.kv_head_count; ++head) {
            std::vector<std::byte> expected[2];
            for (auto& side : expected) side.resize(16 * row_bytes);
            prefix.Gather(block, head, type, expected[0].data(), expected[1].data());
            for (uint32_t token = block * 16; token < block * 16 + 16; ++token) {
              for (const bool is_v : {false, true}) {
                const uint64_t at = ((is_v ? capacity : 0) + token) * kShape.kv_head_count + head;
                ExpectRow(&dense[at * row_bytes], expected[is_v], token, row_bytes);
                const uint64_t slot = token + 5;
                const uint64_t elements = table[slot / 8] * 2 * side_stride +
                                          (is_v ? side_stride : 0) + head * paged.head_stride +
                                          slot % 8 * kShape.head_dim;
                ExpectRow(&pages[elements * ElementBytes(type)], expected[is_v], token, row_bytes);
              }
            }
          }
        }
        EXPECT_EQ(dense[kTokens * kShape.kv_head_count * row_bytes], std::byte{0x5A});
        EXPECT_EQ(dense.back(), std::byte{0x5A});
        EXPECT_EQ(pages[(table[0] * 2 * side_stride + 4 * kShape.head_dim) * ElementBytes(type)],
                  std::byte{0x5A});
      }
    }
  }
}

TEST(GatherPrefix, SizesAreThoseOfDenseRows) {
  EXPECT_EQ(WorkspaceBytes(kShape, 100, ElementType::kFp8E4m3), 2U * 100 * 3 * 80);
  EXPECT_EQ(WorkspaceBytes(kShape, 100, ElementType::kBf16), 4U * 100 * 3 * 80);
  EXPECT_EQ(WorkspaceBytes({}, 100, ElementType::kBf16), 0U);
  EXPECT_EQ(WorkspaceBytes(kShape, uint64_t{1} << 32, ElementType::kBf16), 0U);
  EXPECT_EQ(WorkspaceBytes(kShape, 1, static_cast<ElementType>(9)), 0U);
}

TEST(GatherPrefix, ReportsDamage) {
  for (const Executor* executor : {static_cast<const Executor*>(nullptr), &kExecutor}) {
    Prefix prefix({}, false);
    std::vector<std::byte> bytes(WorkspaceBytes(kShape, kTokens, ElementType::kBf16));
    GatherPrefixArgs args =
        prefix.Args(DenseWorkspace(kShape, kTokens, ElementType::kBf16, bytes.data()));
    args.executor = executor;
    EXPECT_TRUE(GatherPrefix(args).ok());
    prefix.Tile(4, 2).back() = std::byte{0x7F};
    EXPECT_EQ(GatherPrefix(args).code(), StatusCode::kDataLoss);
    args.sealed_token_count = 64;  // Without the damaged block.
    EXPECT_TRUE(GatherPrefix(args).ok());
  }
}

TEST(GatherPrefix, RefusesBadArgumentsAndWritesNothing) {
  const Prefix prefix({}, true);
  std::vector<std::byte> bytes(WorkspaceBytes(kShape, kTokens, ElementType::kBf16),
                               std::byte{0x5A});
  const WorkspaceRows rows = DenseWorkspace(kShape, kTokens, ElementType::kBf16, bytes.data());
  const auto expect_invalid = [&](const char* what, const auto& change) {
    GatherPrefixArgs args = prefix.Args(rows);
    change(&args);
    EXPECT_EQ(GatherPrefix(args).code(), StatusCode::kInvalidArgument) << what;
  };
  using Args = GatherPrefixArgs;
  const float bad[] = {1.0F, 1.0F, 0.7F};
  const std::vector<float> zeros(uint64_t{3} * 80);
  const std::vector<const std::byte*> nulls(kBlocks, nullptr);
  const Executor no_run{};
  const uint32_t page = 0;
  expect_invalid("shape", [](Args* a) { a->block_shape.head_dim = 72; });
  expect_invalid("layer", [](Args* a) { a->layer_idx = 2; });
  expect_invalid("formats", [](Args* a) { a->layer_formats = a->layer_formats.first(1); });
  expect_invalid("g_k", [](Args* a) { a->g_k = a->g_k.first(2); });
  expect_invalid("g_v", [&](Args* a) { a->g_v = bad; });
  expect_invalid("mean", [&](Args* a) { a->k_mean = bad; });
  expect_invalid("smooth", [&](Args* a) { a->k_smooth = zeros; });
  expect_invalid("table", [](Args* a) { a->block_table = a->block_table.first(4); });
  expect_invalid("null", [&](Args* a) { a->block_table = nulls; });
  expect_invalid("part of a block", [](Args* a) { a->sealed_token_count = 15; });
  expect_invalid("huge", [](Args* a) { a->sealed_token_count = uint64_t{1} << 32; });
  expect_invalid("k", [](Args* a) { a->target.k = nullptr; });
  expect_invalid("v", [](Args* a) { a->target.v = nullptr; });
  expect_invalid("type", [](Args* a) { a->target.type = static_cast<ElementType>(7); });
  expect_invalid("token stride", [](Args* a) { a->target.token_stride = 79; });
  expect_invalid("head stride", [](Args* a) { a->target.head_stride = 79; });
  expect_invalid("scale", [](Args* a) { a->target.v_scale = -1.0F; });
  expect_invalid("pages", [&](Args* a) {
    a->target.paging = {.page_table = &page, .page_table_count = 1, .page_tokens = 79};
  });
  expect_invalid("isa", [](Args* a) { a->isa = static_cast<Isa>(99); });
  expect_invalid("executor", [&](Args* a) { a->executor = &no_run; });
  for (const std::byte byte : bytes) ASSERT_EQ(byte, std::byte{0x5A});
}

}  // namespace
}  // namespace kvtier::kernels
