// SPDX-License-Identifier: Apache-2.0
#include "client/include/kvtier/device_kernels.h"

#include <algorithm>

#include "client/src/device_kernels_impl.h"
#include "client/src/kernel_launches.h"
#include "proto/base/status_util.h"

namespace kvtier::client {
namespace {

// Tables are arrays of addresses first, of 4 bytes then.
constexpr uint64_t kTableAlignBytes = 16;
// As the kernels' BlockEntry says.
constexpr uint64_t kSlotsMax = (uint64_t{1} << 31) - 1;

uint64_t RoundUp(uint64_t bytes) {
  return (bytes + kTableAlignBytes - 1) / kTableAlignBytes * kTableAlignBytes;
}

// The device that all blocks with a slot are on.
class DeviceCheck {
 public:
  explicit DeviceCheck(const kernels::BlockShape& shape)
      : block_bytes_(kernels::BlockBytes(shape)) {}

  absl::Status Add(const MappedBlock& block) {
    if (block.status != BlockStatus::kOk) return Invalid("a block has no slot");
    const bool on_gpu = block.device_address != 0;
    if (on_gpu ? block.device_address % 16 != 0 : block.bytes.size() != block_bytes_) {
      return Invalid("a block is not a slot of this layout: %d bytes, not %d", block.bytes.size(),
                     block_bytes_);
    }
    const int device = on_gpu ? block.device_ordinal : kCpu;
    if (has_block_ && device_ != device) {
      return FailedPrecondition("the blocks are on two devices: Prefetch those on host first");
    }
    has_block_ = true;
    device_ = device;
    return absl::OkStatus();
  }

  // Blocks on host cannot meet an engine whose rows are on a GPU, which `space` says.
  absl::Status CheckMeets(const TableSpace& space) const {
    if (!has_block_ || on_gpu() || space.device == nullptr) return absl::OkStatus();
    return FailedPrecondition(
        "the blocks are on host: Prefetch them and acquire them again, or call with pointers to "
        "this process's memory and no space.device");
  }

  // No block at all is the cpu device's.
  bool on_gpu() const { return device_ != kCpu; }

 private:
  static constexpr int kCpu = -1;

