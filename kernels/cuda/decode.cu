// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode.h"
#include "kernels/cuda/decode_kernel.h"
#include "kernels/cuda/decode_launch.h"
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

}  // namespace

Status DecodeBatch(const DecodeBatchArgs& args, Stream stream) {
  DecodePlan plan;
  if (const Status status = PlanDecode(args, kAnyDevice, &plan); !status.ok()) return status;
  DeviceLimits limits;
  if (const Status status = ReadLimits(&limits); !status.ok()) return status;
  if (const Status status = PlanDecode(args, limits, &plan); !status.ok()) return status;
  return LaunchDecode(KernelOf(args.block_shape.head_dim, plan.tiles_n), plan.params,
                      {plan.grid_size, plan.warp_count, plan.shared_bytes}, stream);
}

}  // namespace kvtier::kernels::cuda
