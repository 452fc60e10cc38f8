// SPDX-License-Identifier: Apache-2.0
#include "kernels/scale_set.h"

#include <cstddef>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace kvtier::kernels {
namespace {

// 3 layers of 2 kv heads, every value different.
struct Case {
  std::vector<float> g_k = {1, 2, 4, 8, 16, 32};
  std::vector<float> g_v = {0.5F, 0.25F, 0x1p-100F, 0x1p100F, 1, 2};
  std::vector<float> k_mean = std::vector<float>(6 * 64);
  std::vector<float> k_smooth = std::vector<float>(6 * 64);
  std::vector<LayerFormat> formats = std::vector<LayerFormat>(3);
  ScaleSet set;

  Case() {
    for (size_t i = 0; i < k_mean.size(); ++i) {
      k_mean[i] = static_cast<float>(i) - 100.0F;
      k_smooth[i] = static_cast<float>(i) + 1.0F;
    }
    set = {.layer_count = 3,
           .kv_head_count = 2,
           .head_dim = 64,
           .g_k = g_k,
           .g_v = g_v,
           .k_mean = k_mean,
           .k_smooth = k_smooth,
           .layer_formats = formats};
  }
};

TEST(ScaleSetTest, AcceptsWhatItSays) {
  Case c;
  EXPECT_TRUE(Validate(c.set).ok());
  c.set.k_mean = {};
  c.set.k_smooth = {};
  c.set.layer_formats = {};
  EXPECT_TRUE(Validate(c.set).ok());
  // An FP8 side has any scale, a BF16 side none.
  c.formats[1] = {.k = SideFormat::kFp8, .v = SideFormat::kBf16};
  c.set.layer_formats = c.formats;
  c.g_k[2] = 0.3F;
  c.g_v[2] = c.g_v[3] = 1.0F;
  EXPECT_TRUE(Validate(c.set).ok());
}

TEST(ScaleSetTest, RefusesEverythingElse) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<std::pair<const char*, std::function<void(Case*)>>> cases = {
      {"layers", [](Case* c) { c->set.layer_count = 0; }},
      {"heads", [](Case* c) { c->set.kv_head_count = 0; }},
      {"more layers", [](Case* c) { c->set.layer_count = 4; }},
      {"dim", [](Case* c) { c->set.head_dim = 63; }},
      {"another dim", [](Case* c) { c->set.head_dim = 80; }},
      {"search", [](Case* c) { c->set.search = static_cast<ScaleSearch>(2); }},
      {"g_k short", [](Case* c) { c->set.g_k = std::span(c->g_k).first(5); }},
      {"g_v short", [](Case* c) { c->set.g_v = {}; }},
      {"g_k 3", [](Case* c) { c->g_k[5] = 3; }},
      {"g_v 0", [](Case* c) { c->g_v[0] = 0; }},
      {"g_v inf", [=](Case* c) { c->g_v[0] = inf; }},
      {"g_k negative", [](Case* c) { c->g_k[0] = -1; }},
      {"g_k tiny", [](Case* c) { c->g_k[0] = 0x1p-101F; }},
      {"mean short", [](Case* c) { c->set.k_mean = std::span(c->k_mean).first(64); }},
      {"mean inf", [=](Case* c) { c->k_mean[7] = inf; }},
      {"smooth 0", [](Case* c) { c->k_smooth[383] = 0; }},
      {"smooth without reciprocal", [](Case* c) { c->k_smooth[0] = 0x1p-140F; }},
      {"formats short", [](Case* c) { c->set.layer_formats = std::span(c->formats).first(2); }},
      {"format", [](Case* c) { c->formats[2].v = static_cast<SideFormat>(3); }},
      {"fp8 scale 0",
       [](Case* c) {
         c->formats[0].k = SideFormat::kFp8;
         c->g_k[1] = 0;
       }},
      {"fp8 scale without reciprocal",
       [](Case* c) {
         c->formats[0].k = SideFormat::kFp8;
         c->g_k[1] = 0x1p-140F;
       }},
      {"bf16 scale 2", [](Case* c) { c->formats[0].k = SideFormat::kBf16; }},
  };
  for (const auto& [name, damage] : cases) {
    Case c;
    damage(&c);
    EXPECT_EQ(Validate(c.set).code(), StatusCode::kInvalidArgument) << name;
  }
}

