// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/device_memory.h"
#include "tests/gpu/primitive_cases.h"

namespace kvtier::gpu {
namespace {

KVTIER_KERNEL(32)
PrimitiveKernel(kernels::cuda::PrimitiveCase which, const uint32_t* in, uint32_t* out) {
  kernels::cuda::PrimitiveBody<kernels::cuda::CurrentArch>(which, {in}, {out});
}

}  // namespace

void LaunchPrimitive(kernels::cuda::PrimitiveCase which, const uint32_t* in, uint32_t* out,
                     uint32_t block_count) {
  PrimitiveKernel<<<block_count, 32, kernels::cuda::kCaseSharedBytes>>>(which, in, out);
  CheckCuda(cudaGetLastError(), "launch of a primitive");
}

}  // namespace kvtier::gpu
