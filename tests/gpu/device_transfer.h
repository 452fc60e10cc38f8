// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_TESTS_GPU_DEVICE_TRANSFER_H_
#define KVTIER_TESTS_GPU_DEVICE_TRANSFER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/transfer_fixture.h"
#include "tests/gpu/device_memory.h"

namespace kvtier::gpu {

// A TransferData copied to the device, and arguments over the copy.
class DeviceTransfer {
 public:
  explicit DeviceTransfer(kernels::cuda::TransferData* data);

  kernels::cuda::SealBlocksArgs SealArgs();
  kernels::cuda::GatherBlocksArgs GatherArgs();

  DeviceArray<std::byte> rows;
  DeviceArray<std::byte> blocks;
  DeviceArray<uint32_t> entry_count;
  DeviceArray<kernels::cuda::SealCounters> seal_counters;
  DeviceArray<kernels::cuda::GatherCounters> gather_counters;

 private:
  kernels::cuda::DeviceBlocks Blocks();
  kernels::cuda::DeviceRows Rows(bool is_v);
  kernels::cuda::DevicePages Pages();

  kernels::cuda::TransferData* data_;
  DeviceArray<kernels::cuda::BlockEntry> entries_;
  DeviceArray<uint32_t> page_table_;
  DeviceArray<void*> k_layers_;
  DeviceArray<void*> v_layers_;
  DeviceArray<float> g_k_;
  DeviceArray<float> g_v_;
  DeviceArray<float> k_scales_;
  DeviceArray<float> v_scales_;
  DeviceArray<float> mean_;
  DeviceArray<float> inverse_smooth_;
};

}  // namespace kvtier::gpu

#endif  // KVTIER_TESTS_GPU_DEVICE_TRANSFER_H_