TEST(ScaleSetTest, HandsOutTheScalesOfLayerAndHead) {
  Case c;
  c.set.search = ScaleSearch::kFourOverSix;
  const SealOptions options = SealOptionsOf(c.set, 2, 1, Isa::kScalar);
  EXPECT_EQ(options.g_k, 32.0F);
  EXPECT_EQ(options.g_v, 2.0F);
  EXPECT_EQ(options.search, ScaleSearch::kFourOverSix);
  EXPECT_EQ(options.isa, Isa::kScalar);
  EXPECT_EQ(options.k_mean.data(), &c.k_mean[5 * 64]);
  EXPECT_EQ(options.k_mean.size(), 64U);
  EXPECT_EQ(options.k_smooth.data(), &c.k_smooth[5 * 64]);

  DecodeArgs args;
  args.layer_idx = 1;
  SetScales(c.set, &args);
  EXPECT_EQ(args.g_k.data(), &c.g_k[2]);
  EXPECT_EQ(args.g_k.size(), 2U);
  EXPECT_EQ(args.g_v.data(), &c.g_v[2]);
  EXPECT_EQ(args.k_mean.data(), &c.k_mean[2 * 64]);
  EXPECT_EQ(args.k_mean.size(), 2 * 64U);
  EXPECT_EQ(args.k_smooth.data(), &c.k_smooth[2 * 64]);
  EXPECT_EQ(args.layer_formats.size(), 3U);
  c.formats[1].v = SideFormat::kFp8;
  EXPECT_EQ(LayerFormatOf(c.set, 1), c.formats[1]);
  EXPECT_EQ(LayerFormatOf(c.set, 2), LayerFormat{});
  c.set.layer_formats = {};
  EXPECT_EQ(LayerFormatOf(c.set, 1), LayerFormat{});

  c.set.k_mean = {};
  EXPECT_TRUE(SealOptionsOf(c.set, 0, 0).k_mean.empty());
  SetScales(c.set, &args);
  EXPECT_TRUE(args.k_mean.empty());
}

TEST(ScaleSetTest, SealAndDecodeAcceptWhatItHandsOut) {
  Case c;
  c.set.layer_count = 1;
  c.set.g_k = c.set.g_k.first(2);
  c.set.g_v = c.set.g_v.first(2);
  c.set.k_mean = c.set.k_mean.first(128);
  c.set.k_smooth = c.set.k_smooth.first(128);
  c.set.layer_formats = {};
  ASSERT_TRUE(Validate(c.set).ok());
  const BlockShape shape{.layer_count = 1, .kv_head_count = 2, .block_tokens = 16, .head_dim = 64};
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> rows(16 * 64);
  for (float& value : rows) value = normal(random);
  const ConstRows view{.type = ElementType::kFp32, .data = rows.data(), .token_stride = 64};
  std::vector<std::byte> block(BlockBytes(shape));
  SealStats stats;
  for (uint32_t head = 0; head < 2; ++head) {
    const std::span tile =
        std::span(block).subspan(TileOffset(shape, 0, head), TileBytes(TileOf(shape)));
    ASSERT_TRUE(
        SealTile(TileOf(shape), view, view, SealOptionsOf(c.set, 0, head), tile, &stats).ok());
  }
  const std::byte* table[] = {block.data()};
  std::vector<float> query(2 * 64, 0.1F);
  std::vector<float> out(2 * 64);
  std::vector<float> lse(2);
  DecodeArgs args;
  args.block_shape = shape;
  args.query = query.data();
  args.query_head_count = 2;
  args.block_table = table;
  args.sealed_token_count = 16;
  args.softmax_scale = 0.125F;
  args.out = out;
  args.lse = lse;
  SetScales(c.set, &args);
  const Status status = Decode(args);
  EXPECT_TRUE(status.ok()) << status.message();
}

TEST(StaleScaleMonitorTest, JudgesFullWindows) {
  StaleScaleMonitor monitor({.saturated_share_max = 0.01, .window_vectors = 1'000});
  EXPECT_FALSE(monitor.stale());
  // A share of 0.5 that is not yet a full window says nothing.
  monitor.Add(500, {.saturated_count = 250});
  EXPECT_FALSE(monitor.stale());
  monitor.Add(500, {.saturated_count = 0});
  EXPECT_TRUE(monitor.stale());
  EXPECT_EQ(monitor.saturated_share(), 0.25);
  // The verdict stays until the next window is full.
  monitor.Add(999, {.saturated_count = 10});
  EXPECT_TRUE(monitor.stale());
  monitor.Add(1, {.saturated_count = 0});
  EXPECT_EQ(monitor.saturated_share(), 0.01);
  EXPECT_FALSE(monitor.stale());
}

TEST(StaleScaleMonitorTest, DefaultToleratesAnOutlierNotAShift) {
  constexpr TileShape kShape{.block_tokens = 64, .head_dim = 128};
  EXPECT_EQ(TileVectorCount(kShape), 1'024U);
  StaleScaleMonitor monitor;
  const auto fill = [&](uint64_t saturated_per_tile) {
    for (int tile = 0; tile < 4'096; ++tile) {
      monitor.Add(TileVectorCount(kShape),
                  {.saturated_count = tile % 16 == 0 ? saturated_per_tile : 0});
    }
  };
  fill(1);
  EXPECT_FALSE(monitor.stale());
  fill(2);
  EXPECT_TRUE(monitor.stale());
  fill(0);
  EXPECT_FALSE(monitor.stale());
}

}  // namespace
}  // namespace kvtier::kernels
