// SPDX-License-Identifier: Apache-2.0
//
// Arguments that no caller should pass: every one of them, and every mixture, is answered by a
// status before anything is read or written.
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/calibrate.h"
#include "kernels/decode.h"
#include "kernels/engine_pages.h"
#include "kernels/engine_pages_layouts.h"
#include "kernels/gather.h"
#include "kernels/mla.h"
#include "kernels/scale_set.h"
#include "kernels/seal.h"
#include "kernels/workspace.h"

namespace kvtier::kernels {
namespace {

constexpr uint32_t kSeed = 20261129;
constexpr TileShape kShape{.block_tokens = 16, .head_dim = 64};
constexpr MlaShape kMlaTile{.block_tokens = 16};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kDenormal = 1e-42F;  // Its reciprocal is infinite.
constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();

template <typename T>
std::span<T> Null(size_t count) {
  return std::span<T>(static_cast<T*>(nullptr), count);
}

// One way to spoil arguments of type Args.
template <typename Args>
using Spoil = std::pair<const char*, std::function<void(Args*)>>;

// Calls with each spoiled argument, and with random mixtures of them.
template <typename Args>
void ExpectAllRefused(const Args& good, const std::vector<Spoil<Args>>& spoils,
                      const std::function<Status(const Args&)>& call) {
  ASSERT_TRUE(call(good).ok()) << call(good).message();
  for (const auto& [name, spoil] : spoils) {
    Args args = good;
    spoil(&args);
    EXPECT_EQ(call(args).code(), StatusCode::kInvalidArgument) << name;
  }
  std::mt19937 random(kSeed);
  for (int i = 0; i < 2000; ++i) {
    Args args = good;
    std::string names = "seed " + std::to_string(kSeed) + ":";
    for (uint32_t count = 1 + random() % 4; count > 0; --count) {
      const auto& [name, spoil] = spoils[random() % spoils.size()];
      spoil(&args);
      names += std::string(" ") + name;
    }
    // Two wrongs may make a right where one undoes the other: what matters is to come back.
    EXPECT_NE(call(args).code(), StatusCode::kUnavailable) << names;
  }
}

// What ConstRows and MutableRows can get wrong; `rows` finds them in the arguments.
template <typename Args, typename Rows>
void AddRows(const std::function<Rows*(Args*)>& rows, std::vector<Spoil<Args>>* spoils) {
  static const uint32_t kTable[] = {0, 4'000'000'000U};
  const std::vector<Spoil<Rows>> all = {
      {"data", [](Rows* r) { r->data = nullptr; }},
      {"type", [](Rows* r) { r->type = static_cast<ElementType>(4); }},
      {"type 255", [](Rows* r) { r->type = static_cast<ElementType>(255); }},
      {"stride 0", [](Rows* r) { r->token_stride = 0; }},
      {"stride 63", [](Rows* r) { r->token_stride = 63; }},
      {"stride 2^60", [](Rows* r) { r->token_stride = uint64_t{1} << 60; }},
      {"stride huge", [](Rows* r) { r->token_stride = kHuge; }},
      {"scale 0", [](Rows* r) { r->scale = 0.0F; }},
      {"scale NaN", [](Rows* r) { r->scale = kNan; }},
      {"scale -1", [](Rows* r) { r->scale = -1.0F; }},
      {"scale inf", [](Rows* r) { r->scale = kInfinity; }},
      {"no table", [](Rows* r) { r->paging = {.page_table_count = 1, .page_tokens = 16}; }},
      {"short table",
       [](Rows* r) {
         r->paging = {.page_table = kTable, .page_table_count = 1, .page_tokens = 15};
       }},
      {"slot huge",
       [](Rows* r) {
         r->paging = {.page_table = kTable,
                      .page_table_count = 2,
                      .page_tokens = 16,
                      .first_slot = kHuge - 3};
       }},
      {"page stride huge",
       [](Rows* r) {
         r->paging = {.page_table = kTable,
                      .page_table_count = 2,
                      .page_tokens = 16,
                      .page_stride = kHuge / 8,
                      .first_slot = 16};
       }},
      {"page of 2^32 - 1",
       [](Rows* r) {
         r->token_stride = uint64_t{1} << 40;
         r->paging = {.page_table = kTable, .page_table_count = 2, .page_tokens = UINT32_MAX};
       }},
  };
  for (const auto& [name, spoil] : all) {
    spoils->emplace_back(name, [rows, spoil](Args* args) { spoil(rows(args)); });
  }
  if constexpr (std::is_same_v<Rows, MutableRows>) {
    spoils->emplace_back("scale denormal", [rows](Args* args) { rows(args)->scale = kDenormal; });
  }
}

class HostileArgs : public testing::Test {
 protected:
  std::vector<uint16_t> k_ = std::vector<uint16_t>(16 * 576, 0x3F80);
  std::vector<uint16_t> v_ = std::vector<uint16_t>(16 * 576, 0x3F80);
  std::vector<std::byte> tile_ = std::vector<std::byte>(MlaTileBytes(kMlaTile));
  std::vector<float> ones_ = std::vector<float>(4096, 1.0F);
  SealStats stats_;
};

struct SealArgs {
  TileShape shape = kShape;
  LayerFormat format = {};
  ConstRows k, v;
  SealOptions options = {};
  std::span<std::byte> dst;
  SealStats* stats = nullptr;
};

TEST_F(HostileArgs, SealTile) {
  const ConstRows rows{.data = k_.data(), .token_stride = 64};
  const SealArgs good{
      .k = rows,
      .v = rows,
      .options = {.k_mean = std::span(ones_).first(64), .k_smooth = std::span(ones_).first(64)},
      .dst = std::span(tile_).first(TileBytes(kShape)),
      .stats = &stats_};
  std::vector<Spoil<SealArgs>> spoils = {
      {"tokens 0", [](SealArgs* a) { a->shape.block_tokens = 0; }},
      {"tokens max", [](SealArgs* a) { a->shape.block_tokens = UINT32_MAX; }},
      {"dim 72", [](SealArgs* a) { a->shape.head_dim = 72; }},
      {"dim max", [](SealArgs* a) { a->shape.head_dim = UINT32_MAX - 15; }},
      {"format", [](SealArgs* a) { a->format.k = static_cast<SideFormat>(3); }},
      {"g 3", [](SealArgs* a) { a->options.g_k = 3.0F; }},
      {"g NaN", [](SealArgs* a) { a->options.g_v = kNan; }},
      {"g -1", [](SealArgs* a) { a->options.g_v = -1.0F; }},
      {"g 2^-101", [](SealArgs* a) { a->options.g_k = 0x1p-101F; }},
      {"search", [](SealArgs* a) { a->options.search = static_cast<ScaleSearch>(2); }},
      {"isa", [](SealArgs* a) { a->options.isa = static_cast<Isa>(77); }},
      {"null mean", [](SealArgs* a) { a->options.k_mean = Null<const float>(64); }},
      {"null smooth", [](SealArgs* a) { a->options.k_smooth = Null<const float>(64); }},
      {"mean of 63", [](SealArgs* a) { a->options.k_mean = a->options.k_mean.first(63); }},
      {"null dst", [](SealArgs* a) { a->dst = Null<std::byte>(TileBytes(kShape)); }},
      {"empty dst", [](SealArgs* a) { a->dst = {}; }},
      {"stats", [](SealArgs* a) { a->stats = nullptr; }}};
  AddRows<SealArgs, ConstRows>([](SealArgs* a) { return &a->k; }, &spoils);
  AddRows<SealArgs, ConstRows>([](SealArgs* a) { return &a->v; }, &spoils);
  ExpectAllRefused<SealArgs>(good, spoils, [](const SealArgs& a) {
    return SealTile(a.shape, a.format, a.k, a.v, a.options, a.dst, a.stats);
  });
}

struct GatherArgs {
  TileShape shape = kShape;
  LayerFormat format = {};
  std::span<const std::byte> tile;
  GatherOptions options = {};
  MutableRows k, v;
};

TEST_F(HostileArgs, GatherTile) {
  const GatherArgs good{.tile = std::span(tile_).first(TileBytes(kShape)),
                        .k = {.data = k_.data(), .token_stride = 64},
                        .v = {.data = v_.data(), .token_stride = 64}};
  std::vector<Spoil<GatherArgs>> spoils = {
      {"tokens", [](GatherArgs* a) { a->shape.block_tokens = 24; }},
      {"format", [](GatherArgs* a) { a->format.v = static_cast<SideFormat>(200); }},
      {"null tile", [](GatherArgs* a) { a->tile = Null<const std::byte>(TileBytes(kShape)); }},
      {"short tile", [](GatherArgs* a) { a->tile = a->tile.first(a->tile.size() - 1); }},
      {"g 0", [](GatherArgs* a) { a->options.g_k = 0.0F; }},
      {"null mean", [](GatherArgs* a) { a->options.k_mean = Null<const float>(64); }},
      {"isa", [](GatherArgs* a) { a->options.isa = static_cast<Isa>(4); }}};
  AddRows<GatherArgs, MutableRows>([](GatherArgs* a) { return &a->k; }, &spoils);
  AddRows<GatherArgs, MutableRows>([](GatherArgs* a) { return &a->v; }, &spoils);
  ExpectAllRefused<GatherArgs>(good, spoils, [](const GatherArgs& a) {
    return GatherTile(a.shape, a.format, a.tile, a.options, a.k, a.v);
  });
}

struct MlaArgs {
  MlaShape shape = kMlaTile;
  ConstRows latent, rope;
  MlaSealOptions options = {};
  std::span<std::byte> dst;
};

TEST_F(HostileArgs, SealMlaTile) {
  const ConstRows rows{.data = k_.data(), .token_stride = 576};
  const MlaArgs good{.latent = rows, .rope = rows, .dst = tile_};
  std::vector<Spoil<MlaArgs>> spoils = {
      {"dims", [](MlaArgs* a) { a->shape.latent_dim = 256; }},
      {"rope", [](MlaArgs* a) { a->shape.rope_dim = 0; }},
      {"g", [](MlaArgs* a) { a->options.g = 0.3F; }},
      {"search", [](MlaArgs* a) { a->options.search = static_cast<ScaleSearch>(9); }},
      {"null dst", [](MlaArgs* a) { a->dst = Null<std::byte>(a->dst.size()); }}};
  AddRows<MlaArgs, ConstRows>([](MlaArgs* a) { return &a->latent; }, &spoils);
  AddRows<MlaArgs, ConstRows>([](MlaArgs* a) { return &a->rope; }, &spoils);
  ExpectAllRefused<MlaArgs>(good, spoils, [this](const MlaArgs& a) {
    return SealMlaTile(a.shape, a.latent, a.rope, a.options, a.dst, &stats_);
  });
  EXPECT_EQ(ValidateMlaTile(kMlaTile, Null<const std::byte>(tile_.size())).code(),
            StatusCode::kInvalidArgument);
}

TEST_F(HostileArgs, Decode) {
  const std::vector<const std::byte*> table = {tile_.data(), tile_.data()};
  std::vector<float> out(2 * 64), lse(2);
  const DecodeTail tail{
      .k = k_.data(), .v = v_.data(), .token_count = 3, .token_stride = 64, .head_stride = 64};
  const DecodeArgs good{
      .block_shape = {.layer_count = 1, .kv_head_count = 1, .block_tokens = 16, .head_dim = 64},
      .query = ones_.data(),
      .query_head_count = 2,
      .block_table = table,
      .sealed_token_count = 32,
      .tail = tail,
      .softmax_scale = 0.1F,
      .g_k = std::span(ones_).first(1),
      .g_v = std::span(ones_).first(1),
      .out = out,
      .lse = lse};
  using A = DecodeArgs;
  static const Executor kNoRun{};
  const std::vector<Spoil<A>> spoils = {
      {"layers", [](A* a) { a->block_shape.layer_count = UINT32_MAX; }},
      {"kv heads", [](A* a) { a->block_shape.kv_head_count = 0; }},
      {"layer", [](A* a) { a->layer_idx = 1; }},
      {"query type", [](A* a) { a->query_type = ElementType::kFp8E4m3; }},
      {"query", [](A* a) { a->query = nullptr; }},
      {"heads 0", [](A* a) { a->query_head_count = 0; }},
      {"heads max", [](A* a) { a->query_head_count = UINT32_MAX; }},
      {"query_len 0", [](A* a) { a->query_len = 0; }},
      {"query_len max", [](A* a) { a->query_len = UINT32_MAX; }},
      {"null table", [](A* a) { a->block_table = Null<const std::byte* const>(2); }},
      {"empty table", [](A* a) { a->block_table = {}; }},
      {"sealed 33", [](A* a) { a->sealed_token_count = 33; }},
      {"sealed huge", [](A* a) { a->sealed_token_count = kHuge - 15; }},
      {"tail null", [](A* a) { a->tail.v = nullptr; }},
      {"tail stride", [](A* a) { a->tail.token_stride = 1; }},
      {"tail stride huge", [](A* a) { a->tail.token_stride = kHuge / 2; }},
      {"tail count and stride",
       [](A* a) {
         a->tail.token_count = UINT32_MAX;
         a->tail.token_stride = uint64_t{1} << 40;
       }},
      {"tail type", [](A* a) { a->tail.type = ElementType::kFp16; }},
      {"tail scale", [](A* a) { a->tail.k_scale = kNan; }},
      {"scale", [](A* a) { a->softmax_scale = kNan; }},
      {"null g", [](A* a) { a->g_k = Null<const float>(1); }},
      {"no g", [](A* a) { a->g_v = {}; }},
      {"null out", [](A* a) { a->out = Null<float>(a->out.size()); }},
      {"null lse", [](A* a) { a->lse = Null<float>(a->lse.size()); }},
      {"first", [](A* a) { a->first_token = kHuge; }},
      {"context", [](A* a) { a->context_token_count = 34; }},
      {"cap", [](A* a) { a->soft_cap = kInfinity; }},
      {"null sinks", [](A* a) { a->sinks = Null<const float>(2); }},
      {"null smooth", [](A* a) { a->k_smooth = Null<const float>(64); }},
      {"null mean", [](A* a) { a->k_mean = Null<const float>(64); }},
      {"null formats", [](A* a) { a->layer_formats = Null<const LayerFormat>(1); }},
      {"isa", [](A* a) { a->isa = static_cast<Isa>(255); }},
      {"executor", [](A* a) { a->executor = &kNoRun; }}};
  ExpectAllRefused<A>(good, spoils, [](const A& a) {
    static_cast<void>(DecodeWorkspaceBytes(a));
    return Decode(a);
  });
}

TEST_F(HostileArgs, DecodeMla) {
  const std::vector<const std::byte*> table = {tile_.data()};
  std::vector<float> out(512), lse(1);
  const DecodeMlaArgs good{.block_shape = {.layer_count = 1, .tile = kMlaTile},
                           .query = ones_.data(),
                           .query_head_count = 1,
                           .block_table = table,
                           .sealed_token_count = 16,
                           .tail = {.latent = k_.data(),
                                    .rope = k_.data(),
                                    .token_count = 2,
                                    .latent_stride = 576,
                                    .rope_stride = 576},
                           .softmax_scale = 0.1F,
                           .out = out,
                           .lse = lse};
  using A = DecodeMlaArgs;
  const std::vector<Spoil<A>> spoils = {
      {"layers", [](A* a) { a->block_shape.layer_count = 0; }},
      {"heads", [](A* a) { a->query_head_count = UINT32_MAX; }},
      {"query", [](A* a) { a->query = nullptr; }},
      {"null table", [](A* a) { a->block_table = Null<const std::byte* const>(1); }},
      {"sealed", [](A* a) { a->sealed_token_count = kHuge - 15; }},
      {"latent", [](A* a) { a->tail.latent = nullptr; }},
      {"latent stride", [](A* a) { a->tail.latent_stride = kHuge; }},
      {"rope stride", [](A* a) { a->tail.rope_stride = kHuge; }},
      {"g", [](A* a) { a->g = kNan; }},
      {"null out", [](A* a) { a->out = Null<float>(512); }},
      {"null lse", [](A* a) { a->lse = Null<float>(1); }},
      {"null sinks", [](A* a) { a->sinks = Null<const float>(1); }},
      {"query_len", [](A* a) { a->query_len = 9; }}};
  ExpectAllRefused<A>(good, spoils, [](const A& a) {
    static_cast<void>(DecodeMlaWorkspaceBytes(a));
    return DecodeMla(a);
  });
}

TEST_F(HostileArgs, GatherPrefix) {
  const std::vector<const std::byte*> table = {tile_.data()};
  using A = GatherPrefixArgs;
  const A good{
      .block_shape = {.layer_count = 1, .kv_head_count = 2, .block_tokens = 16, .head_dim = 64},
      .block_table = table,
      .sealed_token_count = 16,
      .g_k = std::span(ones_).first(2),
      .g_v = std::span(ones_).first(2),
      .target = {.type = ElementType::kBf16,
                 .k = k_.data(),
                 .v = v_.data(),
                 .token_stride = 128,
                 .head_stride = 64}};
  const std::vector<Spoil<A>> spoils = {
      {"heads", [](A* a) { a->block_shape.kv_head_count = 65537; }},
      {"null table", [](A* a) { a->block_table = Null<const std::byte* const>(1); }},
      {"sealed", [](A* a) { a->sealed_token_count = uint64_t{1} << 32; }},
      {"null g", [](A* a) { a->g_v = Null<const float>(2); }},
      {"null formats", [](A* a) { a->layer_formats = Null<const LayerFormat>(1); }},
      {"null mean", [](A* a) { a->k_mean = Null<const float>(128); }},
      {"null k", [](A* a) { a->target.k = nullptr; }},
      {"head stride", [](A* a) { a->target.head_stride = kHuge; }},
      {"token stride", [](A* a) { a->target.token_stride = kHuge; }},
      {"scale", [](A* a) { a->target.v_scale = kDenormal; }}};
  // The tile buffer is as long as two heads need.
  ASSERT_GE(tile_.size(), BlockBytes(good.block_shape));
  ExpectAllRefused<A>(good, spoils, [](const A& a) { return GatherPrefix(a); });
}

TEST_F(HostileArgs, Calibration) {
  using enum StatusCode;
  std::vector<ChannelStats> stats(64);
  const ConstRows rows{.data = k_.data(), .token_stride = 64};
  ASSERT_TRUE(Observe(rows, 16, stats).ok());
  EXPECT_EQ(Observe(rows, 16, Null<ChannelStats>(64)).code(), kInvalidArgument);
  EXPECT_EQ(Merge(Null<const ChannelStats>(64), stats).code(), kInvalidArgument);
  EXPECT_EQ(Merge(stats, Null<ChannelStats>(64)).code(), kInvalidArgument);
  EXPECT_EQ(
      ChooseTransform(stats, {.mean = true, .token_count_min = 1}, Null<float>(64), {}).code(),
      kInvalidArgument);
  float amax = 7.0F;
  const std::span<const float> ones = std::span(ones_).first(64);
  std::vector<float> bad = ones_;
  for (const float x : {kNan, kInfinity, 0.0F, -1.0F, kDenormal}) {
    bad[5] = x;
    EXPECT_EQ(AmaxOf(stats, ones, std::span(bad).first(64), &amax).code(), kInvalidArgument) << x;
  }
  bad[5] = kNan;
  EXPECT_EQ(AmaxOf(stats, std::span(bad).first(64), {}, &amax).code(), kInvalidArgument);
  EXPECT_EQ(AmaxOf(stats, Null<const float>(64), {}, &amax).code(), kInvalidArgument);
  EXPECT_EQ(AmaxOf(Null<const ChannelStats>(64), {}, {}, &amax).code(), kInvalidArgument);
  EXPECT_EQ(amax, 7.0F);
  EXPECT_EQ(AmaxOf(stats, {}, {}, nullptr).code(), kInvalidArgument);
  EXPECT_EQ(GlobalScaleFromAmax(1.0F, nullptr).code(), kInvalidArgument);
}

TEST_F(HostileArgs, ScaleSet) {
  const ScaleSet good{.layer_count = 1,
                      .kv_head_count = 1,
                      .head_dim = 64,
                      .g_k = std::span(ones_).first(1),
                      .g_v = std::span(ones_).first(1)};
  const std::vector<Spoil<ScaleSet>> spoils = {
      {"null g", [](ScaleSet* s) { s->g_k = Null<const float>(1); }},
      {"null mean", [](ScaleSet* s) { s->k_mean = Null<const float>(64); }},
      {"null formats", [](ScaleSet* s) { s->layer_formats = Null<const LayerFormat>(1); }},
      {"layers", [](ScaleSet* s) { s->layer_count = UINT32_MAX; }}};
  ExpectAllRefused<ScaleSet>(good, spoils, [](const ScaleSet& s) { return Validate(s); });
}

TEST_F(HostileArgs, MergeDecode) {
  std::vector<float> out(64), lse(1);
  const DecodePartial partial{.out = std::span(ones_).first(64), .lse = std::span(ones_).first(1)};
  const auto merge = [&](const DecodePartial& part, std::span<float> to) {
    return MergeDecode(std::span(&part, 1), 1, 64, to, lse).code();
  };
  EXPECT_EQ(merge(partial, out), StatusCode::kOk);
  EXPECT_EQ(merge(partial, Null<float>(64)), StatusCode::kInvalidArgument);
  EXPECT_EQ(merge({.out = Null<const float>(64), .lse = partial.lse}, out),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(MergeDecode(Null<const DecodePartial>(3), 1, 64, out, lse).code(),
            StatusCode::kInvalidArgument);
}

TEST_F(HostileArgs, EnginePages) {
  const EnginePageLayout layout =
      VllmHnd({.kv_head_count = 1, .head_dim = 64, .page_tokens = 16}, ScaleOrder::kLinear);
  std::vector<std::byte> page(layout.k.codes.page_stride);
  const auto tile = std::span(tile_).first(TileBytes(kShape));
  ConstEnginePages pages = OneBuffer(std::span<const std::byte>(page));
  const GlobalScales scales{.k = 1.0F, .v = 1.0F};
  ASSERT_TRUE(ImportTile(kShape, layout, pages, scales, tile).ok());
  EXPECT_EQ(ImportTile(kShape, layout, pages, scales, Null<std::byte>(tile.size())).code(),
            StatusCode::kInvalidArgument);
  pages.page_table = Null<const uint32_t>(1);
  EXPECT_EQ(ImportTile(kShape, layout, pages, scales, tile).code(), StatusCode::kInvalidArgument);
  pages = OneBuffer(Null<const std::byte>(page.size()));
  EXPECT_EQ(ImportTile(kShape, layout, pages, scales, tile).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(RequantizeTile(kShape, layout, OneBuffer(std::span<const std::byte>(page)), scales, {},
                           Null<std::byte>(tile.size()), &stats_)
                .code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvtier::kernels
