// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_TESTS_GPU_DEVICE_DECODE_H_
#define KVTIER_TESTS_GPU_DEVICE_DECODE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cuda/decode_fixture.h"
#include "tests/gpu/device_memory.h"

namespace kvtier::gpu {

// A DecodeData copied to the device, and arguments over the copy.
class DeviceDecode {
 public:
  explicit DeviceDecode(kernels::cuda::DecodeData* data);

  kernels::cuda::DecodeBatchArgs Args();
  // Brings out and lse into the DecodeData.
  void DownloadResults();

  DeviceArray<uint32_t> sealed_counts;
  DeviceArray<uint32_t> damage_count;

 private:
  // Addresses within `from` as addresses within `to`.
  static std::vector<const void*> Moved(const kernels::cuda::emu::DeviceBuffer<const void*>& table,
                                        const void* from, const void* to);

  kernels::cuda::DecodeData* data_;
  DeviceArray<std::byte> blocks_;
  DeviceArray<const void*> table_;
  DeviceArray<uint32_t> tail_counts_;
  DeviceArray<std::byte> tail_k_;
  DeviceArray<std::byte> tail_v_;
  DeviceArray<const void*> tail_k_addresses_;
  DeviceArray<const void*> tail_v_addresses_;
  DeviceArray<float> g_k_;
  DeviceArray<float> g_v_;
  DeviceArray<float> sinks_;
  DeviceArray<float> k_mean_;
  DeviceArray<float> k_smooth_;
  DeviceArray<std::byte> query_;
  DeviceArray<std::byte> out_;
  DeviceArray<float> lse_;
  DeviceArray<std::byte> workspace_;
};

}  // namespace kvtier::gpu

#endif  // KVTIER_TESTS_GPU_DEVICE_DECODE_H_