  const uint64_t block_bytes_;
  bool has_block_ = false;
  int device_ = kCpu;
};

absl::Status CheckSpace(const TableSpace& space, uint64_t bytes) {
  const bool aligned = reinterpret_cast<uintptr_t>(space.host.data()) % kTableAlignBytes == 0;
  if (!aligned || space.host.size() < bytes) {
    return Invalid("the table space of the host: must be %d bytes, aligned to %d", bytes,
                   kTableAlignBytes);
  }
  return absl::OkStatus();
}

absl::Status CheckGpu(const TableSpace& space, uint64_t bytes) {
  if (GetKernelLaunches() == nullptr) {
    return Unimplemented(
        "the blocks are on a GPU, and this library was built without CUDA kernels: build kvtier "
        "where CMake finds nvcc 13");
  }
  const bool aligned = reinterpret_cast<uintptr_t>(space.device) % kTableAlignBytes == 0;
  if (space.device == nullptr || !aligned || space.device_bytes < bytes) {
    return Invalid("the table space of the device: must be %d bytes, aligned to %d", bytes,
                   kTableAlignBytes);
  }
  return absl::OkStatus();
}

absl::Status CheckTransfer(const TransferCall& call) {
  if (call.blocks.size() != call.first_slots.size()) {
    return Invalid("%d blocks and %d first slots", call.blocks.size(), call.first_slots.size());
  }
  if (call.rows->k == nullptr || call.rows->v == nullptr || call.scales->g_k == nullptr ||
      call.scales->g_v == nullptr) {
    return Invalid("rows or scales are null");
  }
  // A GPU's kernels do not know how long the page table is.
  const KvRows& rows = *call.rows;
  const uint64_t slot_count =
      rows.page_tokens == 0
          ? kSlotsMax
          : std::min(kSlotsMax, uint64_t{rows.page_table_count} * rows.page_tokens);
  for (size_t i = 0; i < call.blocks.size(); ++i) {
    if (call.blocks[i].status != BlockStatus::kOk) continue;
    const uint64_t end = uint64_t{call.first_slots[i]} + call.shape.block_tokens;
    if (end > slot_count) {
      return Invalid("block %d ends at slot %d: the rows have %d slots", i, end, slot_count);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckStep(const DecodeStep& step, const kernels::BlockShape& shape) {
  if (step.layer_idx >= shape.layer_count) {
    return Invalid("layer_idx %d: the layout has %d layers", step.layer_idx, shape.layer_count);
  }
  if (step.query == nullptr || step.out == nullptr || step.lse == nullptr ||
      step.scales.g_k == nullptr || step.scales.g_v == nullptr) {
    return Invalid("query, out, lse or scales are null");
  }
  for (const DecodeSequence& sequence : step.sequences) {
    if (sequence.tail_token_count > 0 &&
        (sequence.tail_k == nullptr || sequence.tail_v == nullptr)) {
      return Invalid("a tail is null");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status FromKernels(const kernels::Status& status) {
  switch (status.code()) {
    case kernels::StatusCode::kOk:
      return absl::OkStatus();
    case kernels::StatusCode::kInvalidArgument:
      return Invalid("%s", status.message());
    case kernels::StatusCode::kDataLoss:
      return DataLoss("%s", status.message());
    case kernels::StatusCode::kUnavailable:
      break;
  }
  return Unavailable("%s", status.message());
}

absl::StatusOr<DeviceKernels> DeviceKernels::Create(const Layout& layout, const Namespace& ns) {
  KVT_RETURN_IF_ERROR(layout.Validate());
  if (layout.codec != Codec::kNvfp4) return Invalid("the kernels work on blocks of codec nvfp4");
  if (layout.Fingerprint() != ns.layout || layout.BlockBytes() != ns.block_bytes) {
    return Invalid("the namespace was opened with another layout");
  }
  const kernels::BlockShape shape{.layer_count = layout.layer_count,
                                  .kv_head_count = layout.kv_head_count,
                                  .block_tokens = layout.block_tokens,
                                  .head_dim = layout.head_dim};
  KVT_RETURN_IF_ERROR(FromKernels(kernels::Validate(shape)));
  if (kernels::BlockBytes(shape) != ns.block_bytes) {
    return Invalid("a block of this layout has %d bytes, and %d for the kernels", ns.block_bytes,
                   kernels::BlockBytes(shape));
  }
  return DeviceKernels(shape);
}

absl::Status DeviceKernels::Seal(std::span<const MappedBlock> blocks,
                                 std::span<const uint32_t> first_slots, const KvRows& rows,
                                 const GlobalScales& scales, kernels::cuda::SealCounters* counters,
                                 DeviceStream stream, const TableSpace& space) const {
  const TransferCall call{.shape = shape_,
                          .blocks = blocks,
                          .first_slots = first_slots,
                          .rows = &rows,
                          .scales = &scales};
  KVT_RETURN_IF_ERROR(CheckTransfer(call));
  if (counters == nullptr) return Invalid("counters are null");
  DeviceCheck devices(shape_);
  for (const MappedBlock& block : blocks) {
    if (block.status == BlockStatus::kOk) KVT_RETURN_IF_ERROR(devices.Add(block));
  }
  KVT_RETURN_IF_ERROR(devices.CheckMeets(space));
  if (!devices.on_gpu()) return SealOnCpu(call, counters);
  const uint64_t table_bytes = TransferTableBytes(blocks.size());
  KVT_RETURN_IF_ERROR(CheckSpace(space, table_bytes));
  KVT_RETURN_IF_ERROR(CheckGpu(space, table_bytes));
  return SealOnGpu(call, counters, stream, space);
}

absl::Status DeviceKernels::Gather(std::span<const MappedBlock> blocks,
                                   std::span<const uint32_t> first_slots, const KvRows& rows,
                                   const GlobalScales& scales,
                                   kernels::cuda::GatherCounters* counters, DeviceStream stream,
                                   const TableSpace& space) const {
  const TransferCall call{.shape = shape_,
                          .blocks = blocks,
                          .first_slots = first_slots,
                          .rows = &rows,
                          .scales = &scales};
  KVT_RETURN_IF_ERROR(CheckTransfer(call));
  if (counters == nullptr) return Invalid("counters are null");
  DeviceCheck devices(shape_);
  for (const MappedBlock& block : blocks) KVT_RETURN_IF_ERROR(devices.Add(block));
  KVT_RETURN_IF_ERROR(devices.CheckMeets(space));
  if (!devices.on_gpu()) return GatherOnCpu(call, counters);
  const uint64_t table_bytes = TransferTableBytes(blocks.size());
  KVT_RETURN_IF_ERROR(CheckSpace(space, table_bytes));
  KVT_RETURN_IF_ERROR(CheckGpu(space, table_bytes));
  return GatherOnGpu(call, counters, stream, space);
}

absl::Status DeviceKernels::Decode(const DecodeStep& step, DeviceStream stream,
                                   const TableSpace& space) const {
  if (step.sequences.empty()) return absl::OkStatus();
  KVT_RETURN_IF_ERROR(CheckStep(step, shape_));
  DeviceCheck devices(shape_);
  size_t block_count_max = 0;
  for (const DecodeSequence& sequence : step.sequences) {
    for (const MappedBlock& block : sequence.blocks) KVT_RETURN_IF_ERROR(devices.Add(block));
    block_count_max = std::max(block_count_max, sequence.blocks.size());
  }
  const uint64_t table_bytes = DecodeTableBytes(step.sequences.size(), block_count_max);
  KVT_RETURN_IF_ERROR(CheckSpace(space, table_bytes));
  KVT_RETURN_IF_ERROR(devices.CheckMeets(space));
  if (!devices.on_gpu() && space.device == nullptr) {
    return DecodeOnCpu(shape_, step, space.host);
  }
  KVT_RETURN_IF_ERROR(CheckGpu(space, table_bytes));
  return DecodeOnGpu(shape_, step, block_count_max, stream, space);
}

uint64_t DeviceKernels::TransferTableBytes(size_t block_count) {
  return block_count * sizeof(kernels::cuda::BlockEntry);
}

uint64_t DeviceKernels::DecodeTableBytes(size_t sequence_count, size_t block_count_max) {
  // Per sequence: its blocks, two tails, two counts.
  return RoundUp(sequence_count * ((std::max<size_t>(block_count_max, 1) + 2) * sizeof(void*) +
                                   2 * sizeof(uint32_t)));
}

uint64_t DeviceKernels::DecodeScratchBytes(const DecodeStep& step, size_t block_count_max) const {
  return GpuDecodeScratchBytes(shape_, step, block_count_max);
}

}  // namespace kvtier::client
