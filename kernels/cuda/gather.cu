// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include "kernels/cuda/gather.h"
#include "kernels/cuda/gather_kernel.h"
#include "kernels/cuda/mixed_transfer_kernel.h"
#include "kernels/cuda/transfer_params.h"

namespace kvtier::kernels::cuda {
namespace {

template <ElementType kType>
KVTIER_KERNEL(kTransferThreadsMax)
GatherKernel(const __grid_constant__ GatherParams params) {
  GatherBody<CurrentArch, kType>(params);
}

template <ElementType kType>
KVTIER_KERNEL(kTransferThreadsMax)
GatherMixedKernel(const __grid_constant__ GatherParams params) {
  MixedGatherBody<CurrentArch, kType>(params);
}

using Kernel = void (*)(GatherParams);

template <ElementType kType>
Kernel KernelOf(const LayerFormat& format) {
  return format == LayerFormat{} ? GatherKernel<kType> : GatherMixedKernel<kType>;
}

Kernel KernelOf(ElementType type, const LayerFormat& format) {
  switch (type) {
    case ElementType::kBf16:
      return KernelOf<ElementType::kBf16>(format);
    case ElementType::kFp16:
      return KernelOf<ElementType::kFp16>(format);
    case ElementType::kFp32:
      return KernelOf<ElementType::kFp32>(format);
    case ElementType::kFp8E4m3:
      return KernelOf<ElementType::kFp8E4m3>(format);
  }
  return nullptr;
}

}  // namespace

Status GatherBlocks(const GatherBlocksArgs& args, Stream stream) {
  GatherPlan plan;
  if (const Status status = PlanGather(args, &plan); !status.ok()) return status;
  const LaunchShape& shape = plan.shape;
  const Kernel kernel = KernelOf(args.k.type, args.blocks.format);
  kernel<<<dim3(shape.grid_x, shape.grid_y, shape.grid_z), dim3(shape.block_x, shape.block_y),
           shape.shared_bytes, stream>>>(plan.params);
  if (cudaGetLastError() != cudaSuccess) {
    return Status::Unavailable("the device refused to launch the gather kernel");
  }
  return Status();
}

}  // namespace kvtier::kernels::cuda
