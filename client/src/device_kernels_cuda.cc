// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>

#include "client/src/device_kernels_impl.h"
#include "client/src/kernel_launches.h"
#include "kernels/cuda/blocks.h"
#include "kernels/cuda/decode_plan.h"
#include "kernels/cuda/transfer_params.h"
#include "proto/base/status_util.h"

namespace kvtier::client {
namespace {

using kernels::cuda::BlockEntry;

// Refuses nothing for its own sake.
constexpr kernels::cuda::DeviceLimits kAnyDevice{
    .multiprocessor_count = 1, .shared_bytes_per_block = UINT32_MAX, .copies_bulk = true};

kernels::cuda::Stream Raw(DeviceStream stream) {
  return static_cast<kernels::cuda::Stream>(stream.handle);
}

void* PointerTo(const MappedBlock& block) {
  return std::bit_cast<void*>(static_cast<uintptr_t>(block.device_address));
}

kernels::cuda::DeviceRows RowsOf(const KvRows& kv, void* data, const float* scales) {
  return {.type = kv.type,
          .data = data,
          .layer_stride = kv.layer_stride,
          .head_stride = kv.head_stride,
          .token_stride = kv.token_stride,
          .page_stride = kv.page_stride,
          .scales = scales};
}

// The blocks that have a slot, as SendEntries will list them.
kernels::cuda::DeviceBlocks BlocksOf(const TransferCall& call, const TableSpace& space) {
  const auto count = std::ranges::count(call.blocks, BlockStatus::kOk, &MappedBlock::status);
  return {.entries = static_cast<const BlockEntry*>(space.device),
          .entry_count_max = static_cast<uint32_t>(count),
          .shape = call.shape};
}

// SealBlocksArgs or GatherBlocksArgs.
template <typename Args, typename Counters>
Args ArgsOf(const TransferCall& call, Counters* counters, const TableSpace& space) {
  Args args;
  args.blocks = BlocksOf(call, space);
  args.k = RowsOf(*call.rows, call.rows->k, call.rows->k_scales);
  args.v = RowsOf(*call.rows, call.rows->v, call.rows->v_scales);
  args.pages = {.page_table = call.rows->page_table, .page_tokens = call.rows->page_tokens};
  args.g_k = call.scales->g_k;
  args.g_v = call.scales->g_v;
  args.counters = counters;
  return args;
}

// The copy is enqueued.
absl::Status SendEntries(const TransferCall& call, DeviceStream stream, const TableSpace& space) {
  auto* const entries = reinterpret_cast<BlockEntry*>(space.host.data());
  uint64_t count = 0;
  for (size_t i = 0; i < call.blocks.size(); ++i) {
    if (call.blocks[i].status != BlockStatus::kOk) continue;
    entries[count++] = {.block = PointerTo(call.blocks[i]), .first_slot = call.first_slots[i]};
  }
  return FromKernels(GetKernelLaunches()->upload(space.device, space.host.data(),
                                                 count * sizeof(BlockEntry), Raw(stream)));
}

kernels::cuda::DecodeBatchArgs ArgsOf(const kernels::BlockShape& shape, const DecodeStep& step,
                                      size_t block_count_max) {
  const size_t scales_at = size_t{step.layer_idx} * shape.kv_head_count;
  kernels::cuda::DecodeBatchArgs args;
  args.block_shape = shape;
  args.layer_offset = kernels::LayerOffset(shape, {}, step.layer_idx);
  args.batch_size = static_cast<uint32_t>(step.sequences.size());
  args.table_stride = static_cast<uint32_t>(std::max<size_t>(block_count_max, 1));
  args.tails.token_stride = step.tail_token_stride;
  args.tails.head_stride = step.tail_head_stride;
  args.tails.type = step.tail_type;
  args.tails.k_scale = step.tail_k_scale;
  args.tails.v_scale = step.tail_v_scale;
  args.query_type = step.query_type;
  args.query = step.query;
  args.query_head_count = step.query_head_count;
  args.query_len = step.query_len;
  args.softmax_scale = step.softmax_scale;
  args.soft_cap = step.soft_cap;
  args.window = step.window;
  args.g_k = step.scales.g_k + scales_at;
  args.g_v = step.scales.g_v + scales_at;
  args.sinks = step.sinks;
  args.out_type = kernels::ElementType::kFp32;
  args.out = step.out;
  args.lse = step.lse;
  args.damage_count = step.damage_count;
  args.workspace = step.scratch;
  return args;
}

// The tables of a decode: addresses of blocks and tails, then counts. The same offsets in the
// memory of the host and of the device.
class DecodeTables {
 public:
  DecodeTables(size_t sequence_count, size_t stride) : count_(sequence_count), stride_(stride) {}

