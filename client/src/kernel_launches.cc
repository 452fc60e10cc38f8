// SPDX-License-Identifier: Apache-2.0
#include "client/src/kernel_launches.h"

#ifdef KVTIER_CUDA_KERNELS
#include <cuda_runtime_api.h>
#endif

namespace kvtier::client {
namespace {

#ifdef KVTIER_CUDA_KERNELS
kernels::Status Upload(void* device, const void* host, uint64_t bytes,
                       kernels::cuda::Stream stream) {
  if (cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream) == cudaSuccess) {
    return kernels::Status();
  }
  return kernels::Status::Unavailable("the tables could not be copied to the device");
}

constexpr KernelLaunches kCompiled = {.upload = &Upload,
                                      .seal = &kernels::cuda::SealBlocks,
                                      .gather = &kernels::cuda::GatherBlocks,
                                      .decode = &kernels::cuda::DecodeBatch};
const KernelLaunches* g_launches = &kCompiled;
#else
const KernelLaunches* g_launches = nullptr;
#endif

}  // namespace

const KernelLaunches* GetKernelLaunches() { return g_launches; }
void SetKernelLaunches(const KernelLaunches* launches) { g_launches = launches; }

}  // namespace kvtier::client
