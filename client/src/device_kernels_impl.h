// SPDX-License-Identifier: Apache-2.0
//
// The two halves of DeviceKernels, behind checked arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "client/include/kvtier/device_kernels.h"
#include "kernels/status.h"

namespace kvtier::client {

absl::Status FromKernels(const kernels::Status& status);

// What Seal and Gather have in common.
struct TransferCall {
  kernels::BlockShape shape;
  std::span<const MappedBlock> blocks;
  std::span<const uint32_t> first_slots;
  const KvRows* rows = nullptr;
  const GlobalScales* scales = nullptr;
};

absl::Status SealOnCpu(const TransferCall& call, kernels::cuda::SealCounters* counters);
absl::Status GatherOnCpu(const TransferCall& call, kernels::cuda::GatherCounters* counters);
absl::Status DecodeOnCpu(const kernels::BlockShape& shape, const DecodeStep& step,
                         std::span<std::byte> table);

absl::Status SealOnGpu(const TransferCall& call, kernels::cuda::SealCounters* counters,
                       DeviceStream stream, const TableSpace& space);
absl::Status GatherOnGpu(const TransferCall& call, kernels::cuda::GatherCounters* counters,
                         DeviceStream stream, const TableSpace& space);
absl::Status DecodeOnGpu(const kernels::BlockShape& shape, const DecodeStep& step,
                         size_t block_count_max, DeviceStream stream, const TableSpace& space);
uint64_t GpuDecodeScratchBytes(const kernels::BlockShape& shape, const DecodeStep& step,
                               size_t block_count_max);

}  // namespace kvtier::client