  uint64_t bytes() const { return counts_at() + 2 * count_ * sizeof(uint32_t); }

  void Fill(const DecodeStep& step, uint32_t block_tokens, std::span<std::byte> host) const {
    auto* const addresses = reinterpret_cast<const void**>(host.data());
    auto* const counts = reinterpret_cast<uint32_t*>(host.data() + counts_at());
    for (size_t i = 0; i < count_; ++i) {
      const DecodeSequence& sequence = step.sequences[i];
      std::ranges::transform(sequence.blocks, addresses + i * stride_, PointerTo);
      // What no count lets the kernel read is still no stray address.
      std::fill(addresses + i * stride_ + sequence.blocks.size(), addresses + (i + 1) * stride_,
                nullptr);
      addresses[count_ * stride_ + i] = sequence.tail_k;
      addresses[count_ * stride_ + count_ + i] = sequence.tail_v;
      counts[i] = static_cast<uint32_t>(sequence.blocks.size()) * block_tokens;
      counts[count_ + i] = sequence.tail_token_count;
    }
  }

  void Point(void* device, kernels::cuda::DecodeBatchArgs* args) const {
    auto* const addresses = static_cast<const void* const*>(device);
    const auto* const counts =
        reinterpret_cast<const uint32_t*>(static_cast<const std::byte*>(device) + counts_at());
    args->block_table = addresses;
    args->tails.k = addresses + count_ * stride_;
    args->tails.v = addresses + count_ * stride_ + count_;
    args->sealed_token_counts = counts;
    args->tails.token_counts = counts + count_;
  }

 private:
  uint64_t counts_at() const { return count_ * (stride_ + 2) * sizeof(void*); }

  size_t count_;
  size_t stride_;
};

}  // namespace

// What is refused is refused before a copy is enqueued: the caller's tables are free then.

absl::Status SealOnGpu(const TransferCall& call, kernels::cuda::SealCounters* counters,
                       DeviceStream stream, const TableSpace& space) {
  const auto args = ArgsOf<kernels::cuda::SealBlocksArgs>(call, counters, space);
  kernels::cuda::SealPlan plan;
  KVT_RETURN_IF_ERROR(FromKernels(PlanSeal(args, &plan)));
  KVT_RETURN_IF_ERROR(SendEntries(call, stream, space));
  return FromKernels(GetKernelLaunches()->seal(args, Raw(stream)));
}

absl::Status GatherOnGpu(const TransferCall& call, kernels::cuda::GatherCounters* counters,
                         DeviceStream stream, const TableSpace& space) {
  const auto args = ArgsOf<kernels::cuda::GatherBlocksArgs>(call, counters, space);
  kernels::cuda::GatherPlan plan;
  KVT_RETURN_IF_ERROR(FromKernels(PlanGather(args, &plan)));
  KVT_RETURN_IF_ERROR(SendEntries(call, stream, space));
  return FromKernels(GetKernelLaunches()->gather(args, Raw(stream)));
}

absl::Status DecodeOnGpu(const kernels::BlockShape& shape, const DecodeStep& step,
                         size_t block_count_max, DeviceStream stream, const TableSpace& space) {
  kernels::cuda::DecodeBatchArgs args = ArgsOf(shape, step, block_count_max);
  const DecodeTables tables(step.sequences.size(), args.table_stride);
  tables.Point(space.device, &args);
  kernels::cuda::DecodePlan plan;
  KVT_RETURN_IF_ERROR(FromKernels(PlanDecode(args, kAnyDevice, &plan)));
  tables.Fill(step, shape.block_tokens, space.host);
  KVT_RETURN_IF_ERROR(FromKernels(
      GetKernelLaunches()->upload(space.device, space.host.data(), tables.bytes(), Raw(stream))));
  return FromKernels(GetKernelLaunches()->decode(args, Raw(stream)));
}

uint64_t GpuDecodeScratchBytes(const kernels::BlockShape& shape, const DecodeStep& step,
                               size_t block_count_max) {
  kernels::cuda::DecodeBatchArgs args = ArgsOf(shape, step, block_count_max);
  // Where the tables will be makes no difference.
  DecodeTables(step.sequences.size(), args.table_stride).Point(step.out, &args);
  return kernels::cuda::DecodeBatchWorkspaceBytes(args);
}

}  // namespace kvtier::client
