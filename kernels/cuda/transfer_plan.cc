// SPDX-License-Identifier: Apache-2.0
#include <bit>

#include "kernels/cuda/plan_checks.h"
#include "kernels/cuda/transfer_params.h"

namespace kvtier::kernels::cuda {
namespace {

constexpr uint32_t kAlignment = 16;
constexpr uint32_t kGridYzMax = 65535;
constexpr uint64_t kGridXMax = 0x7FFFFFFF;
constexpr uint32_t kPageTokensMax = 65536;
constexpr uint32_t kSealCounterWords = 4;
constexpr uint32_t kGatherCounterWords = 2;
static_assert(sizeof(SealCounters) == kSealCounterWords * sizeof(uint32_t));
static_assert(sizeof(GatherCounters) == kGatherCounterWords * sizeof(uint32_t));

// No stride takes an address out of 64 bits, whatever is in the device's entries and page table:
// slots are below 2^31, page numbers 32-bit.
bool StridesFit(const DeviceRows& rows, const DevicePages& pages, const BlockShape& shape) {
  constexpr uint64_t kSlots = uint64_t{1} << 31;
  constexpr uint64_t kPages = uint64_t{1} << 32;
  const uint64_t bytes = ElementBytes(rows.type);
  const bool is_paged = pages.page_tokens != 0;
  return FitsReach(rows.layer_data == nullptr ? shape.layer_count : 1, rows.layer_stride, bytes) &&
         FitsReach(shape.kv_head_count, rows.head_stride, bytes) &&
         FitsReach(is_paged ? pages.page_tokens : kSlots, rows.token_stride, bytes) &&
         FitsReach(is_paged ? kPages : 1, rows.page_stride, bytes);
}

Status ValidateRows(const DeviceRows& rows, const DevicePages& pages, const BlockShape& shape) {
  const uint64_t element_bytes = ElementBytes(rows.type);
  if (element_bytes == 0) return Status::InvalidArgument("unknown element type");
  if (rows.layer_data == nullptr && rows.data == nullptr) {
    return Status::InvalidArgument("rows have no data");
  }
  if (rows.layer_data == nullptr && !IsAligned(rows.data)) {
    return Status::InvalidArgument("rows do not begin at a multiple of 16 bytes");
  }
  if (!IsAligned(rows.layer_data, alignof(void*)) || !IsAligned(rows.scales, alignof(float))) {
    return Status::InvalidArgument("layer_data or scales are not aligned");
  }
  for (const uint64_t stride :
       {rows.layer_stride, rows.head_stride, rows.token_stride, rows.page_stride}) {
    if (stride % (kAlignment / element_bytes) != 0) {
      return Status::InvalidArgument("a stride is not a multiple of 16 bytes");
    }
  }
  if (rows.token_stride < shape.head_dim) {
    return Status::InvalidArgument("a token_stride is less than head_dim");
  }
  if (shape.kv_head_count > 1 && rows.head_stride < shape.head_dim) {
    return Status::InvalidArgument("a head_stride is less than head_dim");
  }
  if (pages.page_tokens != 0 && rows.page_stride < shape.head_dim) {
    return Status::InvalidArgument("a page_stride is less than head_dim");
  }
  if (!StridesFit(rows, pages, shape)) return Status::InvalidArgument("a stride is too large");
  return Status();
}

Status Validate(const DeviceBlocks& blocks, const DeviceRows& k, const DeviceRows& v,
                const DevicePages& pages, const float* g_k, const float* g_v) {
  if (const Status status = kernels::Validate(blocks.shape); !status.ok()) return status;
  if (const Status status = kernels::Validate(blocks.format); !status.ok()) return status;
  if (blocks.entries == nullptr || blocks.entry_count_max == 0) {
    return Status::InvalidArgument("no blocks");
  }
  if (!IsAligned(blocks.entries) || blocks.first_layer_offset % kAlignment != 0) {
    return Status::InvalidArgument("entries or first_layer_offset is not a multiple of 16 bytes");
  }
  if (blocks.first_layer_offset > kReachBytesMax) {
    return Status::InvalidArgument("first_layer_offset is too large");
  }
  if (blocks.shape.layer_count > kGridYzMax || blocks.shape.kv_head_count > kGridYzMax) {
    return Status::InvalidArgument("more layers or kv heads than a grid has");
  }
  if (pages.page_tokens != 0 && pages.page_table == nullptr) {
    return Status::InvalidArgument("no page table");
  }
  if (pages.page_tokens > kPageTokensMax) {
    return Status::InvalidArgument("page_tokens must be at most 65536");
  }
  if (!IsAligned(pages.page_table, alignof(uint32_t)) ||
      !IsAligned(blocks.entry_count, alignof(uint32_t))) {
    return Status::InvalidArgument("page_table or entry_count is not aligned");
  }
  if (blocks.entry_count_max > kGridXMax) {
    return Status::InvalidArgument("more blocks than a grid has");
  }
  for (const DeviceRows* rows : {&k, &v}) {
    if (const Status status = ValidateRows(*rows, pages, blocks.shape); !status.ok()) {
      return status;
    }
  }
  if (k.type != v.type) return Status::InvalidArgument("K and V differ in type");
  if ((g_k == nullptr && blocks.format.k != SideFormat::kBf16) ||
      (g_v == nullptr && blocks.format.v != SideFormat::kBf16)) {
    return Status::InvalidArgument("no scales of a side that needs them");
  }
  if (!IsAligned(g_k, alignof(float)) || !IsAligned(g_v, alignof(float))) {
    return Status::InvalidArgument("scales are not aligned");
  }
  return Status();
}

Status ValidateCounters(const void* counters) {
  if (counters == nullptr) return Status::InvalidArgument("counters are required");
  if (!IsAligned(counters, alignof(uint32_t))) {
    return Status::InvalidArgument("counters are not aligned");
  }
  return Status();
}

RowsParams ParamsOf(const DeviceRows& rows) {
  const uint64_t element_bytes = ElementBytes(rows.type);
  return {.data = {static_cast<std::byte*>(rows.data)},
          .layer_data = {rows.layer_data},
          .layer_stride = rows.layer_stride * element_bytes,
          .head_stride = rows.head_stride * element_bytes,
          .token_stride = rows.token_stride * element_bytes,
          .page_stride = rows.page_stride * element_bytes,
          .scales = {rows.type == ElementType::kFp8E4m3 ? rows.scales : nullptr}};
}

PagesParams ParamsOf(const DevicePages& pages) {
  PagesParams params{.page_table = {pages.page_table}, .page_tokens = pages.page_tokens};
  if (pages.page_tokens == 0) return params;
  // Division by invariant multiplication: with l = ceil(log2(d)) and m = ceil(2^(31 + l) / d), m
  // fits 32 bits and floor(n * m / 2^(31 + l)) = floor(n / d) for all n < 2^31.
  const auto log2 = static_cast<uint32_t>(std::bit_width(pages.page_tokens - 1));
  params.shift = 31 + log2;
  params.multiplier = static_cast<uint32_t>(
      ((uint64_t{1} << params.shift) + pages.page_tokens - 1) / pages.page_tokens);
  return params;
}

TransferParams ParamsOf(const DeviceBlocks& blocks, const DeviceRows& k, const DeviceRows& v,
                        const DevicePages& pages, const float* g_k, const float* g_v) {
  const TileShape tile = TileOf(blocks.shape);
  const LayerFormat format = blocks.format;
  const uint64_t v_offset = SideBytes(tile, format.k);
  return {.entries = {blocks.entries},
          .entry_count = {blocks.entry_count},
          .first_layer_offset = blocks.first_layer_offset,
          .tile = {.block_tokens = tile.block_tokens,
                   .vector_count = VectorsPerToken(tile),
                   .k_scale_offset = static_cast<uint32_t>(KScaleOffset(tile)),
                   .v_data_offset = static_cast<uint32_t>(v_offset),
                   .v_scale_offset = static_cast<uint32_t>(v_offset + DataBytes(tile)),
                   .tile_bytes = static_cast<uint32_t>(TileBytes(tile, format)),
                   .format = format},
          .k = ParamsOf(k),
          .v = ParamsOf(v),
          .pages = ParamsOf(pages),
          .g_k = {format.k == SideFormat::kBf16 ? nullptr : g_k},
          .g_v = {format.v == SideFormat::kBf16 ? nullptr : g_v},
          .kv_head_count = blocks.shape.kv_head_count};
}

// Rows that a thread block works on at a time, with `threads` for each: a power of two.
uint32_t RowsOfABlock(const BlockShape& shape, uint32_t threads) {
  uint32_t rows = 1;
  while (2 * rows <= shape.block_tokens && 2 * rows * threads <= kTransferThreadsMax) rows *= 2;
  return rows;
}

}  // namespace

Status PlanSeal(const SealBlocksArgs& args, SealPlan* plan) {
  const Status status = Validate(args.blocks, args.k, args.v, args.pages, args.g_k, args.g_v);
  if (!status.ok()) return status;
  if ((args.k_mean == nullptr) != (args.k_inverse_smooth == nullptr)) {
    return Status::InvalidArgument("k_mean and k_inverse_smooth: both or none");
  }
  if (!IsAligned(args.k_mean) || !IsAligned(args.k_inverse_smooth)) {
    return Status::InvalidArgument("a transform does not begin at a multiple of 16 bytes");
  }
  if (args.search != ScaleSearch::kAmax6 && args.search != ScaleSearch::kFourOverSix) {
    return Status::InvalidArgument("unknown scale search");
  }
  if (const Status counters = ValidateCounters(args.counters); !counters.ok()) return counters;

  const BlockShape& shape = args.blocks.shape;
  plan->params = {.transfer = ParamsOf(args.blocks, args.k, args.v, args.pages, args.g_k, args.g_v),
                  .k_mean = {args.k_mean},
                  .k_inverse_smooth = {args.k_inverse_smooth},
                  .counters = {reinterpret_cast<uint32_t*>(args.counters)},
                  .counter_stride = args.counters_per_block ? kSealCounterWords : 0,
                  .four_over_six = args.search == ScaleSearch::kFourOverSix};
  const uint32_t vectors = VectorsPerToken(TileOf(shape));
  plan->shape = {.grid_x = args.blocks.entry_count_max,
                 .grid_y = shape.kv_head_count,
                 .grid_z = shape.layer_count,
                 .block_x = vectors,
                 .block_y = RowsOfABlock(shape, vectors),
                 .shared_bytes = 2 * shape.block_tokens * vectors};
  return Status();
}

Status PlanGather(const GatherBlocksArgs& args, GatherPlan* plan) {
  const Status status = Validate(args.blocks, args.k, args.v, args.pages, args.g_k, args.g_v);
  if (!status.ok()) return status;
  if (const Status counters = ValidateCounters(args.counters); !counters.ok()) return counters;
  const BlockShape& shape = args.blocks.shape;
  plan->params = {.transfer = ParamsOf(args.blocks, args.k, args.v, args.pages, args.g_k, args.g_v),
                  .counters = {reinterpret_cast<uint32_t*>(args.counters)},
                  .counter_stride = args.counters_per_block ? kGatherCounterWords : 0};
  const uint32_t stores = shape.head_dim * ElementBytes(args.k.type) / 16;
  plan->shape = {.grid_x = args.blocks.entry_count_max,
                 .grid_y = shape.kv_head_count,
                 .grid_z = shape.layer_count,
                 .block_x = stores,
                 .block_y = RowsOfABlock(shape, stores)};
  return Status();
}

}  // namespace kvtier::kernels::cuda
