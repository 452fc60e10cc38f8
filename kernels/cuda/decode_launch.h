// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_DECODE_LAUNCH_H_
#define KVTIER_KERNELS_CUDA_DECODE_LAUNCH_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/decode.h"
#include "kernels/status.h"

// From a plan to a launch, for the decode kernels. Only nvcc reads this.

namespace kvtier::kernels::cuda {

// Attributes are cached by the runtime: no wait, and allowed while a stream is captured.
inline Status ReadLimits(DeviceLimits* limits) {
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

struct DecodeGrid {
  uint32_t size = 0;
  uint32_t warp_count = 0;
  uint32_t shared_bytes = 0;
};

// Errors: kUnavailable.
template <typename Params>
Status LaunchDecode(void (*kernel)(Params), const Params& params, const DecodeGrid& grid,
                    Stream stream) {
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(grid.shared_bytes)) != cudaSuccess) {
    return Status::Unavailable("the device refused the shared memory of the decode kernel");
  }
  kernel<<<grid.size, 32 * grid.warp_count, grid.shared_bytes, stream>>>(params);
  if (cudaGetLastError() != cudaSuccess) {
    return Status::Unavailable("the device refused to launch the decode kernel");
  }
  return Status();
}

}  // namespace kvtier::kernels::cuda

#endif  // KVTIER_KERNELS_CUDA_DECODE_LAUNCH_H_
