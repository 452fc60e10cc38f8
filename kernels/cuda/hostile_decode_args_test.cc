// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/decode_plan.h"
#include "kernels/cuda/hostile_args.h"
#include "kernels/cuda/mla_decode_plan.h"
#include "kernels/decode.h"
#include "kernels/mla.h"

// Hostile arguments of decode.

namespace kvtier::kernels::cuda {
namespace {

constexpr DeviceLimits kCard{.multiprocessor_count = 2, .shared_bytes_per_block = 101376};

// Of both kinds of decode.
template <typename A>
std::vector<Spoil<A>> DecodeSpoils() {
  return {{"no layers", Who::kBoth, [](A* a) { a->block_shape.layer_count = 0; }},
          {"layers max", Who::kBoth, [](A* a) { a->block_shape.layer_count = UINT32_MAX; }},
          {"no table", Who::kBoth, [](A* a) { a->block_table = nullptr; }},
          {"query type", Who::kBoth, [](A* a) { a->query_type = ElementType::kFp8E4m3; }},
          {"query", Who::kBoth, [](A* a) { a->query = nullptr; }},
          {"heads 0", Who::kBoth, [](A* a) { a->query_head_count = 0; }},
          {"query_len 0", Who::kBoth, [](A* a) { a->query_len = 0; }},
          {"query_len 9", Who::kBoth, [](A* a) { a->query_len = 9; }},
          {"query_len max", Who::kBoth, [](A* a) { a->query_len = UINT32_MAX; }},
          {"scale NaN", Who::kBoth, [](A* a) { a->softmax_scale = kNan; }},
          {"cap inf", Who::kBoth, [](A* a) { a->soft_cap = HUGE_VALF; }},
          {"cap -1", Who::kBoth, [](A* a) { a->soft_cap = -1.0F; }},
          {"out", Who::kBoth, [](A* a) { a->out = nullptr; }},
          {"batch 0", Who::kDevice, [](A* a) { a->batch_size = 0; }},
          {"batch max", Who::kDevice, [](A* a) { a->batch_size = UINT32_MAX; }},
          {"table max", Who::kDevice, [](A* a) { a->table_stride = UINT32_MAX; }},
          {"out type", Who::kDevice, [](A* a) { a->out_type = ElementType::kFp16; }},
          {"lse + 1", Who::kDevice,
           [](A* a) { a->lse = static_cast<float*>(Misaligned(static_cast<void*>(a->lse))); }},
          {"damage + 1", Who::kDevice,
           [](A* a) {
             a->damage_count = static_cast<uint32_t*>(Misaligned(static_cast<void*>(a->lse)));
           }},
          {"no workspace", Who::kDevice, [](A* a) { a->workspace = nullptr; }},
          {"workspace + 16", Who::kDevice,
           // Of null, too, which a pointer cannot be asked for.
           [](A* a) {
             // NOLINTNEXTLINE(performance-no-int-to-ptr)
             a->workspace = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(a->workspace) + 16);
           }}};
}

// The CPU's arguments that both kinds of decode have. `lse` cannot be left out there.
template <typename CpuArgs, typename A>
CpuArgs CpuDecodeArgs(const A& a, uint64_t out_dims, std::span<float> lse) {
  CpuArgs args;
  args.block_shape = a.block_shape;
  args.query_type = a.query_type;
  args.query = a.query;
  args.query_head_count = a.query_head_count;
  args.block_table = {reinterpret_cast<const std::byte* const*>(a.block_table), 2};
  args.sealed_token_count = a.sealed_token_counts[0];
  args.softmax_scale = a.softmax_scale;
  args.query_len = a.query_len;
  args.window = a.window;
  args.soft_cap = a.soft_cap;
  const uint64_t rows = uint64_t{a.query_len} * a.query_head_count;
  args.out = {static_cast<float*>(a.out), rows * out_dims};
  args.lse = lse.first(std::min<uint64_t>(rows, lse.size()));
  return args;
}

TEST_F(CudaHostileArgs, DecodeBatch) {
  using A = DecodeBatchArgs;
  emu::DeviceBuffer<float> out(1024), lse(16);
  const emu::DeviceBuffer<const void*> table = {tile_.data(), tile_.data()};
  const emu::DeviceBuffer<const void*> tails = {rows_.data()};
  const emu::DeviceBuffer<uint32_t> sealed = {32}, tail_tokens = {3};
  const A good{.block_shape = {.layer_count = 1,
                               .kv_head_count = 2,
                               .block_tokens = kTokens,
                               .head_dim = 64},
               .batch_size = 1,
               .block_table = table.data(),
               .table_stride = 2,
               .sealed_token_counts = sealed.data(),
               .tails = {.token_counts = tail_tokens.data(),
                         .k = tails.data(),
                         .v = tails.data(),
                         .token_stride = 512,
                         .head_stride = 256},
               .query_type = ElementType::kFp32,
               .query = ones_.data(),
               .query_head_count = 4,
               .softmax_scale = 0.1F,
               .g_k = ones_.data(),
               .g_v = ones_.data(),
               .out_type = ElementType::kFp32,
               .out = out.data(),
               .lse = lse.data(),
               .workspace = workspace_.data()};
  std::vector<Spoil<A>> spoils = DecodeSpoils<A>();
  const std::vector<Spoil<A>> own = {
      {"dim 72", Who::kBoth, [](A* a) { a->block_shape.head_dim = 72; }},
      {"dim 80", Who::kDevice,
       [](A* a) {
         if (a->block_shape.head_dim == 64) a->block_shape.head_dim = 80;
       }},
      {"tokens 17", Who::kBoth, [](A* a) { a->block_shape.block_tokens = 17; }},
      {"no kv heads", Who::kBoth, [](A* a) { a->block_shape.kv_head_count = 0; }},
      {"heads 5", Who::kBoth, [](A* a) { a->query_head_count = 5; }},
      {"heads max", Who::kBoth, [](A* a) { a->query_head_count = UINT32_MAX - 1; }},
      {"format", Who::kBoth, [](A* a) { a->layer_format.v = static_cast<SideFormat>(3); }},
      {"offset 8", Who::kDevice, [](A* a) { a->layer_offset = 8; }},
      {"offset huge", Who::kDevice, [](A* a) { a->layer_offset = kHuge; }},
      {"no g", Who::kBoth, [](A* a) { a->g_k = nullptr; }},
      {"no tail data", Who::kBoth, [](A* a) { a->tails.v = nullptr; }},
      {"tail type", Who::kBoth, [](A* a) { a->tails.type = ElementType::kFp16; }},
      {"tail stride 0", Who::kBoth, [](A* a) { a->tails.token_stride = 0; }},
      {"tail stride huge", Who::kBoth, [](A* a) { a->tails.token_stride = kHuge; }},
      {"tail head stride huge", Who::kBoth, [](A* a) { a->tails.head_stride = kHuge; }},
      {"tail stride 516", Who::kDevice, [](A* a) { a->tails.token_stride |= 4; }},
      {"tail scale NaN", Who::kBoth, [](A* a) { a->tails.k_scale = kNan; }},
      {"tail scale inf", Who::kBoth, [](A* a) { a->tails.v_scale = HUGE_VALF; }},
      {"tail scale 0", Who::kBoth, [](A* a) { a->tails.v_scale = 0.0F; }},
      {"smooth + 1", Who::kDevice,
       [](A* a) { a->k_smooth = static_cast<const float*>(Misaligned(kPageTable)); }}};
  spoils.insert(spoils.end(), own.begin(), own.end());
  const auto cpu = [&](const A& a) {
    auto args = CpuDecodeArgs<DecodeArgs>(a, a.block_shape.head_dim, lse);
    const std::vector<LayerFormat> formats = {a.layer_format};
    if (a.block_shape.layer_count == 1) args.layer_formats = formats;
    args.g_k = {a.g_k, a.block_shape.kv_head_count};
    args.g_v = {a.g_v, a.block_shape.kv_head_count};
    args.tail = {.k = a.tails.k == nullptr ? nullptr : a.tails.k[0],
                 .v = a.tails.v == nullptr ? nullptr : a.tails.v[0],
                 .token_count = 3,
                 .token_stride = a.tails.token_stride,
                 .head_stride = a.tails.head_stride,
                 .type = a.tails.type,
                 .k_scale = a.tails.k_scale,
                 .v_scale = a.tails.v_scale};
    return Decode(args);
  };
  const auto plan = [](const A& a) {
    DecodePlan unused;
    return PlanDecode(a, kCard, &unused);
  };
  ExpectAlike<A>(
      {cpu, plan, KVTIER_LAUNCH(DecodeBatch)}, good, spoils,
      {[](A*) {}, [](A* a) { a->layer_format = {SideFormat::kFp8, SideFormat::kBf16}; },
       [](A* a) { a->tails.type = ElementType::kFp8E4m3; }, [](A* a) { a->query_len = 2; }});
}

TEST_F(CudaHostileArgs, DecodeMlaBatch) {
  using A = DecodeMlaBatchArgs;
  emu::DeviceBuffer<float> out(4096), lse(16);
  const emu::DeviceBuffer<const void*> table = {tile_.data(), tile_.data()};
  const emu::DeviceBuffer<const void*> tails = {rows_.data()};
  const emu::DeviceBuffer<uint32_t> sealed = {32}, tail_tokens = {3};
  const A good{.block_shape = {.layer_count = 1, .tile = {.block_tokens = kTokens}},
               .batch_size = 1,
               .block_table = table.data(),
               .table_stride = 2,
               .sealed_token_counts = sealed.data(),
               .tails = {.token_counts = tail_tokens.data(),
                         .latent = tails.data(),
                         .rope = tails.data(),
                         .latent_stride = 576,
                         .rope_stride = 576},
               .query_type = ElementType::kFp32,
               .query = ones_.data(),
               .query_head_count = 2,
               .softmax_scale = 0.1F,
               .g = ones_.data(),
               .out_type = ElementType::kFp32,
               .out = out.data(),
               .lse = lse.data(),
               .workspace = workspace_.data()};
  std::vector<Spoil<A>> spoils = DecodeSpoils<A>();
  const std::vector<Spoil<A>> own = {
      {"latent dims", Who::kBoth, [](A* a) { a->block_shape.tile.latent_dim = 0; }},
      {"layer 1", Who::kBoth, [](A* a) { a->layer_idx = 1; }},
      {"heads max", Who::kBoth, [](A* a) { a->query_head_count = UINT32_MAX; }},
      {"no g", Who::kBoth, [](A* a) { a->g = nullptr; }},
      {"no latents", Who::kBoth, [](A* a) { a->tails.latent = nullptr; }},
      {"no ropes", Who::kBoth, [](A* a) { a->tails.rope = nullptr; }},
      {"latent type", Who::kBoth, [](A* a) { a->tails.latent_type = ElementType::kFp32; }},
      {"latent stride", Who::kBoth, [](A* a) { a->tails.latent_stride = kHuge; }},
      {"rope stride", Who::kBoth, [](A* a) { a->tails.rope_stride = kHuge; }},
      {"rope stride 0", Who::kBoth, [](A* a) { a->tails.rope_stride = 0; }},
      {"latent scale", Who::kBoth, [](A* a) { a->tails.latent_scale = -kNan; }},
      {"rope scale", Who::kBoth, [](A* a) { a->tails.rope_scale = -1.0F; }}};
  spoils.insert(spoils.end(), own.begin(), own.end());
  const auto cpu = [&](const A& a) {
    auto args = CpuDecodeArgs<DecodeMlaArgs>(a, kMlaLatentDim, lse);
    args.layer_idx = a.layer_idx;
    args.g = ValueOf(a.g);
    args.tail = {.latent = a.tails.latent == nullptr ? nullptr : a.tails.latent[0],
                 .rope = a.tails.rope == nullptr ? nullptr : a.tails.rope[0],
                 .token_count = 3,
                 .latent_stride = a.tails.latent_stride,
                 .rope_stride = a.tails.rope_stride,
                 .latent_type = a.tails.latent_type,
                 .rope_type = a.tails.rope_type,
                 .latent_scale = a.tails.latent_scale,
                 .rope_scale = a.tails.rope_scale};
    return DecodeMla(args);
  };
  const auto plan = [](const A& a) {
    MlaDecodePlan unused;
    return PlanDecodeMla(a, kCard, &unused);
  };
  ExpectAlike<A>({cpu, plan, KVTIER_LAUNCH(DecodeMlaBatch)}, good, spoils,
                 {[](A*) {}, [](A* a) { a->tails.latent_type = ElementType::kFp8E4m3; },
                  [](A* a) { a->query_len = 3; }});
}

// As many items as fit 31 bits, and one sequence more.
TEST_F(CudaHostileArgs, RefusesMoreItemsThanALaunchCounts) {
  DecodeBatchArgs args{
      .block_shape = {.layer_count = 1, .kv_head_count = 64, .block_tokens = 128, .head_dim = 64},
      .batch_size = 1024,
      .block_table = reinterpret_cast<const void* const*>(rows_.data()),
      .table_stride = 1U << 23,
      .sealed_token_counts = kPageTable,
      .query = ones_.data(),
      .query_head_count = 64,
      .g_k = ones_.data(),
      .g_v = ones_.data(),
      .out = tile_.data(),
      .workspace = workspace_.data()};
  DecodePlan plan;
  EXPECT_EQ(PlanDecode(args, kCard, &plan).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(DecodeBatchWorkspaceBytes(args), 0U);
  args.batch_size = 256;
  EXPECT_TRUE(PlanDecode(args, kCard, &plan).ok());
  EXPECT_GT(DecodeBatchWorkspaceBytes(args), 0U);
}

}  // namespace
}  // namespace kvtier::kernels::cuda
