// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include "kernels/cuda/seal.h"
#include "kernels/cuda/seal_kernel.h"
#include "kernels/cuda/transfer_params.h"

namespace kvtier::kernels::cuda {
namespace {

template <ElementType kType>
KVTIER_KERNEL(kTransferThreadsMax)
SealKernel(const __grid_constant__ SealParams params) {
  SealBody<CurrentArch, kType>(params);
}

using Kernel = void (*)(SealParams);

Kernel KernelOf(ElementType type) {
  switch (type) {
    case ElementType::kBf16:
      return SealKernel<ElementType::kBf16>;
    case ElementType::kFp16:
      return SealKernel<ElementType::kFp16>;
    case ElementType::kFp32:
      return SealKernel<ElementType::kFp32>;
    case ElementType::kFp8E4m3:
      return SealKernel<ElementType::kFp8E4m3>;
  }
  return nullptr;
}

}  // namespace

Status SealBlocks(const SealBlocksArgs& args, Stream stream) {
  SealPlan plan;
  if (const Status status = PlanSeal(args, &plan); !status.ok()) return status;
  const LaunchShape& shape = plan.shape;
  KernelOf(args.k.type)<<<dim3(shape.grid_x, shape.grid_y, shape.grid_z),
                          dim3(shape.block_x, shape.block_y), shape.shared_bytes, stream>>>(
      plan.params);
  if (cudaGetLastError() != cudaSuccess) {
    return Status::Unavailable("the device refused to launch the seal kernel");
  }
  return Status();
}

}  // namespace kvtier::kernels::cuda
