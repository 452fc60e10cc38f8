// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/hostile_args.h"
#include "kernels/cuda/mla_transfer_plan.h"
#include "kernels/cuda/transfer_params.h"
#include "kernels/gather.h"
#include "kernels/mla.h"
#include "kernels/seal.h"

// Hostile arguments of sealing and gathering.

namespace kvtier::kernels::cuda {
namespace {

// Rows of K, V, latents or ropes; `rows` finds them in the arguments.
template <typename Args>
void AddRows(const std::function<DeviceRows*(Args*)>& rows, std::vector<Spoil<Args>>* spoils) {
  const std::vector<Spoil<DeviceRows>> all = {
      {"data", Who::kBoth, [](auto* r) { r->data = nullptr; }},
      {"type 4", Who::kBoth, [](auto* r) { r->type = static_cast<ElementType>(4); }},
      {"type 255", Who::kBoth, [](auto* r) { r->type = static_cast<ElementType>(255); }},
      {"stride 0", Who::kBoth, [](auto* r) { r->token_stride = 0; }},
      {"stride 48", Who::kBoth, [](auto* r) { r->token_stride = 48; }},
      {"stride 2^60", Who::kBoth, [](auto* r) { r->token_stride = uint64_t{1} << 60; }},
      {"stride huge", Who::kBoth, [](auto* r) { r->token_stride = kHuge; }},
      {"stride 1 more", Who::kDevice, [](auto* r) { r->token_stride |= 1; }},
      {"layer stride", Who::kDevice, [](auto* r) { r->layer_stride = kHuge; }},
      {"head stride", Who::kDevice, [](auto* r) { r->head_stride = kHuge; }},
      {"data + 1", Who::kDevice,
       [](auto* r) { r->data = r->data == nullptr ? nullptr : Misaligned(r->data); }},
      {"scales + 1", Who::kDevice,
       [](auto* r) { r->scales = static_cast<const float*>(Misaligned(kPageTable)); }}};
  for (const auto& [name, who, change] : all) {
    spoils->push_back({name, who, [rows, change](Args* args) { change(rows(args)); }});
  }
}

// Pages, blocks and counters; the parts are found in the arguments.
template <typename Args, typename Blocks>
void AddBlocks(const std::function<DevicePages*(Args*)>& pages,
               const std::function<Blocks*(Args*)>& blocks, std::vector<Spoil<Args>>* spoils) {
  const std::vector<Spoil<Args>> all = {
      {"no table", Who::kBoth,
       [=](Args* a) {
         pages(a)->page_table = nullptr;
         pages(a)->page_tokens = kTokens;
       }},
      {"table + 1", Who::kDevice,
       [=](Args* a) {
         const void* table = pages(a)->page_table == nullptr ? nullptr : Misaligned(kPageTable);
         pages(a)->page_table = static_cast<const uint32_t*>(table);
       }},
      {"pages of 65537", Who::kDevice, [=](Args* a) { pages(a)->page_tokens = 65537; }},
      {"entries", Who::kDevice, [=](Args* a) { blocks(a)->entries = nullptr; }},
      {"no entries", Who::kDevice, [=](Args* a) { blocks(a)->entry_count_max = 0; }},
      {"entries max", Who::kDevice, [=](Args* a) { blocks(a)->entry_count_max = UINT32_MAX; }},
      {"count + 1", Who::kDevice,
       [=](Args* a) {
         blocks(a)->entry_count = static_cast<const uint32_t*>(Misaligned(kPageTable));
       }},
      {"offset 8", Who::kDevice, [=](Args* a) { blocks(a)->first_layer_offset = 8; }},
      {"offset huge", Who::kDevice, [=](Args* a) { blocks(a)->first_layer_offset = kHuge; }},
      {"no layers", Who::kBoth, [=](Args* a) { blocks(a)->shape.layer_count = 0; }},
      {"layers max", Who::kBoth, [=](Args* a) { blocks(a)->shape.layer_count = UINT32_MAX; }}};
  spoils->insert(spoils->end(), all.begin(), all.end());
}

template <typename Rows>
Rows CpuRows(const DeviceRows& rows, const DevicePages& pages) {
  Rows result;
  result.type = rows.type;
  result.data = rows.data;
  result.token_stride = rows.token_stride;
  if (pages.page_tokens != 0) {
    result.paging = {.page_table = pages.page_table == nullptr ? nullptr : kPageTable,
                     .page_table_count = 4,
                     .page_tokens = pages.page_tokens,
                     .page_stride = rows.page_stride};
  }
  return result;
}

std::vector<Spoil<SealBlocksArgs>> TransferSpoils() {
  using A = SealBlocksArgs;
  std::vector<Spoil<A>> spoils = {
      {"tokens 0", Who::kBoth, [](A* a) { a->blocks.shape.block_tokens = 0; }},
      {"tokens max", Who::kBoth, [](A* a) { a->blocks.shape.block_tokens = UINT32_MAX; }},
      {"dim 72", Who::kBoth, [](A* a) { a->blocks.shape.head_dim = 72; }},
      {"dim max", Who::kBoth, [](A* a) { a->blocks.shape.head_dim = UINT32_MAX - 15; }},
      {"no heads", Who::kBoth, [](A* a) { a->blocks.shape.kv_head_count = 0; }},
      {"heads max", Who::kBoth, [](A* a) { a->blocks.shape.kv_head_count = UINT32_MAX; }},
      {"heads 65536", Who::kDevice,
       [](A* a) {
         if (a->blocks.shape.kv_head_count == 2) a->blocks.shape.kv_head_count = 65536;
       }},
      {"format k", Who::kBoth, [](A* a) { a->blocks.format.k = static_cast<SideFormat>(3); }},
      {"format v", Who::kBoth, [](A* a) { a->blocks.format.v = static_cast<SideFormat>(200); }},
      {"page stride huge", Who::kDevice,
       [](A* a) {
         if (a->pages.page_tokens == 0) a->pages.page_tokens = kTokens;
         a->v.page_stride = kHuge / 16;
       }},
      {"page stride 0", Who::kDevice,
       [](A* a) {
         if (a->pages.page_tokens == 0) a->pages.page_tokens = kTokens;
         a->k.page_stride = 0;
       }},
      {"stride of large pages", Who::kBoth,
       [](A* a) {
         a->pages.page_tokens = 65536;
         a->k.token_stride |= uint64_t{1} << 46;
       }},
      {"no g", Who::kBoth,
       [](A* a) {
         a->blocks.format.v = SideFormat::kNvfp4;
         a->g_v = nullptr;
       }},
      {"no g of FP8", Who::kBoth,
       [](A* a) {
         a->blocks.format.k = SideFormat::kFp8;
         a->g_k = nullptr;
       }},
      {"counters", Who::kBoth, [](A* a) { a->counters = nullptr; }}};
  AddRows<A>([](A* a) { return &a->k; }, &spoils);
  AddRows<A>([](A* a) { return &a->v; }, &spoils);
  AddBlocks<A, DeviceBlocks>([](A* a) { return &a->pages; }, [](A* a) { return &a->blocks; },
                             &spoils);
  return spoils;
}

std::vector<std::function<void(SealBlocksArgs*)>> TransferVariants() {
  using A = SealBlocksArgs;
  return {[](A*) {},
          [](A* a) { a->k.type = a->v.type = ElementType::kFp32; },
          [](A* a) { a->k.type = a->v.type = ElementType::kFp8E4m3; },
          [](A* a) { a->pages.page_tokens = kTokens; },
          [](A* a) { a->blocks.format = {SideFormat::kFp8, SideFormat::kNvfp4}; },
          [](A* a) { a->blocks.format = {SideFormat::kBf16, SideFormat::kFp8}; }};
}

TEST_F(CudaHostileArgs, SealBlocks) {
  using A = SealBlocksArgs;
  const A good{.blocks = {.entries = &entry_,
                          .entry_count_max = 1,
                          .shape = {.layer_count = 2,
                                    .kv_head_count = 2,
                                    .block_tokens = kTokens,
                                    .head_dim = 64}},
               .k = Rows(64),
               .v = Rows(64),
               .pages = {.page_table = kPageTable},
               .g_k = ones_.data(),
               .g_v = ones_.data(),
               .counters = &seal_counters_};
  std::vector<Spoil<A>> spoils = TransferSpoils();
  spoils.push_back({"search", Who::kBoth, [](A* a) { a->search = static_cast<ScaleSearch>(2); }});
  spoils.push_back({"mean alone", Who::kDevice, [](A* a) { a->k_mean = a->g_v; }});
  const auto cpu = [this](const A& a) {
    const Status status = kernels::Validate(a.blocks.shape);
    if (!status.ok()) return status;
    const TileShape shape = TileOf(a.blocks.shape);
    const uint64_t bytes =
        kernels::Validate(a.blocks.format).ok() ? TileBytes(shape, a.blocks.format) : 0;
    return SealTile(shape, a.blocks.format, CpuRows<ConstRows>(a.k, a.pages),
                    CpuRows<ConstRows>(a.v, a.pages),
                    {.g_k = ValueOf(a.g_k), .g_v = ValueOf(a.g_v), .search = a.search},
                    std::span(tile_).first(bytes), a.counters == nullptr ? nullptr : &stats_);
  };
  const auto plan = [](const A& a) {
    SealPlan unused;
    return PlanSeal(a, &unused);
  };
  ExpectAlike<A>({cpu, plan, KVTIER_LAUNCH(SealBlocks)}, good, spoils, TransferVariants());
}

// The same arguments, but for what only sealing has.
TEST_F(CudaHostileArgs, GatherBlocks) {
  using A = SealBlocksArgs;
  const A good{.blocks = {.entries = &entry_,
                          .entry_count_max = 1,
                          .shape = {.layer_count = 2,
                                    .kv_head_count = 2,
                                    .block_tokens = kTokens,
                                    .head_dim = 64}},
               .k = Rows(64),
               .v = Rows(64),
               .pages = {.page_table = kPageTable},
               .g_k = ones_.data(),
               .g_v = ones_.data(),
               .counters = &seal_counters_};
  const auto gather = [this](const A& a) {
    return GatherBlocksArgs{.blocks = a.blocks,
                            .k = a.k,
                            .v = a.v,
                            .pages = a.pages,
                            .g_k = a.g_k,
                            .g_v = a.g_v,
                            .counters = a.counters == nullptr ? nullptr : &gather_counters_};
  };
  const auto cpu = [this](const A& a) {
    const Status status = kernels::Validate(a.blocks.shape);
    if (!status.ok()) return status;
    if (a.counters == nullptr) return Status::InvalidArgument("only CUDA has counters");
    const TileShape shape = TileOf(a.blocks.shape);
    const uint64_t bytes =
        kernels::Validate(a.blocks.format).ok() ? TileBytes(shape, a.blocks.format) : 0;
    return GatherTile(shape, a.blocks.format, std::span<const std::byte>(tile_).first(bytes),
                      {.g_k = ValueOf(a.g_k), .g_v = ValueOf(a.g_v)},
                      CpuRows<MutableRows>(a.k, a.pages), CpuRows<MutableRows>(a.v, a.pages));
  };
  const auto plan = [&](const A& a) {
    GatherPlan unused;
    return PlanGather(gather(a), &unused);
  };
  std::function<Status(const A&)> launch;
#if defined(KVTIER_CUDA_LAUNCHES)
  launch = [&](const A& a) { return GatherBlocks(gather(a), nullptr); };
#endif
  ExpectAlike<A>({cpu, plan, launch}, good, TransferSpoils(), TransferVariants());
}

TEST_F(CudaHostileArgs, SealAndGatherMlaBlocks) {
  using A = SealMlaBlocksArgs;
  const A good{.blocks = {.entries = &entry_,
                          .entry_count_max = 1,
                          .shape = {.layer_count = 2, .tile = {.block_tokens = kTokens}},
                          .latent = Rows(576),
                          .rope = Rows(576),
                          .pages = {.page_table = kPageTable},
                          .g = ones_.data()},
               .counters = &seal_counters_};
  std::vector<Spoil<A>> spoils = {
      {"tokens 24", Who::kBoth, [](A* a) { a->blocks.shape.tile.block_tokens = 24; }},
      {"latent dims", Who::kBoth, [](A* a) { a->blocks.shape.tile.latent_dim = 256; }},
      {"rope dims", Who::kBoth, [](A* a) { a->blocks.shape.tile.rope_dim = 0; }},
      {"stride 504", Who::kBoth, [](A* a) { a->blocks.latent.token_stride = 504; }},
      {"no g", Who::kBoth, [](A* a) { a->blocks.g = nullptr; }},

      {"counters", Who::kBoth, [](A* a) { a->counters = nullptr; }}};

  std::vector<Spoil<A>> rows;
  AddRows<A>([](A* a) { return &a->blocks.latent; }, &rows);
  AddRows<A>([](A* a) { return &a->blocks.rope; }, &rows);
  for (const Spoil<A>& spoil : rows) {
    // There is one head.
    if (std::string(spoil.name) != "head stride") spoils.push_back(spoil);
  }
  AddBlocks<A, MlaDeviceBlocks>([](A* a) { return &a->blocks.pages; },
                                [](A* a) { return &a->blocks; }, &spoils);
  const auto bytes = MlaTileBytes({.block_tokens = kTokens});
  const auto cpu_seal = [&](const A& a) {
    const Status status = kernels::Validate(a.blocks.shape);
    if (!status.ok()) return status;
    return SealMlaTile(a.blocks.shape.tile, CpuRows<ConstRows>(a.blocks.latent, a.blocks.pages),
                       CpuRows<ConstRows>(a.blocks.rope, a.blocks.pages),
                       {.g = ValueOf(a.blocks.g), .search = a.search},
                       std::span(tile_).first(bytes), a.counters == nullptr ? nullptr : &stats_);
  };
  const auto cpu_gather = [&](const A& a) {
    const Status status = kernels::Validate(a.blocks.shape);
    if (!status.ok()) return status;
    if (a.counters == nullptr) return Status::InvalidArgument("only CUDA has counters");
    return GatherMlaTile(a.blocks.shape.tile, std::span<const std::byte>(tile_).first(bytes),
                         {.g = ValueOf(a.blocks.g)},
                         CpuRows<MutableRows>(a.blocks.latent, a.blocks.pages),
                         CpuRows<MutableRows>(a.blocks.rope, a.blocks.pages));
  };
  const auto gather = [this](const A& a) {
    return GatherMlaBlocksArgs{a.blocks, a.counters == nullptr ? nullptr : &gather_counters_};
  };
  const auto plan_seal = [](const A& a) {
    SealPlan unused;
    return PlanSealMla(a, &unused);
  };
  const auto plan_gather = [&](const A& a) {
    GatherPlan unused;
    return PlanGatherMla(gather(a), &unused);
  };
  const std::vector<std::function<void(A*)>> variants = {
      [](A*) {}, [](A* a) { a->blocks.latent.type = a->blocks.rope.type = ElementType::kFp16; },
      [](A* a) { a->blocks.pages.page_tokens = kTokens; }};
  std::function<Status(const A&)> launch;
#if defined(KVTIER_CUDA_LAUNCHES)
  launch = [&](const A& a) { return GatherMlaBlocks(gather(a), nullptr); };
#endif
  ExpectAlike<A>({cpu_gather, plan_gather, launch}, good, spoils, variants);
  spoils.push_back({"search", Who::kBoth, [](A* a) { a->search = static_cast<ScaleSearch>(9); }});
  ExpectAlike<A>({cpu_seal, plan_seal, KVTIER_LAUNCH(SealMlaBlocks)}, good, spoils, variants);
}

}  // namespace
}  // namespace kvtier::kernels::cuda
