// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include "kernels/cuda/mla_transfer.h"
#include "kernels/cuda/mla_transfer_kernel.h"
#include "kernels/cuda/mla_transfer_plan.h"

namespace kvtier::kernels::cuda {
namespace {

// Names of their own, because machine_code_test.py has budgets of their own for them.
template <ElementType kType>
KVTIER_KERNEL(kTransferThreadsMax)
SealLatents(const __grid_constant__ SealParams params) {
  MlaSealBody<CurrentArch, kType>(params);
}
template <ElementType kType>
KVTIER_KERNEL(kTransferThreadsMax)
GatherLatents(const __grid_constant__ GatherParams params) {
  MlaGatherBody<CurrentArch, kType>(params);
}

template <typename Params>
Status Launch(void (*kernel)(Params), const Params& params, const LaunchShape& shape,
              Stream stream) {
  kernel<<<dim3(shape.grid_x, shape.grid_y, shape.grid_z), dim3(shape.block_x, shape.block_y),
           shape.shared_bytes, stream>>>(params);
  if (cudaGetLastError() != cudaSuccess) {
    return Status::Unavailable("the device refused to launch a kernel for latents");
  }
  return Status();
}

}  // namespace

Status SealMlaBlocks(const SealMlaBlocksArgs& args, Stream stream) {
  SealPlan plan;
  if (const Status status = PlanSealMla(args, &plan); !status.ok()) return status;
  switch (args.blocks.latent.type) {
    case ElementType::kBf16:
      return Launch(SealLatents<ElementType::kBf16>, plan.params, plan.shape, stream);
    case ElementType::kFp16:
      return Launch(SealLatents<ElementType::kFp16>, plan.params, plan.shape, stream);
    case ElementType::kFp32:
      return Launch(SealLatents<ElementType::kFp32>, plan.params, plan.shape, stream);
    case ElementType::kFp8E4m3:
      break;
  }
  return Launch(SealLatents<ElementType::kFp8E4m3>, plan.params, plan.shape, stream);
}

Status GatherMlaBlocks(const GatherMlaBlocksArgs& args, Stream stream) {
  GatherPlan plan;
  if (const Status status = PlanGatherMla(args, &plan); !status.ok()) return status;
  switch (args.blocks.latent.type) {
    case ElementType::kBf16:
      return Launch(GatherLatents<ElementType::kBf16>, plan.params, plan.shape, stream);
    case ElementType::kFp16:
      return Launch(GatherLatents<ElementType::kFp16>, plan.params, plan.shape, stream);
    case ElementType::kFp32:
      return Launch(GatherLatents<ElementType::kFp32>, plan.params, plan.shape, stream);
    case ElementType::kFp8E4m3:
      break;
  }
  return Launch(GatherLatents<ElementType::kFp8E4m3>, plan.params, plan.shape, stream);
}

}  // namespace kvtier::kernels::cuda
