// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include "kernels/cuda/decode.h"
#include "kernels/cuda/decode_kernel.h"
#include "kernels/cuda/decode_plan.h"

namespace kvtier::kernels::cuda {
namespace {

template <uint32_t kHeadDim, uint32_t kTilesN>
__global__ void __launch_bounds__(32 * kDecodeWarpsMax,
                                  1)  // One block: it takes all shared memory.
    DecodeKernel(const __grid_constant__ DecodeParams params) {
  DecodeBody<CurrentArch, kHeadDim, kTilesN>(params);
}

using Kernel = void (*)(DecodeParams);

Kernel KernelOf(uint32_t head_dim, uint32_t tiles_n) {
  switch (head_dim) {
    case 64:
      return tiles_n == 2 ? DecodeKernel<64, 2> : DecodeKernel<64, 1>;
    case 96:
      return tiles_n == 2 ? DecodeKernel<96, 2> : DecodeKernel<96, 1>;
    case 128:
      return tiles_n == 2 ? DecodeKernel<128, 2> : DecodeKernel<128, 1>;
    case 192:
      return DecodeKernel<192, 1>;
    case 256:
      return DecodeKernel<256, 1>;
    default:
      return nullptr;
  }
}

// Attributes are cached by the runtime: no wait, and allowed while a stream is captured.
Status ReadLimits(DeviceLimits* limits) {
  int device = 0;
  int multiprocessors = 0;
  int shared_bytes = 0;
  int major = 0;
  const bool ok =
      cudaGetDevice(&device) == cudaSuccess &&
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) ==
          cudaSuccess &&
      cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) ==
          cudaSuccess &&
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess;
  if (!ok) return Status::Unavailable("the device cannot be asked for its limits");
  limits->multiprocessor_count = static_cast<uint32_t>(multiprocessors);
  limits->shared_bytes_per_block = static_cast<uint32_t>(shared_bytes);
  limits->copies_bulk = major >= 9;
  return Status();
}

}  // namespace

Status DecodeBatch(const DecodeBatchArgs& args, Stream stream) {
  DeviceLimits limits;
  if (const Status status = ReadLimits(&limits); !status.ok()) return status;
  DecodePlan plan;
  if (const Status status = PlanDecode(args, limits, &plan); !status.ok()) return status;
  const Kernel kernel = KernelOf(args.block_shape.head_dim, plan.tiles_n);
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(plan.shared_bytes)) != cudaSuccess) {
    return Status::Unavailable("the device refused the shared memory of the decode kernel");
  }
  kernel<<<plan.grid_size, 32 * plan.warp_count, plan.shared_bytes, stream>>>(plan.params);
  if (cudaGetLastError() != cudaSuccess) {
    return Status::Unavailable("the device refused to launch the decode kernel");
  }
  return Status();
}

}  // namespace kvtier::kernels::cuda
