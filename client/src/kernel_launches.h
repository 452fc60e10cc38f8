// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/decode.h"
#include "kernels/cuda/gather.h"
#include "kernels/cuda/seal.h"
#include "kernels/status.h"

namespace kvtier::client {

// What DeviceKernels gives to a GPU. A seam: tests put the emulated machine here.
struct KernelLaunches {
  // `bytes` of pinned memory to device memory, in the order of the stream.
  kernels::Status (*upload)(void* device, const void* host, uint64_t bytes,
                            kernels::cuda::Stream stream);
  kernels::Status (*seal)(const kernels::cuda::SealBlocksArgs& args, kernels::cuda::Stream stream);
  kernels::Status (*gather)(const kernels::cuda::GatherBlocksArgs& args,
                            kernels::cuda::Stream stream);
  kernels::Status (*decode)(const kernels::cuda::DecodeBatchArgs& args,
                            kernels::cuda::Stream stream);
};

// Those of this build, or of the last SetKernelLaunches; null without CUDA kernels.
const KernelLaunches* GetKernelLaunches();
// For tests, before any other thread runs. `launches` outlives its use; null: none.
void SetKernelLaunches(const KernelLaunches* launches);

}  // namespace kvtier::client
