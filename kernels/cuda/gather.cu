// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include "kernels/cuda/gather.h"
#include "kernels/cuda/gather_kernel.h"
#include "kernels/cuda/transfer_params.h"

namespace kvtier::kernels::cuda {
namespace {

template <ElementType kType>
KVTIER_KERNEL(kTransferThreadsMax)
GatherKernel(const __grid_constant__ GatherParams params) {
  GatherBody<CurrentArch, kType>(params);
}

using Kernel = void (*)(GatherParams);

Kernel KernelOf(ElementType type) {
  switch (type) {
    case ElementType::kBf16:
      return GatherKernel<ElementType::kBf16>;
    case ElementType::kFp16:
      return GatherKernel<ElementType::kFp16>;
    case ElementType::kFp32:
      return GatherKernel<ElementType::kFp32>;
    case ElementType::kFp8E4m3:
      return GatherKernel<ElementType::kFp8E4m3>;
  }
  return nullptr;
}

}  // namespace

Status GatherBlocks(const GatherBlocksArgs& args, Stream stream) {
  GatherPlan plan;
  if (const Status status = PlanGather(args, &plan); !status.ok()) return status;
  const LaunchShape& shape = plan.shape;
  KernelOf(args.k.type)<<<dim3(shape.grid_x, shape.grid_y, shape.grid_z),
                          dim3(shape.block_x, shape.block_y), shape.shared_bytes, stream>>>(
      plan.params);
  if (cudaGetLastError() != cudaSuccess) {
    return Status::Unavailable("the device refused to launch the gather kernel");
  }
  return Status();
}

}  // namespace kvtier::kernels::cuda
